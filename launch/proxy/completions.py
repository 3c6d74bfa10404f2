"""Takes completions through a prefill node and a decode node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import aiohttp
from aiohttp import web

from launch.proxy.answers import ApiError, ClientGone, Refusal, overloaded, passed_on
from launch.proxy.bodies import Completion, HandedOver, read_handoff, read_tokens
from launch.proxy.direct import MAX_WAITING, DirectRule, Why
from launch.proxy.exchange import ID_HEADER, Exchange, NodeClient
from launch.proxy.metrics import AnswerEnd, ProxyMetrics, RecentTrips, read_report
from launch.proxy.nodes import (
    HopError,
    NodePools,
    check_status,
    client_headers,
    read_all,
    read_some,
    refusal_of,
)
from launch.proxy.prefixes import NamedPrompt, RoutedPrompt
from launch.proxy.routing import Attempts, Hop
from pd_cache.cluster import LARGEST_BODY
from pd_cache.reasons import RequestReport

log = logging.getLogger(__name__)

T = TypeVar("T")
CHAT = "/v1/chat/completions"
_MAX_ANSWER = 4 << 20
"""The most bytes of a prefill node's answer."""
_LARGE = 1 << 18
"""The size in bytes from which parsing a body takes too long for the event loop."""
_NO_TOKENIZE_S = 30.0
_MOST_SLOW = 3


