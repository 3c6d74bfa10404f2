"""What becomes of a request at its nodes, of one that takes too long or is given up, and what the proxy
remembers of it.

`tests/golden/test_proxy_answers.py` has what clients get in each case, and `test_proxy_ways.py` which nodes
are asked if some fail.
"""

import asyncio
import contextlib
import io
import json
import os
import re
import resource
import socket
import time
from functools import partial

import aiohttp
import msgspec
import pytest
import uvloop
from aiohttp import web

from launch.proxy import nodes, serving
from launch.proxy import requests as requests_module
from launch.proxy.app import Proxy
from launch.proxy.metrics import REPORT_BYTES, read_report
from pd_cache.cluster import ProxyConfig
from pd_cache.reasons import RequestReport
from tests.support.proxy import (
    EVENTS,
    PARAMS,
    STREAMED,
    OneByOne,
    abort,
    answers,
    bearer,
    begin,
    both_faces,
    cluster,
    decodes,
    disconnects,
    error_of,
    files_of,
    hangs,
    jump,
    says,
    scenario,
    streams_then,
    until,
    waits_for,
)

BOOM = {"error": {"message": "boom", "type": "server_error", "param": None, "code": None}}
QUEUE_FULL = {
    "error": {
        "message": "The engine has reached its prefill token backlog limit. Please try again later or on a different instance.",
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }
}
"""What vLLM 0.32 and 0.33 answer beyond `--max-num-queued-tokens` (`MaxQueuedTokensError`)."""
PREFILL = RequestReport.of(600, 256, reason="never_stored")
DECODE = RequestReport.of(600, 256, found=512, loaded=512, reason="evicted")
TRAP = json.dumps({"text": '"report": {"asked": 1}'})

# --- answers pass -------------------------------------------------------------------------------------------


@both_faces
@scenario
async def test_a_stream_is_passed_on_chunk_by_chunk():
    async with cluster() as c:
        c.decode[0].default = stream = OneByOne()
        async with c.post(STREAMED) as response:
            assert response.content_type == "text/event-stream"
            await stream.read(response)
            assert await response.content.read() == b""


@scenario
async def test_requests_are_spread_over_the_nodes_and_connections_to_them_are_used_again():
    nowhere = "http://a..b:80"  # a name that cannot be looked up costs no request
    async with cluster(["", "", nowhere], ["", nowhere, "", ""]) as c:
        for number in range(6):
            await c.ask({"prompt": "x", "stream": number % 2 == 0})
        assert [len(node.bodies) for node in c.prefill] == [3, 3]
        assert [len(node.bodies) for node in c.decode] == [2, 2, 2]
        assert [len(set(node.peers)) for node in (*c.prefill, *c.decode)] == [1] * 5


@scenario
async def test_a_node_that_answers_nothing_is_replaced_by_another():
    async with cluster(0, 2) as c:
        c.decode[0].default = says(b"")
        assert json.loads(await c.ask())["id"] == "d"
        assert c.metric("hop_failures_total", hop="decode", reason="garbage") == 1


