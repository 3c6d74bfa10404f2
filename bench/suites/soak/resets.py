"""New weights for all engines of a run, and then a reset: one change after the other, whatever happens to the engines meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from bench.suites.soak.cluster import SoakCluster
from bench.suites.soak.kinds import ENGINES
from bench.suites.soak.ledger import Ledger

_LOOK_S, _AGAIN_S = 0.05, 0.5
"""Seconds between two looks: at which engines have the weights, and at whether the pool has taken the reset. If not, it is tried again."""


class Resets:
    """On the cluster's thread. An engine that is started must be told its weights (`tell`) before it works."""

    def __init__(
        self, cluster: SoakCluster, ledger: Ledger, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        """`later(seconds, action)` runs an action later, on the same thread."""
        self._cluster = cluster
        self._ledger = ledger
        self._later = later
        self.weights = 0
        """Their number: 0 until the first change."""
        self._wait: set[str] = set()
        """Engines that have not said yet that they compute with these weights."""
        self._asked: tuple[str, int] | None = None
        """The engine that was told to reset, and how often it had been started by then."""

    def begin(self, engine: str) -> None:
        """Gives all engines new weights, and lets `engine` reset when they have them. Does nothing while another change is under way."""
        if self.weights and self.weights not in self._ledger.resets:
            return
        self.weights += 1
        self._wait, self._asked = set(ENGINES), None
        for name in ENGINES:
            while self._ledger.wait_reply(name, "reset", 0.0) is not None:
                pass  # of the change before
            self.tell(name)
        self._later(_LOOK_S, lambda: self._step(engine))

    def tell(self, engine: str) -> None:
        """Tells an engine which weights to compute with."""
        if self.weights:
            self._cluster[engine].tell({"do": "weights", "number": self.weights})

    def _step(self, engine: str) -> None:
        ledger, cluster = self._ledger, self._cluster
        for name in ENGINES:
            while (answer := ledger.wait_reply(name, "weights", 0.0)) is not None:
                if answer["number"] == self.weights:
                    self._wait.discard(name)
        # an engine without a process is told when it is started
        if any(cluster[name].pid is not None for name in self._wait):
            self._later(_LOOK_S, lambda: self._step(engine))
            return
        if self.weights in ledger.resets:
            return
        if cluster[engine].pid is None:
            engine = next(other for other in ENGINES if other != engine)
        asked = (engine, cluster[engine].starts)
        not_taken = ledger.wait_reply(engine, "reset", 0.0) is not None
        if not_taken or asked != self._asked:
            self._asked = asked
            cluster[engine].tell({"do": "reset", "number": self.weights})
        self._later(_AGAIN_S, lambda: self._step(engine))
