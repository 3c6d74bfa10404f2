"""Views of the cluster, and how they change. Pure: the time comes from the caller.

1. If the source of the view is away, the last known view stays, and is marked stale.
2. A node that vanished *because* the source was away is not gone: its lease ran out because no node could
   keep one alive, or the source came back empty. Nodes that are missing right after an outage are kept as
   *doubted* for `grace_s`: time to register again.
3. A node that vanishes at any other time is gone at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from pd_cache.cluster import NodeRecord


@dataclass(frozen=True)
class View:
    """The cluster at one moment."""

    nodes: tuple[NodeRecord, ...]
    """The nodes, sorted by name."""
    stale_since: float | None = None
    """When the source of the view answered last (`time.monotonic()`); None while it answers."""
    doubted: frozenset[str] = frozenset()
    """The names of nodes that have been missing since an outage."""

    def by_role(self, *roles: str) -> list[NodeRecord]:
        """Returns the nodes of these roles."""
        return [node for node in self.nodes if node.role in roles]


class Directory:
    """Views of the cluster's nodes; this class always shows the nodes of the file. Leaving the context stops
    following them."""

    def __init__(self, view: View) -> None:
        self._view = view

    def view(self) -> View:
        """Returns what is known now, without waiting."""
        return self._view

    def wait_synced(self, timeout: float) -> bool:
        """Waits until the view comes from etcd, if there is an etcd. Returns False after `timeout`
        seconds."""
        return True

    def close(self) -> None:
        """Stops following."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Membership:
    """Builds views from full lists, single changes and outages."""

    def __init__(self, grace_s: float, seeds: Iterable[NodeRecord] = ()) -> None:
        """`seeds` are used until the first full list."""
        self._grace_s = grace_s
        self._nodes = {record.name: record for record in seeds}
        self._doubted: set[str] = set()
        self._stale_since: float | None = None
        self._settled_at = float("-inf")

    def outage(self, now: float) -> bool:
        """Notes that the source does not answer. Returns True if that is new."""
        if self._stale_since is not None:
            return False
        self._stale_since = now
        return True

    def sync(self, records: Iterable[NodeRecord], now: float) -> None:
        """Notes a full list, which ends an outage."""
        listed = {record.name: record for record in records}
        if self._stale_since is not None:
            self._settled_at = now + self._grace_s
            self._stale_since = None
        missing = self._nodes.keys() - listed.keys()
        if now < self._settled_at:
            self._doubted = missing
            listed |= {name: self._nodes[name] for name in missing}
        else:
            self._doubted = set()
        self._nodes = listed

    def put(self, record: NodeRecord) -> None:
        """Notes that a node is there."""
        self._nodes[record.name] = record
        self._doubted.discard(record.name)

    def delete(self, name: str, now: float) -> None:
        """Notes that a node has vanished."""
        if name not in self._nodes:
            return
        if self._stale_since is not None or now < self._settled_at:
            self._doubted.add(name)
        else:
            del self._nodes[name]
            self._doubted.discard(name)

    def expire(self, now: float) -> bool:
        """Drops doubted nodes whose grace is over, but none while the source is away. Returns True if any was
        dropped."""
        if not self._doubted or self._stale_since is not None or now < self._settled_at:
            return False
        for name in self._doubted:
            del self._nodes[name]
        self._doubted.clear()
        return True

    def view(self) -> View:
        nodes = tuple(sorted(self._nodes.values(), key=lambda record: record.name))
        return View(nodes, self._stale_since, frozenset(self._doubted))
