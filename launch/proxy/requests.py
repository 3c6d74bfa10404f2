"""A client's request from its key to its last byte: admission, body, the way over the nodes, deadline, and an
error that the client can read."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from launch.openai import ApiError, overloaded
from launch.proxy.bodies import BodyShare, ClientGone, Completion, HandedOver, read_body
from launch.proxy.exchange import Exchange
from launch.proxy.hints import HINTS_S, LARGEST_HINTS, Hints
from launch.proxy.hops import Hops, free_frames
from launch.proxy.keys import Admission, Keys
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.nodes import HopError
from launch.proxy.prefixes import RoutedPrompt
from launch.proxy.routing import RetryBudget
from launch.proxy.ui import EndedRequest, RecentRequests
from pd_cache.cluster import LARGEST_BODY, ProxyConfig
from pd_cache.tracing import Tracing

log = logging.getLogger(__name__)

T = TypeVar("T")
CHAT = "/v1/chat/completions"
_FEW_RETRIES = 100
_LAST_WORDS_S = 1.0
"""How long it may take to inform a client that its stream broke."""
_LARGE = 1 << 18
"""The size in bytes from which parsing a body takes too long for the event loop."""
Serve = Callable[[Exchange, bytes], Awaitable[web.StreamResponse]]
"""Answers a request, given its body."""


class Requests:
    """Serves the pages of OpenAI's API."""

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
        self._config = config
        self._keys = keys
        self._hops = hops
        self._hints = hints
        self._metrics = metrics
        self._recent = recent
        self._tracing = tracing
        # one thread, because each keeps memory for the next body
        self._large = ThreadPoolExecutor(1, "proxy-large")

    def add_to(self, app: web.Application) -> None:
        limit_s = self._config.request_timeout_s
        for path in ("/v1/completions", CHAT):
            app.router.add_post(path, partial(self._answered, self._over_nodes, LARGEST_BODY, limit_s))
        app.router.add_post("/hints", partial(self._answered, self._hint, LARGEST_HINTS, HINTS_S))
        app.router.add_get(
            "/v1/models", partial(self._answered, self._hops.models, 0, limit_s), allow_head=False
        )

    async def drain(self, app: web.Application) -> None:
        """Refuses new requests, waits up to `drain_s` for those under way to end, then cuts off the rest."""
        self.admission.closing = True
        self._hints.end_prefetches()
        if self.running:
            await asyncio.wait(self.running, timeout=self._config.drain_s)
        for task in self.running:
            task.cancel()
        self._large.shutdown(wait=False, cancel_futures=True)

    # --- from its key to its end ----------------------------------------------------------------------------

    async def _answered(
        self, serve: Serve, most: int, read_s: float, request: web.Request
    ) -> web.StreamResponse:
        """Checks the client's key, reads a body of at most `most` bytes within `read_s`, and serves the
        request. Counts and logs it."""
        exchange = Exchange(request, self.retries, BodyShare(self._hops.bodies), self._tracing)
        status = 499
        try:
            client = exchange.client = self._keys.client(request.headers.get("Authorization"))
            exchange.client = self._keys.in_tenant(client, request)
            response = await self._admitted(exchange, serve, most, read_s)
            status = response.status
        except ApiError as error:
            status = error.status
            free_frames(error)
            raise
        except ClientGone as error:
            # aiohttp needs something to return; nothing reads it
            log.debug("request %s: the client is gone", exchange.id, exc_info=error)
            return exchange.response or web.Response(status=499)
        finally:
            exchange.share.give_back()
            self._metrics.requests.labels(str(status)).inc()
            exchange.span.note(status=status, **{f"{hop}_node": node for hop, node in exchange.nodes.items()})
            exchange.span.end(f"status {status}" if status >= 500 else "")
            took = time.monotonic() - exchange.started
            log.info("request %s: %d in %.3f s %s", exchange.id, status, took, exchange.summary())
            if request.method == "POST" and (exchange.nodes or status >= 500):
                trip, status = exchange.trip(), exchange.cut_status or status
                self._hops.trips.note(exchange.id, trip)
                self._recent.note(EndedRequest(exchange.id, took, exchange.first_byte_s, status, trip, exchange.streamed, exchange.prefill_s))  # fmt: skip
        return response

    async def _admitted(
        self, exchange: Exchange, serve: Serve, most: int, read_s: float
    ) -> web.StreamResponse:
        self.admission.check(exchange.client)  # so that no body is read only to be refused
        body = await read_body(exchange.request, exchange.share, most, read_s)
        with self.admission.admitted(exchange.client):
            left = self._config.request_timeout_s - (time.monotonic() - exchange.started)
            serving = serve(exchange, body)
            del body  # so that it takes memory only until the decode node has it
            return await self._finish(exchange, serving, max(0.0, left))

    async def _hint(self, exchange: Exchange, body: bytes) -> web.StreamResponse:
        answer = await self._hints.take(body, exchange)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _finish(
        self, exchange: Exchange, serving: Awaitable[web.StreamResponse], limit_s: float
    ) -> web.StreamResponse:
        """Runs `serving` within `limit_s`, and ends it with the client's connection. Raises ApiError for the
        client."""
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        self._metrics.running.set(len(self.running))
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await serving
        except ApiError as error:
            failure = error
        except HopError as error:
            failure = ApiError(
                502, f"The decode node failed while it answered: {error.reason}", code="node_failed"
            )
        except ClientGone:
            raise
        except asyncio.CancelledError:
            if not self.admission.closing:
                raise  # the client has gone
            task.uncancel()
            failure = overloaded("The proxy is shutting down")
        except Exception:  # the client gets an error in OpenAI's shape for every failure
            failure = ApiError(504, f"No complete answer within {limit_s:.3g} s", code="timeout")
            if not limit.expired():
                log.exception("request %s: unexpected error", exchange.id)
                failure = ApiError(500, "Internal error of the proxy", code="internal_error")
        finally:
            self.running.discard(task)
            self._metrics.running.set(len(self.running))
        return await self._cut(exchange, failure)

    async def _cut(self, exchange: Exchange, error: ApiError) -> web.StreamResponse:
        """Reports an error to the client: by a status before the first byte, by an event in a stream,
        otherwise by breaking off."""
        response = exchange.response
        if response is None or not response.prepared:
            raise error
        exchange.cut_status = error.status
        self._metrics.cut.labels(error.code or "").inc()
        log.warning("request %s: cut after its first byte: %s", exchange.id, error.message)
        response.force_close()
        if exchange.streamed and response.content_length is None:
            between = b"" if exchange.ending.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
            event = between + b"data: " + error.body() + b"\n\n"
            try:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await exchange.write(event)
                    await response.write_eof()
                return response
            except (TimeoutError, ClientGone):
                pass
        if exchange.request.transport is not None:
            exchange.request.transport.abort()
        return response

    # --- a completion's way over the nodes ------------------------------------------------------------------

    async def _over_nodes(self, exchange: Exchange, body: bytes) -> web.StreamResponse:
        """Answers a completion. Raises ApiError if no node could answer it, HopError if the answer breaks
        off."""
        try:
            decoding = self._hops.decode(exchange, await self._prepare(exchange, body))
            del body  # so that it takes memory only until a decode node has it
            return await decoding
        finally:
            exchange.until_answered.close()
            if exchange.hinted is not None:
                exchange.hinted.cancel()

    async def _prepare(self, exchange: Exchange, body: bytes) -> bytes:
        """Does the prefill hop. Returns the body for the decode node."""
        field: Literal["messages", "prompt"] = "messages" if exchange.request.path == CHAT else "prompt"
        nbytes, hops, hints, tenant = len(body), self._hops, self._hints, exchange.client.tenant
        completion, prompt = await self._computed(nbytes, lambda: _read(body, field, tenant))
        if not hops.pools["decode"].urls():
            raise overloaded("No decode node could answer")
        exchange.trial.budget.asked(time.monotonic())
        handoff: HandedOver | None = None
        with exchange.tracing.begin("pd_cache.proxy_lookup", exchange.span.headers) as span:
            name = bool(completion.hints) or hints.prefetched_by(exchange.client)
            why, exchange.known = await hops.judge(exchange, completion, prompt, name=name)
            named = None if isinstance(exchange.known, str) else exchange.known
            if completion.scores_prompt():
                why = why or "scored"
            if tenant in (self._keys.tenants or ()):
                self._metrics.tenant_requests.labels(tenant).inc()
                if named is not None and named.pool_tokens is not None:
                    self._metrics.tenant_tokens.labels(tenant, "requested").inc(named.tokens)
                    self._metrics.tenant_tokens.labels(tenant, "found").inc(named.pool_tokens)
            span.note(direct=why or "")
        if named is not None:
            hints.note(exchange.client, exchange.id, named)
            if (prefetched := hints.prefetched(named)) is not None:
                exchange.decodes = prefetched.node
                exchange.until_answered.callback(prefetched.stream.cancel)
        if completion.hints is not None:
            exchange.hinted = asyncio.create_task(hints.taken(completion.hints, exchange))
        result: str
        if why is not None:
            result = why
        elif hops.pools["prefill"].urls():
            prompt = prompt._replace(named=named)
            if (node := hops.streaming_node(exchange, prompt)) is not None:
                stream = hops.stream(
                    exchange, node, completion.path, await self._computed(nbytes, completion.for_stream)
                )
                if stream is not None:
                    exchange.until_answered.callback(stream.cancel)
            result, handoff = await hops.prefill(
                exchange, await self._computed(nbytes, completion.for_prefill), prompt
            )
            exchange.prefill_s = time.monotonic() - exchange.started
            self._metrics.prefill_seconds.observe(exchange.prefill_s)
            if not handoff:
                exchange.until_answered.close()  # nothing will come
        else:
            result = "no_prefill_nodes"
        self._metrics.handoffs.labels(result).inc()
        return await self._computed(nbytes, lambda: completion.for_decode(handoff))

    async def _computed(self, nbytes: int, function: Callable[[], T]) -> T:
        """Returns what the function returns. For a large body, the function runs on a separate thread, so
        that other requests go on."""
        if nbytes < _LARGE:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._large, function)


def _read(body: bytes, field: Literal["messages", "prompt"], tenant: str) -> tuple[Completion, RoutedPrompt]:
    completion = Completion(body, prompt=field)
    completion.isolate(tenant)
    return completion, completion.prompt()
