"""The proxy against nodes that misbehave on purpose. All of them are real servers on loopback."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import pd_cache
from launch.discovery import NodeRecord, View
from launch.proxy import Proxy
from launch.proxy import app as app_module
from launch.proxy.direct import DirectRule, Pool
from pd_cache.block_hashes import BlockHasher, describe_hashes
from pd_cache.config import ProxyConfig
from pd_cache.errors import ConfigError
from pd_cache.lookup import LookupClient
from pd_cache.tokens import Namespace, salt_keys

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = Namespace(
    model="tiny@1", kv_dtype="bfloat16", layout="heads8.block16.bytes256x2", layers=2, block_size=16, page_bytes=512,
    chunk_size=256, shards=1, hash_mode="tokens",
)  # fmt: skip
PARAMS = {"do_remote_prefill": True, "stored": 512}
EVENTS = [f'data: {{"choices": [{{"text": "{n}"}}]}}\n\n'.encode() for n in range(3)] + [b"data: [DONE]\n\n"]

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def no_file_left_open() -> Iterator[None]:
    before = psutil.Process().num_fds()
    yield
    assert psutil.Process().num_fds() <= before


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test with a limit; at its end only its own task may be left."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def whole() -> None:
            before = len(asyncio.all_tasks())
            await test(*args, **kwargs)
            await until(lambda: len(asyncio.all_tasks()) <= before, "all tasks ended")

        asyncio.run(asyncio.wait_for(whole(), 30))

    return run


async def until(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)


# --- nodes -----------------------------------------------------------------------------------------------------------


class Node:
    """A server whose next answers are scripted; after those it behaves as `default`."""

    def __init__(self, default: Behaviour) -> None:
        self.default = default
        self.script: list[Behaviour] = []
        self.health: Behaviour = answers(200, {})
        self.tokenize: Behaviour = answers(404)
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.headers: list[Any] = []
        self.peers: list[Any] = []
        self.hung_up = 0
        self.url = ""
        self.server: TestServer | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.server = TestServer(app)
        await self.server.start_server()
        self.url = str(self.server.make_url("")).rstrip("/")

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/health", "/tokenize"):
            return await getattr(self, request.path[1:])(request)
        self.headers.append(request.headers)
        self.paths.append(request.path)
        self.peers.append(request.transport.get_extra_info("peername"))
        body = await request.read()
        self.bodies.append(json.loads(body) if body else None)
        behaviour = self.script.pop(0) if self.script else self.default
        try:
            return await behaviour(request)
        except asyncio.CancelledError:
            self.hung_up += 1
            raise


async def prefills(request: web.Request) -> web.StreamResponse:
    return web.json_response({"id": "p", "choices": [{"text": "?"}], "kv_transfer_params": PARAMS})


async def decodes(request: web.Request) -> web.StreamResponse:
    if request.method == "GET":
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})
    if not (await request.json()).get("stream"):
        return web.json_response({"id": "d", "choices": [{"text": "hello"}]})
    return await stream(request, EVENTS)


async def stream(request: web.Request, chunks: list[bytes]) -> web.StreamResponse:
    response = await begin(request, *chunks)
    await response.write_eof()
    return response


async def begin(request: web.Request, *chunks: bytes, **headers: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(0)
    return response


def answers(status: int, body: object = None, **headers: str) -> Behaviour:
    async def behaviour(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(body, status=status, headers=named)

    return behaviour


def says(body: bytes, status: int = 200) -> Behaviour:
    async def behaviour(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status)

    return behaviour


def abort(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


async def disconnects(request: web.Request) -> web.StreamResponse:
    abort(request)
    return web.Response()


async def speaks_no_http(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    request.transport.close()
    return web.Response()


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def dies_after_headers(request: web.Request) -> web.StreamResponse:
    response = await begin(request)
    abort(request)
    return response


def streams_then(chunks: list[bytes], then: Behaviour | None) -> Behaviour:
    async def behaviour(request: web.Request) -> web.StreamResponse:
        response = await begin(request, *chunks)
        if then is not None:
            await asyncio.sleep(0.05)  # so that they have been read: an abort discards what has not
            await then(request)
        return response

    return behaviour


def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Cluster:
    def __init__(self, proxy: Proxy, url: str, prefill: list[Node], decode: list[Node]) -> None:
        self.proxy, self.url, self.prefill, self.decode = proxy, url, prefill, decode
        self.session: aiohttp.ClientSession

    def post(self, body: object = None, **kwargs: Any) -> Any:
        if "data" not in kwargs:
            kwargs["json"] = body if body is not None else {"model": "tiny", "prompt": "Hi", "max_tokens": 5}
        return self.session.post(self.url + "/v1/completions", **kwargs)

    def get(self, path: str) -> Any:
        return self.session.get(self.url + path)

    def metric(self, name: str, **labels: str) -> float:
        return self.proxy.metrics.registry.get_sample_value(f"pd_cache_proxy_{name}", labels) or 0.0


def view(prefill: Iterable[str] = (), decode: Iterable[str] = ()) -> View:
    """What discovery says of nodes at these URLs."""
    return View(
        tuple(
            NodeRecord(name=f"{role}-{index}", role=role, address=url)
            for role, urls in (("prefill", prefill), ("decode", decode))
            for index, url in enumerate(urls)
        )
    )


@asynccontextmanager
async def cluster(
    prefill: int | list[str] = 1,
    decode: int | list[str] = 1,
    *,
    drain_s: float = 0.2,
    direct: DirectRule | None = None,
    **config: Any,
) -> AsyncIterator[Cluster]:
    """So many nodes of each kind; a URL in their place is a node that is not ours."""
    async with AsyncExitStack() as stack:
        nodes: dict[str, list[Node]] = {"prefill": [], "decode": []}
        urls: dict[str, list[str]] = {"prefill": [], "decode": []}
        for hop, wanted, behaviour in (("prefill", prefill, prefills), ("decode", decode, decodes)):
            for given in wanted if isinstance(wanted, list) else [""] * wanted:
                if not given:
                    node = Node(behaviour)
                    await node.start()
                    stack.push_async_callback(node.stop)
                    nodes[hop].append(node)
                urls[hop].append(given or node.url)
        # checks of health get in the way of scripts; their own tests ask for them
        settings = ProxyConfig(**{"policy": "round_robin", "health_interval_s": 3600, "drain_s": drain_s, **config})
        proxy = Proxy(settings, direct)
        proxy.update(view(**urls))
        server = TestServer(proxy.app())
        await server.start_server()
        stack.push_async_callback(server.close)
        running = Cluster(proxy, str(server.make_url("")).rstrip("/"), nodes["prefill"], nodes["decode"])
        running.session = await stack.enter_async_context(aiohttp.ClientSession())
        yield running
        await until(lambda: not proxy._running, "no request left in the proxy")


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The error object, after a look at its shape."""
    body = await response.json()
    assert response.content_type == "application/json"
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    assert response.headers["X-Request-Id"]
    return dict(body["error"])


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
            started = time.monotonic()
            async with c.post() as response:
                assert response.status == 200
            assert time.monotonic() - started < 2
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


