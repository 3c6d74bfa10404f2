"""Conditional disaggregation: decides which prompts need no prefill node.

A decode node can compute a prompt itself. That is quicker if there is little to compute: the prompt is short, or the pool holds its
prefix. A single lookup finds out whether the pool does. For a text, the proxy first asks a node for the tokens (`/tokenize`, as in
vLLM). If either fails, the prompt takes the usual way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from launch.proxy.prefixes import NamedPrompt, PromptNamer
from pd_cache.chunks import Namespace
from pd_cache.lookup import LookupClient
from pd_cache.reasons import MissReason

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
_ANSWERED: frozenset[MissReason] = frozenset(
    ("missing", "never_stored", "evicted", "none", "no_tail", "being_stored", "reset")
)
"""The reasons of lookups that the pool has answered."""


class Pool(NamedTuple):
    """The pool to look up in, and the names of its chunks."""

    namespaces: tuple[Namespace, ...]
    """Those of the model's groups of layers, the first of which names the chunks."""
    master: str
    model: str | None = None
    """The `model` that requests for it name; requests for others, such as a LoRA adapter, have KV of other names. None for all."""
    versions: str = ""
    """Where to ask which version of the weights is current; see `NodeSettings.versions`."""


OpenLookup = Callable[[Pool], LookupClient]
"""Opens a client of a pool. Must return quickly; may raise any exception."""


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
        self.timeout_s = timeout_s
        self._seeds = seeds
        self._pool: Pool | None = None
        self._eyes: _Eyes | None = None
        self._namer: PromptNamer | None = None
        self.wants_names = False
        """Whether prompts have to be named although they are not looked up."""
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

    def why(self, tokens: int, found: int = 0) -> Why | None:
        """Returns why a prompt of `tokens` tokens, of which the pool holds the first `found`, needs no prefill node; None if it needs one."""
        return needs_no_prefill(tokens, found, self._tokens)

    def can_tell(self, model: str | None, tokens: int) -> bool:
        """Returns whether `look_up` can say more of such a prompt for `model`, and somebody wants to know it."""
        if self._namer is None or tokens > _MAX_TOKENS or (self._eyes is None and not self.wants_names):
            return False
        return self.model is None or model in (None, self.model)

    async def look_up(self, tokens: list[int], salt: str | None, request_id: str) -> NamedPrompt | None:
        """Returns what a prompt is known by, and how much of it the pool holds if prompts are looked up here. Returns None if the prompt
        cannot be named here, or if too many prompts are being looked up. Raises ValueError if a token is none."""
        namer, eyes = self._namer, self._eyes
        if namer is None or self._waiting >= MAX_WAITING or len(tokens) > _MAX_TOKENS:
            return None
        self._waiting += 1
        try:
            return await self._named(namer, eyes, tokens, salt, request_id)
        finally:
            self._waiting -= 1

    @property
    def model(self) -> str | None:
        """The model whose prompts can be named; None if requests for it may name any."""
        return None if self._pool is None else self._pool.model

    async def _named(
        self, namer: PromptNamer, eyes: _Eyes | None, tokens: list[int], salt: str | None, request_id: str
    ) -> NamedPrompt:
        """Returns what a prompt is known by, and how much of it the pool holds if `eyes` can see that."""

        def find() -> NamedPrompt:
            naming = namer.name(tokens, salt)
            if eyes is None or len(naming.names) * eyes.keys_per_chunk > _MAX_KEYS:
                return naming.prompt
            found = eyes.client.survey(naming.names, request_id)
            if found.reason not in _ANSWERED:
                return naming.prompt
            return naming.prompt._replace(pool_tokens=found.chunks * namer.chunk_size)

        return await asyncio.get_running_loop().run_in_executor(self._threads(), find)

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
