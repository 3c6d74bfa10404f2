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
from contextlib import asynccontextmanager
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
        it. In the end, frees what the request holds, counts it and logs it.

        Raises ApiError with the error for the client. If the client hangs up, it is cancelled, or a read or a
        write raises ClientGone.
        """
        try:
            exchange.client = self.keys.client(exchange.headers.get("Authorization"))  # 401
            exchange.client = self.keys.in_tenant(exchange.client, exchange.headers)  # 400 or 403
            # 503 if the proxy is full, 429 if the client has its share; again when it takes its place
            self.admission.check(exchange.client)
            exchange.body = await read()  # 408 if it is too slow, 413 if too large, 503 without memory
            with self.admission.admitted(exchange.client), self.metrics.running.track_inprogress():
                async with self._until_its_deadline(exchange):  # cancels the block, and raises 504
                    yield
        except ApiError as error:
            self._note_error(exchange, error)
            raise
        finally:
            self._ended(exchange)

    # --- until its decode node ------------------------------------------------------------------------------

    async def prepare(self, exchange: Exchange) -> None:
        """Does all that comes before the decode node. Then `exchange.decode_body` is the client's body with
        the `kv_transfer_params` of a prefill node's answer. Raises ApiError if the request is refused, or if
        no node can answer it."""
        completion = await self._parse(exchange)
        hinted = bool(completion.hints) or self.hints.prefetches.any_of(exchange.client)
        with exchange.tracing.begin("pd_cache.proxy_lookup", exchange.span.headers) as span:
            exchange.prompt = await self.hops.look_up(exchange, completion, exchange.prompt, name=hinted)
            # a prefill node would save too little, there is none, or the decode node would compute anyway
            exchange.direct = self._why_direct(exchange, completion)
            span.note(direct=exchange.direct)
        self._count_for_tenant(exchange)
        await self._within_limits(exchange, completion.priority())  # may wait, or raise 429
        self.hints.begin(exchange, completion.hints)
        # a decode node that holds the prompt already, or loads it during the prefill hop, is chosen now
        prefetched = self.hints.prefetches.take(exchange)
        loading = None if exchange.direct else self._loading_node(exchange, prefetched)
        exchange.decode_node = loading or prefetched
        result, handoff = exchange.direct, None
        if not exchange.direct:
            # meanwhile `loading` loads it from the pool; nobody waits for that. No handoff if prefill nodes
            # fail, refuse, or take `prefill_timeout_s` in all: then the decode node computes
            result, handoff = await self._prefill(exchange, completion, loading)
        self.metrics.handoffs.labels(result).inc()
        exchange.decode_body = await self._computed(exchange, lambda: completion.for_decode(handoff))
        exchange.body = b""

    async def _parse(self, exchange: Exchange) -> Completion:
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

    def _why_direct(self, exchange: Exchange, completion: Completion) -> str:
        """Returns why no prefill node has to compute the prompt; empty if one has to."""
        prompt, decode = exchange.prompt, self.hops.pools["decode"]
        if why := self.hops.rule.why(prompt.tokens, prompt.found):
            return why
        if completion.scores_prompt():
            return "scored"
        if not self.hops.pools["prefill"].nodes:
            return "no_prefill_nodes"
        node = decode.cheapest(time.monotonic(), tried=exchange.excluded)
        # even after a prefill node, it would compute the prompt itself
        declines = node is not None and prompt.tokens <= decode.node(node).record.declines
        return "not_worth" if declines else ""

    def _loading_node(self, exchange: Exchange, prefetched: str | None) -> str | None:
        """Returns the decode node that should load a long prompt while a prefill node computes it: the node
        that has `prefetched` it, or else the cheapest. Returns None if none should."""
        hops, prompt, pool = self.hops, exchange.prompt, self.hops.pools["decode"]
        if not hops.rule.streams(prompt.tokens, prompt.found):
            return None
        if hops.bodies.used > hops.bodies.limit // 2:
            return None  # the other half is for requests that are to be answered
        node = prefetched or pool.cheapest(time.monotonic(), tried=exchange.excluded)
        if node is None or not pool.node(node).record.streams:
            return None
        pool.take(node)
        return node

    async def _prefill(
        self, exchange: Exchange, completion: Completion, loading: str | None
    ) -> tuple[str, HandedOver | None]:
        """Has a prefill node compute the prompt, while the decode node `loading` loads it. Returns the
        outcome, and what the prefill node handed over."""
        stream = None
        if loading is not None:
            body = await self._computed(exchange, completion.for_stream)
            stream = asyncio.create_task(self.hops.load(exchange, loading, completion.path, body))
            exchange.until_answered.callback(stream.cancel)
        body = await self._computed(exchange, completion.for_prefill)
        result, handoff = await self.hops.prefill(exchange, body)
        exchange.prefill_s = time.monotonic() - exchange.started
        self.metrics.prefill_seconds.observe(exchange.prefill_s)
        if not handoff and stream is not None:
            stream.cancel()  # nothing will come
        return result, handoff

    async def _computed(self, exchange: Exchange, function: Callable[[], T]) -> T:
        """Returns the function's result. Calls it on a separate thread if the body is large, so that other
        requests go on."""
        if len(exchange.body) < _LARGE:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._large, function)

    # --- with limits ----------------------------------------------------------------------------------------

    async def _within_limits(self, exchange: Exchange, priority: int) -> None:
        """Returns once the request may go on without missing its limits. Raises ApiError 429 if it would miss
        them and may not wait any longer."""
        limits, known = self.keys.times(exchange.client) or self.config.limits, self.hops.limits
        if limits == _UNLIMITED or (over := self._missed(exchange, limits, exchange.started)) is None:
            return
        if limits.over == "refuse":
            raise over
        holder, until = exchange.client.holder, time.monotonic() + WAIT_S
        with known.place(priority, holder, over) as place:
            while time.monotonic() < until:
                await asyncio.sleep(_LOOK_S)
                first = next(other for other in known.waiting if other.holder == holder)
                if place == first and not self._missed(exchange, limits, exchange.started, waiting=True):
                    return
        # as if it came now, for `Retry-After`
        if (over := self._missed(exchange, limits, time.monotonic())) is not None:
            raise over

    def _missed(
        self, exchange: Exchange, limits: LimitsConfig, arrived: float, *, waiting: bool = False
    ) -> ApiError | None:
        """Predicts the request's times, at the prefill node that it would get now. Returns the error 429 if
        it would miss its limits."""
        now, known, prompt = time.monotonic(), self.hops.limits, exchange.prompt
        node = None if exchange.direct else self.hops.pools["prefill"].cheapest(now, prompt)
        exchange.predicted = known.predict(node, prompt, now, now - arrived)
        return known.missed(exchange.predicted, limits, waiting=waiting)

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
        exchange.free()

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
                what = f"No complete answer within {self.config.request_timeout_s:.3g} s"
                raise ApiError(504, what, code="timeout") from error
            log.exception("request %s: unexpected error", exchange.id)
            raise ApiError(500, "Internal error of the proxy", code="internal_error") from error
        finally:
            self.running.discard(task)

    def _count_for_tenant(self, exchange: Exchange) -> None:
        tenant, named = exchange.client.tenant, exchange.prompt.named
        if tenant in (self.keys.tenants or ()):
            self.metrics.tenant_requests.labels(tenant).inc()
            if named is not None and named.pool_tokens is not None:
                self.metrics.tenant_tokens.labels(tenant, "requested").inc(named.tokens)
                self.metrics.tenant_tokens.labels(tenant, "found").inc(named.pool_tokens)

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
        exchange.free()
        if exchange.hinted is not None:
            exchange.hinted.cancel()
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
        """Refuses new requests, waits up to `drain_s` for those under way to end, then cuts off the rest.
        Requests whose bodies are still arriving count as new."""
        self.admission.closing = True
        self.hints.prefetches.end()
        if self.running:
            await asyncio.wait(self.running, timeout=self.config.drain_s)
        for task in self.running:
            task.cancel()
        self._large.shutdown(wait=False, cancel_futures=True)
