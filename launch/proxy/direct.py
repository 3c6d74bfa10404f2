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

from launch.proxy.completion import Completion
from launch.proxy.patience import within
from launch.proxy.prefixes import RoutedPrompt
from pd_cache.block_hashes import BlockHasher
from pd_cache.lookup import LookupClient
from pd_cache.tokens import Namespace, salt_keys, stride_hashes

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


class Pool(NamedTuple):
    """The pool to look up in, and the names of its chunks."""

    namespaces: tuple[Namespace, ...]
    """Those of the model's groups of layers, the first of which names the chunks."""
    master: str
    model: str | None = None
    """The `model` that requests for it name; requests for others, such as a LoRA adapter, have KV of other names. None for all."""


OpenLookup = Callable[[Pool], LookupClient]
"""Opens a client of a pool. Must return quickly; may raise any exception."""


class _Eyes(NamedTuple):
    """Everything that a lookup needs."""

    client: LookupClient
    chunk_size: int
    keys_per_chunk: int
    """How many objects a chunk has, in all groups of layers."""
    hasher: BlockHasher | None
    """Set if chunks are named by the engine's block hashes."""
    model: str | None

    def find(self, tokens: list[int], salt: str | None, request_id: str) -> int:
        """Returns the length of the prefix that the pool holds, in tokens."""
        if self.hasher is None:
            return self.client.lookup(tokens, request_id, {"extra_keys": salt_keys(salt)})
        names = stride_hashes(self.hasher.hashes(tokens, salt), self.chunk_size // self.hasher.block_size)
        return self.client.find(names, request_id)


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
        self.blind = "nothing is known of the pool yet"
        """The reason why no prompt is looked up; empty while prompts are."""
        self._waiting = 0
        self._closed = False
        self._executor: ThreadPoolExecutor | None = None

    def use(self, pool: Pool | str) -> None:
        """Looks up in this pool from now on. If given a reason why that is impossible instead, looks up in none."""
        if self._closed:
            return
        if self._open is None or self._tokens == 0:
            self._tell("direct_tokens is 0" if self._tokens == 0 else "this proxy has no client of the pool")
        elif isinstance(pool, str):
            self._retire()
            self._tell(pool)
        elif pool != self._pool:
            self._retire()
            self._pool = pool
            try:
                space = pool.namespaces[0]
                blocks = space.hash_mode == "blocks"
                hasher = BlockHasher(space.block_size, space.hash_seed, self._seeds) if blocks else None
                objects = sum(one.shards for one in pool.namespaces)
                self._eyes = _Eyes(self._open(pool), space.chunk_size, objects, hasher, pool.model)
                self._tell("")
            except Exception as error:  # noqa: BLE001 - without lookups prompts take the usual way
                self._tell(str(error))

    def _tell(self, blind: str) -> None:
        if blind != self.blind:
            self.blind = blind
            if self._tokens:
                log.info("looking up prompts in the pool" if not blind else f"looking up no prompts: {blind}")

    async def why(
        self,
        completion: Completion,
        prompt: RoutedPrompt,
        request_id: str,
        tokenize: Callable[[], Awaitable[list[int] | None]],
    ) -> Why | None:
        """Returns why a prompt needs no prefill node, or None if it needs one. Calls `tokenize` if the prompt is text."""
        if (why := needs_no_prefill(prompt.tokens, 0, self._tokens)) is not None:
            return why
        eyes = self._eyes
        if eyes is None or self._tokens == 0 or self._waiting >= MAX_WAITING or prompt.tokens > _MAX_TOKENS:
            return None
        self._waiting += 1
        try:
            if not completion.plain() or (eyes.model is not None and completion.model() not in (None, eyes.model)):
                return None
            return await within(self._look(eyes, completion, request_id, tokenize), self._timeout_s)
        except (TimeoutError, ValueError):
            return None
        finally:
            self._waiting -= 1

    async def _look(
        self,
        eyes: _Eyes,
        completion: Completion,
        request_id: str,
        tokenize: Callable[[], Awaitable[list[int] | None]],
    ) -> Why | None:
        tokens = completion.token_ids()
        if tokens is None:
            tokens = await tokenize()
        if tokens is None:
            return None
        if (why := needs_no_prefill(len(tokens), 0, self._tokens)) is not None:
            return why
        if len(tokens) // eyes.chunk_size * eyes.keys_per_chunk > _MAX_KEYS:
            return None
        loop, salt = asyncio.get_running_loop(), completion.cache_salt()
        found = await loop.run_in_executor(self._threads(), eyes.find, tokens, salt, request_id)
        return needs_no_prefill(len(tokens), found, self._tokens)

    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="proxy-lookup")
        return self._executor

    def _retire(self) -> None:
        if self._eyes is not None:
            self._threads().submit(self._eyes.client.close)  # takes up to a second
        self._eyes = self._pool = None

    def close(self) -> None:
        """Closes the client for good. Waits for lookups under way, which have their own deadlines."""
        self._closed = True
        self._retire()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=False)
            self._executor = None
