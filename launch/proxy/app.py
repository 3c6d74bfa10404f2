"""The proxy as an aiohttp application."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web

from launch.discovery import View
from launch.proxy.admission import Admission
from launch.proxy.answers import ApiError
from launch.proxy.bodies import BodyBudget, read_body
from launch.proxy.budget import RetryBudget
from launch.proxy.completions import CHAT, Completions
from launch.proxy.connections import Connections
from launch.proxy.delivery import Deliveries
from launch.proxy.direct import DirectRule
from launch.proxy.exchange import ID_HEADER, ClientGone, Exchange
from launch.proxy.files import WatchedFiles
from launch.proxy.fleet import Fleet
from launch.proxy.health import HealthChecks
from launch.proxy.hops import new_session
from launch.proxy.keys import Keys
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.models import LIST_S, Models
from launch.proxy.nodes import Nodes
from launch.proxy.overview import Overview, Peers
from pd_cache.cluster import LARGEST_BODY, ProxyConfig

log = logging.getLogger(__name__)

MAX_BODY = LARGEST_BODY
_FEW_RETRIES = 100
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_request_id: ContextVar[str] = ContextVar("request_id")
"""Set at the edge, for the handler inside."""


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
    ) -> None:
        """The proxy knows no nodes yet: see `update`. `direct` decides which prompts need no prefill node; by default none does.

        `master`: where the pool's master is, for lookups. `files`: the watcher of files, to which the proxy adds its key files. `peers`
        answers `/peers`. `connections`: those of the listener, if it counts them. Raises ConfigError for a key file that cannot be used.
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
        self._fleet = Fleet(config, self._direct, master)
        self._nodes = Nodes(self._fleet.pools, self.metrics, lambda: self._keys.credentials)
        self._models = Models(self._nodes)
        self._completions = Completions(self._nodes, self._fleet, self._direct, self.metrics, config.prefill_timeout_s)
        self._overview = Overview(self._fleet, self._keys, self._admission, self.metrics, peers)

    def update(self, view: View) -> None:
        """Use the view's nodes from now on. Call it on the event loop's thread, once that runs."""
        self._fleet.update(view)

    def app(self) -> web.Application:
        """Returns a new application. Run it with `handler_cancellation=True`, or clients that go away are noticed late."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._edge])
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post(CHAT, self._complete)
        app.router.add_get("/v1/models", self._list_models, allow_head=False)
        self._overview.add_to(app)
        app.cleanup_ctx.append(self._with_session)
        app.on_shutdown.append(self._drain)
        return app

    # --- the edge ------------------------------------------------------------------------------------------------

    @web.middleware
    async def _edge(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get(ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        _request_id.set(request_id)
        transport = request.transport
        self.connections.began(transport, time.monotonic())
        if not request.can_read_body:
            self.connections.arrived(transport)
        try:
            return await self._told(request, request_id, handler)
        finally:
            self.connections.ended(transport, time.monotonic())

    async def _told(
        self, request: web.Request, request_id: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Returns what the handler answers; turns what it raises into an error that OpenAI's clients understand."""
        response: web.StreamResponse
        try:
            response = await handler(request)
        except ApiError as error:
            response = error.response()
        except web.HTTPException as error:
            what = f"{request.method} {request.path[:200]}: {error.reason}"
            response = ApiError(error.status, what, code=error.reason.lower().replace(" ", "_")).response()
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except Exception:  # the edge: whatever went wrong, the client gets an error in OpenAI's shape
            log.exception("request %s: unexpected error", request_id)
            response = ApiError(500, "Internal error of the proxy", code="internal_error").response()
        if not response.prepared:
            response.headers[ID_HEADER] = request_id
        return response

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, self._read_and_complete)

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, self._admit_and_list)

    async def _answered(
        self, request: web.Request, answer: Callable[[Exchange], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Does `answer` for a client with a key, counted and logged."""
        exchange = Exchange(request, _request_id.get(), self._retries, self.connections)
        status = 499
        try:
            exchange.client = self._keys.client(request.headers.get("Authorization"))
            response = await answer(exchange)
            status = response.status
        except ApiError as error:
            status = error.status
            raise
        except ClientGone as error:
            # aiohttp needs something to return; nobody reads it
            log.debug("request %s: the client is gone", exchange.id, exc_info=error)
            return exchange.response or web.Response(status=499)
        finally:
            self.metrics.requests.labels(str(status)).inc()
            took = time.monotonic() - exchange.started
            log.info("request %s: %d in %.3f s %s", exchange.id, status, took, exchange.told())
        return response

    async def _read_and_complete(self, exchange: Exchange) -> web.StreamResponse:
        config = self._config
        self._admission.check(exchange.client)  # so that no body is read only to be refused
        with self._bodies.held() as memory:
            limit_s = min(config.body_timeout_s, config.request_timeout_s)
            body = await read_body(exchange.request, memory, self._bodies, MAX_BODY, limit_s)
            self.connections.arrived(exchange.request.transport)
            exchange.forget_body = lambda: self._bodies.release(memory)
            with self._admission.admitted(exchange.client):
                left = config.request_timeout_s - (time.monotonic() - exchange.started)
                serving = self._completions.serve(exchange, body)
                del body  # it takes memory until the decode node has it, and no longer
                return await self.deliveries.finish(exchange, serving, max(0.0, left))

    async def _admit_and_list(self, exchange: Exchange) -> web.StreamResponse:
        with self._admission.admitted(exchange.client):
            limit_s = min(LIST_S, self._config.request_timeout_s)
            return await self.deliveries.finish(exchange, self._models.serve(exchange), limit_s)

    # --- life ----------------------------------------------------------------------------------------------------

    async def _with_session(self, app: web.Application) -> AsyncIterator[None]:
        config = self._config
        # a request holds one connection at a time; the rest is for health checks and connections that are being closed
        session = self._nodes.session = new_session(config.max_requests + 128, config.connect_timeout_s)
        checks = HealthChecks(
            self._fleet.pools.values(), config.health_interval_s, config.health_timeout_s, self._fleet.told_namespace
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

    async def _drain(self, app: web.Application) -> None:
        """Let requests end, then end them. New ones are refused meanwhile."""
        self._admission.closing = True
        await self.deliveries.drain(self._config.drain_s)
