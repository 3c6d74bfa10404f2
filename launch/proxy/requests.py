"""Takes a client's request from its key to its last byte: admission, body, deadline. Counts and logs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from launch.proxy.admission import Admission
from launch.proxy.answers import ApiError
from launch.proxy.bodies import BodyBudget, read_body
from launch.proxy.budget import RetryBudget
from launch.proxy.completions import Completions
from launch.proxy.connections import Connections
from launch.proxy.delivery import Deliveries
from launch.proxy.edge import request_id
from launch.proxy.exchange import ClientGone, Exchange
from launch.proxy.keys import Keys
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.models import LIST_S, ModelList
from launch.proxy.ui import RecentRequests
from pd_cache.cluster import LARGEST_BODY, ProxyConfig
from pd_cache.tracing import UNTRACED, Tracing

log = logging.getLogger(__name__)

MAX_BODY = LARGEST_BODY


class Requests:
    """Serves the pages of OpenAI's API."""

    def __init__(
        self,
        config: ProxyConfig,
        completions: Completions,
        models: ModelList,
        *,
        keys: Keys,
        admission: Admission,
        bodies: BodyBudget,
        retries: RetryBudget,
        connections: Connections,
        deliveries: Deliveries,
        metrics: ProxyMetrics,
        recent: RecentRequests,
        tracing: Tracing = UNTRACED,
    ) -> None:
        self._config = config
        self._completions = completions
        self._models = models
        self._keys = keys
        self._admission = admission
        self._bodies = bodies
        self._retries = retries
        self._connections = connections
        self._deliveries = deliveries
        self._metrics = metrics
        self._recent = recent
        self._tracing = tracing

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, self._read_and_complete, self._note)

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        return await self._answered(request, self._admit_and_list, lambda exchange, status, took: None)

    async def _answered(
        self,
        request: web.Request,
        answer: Callable[[Exchange], Awaitable[web.StreamResponse]],
        ended: Callable[[Exchange, int, float], None],
    ) -> web.StreamResponse:
        """Checks the client's key and runs `answer`. Counts and logs the request, and calls `ended` with the status and the seconds that it took."""
        exchange = Exchange(request, request_id.get(), self._retries, self._connections)
        span = exchange.begin_span(self._tracing)
        status = 499
        try:
            exchange.client = self._keys.client(request.headers.get("Authorization"))
            response = await answer(exchange)
            status = response.status
        except ApiError as error:
            status = error.status
            raise
        except ClientGone as error:
            # aiohttp needs something to return; nothing reads it
            log.debug("request %s: the client is gone", exchange.id, exc_info=error)
            return exchange.response or web.Response(status=499)
        finally:
            self._metrics.requests.labels(str(status)).inc()
            span.note(status=status, **{f"{hop}_node": node for hop, node in exchange.nodes.items()})
            span.end(f"status {status}" if status >= 500 else "")
            took = time.monotonic() - exchange.started
            log.info("request %s: %d in %.3f s %s", exchange.id, status, took, exchange.told())
            ended(exchange, status, took)
        return response

    def _note(self, exchange: Exchange, status: int, took: float) -> None:
        if exchange.nodes:
            self._recent.note(exchange.id, took, exchange.first_byte_s, status, exchange.trip())

    async def _read_and_complete(self, exchange: Exchange) -> web.StreamResponse:
        config = self._config
        self._admission.check(exchange.client)  # so that no body is read only to be refused
        with self._bodies.opened(exchange.client or exchange.request.remote or "") as memory:
            limit_s = min(config.body_timeout_s, config.request_timeout_s)
            body = await read_body(exchange.request, memory, self._bodies, MAX_BODY, limit_s)
            self._connections.arrived(exchange.request.transport)
            exchange.forget_body = lambda: self._bodies.release(memory)
            exchange.take_memory = lambda count: self._bodies.extend(memory, count)
            with self._admission.admitted(exchange.client):
                left = config.request_timeout_s - (time.monotonic() - exchange.started)
                serving = self._completions.serve(exchange, body)
                del body  # so that it takes memory only until the decode node has it
                return await self._deliveries.finish(exchange, serving, max(0.0, left))

    async def _admit_and_list(self, exchange: Exchange) -> web.StreamResponse:
        with self._admission.admitted(exchange.client):
            limit_s = min(LIST_S, self._config.request_timeout_s)
            return await self._deliveries.finish(exchange, self._models.serve(exchange), limit_s)
