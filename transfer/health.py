"""Whether the pool and its peers answer: the breaker of a pool, and the silent peers. Nothing here waits.

A *peer* is a node with a segment. If a peer hangs, each read from it takes seconds and fails, but other peers
and the master may be well. So the pool counts as down only if the master does not answer, and each peer has a
breaker of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from transfer.errors import OUTAGE, Status, status_of
from transfer.settings import TransferSettings

log = logging.getLogger(__name__)

_FAIR = 0.9
"""A call that timed out counts as failed only if it had at least this share of the usual time: its caller may
have come with little time left."""
_WELL_S = 5.0
"""After each answer to Mooncake's client, lookups may ask the master directly for this time."""

TRIAL_S = 65.0
"""How long a trial of a peer may take: Mooncake waits a minute for a peer with which this process has never
communicated."""
FORGOTTEN_S = 60.0
"""A silent peer is forgotten after this time if no object was found at it meanwhile: the master drops the
objects of a node that is gone."""


class CircuitBreaker:
    """Counts calls to the master that failed in a row. After several failures the pool is down, until a probe
    or a call succeeds.

    Thread-safe. Callers on a hot path read only `down` and `well_until`.
    """

    def __init__(self, pool: str, settings: TransferSettings) -> None:
        """`pool` names the master in the log."""
        self._pool = pool
        self._limit = settings.breaker.failures
        self._again_ms = settings.breaker.probe_interval_ms
        self._usual_s = settings.timeouts.exist_ms / 1000
        self._in_a_row = 0
        self._lock = threading.Lock()
        self.down = False
        self.well_until = 0.0
        """The time until which lookups may ask the master directly."""

    def learn(self, what: str, codes: Sequence[int]) -> None:
        """Learns from the codes of a call. It failed if all of them mean `pool_down`. A failed transfer says
        nothing about the master."""
        statuses = {status_of(code) for code in set(codes)}
        if statuses == {Status.POOL_DOWN}:
            self.failed(what)
        elif not statuses <= OUTAGE:
            self.succeeded()

    def timed_out(self, what: str, had_s: float) -> None:
        """Counts a call whose deadline has passed as failed, if it had a fair time to run."""
        if self.is_fair(had_s):
            self.failed(f"{what} (no answer within {had_s:.3g} s)")

    def is_fair(self, had_s: float) -> bool:
        """Returns whether this time was enough for an answer."""
        return had_s >= _FAIR * self._usual_s

    def failed(self, what: str) -> None:
        """Counts a call that failed because of the pool."""
        with self._lock:
            self.well_until = 0.0
            self._in_a_row += 1
            opens = not self.down and self._in_a_row >= self._limit
            self.down |= opens
        if opens:
            log.warning(
                "pool %s counts as down: %s failed; trying again every %d ms",
                self._pool,
                what,
                self._again_ms,
            )

    def succeeded(self) -> None:
        """Notes that the pool answered a call."""
        self.well_until = time.monotonic() + _WELL_S
        if self._in_a_row or self.down:
            with self._lock:
                was_down, self.down, self._in_a_row = self.down, False, 0
            if was_down:
                log.info("pool %s is back", self._pool)


class _Silence(NamedTuple):
    again: float
    """When to try the peer again."""
    pause: float
    """The pause before that trial."""
    named: float
    """When an object was last found at the peer."""


class Peers:
    """Remembers the peers that did not deliver when they were last asked, and when to ask each peer again.

    A pure state machine: callers pass the time. Thread-safe.
    """

    def __init__(self, retry_s: float, longest_s: float = 30.0) -> None:
        """A silent peer is tried again after `retry_s` seconds, then after twice as long each time, up to
        `longest_s`."""
        self._retry_s = retry_s
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._silent: dict[str, _Silence] = {}
        self._trial = ""
        """The peer of the trial under way; empty if there is none."""
        self._trial_ends = 0.0
        """When to stop waiting for the trial's outcome."""

    def any_silent(self, now: float) -> bool:
        """Returns whether any peer is silent; the caller then has to ask where each object lies. Forgets
        peers that are gone from the pool."""
        if not self._silent:
            return False
        with self._lock:
            for peer in [peer for peer, silence in self._silent.items() if now - silence.named > FORGOTTEN_S]:
                del self._silent[peer]
            return bool(self._silent)

    def delivered(self, peer: str) -> None:
        """Notes that a peer delivered."""
        with self._lock:
            was_silent = self._silent.pop(peer, None) is not None
        if was_silent:
            log.info("peer %s delivers objects again", peer)

    def failed(self, peer: str, now: float) -> None:
        """Notes that a peer did not deliver."""
        with self._lock:
            known = self._silent.get(peer)
            pause = self._retry_s if known is None else min(self._longest_s, 2 * known.pause)
            self._silent[peer] = _Silence(now + pause, pause, now)
        if known is None:
            log.warning("peer %s does not deliver; its objects count as misses until it does", peer)

    def tried(self, peers: Collection[str]) -> None:
        """Notes that a read of objects at `peers` has ended, with any outcome. If it was a trial, the trial
        is over."""
        with self._lock:
            if self._trial in peers:
                self._trial = ""

    def may_ask(self, peer: str, now: float, busy: Collection[str] = ()) -> bool:
        """Returns whether to read an object from `peer`. If the peer is silent, this begins its *trial* and
        returns True, but only after the pause, and only if no other trial is under way: a trial may hold its
        thread for `TRIAL_S`. The `busy` peers already hold a thread, so they get no trial."""
        with self._lock:
            silence = self._silent.get(peer)
            if silence is None:
                return True
            self._silent[peer] = silence._replace(named=now)
            if (self._trial and now < self._trial_ends) or now < silence.again or peer in busy:
                return False
            self._trial, self._trial_ends = peer, now + TRIAL_S
            return True
