"""Servers that nodes' addresses lead to, one that answers and one that hangs; and an engine by itself."""

import itertools
import socket
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from pd_cache.cluster import ReferenceEngineConfig
from tests.support.cluster import ENGINE


@contextmanager
def serving(page):
    """The port of a server that answers each path with a page, or with 404 where there is none."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = page(self.path)
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(found or b"")))
            self.end_headers()
            self.wfile.write(found or b"")

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def alone():
    """What an engine without any cache answers to a prompt of `cluster_file`'s model."""
    # torch, which most tests here do not need
    from launch.engines.reference import GenerationRequest, ReferenceEngine

    config = msgspec.convert(ENGINE, ReferenceEngineConfig)
    with closing(ReferenceEngine.open(config)) as engine:

        def answer(prompt):
            request = GenerationRequest(prompt=tuple(prompt), max_tokens=8)
            return [event.token for event in engine.submit(request)]

        yield answer


@pytest.fixture
def well():
    """Answers with metrics of a node that loads."""
    asked = itertools.count()
    with serving(
        lambda _: f'pd_cache_bytes_total{{op="retrieve"}} {next(asked) * 1_000_000}\n'.encode()
    ) as port:
        yield port


@pytest.fixture
def mute():
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield server.getsockname()[1]
