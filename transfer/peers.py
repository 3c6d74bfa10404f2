"""Remembers which peers of the pool deliver: a breaker for each node that holds objects. A pure state machine; callers pass the time.

A peer is a node with a segment. Each call to a peer that hangs stalls for seconds, which says nothing about other peers.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

TRIAL_S = 65.0
"""How long one trial may take: Mooncake waits a minute for a peer with which this process has never spoken."""
_MOST = 4096
"""How many silent peers are remembered. Beyond that the oldest are forgotten, and so are tried again."""


class Peers:
    """Remembers the peers that did not deliver when they were last asked, and when to ask each again. Thread-safe."""

    def __init__(self, retry_s: float, longest_s: float = 30.0) -> None:
        """A silent peer is tried again after `retry_s` seconds, then after twice as long each time, up to `longest_s`."""
        self._retry_s = retry_s
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._silent: dict[str, tuple[float, float]] = {}
        """For each silent peer, when to try it again, and the pause before that."""
        self._trial = ""
        """The peer of the trial under way; empty if there is none."""
        self._trial_ends = 0.0
        """When to stop waiting for the trial's outcome."""

    @property
    def any_silent(self) -> bool:
        """Whether any peer is silent, so that it matters where an object lies."""
        return bool(self._silent)

    def delivered(self, peer: str) -> bool:
        """Notes that a peer delivered. Returns True if it was silent before."""
        with self._lock:
            return self._silent.pop(peer, None) is not None

    def failed(self, peer: str, now: float) -> bool:
        """Notes that a peer did not deliver. Returns True if it was not silent before."""
        with self._lock:
            known = self._silent.pop(peer, None)
            pause = self._retry_s if known is None else min(self._longest_s, 2 * known[1])
            self._silent[peer] = (now + pause, pause)
            if len(self._silent) > _MOST:
                del self._silent[next(iter(self._silent))]
            return known is None

    def tried(self, peers: Collection[str]) -> None:
        """Notes that a read of objects at `peers` has ended, with any outcome. If it was the trial, the trial is over."""
        with self._lock:
            if self._trial in peers:
                self._trial = ""

    def may_ask(self, peer: str, now: float, busy: Collection[str] = ()) -> bool:
        """Returns whether to read an object from `peer`: it is not silent, or this is its trial, which begins now.

        Only one trial is under way at a time, because it may hold its thread for as long as `TRIAL_S`. A peer that already holds a thread
        (`busy`) gets none.
        """
        with self._lock:
            if peer not in self._silent:
                return True
            if (self._trial and now < self._trial_ends) or now < self._silent[peer][0] or peer in busy:
                return False
            self._trial, self._trial_ends = peer, now + TRIAL_S
            return True
