"""Looks prompts up in the pool. The lookups follow the nodes: the pool's master may change, and so may the
namespace of the decode nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from launch.proxy.routing.prefixes import NamedPrompt, PromptNamer
from pd_cache.chunks import SEED_VARIABLE, MediaItem, Namespace
from pd_cache.cluster import ClusterConfig, EngineNode, VllmEngineConfig
from pd_cache.config import NodeSettings
from pd_cache.lookup import LookupClient, MooncakeLookupClient
from pd_cache.reasons import MissReason
from pd_cache.versions import FIRST

log = logging.getLogger(__name__)

LOOKUP_THREADS = 4
LOOKUP_TIMEOUT_S = 0.6
MAX_WAITING = 32
"""The most prompts of completions that are tokenized or looked up at a time. Further ones are not looked
up."""
_MAX_TOKENS = 1 << 18
"""The most tokens of a prompt that is looked up. Naming the chunks of a longer prompt would take this process
too long."""
_MAX_KEYS = 1 << 18
"""The most objects that a lookup asks for."""
_ANSWERED: frozenset[MissReason] = frozenset(
    ("missing", "never_stored", "evicted", "none", "no_tail", "being_stored", "reset")
)
"""The reasons of lookups that the pool has answered."""


class Pool(NamedTuple):
    """The pool to look up in, and the names of its chunks."""

    namespaces: tuple[Namespace, ...]
    """The namespaces of the model's layer groups. The first group names the chunks."""
    master: str
    model: str | None = None
    """The `model` of requests that can be looked up; None for all. The KV of other models, such as LoRA
    adapters, has other names."""


OpenLookup = Callable[[Pool], LookupClient]
"""Opens a client of a pool. Must return quickly; may raise any exception."""


def open_lookup(config: ClusterConfig, host: str, pool: Pool) -> MooncakeLookupClient:
    """Returns a client of the pool, in a cluster like `config`. `host` is this process's address. Does not
    wait for the pool."""
    settings = NodeSettings(master=pool.master, host=host, cache=config.cache, transfer=config.transfer)
    first, *further = pool.namespaces
    return MooncakeLookupClient(settings, first, pool.master, further=further)


def hash_seeds(config: ClusterConfig) -> set[str]:
    """Returns the seeds of vLLM's block hashes that the file sets."""
    if not isinstance(config.engine, VllmEngineConfig):
        return set()
    own = (node.env for node in config.nodes if isinstance(node, EngineNode))
    return {env[SEED_VARIABLE] for env in (config.engine.env, *own) if SEED_VARIABLE in env}


