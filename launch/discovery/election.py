"""Finds out whether a master and etcd agree on which master leads.

Mooncake's masters elect a leader by a key in etcd, which lives as long as the leader renews its lease. An etcd that dies and comes back
costs an election. An etcd that loses data can leave masters in a state that never ends (measured; docs/mooncake.md). A leader whose key
is gone still says that it leads, but no client finds it. A standby that has followed a lost log of operations takes the key again and
again, and refuses to serve. In both cases master and etcd disagree for good. A master that is restarted takes part in a new election.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from launch.discovery.etcd import _EtcdOpener, _Lost
from pd_cache.cluster import EtcdDiscovery

log = logging.getLogger(__name__)

DISAGREES_S = 30.0
"""How long they may disagree. In an election that goes well they disagree for a second or two, and for longer if the next leader has many
keys to take over. A restart then would lose these keys."""
_POLL_S = 1.0


class ElectionWatch:
    """Compares the leader's key with what our master says. Its thread runs while the context is entered."""

    def __init__(
        self,
        settings: EtcdDiscovery,
        cluster: str,
        address: str,
        leads: Callable[[], bool | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address`: `host:port` of our master. `leads` returns whether the master says that it leads or prepares to lead; None if it does
        not answer. `clock` returns seconds. Raises ConfigError for the same reasons as `EtcdRegistration`."""
        self._connector = _EtcdOpener(settings)
        self._key = f"mooncake-store/{cluster}/master_view"
        self._address = address
        self._leads = leads
        self._clock = clock
        self._at_odds_since: float | None = None
        self._revision = 0
        """The key's revision when it was last read."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election-watch", daemon=True)

    def lost(self) -> bool:
        """Returns whether etcd and our master have both answered, and have disagreed, for `DISAGREES_S` seconds. Counts anew after that."""
        since = self._at_odds_since
        if since is None or self._clock() - since < DISAGREES_S:
            return False
        self._at_odds_since = None
        log.warning("for %g s the master %s and etcd have differed on who leads", DISAGREES_S, self._address)
        return True

    def look(self) -> None:
        """Compares once. Waits no longer than a call to etcd and one to the master may take."""
        if self._agree():
            self._at_odds_since = None
        elif self._at_odds_since is None:
            self._at_odds_since = self._clock()

    def _agree(self) -> bool:
        try:
            with self._connector.client() as client:
                value, about = client.get(self._key)
        except _Lost:
            return True  # without etcd no master can lead, and a restart would not help
        leads = self._leads()
        if leads is None:
            return True
        if value is None:
            return False
        before, self._revision = self._revision, about.mod_revision
        if value.decode(errors="replace") == self._address:
            return leads
        # masters that refuse to lead take turns: the key names each for a second
        return not leads and self._revision == before

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            self.look()

    def __enter__(self) -> ElectionWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
