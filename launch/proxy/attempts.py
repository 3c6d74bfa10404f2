"""One request's way over the nodes: which node is tried next, when to stop, and which side a failure is attributed to. Pure.

A node that cannot be reached, or that is too slow, is at fault itself. A failure after the request was sent (an error, a lost connection,
an invalid answer) may be the request's own fault, and a client can send such requests all day. So it counts against the node only if
another node then answers the same request well. A request that two nodes fail is answered with its error, and no node is blamed.

A lost connection may mean that the request brought the node down. No request may lose more than two nodes, of either kind. Nodes that
have answered no request for a while do not count here: a broken group of prefill nodes must not stop decode nodes from answering.
"""

from __future__ import annotations

from launch.proxy.budget import RetryBudget
from launch.proxy.prefixes import RoutedPrompt
from launch.proxy.routing import NO_PROMPT, NodePool, Reason

_MOST = 2
"""How many nodes may fail a request after it was sent to them."""


class Trial:
    """What one request has done so far to nodes of all kinds."""

    def __init__(self, budget: RetryBudget) -> None:
        self.budget = budget
        self.lost = 0
        """How many trustworthy nodes lost their connection while they had the request."""

    @property
    def deadly(self) -> bool:
        """Whether the request must not be sent to any other node."""
        return self.lost >= _MOST


class Attempts:
    """One request's way through a pool: each node at most once."""

    def __init__(
        self, pool: NodePool, trial: Trial, prompt: RoutedPrompt = NO_PROMPT, model: str | None = None
    ) -> None:
        self._pool = pool
        self._trial = trial
        self._prompt = prompt
        self._model = model
        self._tried: set[str] = set()
        self._suspects: list[tuple[str, Reason]] = []
        self._failures = 0
        self._over = False
        self.out_of_budget = False
        """Whether another node would have been tried if the budget had allowed a retry."""

    @property
    def blamed(self) -> bool:
        """Whether the failures are the request's own fault."""
        return self._failures >= _MOST or self._trial.deadly

    def next(self, now: float) -> str | None:
        """Returns the node to try now; None if none is left, or if the request has done enough."""
        if self._over or self.blamed:
            return None
        budget, again = self._trial.budget, self._failures > 0
        if again and not budget.allows(now):
            self.out_of_budget = True
            return None
        node = self._pool.pick(now, self._prompt, self._tried, self._model, proven_first=again)
        if node is not None:
            self._tried.add(node)
            if again:
                budget.take(now)
        return node

    def failed(self, node: str, reason: Reason, now: float) -> None:
        """Notes how the node that `next` returned failed."""
        if reason == "exhausted":
            self._over = True
        elif reason in ("unreachable", "timeout"):
            self._pool.failed(node, reason, now)
            self._failures += reason == "timeout"
        elif reason != "busy":
            trusted = self._pool.suspect(node)
            self._suspects.append((node, reason))
            self._failures += 1
            self._trial.lost += trusted and reason == "disconnected"

    def answered(self, node: str, now: float, *, well: bool) -> None:
        """Notes that the node that `next` returned answered: `well`, or with a refusal, which proves nothing about earlier nodes."""
        if not well:
            self._pool.reached(node)
            return
        self._pool.succeeded(node)
        for suspect, reason in self._suspects:
            self._pool.failed(suspect, reason, now)
        self._suspects.clear()
