"""A client's request from its key to its last byte: admission, body, prefill node, decode node, deadline, and an error that the client can read."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from launch.openai import ID_HEADER, ApiError, overloaded
from launch.proxy.bodies import (
    BodyMemory,
    BodyShare,
    ClientGone,
    Completion,
    HandedOver,
    read_body,
    read_handoff,
    read_models,
    read_tokens,
)
from launch.proxy.direct import MAX_WAITING, DirectRule, Why
from launch.proxy.hints import HEADER, HINTS_S, LARGEST_HINTS, PREFETCH_S, Hints, Sender
from launch.proxy.keys import Admission, Client, Keys
from launch.proxy.metrics import REPORT_BYTES, ProxyMetrics, RecentTrips, read_report
from launch.proxy.nodes import (
    HopError,
    NodePools,
    Refusal,
    check_status,
    client_headers,
    passed_on,
    read_all,
    read_some,
    refusal_of,
    send,
)
from launch.proxy.pins import fair
from launch.proxy.prefixes import NamedPrompt, RoutedPrompt
from launch.proxy.routing import Attempts, Hop, Reason, RetryBudget, Trial
from launch.proxy.trips import HopReport, Trip
from launch.proxy.ui import EndedRequest, RecentRequests
from pd_cache.cluster import LARGEST_BODY, ProxyConfig
from pd_cache.decoding import one_line
from pd_cache.reasons import RequestReport
from pd_cache.sparse_log import SparseLog
from pd_cache.tracing import TraceSpan, Tracing, trace_headers

log = logging.getLogger(__name__)

T = TypeVar("T")
CHAT = "/v1/chat/completions"
REQUEST_ID = web.RequestKey("request_id", str)
"""Where the outermost handler leaves the id in aiohttp's request."""
_FEW_RETRIES = 100
_LAST_WORDS_S = 1.0
"""How long it may take to inform a client that its stream broke."""
_LARGE = 1 << 18
"""The size in bytes from which parsing a body takes too long for the event loop."""
_LIST_AT_ONE_S = 1.0
_MOST_PREFETCHED = 64
_MOST_REFUSALS = 2
"""How many prefill nodes may refuse a prompt until the decode node gets it."""
_PREFETCH_REFUSED_S = 0.1
"""How long a node has to refuse a prompt that it should prefetch."""
_STREAM_ID = "-stream"
"""What follows a request's id in the id of its stream: engines tell requests apart by their ids."""


class Exchange:
    """One request under way, and how far it has come."""

    def __init__(self, request: web.Request, budget: RetryBudget, share: BodyShare, tracing: Tracing) -> None:
        self.request = request
        self.id = request[REQUEST_ID]
        self.started = time.monotonic()
        self.trial = Trial(budget)
        self.client = Client()
        """Who asks, if keys say so, and in the name of which tenant."""
        self.nodes: dict[Hop, str] = {}
        self.reports: dict[Hop, RequestReport | None] = {}
        """What nodes said of the prompt; None if their answers held no report."""
        self.first_byte_s: float | None = None
        """How long the decode node's first byte took; None before it."""
        self.prefill_s: float | None = None
        """How long the prefill hop took; None without one."""
        self.cut_status: int | None = None
        """The status of the error with which its answer ended after the first byte; None if it did not."""
        self.share = share
        """The memory that its body takes."""
        self.response: web.StreamResponse | None = None
        """Set when the first byte is about to be sent."""
        self.event_ended = True
        """Whether what was sent so far ends with a blank line, as each server-sent event does."""
        self.tracing = tracing
        self.span = tracing.begin(
            "pd_cache.proxy", trace_headers(request.headers), kind="server", request_id=self.id, path=request.path
        )
        self.decodes: str | None = None
        """The decode node to try first, if it was chosen before the prompt is computed."""
        self.until_answered = ExitStack()
        """Ends the streams that the decode node needs until its first byte."""
        self.hinted: asyncio.Task[bytes] | None = None
        """Makes the answer to the hints that came with it, if some did."""

    def told(self) -> str:
        """Returns, for the log, which client asked, which nodes answered, and why they did not find more of the prompt."""
        parts = [f"{what}={who}" for what, who in zip(("client", "tenant"), self.client, strict=True) if who]
        parts += [f"{hop}={node}" for hop, node in self.nodes.items()]
        parts += [f"{hop}_reason={report.reason}" for hop, report in self.reports.items() if report]
        return " ".join(parts)

    def hop_span(self, what: str, node: str) -> TraceSpan:
        """Returns a span for a request to a node."""
        return self.tracing.begin(f"pd_cache.{what}", self.span.headers, kind="client", node=node)

    def headers(self, keys: Keys, span: TraceSpan) -> dict[str, str]:
        """Returns the headers for a node: not the client's key if that is for the proxy, and the nodes' own key if there is one."""
        headers = {name.capitalize(): value for name, value in span.headers.items()}
        if keys.node_key is not None:
            headers["Authorization"] = f"Bearer {keys.node_key}"
        elif not keys.guarded and "Authorization" in self.request.headers:
            headers["Authorization"] = self.request.headers["Authorization"]
        # bytes are passed on as they come, and the client might not accept every encoding
        return {**headers, ID_HEADER: self.id, "Content-Type": "application/json", "Accept-Encoding": "identity"}

    @property
    def streamed(self) -> bool:
        """Whether its answer comes token by token."""
        return self.response is not None and self.response.content_type == "text/event-stream"

    def trip(self) -> Trip:
        hops = (HopReport(hop, node, self.reports.get(hop)) for hop, node in self.nodes.items())
        return Trip(self.client.name, tuple(hops))

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        try:
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone from error
        self.event_ended = data.endswith((b"\n\n", b"\r\n\r\n"))


