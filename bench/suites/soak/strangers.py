"""Programs that misbehave: clients towards the proxy, engines towards the cache server, nodes towards etcd.

They must not be able to hurt anyone but themselves.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import zmq

import pd_cache
from bench.suites.soak.kinds import NODES
from launch.discovery.etcd import prefix_of
from launch.discovery.stubs import load_etcd3
from pd_cache.wire.messages import Hello, Lookup, Message, StatusQuery, encode, join_names

_KEPT_OPEN = 24
"""Most connections that a stranger keeps open at the same time."""


class Stranger(threading.Thread):
    """Misbehaves until `leave`."""

    def __init__(self, seed: int) -> None:
        super().__init__(name="stranger", daemon=True)
        self.rng = random.Random(seed)
        self.gone = threading.Event()
        self.acts = 0

    def leave(self) -> None:
        """Ends it, with all its connections."""
        self.gone.set()
        self.join(10.0)


class StrangeClient(Stranger):
    """Bodies cut off, headers that come slowly, nonsense, huge numbers, connections that end in the middle."""

    def __init__(self, address: tuple[str, int], seed: int) -> None:
        super().__init__(seed)
        self._address = address

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            kept_open: list[socket.socket] = []
            while not self.gone.wait(0.02):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(self._address, 1.0)
                    connection.settimeout(0.3)
                    connection.sendall(self._nonsense())
                    self.acts += 1
                    if self.rng.random() < 0.3 and len(kept_open) < _KEPT_OPEN:
                        kept_open.append(stack.enter_context(connection))  # never finished, never read
                        continue
                    with connection:
                        if self.rng.random() < 0.7:
                            connection.recv(self.rng.choice((1, 65536)))
                for slow in kept_open:
                    with contextlib.suppress(OSError):
                        slow.sendall(b"x")  # a byte at a time

    def _nonsense(self) -> bytes:
        rng = self.rng
        prompt = rng.choices(range(512), k=rng.randint(1, 200))
        usual = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "stream": True}
        body = rng.choice((
            json.dumps({**usual, "max_tokens": 10**30}).encode(),
            json.dumps({**usual, "max_tokens": -1}).encode(),
            json.dumps({**usual, "temperature": 1e-320}).encode(),
            json.dumps({**usual, "temperature": 1e308, "top_p": 1e-320, "seed": 2**80}).encode(),
            json.dumps({**usual, "prompt": [2**63] * 4}).encode(),
            json.dumps({**usual, "prompt": []}).encode(),
            json.dumps({**usual, "prompt": {"a": [None] * 100}}).encode(),
            json.dumps({**usual, "model": "x" * 100_000}).encode(),
            json.dumps({**usual, "kv_transfer_params": {"do_remote_decode": True, "prefix": "x"}}).encode(),
            json.dumps({**usual, "cache_salt": "\x00" * 5000}).encode(),
            json.dumps(usual).encode(),  # valid, but its answer may never be read
            b"[" * 100_000,
            b'{"prompt": NaN, "model": "\xff\xfe"}',
            rng.randbytes(rng.randint(1, 5000)),
            b"",
        ))  # fmt: skip
        told = rng.choice((len(body), len(body), len(body) + 1000, 10**12))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {told}\r\n"
        )
        whole = head.encode() + b"\r\n" + body
        return rng.choice((
            whole,
            whole,
            whole[: rng.randrange(1, len(whole))],
            head.encode() + b"X: " + b"y" * rng.choice((10, 20_000)),
            b"GET " + b"/" * 10_000 + b" HTTP/1.1\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFF\r\nx",
            rng.randbytes(200),
        ))  # fmt: skip


class StrangeEngine(Stranger):
    """Garbage frames, messages of engines that never said hello, and hellos without a lifeline."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(seed)
        self._url = url

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while not self.gone.wait(0.05):
                self._raw()
                with _dealer(context, self._url) as one:
                    for _ in range(self.rng.randint(1, 12)):
                        frames = [self._frame() for _ in range(self.rng.choice((1, 1, 1, 2, 3)))]
                        with contextlib.suppress(zmq.ZMQError):
                            one.send_multipart(frames, zmq.NOBLOCK)
                            self.acts += 1
                    time.sleep(self.rng.choice((0.0, 0.01)))
        finally:
            context.destroy(0)

    def _frame(self) -> bytes:
        rng = self.rng
        usual = Hello(uuid.UUID(int=rng.getrandbits(128)).hex, "worker", pd_cache.__version__, model="stranger@1", block_size=16)  # fmt: skip
        messages: tuple[Message, ...] = (usual, usual, StatusQuery(), Lookup("s", join_names([rng.randbytes(16)] * 8)))
        frame = encode(rng.randrange(1, 1 << 60), rng.choice(messages))
        place = rng.randrange(len(frame))
        return rng.choice((
            frame,
            frame,
            frame[:place],
            frame[:place] + rng.randbytes(3) + frame[place:],
            rng.randbytes(rng.choice((0, 1, 15, 16, 17, 500, 100_000))),
        ))  # fmt: skip

    def _raw(self) -> None:
        """Writes straight to the socket and to the lifeline's, without ZMQ."""
        path = self._url.removeprefix("ipc://")
        for kind, where in ((socket.SOCK_STREAM, path), (socket.SOCK_SEQPACKET, f"{path}.fds")):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as one:
                one.settimeout(0.2)
                one.connect(where)
                one.sendall(self.rng.randbytes(self.rng.choice((1, 32, 64, 4000))))
                self.acts += 1


