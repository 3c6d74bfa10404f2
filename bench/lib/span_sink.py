"""A collector of spans that throws them away: what `bench proxy --traces` sends to. Prints `ready PORT`, and ends with its standard input."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class SinkHandler(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def main() -> None:
    """Serves until the standard input ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), SinkHandler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"ready {server.server_address[1]}", flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
