"""Servers that nodes' addresses lead to, one that answers and one that hangs; and an engine by itself."""

from __future__ import annotations

import http.server
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest

from pd_cache.cluster import ReferenceEngineConfig
from tests.support.cluster import ENGINE


@contextmanager
def serving(page: Callable[[str], bytes | None]) -> Iterator[int]:
    """The port of a server that answers each path with a page, or with 404 where there is none."""

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[list[int]], list[int]]]:
    """What an engine without any cache answers to a prompt of `cluster_file`'s model."""
    from launch.engines.reference import GenerationRequest, ReferenceEngine  # torch, which most tests here do not need

    config = msgspec.convert(ENGINE, ReferenceEngineConfig)
    with closing(ReferenceEngine.open(config)) as engine:

        def answer(prompt: list[int]) -> list[int]:
            request = GenerationRequest(prompt=tuple(prompt), max_tokens=8)
            return [event.token for event in engine.submit(request)]

        yield answer


@pytest.fixture
def well() -> Iterator[int]:
    """Answers with metrics of a node that loads."""
    asked = itertools.count()
    with serving(lambda _: f'pd_cache_bytes_total{{op="retrieve"}} {next(asked) * 1_000_000}\n'.encode()) as port:
        yield port


@pytest.fixture
def mute() -> Iterator[int]:
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield server.getsockname()[1]
