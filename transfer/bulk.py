"""Reads and writes many objects at once, in steps that end long before Mooncake would give one of them up.

Mooncake waits at most 60 s for a transfer, by the wall clock, and then returns *although the transfer still runs*
(`wait_for_completion` in mooncake-store/src/transfer_task.cpp). A peer that was stopped for longer goes on to write into the
memory that it was asked to fill, whatever that memory is then used for. Therefore:

1. A step has few objects. If a peer is silent, each of Mooncake's connections to it fails one object after the other when the TCP
   time-out has passed, and the step ends with a code for each key, within about the caller's deadline.
2. If Mooncake may still have given up a step (this process or the whole machine was stopped, or the clock was set), the step
   *forfeits* its slots: their memory is never used again.
3. The codes show which peers are silent (`transfer.peers`). Reads of their objects fail at once until the peers deliver again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from transfer.environment import stall_seconds
from transfer.errors import Status, status_of
from transfer.peers import Peers
from transfer.ranges import ObjectRange, OpenReads, RangeRead
from transfer.settings import TransferSettings
from transfer.staging import Slot

log = logging.getLogger(__name__)

_GIVES_UP_AFTER_S = 60.0
_NEAR = 0.8
"""The share of Mooncake's time limit after which we assume that Mooncake may have given up a transfer."""
_CLOCK_STEP_S = 1.0
"""If the wall clock and the monotonic clock drift apart by more than this within a step, the wall clock was set."""
_ENDS_WITHIN_S = 25.0
"""The longest that a step may take, whatever the time-outs are set to."""
_ROUND_EXTRA_S = 0.6
"""How much longer than the TCP time-out one object of a silent peer takes to fail (measured)."""
_LANES = 4
"""How many connections to a peer Mooncake has, unless MC_TCP_LANES_PER_PEER says otherwise (up to `_MOST_LANES`)."""
_MOST_LANES = 16
_MOST_UNREVOKED = 1 << 16
_RETRY_FULL_AFTER_S = 0.02
"""Eviction frees space in ticks of about 10 ms. A put that found the pool full is tried once more after this time."""

_SILENT = -800
"""Mooncake's code for a transfer that failed."""
LATE = -9001
"""Our own code for a key that was not begun because the deadline had passed. `status_of` turns it into a time-out."""


class BulkClient(Protocol):
    """The methods of a Mooncake client that are used here. They return negative ints as codes, and raise nothing."""

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]: ...
    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], config: Any) -> list[int]: ...
    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: Any) -> list[int]: ...
    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]: ...
    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...
    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]: ...
    def batch_get_session_start(self, keys: list[str]) -> list[int]: ...
    def batch_get_session_end(self, keys: list[str]) -> int: ...
    def batch_get_into_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]: ...


def keys_per_step(settings: TransferSettings) -> int:
    """Returns how many objects a step has: as many as a silent peer fails within the longer of `get_ms` and `put_ms`."""
    patience = min(_ENDS_WITHIN_S, max(settings.timeouts.get_ms, settings.timeouts.put_ms) / 1000)
    stall = _variable("MC_TCP_PROGRESS_TIMEOUT_SEC", stall_seconds(settings))
    rounds = max(1, int(patience / (stall + _ROUND_EXTRA_S)))
    return rounds * min(_MOST_LANES, _variable("MC_TCP_LANES_PER_PEER", _LANES))


