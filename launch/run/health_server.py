"""The small HTTP server of stores and cache servers: `/health` and `/metrics`."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

import pd_cache
from launch.run.supervise import RoleError
from transfer.settings import mooncake_version

_CONNECTIONS = 16
"""How many connections may be open at a time. One more is closed at once."""
_PATIENCE_S = 10.0
"""How long a connection may take to send a request, and to take the answer."""


class Response(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


def versions() -> dict[str, str]:
    """Returns what a node's `/health` says of its versions."""
    return {"version": pd_cache.__version__, "mooncake": mooncake_version()}


@contextlib.contextmanager
def exposed(
    host: str, port: int, registry: CollectorRegistry, available: Callable[[], bool | None]
) -> Iterator[tuple[str, int]]:
    """Serves `/metrics` and `/health` while the block runs. Yields the address. Port 0 means any.

    `available` returns whether the pool answers, or None while the node starts. While it starts, `/health`
    answers 503; after that always 200, because a pool that does not answer is no reason to restart the node.
    Raises RoleError if the address cannot be bound.
    """

    def respond(path: str) -> Response:
        if path == "/metrics":
            return Response(200, generate_latest(registry), CONTENT_TYPE_LATEST)
        if path == "/health":
            up = available()
            body = {"status": {None: "starting", True: "ok", False: "degraded"}[up], **versions()}
            return Response(503 if up is None else 200, msgspec.json.encode(body), "application/json")
        return Response(404, b"/metrics and /health are here\n")

    with serving(host, port, respond, _CONNECTIONS) as address:
        yield address


@contextlib.contextmanager
def serving(
    host: str, port: int, respond: Callable[[str], Response], connections: int
) -> Iterator[tuple[str, int]]:
    """Serves HTTP while the block runs, over at most `connections` connections at a time. Yields the address.

    `respond` gets the path of each request. Raises RoleError for the same reason as `exposed`.
    """
    try:
        server = _Server((host, port), _handler(respond))
    except OSError as error:
        raise RoleError(f"port {port} of {host}: {error.strerror}") from None
    server.room = threading.BoundedSemaphore(connections)
    thread = threading.Thread(target=server.serve_forever, name="pd-cache-http", daemon=True)
    thread.start()
    try:
        yield str(server.server_address[0]), server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(socketserver.ThreadingTCPServer):
    """An HTTPServer would look up the host's name first, which may wait for a name server."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128
    room: threading.BoundedSemaphore

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        if self.room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs nothing, because a client that goes away in the middle is normal."""


def _handler(respond: Callable[[str], Response]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # buffered, so that an answer is one TCP segment
        timeout = _PATIENCE_S

        def do_GET(self) -> None:
            response = respond(self.path.partition("?")[0])
            self.send_response(response.status)
            self.send_header("content-type", response.kind)
            self.send_header("content-length", str(len(response.body)))
            self.close_connection = True
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(response.body)

        def log_message(self, *_: object) -> None:
            """Logs nothing, because a scrape is normal."""

    return Handler
