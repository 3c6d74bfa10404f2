"""Serves the page and its events.

If clients need keys, the page needs one, too. A browser cannot send `Authorization: Bearer`, so the key may
also come as the password of HTTP's basic authentication, for which browsers ask their user.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import BasicAuth, web

import pd_cache
from launch.discovery import View
from launch.http import NOBODY
from launch.openai import overloaded
from launch.proxy.keys import Keys
from launch.proxy.metrics import ProxyMetrics, RecentTrips
from launch.proxy.nodes import NodePools
from launch.proxy.ui.recent import EndedRequest, RecentRequests, first_token_within, prompt_sources
from launch.watch.asker import Asker
from launch.watch.state import WatchedNodes
from pd_cache.decoding import one_line

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
_FOLLOWERS = 32
"""The most browsers that may follow at a time."""
INTERVAL_S = 2.0
"""How often each node is asked, and an event is sent."""
_WRITE_S = 10.0
"""How long a follower may leave an event unread."""


class UiPages:
    """Serves `/ui` to a bounded number of followers. The nodes are asked only while there are any."""

    def __init__(self, cluster: str, keys: Keys, recent: RecentRequests, metrics: ProxyMetrics, pools: NodePools, trips: RecentTrips) -> None:  # fmt: skip
        """`cluster`: the cluster's name."""
        self._cluster = cluster
        self._pools = pools
        self._trips = trips
        self._keys = keys
        self._view = View(())
        self._nodes = WatchedNodes()
        self._recent = recent
        self._metrics = metrics
        self._files = {name: (_HERE / name).read_bytes() for name in _TYPES}
        self._published = asyncio.Event()
        self._events: dict[str | None, bytes] = {}
        """The present event for each client, with only the requests that this client may see; None stands for
        all requests."""
        self._publishes_at = 0.0
        self._closing = False
        self._asker = Asker(NOBODY, INTERVAL_S)
        self.followers = 0

    def add_to(self, app: web.Application) -> None:
        for path, name in (("/ui", "page.html"), ("/ui/page.css", "page.css"), ("/ui/page.js", "page.js")):
            app.router.add_get(path, partial(self._page, name))
        app.router.add_get("/ui/events", self._follow, allow_head=False)
        app.router.add_get("/ui/requests/{id}", self._explain)
        app.on_response_prepare.append(_ask_for_password)
        app.on_shutdown.append(self._close)

    async def _page(self, name: str, request: web.Request) -> web.Response:
        self._keys.check_watcher(_authorization(request))
        return web.Response(
            body=self._files[name], content_type=_TYPES[name], charset="utf-8", headers=_HEADERS
        )

    async def _explain(self, request: web.Request) -> web.Response:
        """Answers with the text of `pd-cache explain`, as far as the proxy itself knows it."""
        self._keys.check_watcher(authorization := _authorization(request))
        trip = self._trips.get(request.match_info["id"], self._keys.visible_client(authorization))
        names = {record.address: record.name for record in self._view.nodes}
        lines = [f"request {request.match_info['id']}", *(hop.text(names) for hop in trip.hops)]
        lines.append(
            "docs/troubleshooting.md has a cure for each reason; `pd-cache explain ID` asks the nodes, too.\n"
        )
        return web.Response(text="\n".join(lines), headers=_HEADERS)

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        self._keys.check_watcher(authorization := _authorization(request))
        if self._closing or self.followers >= _FOLLOWERS:
            raise overloaded(f"{_FOLLOWERS} browsers follow this proxy already")
        response = web.StreamResponse(
            headers={**_HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        self.followers += 1
        try:
            await response.prepare(request)
            while not self._closing and self._keys.may_watch(authorization):  # keys may change meanwhile
                published = self._published
                client = self._keys.visible_client(authorization)
                name = client and client.name
                if name not in self._events:
                    self._events[name] = b"data: " + msgspec.json.encode(self.state(name)) + b"\n\n"
                async with asyncio.timeout(_WRITE_S):
                    await response.write(self._events[name])
                await published.wait()
            await response.write_eof()
        except (ConnectionError, TimeoutError):
            response.force_close()
            if request.transport is not None:
                request.transport.abort()  # what it has not read must not be kept for it
        finally:
            self.followers -= 1
        return response

    # --- what runs beside the requests --------------------------------------------------------------------

    def update(self, view: View) -> None:
        """Shows the nodes of this view, except for proxies: this one has no keys to ask them with."""
        nodes = tuple(record for record in view.nodes if record.role != "proxy")
        self._view = dataclasses.replace(view, nodes=nodes)

    async def look(self) -> None:
        """While a browser follows, asks the nodes, on threads of their own. Publishes their answers every
        `INTERVAL_S`."""
        now = time.monotonic()
        if self.followers:
            self._nodes.update(self._view)
        else:
            self._nodes = WatchedNodes()  # a pause would look like one long interval
        self._nodes.take(self._asker.poll(self._nodes.asked, now))
        if now >= self._publishes_at:
            self._publishes_at = now + INTERVAL_S
            self._events.clear()
            published, self._published = self._published, asyncio.Event()
            published.set()

    def close(self) -> None:
        """Asks no more. Waits for the questions under way."""
        self._asker.close()

    async def _close(self, app: web.Application) -> None:
        self._closing = True
        self._published.set()

    # --- an event -------------------------------------------------------------------------------------------

    def state(self, client: str | None) -> dict[str, Any]:
        """Returns the contents of an event. `client`: the client whose requests it may name; None for all."""
        self._nodes.update(self._view)
        now, minutes = time.monotonic(), self._recent.minutes()
        status = self._nodes.status(now)
        names = {node.record.address: node.name for node in status.nodes}
        owners = {
            segment.segment_name: node.name
            for node in status.nodes
            if node.role != "master"
            for segment in node.segments or ()
        }
        segments = [
            {
                "name": one_line(segment.segment_name),
                "owner": owners.get(segment.segment_name, ""),
                "size": segment.size_bytes,
                "used": segment.allocator_used_bytes,
            }
            for segment in status.segments or ()
        ]
        return {
            "version": pd_cache.__version__,
            "cluster": self._cluster,
            "serves": any(self._pools.pools["decode"].health(now).values()),
            "failed": sum((minute.failed for minute in minutes if minute is not None), Counter[int]()),
            "saved_s": self._recent.saved_s(),
            "first_token": [first_token_within(minutes, part) for part in (0.5, 0.99)],
            "running": self._metrics.running._value.get(),
            "requests_s": self._recent.rate(),
            "nodes": [node.figures() for node in status.nodes],
            "problems": [trouble.found for trouble in status.troubles],
            "segments": sorted(segments, key=itemgetter("owner", "name")),
            "minutes": [
                minute
                and {
                    "requests": minute.requests,
                    "untold": minute.untold,
                    "failed": minute.failed,
                    "errors": sum(count for status, count in minute.failed.items() if status >= 500),
                    "first_token": [first_token_within([minute], part) for part in (0.5, 0.99)],
                    **minute.sources,
                }
                for minute in minutes
            ],
            "slow": [
                _shown_slow(ended, max(0.0, now - ended.at), names) for ended in self._recent.slowest(client)
            ],
        }


def _shown_slow(ended: EndedRequest, age_s: float, names: dict[str, str]) -> dict[str, Any]:
    hops = [
        {
            "hop": hop.hop,
            "node": names.get(hop.node, hop.node),
            "asked": None if hop.report is None else hop.report.asked,
            "sources": None if hop.report is None else prompt_sources(hop.report),
            "reason": "" if hop.report is None else hop.report.reason,
        }
        for hop in ended.trip.hops
    ]
    return {
        "id": ended.request_id,
        "ago": age_s,
        "seconds": ended.seconds,
        "first_byte": ended.first_byte_s,
        "status": ended.status,
        "client": ended.trip.client,
        "hops": hops,
    }


# --- keys ---------------------------------------------------------------------------------------------------


def _authorization(request: web.Request) -> str | None:
    """Returns the request's key as `Bearer KEY`, also if it came as a password."""
    given = request.headers.get("Authorization")
    try:
        return f"Bearer {BasicAuth.decode(given or '', 'utf-8').password}"
    except ValueError:
        return given


async def _ask_for_password(request: web.Request, response: web.StreamResponse) -> None:
    """Makes a browser ask for the key that a page of `/ui` needs."""
    if response.status == 401 and request.path.startswith("/ui"):
        response.headers["WWW-Authenticate"] = (
            'Basic realm="pd-cache: any name, and a key as the password", charset="UTF-8"'
        )
