"""`pd-cache reset`: gives the new weights of engines a label, over HTTP.

It asks each node for the states of its engines, gives the label to those that should get it, and asks again.
It reports the second answer. So if two commands give the same engine a label at the same time, at least one
of them reports that the engine has another label.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from launch.http import fetch
from launch.watch.asker import cluster_status
from launch.watch.state import ClusterStatus, NodeStatus, shown_version
from pd_cache.cluster import ENGINES, ClusterConfig
from pd_cache.errors import PdCacheError
from pd_cache.versions import FIRST, Naming

_AT_A_TIME = 16


class Reset(NamedTuple):
    """The outcome of a command."""

    nodes: dict[str, str]
    """For each node, by name, the version that its engines have now, or why it is not known."""
    well: bool
    """Whether each engine was reached, and each engine that should have the label has it now."""


def reset_engines(config: ClusterConfig, version: str | None, *, everywhere: bool) -> Reset:
    """Gives the label `version`, or a new label, to all engines that are out; with `everywhere`, to all
    engines.

    Raises PdCacheError if there is none.
    """
    label, before = secrets.token_hex(8) if version is None else version, _engines(cluster_status(config))
    states = [state for row in before for state in row.record.weights]
    meant = {state.id for state in states if state.label != label and (everywhere or state.label is None)}
    if not meant and all(state.label != label for state in states):
        why = "is out, so none got the label: none has reported a change of weights (--all: for all engines)"
        raise PdCacheError(f"no engine {why if states else 'reports its weights'}; see `pd-cache status`")

    def name(row: NodeStatus) -> None:
        ids = tuple(state.id for state in row.record.weights if state.id in meant)
        if ids:
            with contextlib.suppress(OSError, ValueError):  # the second answer shows the outcome
                fetch(f"{row.record.address}/weights", body=msgspec.json.encode(Naming(label=label, ids=ids)))

    with ThreadPoolExecutor(_AT_A_TIME, "pd-cache-reset") as threads:
        list(threads.map(name, before))
    seen = {state.id for state in states}
    status = cluster_status(config)
    outcomes = {row.name: _outcome(row, label, seen, everywhere=everywhere) for row in _engines(status)}
    if not status.fresh:
        outcomes["discovery"] = f"{status.source}; others may not have been reached", False
    return Reset(
        {name: shown for name, (shown, _) in outcomes.items()},
        all(as_meant for _, as_meant in outcomes.values()),
    )


def _outcome(row: NodeStatus, label: str, seen: Collection[str], *, everywhere: bool) -> tuple[str, bool]:
    """Returns the version that a node's engines have in the end, and whether it is the wanted version.
    `seen`: the ids of all states in the beginning."""
    states = row.record.weights
    if not states:
        why = row.why if row.state == "down" else "it does not report its weights"
        return f"not reached, and keeps its label: {why}", False
    labels = {state.label for state in states}
    if None in labels:
        return "out: it was not reached, or its weights have changed again", False
    if labels == {label}:
        return shown_version(label), True
    others = [state for state in states if state.label != label]
    shown = ", ".join(sorted({shown_version(state.label or FIRST) for state in others}))
    if not everywhere and all(state.id in seen or state.label == FIRST for state in others):
        return f"{shown}: it has not reported a change", True
    # without `everywhere`, only engines that were out should take it
    if everywhere and any(state.id in seen for state in others):
        return f"{shown}: it has not taken the label", False
    return f"{shown}: it has a label from another command, or was started meanwhile", False


def _engines(status: ClusterStatus) -> list[NodeStatus]:
    return [row for row in status.nodes if row.role in ENGINES]
