"""Servers that nodes' addresses lead to, one that answers and one that hangs; and an engine by itself."""

from __future__ import annotations

import http.server
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest

from pd_cache.cluster import ReferenceEngineConfig
from tests.support.cluster import ENGINE


class _Answers(http.server.BaseHTTPRequestHandler):
    asked = itertools.count()

    def do_GET(self) -> None:
        number = next(self.asked)
        body = f'pd_cache_bytes_total{{op="retrieve"}} {number * 1_000_000}\n'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


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
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def mute() -> Iterator[int]:
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield server.getsockname()[1]