@pytest.mark.parametrize("failure", [name for name in DECODE_FAILURES if name != "busy"])
@scenario
async def test_when_no_decode_node_is_left_the_client_may_come_back(failure: str) -> None:
    async with cluster(1, 2) as c:
        c.decode[0].default = c.decode[1].default = DECODE_FAILURES[failure]
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
            status, deadline = 0, time.monotonic() + 5
            while status != 200:
                assert time.monotonic() < deadline
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


@scenario
async def test_a_request_that_brings_nodes_down_does_not_visit_all_of_them() -> None:
    async with cluster(0, 5) as c:
        for node in c.decode:
            node.default = disconnects
        async with c.post() as response:
            assert response.status == 503
        assert sum(len(node.bodies) for node in c.decode) == 3


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
    async with cluster(1, 1, request_timeout_s=0.3) as c:
        node = (c.prefill if slow_hop == "prefill" else c.decode)[0]
        node.default = hangs
        started = time.monotonic()
        async with c.post() as response:
            assert response.status == 504
            assert (await error_of(response))["code"] == "timeout"
        assert 0.25 < time.monotonic() - started < 2
        await until(lambda: node.hung_up == 1, "the node was let go")


@scenario
async def test_a_stream_that_stalls_ends_with_an_error_event_when_its_time_is_over() -> None:
    async with cluster(0, 1, request_timeout_s=0.4) as c:
        c.decode[0].default = streams_then(EVENTS[:1], hangs)
        async with c.post({"prompt": "x", "stream": True}) as response:
            body = await response.read()
        assert body.startswith(EVENTS[0] + b'data: {"error":')
        assert json.loads(body[len(EVENTS[0]) + 6 :])["error"]["code"] == "timeout"
        await until(lambda: c.decode[0].hung_up == 1, "the node was let go")


@scenario
async def test_a_body_that_does_not_arrive_is_a_408() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.sleep(1.5)
        yield b'"x"}'

    async with cluster(request_timeout_s=0.3) as c:
        async with c.post(data=body()) as response:
            assert response.status == 408
            await error_of(response)
        assert c.prefill[0].bodies == []


@scenario
async def test_a_client_that_does_not_read_is_cut_off_when_its_time_is_over() -> None:
    async def floods(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    async with cluster(0, 1, request_timeout_s=0.5) as c:
        c.decode[0].default = floods
        host, _, port = c.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}')
        await until(lambda: c.metric("answers_cut_total", code="timeout") == 1, "cut off")
        await until(lambda: c.decode[0].hung_up == 1 or not c.proxy._running, "the node was let go")
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
        await until(lambda: not c.proxy._running, "the proxy forgot it")
        if hop == "prefill":
            assert c.decode[0].bodies == []
        await until(lambda: c.metric("requests_total", status="499") == 1, "counted")


# --- requests that cannot be served ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"prompt": "x", "max_tokens": -1}', b"\xff\xfe", b'{"prompt": null}']
)
@scenario
async def test_a_bad_body_is_a_400_and_reaches_no_node(body: bytes) -> None:
    async with cluster() as c:
        async with c.post(data=body) as response:
            assert response.status == 400
            assert (await error_of(response))["type"] == "invalid_request_error"
        assert c.prefill[0].bodies == c.decode[0].bodies == []


