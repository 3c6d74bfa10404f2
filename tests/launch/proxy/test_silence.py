"""Nodes whose host falls silent under a request: no reset, no end of the stream, nothing."""

import asyncio
import json
import sys
from contextlib import closing

import pytest

from tests.support.hosts import Network, why_not
from tests.support.pool import Process
from tests.support.proxy import EVENTS, cluster, scenario, until

NODE = """
import http.server, json, sys, threading

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if json.loads(body)["stream"]:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            event = sys.argv[2].encode()
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(event), event))
        print("asked", flush=True)
        threading.Event().wait()

server = http.server.ThreadingHTTPServer((sys.argv[1], 8100), Handler)
print("ready", flush=True)
server.serve_forever()
"""


@pytest.fixture
def host():
    if reason := why_not():
        pytest.skip(reason)
    with closing(Network(2)) as network:
        yield network.host("node")


@pytest.fixture
def node(host):
    """Answers with the first event of a stream, and nothing more; it prints a line when it was asked."""
    with Process(
        "node", host.inside(sys.executable, "-c", NODE, host.address, EVENTS[0].decode())
    ) as process:
        process.said.wait()
        yield process


@scenario
async def test_a_host_that_falls_silent_fails_its_requests_long_before_their_deadline(host, node):
    """One whose stream had begun ends with an error, another one is answered by the other node."""
    async with cluster(0, [f"http://{host.address}:8100", ""]) as c:  # by turns

        def ask(**fields):
            return asyncio.ensure_future(c.post({"prompt": "x", "stream": False, **fields}).__aenter__())

        streaming = await asyncio.wait_for(ask(stream=True), 60)
        assert await streaming.content.readexactly(len(EVENTS[0])) == EVENTS[0]
        (await ask()).release()
        waiting = ask()
        await until(lambda: node.lines == ["ready", "asked", "asked"], "both are with the node")
        host.cut()
        rest = await asyncio.wait_for(streaming.read(), 60)
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "node_failed"
        answered = await asyncio.wait_for(waiting, 60)
        assert answered.status == 200
        assert len(c.decode[0].bodies) == 2, "the other node answered"
        for response in (streaming, answered):
            response.release()
        assert c.metric("hop_failures_total", hop="decode", reason="disconnected") == 2
