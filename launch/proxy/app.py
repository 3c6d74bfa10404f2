"""The proxy as an aiohttp application: its parts, its socket, what runs beside its requests, the outermost
handler, and the proxy's own pages, such as `/health`.

If clients need keys, `/health` says to a client without a key only whether the proxy can serve.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec.structs import replace
from prometheus_client import CONTENT_TYPE_LATEST

import pd_cache
from launch.discovery import View
from launch.openai import ID_HEADER, errors, given_id, runner_of
from launch.proxy import nodes
from launch.proxy.events import CacheQuery
from launch.proxy.exchange import HINTS_HEADER
from launch.proxy.hints.actions import Hints, PoolBytes
from launch.proxy.hops import Hops
from launch.proxy.keys import Keys, WatchedFiles
from launch.proxy.lookups import PoolLookups
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.nodes import NodePools, check_nodes, new_session
from launch.proxy.requests import CHAT, COMPLETIONS, MODELS, Requests
from launch.proxy.routing.direct import DirectRule
from launch.proxy.serving import REQUEST_ID, Serving
from launch.proxy.trips import Trip
from launch.proxy.ui import RecentRequests, UiPages, pages
from pd_cache.cluster import LARGEST_BODY, ProxyConfig, ServerTlsConfig
from pd_cache.tracing import UNTRACED, Tracing
from transfer.settings import mooncake_version

log = logging.getLogger(__name__)

_BACKLOG = 1024
_KEEPALIVE_S = 75.0
"""How long a client's connection may stay open without a request."""


