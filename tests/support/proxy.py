"""A proxy before nodes that misbehave on purpose. All of them are real servers on loopback."""

import asyncio
import functools
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from random import Random
from unittest.mock import patch

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from launch.discovery import View
from launch.proxy import nodes
from launch.proxy.app import Proxy
from launch.proxy.routing import node_pool
from pd_cache.chunks import Namespace
from pd_cache.cluster import Capacity, NodeRecord, ProxyConfig
from tests.support.cluster import cluster_file
from tests.support.pool import Node as ProcessNode
from tests.support.pool import free_port
from tests.support.waiting import PATIENCE_S

NAMESPACE = Namespace(
    model="tiny@1", kv_dtype="bfloat16", layout="heads8.block16.bytes256x2", layers=2, block_size=16, page_bytes=512,
    chunk_size=256, shards=1, hash_mode="tokens",
)  # fmt: skip
PARAMS = {"do_remote_prefill": True, "stored": 512}
STREAMED = {"prompt": "x", "stream": True}
"""A completion whose answer is a stream."""
EVENTS = [f'data: {{"choices": [{{"text": "{n}"}}]}}\n\n'.encode() for n in range(3)] + [b"data: [DONE]\n\n"]


both_faces = pytest.mark.usefixtures("face")
"""For tests whose clients talk to the proxy, and then to Envoy, which asks its picker."""


def scenario(test):
    """Run an async test with a limit; at its end only its own task may be left, and no open connection."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        async def whole():
            before = len(asyncio.all_tasks())
            await test(*args, **kwargs)
            await until(lambda: len(asyncio.all_tasks()) <= before, "all tasks ended")
            # a server that has just accepted a connection as it closed learns a moment later that its client
            # is gone
            await until(lambda: not _connections(), "all connections closed")

        asyncio.run(asyncio.wait_for(whole(), 10 * PATIENCE_S))

    return run


def _connections():
    """Returns the transports of the running loop whose sockets are open."""
    transports = asyncio.get_running_loop()._transports.values()
    return [transport for transport in transports if transport.get_extra_info("socket").fileno() >= 0]


async def until(condition, what):
    """Waits for a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.005)