class Completions:
    """Serves completions and chats."""

    def __init__(
        self,
        nodes: NodeClient,
        pools: NodePools,
        direct: DirectRule,
        metrics: ProxyMetrics,
        prefill_timeout_s: float,
    ) -> None:
        self.trips = RecentTrips()
        """The last requests."""
        self._nodes = nodes
        self._pools = pools.pools
        self._node_pools = pools
        self._direct = direct
        self._metrics = metrics
        self._prefill_timeout_s = prefill_timeout_s
        self._large = asyncio.Semaphore(1)
        self._judging = 0
        """How many prompts are being tokenized or looked up."""
        self._tokenize_after = 0.0
        """The time until which no node is asked for tokens."""
        self._slow_to_tokenize = 0
        """How many judgements of texts in a row took too long."""

    async def serve(self, exchange: Exchange, body: bytes) -> web.StreamResponse:
        """Answers the request. Raises ApiError if no node could answer it, HopError if the answer breaks off."""
        try:
            prepared = await self._prepare(exchange, body)
            if isinstance(prepared, Refusal):
                return passed_on(prepared)
            decoding = self._decode(exchange, prepared)
            del body, prepared  # so that they take memory only until a decode node has them
            return await decoding
        finally:
            if exchange.nodes:
                self.trips.note(exchange.id, exchange.trip())

    async def _prepare(self, exchange: Exchange, body: bytes) -> bytes | Refusal:
        """Does the prefill hop. Returns the body for the decode node, or a prefill node's refusal."""
        field: Literal["messages", "prompt"] = "messages" if exchange.path == CHAT else "prompt"
        nbytes = len(body)
        completion, prompt = await self._computed(nbytes, lambda: _read(body, field))
        exchange.model = self._node_pools.served(completion.model(), exchange.started)
        if not self._pools["decode"].count(exchange.model):
            raise overloaded("No decode node could answer")
        exchange.trial.budget.asked(time.monotonic())
        handoff: HandedOver | None = None
        with exchange.tracing.begin("pd_cache.proxy_lookup", exchange.span.headers) as span:
            why, named = await self._judge(exchange, completion, prompt)
            span.note(direct=why or "")
        if why is not None:
            result: str = why
        elif self._pools["prefill"].count(exchange.model):
            prompt = prompt._replace(named=named)
            answer = await self._prefill(exchange, await self._computed(nbytes, completion.for_prefill), prompt)
            self._metrics.prefill_seconds.observe(time.monotonic() - exchange.started)
            if isinstance(answer, Refusal):
                return answer
            handoff = answer
            result = "prefill_failed" if handoff is None else "handed_over" if handoff else "nothing_stored"
        else:
            result = "no_prefill_nodes"
        self._metrics.handoffs.labels(result).inc()
        return await self._computed(nbytes, lambda: completion.for_decode(handoff))

    async def _judge(
        self, exchange: Exchange, completion: Completion, prompt: RoutedPrompt
    ) -> tuple[Why | None, NamedPrompt | None]:
        """Returns why the prompt needs no prefill node, and what it is known by; None for what is not known."""
        direct = self._direct
        if (why := direct.why(prompt.tokens)) is not None:
            return why, None
        if self._judging >= MAX_WAITING or not direct.can_tell(completion.model(), prompt.tokens):
            return None, None
        if not completion.plain():
            return None, None
        self._judging += 1
        try:
            async with asyncio.timeout(direct.timeout_s):
                tokens = completion.token_ids()
                if tokens is None:
                    tokens = await self._tokenize(exchange, completion)
                if tokens is None or (why := direct.why(len(tokens))) is not None:
                    return why, None
                named = await direct.look_up(tokens, completion.cache_salt(), exchange.id)
        except TimeoutError:
            self._slow_to_tokenize += 1  # once may be that text's own fault
            if self._slow_to_tokenize == _MOST_SLOW:
                self._slow_to_tokenize = 0
                self._tokenize_after = time.monotonic() + _NO_TOKENIZE_S
            return None, None
        except ValueError:
            return None, None
        finally:
            self._judging -= 1
        if named is None or named.pool_tokens is None:
            return None, named
        return direct.why(len(tokens), named.pool_tokens), named

    async def _computed(self, nbytes: int, function: Callable[[], T]) -> T:
        """Returns what the function returns. For a large body, it runs on another thread, one at a time, so that other requests go on."""
        if nbytes < _LARGE:
            return function()
        async with self._large:
            return await asyncio.to_thread(function)

    # --- the prefill hop -----------------------------------------------------------------------------------------

    async def _prefill(self, exchange: Exchange, body: bytes, prompt: RoutedPrompt) -> Refusal | HandedOver | None:
        """Returns what a prefill node handed over, or its refusal of the request; None if all of them failed."""
        until = time.monotonic() + self._prefill_timeout_s
        pool = self._pools["prefill"]
        attempts = Attempts(pool, exchange.trial, prompt, exchange.model)
        while (left := until - time.monotonic()) > 0 and (node := attempts.next(time.monotonic())) is not None:
            try:
                with pool.working(node, prompt), exchange.hop_span("prefill", node):
                    answer = await asyncio.wait_for(self._prefill_at(exchange, node, body), left)
            except TimeoutError:
                # a second node is not to blame if the first one left it too little time
                whole = left > self._prefill_timeout_s / 2
                failure = HopError("timeout", f"no answer within {left:.3g} s")
                self._nodes.failed(exchange, "prefill", node, attempts if whole else None, failure)
            except HopError as error:
                self._nodes.failed(exchange, "prefill", node, attempts, error)
            else:
                attempts.answered(node, time.monotonic(), well=isinstance(answer, HandedOver))
                return answer
        return None

    async def _prefill_at(self, exchange: Exchange, node: str, body: bytes) -> Refusal | HandedOver:
        answer = await self._nodes.send(exchange, "prefill", node, "POST", body)
        try:
            await check_status(answer)
            if answer.status >= 400:
                return await refusal_of(answer)
            try:
                whole = await read_all(answer, _MAX_ANSWER)
                handoff = read_handoff(whole)
                _note_report(exchange, "prefill", read_report(whole))
                return handoff
            except ValueError as error:
                raise HopError("garbage", str(error)) from error
        finally:
            answer.close()

    # --- the decode hop ------------------------------------------------------------------------------------------

    async def _decode(self, exchange: Exchange, body: bytes) -> web.StreamResponse:
        pool = self._pools["decode"]
        attempts = Attempts(pool, exchange.trial, model=exchange.model)
        failures: list[HopError] = []
        while (node := attempts.next(time.monotonic())) is not None:
            answer: aiohttp.ClientResponse | None = None
            try:
                with pool.working(node), exchange.hop_span("decode", node) as span:
                    try:
                        answer = await self._nodes.send(exchange, "decode", node, "POST", body)
                        await check_status(answer)
                        first = await read_some(answer)  # a node that dies before this can still be replaced
                    except HopError as error:
                        self._nodes.failed(exchange, "decode", node, attempts, error)
                        failures.append(error)
                        if exchange.tracing.on:
                            span.end(f"{error.reason}: {error}")
                        continue
                    attempts.answered(node, time.monotonic(), well=answer.status < 300)
                    exchange.first_byte_s = time.monotonic() - exchange.started
                    self._metrics.first_byte_seconds.observe(exchange.first_byte_s)
                    body = b""
                    exchange.share.give_back()
                    return await self._relay(exchange, node, answer, first)
            finally:
                if answer is not None:
                    answer.close()
        if attempts.out_of_budget:
            self._metrics.retries_refused.inc()
        return self._given_up(exchange, attempts, failures)

    def _given_up(self, exchange: Exchange, attempts: Attempts, failures: list[HopError]) -> web.Response:
        """Returns the answer to a request that no decode node answered."""
        refusals = {error.reason: error.refusal for error in failures if error.refusal is not None}
        if attempts.blamed:
            if "error" in refusals:
                return passed_on(refusals["error"])
            raise ApiError(502, "This request failed on two nodes and is not tried on others", code="node_failed")
        for reason in ("busy", "error"):
            if reason in refusals:
                return passed_on(refusals[reason])
        if any(error.reason == "exhausted" for error in failures):
            raise overloaded("The proxy has no file descriptor or port left for a connection to a node")
        raise overloaded(
            "No decode node could answer", self._pools["decode"].retry_after(time.monotonic(), exchange.model)
        )

    async def _relay(
        self, exchange: Exchange, node: str, answer: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        """Passes on the node's answer as it comes, beginning with `first`. Raises HopError if it breaks off."""
        response = web.StreamResponse(status=answer.status, headers=client_headers(answer))
        response.headers[ID_HEADER] = exchange.id
        exchange.response = response
        ending = AnswerEnd()
        try:
            await response.prepare(exchange.request)
            data = first
            while data:
                ending.add(data)
                if answer.content.at_eof():
                    self._note(exchange, ending)  # before the client can know that this is all
                await exchange.write(data)
                data = await read_some(answer)
            self._note(exchange, ending)
            await response.write_eof()
        except HopError as error:
            self._nodes.failed(exchange, "decode", node, None, error)
            raise
        except ConnectionError as error:
            raise ClientGone from error
        return response

    def _note(self, exchange: Exchange, ending: AnswerEnd) -> None:
        """Remembers a request whose answer is complete."""
        _note_report(exchange, "decode", ending.report())
        self.trips.note(exchange.id, exchange.trip())

    # --- a text's tokens -----------------------------------------------------------------------------------------

    async def _tokenize(self, exchange: Exchange, completion: Completion) -> list[int] | None:
        """Returns a prompt's token ids from a decode node, or None if there are none to be had."""
        now = time.monotonic()
        node = self._pools["decode"].out_of_turn(now, exchange.model)
        if node is None or now < self._tokenize_after:
            return None
        try:
            answer = await self._nodes.post(exchange, f"{node}/tokenize", completion.for_tokenize())
            try:
                if answer.status == 200:
                    tokens = read_tokens(await read_all(answer, LARGEST_BODY))
                    self._slow_to_tokenize = 0
                    return tokens
                if answer.status in (400, 422) or answer.status >= 500:
                    return None  # this prompt's own fault, or possibly so
                raise HopError("error", f"status {answer.status}")
            finally:
                answer.close()
        except (HopError, ValueError) as error:
            self._tokenize_after = now + _NO_TOKENIZE_S
            log.info("request %s: node %s did not return a text's tokens: %s", exchange.id, node, error)
            return None


def _read(body: bytes, field: Literal["messages", "prompt"]) -> tuple[Completion, RoutedPrompt]:
    completion = Completion(body, prompt=field)
    return completion, completion.prompt()


def _note_report(exchange: Exchange, hop: Hop, report: RequestReport | None) -> None:
    if report is not None:
        exchange.reports[hop] = report