class StrangeWriter(Stranger):
    """Writes invalid records, records of nodes that do not exist, and garbage in place of real nodes' records. Deletes all in the end."""

    def __init__(self, address: tuple[str, int], cluster: str, seed: int) -> None:
        super().__init__(seed)
        self._address, self._prefix = address, prefix_of(cluster)
        self._written: set[str] = set()

    def run(self) -> None:
        while not self.gone.wait(0.1):
            with self._client() as client:
                while not self.gone.wait(0.05):
                    key = self._prefix + self.rng.choice((*NODES, "a", "b", "c\x00", "\u202e", "d/e", "f" * 500))
                    client.put(key, self._record())
                    self._written.add(key)
                    self.acts += 1
        end = time.monotonic() + 5.0
        while self._written and time.monotonic() < end:
            with self._client() as client:
                while self._written:  # a real node writes its own again
                    client.delete(min(self._written))
                    self._written.discard(min(self._written))

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """Yields a connection; the block ends if etcd does not answer."""
        host, port = self._address
        etcd3 = load_etcd3()
        client = etcd3.client(host=host, port=port, timeout=2)
        try:
            with contextlib.suppress(etcd3.Etcd3Exception, grpc.RpcError):
                yield client
        finally:
            client.close()

    def _record(self) -> bytes:
        rng = self.rng
        return rng.choice((
            b"",
            b"\xff\xfe",
            b'{"name": "a", "role": "decode", "address": "http://10.77.0.2:1", "model": "\xff"}',
            b"[" * 50_000,
            b'{"name": "a"}',
            b'{"name": "a", "role": "master", "address": "ipc:///etc"}',
            b'{"name": "b", "role": "master", "address": "10.77.0.200:0"}',
            b'{"name": "a", "role": "decode", "address": "http://10.77.0.200:1"}',  # valid, but no such node exists
            b'{"name": "b", "role": "prefill", "address": "http://10.77.0.200:1", "capacity": {"kv_tokens": 1e300}}',
            b'{"name": "a", "role": "store", "address": "10.77.0.200:1", "capacity": {"segment_bytes": -1}}',
            b'{"name": "b", "role": "cache-server", "address": "tcp://0.0.0.0:1", "lease_ttl_ms": 86400001}',
            b'{"name": "a", "role": "nobody\\u0000", "address": "http://[::1]:99999"}',
            b'{"name": "b", "role": "proxy", "address": "http://10.77.0.2:1", "namespace": {"model": {"a": []}}}',
            b'{"name": "' + b"a" * 100_000 + b'"}',
            rng.randbytes(rng.randint(1, 3000)),
        ))  # fmt: skip


@contextlib.contextmanager
def _dealer(context: zmq.Context[zmq.Socket[bytes]], url: str) -> Iterator[zmq.Socket[bytes]]:
    one: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    one.setsockopt(zmq.LINGER, 0)
    try:
        one.connect(url)
        yield one
    finally:
        one.close(0)
