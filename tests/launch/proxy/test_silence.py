"""Nodes whose host falls silent under a request: no reset, no end of the stream, nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from launch.process import spawn_child
from tests.support.hosts import Host, Network, why_not
from tests.support.proxy import EVENTS, cluster, scenario

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
def host() -> Iterator[Host]:
    if reason := why_not():
        pytest.skip(reason)
    with closing(Network(2)) as network:
        yield network.host("node")


@pytest.fixture
def node(host: Host) -> Iterator[subprocess.Popen[bytes]]:
    """Answers with the first event of a stream, and nothing more; its stdout says when it was asked."""
    command = host.inside(sys.executable, "-c", NODE, host.address, EVENTS[0].decode())
    process = spawn_child(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_host_that_falls_silent_fails_its_request_long_before_the_deadline(
    host: Host, node: subprocess.Popen[bytes], streaming: bool
) -> None:
    asked = node.stdout
    assert asked is not None

    @scenario
    async def silence() -> None:
        async with cluster(0, [f"http://{host.address}:8100", ""]) as c:
            asking = asyncio.ensure_future(c.post({"prompt": "x", "stream": streaming}).__aenter__())
            await asyncio.to_thread(asked.readline)
            if streaming:
                response = await asyncio.wait_for(asking, 60)
                assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            host.cut()
            if streaming:
                rest = await asyncio.wait_for(response.read(), 60)
                assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "node_failed"
            else:
                response = await asyncio.wait_for(asking, 60)
                assert response.status == 200
                assert len(c.decode[0].bodies) == 1, "the other node answered"
            response.release()
            assert c.metric("hop_failures_total", hop="decode", reason="disconnected") == 1

    silence()
