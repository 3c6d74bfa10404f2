"""`pd-cache reset`: another version of the weights, on all nodes at once."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launch.discovery import known_master
from launch.status import ClusterStatus, cluster_status
from launch.versions import known_versions
from pd_cache.chunks import ChunkedTokenDatabase
from pd_cache.cluster import ClusterConfig
from pd_cache.errors import PdCacheError
from pd_cache.versions import FIRST, HttpChannel, Question, RefusedError, Reply, UnavailableError, Version
from transfer.store import MooncakeStore

_OPEN_S = 10.0
_QUESTION_S = 15.0
_REMOVAL_S = 60.0
_TRIES = 3


class ResetModel(NamedTuple):
    """A model that has another version of the weights now."""

    name: str
    """As the nodes call it."""
    label: str
    told: list[str]
    """The processes that have confirmed the version."""
    untold: list[str]
    """Those that have not: they use the cache no more until they have."""
    removed: int | None
    """How many chunks of the version before were removed; None if they were left to eviction."""


def reset_models(
    config: ClusterConfig, model: str | None, version: str | None, *, remove: bool, told: Callable[[ResetModel], None]
) -> None:
    """Says that all nodes have other weights of the model that they call `model`, or of all models if it is None: those of `version`.

    With `remove`, also removes the chunks of the version before. Calls `told` with each model as soon as it is done. Raises PdCacheError if
    the authority refuses or does not answer: then nothing has changed for the models that `told` was not called with.
    """
    status = cluster_status(config)
    authorities = [row.record.versions for row in status.nodes if row.record.versions is not None]
    known = known_versions(authorities)
    names = {weights: weights for weights in known} | _names(status)
    chosen = {weights: name for weights, name in names.items() if model in (None, name, weights)}
    if not chosen:
        there = f"they serve {', '.join(sorted(set(names.values())))}" if names else "none has told its namespace"
        raise PdCacheError(f"no node serves {'any model' if model is None else model}: {there}; see `pd-cache status`")
    for weights, name in chosen.items():
        label = version or f"{secrets.token_hex(4)}-reset"
        replies, silent = _told(authorities, weights, label)
        before = known[weights].current if weights in known else FIRST
        removed = _remove(config, status, weights, before) if remove and before != label else None
        reached = sorted({one for reply in replies for one in reply.told})
        untold = sorted({one for reply in replies for one in reply.untold} - set(reached))
        told(ResetModel(name, label, reached, untold + silent, removed))


def _names(status: ClusterStatus) -> dict[str, str]:
    """Returns the models that nodes serve: what identifies the weights, and what the nodes call it."""
    spaces = [(row.record, row.record.cache_namespaces[0]) for row in status.nodes if row.record.cache_namespaces]
    return {space.model: record.model or space.model for record, space in spaces}


def _told(authorities: Sequence[str], weights: str, label: str) -> tuple[list[Reply], list[str]]:
    """Tells all authorities, each of which knows other processes: one makes the version, the others get that one.

    Returns their answers, and what stands for the processes of those that did not answer. Raises PdCacheError if none of them takes it.
    """
    replies: list[Reply] = []
    problems: list[str] = []
    silent: list[str] = []
    begun = time.monotonic()
    for url in authorities:
        try:
            replies.append(_asked(url, weights, label, replies[0].version if replies else None, begun))
        except (RefusedError, UnavailableError) as error:
            problems.append(f"{url}: {error}")
            silent.append(f"the processes that ask {url}")
    if not replies:
        raise PdCacheError(
            f"no master has answered for the versions of {weights} ({'; '.join(problems) or 'none is known'}): nothing is known to be "
            f"reset; see `pd-cache status`, and try again with --version {label}"
        )
    return replies, silent


def _asked(url: str, weights: str, label: str, made: Version | None, begun: float) -> Reply:
    """Asks one authority for a reset. If versions begin meanwhile, looks and asks again: the command is meant now."""
    with contextlib.closing(HttpChannel(url)) as channel:
        for left in reversed(range(_TRIES)):
            current = channel.ask(Question(do="poll", model=weights), _QUESTION_S).history[-1]
            age = time.monotonic() - begun if made is not None else 0.0
            question = Question(do="reset", model=weights, label=label, after=current.number, made=made, age=age)
            try:
                return channel.ask(question, _QUESTION_S)
            except RefusedError:
                if not left:
                    raise
    raise AssertionError


def _remove(config: ClusterConfig, status: ClusterStatus, weights: str, label: str) -> int:
    """Removes all chunks of a version from the pool. Returns how many there were. Raises PdCacheError if the pool does not answer."""
    # with etcd, a machine's file need not hold the master
    masters = [row.record.address for row in status.nodes if row.record.role == "master"]
    master = known_master(config) or next(iter(masters))
    store = MooncakeStore(config.transfer, master=master, host="127.0.0.1", segment_size=0)
    removed = 0
    try:
        store.wait_open(_OPEN_S)
        namespaces = {space for row in status.nodes for space in row.record.cache_namespaces if space.model == weights}
        for namespace in namespaces:
            prefix = re.escape(ChunkedTokenDatabase(namespace).prefix(label))
            # the manifest of a namespace stands beside the chunks of its first version
            pattern = f"^{prefix}/[0-9]+/" if label == FIRST else f"^{prefix}/"
            removed += store.remove_matching(pattern, timeout=_REMOVAL_S)
    finally:
        store.close()
    return removed
