"""Conditional disaggregation: decides which prompts need no prefill node.

A decode node can compute a prompt itself. That is quicker if there is little to compute: the prompt is short, or the pool holds its
prefix. A single lookup finds out whether the pool does. For a text, the proxy first asks a node for the tokens (`/tokenize`, as in
vLLM). If either fails, the prompt takes the usual way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from launch.proxy.block_index import NamedPrompt
from launch.proxy.completion import Completion
from launch.proxy.naming import Naming, PromptNamer
from launch.proxy.patience import within
from launch.proxy.prefixes import RoutedPrompt
from pd_cache.groups import Surveyed
from pd_cache.lookup import LookupClient
from pd_cache.misses import MissReason
from pd_cache.tokens import Namespace

log = logging.getLogger(__name__)

Why = Literal["short", "in_pool"]

LOOKUP_THREADS = 4
LOOKUP_TIMEOUT_S = 0.6
MAX_WAITING = 32
"""The most lookups under way. Further prompts take the usual way without a lookup."""
_MAX_TOKENS = 1 << 18
"""The most tokens of a prompt that is looked up. To name the chunks of a longer one would take this process too long."""
_MAX_KEYS = 1 << 18
"""The most objects that a lookup asks for. The sizes in a node's record, which anyone who may write to etcd can choose, must not fill the
proxy's memory."""
_MISSED: frozenset[MissReason] = frozenset(("missing", "never_stored", "evicted"))
"""The reasons of lookups that the pool has answered, if it lacks a chunk."""
_ANSWERED: frozenset[MissReason] = _MISSED | {"none", "no_tail", "being_stored", "reset"}
"""The reasons of all lookups that the pool has answered."""


class Pool(NamedTuple):
    """The pool to look up in, and the names of its chunks."""

    namespaces: tuple[Namespace, ...]
    """Those of the model's groups of layers, the first of which names the chunks."""
    master: str
    model: str | None = None
    """The `model` that requests for it name; requests for others, such as a LoRA adapter, have KV of other names. None for all."""


OpenLookup = Callable[[Pool], LookupClient]
"""Opens a client of a pool. Must return quickly; may raise any exception."""


class Judged(NamedTuple):
    """What is known of a prompt before a node is chosen."""

    why: Why | None = None
    """Why it needs no prefill node; None if it needs one."""
    named: NamedPrompt | None = None
    """The prompt's hashes, and how much of it the pool holds; None if they are not known."""


class _Eyes(NamedTuple):
    """Everything that a lookup needs."""

    client: LookupClient
    keys_per_chunk: int
    """How many objects a chunk has, in all groups of layers."""


def needs_no_prefill(tokens: int, found: int, direct_tokens: int) -> Why | None:
    """Returns why a prompt of `tokens` tokens, of which the pool holds the first `found`, needs no prefill node; None if it needs one.
    Pure."""
    if tokens < direct_tokens:
        return "short"
    return "in_pool" if tokens - found < direct_tokens else None


