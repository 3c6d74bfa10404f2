"""A publisher of KV events as vLLM's is: it keeps the last batches, and sends them again to those that ask."""

from __future__ import annotations

import threading
import time
from collections import deque

import msgspec
import zmq

from pd_cache.events import EventEndpoints, KvEvent

_BEAT_MS = 50


class EventPublisher:
    """Publishes batches, on two sockets that it binds."""

    def __init__(self, endpoints: EventEndpoints, keep_batches: int = 10_000) -> None:
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.PUB)
        self._stream.setsockopt(zmq.SNDHWM, 16_384)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, keep_batches + 16)
        self._stream.bind(endpoints.stream)
        self._router.bind(endpoints.replay)
        self._lock = threading.Lock()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=keep_batches)
        self._next, self._last_ts = 0, 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def publish(self, events: list[KvEvent]) -> None:
        """Publishes a batch."""
        self._last_ts = max(time.time(), self._last_ts + 1e-6)
        self.publish_raw(msgspec.msgpack.encode((self._last_ts, events, None)))

    def publish_raw(self, raw: bytes) -> None:
        """Publishes what need not be a batch."""
        with self._lock:
            number = self._next.to_bytes(8, "big")
            self._next += 1
            self._kept.append((number, raw))
            self._stream.send_multipart([b"", number, raw])

    def send(self, frames: list[bytes]) -> None:
        """Sends any frames on the stream."""
        with self._lock:
            self._stream.send_multipart(frames)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._stream.close(0)
        self._router.close(0)
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._router.poll(_BEAT_MS):
                continue
            subscriber, _, first = self._router.recv_multipart()
            with self._lock:
                kept = list(self._kept)
            for number, raw in (*kept, ((-1).to_bytes(8, "big", signed=True), b"")):
                if number >= first:
                    self._router.send_multipart([subscriber, b"", b"", number, raw])
