"""`pd-cache reset`: a new epoch for models whose weights have changed, without asking any engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launch.discovery import known_master
from launch.status import cluster_status
from launch.status.node_status import NodeStatus
from pd_cache.cluster import ClusterConfig
from pd_cache.epochs import FIRST, EpochBook
from pd_cache.errors import PdCacheError
from pd_cache.tokens import ChunkedTokenDatabase, Namespace
from transfer.store import MooncakeStore

_OPEN_S = 10.0
_QUESTION_S = 5.0
_REMOVAL_S = 60.0


class ResetModel(NamedTuple):
    """A model whose new epoch has begun."""

    name: str
    """As the nodes call it."""
    nodes: list[str]
    epoch: str
    """The label of the epoch; see `pd_cache.epochs`."""
    removed: int | None
    """How many chunks of the epoch before were removed; None if they were left to eviction."""


class _Weights(NamedTuple):
    """Nodes that have the same weights."""

    name: str
    nodes: list[str]
    namespaces: list[Namespace]


def reset_models(
    config: ClusterConfig, model: str | None, *, remove: bool, told: Callable[[ResetModel], None]
) -> list[ResetModel]:
    """Begins a new epoch of the model that nodes call `model`, or of all models if it is None. With `remove`, also removes the chunks of the
    epoch before. Calls `told` with each as soon as it is done.

    Raises PdCacheError if no node has told what it serves under that name, or if the pool does not take the epoch.
    """
    rows = cluster_status(config).nodes
    found = _weights(rows, model)
    # with etcd, a machine's file need not hold the master
    master = known_master(config) or next((row.record.address for row in rows if row.record.role == "master"), None)
    if master is None:
        raise PdCacheError("neither the file nor discovery knows where the pool's master is; see `pd-cache status`")
    store = MooncakeStore(config.transfer, master=master, host="127.0.0.1", segment_size=0)
    try:
        store.wait_open(_OPEN_S)
        done: list[ResetModel] = []
        book = EpochBook(store, timeout_s=_QUESTION_S)
        for weights in found:
            epochs = book.of(weights.namespaces[0].model)
            before = epochs.current()
            begun = None if before is None else epochs.begin()
            if before is None or begun is None:
                raise PdCacheError(
                    f"the pool at {master} did not take a new epoch of {weights.name}: nothing was reset; run "
                    "`pd-cache status` to see whether its master answers and a store has room"
                )
            removed = _remove(store, weights.namespaces, before) if remove else None
            done.append(ResetModel(weights.name, weights.nodes, begun, removed))
            told(done[-1])
        return done
    finally:
        store.close()


def _weights(rows: Sequence[NodeStatus], model: str | None) -> list[_Weights]:
    """Returns the nodes by their weights, as they tell them."""
    found: dict[str, _Weights] = {}
    names: set[str] = set()
    for row in rows:
        record = row.record
        spaces = record.cache_namespaces
        if not spaces:
            continue
        name = record.model or spaces[0].model
        names.add(name)
        if model is None or model == name:
            weights = found.setdefault(spaces[0].model, _Weights(name, [], []))
            weights.nodes.append(row.name)
            weights.namespaces.extend(space for space in spaces if space not in weights.namespaces)
    if not found:
        there = f"they serve {', '.join(sorted(names))}" if names else "none has told its namespace"
        raise PdCacheError(f"no node serves {'any model' if model is None else model}: {there}; see `pd-cache status`")
    return list(found.values())


def _remove(store: MooncakeStore, namespaces: Sequence[Namespace], epoch: str) -> int:
    """Removes all chunks of an epoch from the pool. Returns how many there were."""
    removed = 0
    for namespace in namespaces:
        prefix = re.escape(ChunkedTokenDatabase(namespace).prefix(epoch))
        # the manifest of a namespace stands beside the chunks of its first epoch
        removed += store.remove_matching(f"^{prefix}/[0-9]+/" if epoch == FIRST else f"^{prefix}/", timeout=_REMOVAL_S)
    return removed