@scenario
async def test_a_node_that_dies_at_any_byte_is_replaced_until_the_first_of_its_answer():
    head, whole = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"".join(EVENTS),
    )
    raw, died = head + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS), []

    async def dies(reader, writer):
        await reader.readuntil(b"}")
        died.append(len(died))
        writer.write(raw[: died[-1]])
        writer.close()

    async with await asyncio.start_server(dies, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with cluster(0, [url, ""], failures=len(raw)) as c:
            while len(died) < len(raw):
                times = len(died)
                text, cut, _ = (await c.ask(STREAMED)).partition(b'data: {"error"')
                assert bool(cut) == (len(died) > times and died[-1] > raw.index(EVENTS[0]))
                assert whole.startswith(text.removesuffix(b"\n\n")) if cut else text == whole


@both_faces
@scenario
async def test_a_large_prompt_and_a_large_answer_pass():
    prompt, answer = list(range(400_000)), os.urandom(3 << 20)
    async with cluster() as c:
        c.decode[0].script = [says(answer)]
        async with c.post(data=io.BytesIO(json.dumps({"prompt": prompt}).encode())) as response:
            assert await response.read() == answer
        assert c.prefill[0].bodies[0]["prompt"] == c.decode[0].bodies[0]["prompt"] == prompt


@pytest.mark.parametrize("version", [aiohttp.HttpVersion10, aiohttp.HttpVersion11])
@scenario
async def test_the_pieces_of_an_answer_pass_without_steps_of_their_request(version, monkeypatch):
    steps = []

    async def read_some(answer):
        steps.append(answer)
        return await nodes.read_some(answer)

    monkeypatch.setattr(serving, "read_some", read_some)
    pieces = [*EVENTS[:1] * 200, *EVENTS]
    async with cluster(0, 1) as c, aiohttp.ClientSession(version=version) as c.session:
        for length in ({}, {"Content-Length": str(len(b"".join(pieces)))}):
            c.decode[0].default = partial(begin_and_end, pieces, length)
            assert await c.ask(STREAMED) == b"".join(pieces)
            assert await c.ask(STREAMED) == b"".join(pieces)
        assert len(steps) < 20
        assert len(set(c.decode[0].peers)) == 1


@pytest.mark.parametrize("version", [aiohttp.HttpVersion10, aiohttp.HttpVersion11])
@scenario
async def test_an_answer_passes_unchanged_however_its_chunks_are_cut_into_packets(version):
    event, done = EVENTS[0], EVENTS[-1]
    within = chunk(event)  # looks like a chunk of its own
    large = chunk(done + within + done)
    middle = large.index(within)
    packets = [  # each with the part of the answer that it holds
        *[(chunk(event), event)] * 3,
        (chunk(event)[:20], event[: 20 - chunk(event).index(event)]),
        (chunk(event)[20:], event[20 - chunk(event).index(event) :]),
        (chunk(event), event),
        (chunk(event) * 2, event * 2),
        *[(chunk(event), event)] * 2,
        (large[:middle], done),
        (within, within),
        (large[middle + len(within) :], done),
        *[(chunk(done), done)] * 2,
        (chunk(event) + b"0\r\n\r\n", event),
    ]
    received = asyncio.Semaphore(0)

    async def sends(request):
        await begin(request, done)
        for packet, _ in packets:
            await received.acquire()
            request.transport.write(packet)
        await hangs(request)

    async with cluster(0, 1) as c, aiohttp.ClientSession(version=version) as c.session:
        c.decode[0].default = sends
        async with c.post(STREAMED) as response:
            assert await response.content.readexactly(len(done)) == done
            for _, part in packets:
                received.release()
                assert await response.content.readexactly(len(part)) == part
            assert await response.content.read() == b""


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


async def begin_and_end(pieces, headers, request):
    response = await begin(request, *pieces, **headers)
    await response.write_eof()
    return response


@scenario
async def test_a_client_that_reads_no_more_holds_the_node_up_and_misses_no_byte():
    pieces, sent = [os.urandom(size) for size in (70_000, 3, 200_000)] * 200, 0

    async def writes(request):
        nonlocal sent
        response = await begin(request)
        for piece in pieces:
            await response.write(piece)
            sent += len(piece)
        return response

    async with cluster(0, 1) as c:
        c.decode[0].default = writes
        async with c.post(STREAMED) as response:
            before = -1
            while sent > before:  # all of them are in this loop
                before = sent
                for _ in range(100):
                    await asyncio.sleep(0)
            assert sent < 27_000_000, "half of it"
            assert await response.read() == b"".join(pieces)


# --- nodes that fail, and clients that make them ------------------------------------------------------------


@scenario
async def test_lists_of_models_neither_hide_a_broken_node_nor_count_against_one():
    async def only_lists(request):
        return await (decodes if request.method == "GET" else answers(500, BOOM))(request)

    async def no_lists(request):
        return await (answers(500) if request.method == "GET" else decodes)(request)

    async with cluster(0, 2, failures=2, long_skips=True) as c:
        c.decode[0].default = only_lists
        for _ in range(8):
            for asking in (c.get("/v1/models"), c.post()):
                async with asking as response:
                    assert response.status == 200
        assert c.decode[0].paths.count("/v1/completions") == 2
        c.decode[0].default = c.decode[1].default = no_lists
        for asking, status in ((c.get("/v1/models"), 503), (c.post(), 200)):
            async with asking as response:
                assert response.status == status


@scenario
async def test_a_queue_of_tokens_that_is_full_at_one_node_costs_no_request_and_at_all_of_them_is_the_clients_answer():
    async with cluster(0, 2) as c:
        c.decode[0].default = answers(503, QUEUE_FULL)
        for _ in range(6):
            await c.ask(STREAMED)
        assert len(c.decode[0].bodies) > 1, "a full queue says nothing against the node"
        c.decode[1].default = answers(503, QUEUE_FULL)
        async with c.post() as response:
            assert (response.status, await response.json()) == (503, QUEUE_FULL)
            assert response.headers["Retry-After"] == "1", "which vLLM does not send"


@both_faces
@pytest.mark.parametrize("status", [400, 404, 413, 429])
@scenario
async def test_what_prefill_nodes_refuse_another_one_or_the_decode_node_computes(status):
    async with cluster(3, 1) as c:
        refuses = c.prefill[0]
        refuses.default = answers(status, BOOM)
        for _ in range(3):
            await c.ask({"prompt": "x"})
        assert refuses.bodies
        assert "kv_transfer_params" in c.decode[0].bodies[-1], "another prefill node has computed it"
        for node in c.prefill:
            node.default = answers(status, BOOM)
        asked = sum(len(node.bodies) for node in c.prefill)
        await c.ask({"prompt": "x"})
        assert "kv_transfer_params" not in c.decode[0].bodies[-1]
        assert sum(len(node.bodies) for node in c.prefill) == asked + 2, "two refusals are enough"
        assert c.metric("handoffs_total", result="prefill_refused") == 1
        c.decode[0].default = answers(status, QUEUE_FULL)
        assert json.loads(await c.ask(status=status)) == QUEUE_FULL, "the decode node's words"


@scenario
async def test_an_error_whose_body_never_ends_does_not_hold_up_the_next_node():
    async def endless(request):
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        return await hangs(request)

    async with cluster(0, 2) as c:
        c.decode[0].default = endless
        await c.ask()


@scenario
async def test_a_burst_of_failures_is_retried_as_far_as_the_budget_goes(monkeypatch):
    monkeypatch.setattr("launch.proxy.routing.node_pool._A_SECOND", 0.0)
    async with cluster(0, 2) as c:
        c.decode[0].default = c.decode[1].default = says(b"", 500)
        c.proxy.requests.retries._left = 1.0
        for _ in range(4):
            await c.ask(status=500)
        assert len(c.decode[0].bodies + c.decode[1].bodies) == 5


@scenario
async def test_a_prefill_node_that_takes_no_connections_costs_the_connect_timeout(monkeypatch):
    monkeypatch.setattr(nodes, "CONNECT_TIMEOUT_S", 0.2)
    with socket.socket() as full, socket.socket() as one, socket.socket() as two:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (one, two):  # the kernel drops further handshakes now
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        async with cluster([url], 1) as c:
            await c.ask()
            assert c.metric("hop_failures_total", hop="prefill", reason="unreachable") == 1


@scenario
async def test_tens_of_thousands_of_tiny_chunks_that_come_at_once_are_passed_on():
    async def floods(request):
        response = await begin(request, EVENTS[0])
        request.transport.write(b"1\r\nx\r\n" * 100_000)
        await response.write_eof()
        return response

    async with cluster() as c:
        c.decode[0].default = floods
        assert await c.ask(STREAMED) == EVENTS[0] + b"x" * 100_000


async def sends_no_chunk(request):
    request.transport.write(b"no chunk\r\n")


@pytest.mark.parametrize("then", [disconnects, sends_no_chunk])
@scenario
async def test_a_stream_that_breaks_off_within_an_event_ends_with_an_error_event_of_its_own(then):
    sent, was_read = [EVENTS[0], b'data: {"cho'], asyncio.Event()
    async with cluster(1, 2) as c:
        c.decode[0].default = streams_then(sent, waits_for(was_read, then))
        async with c.post(STREAMED) as response:
            assert response.status == 200
            body = await response.content.readexactly(len(b"".join(sent)))
            was_read.set()
            body += await response.read()
        before = b"".join(sent) + b"\n\n"
        assert body.startswith(before)
        match = re.fullmatch(rb"data: (\{.*\})\n\n", body[len(before) :])
        assert json.loads(match[1])["error"]["code"] == "node_failed"
        assert c.decode[1].bodies == []
        assert c.metric("answers_cut_total", code="node_failed") == 1


@both_faces
@scenario
async def test_an_answer_that_is_no_stream_breaks_off_with_the_node():
    arrived = asyncio.Event()

    async def half(request):
        response = await begin(
            request, b'{"id": ', **{"Content-Type": "application/json", "Content-Length": "100"}
        )
        await arrived.wait()
        abort(request)
        return response

    async with cluster() as c:
        c.decode[0].script = [half]
        async with c.post() as response:
            arrived.set()
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


# --- deadlines, and clients that go away --------------------------------------------------------------------


@scenario
async def test_a_prefill_or_a_stream_that_stalls_ends_when_the_requests_time_is_over():
    async with cluster(1, 1, request_timeout_s=20) as c:
        c.prefill[0].script = [hangs]
        asking = asyncio.ensure_future(c.post().__aenter__())
        await until(lambda: len(c.prefill[0].bodies) == 1, "the node has it")
        jump(20)
        async with await asking as response:
            assert (response.status, (await error_of(response))["code"]) == (504, "timeout")
        c.decode[0].default = streams_then(EVENTS[:1], hangs)
        async with c.post(STREAMED) as response:
            assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            jump(20)
            body = await response.read()
        assert json.loads(body.removeprefix(b"data: "))["error"]["code"] == "timeout"
        await until(lambda: c.prefill[0].hung_up == c.decode[0].hung_up == 1, "the nodes were let go")


@scenario
async def test_a_client_that_does_not_read_is_cut_off_when_its_time_is_over():
    async def floods(request):
        response = await begin(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    async with cluster(0, 1, request_timeout_s=60) as c:
        c.decode[0].default = floods
        host, _, port = c.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}')
        received = reader._buffer
        await until(lambda: bool(received), "the answer has begun")
        jump(60)
        await until(lambda: c.metric("answers_cut_total", code="timeout") == 1, "cut off")
        await until(lambda: c.decode[0].hung_up == 1 or not c.proxy.requests.running, "the node was let go")
        writer.transport.abort()


@pytest.mark.parametrize("hop", ["prefill", "decode", "stream"])
@scenario
async def test_a_client_that_goes_away_takes_the_upstream_connection_with_it(hop):
    async with cluster() as c:
        node = (c.prefill if hop == "prefill" else c.decode)[0]
        node.default = streams_then(EVENTS[:1], hangs) if hop == "stream" else hangs
        asking = asyncio.ensure_future(c.post({"prompt": "x", "stream": hop == "stream"}).__aenter__())
        await until(lambda: len(node.bodies) == 1, "the node has the request")
        waiting = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
        assert "Requests._whole" not in waiting, (
            "a task of its own could fail when nobody waits for it any more"
        )
        if hop == "stream":
            (await asking).close()
        else:
            asking.cancel()
            await asyncio.wait({asking})
        await until(lambda: node.hung_up == 1, "the node noticed")
        await until(lambda: not c.proxy.requests.running, "the proxy forgot it")
        assert hop != "prefill" or c.decode[0].bodies == []
        await until(lambda: c.metric("requests_total", status="499") == 1, "counted")


def test_clients_that_leave_in_the_middle_of_streams_are_no_errors_of_the_event_loop(caplog):
    async def writes(request):
        response = await begin(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(EVENTS[0])
                await asyncio.sleep(0)
        return response

    async def leave():
        async with cluster(0, 1) as c:
            c.decode[0].default = writes

            async def read_some_and_leave():
                async with c.post(STREAMED) as response:
                    for _ in range(3):
                        await response.content.readany()
                    response.close()

            await asyncio.gather(*(read_some_and_leave() for _ in range(64)))

    uvloop.run(leave())
    assert not [record.getMessage() for record in caplog.records if record.name == "launch.http"]


# --- what the proxy itself answers, and logs ----------------------------------------------------------------


@both_faces
@scenario
async def test_a_body_that_turns_out_to_be_too_large_is_a_413():
    async def chunks():
        for _ in range(17):
            yield b" " * (1 << 20)

    async with cluster() as c, c.post(data=chunks()) as response:
        assert (response.status, (await error_of(response))["code"]) == (413, "request_too_large")


@both_faces
@scenario
async def test_a_fault_of_the_proxy_is_a_500_without_its_traceback(monkeypatch):
    def broken(body):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(requests_module, "Completion", broken)
    async with cluster() as c, c.post() as response:
        error = await error_of(response)
        assert (response.status, error["code"]) == (500, "internal_error")
        assert "secret" not in error["message"]


@both_faces
@scenario
async def test_the_log_of_the_proxy_tells_each_request_by_its_id_and_no_key(caplog, tmp_path):
    caplog.set_level("INFO", logger="launch.proxy")
    async with cluster(1, 2, **files_of(tmp_path, api_keys="alice sk-0123456789abcdef\n")) as c:
        c.prefill[0].default = disconnects
        await c.ask(headers=bearer("sk-0123456789abcdef", X_Request_Id="it-is-me"))
        await c.ask(headers={"X-Request-Id": "nobody"}, status=401)
        url = c.prefill[0].url
    (failed,) = [
        line for line in caplog.messages if line.startswith(f"request it-is-me: prefill node {url}: ")
    ]
    assert "disconnected" in failed
    (ended,) = [line for line in caplog.messages if line.startswith("request it-is-me: 200 in ")]
    assert re.search(rf"client=alice prefill={url} decode=http://", ended)
    assert any(line.startswith("request nobody: 401 in ") for line in caplog.messages)
    assert "sk-0123456789abcdef" not in caplog.text


@scenario
async def test_requests_that_cannot_be_read_are_one_line_in_the_log_without_a_byte_of_theirs(caplog):
    secret = b"Bearer sk-0123456789abcdef"
    proxy = Proxy(ProxyConfig())
    await proxy.setup()
    try:
        port = int((await proxy.listen("127.0.0.1", 0)).rpartition(":")[2])
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nAuthorization: " + secret + b"\r\nno header\r\n\r\n{prompt}")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.0 400 Bad Request\r\n")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
            writer.close()
    finally:
        await proxy.close()
    text = "\n".join(
        f"{record.getMessage()} {record.exc_text or ''} {record.exc_info}" for record in caplog.records
    )
    assert secret.decode() not in text
    assert "prompt" not in text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("headers", [{"X": "x" * 9000}, {f"X-{number}": "x" for number in range(200)}])
@scenario
async def test_headers_beyond_the_limits_are_openais_error_and_say_what_is_allowed(headers):
    async with cluster(0, 1) as c, c.post(headers=headers) as response:
        assert response.status == 400
        assert "128 headers, and lines of 8190 bytes" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("allowed", [("https://chat.example",), ("*",), ()])
@scenario
async def test_web_pages_of_the_origins_in_the_file_may_ask_and_read_also_streams_and_errors(allowed):
    page = {"Origin": "https://chat.example"}
    asking = {
        **page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    async with cluster(0, 1, cors_origins=allowed) as c:

        async def shared(method, path, headers, body=None):
            async with c.session.request(method, c.url + path, headers=headers, json=body) as response:
                told = {
                    name[21:]: value for name, value in response.headers.items() if "Access-Control" in name
                }
                return response.status, told.get("Origin"), told.get("Headers")

        origin = allowed[0] if allowed else None
        first = await shared("OPTIONS", "/v1/completions", asking)
        assert first == ((200, origin, "authorization") if allowed else (405, None, None))
        stream = STREAMED
        assert (await shared("POST", "/v1/completions", page, stream))[:2] == (200, origin)
        assert (await shared("POST", "/v1/completions", page, {}))[:2] == (400, origin)
        other = {**asking, "Origin": "https://elsewhere.example"}
        everybody = allowed == ("*",)
        assert (await shared("OPTIONS", "/v1/completions", other))[:2] == (
            (200, "*") if everybody else (405, None)
        )
        assert (await shared("POST", "/v1/completions", {}, stream))[:2] == (200, None)


@both_faces
@scenario
async def test_the_root_leads_to_the_page():
    async with cluster(0, 1) as c, c.get("/") as response:
        assert (response.status, response.url.path) == (200, "/ui")


@scenario
async def test_connections_without_a_file_descriptor_are_one_line_in_the_log_and_are_served_later(caplog):
    async with cluster(0, 1) as c:
        host, _, port = c.url.removeprefix("http://").rpartition(":")
        clients, spare = [socket.socket() for _ in range(3)], []

        def refused():
            """The lines about it; what else lacks descriptors has its own."""
            said = "socket.accept() out of system resource: OSError(24, 'Too many open files')"
            return [record for record in caplog.records if said in record.getMessage()]

        began = time.monotonic()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), before[1]))
        try:
            with contextlib.suppress(OSError):  # none is left
                while True:
                    spare.append(os.dup(0))
            for client in clients:
                client.connect((host, int(port)))
            await until(lambda: bool(refused()), "it cannot accept them")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for opened in (*spare, *(client.detach() for client in clients)):
                os.close(opened)
        await c.ask()
        assert len(refused()) <= 1 + (time.monotonic() - began) // 10, "one line in 10 s"
        assert not any(record.exc_info for record in refused())