class PoolLookups:
    """Names prompts and looks them up in the pool that is in use."""

    def __init__(
        self,
        open_lookup: OpenLookup | None = None,
        *,
        timeout_s: float = LOOKUP_TIMEOUT_S,
        seeds: Collection[str] = (),
    ) -> None:
        """Without `open_lookup`, prompts are named but not looked up. `timeout_s` bounds the lookup and the
        request for a prompt's tokens together.

        `seeds`: other seeds, besides this process's own, from which vLLM's block hashes may start.
        """
        self._open = open_lookup
        self.timeout_s = timeout_s
        self._seeds = seeds
        self._used: Pool | str | None = None
        self._client: LookupClient | None = None
        self._opened: tuple[Pool, LookupClient] | None = None
        """The last client, kept while the pool is not known: a closed client leaves 26 MiB in the process."""
        self._namer: PromptNamer | None = None
        self._keys_per_chunk = 1
        """How many objects a chunk has, in all groups of layers."""
        self.chunk_bytes = 1
        """The size of their payloads together."""
        self.wants_names = False
        """Whether prompts have to be named although they are not looked up."""
        self.blind = "the pool is not known yet"
        """The reason why no prompt is looked up; empty while prompts are."""
        self._closed = False
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="proxy-lookup")

    def use(self, pool: Pool | str, label: str | None = FIRST) -> None:
        """From now on, looks prompts up in this pool; or looks up none, if `pool` is the reason why that is
        impossible.

        `label`: the label of the weights of the nodes that will load; None if they have none.
        """
        if self._closed:
            return
        if pool != self._used:
            self._used, self._client, self._namer = pool, None, None
            blind = pool if isinstance(pool, str) else self._enter(pool)
            if self._open is None:
                blind = "direct_tokens is 0"
            elif blind != self.blind:
                log.info("looking up prompts in the pool" if not blind else f"looking up no prompts: {blind}")
            self.blind = blind
        if self._client is not None:
            self._client.reset(label)

    def _enter(self, pool: Pool) -> str:
        """Returns why prompts cannot be looked up in this pool; empty if they can."""
        try:
            self._namer = PromptNamer(pool.namespaces[0], self._seeds)
            self._keys_per_chunk = sum(group.shards for group in pool.namespaces)
            self.chunk_bytes = sum(group.chunk_bytes for group in pool.namespaces)
            if self._open is not None:
                if self._opened is None or self._opened[0] != pool:
                    self._retire()
                    self._opened = pool, self._open(pool)
                self._client = self._opened[1]
        except Exception as error:  # noqa: BLE001 - without lookups prompts take the usual way
            return str(error)
        return ""

    @property
    def model(self) -> str | None:
        """The model whose prompts can be named; None if requests for it may name any."""
        return self._used.model if isinstance(self._used, Pool) else None

    @property
    def grouped(self) -> bool:
        """Whether the model has several groups of layers."""
        return isinstance(self._used, Pool) and len(self._used.namespaces) > 1

    def can_name(self, model: str | None, tokens: int) -> bool:
        """Returns whether `look_up` can name a prompt of `tokens` tokens for `model`, and whether its names
        are of use."""
        if self._namer is None or tokens > _MAX_TOKENS or (self._client is None and not self.wants_names):
            return False
        return self.model is None or model in (None, self.model)

    async def look_up(
        self, tokens: list[int], salt: str | None, request_id: str, media: Sequence[MediaItem] = ()
    ) -> NamedPrompt:
        """Returns the names of a prompt, and how much of it the pool holds if prompts are looked up here.
        Raises ValueError with the reason if the prompt cannot be named here."""
        namer = self._namer
        if namer is None or len(tokens) > _MAX_TOKENS:
            raise ValueError(self.blind or "it is too long")
        return await self._find(lambda: namer.name(tokens, salt, media), request_id)

    async def look_up_blocks(self, hashes: Sequence[bytes], request_id: str) -> NamedPrompt | None:
        """Does the same for a prompt that is given by the hashes of its blocks
        (`PromptNamer.name_blocks`)."""
        namer = self._namer
        return None if namer is None else await self._find(lambda: namer.name_blocks(hashes), request_id)

    async def look_up_again(self, named: NamedPrompt, request_id: str) -> NamedPrompt:
        """Returns the prompt with how much of it the pool holds now."""
        return await self._find(lambda: named._replace(pool_tokens=None), request_id)

    async def _find(self, name: Callable[[], NamedPrompt], request_id: str) -> NamedPrompt:
        """Names a prompt and looks it up, on a thread."""
        client, most = self._client, self.most_chunks

        def find() -> NamedPrompt:
            named = name()
            if client is None or len(named.names) > most:
                return named
            found = client.find(named.names, request_id)
            if found.reason not in _ANSWERED:
                return named
            return named._replace(pool_tokens=found.chunks * named.chunk_tokens)

        return await asyncio.get_running_loop().run_in_executor(self._threads, find)

    @property
    def most_chunks(self) -> int:
        """How many chunks one lookup may ask for."""
        return _MAX_KEYS // self._keys_per_chunk

    async def renew(self, names: Sequence[bytes]) -> tuple[tuple[str, str], int] | None:
        """Renews the leases of the chunks that the pool has, so that they are not evicted.

        Returns the chunks' space, and how many of their objects the pool has. The space is the namespace's
        fingerprint and the weights version; in another space, these names belong to other chunks. Returns
        None if the pool does not answer, or is not known.
        """
        namer, client = self._namer, self._client
        if namer is None or client is None:
            return None
        renewed = await asyncio.get_running_loop().run_in_executor(self._threads, client.renew, names)
        return None if renewed is None else ((namer.fingerprint, renewed[0]), renewed[1])

    def _retire(self) -> None:
        if self._opened is not None:
            self._threads.submit(self._opened[1].close)  # takes up to a second
        self._opened = None

    def close(self) -> None:
        """Closes the client for good. Waits for lookups under way, which have their own deadlines."""
        self._closed = True
        self._used = self._client = self._namer = None
        self._retire()
        self._threads.shutdown(wait=True)
