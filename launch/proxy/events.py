"""Follows the contents of each prefill node's own cache by its KV events. `/query` reports them to other
routers.

A block is identified by 64 bits of its hash. A node's blocks are a set for each medium, so forgetting a node
drops its sets. A set takes about 100 bytes a block. All sets together have at most `most_blocks` blocks;
further blocks are ignored until others are removed. A hash covers the whole prefix, so the number of a
prompt's leading blocks in a set shows how much of the prompt a node has.

`KnownRank.apply` runs on the subscriber's thread, and all other methods run on the event loop's thread. A set
that is read while it grows gives an answer that was true a moment ago.

The form of `/query` is that of Mooncake Conductor's indexer API. A request is `{"model": "NAME", "token_ids":
[1, 2, 3], "cache_salt": "…", "instance_id": "NODE"}`. The answer is `{"default": {"NODE": {"longest_matched":
256, "GPU": 128, "CPU": 256, "DISK": 0, "DP": {"0": 256}}}}`, in tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any

import msgspec
from aiohttp import web

from launch.openai import ApiError, overloaded
from launch.proxy.bodies import BodyMemory, BodyShare, Token, read_body, tenant_salt
from launch.proxy.keys import Keys
from launch.proxy.lookups import PoolLookups
from launch.proxy.routing.prefixes import NamedPrompt, leading
from pd_cache.chunks import Namespace
from pd_cache.cluster import NodeRecord
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.events import (
    FULL_ATTENTION,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    EventBatch,
    EventEndpoints,
    EventSubscriber,
    Forget,
    OnSteps,
    RemovedEvent,
    Step,
    StoredEvent,
    short_hash,
)

_MOST_UNDER_WAY = 1 << 20
_LARGEST = 4 << 20
"""The most bytes of a query: enough for a quarter of a million tokens."""
_MOST_AT_ONCE = 8
_READ_S = 10.0
_TENANT = "default"


class KnownRank:
    """The contents of the cache of one data-parallel rank of a node."""

    def __init__(self, room: Callable[[], int]) -> None:
        """`room()`: how many more blocks may be noted, of all caches together."""
        self._room = room
        self._sets: dict[str, set[int]] = {}
        """The blocks in each medium."""
        self._partial: set[int] = set()
        """Layer groups that do not keep every token of a prefix. Their blocks are ignored."""
        self.ready = False
        """Whether the rank has sent anything since its blocks were last forgotten. Until then, its cache is
        unknown."""
        self.unnameable = False
        """Whether its hashes also cover tokens after a block, so that no prompt can be matched to them. Its
        blocks are then ignored."""

    def __len__(self) -> int:
        return sum(map(len, list(self._sets.values())))

    def apply(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if isinstance(step, Forget):
                self._sets = {}
            else:
                self._apply(step)
            self.ready = not isinstance(step, Forget)

    def _apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, StoredEvent):
                if event.lookahead_token_ids is not None:
                    self.unnameable = True
                    continue
                if event.group_idx is not None and event.kv_cache_spec_kind not in FULL_ATTENTION:
                    self._partial.add(event.group_idx)
                if event.medium != MEDIUM_STORAGE and event.group_idx not in self._partial:
                    self._add(event.medium or MEDIUM_GPU, _short(event.block_hashes))
            elif isinstance(event, RemovedEvent):
                if event.group_idx not in self._partial:
                    self._sets.get(event.medium or MEDIUM_GPU, set()).difference_update(
                        _short(event.block_hashes)
                    )
            else:
                self._sets = {}

    def _add(self, medium: str, blocks: list[int]) -> None:
        known = self._sets.setdefault(medium, set())
        if len(blocks) > (room := max(0, self._room())):
            blocks = [block for block in blocks if block not in known][:room]
        known.update(blocks)

    def media(self, prompt: NamedPrompt) -> dict[str, int]:
        """Returns how many tokens of the prompt's beginning the rank has, by medium."""
        return {
            medium: leading(prompt.blocks, known) * prompt.block_tokens
            for medium, known in list(self._sets.items())  # the subscriber's thread may add one
        }

    def blocks(self, prompt: NamedPrompt, under_way: Container[int]) -> int:
        """Returns how many blocks of the prompt's beginning are in any medium, or under way."""
        sets = list(self._sets.values())
        if len(sets) == 1 and not under_way:
            return leading(prompt.blocks, sets[0])
        count = 0
        for block in prompt.blocks:
            if block not in under_way and not any(block in known for known in sets):
                break
            count += 1
        return count


