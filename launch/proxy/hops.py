"""A request's hops before its answer: to a decode node for the prompt's tokens, to the prefill node, and the
stream to the decode node."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import aiohttp

from launch.openai import ID_HEADER
from launch.proxy.bodies import (
    BodyMemory,
    BodyShare,
    Completion,
    HandedOver,
    read_handoff,
    read_rendered,
    read_tokens,
)
from launch.proxy.direct import MAX_WAITING, DirectRule, Why
from launch.proxy.exchange import Exchange
from launch.proxy.keys import Keys
from launch.proxy.metrics import ProxyMetrics, RecentTrips, read_report
from launch.proxy.nodes import (
    HopError,
    NodePools,
    Refusal,
    check_status,
    read_all,
    refusal_of,
    send,
)
from launch.proxy.prefixes import NamedPrompt, PromptTokens, RoutedPrompt
from launch.proxy.routing import Attempts, Hop
from pd_cache.cluster import LARGEST_BODY, ProxyConfig
from pd_cache.decoding import one_line
from pd_cache.sparse_log import SparseLog
from pd_cache.tracing import TraceSpan

log = logging.getLogger(__name__)

T = TypeVar("T")
_MOST_REFUSALS = 2
"""How many prefill nodes may refuse a prompt before the decode node gets it."""
_STREAM_ID = "-stream"
"""The suffix of a stream's id after the request's id: engines distinguish requests by their ids."""


class Hops:
    """Sends clients' requests to nodes."""

    def __init__(
        self, config: ProxyConfig, keys: Keys, nodes: NodePools, direct: DirectRule, metrics: ProxyMetrics
    ) -> None:
        self.session: aiohttp.ClientSession
        """For requests to nodes. Set while the proxy runs."""
        self.bodies = BodyMemory(config.body_memory)
        self.pools = nodes.pools
        self.limits = nodes.limits
        self.trips = RecentTrips()
        """The last requests."""
        self._config = config
        self._keys = keys
        self._direct = direct
        self._metrics = metrics
        self._sparse = SparseLog()
        self._judging = 0
        """How many prompts are being tokenized or looked up."""

    # --- what a prompt is known by --------------------------------------------------------------------------

    async def judge(
        self, exchange: Exchange, completion: Completion, prompt: RoutedPrompt, *, name: bool
    ) -> tuple[Why | None, NamedPrompt | str]:
        """Returns why the prompt needs no prefill node (None if it needs one); and the names of the prompt,
        or the reason why there are none.

        `name`: whether the caller needs the names even of a prompt that is too short for a lookup.
        """
        direct, plain = self._direct, completion.plain()
        why = direct.why(prompt.tokens)
        if plain and why is not None and not name:
            return why, "not asked for"
        if self._judging >= MAX_WAITING:
            return why, f"{MAX_WAITING} others are being looked up; try again"
        # the length of an image's bytes, or of its URL, says nothing about its tokens
        if not direct.can_tell(completion.model(), prompt.tokens if plain else 0):
            return why, direct.blind or "it is too long, or for another model"
        self._judging += 1
        try:
            async with asyncio.timeout(direct.timeout_s):
                found = await self._tokens(exchange, completion)
                if isinstance(found, str):
                    return why, found
                tokens, media = found
                if (why := direct.why(len(tokens))) is not None and not name:
                    return why, "not asked for"
                named = await direct.look_up(tokens, completion.cache_salt(), exchange.id, media)
        except TimeoutError:
            return why, f"its tokens were not there or not looked up within {direct.timeout_s:g} s"
        except ValueError as error:
            return why, one_line(str(error))
        finally:
            self._judging -= 1
        if named is None:
            return direct.why(len(tokens)), direct.blind or "it is too long"
        return direct.why(len(tokens), named.pool_tokens or 0), named

    async def _tokens(self, exchange: Exchange, completion: Completion) -> PromptTokens | str:
        """Returns a prompt's tokens, if necessary from a decode node; or the reason why there are none."""
        plain = completion.plain()
        if plain and (ids := completion.token_ids()) is not None:
            return PromptTokens(ids)
        if not plain and not completion.renderable:
            return "its tokens do not identify it"
        node = self.pools["decode"].out_of_turn(time.monotonic(), renders=not plain)
        if node is None:
            return "no decode node returns its tokens" if plain else "no decode node renders chats"
        try:
            if plain:
                path, body, read = "/tokenize", completion.for_tokenize(), read_tokens
            else:
                path, body, read = (
                    f"{completion.path}/render",
                    await asyncio.to_thread(completion.for_render),
                    read_rendered,
                )
            return await self.whole(exchange, exchange.span, "POST", node + path, body, read)
        except (HopError, Refusal) as error:
            if self._sparse.admit((node, "tokens")) is not None:
                log.info("request %s: node %s did not return a prompt's tokens: %s", exchange.id, node, error)
            return "no decode node has returned its tokens"

    async def whole(
        self,
        exchange: Exchange,
        span: TraceSpan,
        method: str,
        url: str,
        body: bytes | None,
        read: Callable[[bytes], T],
    ) -> T:
        """Returns the result of `read` for a node's whole answer. Raises Refusal if the node refuses the
        request, HopError if it fails."""
        answer = await send(self.session, method, url, exchange.node_headers(self._keys, span), body)
        try:
            await check_status(answer)
            if answer.status >= 400:
                raise await refusal_of(answer)
            return read(await read_all(answer, LARGEST_BODY))
        except ValueError as error:
            raise HopError("garbage", str(error)) from error
        finally:
            answer.close()

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
            self.pools[hop].failed(node, error.reason, now)

    # --- the prefill hop ------------------------------------------------------------------------------------

    async def prefill(
        self, exchange: Exchange, body: bytes, prompt: RoutedPrompt, first: str | None
    ) -> tuple[str, HandedOver | None]:
        """Returns the outcome, and what a prefill node handed over; None if none computed the prompt. `first`
        is the node to try first.

        The decode node gets the request even if prefill nodes refuse it. It may accept longer prompts or
        other adapters, or have a shorter queue. If it refuses, too, its answer is about the client's own
        request.
        """
        limit_s, refused = self._config.prefill_timeout_s, 0
        until = time.monotonic() + limit_s
        pool = self.pools["prefill"]
        attempts = Attempts(pool, exchange.trial, prompt, first=first)
        while refused < _MOST_REFUSALS:
            if (left := until - time.monotonic()) <= 0 or (node := attempts.next(time.monotonic())) is None:
                break
            exchange.nodes["prefill"] = node
            try:
                work, now = pool.work(node, prompt), time.monotonic()
                with (
                    pool.working(node, prompt),
                    self.limits.asking("prefill", node, work, now) as asked,
                    exchange.hop_span("prefill", node) as span,
                ):
                    url = node + exchange.path
                    asking = self.whole(
                        exchange,
                        span,
                        "POST",
                        url,
                        body,
                        lambda answer: (read_handoff(answer), read_report(answer)),
                    )
                    async with asyncio.timeout(left):
                        handoff, report = await asking
                    asked.answered(time.monotonic())
            except TimeoutError:
                # a second node is not to blame if the first one left it too little time
                whole = left > limit_s / 2
                failure = HopError("timeout", f"no answer within {left:.3g} s")
                self.failed(exchange, "prefill", node, attempts if whole else None, failure)
            except HopError as error:
                self.failed(exchange, "prefill", node, attempts, error)
            except Refusal as refusal:
                free_frames(refusal)
                refused += 1
                attempts.answered(node, time.monotonic(), well=False)
                if self._sparse.admit((node, "refused")) is not None:
                    log.info("request %s: prefill node %s refused the prompt: %s", exchange.id, node, refusal)
            else:
                attempts.answered(node, time.monotonic(), well=True)
                exchange.reports["prefill"] = report
                if report is not None and report.found:
                    pool.found(node, loads=report.reason != "not_worth")
                return "handed_over" if handoff else "nothing_stored", handoff
        return "prefill_refused" if refused else "prefill_failed", None

    # --- the stream -----------------------------------------------------------------------------------------

    def streaming_node(self, exchange: Exchange, prompt: RoutedPrompt) -> str | None:
        """Returns the decode node that should load the prompt's chunks while a prefill node computes them;
        None if streaming is not worthwhile.

        The node will probably answer the request.
        """
        pool, named = self.pools["decode"], prompt.named
        tokens, found = (prompt.tokens, 0) if named is None else (named.tokens, named.pool_tokens or 0)
        # half of the memory for bodies is for requests that are to be answered
        if not self._direct.streams(tokens, found) or self.bodies.used > self.bodies.limit // 2:
            return None
        node = exchange.decodes = exchange.decodes or pool.pick(time.monotonic(), tried=exchange.excluded)
        return node if node is not None and pool.target(node).streams else None

    def stream(
        self,
        exchange: Exchange,
        node: str,
        path: str,
        body: bytes,
        name: str = _STREAM_ID,
        most_s: float | None = None,
    ) -> asyncio.Task[int] | None:
        """Keeps a stream open until it is cancelled, for at most `most_s`. The task's result is the status of
        its answer; 0 without one. Returns None if there is no memory for its body.

        No request depends on it, so its failure counts against no node.
        """
        share = BodyShare(self.bodies)
        if not share.grow(len(body)):
            return None

        async def held() -> int:
            with self.pools["decode"].working(node), exchange.hop_span("stream", node) as span:
                headers = {**exchange.node_headers(self._keys, span), ID_HEADER: exchange.id + name}
                try:
                    async with asyncio.timeout(most_s):
                        answer = await send(self.session, "POST", node + path, headers, body)
                    answer.close()
                    status, why = answer.status, f"status {answer.status}"
                except (TimeoutError, HopError) as error:
                    status, why = 0, f"{error!r}"
                log.debug("request %s: the stream to %s has ended: %s", exchange.id, node, why)
                return status

        task = asyncio.create_task(held())
        task.add_done_callback(lambda _: share.give_back())
        return task


def free_frames(error: BaseException | None) -> None:
    """Clears the local variables in an error's traceback, and in those of its causes. They refer to bodies,
    which would stay until the garbage collector runs: frames of `Requests` and aiohttp refer to the error,
    too.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
