"""Which peers of the pool deliver: a breaker for each node that holds objects, a pure state machine with its clock passed in.

The pool is its master; a peer is a node with a segment. One that hangs costs each call to it a stall of seconds, and says
nothing about the others.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

TRIAL_S = 65.0
"""Mooncake waits a minute for a peer with which this process has never spoken."""
_MOST = 4096
"""Peers that are remembered as silent; beyond that the oldest are forgotten, and tried again."""


class Peers:
    """Peers that did not deliver when they were last asked, and when to ask each again. Thread-safe."""

    def __init__(self, retry_s: float, longest_s: float = 30.0) -> None:
        """A silent peer is tried again after `retry_s` seconds, then after twice as long each time, up to `longest_s`."""
        self._retry_s = retry_s
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._silent: dict[str, tuple[float, float]] = {}
        """When to try each again, and the pause before that."""
        self._trial_ends = 0.0
        """Until when a trial is under way that nobody has reported on."""

    @property
    def any_silent(self) -> bool:
        """Whether it matters where an object lies."""
        return bool(self._silent)

    def delivered(self, peer: str) -> bool:
        """Note that a peer answered. True if it was silent before."""
        with self._lock:
            self._trial_ends = 0.0
            return self._silent.pop(peer, None) is not None

    def failed(self, peer: str, now: float) -> bool:
        """Note that a peer did not answer. True if it answered before."""
        with self._lock:
            self._trial_ends = 0.0
            known = self._silent.pop(peer, None)
            pause = self._retry_s if known is None else min(self._longest_s, 2 * known[1])
            self._silent[peer] = (now + pause, pause)
            if len(self._silent) > _MOST:
                del self._silent[next(iter(self._silent))]
            return known is None

    def may_ask(self, peers: Collection[str], now: float) -> bool:
        """Whether to read an object that lies at all of `peers`: one of them is not silent, or it is time to try one again.

        There is one trial at a time, of all peers: it may hold its thread for as long as `TRIAL_S`.
        """
        with self._lock:
            if not peers or any(peer not in self._silent for peer in peers):
                return True
            if now < self._trial_ends or all(now < self._silent[peer][0] for peer in peers):
                return False
            self._trial_ends = now + TRIAL_S
            return True
