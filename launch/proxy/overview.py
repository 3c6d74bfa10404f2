"""Serves `/health`, `/metrics`, `/peers` and `/requests/ID`, which report on the proxy, the nodes and the last requests.

If clients need keys, a client without one learns from `/health` only whether the proxy can serve.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import pd_cache
from launch.proxy.admission import Admission
from launch.proxy.answers import ApiError
from launch.proxy.keys import Keys
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.node_pools import NodePools
from launch.proxy.trips import Trip
from pd_cache.reports import RecentReports

Peers = Callable[[], Awaitable[Mapping[str, Any]]]
"""Reports which of the cluster's other nodes this proxy reaches."""


class Overview:
    """Serves these pages."""

    def __init__(
        self,
        pools: NodePools,
        keys: Keys,
        admission: Admission,
        metrics: ProxyMetrics,
        trips: RecentReports[Trip],
        peers: Peers | None,
    ) -> None:
        """Without `peers` there is no `/peers`."""
        self._node_pools = pools
        self._keys = keys
        self._admission = admission
        self._metrics = metrics
        self._trips = trips
        self._peers = peers

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._samples)
        app.router.add_get("/requests/{id}", self._trip)
        if self._peers is not None:
            app.router.add_get("/peers", self._reached)

    async def _health(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        nodes: dict[str, dict[str, bool]] = {hop: pool.health(now) for hop, pool in self._node_pools.pools.items()}
        healthy = any(nodes["decode"].values()) and not self._admission.closing
        body: dict[str, Any] = {"status": "ok" if healthy else "unavailable"}
        if self._keys.may_watch(request.headers.get("Authorization")):
            body |= {"version": pd_cache.__version__, **nodes, **self._node_pools.describe(now)}
        return web.json_response(body, status=200 if healthy else 503)

    async def _samples(self, request: web.Request) -> web.Response:
        self._keys.check_watcher(request.headers.get("Authorization"))
        now = time.monotonic()
        metrics = self._metrics
        metrics.node_up.clear()  # also for nodes that have left
        metrics.node_load.clear()
        for hop, pool in self._node_pools.pools.items():
            for node, up in pool.health(now).items():
                metrics.node_up.labels(hop, node).set(up)
            for node, load in pool.loads().items():
                metrics.node_load.labels(hop, node).set(load)
        metrics.view_stale.set(self._node_pools.stale_s(now))
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _trip(self, request: web.Request) -> web.Response:
        only = self._keys.visible_client(request.headers.get("Authorization"))
        trip = self._trips.get(request.match_info["id"])
        if trip is None or only not in (None, trip.client):
            raise ApiError(404, "No such request among the last ones", code="not_found")
        return web.json_response(msgspec.to_builtins(trip))

    async def _reached(self, request: web.Request) -> web.Response:
        self._keys.check_watcher(request.headers.get("Authorization"))
        assert self._peers is not None
        return web.json_response(await self._peers())