@scenario
async def test_a_body_that_breaks_its_encoding_is_a_400() -> None:
    async with cluster() as c, c.post(data=b"this is not gzip", headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 400
        await error_of(response)


@pytest.mark.parametrize("announced", [True, False])
@scenario
async def test_a_body_that_is_too_large_is_a_413(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "MAX_BODY", 100_000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 10_000

    async with cluster() as c, c.post(data=b" " * 200_000 if announced else chunks()) as response:
        assert response.status == 413
        assert (await error_of(response))["code"] == "request_too_large"


@scenario
async def test_unknown_paths_and_methods_are_told_in_the_same_shape() -> None:
    async with cluster() as c:
        async with c.get("/v1/nothing") as response:
            assert response.status == 404
            assert (await error_of(response))["type"] == "invalid_request_error"
        async with c.get("/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            await error_of(response)


@scenario
async def test_a_fault_of_the_proxy_is_a_500_without_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: bytes) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(app_module, "Completion", broken)
    async with cluster() as c, c.post() as response:
        assert response.status == 500
        error = await error_of(response)
        assert error["code"] == "internal_error"
        assert "secret" not in error["message"]


@scenario
async def test_more_requests_than_allowed_are_refused() -> None:
    async with cluster(0, 1, max_requests=2) as c:
        go = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            await go.wait()
            return await decodes(request)

        c.decode[0].default = waits
        asking = [asyncio.ensure_future(c.post().__aenter__()) for _ in range(2)]
        await until(lambda: len(c.decode[0].bodies) == 2, "two in flight")
        async with c.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await error_of(response))["code"] == "overloaded"
        go.set()
        for response in await asyncio.gather(*asking):
            assert response.status == 200
            response.close()
        async with c.post() as response:
            assert response.status == 200


# --- ids, models, health, metrics ------------------------------------------------------------------------------------


@scenario
async def test_a_request_id_goes_to_both_hops_and_back() -> None:
    async with cluster() as c:
        async with c.post(headers={"X-Request-Id": "abc-123.x:y_Z"}) as response:
            assert response.headers.getall("X-Request-Id") == ["abc-123.x:y_Z"]
        assert c.prefill[0].headers[0]["X-Request-Id"] == c.decode[0].headers[0]["X-Request-Id"] == "abc-123.x:y_Z"


def test_the_log_of_the_proxy_tells_each_request_by_its_id(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sk-0123456789abcdef\n")
    caplog.set_level("INFO", logger="launch.proxy")

    @scenario
    async def asked() -> None:
        async with cluster(1, 2, api_keys_file=str(tmp_path / "keys")) as c:
            c.prefill[0].default = disconnects
            key = {"Authorization": "Bearer sk-0123456789abcdef"}
            async with c.post(headers={"X-Request-Id": "it-is-me", **key}) as response:
                assert response.status == 200
            async with c.post(headers={"X-Request-Id": "nobody"}) as response:
                assert response.status == 401
            url = c.prefill[0].url
        (failed,) = [line for line in caplog.messages if line.startswith(f"request it-is-me: prefill node {url}: ")]
        assert "disconnected" in failed
        (ended,) = [line for line in caplog.messages if line.startswith("request it-is-me: 200 in ")]
        assert re.search(rf"client=alice prefill={url} decode=http://", ended)
        assert any(line.startswith("request nobody: 401 in ") for line in caplog.messages)
        assert "sk-0123456789abcdef" not in caplog.text

    asked()


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "é", 'a"b'])
@scenario
async def test_a_request_id_that_is_missing_or_strange_is_replaced(given: str) -> None:
    async with cluster() as c:
        async with c.post(headers={"X-Request-Id": given} if given else {}) as response:
            made = response.headers["X-Request-Id"]
            assert re.fullmatch("[0-9a-f]{32}", made)
        assert c.prefill[0].headers[0]["X-Request-Id"] == made
        async with c.get("/nowhere") as response:
            assert re.fullmatch("[0-9a-f]{32}", response.headers["X-Request-Id"])


@scenario
async def test_the_models_are_those_of_a_decode_node_that_works() -> None:
    async with cluster(1, 2) as c:
        c.decode[0].default = disconnects
        async with c.get("/v1/models") as response:
            assert response.status == 200
            assert (await response.json())["data"] == [{"id": "tiny"}]
        assert c.prefill[0].bodies == []


@scenario
async def test_health_names_the_nodes() -> None:
    async with cluster() as c, c.get("/health") as response:
        assert response.status == 200
        assert await response.json() == {
            "status": "ok",
            "version": pd_cache.__version__,
            "prefill": {c.prefill[0].url: True},
            "decode": {c.decode[0].url: True},
            "discovery_stale_s": 0.0,
            "lookups": "off: direct_tokens is 0",
            "differences": {},
        }


