"""The nodes that the proxy knows. Turns what discovery and the nodes say into pools to route over."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from launch.discovery import View
from launch.proxy.answers import ApiError
from launch.proxy.cache_view import CacheView
from launch.proxy.direct import DirectRule, Pool
from launch.proxy.routing import Hop, NodePool, Target
from pd_cache.cluster import Namespaced, NodeRecord, ProxyConfig, differences
from pd_cache.tokens import Namespace

log = logging.getLogger(__name__)

_REMEMBERED_S = 300.0
"""How long a model whose nodes have all left is expected back. Meanwhile requests for it get 503, not 404."""
_HOPS: tuple[Hop, ...] = ("prefill", "decode")


class NodePools:
    """Follows views, and logs what changed."""

    def __init__(
        self,
        config: ProxyConfig,
        direct: DirectRule,
        master: Callable[[View], str | None] | None = None,
        rng: Random | None = None,
    ) -> None:
        """`master` returns the address of the master of a view's pool. `rng` orders nodes that were never taken."""
        self.pools: dict[Hop, NodePool] = {
            hop: NodePool(
                hop,
                config.policy,
                breaker_failures=config.breaker_failures,
                cache_tokens=config.node_cache_tokens,
                rng=rng,
            )
            for hop in _HOPS
        }
        self.caches = CacheView(config.index_blocks, config.load_bytes)
        """What the nodes' events say."""
        self._direct = direct
        direct.on_miss = self.caches.missed
        self._master = master or (lambda view: None)
        self._view = View(())
        self._told: dict[str, Namespaced] = {}
        self._fingerprints: dict[str, str | None] = {}
        self._differences: dict[str, str] = {}
        self._seen: dict[str, float] = {}
        """For each model, when a node was last known to serve it."""

    def update(self, view: View) -> None:
        """Uses the view's nodes from now on."""
        before, now = _addresses(self._view), _addresses(view)
        for name, address in sorted(now.items() - before.items()):
            log.info("node %s has come, at %s", name, address)
        for name in sorted(before.keys() - now.keys()):
            log.info("node %s is gone", name)
        self._view = view
        for hop, pool in self.pools.items():
            pool.update(_target(record) for record in view.by_role(hop))
        urls = {url for pool in self.pools.values() for url in pool.urls()}
        self._told = {url: told for url, told in self._told.items() if url in urls}
        self._compare()

    def told_namespace(self, url: str, told: Namespaced) -> None:
        """Notes what a node itself says about its cache. It is used if the node's record says nothing."""
        if self._told.get(url, Namespaced()) != told:
            self._told[url] = told
            self._compare()

    def fingerprint(self, url: str) -> str | None:
        """Returns the fingerprint of a node's namespace; None if the node does not say it."""
        return self._fingerprints.get(url)

    def served(self, model: str | None, now: float) -> str | None:
        """Returns the model that a node must serve to be asked, or None if every node may be asked.

        It is `model` if nodes say that they serve it, or did so lately. If all nodes serve one model, every node may be asked, because
        another name may be that of an adapter. Raises ApiError 404 if the nodes serve several models, none of that name.
        """
        here = set().union(*(pool.models() for pool in self.pools.values()))
        self._seen = {name: at for name, at in self._seen.items() if now - at < _REMEMBERED_S} | dict.fromkeys(
            here, now
        )
        if model in self._seen:
            return model
        if len(here) > 1:
            what = "`model` is missing" if model is None else f"No node serves the model {model[:200]!r}"
            raise ApiError(404, f"{what}; there are: {', '.join(sorted(here))}", param="model", code="model_not_found")
        return None

    def stale_s(self, now: float) -> float:
        """Returns for how many seconds discovery has not answered."""
        return 0.0 if self._view.stale_since is None else now - self._view.stale_since

    def describe(self, now: float) -> dict[str, Any]:
        """Returns the fields for `/health`."""
        lookups = f"off: {self._direct.blind}" if self._direct.blind else "on"
        return {
            "discovery_stale_s": round(self.stale_s(now), 1),
            "differences": self._differences,
            "lookups": lookups,
            **({"events": described} if (described := self.caches.describe())["publishers"] else {}),
        }

    def _compare(self) -> None:
        records = [self._completed(record) for record in self._view.by_role(*_HOPS)]
        self._fingerprints = {record.address.rstrip("/"): record.fingerprint for record in records}
        prefill = self.pools["prefill"]
        prefill.know(
            self.caches.update([*(one for one in records if one.role == "prefill"), *self._view.by_role("master")])
        )
        self._direct.wants_names = self.caches.following
        found = differences([*records, *self._view.by_role("master")])
        for name, difference in found.items():
            if self._differences.get(name) != difference:
                log.warning("%s: %s", name, difference)
        self._differences = found
        usual, master = _usual(records), self._master(self._view)
        if usual is None:
            self._direct.use("no decode node reports its namespace")
        elif master is None:
            self._direct.use("no master of the pool is known")
        else:
            namespaces, model = usual
            prefill.load_cost = self.caches.load_cost(namespaces)
            self._direct.use(Pool(namespaces, master, model))

    def _completed(self, record: NodeRecord) -> NodeRecord:
        told = self._told.get(record.address.rstrip("/"))
        if record.fingerprint is not None or told is None:
            return record
        return record.telling(told)


def _usual(records: list[NodeRecord]) -> tuple[tuple[Namespace, ...], str | None] | None:
    """Returns the namespaces and the model of most decode nodes, because only these nodes could load what a lookup found."""
    known = [
        (spaces, record.model) for record in records if record.role == "decode" and (spaces := record.cache_namespaces)
    ]
    return Counter(known).most_common(1)[0][0] if known else None


def _target(record: NodeRecord) -> Target:
    capacity = record.capacity
    return Target(record.address.rstrip("/"), record.instance, capacity.kv_tokens, capacity.max_running, record.model)


def _addresses(view: View) -> dict[str, str]:
    return {record.name: record.address for record in view.nodes}
