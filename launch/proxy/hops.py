"""Asks a decode node for the prompt's tokens (if needed), then the pool, then a prefill node. Meanwhile, a
decode node may load."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TypeVar

import aiohttp

from launch.openai import ID_HEADER, ApiError, overloaded
from launch.proxy.bodies import (
    BodyMemory,
    BodyShare,
    Completion,
    HandedOver,
    read_handoff,
    read_rendered,
    read_tokens,
)
from launch.proxy.exchange import Exchange
from launch.proxy.keys import Keys
from launch.proxy.lookups import MAX_WAITING, PoolLookups
from launch.proxy.metrics import ProxyMetrics, read_report
from launch.proxy.nodes import (
    HopError,
    NodePools,
    check_status,
    read_all,
    refusal_of,
    send,
)
from launch.proxy.routing.direct import DirectRule
from launch.proxy.routing.limits import Asked
from launch.proxy.routing.node_pool import Attempts, Hop
from launch.proxy.routing.prefixes import PromptTokens, RoutedPrompt
from pd_cache.cluster import LARGEST_BODY, ProxyConfig
from pd_cache.decoding import one_line
from pd_cache.reasons import RequestReport
from pd_cache.sparse_log import SparseLog

log = logging.getLogger(__name__)

T = TypeVar("T")
_MOST_REFUSALS = 2
"""How many prefill nodes may refuse a prompt before the decode node gets it."""
_STREAM_ID = "-stream"
"""The suffix of a stream's id after the request's id: engines distinguish requests by their ids."""


class Hops:
    """Asks nodes, and the pool, for what a request needs before its answer."""

    def __init__(
        self,
        config: ProxyConfig,
        keys: Keys,
        nodes: NodePools,
        rule: DirectRule,
        lookups: PoolLookups,
        metrics: ProxyMetrics,
    ) -> None:
        self.session: aiohttp.ClientSession
        """For requests to nodes. Set while the proxy runs."""
        self.bodies = BodyMemory(config.body_memory)
        self.pools = nodes.pools
        self.limits = nodes.limits
        self._config = config
        self._keys = keys
        self.rule = rule
        self._lookups = lookups
        self._metrics = metrics
        self._sparse = SparseLog()
        self._looking = 0
        """How many prompts are being tokenized or looked up."""

    # --- the lookup -----------------------------------------------------------------------------------------

    async def look_up(
        self, exchange: Exchange, completion: Completion, prompt: RoutedPrompt, *, name: bool
    ) -> RoutedPrompt:
        """Returns the prompt with its names and with what the pool holds of it, or with the reason why it has
        no names. With `name`, also names a prompt that is too short for a lookup."""
        lookups = self._lookups
        if why := self._why_unnamed(completion, prompt, name=name):
            return prompt._replace(unnamed=why)
        self._looking += 1
        try:
            async with asyncio.timeout(lookups.timeout_s):
                tokens, media = await self._tokens(exchange, completion)
                prompt = prompt.counted(len(tokens))
                if self.rule.why(len(tokens)) and not name:
                    return prompt._replace(unnamed="not asked for")
                named = await lookups.look_up(tokens, completion.cache_salt, exchange.id, media)
                return prompt._replace(named=named)
        except TimeoutError:
            why = f"its tokens were not there or not looked up within {lookups.timeout_s:g} s"
        except ValueError as error:
            why = one_line(str(error))
        finally:
            self._looking -= 1
        return prompt._replace(unnamed=why)

    def _why_unnamed(self, completion: Completion, prompt: RoutedPrompt, *, name: bool) -> str:
        """Returns why nothing is asked about a prompt; empty if it is."""
        plain = completion.plain()
        if plain and not name and self.rule.why(prompt.tokens):
            return "not asked for"
        # the length of an image's bytes, or of its URL, says nothing about its tokens
        if not self._lookups.can_name(completion.model(), prompt.tokens if plain else 0):
            return self._lookups.blind or "it is too long, or for another model"
        if self._looking >= MAX_WAITING:
            return f"{MAX_WAITING} others are being looked up; try again"
        return ""

    async def _tokens(self, exchange: Exchange, completion: Completion) -> PromptTokens:
        """Returns a prompt's tokens, if necessary from a decode node. Raises ValueError with the reason if
        there are none."""
        plain = completion.plain()
        if plain and (ids := completion.token_ids()) is not None:
            return PromptTokens(ids)
        if not plain and not completion.renderable:
            raise ValueError("its tokens do not identify it")
        node = self.pools["decode"].out_of_turn(time.monotonic(), renders=not plain)
        if node is None:
            raise ValueError("no decode node " + ("returns its tokens" if plain else "renders chats"))
        headers, limit_s = exchange.node_headers(self._keys, exchange.span), self._lookups.timeout_s
        if plain:
            url, body, read = node + "/tokenize", completion.for_tokenize(), read_tokens
        else:
            body = await asyncio.to_thread(completion.for_render)
            url, read = f"{node}{completion.path}/render", read_rendered
        try:
            return await self.whole(url, headers, body, read, limit_s)
        except HopError as error:
            if self._sparse.admit((node, "tokens")) is not None:
                log.info("request %s: node %s did not return a prompt's tokens: %s", exchange.id, node, error)
            raise ValueError("no decode node has returned its tokens") from error

    # --- requests to nodes ----------------------------------------------------------------------------------

    @contextmanager
    def asking(self, exchange: Exchange, hop: Hop, node: str) -> Iterator[tuple[dict[str, str], Asked]]:
        """Counts a completion at a node while the block asks the node. Yields the headers for the node, and
        what notes its answer's first byte."""
        pool, prompt, now = self.pools[hop], exchange.prompt, time.monotonic()
        exchange.nodes[hop] = node
        with (
            pool.working(node, prompt) as work,
            self.limits.asking(hop, node, work if hop == "prefill" else prompt.tokens, now) as asked,
            exchange.hop_span(hop, node) as span,
        ):
            if hop == "decode" and not exchange.streamed:
                asked.end()  # its answer's first byte is no first token
            yield exchange.node_headers(self._keys, span), asked

    async def whole(
        self,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        read: Callable[[bytes], T],
        limit_s: float,
    ) -> T:
        """Returns the result of `read` for a node's whole answer to a GET, or with a `body`, to a POST.
        Raises HopError if the node refuses the request, if it fails, or if it takes longer than
        `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                answer = await send(self.session, "GET" if body is None else "POST", url, headers, body)
                with closing(answer):
                    await check_status(answer)
                    if answer.status >= 400:
                        raise HopError("refused", f"status {answer.status}", await refusal_of(answer))
                    return read(await read_all(answer, LARGEST_BODY))
        except TimeoutError as error:
            raise HopError("timeout", f"no answer within {limit_s:.3g} s") from error
        except ValueError as error:
            raise HopError("garbage", str(error)) from error

    def failed(
        self, exchange: Exchange, hop: Hop, node: str, attempts: Attempts | None, error: HopError
    ) -> None:
        """Notes how a node failed. Without `attempts`, only a connection that cannot be made counts against
        the node."""
        free_frames(error)
        self._metrics.hop_failures.labels(hop, error.reason).inc()
        now = time.monotonic()
        if (count := self._sparse.admit((node, error.reason))) is not None:
            more = f" (and {count - 1} more like it before)" if count > 1 else ""
            log.warning("request %s: %s node %s: %s: %s%s", exchange.id, hop, node, error.reason, error, more)
        if attempts is not None:
            attempts.failed(node, error.reason, now)
        elif error.reason == "unreachable":
            self.pools[hop].node(node).breaker.failed(error.reason, now)

    # --- the prefill hop ------------------------------------------------------------------------------------

    async def prefill(self, exchange: Exchange, body: bytes) -> tuple[str, HandedOver | None]:
        """Asks prefill nodes until one computes the prompt, for `prefill_timeout_s` in all. Returns the
        outcome, and what the node handed over; None if none computed it.

        A request that prefill nodes refuse still goes to the decode node. That node may accept longer prompts
        or other adapters, and its refusal is about the client's own request.
        """
        limit_s, refused = self._config.prefill_timeout_s, 0
        until, pool = time.monotonic() + limit_s, self.pools["prefill"]
        attempts = Attempts(pool, exchange.trial, exchange.prompt)
        while (
            refused < _MOST_REFUSALS
            and (left_s := until - time.monotonic()) > 0
            and (node := attempts.next(time.monotonic())) is not None
        ):
            try:
                with self.asking(exchange, "prefill", node) as (headers, asked):
                    url = node + exchange.path
                    handoff, report = await self.whole(url, headers, body, _read_prefilled, left_s)
                    asked.answered(time.monotonic())
                attempts.answered(node, time.monotonic(), well=True)
                exchange.reports["prefill"] = report
                if report is not None and report.found:
                    pool.node(node).loads = report.reason != "not_worth"
                return "handed_over" if handoff else "nothing_stored", handoff
            except HopError as error:
                if error.reason == "refused":
                    refused += 1
                    attempts.answered(node, time.monotonic(), well=False)
                    free_frames(error)
                    if self._sparse.admit((node, "refused")) is not None:
                        log.info(
                            "request %s: prefill node %s refused the prompt: %s", exchange.id, node, error
                        )
                else:
                    # a second node is not to blame if the first one left it too little time
                    blamed = error.reason != "timeout" or left_s > limit_s / 2
                    self.failed(exchange, "prefill", node, attempts if blamed else None, error)
        return "prefill_refused" if refused else "prefill_failed", None

    # --- loads at the decode node ---------------------------------------------------------------------------

    async def load(
        self, exchange: Exchange, node: str, path: str, body: bytes, name: str = _STREAM_ID
    ) -> str:
        """Asks a decode node to load a prompt. Ends when the node answers or the caller is cancelled. Returns
        why the node did not answer well; empty if it did.

        No request depends on it, so its failure counts against no node.
        """
        with closing(BodyShare(self.bodies)) as share:
            if not share.grow(len(body)):
                return "other requests take all the memory for bodies"
            try:
                with self.pools["decode"].working(node), exchange.hop_span("stream", node) as span:
                    headers = {**exchange.node_headers(self._keys, span), ID_HEADER: exchange.id + name}
                    answer = await send(self.session, "POST", node + path, headers, body)
                answer.close()
                return "" if answer.status == 200 else f"status {answer.status}"
            except HopError as error:
                return f"{error.reason}: {error}"


def no_answer(attempts: Attempts) -> ApiError:
    """Returns the error for a request that no decode node has answered."""
    if attempts.blamed:
        what = "This request failed on two nodes and is not tried on others"
        return ApiError(502, what, code="node_failed")
    return overloaded("No decode node could answer")


def _read_prefilled(answer: bytes) -> tuple[HandedOver, RequestReport | None]:
    return read_handoff(answer), read_report(answer)


def free_frames(error: BaseException | None) -> None:
    """Clears the local variables in an error's traceback, and in those of its causes. They refer to bodies,
    which would stay until the garbage collector runs: frames of `Requests` and aiohttp refer to the error,
    too.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
