"""What becomes of a request at its prefill and its decode node, and of one that takes too long or is given up."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.proxy import (
    EVENTS,
    PARAMS,
    Node,
    abort,
    answers,
    begin,
    cluster,
    decodes,
    dies_after_headers,
    disconnects,
    error_of,
    hangs,
    jump,
    says,
    scenario,
    speaks_no_http,
    streams_then,
    until,
    unused_port,
)

# --- the good path ---------------------------------------------------------------------------------------------------


@scenario
async def test_a_prompt_goes_to_a_prefill_node_and_its_cache_to_a_decode_node() -> None:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 7, "temperature": 0.5}
    async with cluster() as c:
        async with c.post(body) as response:
            assert response.status == 200
            assert await response.json() == {"id": "d", "choices": [{"text": "hello"}]}
            assert response.content_type == "application/json"
            assert response.headers["Content-Length"] == str(
                len(json.dumps({"id": "d", "choices": [{"text": "hello"}]}))
            )
        assert c.prefill[0].bodies == [
            {
                **body,
                "max_tokens": 1,
                "stream": False,
                "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
            }
        ]
        assert c.decode[0].bodies == [{**body, "kv_transfer_params": PARAMS}]
        assert c.metric("handoffs_total", result="handed_over") == 1
        assert c.metric("requests_total", status="200") == 1


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
async def test_without_prefill_nodes_requests_go_straight_to_decode() -> None:
    async with cluster(prefill=0) as c:
        async with c.post({"prompt": "x", "kv_transfer_params": {"remote_host": "evil"}}) as response:
            assert response.status == 200
        assert c.decode[0].bodies == [{"prompt": "x"}]
        assert c.metric("handoffs_total", result="no_prefill_nodes") == 1


@scenario
async def test_a_node_whose_name_cannot_be_looked_up_costs_no_request() -> None:
    nowhere = "http://a..b:80"
    async with cluster(prefill=[nowhere, ""], decode=[nowhere, ""]) as c:
        for _ in range(6):
            async with c.post() as response:
                assert response.status == 200


@scenario
async def test_a_large_body_arrives_as_it_was_sent() -> None:
    body = {"prompt": [7] * 300_000, "max_tokens": 1}
    async with cluster(prefill=0) as c:
        async with c.post(body) as response:
            assert response.status == 200
        assert c.decode[0].bodies == [body]


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


@scenario
async def test_both_hops_get_the_authorization_and_uncompressed_answers_are_asked_for() -> None:
    async with cluster() as c:
        async with c.post(headers={"Authorization": "Bearer key", "Cookie": "a=b", "X-Other": "1"}) as response:
            assert response.status == 200
        for node in (c.prefill[0], c.decode[0]):
            assert node.headers[0]["Authorization"] == "Bearer key"
            assert node.headers[0]["Accept-Encoding"] == "identity"
            assert "Cookie" not in node.headers[0]
            assert "X-Other" not in node.headers[0]


# --- the prefill hop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
@scenario
async def test_what_a_prefill_node_says_about_the_request_is_final(status: int) -> None:
    error = {
        "error": {"message": "The model `x` does not exist", "type": "NotFoundError", "param": "model", "code": status}
    }
    async with cluster(2, 1) as c:
        c.prefill[0].default = c.prefill[1].default = answers(status, error, Retry_After="3")
        async with c.post() as response:
            assert response.status == status
            assert await response.json() == error
            assert response.headers["Retry-After"] == "3"
        assert len(c.prefill[0].bodies + c.prefill[1].bodies) == 1
        assert c.decode[0].bodies == []


PREFILL_FAILURES = {
    "error": answers(500, {"error": "boom"}),
    "busy": answers(503, None),
    "redirect": answers(302, None, Location="http://127.0.0.1:1/"),
    "disconnected": disconnects,
    "cut off in its answer": dies_after_headers,
    "no json": says(b"<html>"),
    "no object": says(b"[1]"),
    "half an object": says(b'{"kv_transfer_params": {"a"'),
    "endless": says(b" " * (5 << 20)),
    "no http": speaks_no_http,
    "slow": hangs,
}


@pytest.mark.parametrize("failure", [name for name in PREFILL_FAILURES if name != "slow"])
@scenario
async def test_a_prefill_node_that_fails_is_replaced(failure: str) -> None:
    async with cluster(2, 1) as c:
        c.prefill[0].default = PREFILL_FAILURES[failure]
        async with c.post() as response:
            assert response.status == 200
            await response.read()
        assert len(c.prefill[0].bodies) == len(c.prefill[1].bodies) == 1
        assert c.decode[0].bodies[0]["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize("failure", list(PREFILL_FAILURES))
@scenario
async def test_without_a_working_prefill_node_the_decode_node_computes_the_prompt(failure: str) -> None:
    async with cluster(1, 1, prefill_timeout_s=0.2 if failure == "slow" else 10) as c:
        c.prefill[0].default = PREFILL_FAILURES[failure]
        async with c.post({"prompt": "x", "max_tokens": 3}) as response:
            assert response.status == 200
            await response.read()
        assert len(c.prefill[0].bodies) == 1
        assert c.decode[0].bodies == [{"prompt": "x", "max_tokens": 3}]
        assert c.metric("handoffs_total", result="prefill_failed") == 1
        if failure == "slow":
            await until(lambda: c.prefill[0].hung_up == 1, "the slow node was let go")
            assert c.metric("hop_failures_total", hop="prefill", reason="timeout") == 1


@scenario
async def test_a_prefill_node_that_refuses_connections_is_skipped_for_a_while() -> None:
    dead = f"http://127.0.0.1:{unused_port()}"
    async with cluster([dead, ""], 1) as c:
        for _ in range(3):
            async with c.post() as response:
                assert response.status == 200
        assert len(c.prefill[0].bodies) == 3
        assert c.metric("hop_failures_total", hop="prefill", reason="unreachable") == 1
        async with c.get("/health") as response:
            assert (await response.json())["prefill"] == {dead: False, c.prefill[0].url: True}


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


@scenario
async def test_a_prefill_node_may_have_stored_nothing() -> None:
    async with cluster() as c:
        c.prefill[0].script = [answers(200, {"choices": []})]
        async with c.post({"prompt": "x"}) as response:
            assert response.status == 200
        assert c.decode[0].bodies == [{"prompt": "x"}]
        assert c.metric("handoffs_total", result="nothing_stored") == 1


# --- the decode hop --------------------------------------------------------------------------------------------------

DECODE_FAILURES = {
    "error": answers(500, {"error": "boom"}),
    "busy": answers(503, None),
    "redirect": answers(302, None, Location="http://127.0.0.1:1/"),
    "disconnected": disconnects,
    "dead before its first byte": dies_after_headers,
    "no http": speaks_no_http,
}


@pytest.mark.parametrize("failure", list(DECODE_FAILURES))
@pytest.mark.parametrize("streaming", [False, True])
@scenario
async def test_a_decode_node_that_fails_before_its_first_byte_is_replaced(failure: str, streaming: bool) -> None:
    async with cluster(1, 2) as c:
        c.decode[0].default = DECODE_FAILURES[failure]
        async with c.post({"prompt": "x", "stream": streaming}) as response:
            assert response.status == 200
            body = await response.read()
            assert body == b"".join(EVENTS) if streaming else b"hello" in body
        assert len(c.prefill[0].bodies) == 1  # not computed again
        assert c.decode[0].bodies == c.decode[1].bodies


@pytest.mark.parametrize("failure", [name for name in DECODE_FAILURES if name not in ("busy", "error")])
@scenario
async def test_when_no_decode_node_is_left_the_client_may_come_back(failure: str) -> None:
    async with cluster(1, 1) as c:
        c.decode[0].default = DECODE_FAILURES[failure]
        async with c.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await error_of(response))["type"] == "server_error"


@scenario
async def test_while_all_decode_nodes_are_down_requests_are_refused_at_once() -> None:
    async with cluster(0, [f"http://127.0.0.1:{unused_port()}"]) as c:
        for _ in range(2):
            async with c.post() as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
        assert c.metric("hop_failures_total", hop="decode", reason="unreachable") == 1
        async with c.get("/health") as response:
            assert response.status == 503


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


@scenario
async def test_a_full_queue_is_passed_on_with_its_retry_after() -> None:
    body = {"error": {"message": "queue is full", "type": "server_error", "param": None, "code": "overloaded"}}
    async with cluster(1, 2) as c:
        c.decode[0].default = answers(503, body, Retry_After="7")
        c.decode[1].default = disconnects
        async with c.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "7"
            assert await response.json() == body
            assert response.headers["X-Request-Id"]


@pytest.mark.parametrize("status", [400, 404, 429])
@scenario
async def test_what_a_decode_node_says_about_the_request_is_final(status: int) -> None:
    async with cluster(1, 2) as c:
        c.decode[0].default = c.decode[1].default = answers(status, {"error": {"message": "no"}})
        async with c.post() as response:
            assert response.status == status
            assert await response.json() == {"error": {"message": "no"}}
        assert len(c.decode[0].bodies + c.decode[1].bodies) == 1


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
async def test_a_body_that_does_not_arrive_is_a_408() -> None:
    answered = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await answered.wait()
        yield b'"x"}'

    async with cluster(request_timeout_s=0.3) as c:
        async with c.post(data=body()) as response:
            assert response.status == 408
            await error_of(response)
            answered.set()
        assert c.prefill[0].bodies == []


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
        await until(lambda: c.decode[0].hung_up == 1 or not c.proxy.deliveries.running, "the node was let go")
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
        await until(lambda: not c.proxy.deliveries.running, "the proxy forgot it")
        if hop == "prefill":
            assert c.decode[0].bodies == []
        await until(lambda: c.metric("requests_total", status="499") == 1, "counted")