Serve = Callable[[Exchange, bytes], Awaitable[web.StreamResponse]]
"""Answers a request, given its body."""


class _Prefetched(NamedTuple):
    holder: str
    node: str
    stream: asyncio.Task[int]
    """Holds the prompt at the node."""


class Requests:
    """Serves the pages of OpenAI's API."""

    def __init__(
        self,
        config: ProxyConfig,
        keys: Keys,
        nodes: NodePools,
        direct: DirectRule,
        hints: Hints,
        metrics: ProxyMetrics,
        recent: RecentRequests,
        tracing: Tracing,
    ) -> None:
        self.session: aiohttp.ClientSession
        """For requests to nodes. Set while the proxy runs."""
        self.admission = Admission(config.max_requests, config.max_requests_per_key, keys.limits)
        self.bodies = BodyMemory(config.body_memory)
        self.retries = RetryBudget(max(_FEW_RETRIES, config.max_requests))
        self.running: set[asyncio.Task[Any]] = set()
        self.trips = RecentTrips()
        """The last requests."""
        self._config = config
        self._keys = keys
        self._pools = nodes.pools
        self._direct = direct
        self._hints = hints
        self._metrics = metrics
        self._recent = recent
        self._tracing = tracing
        self._sparse = SparseLog()
        self._large = ThreadPoolExecutor(1, "proxy-large")  # one thread, because each keeps memory for the next body
        self._judging = 0
        """How many prompts are being tokenized or looked up."""
        self._prefetched: dict[bytes, _Prefetched] = {}
        """By the names of prompts' last chunks."""

    def add_to(self, app: web.Application) -> None:
        limit_s = self._config.request_timeout_s
        for path in ("/v1/completions", CHAT):
            app.router.add_post(path, partial(self._answered, self._over_nodes, LARGEST_BODY, limit_s))
        app.router.add_post("/hints", partial(self._answered, self._hint, LARGEST_HINTS, HINTS_S))
        app.router.add_get("/v1/models", partial(self._answered, self._models, 0, limit_s), allow_head=False)

    async def drain(self, app: web.Application) -> None:
        """Refuses new requests, waits up to `drain_s` for those under way to end, then cuts off the rest."""
        self.admission.closing = True
        for one in self._prefetched.values():
            one.stream.cancel()
        if self.running:
            await asyncio.wait(self.running, timeout=self._config.drain_s)
        for task in self.running:
            task.cancel()
        self._large.shutdown(wait=False, cancel_futures=True)

    # --- from its key to its end -----------------------------------------------------------------------------------

    async def _answered(self, serve: Serve, most: int, read_s: float, request: web.Request) -> web.StreamResponse:
        """Checks the client's key, reads a body of at most `most` bytes within `read_s`, and serves the request. Counts and logs it."""
        exchange = Exchange(request, self.retries, BodyShare(self.bodies), self._tracing)
        status = 499
        try:
            client = exchange.client = self._keys.client(request.headers.get("Authorization"))
            exchange.client = self._keys.in_tenant(client, request)
            response = await self._admitted(exchange, serve, most, read_s)
            status = response.status
        except ApiError as error:
            status = error.status
            _free_frames(error)
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
            log.info("request %s: %d in %.3f s %s", exchange.id, status, took, exchange.told())
            if request.method == "POST" and (exchange.nodes or status >= 500):
                trip, status = exchange.trip(), exchange.cut_status or status
                self.trips.note(exchange.id, trip)
                self._recent.note(EndedRequest(exchange.id, took, exchange.first_byte_s, status, trip, exchange.streamed, exchange.prefill_s))  # fmt: skip
        return response

    async def _admitted(self, exchange: Exchange, serve: Serve, most: int, read_s: float) -> web.StreamResponse:
        self.admission.check(exchange.client)  # so that no body is read only to be refused
        body = await read_body(exchange.request, exchange.share, most, read_s)
        with self.admission.admitted(exchange.client):
            left = self._config.request_timeout_s - (time.monotonic() - exchange.started)
            serving = serve(exchange, body)
            del body  # so that it takes memory only until the decode node has it
            return await self._finish(exchange, serving, max(0.0, left))

    async def _hint(self, exchange: Exchange, body: bytes) -> web.StreamResponse:
        told = await self._hints.take(body, self._sender(exchange))
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")

    def _sender(self, exchange: Exchange, own: NamedPrompt | str | None = None) -> Sender:
        async def name(completion: Completion) -> NamedPrompt | str:
            completion.isolate(exchange.client.tenant)
            return (await self._judge(exchange, completion, completion.prompt(), name=True))[1]

        prefetch = partial(self._prefetch, exchange)
        return Sender(exchange.client, name, prefetch, own, not self._keys.has_tenants)

    async def _finish(
        self, exchange: Exchange, serving: Awaitable[web.StreamResponse], limit_s: float
    ) -> web.StreamResponse:
        """Runs `serving` within `limit_s`, and ends it with the client's connection. Raises ApiError for the client."""
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
            failure = ApiError(502, f"The decode node failed while it answered: {error.reason}", code="node_failed")
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
        """Reports an error to the client: by a status before the first byte, by an event in a stream, otherwise by breaking off."""
        response = exchange.response
        if response is None or not response.prepared:
            raise error
        exchange.cut_status = error.status
        self._metrics.cut.labels(error.code or "").inc()
        log.warning("request %s: cut after its first byte: %s", exchange.id, error.message)
        response.force_close()
        if exchange.streamed and response.content_length is None:
            event = (b"" if exchange.event_ended else b"\n\n") + b"data: " + error.body() + b"\n\n"
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

    # --- a completion's way over the nodes ---------------------------------------------------------------------------

    async def _over_nodes(self, exchange: Exchange, body: bytes) -> web.StreamResponse:
        """Answers a completion. Raises ApiError if no node could answer it, HopError if the answer breaks off."""
        try:
            decoding = self._decode(exchange, await self._prepare(exchange, body))
            del body  # so that it takes memory only until a decode node has it
            return await decoding
        finally:
            exchange.until_answered.close()
            if exchange.hinted is not None:
                exchange.hinted.cancel()

    async def _prepare(self, exchange: Exchange, body: bytes) -> bytes:
        """Does the prefill hop. Returns the body for the decode node."""
        field: Literal["messages", "prompt"] = "messages" if exchange.request.path == CHAT else "prompt"
        nbytes = len(body)
        tenant = exchange.client.tenant
        completion, prompt = await self._computed(nbytes, lambda: _read(body, field, tenant))
        if not self._pools["decode"].urls():
            raise overloaded("No decode node could answer")
        exchange.trial.budget.asked(time.monotonic())
        handoff: HandedOver | None = None
        with exchange.tracing.begin("pd_cache.proxy_lookup", exchange.span.headers) as span:
            holder = exchange.client.holder  # prompts that others prefetch cost it nothing
            name = bool(completion.hints) or any(one.holder == holder for one in self._prefetched.values())
            why, known = await self._judge(exchange, completion, prompt, name=name)
            named = None if isinstance(known, str) else known
            if completion.scores_prompt():
                why = why or "scored"
            if tenant in (self._keys.tenants or ()):
                self._metrics.tenant_requests.labels(tenant).inc()
                if named is not None and named.pool_tokens is not None:
                    self._metrics.tenant_tokens.labels(tenant, "requested").inc(named.tokens)
                    self._metrics.tenant_tokens.labels(tenant, "found").inc(named.pool_tokens)
            span.note(direct=why or "")
        if named is not None:
            self._hints.note(exchange.client, exchange.id, named)
            last = next((name for name in reversed(named.names) if name in self._prefetched), None)
            if last is not None:
                _, exchange.decodes, stream = self._prefetched.pop(last)
                exchange.until_answered.callback(stream.cancel)
        if completion.hints is not None:
            taking = self._hints.taken(completion.hints, self._sender(exchange, known))
            exchange.hinted = asyncio.create_task(taking)
        result: str
        if why is not None:
            result = why
        elif self._pools["prefill"].urls():
            prompt = prompt._replace(named=named)
            await self._begin_stream(exchange, completion, prompt, nbytes)
            result, handoff = await self._prefill(
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
        """Returns what the function returns. For a large body, it runs on a thread for these, so that other requests go on."""
        if nbytes < _LARGE:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._large, function)

    async def _judge(
        self, exchange: Exchange, completion: Completion, prompt: RoutedPrompt, *, name: bool
    ) -> tuple[Why | None, NamedPrompt | str]:
        """Returns why the prompt needs no prefill node, or None, and what it is known by, or why that is not known.

        `name`: what it is known by is wanted even if the prompt is so short that nothing depends on it here.
        """
        direct = self._direct
        why = direct.why(prompt.tokens)
        if why is not None and not name:
            return why, "not asked for"
        if self._judging >= MAX_WAITING:
            return why, f"{MAX_WAITING} others are being looked up; try again"
        if not direct.can_tell(completion.model(), prompt.tokens):
            return why, direct.blind or "it is too long, or for another model"
        if not completion.plain():
            return why, "its tokens do not identify it"
        self._judging += 1
        try:
            async with asyncio.timeout(direct.timeout_s):
                tokens = completion.token_ids()
                if tokens is None:
                    tokens = await self._tokenize(exchange, completion)
                if tokens is None:
                    return why, "no decode node has returned its tokens"
                if (why := direct.why(len(tokens))) is not None and not name:
                    return why, "not asked for"
                named = await direct.look_up(tokens, completion.cache_salt(), exchange.id)
        except TimeoutError:
            return why, f"its tokens were not there or not looked up within {direct.timeout_s:g} s"
        except ValueError as error:
            return why, one_line(str(error))
        finally:
            self._judging -= 1
        if named is None:
            return direct.why(len(tokens)), direct.blind or "it is too long"
        return direct.why(len(tokens), named.pool_tokens or 0), named

    async def _tokenize(self, exchange: Exchange, completion: Completion) -> list[int] | None:
        """Returns a prompt's token ids from a decode node, or None if there are none to be had."""
        node = self._pools["decode"].out_of_turn(time.monotonic())
        if node is None:
            return None
        try:
            url, body = f"{node}/tokenize", completion.for_tokenize()
            return await self._whole(exchange, exchange.span, "POST", url, body, read_tokens)
        except (HopError, Refusal) as error:
            if self._sparse.admit((node, "tokenize")) is not None:
                log.info("request %s: node %s did not return a text's tokens: %s", exchange.id, node, error)
            return None

    async def _whole(
        self,
        exchange: Exchange,
        span: TraceSpan,
        method: str,
        url: str,
        body: bytes | None,
        read: Callable[[bytes], T],
    ) -> T:
        """Returns what `read` makes of a node's whole answer. Raises Refusal if the node refuses the request, HopError if it fails."""
        answer = await send(self.session, method, url, exchange.headers(self._keys, span), body)
        try:
            await check_status(answer)
            if answer.status >= 400:
                raise await refusal_of(answer)
            return read(await read_all(answer, LARGEST_BODY))
        except ValueError as error:
            raise HopError("garbage", str(error)) from error
        finally:
            answer.close()

    def _failed(self, exchange: Exchange, hop: Hop, node: str, attempts: Attempts | None, error: HopError) -> None:
        """Notes how a node failed. Without `attempts`, only a connection that cannot be made counts against the node."""
        _free_frames(error)
        self._metrics.hop_failures.labels(hop, error.reason).inc()
        now = time.monotonic()
        if (count := self._sparse.admit((node, error.reason))) is not None:
            more = f" (and {count - 1} more like it before)" if count > 1 else ""
            log.warning("request %s: %s node %s: %s: %s%s", exchange.id, hop, node, error.reason, error, more)
        if attempts is not None:
            attempts.failed(node, error.reason, now)
        elif error.reason == "unreachable":
            self._pools[hop].failed(node, error.reason, now)

    # --- the prefill hop -----------------------------------------------------------------------------------------

    async def _prefill(self, exchange: Exchange, body: bytes, prompt: RoutedPrompt) -> tuple[str, HandedOver | None]:
        """Returns how it went, and what a prefill node handed over; None if none computed the prompt.

        The decode node gets the request even if prefill nodes refuse it: its longest prompt, its adapters and its queue may be others, and
        what it refuses, too, it refuses in the client's own words.
        """
        limit_s, refused = self._config.prefill_timeout_s, 0
        until = time.monotonic() + limit_s
        pool = self._pools["prefill"]
        attempts = Attempts(pool, exchange.trial, prompt)
        while refused < _MOST_REFUSALS:
            if (left := until - time.monotonic()) <= 0 or (node := attempts.next(time.monotonic())) is None:
                break
            exchange.nodes["prefill"] = node
            try:
                with pool.working(node, prompt), exchange.hop_span("prefill", node) as span:
                    url = node + exchange.request.path
                    asking = self._whole(
                        exchange, span, "POST", url, body, lambda one: (read_handoff(one), read_report(one))
                    )
                    async with asyncio.timeout(left):
                        handoff, report = await asking
            except TimeoutError:
                # a second node is not to blame if the first one left it too little time
                whole = left > limit_s / 2
                failure = HopError("timeout", f"no answer within {left:.3g} s")
                self._failed(exchange, "prefill", node, attempts if whole else None, failure)
            except HopError as error:
                self._failed(exchange, "prefill", node, attempts, error)
            except Refusal as refusal:
                _free_frames(refusal)
                refused += 1
                attempts.answered(node, time.monotonic(), well=False)
                if self._sparse.admit((node, "refused")) is not None:
                    log.info("request %s: prefill node %s refused the prompt: %s", exchange.id, node, refusal)
            else:
                attempts.answered(node, time.monotonic(), well=True)
                exchange.reports["prefill"] = report
                return "handed_over" if handoff else "nothing_stored", handoff
        return "prefill_refused" if refused else "prefill_failed", None

    # --- the stream ------------------------------------------------------------------------------------------------

    async def _begin_stream(
        self, exchange: Exchange, completion: Completion, prompt: RoutedPrompt, nbytes: int
    ) -> None:
        """Has the decode node that will probably answer load the prompt's chunks while a prefill node computes them, if that is worth while."""
        pool, named = self._pools["decode"], prompt.named
        tokens, found = (prompt.tokens, 0) if named is None else (named.tokens, named.pool_tokens or 0)
        # half of the memory for bodies is for requests that are to be answered
        if not self._direct.streams(tokens, found) or self.bodies.used > self.bodies.limit // 2:
            return
        node = exchange.decodes = exchange.decodes or pool.pick(time.monotonic())
        if node is None or not pool.streams(node):
            return
        body = await self._computed(nbytes, completion.for_stream)
        if (stream := self._begin(exchange, node, completion.path, body)) is not None:
            exchange.until_answered.callback(stream.cancel)

    def _begin(
        self, exchange: Exchange, node: str, path: str, body: bytes, name: str = _STREAM_ID, most_s: float | None = None
    ) -> asyncio.Task[int] | None:
        """Keeps a stream open until it is cancelled, for at most `most_s`. The task's result is the status of its answer; 0 without one. Returns
        None if there is no memory for its body.

        No request depends on it, so its failure counts against no node.
        """
        share = BodyShare(self.bodies)
        if not share.grow(len(body)):
            return None

        async def stream() -> int:
            with self._pools["decode"].working(node), exchange.hop_span("stream", node) as span:
                headers = {**exchange.headers(self._keys, span), ID_HEADER: exchange.id + name}
                try:
                    async with asyncio.timeout(most_s):
                        answer = await send(self.session, "POST", node + path, headers, body)
                    answer.close()
                    status, why = answer.status, f"status {answer.status}"
                except (TimeoutError, HopError) as error:
                    status, why = 0, f"{error!r}"
                log.debug("request %s: the stream to %s has ended: %s", exchange.id, node, why)
                return status

        task = asyncio.create_task(stream())
        task.add_done_callback(lambda _: share.give_back())
        return task

    async def _prefetch(self, exchange: Exchange, completion: Completion, named: NamedPrompt) -> str | None:
        """Has the decode node that a request with this prompt would get load it; the request will go there. See `hints.Sender`."""
        completion.isolate(exchange.client.tenant)
        now, pool, last = time.monotonic(), self._pools["decode"], named.names[-1]
        node = pool.pick(now)
        if node is None:
            raise ApiError(400, "no decode node can be asked")
        streams = pool.streams(node)
        if not streams and not self._direct.grouped:
            raise ApiError(400, "decode nodes load nothing before its request comes (handoff.stream, docs/hints.md)")
        if not streams and not self._direct.why(named.tokens, named.pool_tokens or 0):
            raise ApiError(400, "a decode node would compute it, because the pool lacks too much of it (docs/hints.md)")
        holder = exchange.client.holder
        held = sum(one.holder == holder for one in self._prefetched.values())
        if not fair(holder, held, _MOST_PREFETCHED - len(self._prefetched)):
            raise ApiError(400, f"of {_MOST_PREFETCHED} prefetches, none is free, or this client has as many as are")
        body, name = completion.for_stream() if streams else completion.for_load(), f"-prefetch-{last.hex()[:8]}"
        stream = self._begin(exchange, node, completion.path, body, name, PREFETCH_S)
        if stream is None:
            raise ApiError(400, "other requests take all the memory for bodies")
        if last in self._prefetched:
            self._prefetched[last].stream.cancel()
        self._prefetched[last] = one = _Prefetched(holder, node, stream)

        def ended(*_: object) -> None:
            if self._prefetched.get(last) is one:
                del self._prefetched[last]

        def failed() -> bool:  # one that is cancelled has given way to its request, or to another of the same prompt
            return stream.done() and not stream.cancelled() and (streams or stream.result() != 200)

        stream.add_done_callback(lambda _: ended() if failed() else None)
        # what a node without streams has loaded stays in its own cache
        asyncio.get_running_loop().call_later(PREFETCH_S, ended)
        await asyncio.wait({stream}, timeout=_PREFETCH_REFUSED_S)
        if failed():
            status = stream.result()
            why = {0: "no answer", 200: "no room"}.get(status, f"status {status}")
            raise ApiError(400, f"the decode node does not load it: {why}")
        return node if self._keys.may_watch(exchange.request.headers.get("Authorization")) else None

    # --- the decode hop ------------------------------------------------------------------------------------------

    async def _decode(self, exchange: Exchange, body: bytes) -> web.StreamResponse:
        pool = self._pools["decode"]
        attempts = Attempts(pool, exchange.trial, first=exchange.decodes)
        refusals: dict[Reason, Refusal] = {}
        while (node := attempts.next(time.monotonic())) is not None:
            exchange.nodes["decode"] = node
            answer: aiohttp.ClientResponse | None = None
            try:
                with pool.working(node), exchange.hop_span("decode", node) as span:
                    try:
                        url, headers = node + exchange.request.path, exchange.headers(self._keys, span)
                        answer = await send(self.session, "POST", url, headers, body)
                        await check_status(answer)
                        first = await read_some(answer)  # a node that dies before this can still be replaced
                    except HopError as error:
                        self._failed(exchange, "decode", node, attempts, error)
                        if error.refusal is not None:
                            refusals[error.reason] = error.refusal
                        span.end(f"{error.reason}: {error}")
                        continue
                    attempts.answered(node, time.monotonic(), well=answer.status < 300)
                    exchange.first_byte_s = time.monotonic() - exchange.started
                    self._metrics.first_byte_seconds.observe(exchange.first_byte_s)
                    exchange.until_answered.close()
                    body = b""
                    exchange.share.give_back()
                    return await self._relay(exchange, node, answer, first)
            finally:
                if answer is not None:
                    answer.close()
        refusal = (None if attempts.blamed else refusals.get("busy")) or refusals.get("error")
        if refusal is not None:
            return passed_on(refusal)
        if attempts.blamed:
            raise ApiError(502, "This request failed on two nodes and is not tried on others", code="node_failed")
        raise overloaded("No decode node could answer")

    async def _relay(
        self, exchange: Exchange, node: str, answer: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        """Passes on the node's answer as it comes, beginning with `first`. Raises HopError if it breaks off."""
        response = web.StreamResponse(status=answer.status, headers=client_headers(answer))
        response.headers[ID_HEADER] = exchange.id
        if exchange.hinted is not None:
            response.headers[HEADER] = (await exchange.hinted).decode()
        exchange.response = response
        try:
            await response.prepare(exchange.request)
            data, ending = first, b""
            while data:
                ending = (ending + data)[-REPORT_BYTES:]
                if answer.content.at_eof():
                    self._note(exchange, ending)  # before the client can know that this is all
                await exchange.write(data)
                data = await read_some(answer)
            self._note(exchange, ending)
            await response.write_eof()
        except HopError as error:
            self._failed(exchange, "decode", node, None, error)
            raise
        except ConnectionError as error:
            raise ClientGone from error
        return response

    def _note(self, exchange: Exchange, ending: bytes) -> None:
        exchange.reports["decode"] = read_report(ending)
        self.trips.note(exchange.id, exchange.trip())

    # --- the list of models --------------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange, _: bytes) -> web.Response:
        """Returns the list of one of two decode nodes. It says nothing about how a node computes: only a refused connection counts against it."""
        pool, tried = self._pools["decode"], list[str]()
        while len(tried) < 2 and (node := pool.out_of_turn(time.monotonic(), tried)) is not None:
            tried.append(node)
            exchange.nodes["decode"] = node
            try:
                asking = self._whole(exchange, exchange.span, "GET", node + exchange.request.path, None, read_models)
                async with asyncio.timeout(_LIST_AT_ONE_S):
                    found = await asking
            except TimeoutError:
                failure = HopError("timeout", f"no list of models within {_LIST_AT_ONE_S:g} s")
                self._failed(exchange, "decode", node, None, failure)
            except HopError as error:
                self._failed(exchange, "decode", node, None, error)
            except Refusal as refused:
                pool.reached(node)
                return passed_on(refused)
            else:
                pool.reached(node)
                body = msgspec.json.encode({"object": "list", "data": found})
                return web.Response(body=body, content_type="application/json")
        raise overloaded("No decode node could answer")


def _free_frames(error: BaseException | None) -> None:
    """Clears the local variables in an error's traceback, and in those of its causes. They refer to bodies, which would stay until the
    garbage collector runs: frames of `_finish` and aiohttp refer to the error, too.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _read(body: bytes, field: Literal["messages", "prompt"], tenant: str) -> tuple[Completion, RoutedPrompt]:
    completion = Completion(body, prompt=field)
    completion.isolate(tenant)
    return completion, completion.prompt()