class DirectRule:
    """Sends a prompt to the decode node directly if fewer than `tokens` of its tokens have to be computed."""

    def __init__(
        self,
        tokens: int,
        open_lookup: OpenLookup | None = None,
        *,
        timeout_s: float = LOOKUP_TIMEOUT_S,
        seeds: Collection[str] = (),
    ) -> None:
        """With 0 `tokens`, no prompt goes directly. `timeout_s` bounds the lookup and the request for tokens of a prompt together.

        `seeds`: other seeds, besides this process's own, from which vLLM's block hashes may start.
        """
        self._tokens = tokens
        self._open = open_lookup
        self._timeout_s = timeout_s
        self._seeds = seeds
        self._pool: Pool | None = None
        self._eyes: _Eyes | None = None
        self._namer: PromptNamer | None = None
        self.wants_names = False
        """Whether prompts have to be named although they are not looked up."""
        self.on_miss: Callable[[Naming, int], None] = lambda naming, chunk: None
        """Called after each lookup that found less than the whole prompt, with the number of the first chunk that the pool does not hold."""
        self.blind = "nothing is known of the pool yet"
        """The reason why no prompt is looked up; empty while prompts are."""
        self._waiting = 0
        self._closed = False
        self._executor: ThreadPoolExecutor | None = None

    def use(self, pool: Pool | str) -> None:
        """Looks up in this pool from now on. If given a reason why that is impossible instead, looks up in none."""
        if self._closed:
            return
        if isinstance(pool, str):
            self._retire()
            self._tell(pool)
        elif pool != self._pool:
            self._retire()
            self._pool = pool
            try:
                self._namer = PromptNamer(pool.namespaces[0], self._seeds)
                if self._open is not None and self._tokens:
                    self._eyes = _Eyes(self._open(pool), sum(one.shards for one in pool.namespaces))
                self._tell("")
            except Exception as error:  # noqa: BLE001 - without lookups prompts take the usual way
                self._tell(str(error))
        if self._open is None or self._tokens == 0:
            self._tell("direct_tokens is 0" if self._tokens == 0 else "this proxy has no client of the pool")

    def _tell(self, blind: str) -> None:
        if blind != self.blind:
            self.blind = blind
            if self._tokens:
                log.info("looking up prompts in the pool" if not blind else f"looking up no prompts: {blind}")

    async def judge(
        self,
        completion: Completion,
        prompt: RoutedPrompt,
        request_id: str,
        tokenize: Callable[[], Awaitable[list[int] | None]],
    ) -> Judged:
        """Returns whether a prompt needs a prefill node, and what it is known by. Calls `tokenize` if the prompt is text."""
        if (why := needs_no_prefill(prompt.tokens, 0, self._tokens)) is not None:
            return Judged(why)
        namer, eyes = self._namer, self._eyes
        if namer is None or self._waiting >= MAX_WAITING or prompt.tokens > _MAX_TOKENS:
            return Judged()
        if eyes is None and not self.wants_names:
            return Judged()
        self._waiting += 1
        try:
            model = None if self._pool is None else self._pool.model
            if not completion.plain() or (model is not None and completion.model() not in (None, model)):
                return Judged()
            return await within(self._look(namer, eyes, completion, request_id, tokenize), self._timeout_s)
        except (TimeoutError, ValueError):
            return Judged()
        finally:
            self._waiting -= 1

    async def name(self, tokens: list[int], salt: str | None) -> NamedPrompt | None:
        """Returns what a prompt is known by; None if that cannot be known here, or if too many prompts are being named. Raises ValueError
        if a token is none."""
        namer = self._namer
        if namer is None or self._waiting >= MAX_WAITING or len(tokens) > _MAX_TOKENS:
            return None
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return (await loop.run_in_executor(self._threads(), namer.name, tokens, salt)).prompt
        finally:
            self._waiting -= 1

    @property
    def model(self) -> str | None:
        """The model whose prompts can be named; None if requests for it may name any."""
        return None if self._pool is None else self._pool.model

    async def _look(
        self,
        namer: PromptNamer,
        eyes: _Eyes | None,
        completion: Completion,
        request_id: str,
        tokenize: Callable[[], Awaitable[list[int] | None]],
    ) -> Judged:
        tokens = completion.token_ids()
        if tokens is None:
            tokens = await tokenize()
        if tokens is None:
            return Judged()
        if (why := needs_no_prefill(len(tokens), 0, self._tokens)) is not None:
            return Judged(why)
        loop, salt = asyncio.get_running_loop(), completion.cache_salt()
        if eyes is None:
            return Judged(None, (await loop.run_in_executor(self._threads(), namer.name, tokens, salt)).prompt)
        if len(tokens) // namer.chunk_size * eyes.keys_per_chunk > _MAX_KEYS:
            return Judged()

        def find() -> tuple[Naming, Surveyed]:
            naming = namer.name(tokens, salt)
            return naming, eyes.client.survey(naming.names, request_id)

        naming, found = await loop.run_in_executor(self._threads(), find)
        if found.reason not in _ANSWERED:
            return Judged(None, naming.prompt)
        if found.reason in _MISSED:
            self.on_miss(naming, found.leading)
        there = found.chunks * namer.chunk_size
        why = needs_no_prefill(len(tokens), there, self._tokens)
        return Judged(why, naming.prompt._replace(pool_tokens=there))

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="proxy-lookup")
        return self._executor

    def _retire(self) -> None:
        if self._eyes is not None:
            self._threads().submit(self._eyes.client.close)  # takes up to a second
        self._eyes = self._pool = self._namer = None

    def close(self) -> None:
        """Closes the client for good. Waits for lookups under way, which have their own deadlines."""
        self._closed = True
        self._retire()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=False)
            self._executor = None