@scenario
async def test_metrics_are_served_from_a_registry_of_the_proxys_own() -> None:
    async with cluster() as one, cluster() as other:
        async with one.post() as response:
            await response.read()
        for c, requests in ((one, 1.0), (other, 0.0)):
            async with c.get("/metrics") as response:
                text = await response.text()
                assert response.content_type == "text/plain"
            assert ('pd_cache_proxy_requests_total{status="200"} 1.0' in text) == bool(requests)
            assert f'pd_cache_proxy_node_up{{hop="decode",node="{c.decode[0].url}"}} 1.0' in text
            assert f"pd_cache_proxy_first_byte_seconds_count {requests}" in text


@scenario
async def test_a_proxy_that_knows_no_nodes_refuses_until_it_does() -> None:
    async with cluster(1, 1) as c:
        c.proxy.update(View(()))
        async with c.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        c.proxy.update(view([c.prefill[0].url], [c.decode[0].url]))
        async with c.post() as response:
            assert response.status == 200


# --- chat ------------------------------------------------------------------------------------------------------------


@scenario
async def test_a_chat_takes_the_same_way() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 9}
    async with cluster() as c:
        async with c.session.post(c.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
        assert c.prefill[0].paths == c.decode[0].paths == ["/v1/chat/completions"]
        assert c.prefill[0].bodies[0]["max_tokens"] == c.prefill[0].bodies[0]["max_completion_tokens"] == 1
        assert c.decode[0].bodies == [{**body, "kv_transfer_params": PARAMS}]
        async with c.session.post(c.url + "/v1/chat/completions", json={"prompt": "x"}) as response:
            assert response.status == 400
            assert (await error_of(response))["param"] == "messages"


# --- policies --------------------------------------------------------------------------------------------------------


@scenario
async def test_prompts_with_a_common_beginning_go_to_one_prefill_node() -> None:
    async with cluster(3, 1, policy="prefix_aware") as c:
        for _ in range(4):
            for conversation in range(3):
                async with c.post({"prompt": [conversation + 1000] * 3000}) as response:
                    assert response.status == 200
        for node in c.prefill:
            assert len({body["prompt"][0] for body in node.bodies}) == 1
            assert len(node.bodies) == 4


@scenario
async def test_a_node_that_is_busy_with_a_long_prompt_gets_no_second_one() -> None:
    async with cluster(2, 1, policy="least_loaded") as c:
        c.prefill[0].default = hangs
        long = asyncio.ensure_future(c.post({"prompt": [1] * 1000}).__aenter__())
        await until(lambda: len(c.prefill[0].bodies) == 1, "the long one is under way")
        for _ in range(3):
            async with c.post({"prompt": [1]}) as response:
                assert response.status == 200
        assert len(c.prefill[1].bodies) == 3
        async with c.get("/metrics") as response:
            assert f'node_load{{hop="prefill",node="{c.prefill[0].url}"}} 1000.0' in await response.text()
        long.cancel()
        await asyncio.wait({long})


# --- conditional disaggregation --------------------------------------------------------------------------------------


class Lookups(LookupClient):
    """Answers `found`, after `gate` was opened."""

    def __init__(self, found: int) -> None:
        super().__init__()
        self.found = found
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[tuple[object, object]] = []
        self.closed = False

    def _lookup(self, token_ids: Any, block_hashes: Any, held: int, extra_keys: Any, lookup_id: Any) -> int:
        self.asked.append((block_hashes if token_ids is None else len(token_ids), extra_keys))
        self.gate.wait(5)
        return self.found

    def close(self) -> None:
        self.closed = True


POOL = Pool(NAMESPACE, "127.0.0.1:1")


def rule(client: LookupClient | None, tokens: int = 256, pool: Pool = POOL, **options: float) -> DirectRule:
    def opens(pool: Pool) -> LookupClient:
        if client is None:
            raise OSError("no Mooncake here")
        return client

    direct = DirectRule(tokens, opens, **options)
    direct.use(pool)
    direct.use = lambda pool: None  # type: ignore[method-assign]  # the nodes of these tests keep no cache
    return direct


@scenario
async def test_a_short_prompt_goes_to_the_decode_node_directly_without_a_lookup() -> None:
    client = Lookups(0)
    async with cluster(direct=rule(client)) as c:
        for prompt, there in (([1] * 255, 0), ("x" * 1000, 0), ([1] * 256, 1), ("x" * 1100, 2)):
            async with c.post({"prompt": prompt}) as response:
                assert response.status == 200
            assert len(c.prefill[0].bodies) == there
        assert "kv_transfer_params" not in c.decode[0].bodies[0]
        assert c.metric("handoffs_total", result="short") == 2
    assert [length for length, _ in client.asked] == [256], "one lookup, and none where no node tells a text's tokens"
    assert client.closed


@pytest.mark.parametrize(("found", "directly"), [(1024, True), (1000, True), (744, False), (0, False)])
@scenario
async def test_a_prompt_whose_prefix_is_in_the_pool_goes_to_the_decode_node_directly(
    found: int, directly: bool
) -> None:
    client = Lookups(found)
    async with cluster(direct=rule(client)) as c:
        async with c.post({"prompt": [7] * 1000, "cache_salt": "tenant"}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == (0 if directly else 1)
        assert c.metric("handoffs_total", result="in_pool") == int(directly)
    assert client.asked == [(1000, salt_keys("tenant"))]


@scenario
async def test_chunks_that_vllm_names_are_looked_up_by_its_block_hashes() -> None:
    client, hashes = Lookups(1024), describe_hashes("sha256", "vllm-none-hash", "")
    space = msgspec.structs.replace(NAMESPACE, hash_mode="blocks", hash_seed=hashes)
    async with cluster(direct=rule(client, pool=Pool(space, "127.0.0.1:1"))) as c:
        async with c.post({"prompt": [7] * 1000, "cache_salt": "tenant"}) as response:
            assert response.status == 200
        assert c.prefill[0].bodies == []
    assert client.asked == [(BlockHasher(space.block_size, hashes).hashes([7] * 1000, "tenant"), ())]


@scenario
async def test_block_hashes_that_only_the_engine_can_compute_are_told_and_not_looked_up() -> None:
    client, hashes = Lookups(1024), describe_hashes("xxhash", "7", "")
    space = msgspec.structs.replace(NAMESPACE, hash_mode="blocks", hash_seed=hashes)
    async with cluster(direct=rule(client, pool=Pool(space, "127.0.0.1:1"))) as c:
        async with c.post({"prompt": [7] * 1000}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1
        async with c.get("/health") as response:
            assert "names its blocks by xxhash" in (await response.json())["lookups"]
    assert client.asked == []


@scenario
async def test_a_prompt_for_another_model_say_an_adapter_is_not_looked_up_under_the_names_of_the_pools() -> None:
    client = Lookups(1024)
    async with cluster(direct=rule(client, pool=Pool(NAMESPACE, "127.0.0.1:1", "base"))) as c:
        for body in ({"model": "adapter"}, {"model": "base"}, {}):
            async with c.post({"prompt": [7] * 1000, **body}) as response:
                assert response.status == 200
        assert [body.get("model") for body in c.prefill[0].bodies] == ["adapter"]
    assert len(client.asked) == 2


@scenario
async def test_a_lookup_that_hangs_or_cannot_be_made_costs_its_deadline_and_nothing_more() -> None:
    client = Lookups(1024)
    client.gate.clear()
    async with cluster(direct=rule(client, timeout_s=0.1)) as c:
        async with c.post({"prompt": [7] * 1000}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1
        client.gate.set()
    async with cluster(direct=rule(None)) as c:
        async with c.post({"prompt": [7] * 1000}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1
        async with c.get("/health") as response:
            assert (await response.json())["lookups"] == "off: no Mooncake here"


@scenario
async def test_the_tokens_of_a_text_are_asked_of_a_node() -> None:
    client, asked = Lookups(1024), []

    async def tokenizes(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return web.json_response({"count": 1000, "max_model_len": 8192, "tokens": [7] * 1000})

    async with cluster(1, 2, direct=rule(client)) as c:
        c.decode[0].tokenize = tokenizes
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}
        for path, body in (("completions", {"prompt": "x" * 5000}), ("chat/completions", chat)):
            async with c.session.post(f"{c.url}/v1/{path}", json={**body, "max_tokens": 5}) as response:
                assert response.status == 200
        assert asked == [{"prompt": "x" * 5000}, chat]
        assert c.prefill[0].bodies == []
        assert [len(node.bodies) for node in c.decode] == [1, 1], "asking for tokens takes nobody's turn"


@pytest.mark.parametrize(
    ("failure", "times"),
    [(answers(404), 1), (answers(500), 1), (says(b"{}"), 1), (hangs, 3)],
    ids=["404", "500", "garbage", "hangs"],
)
@scenario
async def test_a_node_that_does_not_tell_a_texts_tokens_is_not_asked_for_ever(failure: Behaviour, times: int) -> None:
    asked = []

    async def fails(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        return await failure(request)

    async with cluster(direct=rule(Lookups(1024), timeout_s=0.1)) as c:
        c.decode[0].tokenize = fails
        for _ in range(times + 1):
            async with c.post({"prompt": "x" * 5000}) as response:
                assert response.status == 200
        assert len(c.prefill[0].bodies) == times + 1
        assert len(asked) == times


PICTURE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 5000}]}]}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 5000}, PICTURE]}]}, 0),
        ({"messages": [{"role": "user", "content": {"x" * 5000: 1}}]}, 0),
        ({"documents": [{"text": "x"}]}, 0),
        ({"reasoning_effort": "high"}, 0),
        ({"reasoning_effort": None}, 1),
    ],
)
@scenario
async def test_a_chat_that_is_more_than_its_text_is_not_looked_up_nor_its_pictures_fetched(
    more: dict[str, Any], asked: int
) -> None:
    client, chat = Lookups(1024), {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}
    async with cluster(direct=rule(client)) as c:
        c.decode[0].tokenize = answers(200, {"tokens": [7] * 1000})
        async with c.session.post(f"{c.url}/v1/chat/completions", json={**chat, **more}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1 - asked
    assert len(client.asked) == asked


@scenario
async def test_a_client_that_goes_away_says_nothing_about_the_node_that_was_asked_for_tokens() -> None:
    asked = []

    async def slow(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        if len(asked) == 1:
            return await hangs(request)
        return web.json_response({"tokens": [7] * 1000})

    async with cluster(direct=rule(Lookups(1024), timeout_s=10)) as c:
        c.decode[0].tokenize = slow
        going = asyncio.ensure_future(c.post({"prompt": "x" * 5000}).__aenter__())
        await until(lambda: asked, "a node is asked")
        going.cancel()
        await asyncio.wait({going})
        await until(lambda: not c.proxy._running, "the proxy let go")
        async with c.post({"prompt": "x" * 5000}) as response:
            assert response.status == 200
        assert (len(asked), c.prefill[0].bodies) == (2, [])


@scenario
async def test_health_says_why_no_prompt_is_looked_up() -> None:
    told = []
    direct = DirectRule(256, lambda pool: Lookups(0))
    async with cluster(direct=direct, health_interval_s=0.02) as c:

        async def lookups() -> str:
            async with c.get("/health") as response:
                return str((await response.json())["lookups"])

        told.append(await lookups())
        c.decode[0].health = answers(200, NAMESPACE.described())
        await until(lambda: direct.blind == "no master of the pool is known", "the namespace is known")
        told.append(await lookups())
        direct.use(Pool(NAMESPACE, "127.0.0.1:1"))
        told.append(await lookups())
        c.decode[0].health = answers(200, {})
        await until(lambda: direct.blind == "no decode node tells how its chunks are named", "it was started anew")
    assert told == [
        "off: no decode node tells how its chunks are named",
        "off: no master of the pool is known",
        "on",
    ]
    async with cluster() as c, c.get("/health") as response:
        assert (await response.json())["lookups"] == "off: direct_tokens is 0"


@scenario
async def test_a_salt_or_prompt_that_is_none_is_left_to_the_nodes() -> None:
    async with cluster(direct=rule(Lookups(1024))) as c:
        for body in ({"prompt": [7] * 1000, "cache_salt": 7}, {"prompt": [7] * 999 + ["x"]}):
            async with c.post(body) as response:
                assert response.status == 200
        assert len(c.prefill[0].bodies) == 2


@scenario
async def test_with_direct_tokens_0_every_prompt_is_prefilled() -> None:
    client = Lookups(1024)
    async with cluster(direct=rule(client, 0)) as c:
        async with c.post({"prompt": [7]}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1
    assert client.asked == []


# --- keys ------------------------------------------------------------------------------------------------------------


@scenario
async def test_with_keys_a_client_needs_one_and_nodes_do_not_get_it(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sk-0123456789abcdef\n")
    key = {"Authorization": "Bearer sk-0123456789abcdef"}
    async with cluster(api_keys_file=str(tmp_path / "keys"), max_requests_per_key=1) as c:
        for headers in ({}, {"Authorization": "Bearer sk-0123456789abcdeX"}):
            async with c.post(headers=headers) as response:
                assert response.status == 401
                assert (await error_of(response))["code"] == "invalid_api_key"
        async with c.get("/v1/models") as response:
            assert response.status == 401
        async with c.get("/health") as response:
            assert response.status == 200
        async with c.post(headers=key) as response:
            assert response.status == 200
        assert "Authorization" not in c.prefill[0].headers[0]
        assert "Authorization" not in c.decode[0].headers[0]
        c.decode[0].default = hangs
        asking = asyncio.ensure_future(c.post(headers=key).__aenter__())
        await until(lambda: len(c.decode[0].bodies) == 2, "one is under way")
        async with c.post(headers=key) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await error_of(response))["code"] == "rate_limit_exceeded"
        asking.cancel()
        await asyncio.wait({asking})


@scenario
async def test_nodes_with_a_key_of_their_own_get_that_in_place_of_the_clients(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sk-0123456789abcdef\n")
    (tmp_path / "node-key").write_text("of-the-nodes\n")
    async with cluster(node_key_file=str(tmp_path / "node-key"), api_keys_file=str(tmp_path / "keys")) as c:
        async with c.post(headers={"Authorization": "Bearer sk-0123456789abcdef"}) as response:
            assert response.status == 200
        for node in (*c.prefill, *c.decode):
            assert node.headers[0]["Authorization"] == "Bearer of-the-nodes"


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("", "one key"), ("one two", "one key")])
def test_a_file_that_holds_no_node_key_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sk-0123456789abcdef\n")
    if content is not None:
        (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match=message):
        Proxy(ProxyConfig(node_key_file=str(tmp_path / "key"), api_keys_file=str(tmp_path / "keys")))


def test_a_proxy_that_lets_everybody_in_is_given_no_key_of_the_nodes() -> None:
    with pytest.raises(ValueError, match="would let everybody in"):
        ProxyConfig(node_key_file="key")


# --- several models --------------------------------------------------------------------------------------------------


def serving(c: Cluster, *models: str | None) -> View:
    """The cluster's prefill and decode nodes, the first ones serving the first model, and so on."""
    pairs = zip(c.prefill, c.decode, models, strict=True)
    records = [
        NodeRecord(name=f"{role}-{index}", role=role, address=node.url, model=model)
        for index, (prefill, decode, model) in enumerate(pairs)
        for role, node in (("prefill", prefill), ("decode", decode))
    ]
    return View(tuple(records))


@scenario
async def test_a_request_goes_to_nodes_of_its_model() -> None:
    async with cluster(3, 3) as c:
        c.proxy.update(serving(c, "a", "b", "b"))
        for model in ("a", "b", "a", "b", "a"):
            async with c.post({"model": model, "prompt": "x"}) as response:
                assert response.status == 200
        assert [len(node.bodies) for node in c.prefill] == [3, 1, 1]
        assert [len(node.bodies) for node in c.decode] == [3, 1, 1]


@scenario
async def test_another_model_may_be_an_adapter_where_all_nodes_serve_one_and_is_refused_where_they_serve_several() -> (
    None
):
    async with cluster(2, 2) as c:
        for models, status in ((("a", "a"), 200), (("a", "b"), 404)):
            c.proxy.update(serving(c, *models))
            for body in ({"model": "adapter", "prompt": "x"}, {"prompt": "x"}):
                async with c.post(body) as response:
                    assert response.status == status
        async with c.post({"model": "adapter", "prompt": "x"}) as response:
            error = await error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"] == "No node serves the model 'adapter'; there are: a, b"
        assert [len(node.bodies) for node in c.decode] == [1, 1]


@scenario
async def test_a_model_whose_nodes_have_left_is_one_that_will_be_back() -> None:
    async with cluster(2, 2) as c:
        c.proxy.update(serving(c, "a", "b"))
        async with c.post({"model": "a", "prompt": "x"}) as response:
            assert response.status == 200
        c.proxy.update(View(tuple(node for node in serving(c, "a", "b").nodes if node.model == "b")))
        async with c.post({"model": "a", "prompt": "x"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
        assert [len(node.bodies) for node in (*c.prefill, *c.decode)] == [1, 0, 1, 0]


@scenario
async def test_a_node_that_does_not_tell_its_model_takes_every_request() -> None:
    async with cluster(2, 2) as c:
        c.proxy.update(serving(c, "a", None))
        for _ in range(2):
            async with c.post({"model": "a", "prompt": "x"}) as response:
                assert response.status == 200
        assert [len(node.bodies) for node in c.decode] == [1, 1]


@scenario
async def test_a_model_whose_nodes_are_all_down_is_asked_of_no_other() -> None:
    async with cluster(2, 2) as c:
        c.proxy.update(serving(c, "a", "b"))
        c.decode[0].default = disconnects
        async with c.post({"model": "a", "prompt": "x"}) as response:
            assert response.status == 503
        assert c.decode[1].bodies == []


@scenario
async def test_models_of_all_nodes_are_listed_but_those_of_which_none_answers() -> None:
    async with cluster(3, 3) as c:
        c.proxy.update(serving(c, "a", "b", "c"))
        for node, default in zip(c.decode, ("a", "b", disconnects), strict=True):
            listed = {"object": "list", "data": [{"id": default, "max_model_len": 9}]}
            node.default = answers(200, listed) if isinstance(default, str) else default
        async with c.get("/v1/models") as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            assert [entry["id"] for entry in (await response.json())["data"]] == ["a", "b"]
        for default, status in ((answers(401), 401), (says(b"{}"), 503)):
            for node in c.decode:
                node.default = default
            async with c.get("/v1/models") as response:
                assert response.status == status


# --- health ----------------------------------------------------------------------------------------------------------


@scenario
async def test_a_node_that_is_not_well_gets_no_requests_until_it_is_again() -> None:
    async with cluster(2, 1, health_interval_s=0.02) as c:
        sick, well = c.prefill
        sick.health = answers(503)
        await until(lambda: not c.proxy._pools["prefill"].health(time.monotonic())[sick.url], "noticed")
        for _ in range(3):
            async with c.post() as response:
                assert response.status == 200
        assert (len(sick.bodies), len(well.bodies)) == (0, 3)
        sick.health = answers(404)  # it knows no such path, but it answers
        await until(lambda: c.proxy._pools["prefill"].health(time.monotonic())[sick.url], "noticed")


@scenario
async def test_a_check_that_hangs_counts_as_failed() -> None:
    async with cluster(1, 1, health_interval_s=0.02, health_timeout_s=0.05) as c:
        c.decode[0].health = hangs
        await until(lambda: not c.proxy._pools["decode"].health(time.monotonic())[c.decode[0].url], "noticed")
        async with c.post() as response:
            assert response.status == 200, "with nobody else, the checks are not believed"


@scenario
async def test_a_node_that_answers_errors_is_left_alone_for_a_while() -> None:
    async with cluster(2, 1, breaker_failures=3) as c:
        c.prefill[0].default = answers(500)
        for _ in range(10):
            async with c.post() as response:
                assert response.status == 200
        assert len(c.prefill[0].bodies) == 3


@scenario
async def test_refusals_are_never_counted_against_a_node() -> None:
    async with cluster(1, 1, breaker_failures=1) as c:
        c.prefill[0].default = answers(400, {"error": {}})
        for _ in range(3):
            async with c.post() as response:
                assert response.status == 400
        assert len(c.prefill[0].bodies) == 3


@scenario
async def test_nodes_that_never_share_a_hit_are_told_apart_in_health() -> None:
    other = msgspec.structs.replace(NAMESPACE, chunk_size=512)
    async with cluster(1, 1, health_interval_s=0.02) as c:
        c.prefill[0].health = answers(200, NAMESPACE.described())
        c.decode[0].health = answers(200, other.described())
        told: dict[str, str] = {}
        deadline = time.monotonic() + 5
        while not told and time.monotonic() < deadline:
            async with c.get("/health") as response:
                told = (await response.json())["differences"]
        assert told == {"prefill-0": "chunk_size 256 here, 512 on decode-0: these two never share a hit"}


@scenario
async def test_a_stale_view_is_told_and_goes_on_serving() -> None:
    async with cluster() as c:
        nodes = view([c.prefill[0].url], [c.decode[0].url]).nodes
        c.proxy.update(View(nodes, stale_since=time.monotonic() - 60))
        async with c.post() as response:
            assert response.status == 200
        async with c.get("/health") as response:
            assert response.status == 200
            assert (await response.json())["discovery_stale_s"] >= 60


@scenario
async def test_a_node_that_leaves_ends_nothing_that_it_has_begun() -> None:
    async with cluster(1, 2) as c:
        go = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            response = await begin(request, EVENTS[0])
            await go.wait()
            await response.write(EVENTS[1])
            return response

        c.decode[0].default = waits
        async with c.post({"prompt": "x", "stream": True}) as response:
            await response.content.readexactly(len(EVENTS[0]))
            c.proxy.update(view([c.prefill[0].url], [c.decode[1].url]))
            async with c.post() as other:
                assert other.status == 200
            go.set()
            assert await response.read() == EVENTS[1]
        async with c.get("/metrics") as page:
            assert c.decode[0].url not in await page.text()


# --- shutdown --------------------------------------------------------------------------------------------------------


@scenario
async def test_a_shutdown_lets_requests_end_and_refuses_new_ones() -> None:
    async with cluster(0, 1, drain_s=10) as c:
        go = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            response = await begin(request, EVENTS[0])
            await go.wait()
            await response.write(EVENTS[1])
            return response

        c.decode[0].default = waits
        async with c.post({"prompt": "x", "stream": True}) as response:
            assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            draining = asyncio.ensure_future(c.proxy._drain(web.Application()))
            await asyncio.sleep(0)
            async with c.post() as refused:
                assert refused.status == 503
                assert "shutting down" in (await error_of(refused))["message"]
            async with c.get("/health") as health:
                assert health.status == 503
            go.set()
            assert await response.read() == EVENTS[1]
        await draining


@scenario
async def test_a_shutdown_tells_those_that_do_not_end() -> None:
    async with cluster(0, 2, drain_s=0.1) as c:
        c.decode[0].default = streams_then(EVENTS[:1], hangs)
        c.decode[1].default = hangs
        async with c.post({"prompt": "x", "stream": True}) as streaming:
            await streaming.content.readexactly(len(EVENTS[0]))
            waiting = asyncio.ensure_future(c.post().__aenter__())
            await until(lambda: len(c.decode[1].bodies) == 1, "both in flight")
            await c.proxy._drain(web.Application())
            assert json.loads((await streaming.read())[6:])["error"]["code"] == "overloaded"
            response = await waiting
            assert response.status == 503
            response.close()


RUN = """
import sys
from launch.proxy import run_proxy
from pd_cache.config import ClusterConfig, DecodeNode, ProxyNode
url = sys.argv[1].removeprefix("http://").split(":")
node = ProxyNode(name="p", port=int(sys.argv[2]))
nodes = (DecodeNode(name="d", host=url[0], port=int(url[1])), node)
run_proxy(ClusterConfig(nodes=nodes), node, lambda url: print("ready", url, flush=True),
          on_stop=lambda: print("leaves", flush=True))
print("drained", flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@scenario
async def test_run_proxy_serves_until_it_is_told_to_stop_and_ends_what_it_began(signum: signal.Signals) -> None:
    node = Node(decodes)
    await node.start()
    go = asyncio.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        response = await begin(request, EVENTS[0])
        await go.wait()
        await response.write(EVENTS[1])
        return response

    node.default = waits
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, node.url, "0", stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().split()[1]
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/completions", json={"prompt": "x", "stream": True}) as response,
        ):
            await response.content.readexactly(len(EVENTS[0]))
            process.send_signal(signum)
            assert await asyncio.wait_for(process.stdout.readline(), 5) == b"leaves\n", "while it still serves"

            async def closed() -> None:
                while True:
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                    except ConnectionError:
                        return
                    writer.close()
                    await asyncio.sleep(0.01)

            await asyncio.wait_for(closed(), 5)
            go.set()
            assert await response.read() == EVENTS[1]
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert await process.stdout.read() == b"drained\n"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await node.stop()


def test_run_proxy_on_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        argv = [sys.executable, "-c", RUN, "http://127.0.0.1:1", str(taken.getsockname()[1])]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=20)
    assert done.returncode == 1
    assert b"OSError" in done.stderr
    assert b"Task was destroyed" not in done.stderr