@both_faces
@scenario
async def test_a_request_id_that_is_missing_or_strange_is_replaced():
    async with cluster() as c:
        for given in ("", "x" * 129, "a b", "a\tb", "é", 'a"b'):
            async with c.post(headers={"X-Request-Id": given} if given else {}) as response:
                made = response.headers["X-Request-Id"]
                assert re.fullmatch("[0-9a-f]{32}", made)
            assert c.prefill[0].headers[-1]["X-Request-Id"] == made
        async with c.get("/nowhere") as response:
            assert re.fullmatch("[0-9a-f]{32}", response.headers["X-Request-Id"])


# --- what it remembers --------------------------------------------------------------------------------------


def told(report):
    return {"pd_cache": {"report": msgspec.to_builtins(report), "prefill": None}}


def test_a_report_is_found_at_the_end_of_an_answer_and_not_in_a_generated_text():
    answer = json.dumps(
        {"choices": [{"text": "x" * 100_000}], **told(DECODE), "text": '"report": {"asked": 1}'}
    ).encode()
    assert read_report(answer) == read_report(answer[-REPORT_BYTES:]) == DECODE
    for other in (
        *(
            b"",
            b'"report"',
            b'"report": {',
            b'{"report": [1, 2]}',
            TRAP.encode(),
            b'"report": {"asked": "\xff"}',
        ),
        *(b'"report": {"asked": 1, "reason": "because"}', b'"report": {"asked": -1}'),
    ):
        assert read_report(other) is None