class KnownCache:
    """The contents of the caches of a node's data-parallel ranks, and the blocks that requests under way will
    add.

    vLLM chooses a request's rank by load alone, so a request may find less than the node has."""

    def __init__(self, room: Callable[[], int], ranks: int = 1) -> None:
        """`room()`: how many more blocks may be noted, of all caches together."""
        self.ranks = tuple(KnownRank(room) for _ in range(ranks))
        self._under_way: Counter[int] = Counter()
        """Blocks of prompts that were sent to the node and are not answered yet, each with the number of
        these prompts."""
        self.fingerprint: str | None = None
        """The fingerprint of the namespace in which the node names its blocks, if that is known."""

    def __len__(self) -> int:
        return sum(map(len, self.ranks))

    def knows(self, prompt: NamedPrompt | None) -> bool:
        """Returns whether the node's events say how much of the prompt it has."""
        known = any(rank.ready for rank in self.ranks) and not any(rank.unnameable for rank in self.ranks)
        return known and prompt is not None and bool(prompt.blocks) and prompt.fingerprint == self.fingerprint

    def tokens(self, prompt: NamedPrompt) -> int:
        """Returns how many tokens of the prompt's beginning a rank has in any medium, or will have after the
        requests under way. Counts the rank that has the most."""
        return max(rank.blocks(prompt, self._under_way) for rank in self.ranks) * prompt.block_tokens

    @contextmanager
    def computing(self, prompt: NamedPrompt | None) -> Iterator[None]:
        """Counts the prompt's blocks as the node's while the `with` block runs. Afterwards, only the node's
        events count."""
        under_way, blocks = self._under_way, () if prompt is None else prompt.blocks
        if not self.knows(prompt) or len(under_way) + len(blocks) > _MOST_UNDER_WAY:
            blocks = ()
        under_way.update(blocks)
        try:
            yield
        finally:
            under_way.subtract(blocks)
            for block in blocks:
                if not under_way[block]:
                    del under_way[block]


def _short(hashes: Sequence[int | bytes]) -> list[int]:
    return [value if type(value) is int else short_hash(value) for value in hashes]


class CacheView:
    """The index of blocks, and the publishers that fill it."""

    def __init__(self, most_blocks: int, load_bytes: int) -> None:
        """`load_bytes`: how many bytes a node loads from the pool in the time in which it computes a
        token."""
        self._most_blocks = most_blocks
        self._load_bytes = load_bytes
        self._subscriber = EventSubscriber()
        self._nodes: dict[str, tuple[NodeRecord, KnownCache | None]] = {}
        """The prefill nodes by URL, each with its cache, if it publishes events."""

    @property
    def blocks(self) -> int:
        """How many blocks it knows, of all nodes together."""
        return sum(len(cache) for _, cache in self._nodes.values() if cache is not None)

    def update(self, records: Iterable[NodeRecord]) -> dict[str, KnownCache]:
        """From now on, follows exactly those of these prefill nodes that publish events. Returns the nodes'
        known caches, by URL."""
        wanted: dict[Hashable, tuple[EventEndpoints, OnSteps]] = {}
        nodes: dict[str, tuple[NodeRecord, KnownCache | None]] = {}
        caches = {}
        for record in records:
            url = record.address
            before, cache = self._nodes.get(url, (record, None))
            if record.events is None or record.replays is None:
                nodes[url] = record, None
                continue
            ends = [(record.events, record.replays), *record.ranks]
            # a node that was restarted has an empty cache
            if cache is None or before.instance != record.instance or len(cache.ranks) != len(ends):
                cache = KnownCache(self._room, len(ends))
            cache.fingerprint = record.fingerprint
            for number, (rank, addresses) in enumerate(zip(cache.ranks, ends, strict=True)):
                wanted[url, record.instance, number] = (EventEndpoints(*addresses), rank.apply)
            nodes[url], caches[url] = (record, cache), cache
        self._nodes = nodes
        self._subscriber.follow(wanted)
        return caches

    def _room(self) -> int:
        return self._most_blocks - self.blocks

    def load_cost(self, namespaces: Iterable[Namespace]) -> float:
        """Returns the cost of loading a token of these layer groups: at most 1, the cost of computing one."""
        a_token = sum(space.chunk_bytes / space.chunk_size for space in namespaces)
        return min(1.0, a_token / self._load_bytes)

    def hits(self, prompt: NamedPrompt) -> dict[str, dict[str, object]]:
        """Returns, for each prefill node that shares the prompt's namespace, by name, how many tokens of the
        prompt's beginning it has, in the form of `/query`. Tokens in the pool count as `CPU`, because they
        are in the memory of hosts and each of these nodes can load them."""
        found: dict[str, dict[str, object]] = {}
        pool = prompt.pool_tokens or 0
        for record, cache in self._nodes.values():
            if record.fingerprint != prompt.fingerprint:
                continue
            ranks: list[dict[str, int]] = [{}]
            if cache is not None and cache.knows(prompt):
                ranks = [rank.media(prompt) for rank in cache.ranks]
            media = {"GPU": 0, "CPU": pool, "DISK": 0}
            for medium, tokens in chain.from_iterable(held.items() for held in ranks):
                media[medium] = max(media.get(medium, 0), tokens)
            longest = {str(number): max([pool, *held.values()]) for number, held in enumerate(ranks)}
            found[record.name] = {"longest_matched": max(longest.values()), **media, "DP": longest}
        return found

    def describe(self) -> dict[str, Any]:
        feeds: Mapping[Hashable, Any] = self._subscriber.describe()
        publishers = {}
        for url, (record, cache) in self._nodes.items():
            for number, rank in enumerate(() if cache is None else cache.ranks):
                known = {"blocks": len(rank), "unnameable": rank.unnameable}
                name = f"{url} rank {number}" if number else url
                publishers[name] = {**known, **feeds.get((url, record.instance, number), {})}
        return {"blocks": self.blocks, "most_blocks": self._most_blocks, "publishers": publishers}

    def close(self) -> None:
        self._subscriber.close()


