"""A request's way until its decode node, for both faces of the proxy: `serving` and `picker`.

1. `accepted` checks the client's key, has the face read the body, and holds a place for the request.
2. `prepare` does all that comes before a completion's decode node, one step a line.
3. The face asks the decode node, and calls `answering` when its answer begins.
4. At the request's end, `accepted` frees, counts and logs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from multidict import CIMultiDictProxy

from launch.openai import ApiError, overloaded
from launch.proxy.bodies import BodyShare, ClientGone, Completion, HandedOver
from launch.proxy.exchange import Exchange
from launch.proxy.hints.actions import Hints
from launch.proxy.hops import Hops, free_frames
from launch.proxy.keys import Admission, Keys
from launch.proxy.metrics import ProxyMetrics, RecentTrips
from launch.proxy.routing.limits import WAIT_S, Asked
from launch.proxy.routing.node_pool import RetryBudget
from launch.proxy.ui import EndedRequest, RecentRequests
from pd_cache.cluster import LimitsConfig, ProxyConfig
from pd_cache.tracing import Tracing

log = logging.getLogger(__name__)

T = TypeVar("T")
COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
_FEW_RETRIES = 100
_UNLIMITED = LimitsConfig()
_LOOK_S = 0.1
"""The time between two checks of whether a waiting request may go on."""
_LARGE = 1 << 18
"""The size in bytes from which parsing a body takes too long for the event loop."""


class Requests:
    """The requests under way."""

    def __init__(
        self,
        config: ProxyConfig,
        keys: Keys,
        hops: Hops,
        hints: Hints,
        metrics: ProxyMetrics,
        recent: RecentRequests,
        tracing: Tracing,
    ) -> None:
        self.admission = Admission(config.max_requests, config.max_requests_per_key, keys.limits)
        self.retries = RetryBudget(max(_FEW_RETRIES, config.max_requests))
        self.running: set[asyncio.Task[Any]] = set()
        self.config = config
        self.keys = keys
        self.hops = hops
        self.hints = hints
        self.metrics = metrics
        self.trips = RecentTrips()
        """The last requests."""
        self._recent = recent
        self._tracing = tracing
        # one thread, because each keeps memory for the next body
        self._large = ThreadPoolExecutor(1, "proxy-large")

    def new(self, request_id: str, path: str, headers: CIMultiDictProxy[str]) -> Exchange:
        """Returns the state of a request that has just come."""
        share = BodyShare(self.hops.bodies)
        return Exchange(request_id, path, headers, self.retries, share, self._tracing)

    @asynccontextmanager
    async def accepted(self, exchange: Exchange, read: Callable[[], Awaitable[bytes]]) -> AsyncIterator[None]:
        """Checks the client's key, reads the body, and holds a place for the request while the block answers
        it. Ends the block at the request's deadline.

        In the end, frees what the request holds, counts it and logs it. Raises ApiError with the error for
        the client, ClientGone if the client hung up.
        """
        keys, headers = self.keys, exchange.headers
        try:
            client = exchange.client = keys.client(headers.get("Authorization"))
            exchange.client = keys.in_tenant(client, headers)
            self.admission.check(exchange.client)  # so that no body is read only to be refused
            exchange.body = await read()
            with self.admission.admitted(exchange.client), self.metrics.running.track_inprogress():
                async with self._until_its_deadline(exchange):
                    yield
        except ApiError as error:
            self._note_error(exchange, error)
            raise
        finally:
            self._ended(exchange)

    # --- until its decode node ------------------------------------------------------------------------------

    async def prepare(self, exchange: Exchange) -> None:
        """Does all that comes before the decode node. Then `exchange.body` is the body for that node. Raises
        ApiError if the request is refused, or if no node can answer it."""
        completion = await self._read(exchange)
        await self._decide(exchange, completion)
        first = await self._admit(exchange, completion.priority())
        self.hints.begin(exchange, completion.hints)
        handoff: HandedOver | None = None
        result = exchange.direct
        if not result:
            result, handoff = await self._prefilled(exchange, completion, first)
        self.metrics.handoffs.labels(result).inc()
        exchange.body = await self._computed(exchange, lambda: completion.for_decode(handoff))

    async def _read(self, exchange: Exchange) -> Completion:
        """Returns the client's request. Raises ApiError if no node could answer it."""
        chat, tenant = exchange.path == CHAT, exchange.client.tenant
        completion = await self._computed(
            exchange, lambda: Completion(exchange.body, chat=chat, tenant=tenant)
        )
        exchange.prompt = await self._computed(exchange, completion.prompt)
        exchange.streamed = completion.streams()
        if not self.hops.pools["decode"].nodes.keys() - set(exchange.excluded):
            raise overloaded("No decode node could answer")
        exchange.trial.budget.asked(time.monotonic())
        return completion

    async def _decide(self, exchange: Exchange, completion: Completion) -> None:
        """Looks the prompt up in the pool, and decides whether a prefill node has to compute it."""
        name = bool(completion.hints) or self.hints.prefetched_by(exchange.client)
        with exchange.tracing.begin("pd_cache.proxy_lookup", exchange.span.headers) as span:
            exchange.prompt = await self.hops.look_up(exchange, completion, exchange.prompt, name=name)
            exchange.direct = self._why_direct(exchange, completion)
            span.note(direct=exchange.direct)
        tenant, named = exchange.client.tenant, exchange.prompt.named
        if tenant in (self.keys.tenants or ()):
            self.metrics.tenant_requests.labels(tenant).inc()
            if named is not None and named.pool_tokens is not None:
                self.metrics.tenant_tokens.labels(tenant, "requested").inc(named.tokens)
                self.metrics.tenant_tokens.labels(tenant, "found").inc(named.pool_tokens)

    def _why_direct(self, exchange: Exchange, completion: Completion) -> str:
        """Returns why no prefill node has to compute the prompt; empty if one has to."""
        prompt, hops = exchange.prompt, self.hops
        if why := hops.rule.why(prompt.tokens, prompt.found):
            return why
        if completion.scores_prompt():
            return "scored"
        if not hops.pools["prefill"].nodes:
            return "no_prefill_nodes"
        return "not_worth" if hops.declines(exchange) else ""

    async def _admit(self, exchange: Exchange, priority: int) -> str | None:
        """Returns the prefill node to try first, if one has to compute the prompt. With limits, a request
        that would miss them waits, or ends with ApiError 429."""
        limits = self.keys.times(exchange.client) or self.config.limits
        try:
            return self._admit_now(limits, exchange, exchange.started)
        except ApiError as error:
            if limits.over == "refuse":
                raise
            over = error
        return await self._wait(limits, exchange, priority, over)

    def _admit_now(
        self, limits: LimitsConfig, exchange: Exchange, arrived: float, *, waiting: bool = False
    ) -> str | None:
        """Returns the prefill node to try first, which thereby has its turn. Raises ApiError 429 if the
        request would miss its limits."""
        now, known, pool = time.monotonic(), self.hops.limits, self.hops.pools["prefill"]
        first = None if exchange.direct else pool.cheapest(now, exchange.prompt)
        if limits != _UNLIMITED:
            exchange.predicted = known.predict(first, exchange.prompt, now, now - arrived)
            known.check(exchange.predicted, limits, waiting=waiting)
        if first is not None:
            pool.take(first)
        return first

    async def _wait(
        self, limits: LimitsConfig, exchange: Exchange, priority: int, over: ApiError
    ) -> str | None:
        """Waits until a request that would miss its limits may go on. Then returns the prefill node to try
        first. Raises ApiError 429, or `over`, if it may not even wait."""
        known, holder = self.hops.limits, exchange.client.holder
        with known.place(priority, holder, over) as place:
            until = time.monotonic() + WAIT_S
            while time.monotonic() < until:
                await asyncio.sleep(_LOOK_S)
                if place == next(first for first in known.waiting if first.holder == holder):
                    with suppress(ApiError):
                        return self._admit_now(limits, exchange, exchange.started, waiting=True)
        return self._admit_now(limits, exchange, time.monotonic())  # as if it came now, for `Retry-After`

    async def _prefilled(
        self, exchange: Exchange, completion: Completion, first: str | None
    ) -> tuple[str, HandedOver | None]:
        """Has a prefill node compute the prompt, `first` if that works, while a decode node may load it.
        Returns the outcome, and what the prefill node handed over."""
        hops, stream = self.hops, None
        if (node := hops.streaming_node(exchange)) is not None:
            body = await self._computed(exchange, completion.for_stream)
            stream = asyncio.create_task(hops.load(exchange, node, completion.path, body))
            exchange.until_answered.callback(stream.cancel)
        body = await self._computed(exchange, completion.for_prefill)
        result, handoff = await hops.prefill(exchange, body, first)
        exchange.prefill_s = time.monotonic() - exchange.started
        self.metrics.prefill_seconds.observe(exchange.prefill_s)
        if not handoff and stream is not None:
            stream.cancel()  # nothing will come
        return result, handoff

    async def _computed(self, exchange: Exchange, function: Callable[[], T]) -> T:
        """Calls the function and returns its result. For a large body, calls it on a separate thread, so that
        other requests go on."""
        if len(exchange.body) < _LARGE:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._large, function)

    # --- its answer and its end -----------------------------------------------------------------------------

    def answering(self, exchange: Exchange, asked: Asked, *, well: bool) -> None:
        """Notes that the decode node's answer begins: `well`, or with a refusal."""
        if well:
            asked.answered(time.monotonic())
        exchange.first_byte_s = time.monotonic() - exchange.started
        self.metrics.first_byte_seconds.observe(exchange.first_byte_s)
        if well and exchange.streamed:
            error = self.hops.limits.measured(exchange.predicted, exchange.first_byte_s)
            if error is not None:
                self.metrics.prediction_error.observe(error)
        exchange.until_answered.close()
        exchange.share.close()
        exchange.body = b""

    @asynccontextmanager
    async def _until_its_deadline(self, exchange: Exchange) -> AsyncIterator[None]:
        """Ends the block at the request's deadline. Turns every failure into an ApiError, except that the
        client has gone."""
        task = asyncio.current_task()
        assert task is not None
        limit_s = max(0.0, self.config.request_timeout_s - (time.monotonic() - exchange.started))
        self.running.add(task)
        try:
            async with asyncio.timeout(limit_s) as limit:
                yield
        except (ApiError, ClientGone):
            raise
        except asyncio.CancelledError:
            if not self.admission.closing:
                raise  # the client has gone
            task.uncancel()
            raise overloaded("The proxy is shutting down") from None
        except Exception as error:  # the client gets an error in OpenAI's shape for every failure
            if limit.expired():
                what = f"No complete answer within {limit_s:.3g} s"
                raise ApiError(504, what, code="timeout") from error
            log.exception("request %s: unexpected error", exchange.id)
            raise ApiError(500, "Internal error of the proxy", code="internal_error") from error
        finally:
            self.running.discard(task)

    def _note_error(self, exchange: Exchange, error: ApiError) -> None:
        free_frames(error)
        if exchange.answer_status is not None:
            exchange.status, exchange.cut_status = exchange.answer_status, error.status
            self.metrics.cut.labels(error.code or "").inc()
            return
        exchange.status = error.status
        if error.status == 429:
            self.metrics.refused.labels(error.code).inc()

    def _ended(self, exchange: Exchange) -> None:
        exchange.until_answered.close()
        if exchange.hinted is not None:
            exchange.hinted.cancel()
        exchange.share.close()
        exchange.body = b""
        status = exchange.status
        self.metrics.requests.labels(str(status)).inc()
        exchange.span.note(status=status, **{f"{hop}_node": node for hop, node in exchange.nodes.items()})
        exchange.span.end(f"status {status}" if status >= 500 else "")
        took = time.monotonic() - exchange.started
        log.info("request %s: %d in %.3f s %s", exchange.id, status, took, exchange.summary())
        if exchange.path != MODELS and (exchange.nodes or status >= 500):
            trip, status = exchange.trip(), exchange.cut_status or status
            self.trips.note(exchange.id, trip)
            first_s, streamed, prefill_s = exchange.first_byte_s, exchange.streamed, exchange.prefill_s
            ended = EndedRequest(exchange.id, took, first_s, status, trip, streamed, prefill_s)
            self._recent.note(ended)

    async def drain(self) -> None:
        """Refuses new requests, waits up to `drain_s` for those under way to end, then cuts off the rest."""
        self.admission.closing = True
        self.hints.end_prefetches()
        if self.running:
            await asyncio.wait(self.running, timeout=self.config.drain_s)
        for task in self.running:
            task.cancel()
        self._large.shutdown(wait=False, cancel_futures=True)
