"""The proxy as an aiohttp application: its parts, and what runs beside its requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from random import Random

from aiohttp import web

from launch.discovery import View
from launch.proxy.admission import Admission
from launch.proxy.bodies import BodyBudget
from launch.proxy.budget import RetryBudget
from launch.proxy.completions import CHAT, Completions
from launch.proxy.connections import Connections
from launch.proxy.delivery import Deliveries
from launch.proxy.direct import DirectRule
from launch.proxy.edge import Edge
from launch.proxy.health import HealthChecks
from launch.proxy.hops import new_session
from launch.proxy.keys import Keys
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.models import ModelList
from launch.proxy.node_pools import NodePools
from launch.proxy.nodes import Nodes
from launch.proxy.overview import Overview, Peers
from launch.proxy.query import CacheQuery
from launch.proxy.requests import Requests
from launch.proxy.ui import NodeWatch, RecentRequests, UiPages
from launch.proxy.watched_files import WatchedFiles
from pd_cache.cluster import LARGEST_BODY, ProxyConfig
from pd_cache.tracing import UNTRACED, Tracing

_FEW_RETRIES = 100


class Proxy:
    """Routes completions through prefill to decode nodes."""

    def __init__(
        self,
        config: ProxyConfig,
        direct: DirectRule | None = None,
        *,
        master: Callable[[View], str | None] | None = None,
        files: WatchedFiles | None = None,
        peers: Peers | None = None,
        connections: Connections | None = None,
        tracing: Tracing = UNTRACED,
        rng: Random | None = None,
    ) -> None:
        """Makes a proxy that knows no nodes yet: see `update`. `direct` decides which prompts need no prefill node; by default all need one.

        `master` returns the address of the pool's master, for lookups. `files` watches the key files. `peers` returns the content of
        `/peers`. `rng` orders nodes that were never taken. `connections`: those of the listener, if it counts them. The caller closes
        `tracing`. Raises ConfigError if a key file cannot be used.
        """
        self.metrics = ProxyMetrics()
        self.connections = Connections(0) if connections is None else connections
        self.connections.on_close = lambda why: self.metrics.connections_closed.labels(why.value).inc()
        self.deliveries = Deliveries(self.metrics)
        self._config = config
        self._files = files or WatchedFiles()
        self._keys = Keys(config, self._files)
        self._admission = Admission(config.max_requests, config.max_requests_per_key)
        self._bodies = BodyBudget(config.body_memory)
        self._retries = RetryBudget(max(_FEW_RETRIES, config.max_requests))
        self._direct = direct or DirectRule(0)
        self._node_pools = NodePools(config, self._direct, master, rng)
        self._nodes = Nodes(self._node_pools.pools, self.metrics, lambda: self._keys.credentials)
        recent, self._watch = RecentRequests(time.monotonic), NodeWatch()
        completions = Completions(self._nodes, self._node_pools, self._direct, self.metrics, config.prefill_timeout_s)
        self._requests = Requests(
            config,
            completions,
            ModelList(self._nodes),
            keys=self._keys,
            admission=self._admission,
            bodies=self._bodies,
            retries=self._retries,
            connections=self.connections,
            deliveries=self.deliveries,
            metrics=self.metrics,
            recent=recent,
            tracing=tracing,
        )
        self._query = CacheQuery(self._direct, self._node_pools.caches, self._keys)
        self._overview = Overview(self._node_pools, self._keys, self._admission, self.metrics, completions.trips, peers)
        self._ui = UiPages(config.ui_followers, self._keys, self._watch, recent, self.metrics, self.connections)

    def update(self, view: View) -> None:
        """Uses the view's nodes from now on. Call it on the event loop's thread, once the loop runs."""
        self._node_pools.update(view)
        self._watch.update(view)

    def app(self) -> web.Application:
        """Returns a new application. Run it with `handler_cancellation=True`; otherwise it notices late that clients went away."""
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[Edge(self.connections).middleware])
        app.router.add_post("/v1/completions", self._requests.complete)
        app.router.add_post(CHAT, self._requests.complete)
        app.router.add_get("/v1/models", self._requests.list_models, allow_head=False)
        self._overview.add_to(app)
        self._query.add_to(app)
        self._ui.add_to(app)
        app.cleanup_ctx.append(self._with_session)
        app.on_shutdown.append(self._drain)
        return app

    async def _with_session(self, app: web.Application) -> AsyncIterator[None]:
        config = self._config
        # a request holds one connection at a time; the rest is for health checks and connections that are being closed
        session = self._nodes.session = new_session(config.max_requests + 128, config.connect_timeout_s)
        checks = HealthChecks(
            self._node_pools.pools.values(),
            config.health_interval_s,
            config.health_timeout_s,
            self._node_pools.told_namespace,
        )
        beside = {asyncio.create_task(checks.run(session)), asyncio.create_task(self._files.follow())}
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            await session.close()
            await asyncio.to_thread(self._direct.close)
            await asyncio.to_thread(self._node_pools.caches.close)

    async def _drain(self, app: web.Application) -> None:
        """Waits for requests to end, then cuts off the rest. Meanwhile, new ones are refused."""
        self._admission.closing = True
        await self.deliveries.drain(self._config.drain_s)
