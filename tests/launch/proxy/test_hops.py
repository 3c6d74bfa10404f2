"""What becomes of a request at its prefill and its decode node, and of one that takes too long or is given up."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.proxy import (
    EVENTS,
    Node,
    abort,
    begin,
    cluster,
    decodes,
    disconnects,
    error_of,
    hangs,
    jump,
    says,
    scenario,
    streams_then,
    until,
)

# --- the good path ---------------------------------------------------------------------------------------------------


@scenario
async def test_a_stream_is_passed_on_chunk_by_chunk() -> None:
    seen = [asyncio.Event() for _ in EVENTS]

    async def one_by_one(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        for event, was_seen in zip(EVENTS, seen, strict=True):
            await response.write(event)
            await was_seen.wait()  # the next is written when the client has this one
        return response

    async with cluster() as c:
        c.decode[0].script = [one_by_one]
        async with c.post({"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}) as response:
            assert response.content_type == "text/event-stream"
            for event, was_seen in zip(EVENTS, seen, strict=True):
                assert await response.content.readexactly(len(event)) == event
                was_seen.set()
            assert await response.content.read() == b""
        assert c.decode[0].bodies[0]["stream_options"] == {"include_usage": True}
        assert "stream_options" not in c.prefill[0].bodies[0]


@scenario
async def test_a_node_whose_name_cannot_be_looked_up_costs_no_request() -> None:
    nowhere = "http://a..b:80"
    async with cluster(prefill=[nowhere, ""], decode=[nowhere, ""]) as c:
        for _ in range(6):
            async with c.post() as response:
                assert response.status == 200


@scenario
async def test_requests_are_spread_over_the_nodes() -> None:
    async with cluster(2, 3) as c:
        for _ in range(6):
            async with c.post() as response:
                assert response.status == 200
        assert [len(node.bodies) for node in c.prefill] == [3, 3]
        assert [len(node.bodies) for node in c.decode] == [2, 2, 2]


@scenario
async def test_connections_to_nodes_are_used_again() -> None:
    async with cluster() as c:
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": "y"}):
            async with c.post(body) as response:
                await response.read()
        assert len(set(c.prefill[0].peers)) == 1
        assert len(set(c.decode[0].peers)) == 1


@scenario
async def test_a_large_prompt_and_a_large_answer_pass() -> None:
    prompt = list(range(400_000))
    answer = os.urandom(3 << 20)

    async with cluster() as c:
        c.decode[0].script = [says(answer)]
        async with c.post(data=io.BytesIO(json.dumps({"prompt": prompt}).encode())) as response:
            assert await response.read() == answer
        assert c.prefill[0].bodies[0]["prompt"] == prompt
        assert c.decode[0].bodies[0]["prompt"] == prompt


# --- the prefill hop -------------------------------------------------------------------------------------------------


@scenario
async def test_a_prefill_node_that_takes_no_connections_costs_the_connect_timeout() -> None:
    with socket.socket() as full, socket.socket() as one, socket.socket() as two:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (one, two):  # the kernel drops further handshakes now
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        async with cluster([url], 1, connect_timeout_s=0.2) as c:
            async with c.post() as response:
                assert response.status == 200
            assert c.metric("hop_failures_total", hop="prefill", reason="unreachable") == 1


# --- the decode hop --------------------------------------------------------------------------------------------------


@scenario
async def test_a_decode_node_that_comes_back_is_used_again() -> None:
    async with cluster(0, 1) as c:
        await c.decode[0].server.close()
        async with c.post() as response:
            assert response.status == 503
        port = int(c.decode[0].url.rpartition(":")[2])
        again = Node(decodes)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", again.handle)
        again.server = TestServer(app, port=port)
        await again.server.start_server()
        try:
            status = 0
            while status != 200:
                async with c.post() as response:
                    status = response.status
                await asyncio.sleep(0.05)
        finally:
            await again.stop()


@pytest.mark.parametrize(
    ("sent", "before"),
    [(EVENTS[:2], b"".join(EVENTS[:2])), ([EVENTS[0], b'data: {"cho'], EVENTS[0] + b'data: {"cho\n\n')],
)
@scenario
async def test_a_stream_that_breaks_off_ends_with_an_error_event(sent: list[bytes], before: bytes) -> None:
    async with cluster(1, 2) as c:
        c.decode[0].default = streams_then(sent, disconnects)
        async with c.post({"prompt": "x", "stream": True}) as response:
            assert response.status == 200
            body = await response.read()
        assert body.startswith(before)
        match = re.fullmatch(rb"data: (\{.*\})\n\n", body[len(before) :])
        assert match is not None
        assert json.loads(match[1])["error"]["code"] == "node_failed"
        assert c.decode[1].bodies == []
        assert c.metric("answers_cut_total", code="node_failed") == 1


@scenario
async def test_an_answer_that_is_no_stream_breaks_off_with_the_node() -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = await begin(request, b'{"id": ', **{"Content-Type": "application/json", "Content-Length": "100"})
        await asyncio.sleep(0.05)
        abort(request)
        return response

    async with cluster() as c:
        c.decode[0].script = [half]
        async with c.post() as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


# --- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow_hop", ["prefill", "decode"])
@scenario
async def test_a_request_is_answered_when_its_time_is_over(slow_hop: str) -> None:
    async with cluster(1, 1, request_timeout_s=60) as c:
        node = (c.prefill if slow_hop == "prefill" else c.decode)[0]
        node.default = hangs
        asking = asyncio.ensure_future(c.post().__aenter__())
        await until(lambda: len(node.bodies) == 1, "the node has it")
        jump(60)
        async with await asking as response:
            assert response.status == 504
            assert (await error_of(response))["code"] == "timeout"
        await until(lambda: node.hung_up == 1, "the node was let go")


@scenario
async def test_a_stream_that_stalls_ends_with_an_error_event_when_its_time_is_over() -> None:
    async with cluster(0, 1, request_timeout_s=60) as c:
        c.decode[0].default = streams_then(EVENTS[:1], hangs)
        async with c.post({"prompt": "x", "stream": True}) as response:
            assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            jump(60)
            body = await response.read()
        assert json.loads(body.removeprefix(b"data: "))["error"]["code"] == "timeout"
        await until(lambda: c.decode[0].hung_up == 1, "the node was let go")


@scenario
async def test_a_client_that_does_not_read_is_cut_off_when_its_time_is_over() -> None:
    async def floods(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    async with cluster(0, 1, request_timeout_s=60) as c:
        c.decode[0].default = floods
        host, _, port = c.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}')
        received = reader._buffer  # type: ignore[attr-defined]
        await until(lambda: bool(received), "the answer has begun")
        jump(60)
        await until(lambda: c.metric("answers_cut_total", code="timeout") == 1, "cut off")
        await until(lambda: c.decode[0].hung_up == 1 or not c.proxy.requests.running, "the node was let go")
        writer.transport.abort()
        del reader


# --- clients that go away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hop", ["prefill", "decode", "stream"])
@scenario
async def test_a_client_that_goes_away_takes_the_upstream_connection_with_it(hop: str) -> None:
    async with cluster() as c:
        node = (c.prefill if hop == "prefill" else c.decode)[0]
        node.default = streams_then(EVENTS[:1], hangs) if hop == "stream" else hangs
        asking = asyncio.ensure_future(c.post({"prompt": "x", "stream": hop == "stream"}).__aenter__())
        await until(lambda: len(node.bodies) == 1, "the node has the request")
        if hop == "stream":
            (await asking).close()
        else:
            asking.cancel()
            await asyncio.wait({asking})
        await until(lambda: node.hung_up == 1, "the node noticed")
        await until(lambda: not c.proxy.requests.running, "the proxy forgot it")
        if hop == "prefill":
            assert c.decode[0].bodies == []
        await until(lambda: c.metric("requests_total", status="499") == 1, "counted")