def jump(seconds):
    """Put the clock of the running event loop forward: a deadline within `seconds` is over, however slow or
    fast the machine."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


# --- nodes --------------------------------------------------------------------------------------------------


class Node:
    """A server whose next answers are scripted; after those it behaves as `default`."""

    def __init__(self, default):
        self.default = default
        self.script = []
        self.health = answers(200, {})
        self.tokenize = answers(404)
        self.render = answers(403)
        self.bodies = []
        self.paths = []
        self.headers = []
        self.peers = []
        self.hung_up = 0
        self.url = ""
        self.server = None

    async def __aenter__(self):
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.server = TestServer(app)
        await self.server.start_server()
        self.url = str(self.server.make_url("")).rstrip("/")
        return self

    async def __aexit__(self, *_):
        await self.stop()

    async def stop(self):
        await self.server.close()

    async def handle(self, request):
        if request.path in ("/health", "/tokenize", "/v1/chat/completions/render"):
            return await getattr(self, request.path.rpartition("/")[2])(request)
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


async def prefills(request):
    return web.json_response({"id": "p", "choices": [{"text": "?"}], "kv_transfer_params": PARAMS})


async def decodes(request):
    if request.method == "GET":
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})
    if not (await request.json()).get("stream"):
        return web.json_response({"id": "d", "choices": [{"text": "hello"}]})
    return await stream(request, EVENTS)


async def stream(request, chunks):
    response = await begin(request, *chunks)
    await response.write_eof()
    return response


async def begin(request, *chunks, **headers):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(0)
    return response


def answers(status, body=None, **headers):
    async def behaviour(request):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(body, status=status, headers=named)

    return behaviour


def says(body, status=200):
    async def behaviour(request):
        return web.Response(body=body, status=status)

    return behaviour


def abort(request):
    request.transport.abort()


async def disconnects(request):
    abort(request)
    return web.Response()


async def speaks_no_http(request):
    request.transport.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    request.transport.close()
    return web.Response()


async def hangs(request):
    await asyncio.Event().wait()
    raise AssertionError


def waits_for(event, behaviour):
    async def waiting(request):
        await event.wait()
        return await behaviour(request)

    return waiting


async def dies_after_headers(request):
    response = await begin(request)
    abort(request)
    return response


def streams_then(chunks, then):
    async def behaviour(request):
        response = await begin(request, *chunks)
        if then is not None:
            await asyncio.sleep(0.05)  # so that they have been read: an abort discards what has not
            await then(request)
        return response

    return behaviour


class OneByOne:
    """A stream of which each event is written when the client has read the one before."""

    def __init__(self):
        self._read = [asyncio.Event() for _ in EVENTS]

    async def __call__(self, request):
        response = await begin(request)
        for event, was_read in zip(EVENTS, self._read, strict=True):
            await response.write(event)
            await was_read.wait()
        return response

    async def read(self, response):
        for event, was_read in zip(EVENTS, self._read, strict=True):
            assert await response.content.readexactly(len(event)) == event
            was_read.set()


class InOrder(Random):
    """Has a proxy take nodes in the order in which they are listed."""

    def random(self):
        return 0.0


GATEWAY = None
"""The gateway before the proxies of `cluster`, if there is one."""


class Cluster:
    def __init__(self, proxy, url, prefill, decode):
        self.proxy, self.url, self.prefill, self.decode = proxy, url, prefill, decode

    def post(self, body=None, **kwargs):
        """Posts a completion, or a chat if the body has messages."""
        if "data" not in kwargs:
            kwargs["json"] = body if body is not None else {"model": "tiny", "prompt": "Hi", "max_tokens": 5}
        kind = "chat/completions" if body is not None and "messages" in body else "completions"
        return self.session.post(f"{self.url}/v1/{kind}", **kwargs)

    async def ask(self, body=None, *, status=200, **kwargs):
        """Posts a completion and reads its answer, which must have this status."""
        async with self.post(body, **kwargs) as response:
            assert response.status == status
            return await response.read()

    @asynccontextmanager
    async def stuck_at(self, node, body=None, **kwargs):
        """While the block runs, a completion hangs at this node; at its end, the client goes away."""
        before = len(node.bodies)
        node.script = [hangs]
        asking = asyncio.ensure_future(self.post(body, **kwargs).__aenter__())
        await until(lambda: len(node.bodies) > before, "one is under way")
        yield
        asking.cancel()
        await asyncio.wait({asking})

    def get(self, path, **kwargs):
        return self.session.get(self.url + path, **kwargs)

    async def told(self, path):
        """The JSON that a GET is answered with."""
        async with self.get(path) as response:
            return await response.json()

    async def hint(self, kind, payload, action_id="a", **kwargs):
        """What becomes of a hint that is posted by itself."""
        data = message(kind, payload, action_id)
        async with self.session.post(self.url + "/hints", data=data, **kwargs) as response:
            (action,) = (await response.json())["actions"]
            return action

    def metric(self, name, **labels):
        return self.proxy.metrics.registry.get_sample_value(f"pd_cache_proxy_{name}", labels) or 0.0


def one_hint(kind, payload, action_id="a", version="1.0"):
    """A message with one hint."""
    action = {"action_id": action_id, "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def message(*hint, **named):
    """The same, as a body."""
    return json.dumps(one_hint(*hint, **named)).encode()


def spelled(text, **words):
    """The value of a JSON text in which words stand for what is long."""
    for word, value in words.items():
        text = text.replace(word, json.dumps(value))
    return json.loads(text)


def files_of(folder, **texts):
    """Writes files of a proxy, such as `api_keys`; the options that name them."""
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {f"{name}_file": str(folder / name) for name in texts}


def look_twice(files):
    """Has files that have changed be read again."""
    for _ in range(2):
        files.look()


def bearer(key, **more):
    """The header with a key, and others."""
    return {
        "Authorization": f"Bearer {key}",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


def record(url, instance="", **capacity):
    """The record of a node to route over."""
    return NodeRecord(name=url, role="both", address=url, instance=instance, capacity=Capacity(**capacity))


def view(prefill=(), decode=(), **told):
    """What discovery says of nodes at these URLs; `told` is true of all of them."""
    return View(
        tuple(
            NodeRecord(name=f"{role}-{index}", role=role, address=url, **told)
            for role, urls in (("prefill", prefill), ("decode", decode))
            for index, url in enumerate(urls)
        )
    )


@asynccontextmanager
async def cluster(
    prefill=1,
    decode=1,
    *,
    drain_s=0.2,
    failures=5,
    health_interval_s=3600,
    long_skips=False,
    streams=False,
    renders=False,
    rule=None,
    lookups=None,
    name="",
    **config,
):
    """So many nodes of each kind; a URL in their place is a node that is not ours. Checks of health get in
    the way of scripts; their own tests ask for them. With `long_skips`, a node that is left alone stays so
    until the end, however slow the machine is."""
    async with AsyncExitStack() as stack:
        stack.enter_context(patch.multiple(node_pool, BREAKER_FAILURES=failures, Random=InOrder))
        if long_skips:
            stack.enter_context(patch.multiple(node_pool, _FIRST_SKIP_S=3600.0, _LAST_SKIP_S=3600.0))
        stack.enter_context(patch.object(nodes, "HEALTH_INTERVAL_S", health_interval_s))
        started = {"prefill": [], "decode": []}
        urls = {"prefill": [], "decode": []}
        for hop, wanted, behaviour in (("prefill", prefill, prefills), ("decode", decode, decodes)):
            for given in wanted if isinstance(wanted, list) else [""] * wanted:
                if not given:
                    started[hop].append(await stack.enter_async_context(Node(behaviour)))
                urls[hop].append(given or started[hop][-1].url)
        settings = ProxyConfig(**{"policy": "round_robin", "drain_s": drain_s, **config})
        proxy = Proxy(settings, rule, lookups, cluster=name)
        proxy.update(view(**urls, streams=streams, renders=renders))
        await proxy.setup()
        stack.push_async_callback(proxy.close)
        if GATEWAY is None:
            url = await proxy.listen("127.0.0.1", 0)
        else:
            url = GATEWAY.url
            await proxy.listen_to_envoy(GATEWAY.folder)
        running = Cluster(proxy, url, started["prefill"], started["decode"])
        running.session = await stack.enter_async_context(aiohttp.ClientSession())
        yield running
        await until(lambda: not proxy.requests.running, "no request left in the proxy")


@contextmanager
def proxy_process(folder, *nodes, port=0, picker_port=None, **proxy):
    """The URL and the process of a proxy before these nodes, with the limits that we ship but for the section
    `proxy`."""
    written = [{"name": "master", "role": "master", "port": free_port(), "metrics_port": free_port()}, *nodes]
    written.append({"name": "proxy", "role": "proxy", "port": port, "picker_port": picker_port})
    with ProcessNode("proxy", "proxy", cluster_file(folder, proxy=proxy, nodes=written)) as node:
        yield node.address, node.process


def decode_at(url):
    host, _, port = url.removeprefix("http://").rpartition(":")
    return {"name": "decode", "role": "decode", "host": host, "port": int(port)}


async def error_of(response):
    """The error object, after a look at its shape."""
    body = await response.json()
    assert response.content_type == "application/json"
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    assert response.headers["X-Request-Id"]
    return body["error"]
