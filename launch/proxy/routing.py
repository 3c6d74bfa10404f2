"""Which node to try next. Pure: the time comes from the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Reason = Literal["unreachable", "disconnected", "timeout", "busy", "error", "garbage"]
"""How a node can fail a request: no connection; it broke before the answer; too slow; 503; another status that is not its
to give; an answer that is none."""

_FIRST_SKIP_S, _LAST_SKIP_S = 1.0, 10.0
_MAX_BROKEN = 3


class _Node:
    def __init__(self, url: str) -> None:
        self.url = url
        self.failures = 0
        self.skip_until = 0.0


class NodePool:
    """The nodes of one kind, taken in turn. A node that could not be connected to is skipped for 1, 2, 4 … 10 s."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._nodes = [_Node(url) for url in dict.fromkeys(urls)]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def health(self, now: float) -> dict[str, bool]:
        """Which nodes would be tried at `now`."""
        return {node.url: now >= node.skip_until for node in self._nodes}

    def pick(self, now: float, tried: frozenset[str] | set[str] = frozenset()) -> str | None:
        """The next in turn that is not skipped and not in `tried`. None if there is none."""
        for step in range(len(self._nodes)):
            index = (self._turn + step) % len(self._nodes)
            node = self._nodes[index]
            if now >= node.skip_until and node.url not in tried:
                self._turn = index + 1
                return node.url
        return None

    def unreachable(self, url: str, now: float) -> None:
        """Note that no connection was to be had."""
        node = self._node(url)
        if now < node.skip_until:
            return  # requests that fail together count once
        node.failures += 1
        node.skip_until = now + min(_LAST_SKIP_S, _FIRST_SKIP_S * 2.0 ** min(node.failures - 1, 8))

    def reached(self, url: str) -> None:
        """Note that it answered, whatever it said."""
        node = self._node(url)
        node.failures = 0
        node.skip_until = 0.0

    def retry_after(self, now: float) -> int:
        """Whole seconds, at least 1, until a node would be tried again."""
        wait = min((node.skip_until - now for node in self._nodes), default=0.0)
        return max(1, -int(-wait // 1))

    def _node(self, url: str) -> _Node:
        return next(node for node in self._nodes if node.url == url)


class Attempts:
    """One request's way through a pool: each node at most once.

    Ends after three nodes that broke off with the request in hand: a request that brings nodes down must not visit all.
    """

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._tried: set[str] = set()
        self._broken = 0

    def next(self, now: float) -> str | None:
        """The node to try now. None if none is left."""
        if self._broken >= _MAX_BROKEN:
            return None
        node = self._pool.pick(now, self._tried)
        if node is not None:
            self._tried.add(node)
        return node

    def failed(self, node: str, reason: Reason, now: float) -> None:
        """Note how the node that `next` gave failed."""
        if reason == "unreachable":
            self._pool.unreachable(node, now)
        elif reason == "disconnected":
            self._broken += 1