class Proxy:
    """Routes completions through prefill to decode nodes."""

    def __init__(
        self,
        config: ProxyConfig,
        rule: DirectRule | None = None,
        lookups: PoolLookups | None = None,
        *,
        cluster: str = "",
        master: Callable[[View], str | None] | None = None,
        pool_bytes: PoolBytes = lambda view: 0,
        files: WatchedFiles | None = None,
        tracing: Tracing = UNTRACED,
    ) -> None:
        """Makes a proxy that knows no nodes yet: see `update`. `rule` decides which prompts need no prefill
        node; by default all need one. The proxy closes `lookups`.

        `cluster` is the cluster's name, for `/ui`. `master` returns the address of the pool's master, for
        lookups. `pool_bytes` returns the pool's size, for hints. `files` watches the key files. The caller
        closes `tracing`. Raises ConfigError if a key file cannot be used.
        """
        self.metrics = ProxyMetrics()
        self._config = config
        self._files = files or WatchedFiles()
        self._lookups = lookups = lookups or PoolLookups()
        self._pools = NodePools(config, lookups, master)
        self._keys = keys = Keys(config, self._files)
        recent = RecentRequests(time.monotonic)
        self.hops = hops = Hops(config, keys, self._pools, rule or DirectRule(), lookups, self.metrics)
        self._hints = Hints(config.hints, lookups, keys, hops, self.metrics, pool_bytes)
        self.requests = Requests(config, keys, hops, self._hints, self.metrics, recent, tracing)
        self._picker: Any = None
        self._ui = UiPages(cluster, keys, recent, self.metrics, self._pools, self.requests.trips)
        self._queries = CacheQuery(lookups, self._pools.caches, keys, self.hops.bodies)

    def update(self, view: View) -> None:
        """Uses the view's nodes from now on. Call it on the event loop's thread, once the loop runs."""
        self._pools.update(view)
        self._hints.update(view)
        self._ui.update(view)

    async def setup(self) -> None:
        """Starts the application. It accepts no connections yet."""
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[self._outermost, errors])
        serving, router = Serving(self.requests), app.router
        for path in (COMPLETIONS, CHAT):
            router.add_post(path, serving.completion)
        router.add_get(MODELS, serving.models, allow_head=False)
        router.add_post("/hints", serving.hint)
        router.add_post("/query", self._queries.answer)
        router.add_get("/health", self._health)
        router.add_get("/metrics", self._samples)
        router.add_get("/requests/{id}", self._trip)
        router.add_get("/", self._home)
        self._ui.add_to(app)
        app.on_response_prepare.append(self._share)
        app.cleanup_ctx.append(self._beside_requests)
        app.on_shutdown.append(lambda _: self.requests.drain())
        self._runner = runner_of(app, keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=2.0)
        await self._runner.setup()

    async def check_nodes(self) -> None:
        """Asks all nodes for their health. Until then, `/health` counts them as healthy."""
        await check_nodes(self._pools, self.hops.session)

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> str:
        """Begins to accept connections. Returns the base URL. Raises OSError if the address cannot be
        bound."""
        await web.TCPSite(self._runner, host, port, ssl_context=tls, backlog=_BACKLOG).start()
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if tls is None else 'https'}://{shown}:{self._runner.addresses[0][1]}"

    async def pick_for_gateways(self, address: str, tls: ServerTlsConfig | None = None) -> None:
        """Begins to pick decode nodes for gateways, at `host:port` or `unix:path`. Raises OSError if the
        address cannot be bound."""
        from launch.proxy.gateway.picker import serve  # the import takes a tenth of a second

        self._pools.gateways = True
        self._picker = await serve(self.requests, address, tls)

    async def listen_to_envoy(self, folder: Path) -> None:
        """Begins to serve an Envoy with the configuration of `gateway.configuration(folder, …)`."""
        await web.UnixSite(self._runner, folder / "proxy", backlog=_BACKLOG).start()
        await self.pick_for_gateways(f"unix:{folder / 'picker'}")

    async def close(self) -> None:
        """Stops accepting connections, drains, and ends all connections."""
        await self._runner.cleanup()
        if self._picker is not None:
            await self._picker.stop(None)
            self._picker = None

    async def _beside_requests(self, app: web.Application) -> AsyncIterator[None]:
        config = self._config
        # a request holds one connection at a time, and one for its stream; the rest is for health checks and
        # connections that are being closed
        self.hops.session = session = new_session(2 * config.max_requests + 128)
        checks = _repeat(lambda: nodes.HEALTH_INTERVAL_S, self.check_nodes)
        hints = _repeat(lambda: self._hints.renew_s, self._hints.renew)
        watching = _repeat(lambda: pages.INTERVAL_S / 8, self._ui.look)
        beside = {asyncio.create_task(task) for task in (checks, hints, watching)}
        stop_following = self._files.follow()
        try:
            yield
        finally:
            stop_following.set()
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            await session.close()
            await asyncio.to_thread(self._lookups.close)
            await asyncio.to_thread(self._pools.caches.close)
            await asyncio.to_thread(self._ui.close)

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Gives the request its id. Answers the `OPTIONS` request that a browser sends before a request of
        another site's page."""
        request[REQUEST_ID] = given_id(request.headers) or uuid.uuid4().hex
        asks_first = request.method == "OPTIONS" and self._origin(request)
        return web.Response() if asks_first else await handler(request)

    def _origin(self, request: web.Request) -> str:
        """Returns the origin whose pages may read the answer; empty for none."""
        given, allowed = request.headers.get("Origin", ""), self._config.cors_origins
        return "*" if given and "*" in allowed else given if given in allowed else ""

    async def _share(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the request's id, and the headers that let pages of `cors_origins` read the answer."""
        response.headers[ID_HEADER] = request.get(REQUEST_ID, "")
        if origin := self._origin(request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = f"{ID_HEADER}, {HINTS_HEADER}"
            response.headers["Vary"] = "Origin"
            if request.method == "OPTIONS":
                wanted = request.headers.get("Access-Control-Request-Headers", "")
                response.headers["Access-Control-Allow-Headers"] = wanted
                response.headers["Access-Control-Allow-Methods"] = "GET, POST"
                response.headers["Access-Control-Max-Age"] = "600"

    # --- the proxy's own pages ------------------------------------------------------------------------------

    async def _home(self, request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "/ui"})

    async def _health(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        well: dict[str, dict[str, bool]] = {hop: pool.health(now) for hop, pool in self._pools.pools.items()}
        reason = "" if any(well["decode"].values()) else "no decode node can be reached"
        if self.requests.admission.closing:
            reason = "it is being stopped"
        body: dict[str, Any] = {"status": "unavailable", "reason": reason} if reason else {"status": "ok"}
        if self._keys.may_watch(request.headers.get("Authorization")):
            body |= {"version": pd_cache.__version__, "mooncake": mooncake_version(), **well}
            body |= self._pools.describe(now)
        return web.json_response(body, status=503 if reason else 200)

    async def _samples(self, request: web.Request) -> web.Response:
        self._keys.check_watcher(request.headers.get("Authorization"))
        return web.Response(
            body=self.metrics.page(self._pools), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _trip(self, request: web.Request) -> web.Response:
        client = self._keys.visible_client(authorization := request.headers.get("Authorization"))
        trip = self.requests.trips.get(request.match_info["id"], client)
        if not self._keys.may_watch(authorization):
            trip = Trip(trip.client, tuple(replace(hop, node="") for hop in trip.hops))
        return web.json_response(msgspec.to_builtins(trip))


async def _repeat(wait_s: Callable[[], float], do: Callable[[], Awaitable[None]]) -> NoReturn:
    loop, took_s = asyncio.get_running_loop(), 0.0
    while True:
        await asyncio.sleep(wait_s() - took_s)
        began = loop.time()
        try:
            await do()
        except Exception:  # the next time may succeed
            log.exception("%s failed unexpectedly", do)
        took_s = loop.time() - began
