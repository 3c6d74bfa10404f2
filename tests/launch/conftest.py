"""Servers that nodes' addresses lead to: one that answers, one that hangs."""

from __future__ import annotations

import http.server
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest


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
