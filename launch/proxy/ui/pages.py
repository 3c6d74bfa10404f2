"""Serves the page, and what it follows.

If clients need keys, the page needs one, too. A browser cannot send `Authorization: Bearer`, so the key may also come as the password of HTTP's
basic authentication, for which browsers ask their user.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

import pd_cache
from launch.proxy.answers import ApiError, overloaded
from launch.proxy.connections import Connections
from launch.proxy.keys import Keys
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.ui.node_watch import NodeWatch, SeenNode
from launch.proxy.ui.recent import RecentRequests, SlowRequest, prompt_sources
from pd_cache.decoding import one_line
from pd_cache.misses import MEANINGS

_HERE = Path(__file__).parent
_TYPES = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PUBLISH_S = 2.0
_HEARTBEAT_S = 10.0
_WRITE_S = 10.0
"""How long a follower may leave an event unread."""
_KERNEL_BUFFER = 32 << 10
"""How many bytes the kernel may keep for a follower that does not read. Linux doubles this number; without it, the limit is megabytes."""
_RETRY_MS = 3000
_MOST_SHOWN = 200
"""The most nodes, segments and flows in one event."""


class UiPages:
    """Serves `/ui` to a bounded number of followers. The nodes are asked only while there are any."""

    def __init__(
        self,
        most: int,
        keys: Keys,
        watch: NodeWatch,
        recent: RecentRequests,
        metrics: ProxyMetrics,
        connections: Connections,
    ) -> None:
        """`most`: the most followers at a time."""
        self._most = most
        self._keys = keys
        self._watch = watch
        self._recent = recent
        self._metrics = metrics
        self._connections = connections
        self._files = {name: (_HERE / name).read_bytes() for name in _TYPES}
        self._published = asyncio.Event()
        self._events: dict[str | None, bytes] = {}
        """The present event, by the client whose requests it may show; None for all."""
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.followers = 0

    def add_to(self, app: web.Application) -> None:
        """Adds the pages; none if there may be no followers."""
        if not self._most:
            return
        app.router.add_get("/ui", self._page("page.html"))
        app.router.add_get("/ui/page.css", self._page("page.css"))
        app.router.add_get("/ui/page.js", self._page("page.js"))
        app.router.add_get("/ui/events", self._follow, allow_head=False)
        app.on_shutdown.append(self._close)

    def _page(self, name: str) -> Callable[[web.Request], Any]:
        async def serve(request: web.Request) -> web.Response:
            if not self._keys.may_watch(_authorization(request)):
                return _key_needed()
            return web.Response(body=self._files[name], content_type=_TYPES[name], charset="utf-8", headers=_HEADERS)

        return serve

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        authorization = _authorization(request)
        if not self._keys.may_watch(authorization):
            return _key_needed()
        if self._closing or self.followers >= self._most:
            raise overloaded(f"{self._most} browsers follow this proxy already", retry_after=10)
        self.followers += 1
        try:
            if self.followers == 1:
                self._start()
            return await self._tell(request, authorization)
        finally:
            self.followers -= 1
            if not self.followers:
                await self._stop()

    async def _tell(self, request: web.Request, authorization: str | None) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={**_HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        with contextlib.suppress(ConnectionError, TimeoutError):
            await response.prepare(request)
            _bound_unread(request.transport)
            await self._write(request, response, f"retry: {_RETRY_MS}\n\n".encode())
            while not self._closing and self._keys.may_watch(authorization):  # keys may change meanwhile
                published = self._published
                await self._write(request, response, self._event(self._keys.visible_client(authorization)))
                while not published.is_set() and not self._closing:
                    try:
                        await asyncio.wait_for(published.wait(), _HEARTBEAT_S)
                    except TimeoutError:
                        await self._write(request, response, b": still here\n\n")
            await response.write_eof()
            return response
        response.force_close()
        if request.transport is not None:
            request.transport.abort()  # what it has not read must not be kept for it
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        self._connections.writing(request.transport, time.monotonic())
        try:
            await asyncio.wait_for(response.write(data), _WRITE_S)
        finally:
            self._connections.wrote(request.transport)

    # --- what runs while somebody follows ------------------------------------------------------------------------

    def _start(self) -> None:
        self._events.clear()
        for running in (self._watch.run(), self._publish()):
            task = asyncio.create_task(running)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(_PUBLISH_S)
            self._events.clear()
            published, self._published = self._published, asyncio.Event()
            published.set()

    async def _close(self, app: web.Application) -> None:
        self._closing = True
        self._published.set()

    # --- an event ------------------------------------------------------------------------------------------------

    def _event(self, client: str | None) -> bytes:
        if client not in self._events:
            self._events[client] = b"data: " + msgspec.json.encode(self.state(client)) + b"\n\n"
        return self._events[client]

    def state(self, client: str | None) -> dict[str, Any]:
        """Returns what one event says. `client`: whose requests it may name; None for all."""
        now = time.monotonic()
        nodes = list(self._watch.nodes.values())
        names = {node.record.address: node.record.name for node in nodes}
        owners = {name: node.record.name for node in nodes for name in _segment_names(node)}
        flows = sorted(self._recent.flows().items(), key=lambda item: (-item[1].tokens, -item[1].requests))
        return {
            "version": pd_cache.__version__,
            "proxy": {
                "running": self._metrics.running._value.get(),
                "followers": self.followers,
                "requests_s": self._recent.requests_s(),
                "asked": len(nodes),
            },
            "left_out": self._watch.left_out + max(0, len(nodes) - _MOST_SHOWN),
            "nodes": [_shown_node(node, now) for node in nodes[:_MOST_SHOWN]],
            "segments": [
                {
                    "name": one_line(one.segment_name),
                    "owner": owners.get(one.segment_name, ""),
                    "size": one.size_bytes,
                    "used": one.allocator_used_bytes,
                }
                for one in sorted(
                    self._watch.segments[:_MOST_SHOWN],
                    key=lambda one: (owners.get(one.segment_name, ""), one.segment_name),
                )
            ],
            "flows": [
                {
                    "from": names.get(a, a),
                    "to": names.get(b, b),
                    "requests": flow.requests / 60,
                    "tokens": flow.tokens / 60,
                }
                for (a, b), flow in flows[:_MOST_SHOWN]
            ],
            "minutes": [None if one is None else msgspec.to_builtins(one) for one in self._recent.minutes()],
            "slow": [_shown_slow(one, self._recent.age_s(one.at), names) for one in self._recent.slowest(client)],
        }


def _segment_names(node: SeenNode) -> tuple[str, ...]:
    if node.record.role == "store":
        return (node.record.address,)
    return () if node.history.last is None else node.history.last.segments


def _shown_node(node: SeenNode, now: float) -> dict[str, Any]:
    reading, rates = node.reading(), node.rates(now)
    state = "silent" if node.why else "-" if not node.url else "asking" if node.answered is None else "up"
    first = None if rates is None else rates.quantiles.get("first token")
    moves = None if node.record.role == "master" else rates
    trouble = [] if reading is None else [*(f"tier {tier} off" for tier in reading.tiers_off)]
    if reading is not None and reading.pool_up is False:
        trouble.append("pool down")
    return {
        "name": node.record.name,
        "role": node.record.role,
        "state": "ill" if trouble and state == "up" else state,
        "why": node.why or ", ".join(trouble),
        "hit": None if rates is None else rates.hit,
        "load": None if moves is None else moves.load,
        "store": None if moves is None else moves.store,
        "lookups": None if moves is None else moves.lookups,
        "p50": None if first is None else first[0],
        "p99": None if first is None else first[1],
        "evicted": None if rates is None else sum(rates.evictions.values()),
        "missed": [] if rates is None else [reason for reason, _, _ in rates.missed[:3]],
        "queued": None if reading is None else reading.queued,
        "running": None if reading is None else reading.running,
        "staging": None if reading is None else reading.staging,
        "staging_used": None if reading is None else reading.staging_used,
    }


def _shown_slow(one: SlowRequest, age_s: float, names: dict[str, str]) -> dict[str, Any]:
    hops = [
        {
            "hop": hop.hop,
            "node": names.get(hop.node, hop.node),
            "asked": None if hop.report is None else hop.report.asked,
            "sources": None if hop.report is None else prompt_sources(hop.report)._asdict(),
            "reason": "" if hop.report is None else hop.report.reason,
            "meaning": "" if hop.report is None else MEANINGS[hop.report.reason],
        }
        for hop in one.trip.hops
    ]
    return {
        "id": one.request_id,
        "ago": age_s,
        "seconds": one.seconds,
        "first_byte": one.first_byte_s,
        "status": one.status,
        "client": one.trip.client,
        "hops": hops,
    }


def _bound_unread(transport: asyncio.Transport | None) -> None:
    """Lets the kernel end the connection of a follower that has taken nothing for `_WRITE_S`, or has vanished. Limits what is kept for it."""
    taken = None if transport is None else transport.get_extra_info("socket")
    if transport is not None and taken is not None:
        transport.set_write_buffer_limits(high=0)  # a write waits until the kernel has taken all of it
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER)
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(_WRITE_S * 1000))


# --- keys ------------------------------------------------------------------------------------------------------------


def _authorization(request: web.Request) -> str | None:
    """Returns the request's key as `Bearer KEY`, also if it came as a password."""
    given = request.headers.get("Authorization")
    scheme, _, encoded = (given or "").partition(" ")
    if scheme.lower() != "basic":
        return given
    try:
        _, _, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return None
    return f"Bearer {password}"


def _key_needed() -> web.Response:
    response = ApiError(
        401, "A key is needed: `Authorization: Bearer KEY`, or as a password", code="invalid_api_key"
    ).response()
    response.headers["WWW-Authenticate"] = (
        'Basic realm="pd-cache: any name, and a key as the password", charset="UTF-8"'
    )
    response.headers["Cache-Control"] = "no-store"
    return response