@scenario
async def test_a_streamed_request_is_remembered_with_its_nodes_and_their_reports():
    async with cluster() as c:
        params = {**PARAMS, "pd_cache": {"prefix_tokens": 512, "report": msgspec.to_builtins(PREFILL)}}
        c.prefill[0].script = [answers(200, {"choices": [], "kv_transfer_params": params})]
        event = b"data: " + json.dumps({"choices": [{"text": TRAP}], **told(DECODE)}).encode() + b"\n\n"
        pieces = [b'data: {"choices": []}\n\n', event[:50], event[50:], b"data: [DONE]\n\n"]
        c.decode[0].script = [streams_then(pieces, None)]
        async with c.post({"prompt": "Hi", "stream": True}, headers={"X-Request-Id": "mine"}) as response:
            await response.read()
        assert c.decode[0].bodies[0]["kv_transfer_params"] == params, "passed on unread"
        assert await c.told("/requests/mine") == {
            "client": "",
            "hops": [
                {"hop": "prefill", "node": c.prefill[0].url, "report": msgspec.to_builtins(PREFILL)},
                {"hop": "decode", "node": c.decode[0].url, "report": msgspec.to_builtins(DECODE)},
            ],
        }


@scenario
async def test_without_prefill_nodes_the_metric_and_the_request_say_so():
    async with cluster(0) as c:
        await c.ask({"prompt": "Hi"}, headers={"X-Request-Id": "mine"})
        assert c.metric("handoffs_total", result="no_prefill_nodes") == 1
        (hop,) = (await c.told("/requests/mine"))["hops"]
        assert (hop["hop"], hop["direct"]) == ("decode", "no_prefill_nodes")


