"""Prompts that decode nodes have loaded before their requests come."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from launch.proxy.bodies import Completion
from launch.proxy.exchange import Exchange
from launch.proxy.hints.messages import HintRefusedError
from launch.proxy.hints.pins import fair
from launch.proxy.hops import Hops
from launch.proxy.keys import Client
from launch.proxy.lookups import PoolLookups
from launch.proxy.routing.prefixes import NamedPrompt

PREFETCH_S = 60.0
"""The longest time for which a node holds a prompt before its request comes, because it has blocks for few
prompts."""
_MOST_PREFETCHED = 64
_REFUSED_S = 0.1
"""A node has this long to refuse a prefetch."""


class Prefetch(NamedTuple):
    holder: str
    node: str
    stream: asyncio.Task[str]
    """Holds the prompt at the node. The task's result says why the node no longer holds the prompt."""


class Prefetches:
    def __init__(self, hops: Hops, lookups: PoolLookups) -> None:
        self._hops = hops
        self._lookups = lookups
        self._under_way: dict[bytes, Prefetch] = {}
        """By the names of the prompts' last chunks."""

    def any_of(self, client: Client) -> bool:
        """Returns whether a node holds a prompt for this client. Prompts that others prefetch cost it
        nothing."""
        return any(prefetch.holder == client.holder for prefetch in self._under_way.values())

    def take(self, exchange: Exchange) -> str | None:
        """Returns the node that has prefetched the beginning of the request's prompt; None if there is none.
        The prefetch ends when the request is answered."""
        names = () if exchange.prompt.named is None else exchange.prompt.named.names
        for name in reversed(names):
            if (prefetch := self._under_way.pop(name, None)) is not None:
                exchange.until_answered.callback(prefetch.stream.cancel)
                return prefetch.node
        return None

    def end(self) -> None:
        """Ends all prefetches."""
        for prefetch in self._under_way.values():
            prefetch.stream.cancel()

    async def start(self, exchange: Exchange, completion: Completion, named: NamedPrompt) -> str:
        """Makes a decode node load the prompt and hold it for `PREFETCH_S`. A request with it will go there.

        Returns the node's URL. Raises HintRefusedError, with the reason, if no node loads the prompt.
        """
        node, streams = self._loading_node(named)
        last, holder = named.names[-1], exchange.client.holder
        held = sum(prefetch.holder == holder for prefetch in self._under_way.values())
        if not fair(holder, held, _MOST_PREFETCHED - len(self._under_way)):
            raise HintRefusedError(
                f"all {_MOST_PREFETCHED} prefetches are taken, or this client has as many prefetches as are free"
            )
        body = completion.for_stream() if streams else completion.for_load()

        async def hold() -> str:
            """Returns why the node does not load the prompt, or no longer; empty once the time is over."""
            try:
                async with asyncio.timeout(PREFETCH_S):
                    name = f"-prefetch-{last.hex()[:8]}"
                    why = await self._hops.load(exchange, node, completion.path, body, name)
                    if streams or why:
                        return why or "no room"
                    await asyncio.sleep(PREFETCH_S)  # what it has loaded stays in its own cache
            except TimeoutError:
                pass
            finally:
                if self._under_way.get(last) is prefetch:
                    del self._under_way[last]
            return ""

        prefetch = Prefetch(holder, node, asyncio.create_task(hold()))
        if last in self._under_way:
            self._under_way[last].stream.cancel()
        self._under_way[last] = prefetch
        await asyncio.wait({prefetch.stream}, timeout=_REFUSED_S)
        # a cancelled stream has given way to its request, or to another prefetch of the prompt
        if prefetch.stream.done() and not prefetch.stream.cancelled():
            raise HintRefusedError(f"the decode node does not load it: {prefetch.stream.result()}")
        return node

    def _loading_node(self, named: NamedPrompt) -> tuple[str, bool]:
        """Returns the decode node that a request with this prompt would get, and whether it streams. Raises
        HintRefusedError if the node would not load the prompt."""
        if named.pool_tokens is None:
            raise HintRefusedError("the pool does not answer")
        if not named.pool_tokens:
            raise HintRefusedError("the pool has no chunk of the prompt")
        pool = self._hops.pools["decode"]
        if (node := pool.pick(time.monotonic())) is None:
            raise HintRefusedError("no decode node can be asked")
        if not (streams := pool.node(node).record.streams):
            if not self._lookups.grouped:
                raise HintRefusedError(
                    "decode nodes load no prompt before its request comes (handoff.stream, docs/hints.md)"
                )
            if not self._hops.rule.why(named.tokens, named.pool_tokens):
                raise HintRefusedError(
                    "a decode node would compute it: the pool lacks too much of it (docs/hints.md)"
                )
        return node, streams