def _variable(name: str, usual: int) -> int:
    """Returns a number from one of Mooncake's variables, or `usual` if it is not a number above 0, which Mooncake ignores, too."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else usual


class Watch:
    """Finds out whether Mooncake may have given up a transfer since this object was made.

    Mooncake goes by the wall clock, which can be set.
    """

    def __init__(
        self,
        gives_up_after_s: float = _GIVES_UP_AFTER_S,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._enough = _NEAR * gives_up_after_s
        self._monotonic, self._wall = monotonic, wall
        self._began, self._began_wall = monotonic(), wall()

    def may_have_given_up(self) -> bool:
        elapsed, elapsed_wall = self._monotonic() - self._began, self._wall() - self._began_wall
        return max(elapsed, elapsed_wall) > self._enough or abs(elapsed - elapsed_wall) > _CLOCK_STEP_S


class Bulk:
    """Does the transfers of one client. They block the calling thread. Codes are Mooncake's, or `LATE`."""

    def __init__(
        self,
        client: BulkClient,
        settings: TransferSettings,
        forfeit: Callable[[Sequence[Slot]], None],
        watch: Callable[[], Watch] = Watch,
    ) -> None:
        """`forfeit` takes slots whose memory a transfer may still use."""
        self._client = client
        self._forfeit = forfeit
        self._watch = watch
        self._shared = settings.client == "host"
        """Whether a `mooncake_client` does the transfers. It returns only codes, and `HostClient` handles its time limit,
        which is shorter than Mooncake's. So all keys are one step, no session reports other writers, and no peer is known."""
        self._step = 0 if self._shared else keys_per_step(settings)
        self._stall_s = stall_seconds(settings)
        self.peers = Peers(settings.breaker.probe_interval_ms / 1000)
        self.reads = OpenReads(client)
        """Which objects are read range by range."""
        self.own_peer = ""
        """The address of this process's own segment, which it reads without a transfer; empty if it has none."""
        self._unrevoked: dict[str, None] = {}
        """Keys whose put sessions were given up but are still open in Mooncake's client."""
        self._stalled: dict[int, frozenset[str]] = {}
        """For each thread, the peers that have held it up for longer than a peer may stall."""
        self._reading: dict[int, tuple[float, list[str]]] = {}
        """For each thread, when its read began and the keys of that read."""

    def get(self, keys: Sequence[str], slots: Sequence[Slot], deadline: float) -> list[int]:
        """Reads each key into its slot. Returns the bytes read, or a code, for each key. No step begins after `deadline`."""
        return self._steps(
            len(keys), deadline, lambda some: self._get([keys[i] for i in some], [slots[i] for i in some])
        )

    def get_ranges(
        self, read: RangeRead, keys: Sequence[str], slot: Slot, ranges: Sequence[ObjectRange], deadline: float
    ) -> list[int]:
        """Reads a range of each key into its place in `slot`. Returns the bytes read, or a code, for each key.

        The keys are some of those of `read`, which has begun. No step begins after `deadline`.
        """
        self.reads.retain(keys)  # a session must not end under a call that is late
        try:
            read.renew_if_due()
            return self._steps(
                len(keys),
                deadline,
                lambda some: self._get_ranges([keys[i] for i in some], slot, [ranges[i] for i in some]),
            )
        finally:
            self.reads.end(keys)

    def put(
        self, keys: Sequence[str], slots: Sequence[Slot], sizes: Sequence[int], config: Any, deadline: float
    ) -> list[int]:
        """Writes the first bytes of each slot under its key. Returns a code for each key; 0 means that the pool holds the whole object.

        A key that found no room is tried once more. No step begins after `deadline`.
        """

        def write(some: Sequence[int]) -> list[int]:
            return self._put([keys[i] for i in some], [slots[i] for i in some], [sizes[i] for i in some], config)

        codes = self._steps(len(keys), deadline, write)
        full = [index for index, code in enumerate(codes) if status_of(code) is Status.NO_SPACE]
        if full and time.monotonic() < deadline:
            time.sleep(_RETRY_FULL_AFTER_S)
            again = self._steps(len(full), deadline, lambda some: write([full[i] for i in some]))
            for index, code in zip(full, again, strict=True):
                codes[index] = code
        return codes

    def suspect_slow_peers(self) -> None:
        """Marks peers as silent if reads of their objects have run for longer than a peer may stall.

        Call it when a reader's deadline has passed. If this process has never spoken with a peer, Mooncake waits a minute for each key,
        so codes would come too late.
        """
        if self._shared:
            return
        now = time.monotonic()
        for thread, (began, keys) in list(self._reading.items()):
            if now - began > self._stall_s:
                peers = frozenset(self._where(keys).values())
                if thread in self._reading:
                    self._stalled[thread] = peers
                for peer in peers:
                    self._blame(peer, now)

    # --- inside --------------------------------------------------------------------------------------------------

    def _steps(self, count: int, deadline: float, step: Callable[[Sequence[int]], list[int]]) -> list[int]:
        size = self._step or count
        codes: list[int] = []
        for start in range(0, count, size):
            if start and time.monotonic() >= deadline:
                return codes + [LATE] * (count - start)
            codes += step(range(start, min(start + size, count)))
        return codes

    def _guarded(self, slots: Sequence[Slot], transfer: Callable[[], list[int]]) -> list[int]:
        """Does a transfer from or to `slots`, and returns its codes. Forfeits the slots if the transfer may still be running."""
        watch = self._watch()
        codes = transfer()
        if any(status_of(code) is Status.TRANSFER_FAILED for code in codes) and watch.may_have_given_up():
            log.warning(
                "Mooncake gave up a transfer of %d objects that may go on; their memory is not used again", len(slots)
            )
            self._forfeit(slots)
        return codes

    def _get(self, keys: list[str], slots: list[Slot]) -> list[int]:
        def read(wanted: Sequence[int]) -> list[int]:
            targets = [slots[i] for i in wanted]
            some, addresses = [keys[i] for i in wanted], [slot.address for slot in targets]
            sizes = [slot.size for slot in targets]
            return self._guarded(targets, lambda: self._client.batch_get_into(some, addresses, sizes))

        return self._read(keys, read)

    def _get_ranges(self, keys: list[str], slot: Slot, ranges: list[ObjectRange]) -> list[int]:
        def read(wanted: Sequence[int]) -> list[int]:
            some, parts = [keys[i] for i in wanted], [ranges[i] for i in wanted]
            addresses = [[slot.address + part.place] for part in parts]
            sizes, starts = [[part.size] for part in parts], [[part.start] for part in parts]
            return self._guarded(
                [slot], lambda: self._client.batch_get_into_multi_buffer_ranges(some, addresses, sizes, starts)
            )

        return self._read(keys, read)

    def _read(self, keys: list[str], read: Callable[[Sequence[int]], list[int]]) -> list[int]:
        """Returns a code for each key. `read` takes the indices of the keys that are worth reading."""
        wanted = self._from_others_than_silent_peers(keys)
        codes = [_SILENT] * len(keys)
        if wanted:
            some = [keys[i] for i in wanted]
            me = threading.get_ident()
            self._reading[me] = (time.monotonic(), some)
            try:
                outcomes = read(wanted)
            finally:
                del self._reading[me]
                self._stalled.pop(me, None)
            self._judge(some, outcomes)
            for index, outcome in zip(wanted, outcomes, strict=True):
                codes[index] = outcome
        return codes

    def _put(self, keys: list[str], slots: list[Slot], sizes: list[int], config: Any) -> list[int]:
        addresses = [slot.address for slot in slots]
        if self._shared:
            return self._guarded(slots, lambda: self._client.batch_put_from(keys, addresses, sizes, config))
        return self._guarded(slots, lambda: self._put_in_session(keys, addresses, sizes, config))

    def _put_in_session(self, keys: list[str], addresses: list[int], sizes: list[int], config: Any) -> list[int]:
        """Does what `batch_put_from` does, at the same cost.

        But `batch_put_from` returns 0 for a key that another writer has begun and may never end. A session reports such keys, and keys
        that already exist.
        """
        if left := [key for key in keys if key in self._unrevoked]:
            self._revoke(left)
        codes = self._client.batch_put_session_start(keys, sizes, config)
        ours = [index for index, code in enumerate(codes) if code == 0]
        if ours:
            written = self._client.batch_put_from_multi_buffer_ranges(
                [keys[i] for i in ours], [[addresses[i]] for i in ours], [[sizes[i]] for i in ours], [[0]] * len(ours)
            )
            for index, outcome in zip(ours, written, strict=True):
                codes[index] = min(outcome, 0)
            whole = [index for index in ours if codes[index] == 0]
            for index, code in zip(whole, self._end([keys[i] for i in whole]), strict=True):
                codes[index] = code
            if broken := [keys[i] for i in ours if codes[i] != 0]:
                self._revoke(broken)
        others = [index for index, code in enumerate(codes) if status_of(code) in (Status.BUSY, Status.INVALID)]
        if others:  # already there, or begun by another writer, perhaps on another thread of ours
            there = self._client.batch_is_exist([keys[i] for i in others])
            for index, exists in zip(others, there, strict=True):
                if exists == 1:
                    codes[index] = 0
        return codes

    def _revoke(self, keys: list[str]) -> None:
        """Gives up sessions. If the master does not answer, a session stays open in Mooncake's client, which then refuses its key (-600).

        Such a session is revoked again before the next put.
        """
        for key, code in zip(keys, self._client.batch_put_session_revoke(keys), strict=True):
            if code == 0 or status_of(code) is Status.MISSING:
                self._unrevoked.pop(key, None)
            else:
                self._unrevoked[key] = None
        while len(self._unrevoked) > _MOST_UNREVOKED:
            del self._unrevoked[next(iter(self._unrevoked))]

    def _end(self, keys: list[str]) -> list[int]:
        return self._client.batch_put_session_end(keys) if keys else []

    # --- peers ---------------------------------------------------------------------------------------------------

    def _from_others_than_silent_peers(self, keys: list[str]) -> list[int]:
        """Returns the indices of the keys that are worth reading."""
        if not self.peers.any_silent:
            return list(range(len(keys)))
        where, now = self._where(keys), time.monotonic()
        busy = frozenset[str]().union(*list(self._stalled.values()))
        # ask once for each peer, so that a silent one gets one trial and not one for each key
        asked = {peer: self.peers.may_ask(peer, now, busy) for peer in frozenset(where.values())}
        return [index for index, key in enumerate(keys) if key not in where or asked[where[key]]]

    def _judge(self, keys: list[str], codes: list[int]) -> None:
        """Learns from a read which peers deliver."""
        failed = [key for key, code in zip(keys, codes, strict=True) if status_of(code) is Status.TRANSFER_FAILED]
        if self._shared or not (failed or self.peers.any_silent):
            return
        where, now = self._where(keys), time.monotonic()
        delivered = {where[key] for key, code in zip(keys, codes, strict=True) if code >= 0 and key in where}
        for peer in delivered:
            if self.peers.delivered(peer):
                log.info("peer %s delivers objects again", peer)
        for peer in {where[key] for key in failed if key in where} - delivered:
            self._blame(peer, now)
        self.peers.tried(frozenset(where.values()))

    def _blame(self, peer: str, now: float) -> None:
        if self.peers.failed(peer, now):
            log.warning("peer %s does not deliver; its objects count as misses until it does", peer)

    def _where(self, keys: list[str]) -> dict[str, str]:
        """Returns the peer from which each object is read. Leaves out unknown keys, and keys that this process reads from its own segment.

        If there are several copies in memory, Mooncake reads its own, or else the first that the master names. If that fails, it tries no
        other (`SelectBestReplica` in mooncake-store/include/replica_selection.h).
        """
        where: dict[str, str] = {}
        for key, replicas in self._client.batch_get_replica_desc(list(keys)).items():
            peers = [
                replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
                for replica in replicas
                if replica.is_memory_replica()
            ]
            if peers and self.own_peer not in peers:
                where[key] = peers[0]
        return where