@both_faces
@scenario
async def test_a_prefill_node_that_computes_what_it_finds_is_known_until_it_loads_again():
    reports = [
        RequestReport.of(600, 256, found=512, **more) for more in ({"reason": "not_worth"}, {"loaded": 512})
    ]
    async with cluster() as c:
        for report, loads in zip(reports, (False, True), strict=True):
            c.prefill[0].script = [answers(200, {"choices": [], **told(report)})]
            await c.ask()
            assert c.proxy.hops.pools["prefill"].node(c.prefill[0].url).loads == loads


@both_faces
@pytest.mark.parametrize("monitors", [False, True])
@scenario
async def test_clients_that_use_the_same_id_each_see_their_own_request_and_a_monitor_the_last(
    monitors, tmp_path
):
    texts = {"api_keys": "".join(f"{name} key-of-{name}-0123456789\n" for name in ("alice", "bob", "carol"))}
    if monitors:
        texts["monitor_keys"] = "watch key-of-watch-0123456789\n"
    async with cluster(prefill=0, **files_of(tmp_path, **texts)) as c:

        def by(name):
            return (
                bearer(f"key-of-{name}-0123456789", X_Request_Id="same") if name else {"X-Request-Id": "same"}
            )

        for name in ("alice", "bob"):
            await c.ask(headers=by(name))
        assert all("Authorization" not in headers for headers in c.decode[0].headers), (
            "their keys are not for nodes"
        )
        seen = {}
        for name in ("alice", "bob", "carol", "watch", ""):
            async with c.get("/requests/same", headers=by(name)) as response:
                told = await response.json()
                hops = [hop["node"] for hop in told.get("hops", [])]
                seen[name] = (told["client"], hops) if response.status == 200 else response.status
        named, unnamed = [c.decode[0].url], [""]
        own = {name: (name, unnamed if monitors else named) for name in ("alice", "bob")}
        assert seen == {**own, "carol": 404, "watch": ("bob", named) if monitors else 401, "": 401}
