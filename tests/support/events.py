"""A publisher of KV events as vLLM's is: it keeps the last batches, and sends them again to those that
ask."""

import threading
import time

import msgspec
import zmq

_BEAT_MS = 50


class EventPublisher:
    """Publishes batches, on two sockets that it binds."""

    def __init__(self, endpoints, *, most_replayed=None):
        """With `most_replayed`, replays end after so many batches without a word, as vLLM's do if its
        socket's queue is full."""
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.PUB)
        self._stream.setsockopt(zmq.SNDHWM, 16_384)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 16_384)
        self._stream.bind(endpoints.stream)
        self._router.bind(endpoints.replay)
        self._lock = threading.Lock()
        self._most_replayed = most_replayed
        self._kept = []
        self._next, self._last_ts = 0, 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def publish(self, events):
        """Publishes a batch."""
        self._last_ts = max(time.time(), self._last_ts + 1e-6)
        self.publish_raw(msgspec.msgpack.encode((self._last_ts, events, None)))

    def publish_raw(self, raw):
        """Publishes what need not be a batch."""
        with self._lock:
            number = self._next.to_bytes(8, "big")
            self._next += 1
            self._kept.append((number, raw))
            self._stream.send_multipart([b"", number, raw])

    def send(self, frames):
        """Sends any frames on the stream."""
        with self._lock:
            self._stream.send_multipart(frames)

    def close(self):
        self._closing.set()
        self._thread.join()
        self._stream.close(0)
        self._router.close(0)
        self._context.destroy(linger=0)

    def _serve(self):
        while not self._closing.is_set():
            if not self._router.poll(_BEAT_MS):
                continue
            subscriber, _, first = self._router.recv_multipart()
            with self._lock:
                kept = [one for one in self._kept if one[0] >= first][: self._most_replayed]
            end = [] if self._most_replayed else [((-1).to_bytes(8, "big", signed=True), b"")]
            for number, raw in kept + end:
                self._router.send_multipart([subscriber, b"", b"", number, raw])
