"""What the proxy knows of the nodes' caches and of the pool, from their KV events. Follows who publishes them.

Everything here belongs to the event loop's thread, except that the subscriber's thread applies events to the index.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from launch.proxy.block_index import BlockBudget, KnownCache, KnownPool, NamedPrompt
from launch.proxy.naming import Naming
from pd_cache.cluster import NodeRecord
from pd_cache.tokens import Namespace
from pd_cache.wire.event_streams import MOST_REPORTED, EventEndpoints, EventSubscriber, OnSteps


class CacheView:
    """The index of blocks, and the publishers that fill it."""

    def __init__(self, most_blocks: int, load_bytes: int) -> None:
        """`load_bytes`: how many bytes a node loads from the pool in the time in which it computes a token."""
        self._budget = BlockBudget(most_blocks)
        self._load_bytes = load_bytes
        self._subscriber = EventSubscriber()
        self._caches: dict[tuple[str, str], KnownCache] = {}
        """By the node's URL and instance: a node that was started anew has an empty cache."""
        self._pools: dict[tuple[str, str], KnownPool] = {}
        self._nodes: dict[str, NodeRecord] = {}
        """The prefill nodes, by URL."""

    @property
    def following(self) -> bool:
        """Whether any node, or the pool, publishes events."""
        return bool(self._caches or self._pools)

    def update(self, records: Iterable[NodeRecord]) -> dict[str, KnownCache]:
        """Follows those of these prefill nodes and masters that publish events, and no others. Returns what is known of the nodes' caches,
        by URL."""
        wanted: dict[Hashable, tuple[EventEndpoints, OnSteps]] = {}
        caches: dict[tuple[str, str], KnownCache] = {}
        pools: dict[tuple[str, str], KnownPool] = {}
        nodes = {}
        for record in records:
            url = record.address.rstrip("/")
            if record.role != "master":
                nodes[url] = record
            if record.events is None:
                continue
            key = (url, record.instance)
            endpoints = EventEndpoints(record.events, record.replays or "")
            if record.role == "master":
                pools[key] = self._pools[key] if key in self._pools else KnownPool(self._budget)
                wanted[key] = (endpoints, pools[key].apply)
            else:
                caches[key] = cache = self._caches[key] if key in self._caches else KnownCache(self._budget)
                cache.fingerprint = record.fingerprint
                wanted[key] = (endpoints, cache.apply)
        self._subscriber.follow(wanted)
        for left in self._caches.keys() - caches.keys():
            self._caches[left].forget()
        for gone in self._pools.keys() - pools.keys():
            self._pools[gone].forget()
        self._caches, self._pools, self._nodes = caches, pools, nodes
        return {url: cache for (url, _), cache in caches.items()}

    def load_cost(self, namespaces: Iterable[Namespace]) -> float:
        """Returns what a token of these groups of layers costs that is loaded, if one that is computed costs 1. At most 1."""
        a_token = sum(one.layers * one.page_bytes * one.shards / one.block_size for one in namespaces)
        return min(1.0, a_token / self._load_bytes)

    def completed(self, prompt: NamedPrompt | None) -> NamedPrompt | None:
        """Returns the prompt with what the pool holds of it. A lookup knows that best; otherwise the pool's events say it."""
        if prompt is None or prompt.pool_tokens is not None:
            return prompt
        return prompt._replace(pool_tokens=max((pool.tokens(prompt) for pool in self._pools.values()), default=0))

    def missed(self, naming: Naming, chunk: int) -> None:
        """Takes in that a lookup in the pool did not find the prompt's chunk of this number. If the chunk is there according to the pool's
        events, reports it to their publisher, and with it the chunks behind it that are there as well. The publisher asks the master, and
        publishes the removal of those that are gone."""
        for key, pool in self._pools.items():
            if believed := pool.believed(naming.prompt, chunk):
                names = naming.names[chunk : chunk + min(believed, MOST_REPORTED)]
                self._subscriber.report_missing(key, naming.prompt.fingerprint, names)

    def hits(self, prompt: NamedPrompt) -> dict[str, dict[str, int]]:
        """Returns, for each prefill node that shares the prompt's namespace, by name, how many tokens of the prompt's beginning it has in each
        medium. What the pool holds counts as `CPU`, because it is in the memory of hosts and each of these nodes can load it."""
        pool = max((one.tokens(prompt) for one in self._pools.values()), default=0)
        found = {}
        for url, record in self._nodes.items():
            if record.fingerprint != prompt.fingerprint:
                continue
            cache = self._caches.get((url, record.instance))
            media = cache.media(prompt) if cache is not None and cache.knows(prompt) else {}
            own = {"GPU": 0, "CPU": 0, "DISK": 0} | media
            found[record.name] = own | {"CPU": max(own["CPU"], pool)}
        return found

    def describe(self) -> dict[str, Any]:
        """Returns the fields for `/health`."""
        feeds: Mapping[Hashable, Any] = self._subscriber.describe()
        sizes = {key: len(known) for known_by in (self._caches, self._pools) for key, known in known_by.items()}
        return {
            "blocks": self._budget.used,
            "most_blocks": self._budget.most,
            "refused_blocks": self._budget.refused,
            "publishers": {key[0]: {"blocks": size, **feeds.get(key, {})} for key, size in sizes.items()},
        }

    def close(self) -> None:
        """Stops following. Waits for the subscriber's thread."""
        self._subscriber.close()