# --- /query -------------------------------------------------------------------------------------------------


class Query(msgspec.Struct, frozen=True):
    """The question how much of a prompt each node has. Mooncake Conductor calls a node an instance."""

    token_ids: list[Token]
    model: str | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    tenant_id: str | None = None
    instance_id: str | None = None
    block_size: int | None = None
    cache_salt: str | None = None


def read_query(body: bytes) -> Query:
    """Reads a request's body. Raises ApiError if it is no query."""
    try:
        return decode_json(body, Query)
    except UndecodableError as error:
        raise ApiError(400, f"The body is no query: {error}", code="invalid_json") from None


class CacheQuery:
    def __init__(self, lookups: PoolLookups, caches: CacheView, keys: Keys, bodies: BodyMemory) -> None:
        """`lookups` names prompts and looks them up in the pool. A query needs a key that may read
        `/metrics`. With a client's key, it finds only prompts of the client's tenant; with a gateway's key,
        it finds none."""
        self._lookups = lookups
        self._caches = caches
        self._keys = keys
        self._bodies = bodies
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)
        self._reading = asyncio.Lock()

    async def answer(self, request: web.Request) -> web.Response:
        self._keys.check_watcher(authorization := request.headers.get("Authorization"))
        client = self._keys.visible_client(authorization)
        with closing(BodyShare(self._bodies)) as share:
            body = await read_body(
                request.content.iter_any(), share, _LARGEST, _READ_S, request.content_length
            )
            if self._places.locked():
                raise overloaded("Too many queries at once")
            async with self._places:
                async with self._reading:  # one at a time: a thread that reads lets no other run
                    query = await asyncio.to_thread(read_query, body)
                salt = query.cache_salt if client is None else tenant_salt(query.cache_salt, client.tenant)
                return web.json_response(await self._look(query, salt))

    async def _look(self, query: Query, salt: str | None) -> dict[str, dict[str, dict[str, object]]]:
        if query.tenant_id not in (None, "", _TENANT):
            return {}
        model = self._lookups.model
        if query.lora_name or query.lora_id not in (None, -1) or (model and query.model not in (None, model)):
            return {_TENANT: {}}
        try:
            prompt = await self._lookups.look_up(query.token_ids, salt, "query")
        except ValueError as error:
            raise overloaded(f"Prompts cannot be named now: {error}") from None
        if query.block_size not in (None, 0, prompt.block_tokens, prompt.chunk_tokens):
            sizes = f"{prompt.block_tokens} or {prompt.chunk_tokens}"
            raise ApiError(
                400, f"`block_size` is {query.block_size}, but here it is {sizes}", param="block_size"
            )
        hits = self._caches.hits(prompt).items()
        return {_TENANT: {name: found for name, found in hits if query.instance_id in (None, name)}}
