"""A small HTTP server that plays a node, a master or a collector."""

from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.waiting import beside


@contextmanager
def serving(page):
    """The port of a server that answers each path, and the body with it if there is one, with a page: bytes,
    bytes in parts, or None for 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = page(self.path, *[body] * bool(body))
            self.send_response(404 if found is None else 200)
            if found is None or isinstance(found, bytes):
                self.send_header("Content-Length", str(len(found or b"")))
                found = [found or b""]
            self.end_headers()
            for part in found:
                self.wfile.write(part)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
        beside(partial(server.serve_forever, 0.01)),
    ):
        try:
            yield server.server_port
        finally:
            server.shutdown()
