"""Reads and writes many objects at once, in steps that end long before Mooncake would give up a transfer.

Mooncake waits at most 60 s for a transfer, by the wall clock, and then returns *although the transfer still
runs* (`wait_for_completion` in mooncake-store/src/transfer_task.cpp). A peer that was stopped for longer then
continues to write into the memory of the transfer, even if that memory has another use by then. Therefore:

1. A step has so few objects that it ends within about the caller's deadline even if the peer is silent. Each
   of Mooncake's few connections to the peer then fails one object after the other, each after the TCP
   time-out. (A put uses a single connection, so it takes longer; see docs/mooncake.md.)
2. Mooncake may still have given up a transfer if this process or the machine was stopped, or if the clock was
   set. Then the step *forfeits* its slots: their memory is never used again.
3. A step ends with a code for each key. The codes show which peers are silent (`transfer.health`). Gets of
   their objects fail at once until the peers deliver again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from transfer.direct_reads import FAILED, DirectReads, Replica
from transfer.errors import Status, status_of
from transfer.health import CircuitBreaker, Peers
from transfer.settings import TransferSettings, stall_seconds
from transfer.staging import RegistersMemory, Slot, StagingPool

log = logging.getLogger(__name__)

_GIVES_UP_AFTER_S = 60.0
_NEAR = 0.8
"""The share of Mooncake's time limit after which we assume that Mooncake may have given up a transfer."""
_CLOCK_STEP_S = 1.0
"""If the wall clock and the monotonic clock drift apart by more than this within a step, the wall clock was
set."""
_ENDS_WITHIN_S = 25.0
"""The longest that a step may take, whatever the time-outs are set to."""
_ROUND_EXTRA_S = 0.6
"""An object of a silent peer fails this much later than the TCP time-out (measured)."""
_LANES = 4
"""How many connections to a peer Mooncake has, unless MC_TCP_LANES_PER_PEER says otherwise (up to
`_MOST_LANES`)."""
_MOST_LANES = 16
_RETRY_FULL_AFTER_S = 0.02
"""Eviction frees space in ticks of about 10 ms. A put that found the pool full is tried once more after this
time."""

_NO_ANSWER = -900
"""Mooncake's code for a master that does not answer."""
_UNANSWERED_S = 0.9
"""If asking where objects lie took longer than this, the master has not answered: MC_RPC_TIMEOUT_MS is at
least a second."""
_LEASE_EXPIRED = -707
"""Mooncake's code for an object that may have been evicted while it was read."""
LATE = -9001
"""Our own code for a key whose transfer was not begun because the deadline had passed. `status_of` turns it
into a time-out."""


class MovesClient(RegistersMemory, Protocol):
    """The methods of a Mooncake client that are used here. They return negative ints as codes, and raise
    nothing."""

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]: ...
    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: Any) -> list[int]: ...
    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]: ...
    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...
    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]: ...


def keys_per_step(settings: TransferSettings) -> int:
    """Returns how many objects a step has: so few that a get of all of them from a silent peer fails within
    the longer of `get_ms` and `put_ms`. A put takes longer, but shorter steps would slow all puts down."""
    patience = min(_ENDS_WITHIN_S, max(settings.timeouts.get_ms, settings.timeouts.put_ms) / 1000)
    stall = _variable("MC_TCP_PROGRESS_TIMEOUT_SEC", stall_seconds(settings))
    rounds = max(1, int(patience / (stall + _ROUND_EXTRA_S)))
    return rounds * min(_MOST_LANES, _variable("MC_TCP_LANES_PER_PEER", _LANES))


def _variable(name: str, usual: int) -> int:
    """Returns the number in a variable of Mooncake's. Returns `usual` if it is not a number above 0; Mooncake
    ignores such a value, too."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else usual


class Watch:
    """Measures the time since it was made, by Mooncake's clock: the wall clock, which can be set. The default
    for `enough_s` is the time after which Mooncake may have given up a transfer."""

    def __init__(
        self,
        enough_s: float = _NEAR * _GIVES_UP_AFTER_S,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._enough_s = enough_s
        self._monotonic, self._wall = monotonic, wall
        self._began, self._began_wall = monotonic(), wall()

    def passed(self) -> bool:
        """Returns whether `enough_s` may have passed. A clock that was set counts as passed."""
        elapsed, elapsed_wall = self._monotonic() - self._began, self._wall() - self._began_wall
        return max(elapsed, elapsed_wall) > self._enough_s or abs(elapsed - elapsed_wall) > _CLOCK_STEP_S


class Batch(NamedTuple):
    """Objects that move together: their keys, their slots, and how many bytes of each slot they take."""

    keys: list[str]
    slots: list[Slot]
    sizes: list[int]

    @property
    def addresses(self) -> list[int]:
        return [slot.address for slot in self.slots]

    def take(self, indices: Sequence[int]) -> Batch:
        """Returns the objects with these indices, in this order."""
        keys, slots, sizes = self
        return Batch([keys[i] for i in indices], [slots[i] for i in indices], [sizes[i] for i in indices])

    def parts(self, size: int) -> Iterator[Batch]:
        """Yields the objects again, `size` at a time."""
        for first in range(0, len(self.keys), size):
            yield self.take(range(first, min(first + size, len(self.keys))))

    def retain(self) -> None:
        """Takes another reference to each slot, for a call that may use the slot."""
        for slot in self.slots:
            slot.retain()

    def release(self) -> None:
        """Gives the references of `retain` back after a get. The reader settles each slot when it takes the
        bytes."""
        for slot in self.slots:
            slot.release()

    def settle_and_release(self) -> None:
        """Gives the references of `retain` back after a put. The slots wait for no peer any more, even if
        another tier still holds them."""
        for slot in self.slots:
            slot.settle()
            slot.release()


class Moves:
    """Does the transfers of one client. They block the calling thread. Codes are Mooncake's, or `LATE`."""

    def __init__(
        self,
        client: MovesClient,
        settings: TransferSettings,
        breaker: CircuitBreaker,
        memory: Sequence[StagingPool],
        watch: Callable[[], Watch] = Watch,
        *,
        direct: DirectReads | None = None,
    ) -> None:
        """`memory`: the memory that is registered with the client; the caller may add to it.
        `direct`: reads that do not go through Mooncake's client."""
        self._client = client
        self._breaker = breaker
        self._memory = memory
        self._watch = watch
        self._step = keys_per_step(settings)
        self._stall_s = stall_seconds(settings)
        self._lease_s = settings.timeouts.get_ms / 1000
        """When the master reports where an object lies, it leases the object for at least this time: the
        checks of a cluster's file demand it."""
        self.peers = Peers(settings.breaker.probe_interval_ms / 1000)
        self.direct = direct
        self.own_peer = ""
        """The address of this process's own segment, which it reads without a transfer; empty if it has
        none."""
        self._unrevoked: set[str] = set()
        """Keys whose put sessions were given up but are still open in Mooncake's client."""
        self._stalled: dict[int, frozenset[str]] = {}
        """For each thread, the peers that have held it for longer than a peer may stall."""
        self._reading: dict[int, tuple[float, list[str]]] = {}
        """For each thread, when its read began and the keys of that read."""

    # --- reads ----------------------------------------------------------------------------------------------

    def get(self, batch: Batch, deadline: float) -> list[int]:
        """Reads each key into its slot. Returns the bytes read, or a code, for each key. No step but the
        first begins after `deadline`."""
        now, leased = time.monotonic(), Watch(self._lease_s)
        replicas = self._replicas(batch.keys) if self.direct is not None else {}  # asks once for all steps
        codes: list[int] = []
        if not replicas and time.monotonic() - now > _UNANSWERED_S:
            codes = [_NO_ANSWER] * len(batch.keys)  # the client would wait as long again for the master
        else:
            for part in batch.parts(self._step):
                late = bool(codes) and time.monotonic() >= deadline
                codes += [LATE] * len(part.keys) if late else self._get_part(part, replicas, leased)
        self._breaker.learn("a transfer", codes)
        return codes

    def _get_part(self, part: Batch, replicas: dict[str, Replica], leased: Watch) -> list[int]:
        """Reads the objects of a step. `replicas`: where the batch's objects lie, if that is known already.
        `leased`: measures the time since the master has leased them."""
        now = time.monotonic()
        # 1. objects of silent peers are left out, because each would hold this thread for seconds
        if not replicas and self.peers.any_silent(now):
            replicas = self._replicas(part.keys)
        # only this step's keys: a trial of a peer ends only when a read of its objects ends
        replicas = {key: replicas[key] for key in part.keys if key in replicas}
        wanted = self._without_silent_peers(part.keys, replicas, now)
        asked = part.take(wanted) if len(wanted) < len(part.keys) else part
        if not wanted:
            return [FAILED] * len(part.keys)
        # 2. while the read runs, `suspect_slow_peers` can see what it waits for
        me = threading.get_ident()
        self._reading[me] = (now, asked.keys)
        watch = self._watch()
        try:
            found = self._read(asked, replicas, leased)
        finally:
            del self._reading[me]
            self._stalled.pop(me, None)
        # 3. slots to which Mooncake may still write are never used again
        failed = self._forfeit_if_given_up(asked, found, watch)
        # 4. the codes show which peers deliver
        if failed or self.peers.any_silent(time.monotonic()):
            self._learn(asked.keys, found, replicas or self._replicas(asked.keys))
        if asked is part:
            return found
        codes = [FAILED] * len(part.keys)
        for index, code in zip(wanted, found, strict=True):
            codes[index] = code
        return codes

    def _read(self, asked: Batch, replicas: dict[str, Replica], leased: Watch) -> list[int]:
        """Reads the objects directly if all of them fit and lie in the memory of peers from which Mooncake's
        client has read; otherwise with the client."""
        direct = self.direct
        found: list[int] | None = None
        if direct is not None and all(
            key in replicas and replicas[key].nbytes <= size
            for key, size in zip(asked.keys, asked.sizes, strict=True)
        ):
            until = time.monotonic() + _GIVES_UP_AFTER_S
            found = direct.read([replicas[key] for key in asked.keys], asked.addresses, until)
        # this process may have stood still until the lease was over; Mooncake's client checks this, too
        if found is not None and leased.passed():
            found = [min(code, _LEASE_EXPIRED) for code in found]
        if found is None:
            found = self._client.batch_get_into(asked.keys, asked.addresses, asked.sizes)
            if direct is not None:
                came = (key for key, code in zip(asked.keys, found, strict=True) if code >= 0)
                direct.meet({replicas[key].peer for key in came if key in replicas})
        return found

    def suspect_slow_peers(self) -> None:
        """Marks peers as silent if gets of their objects have run for longer than a peer may stall. Call it
        when a reader's deadline has passed.

        The codes of these gets may come too late: for a peer with which this process has never communicated,
        Mooncake waits a minute for each key.
        """
        now = time.monotonic()
        for thread, (began, keys) in list(self._reading.items()):
            if now - began > self._stall_s:
                peers = frozenset(replica.peer for replica in self._replicas(keys).values())
                if thread in self._reading:
                    self._stalled[thread] = peers
                for peer in peers:
                    self.peers.failed(peer, now)

    # --- puts -----------------------------------------------------------------------------------------------

    def put(self, batch: Batch, config: Any, deadline: float) -> list[int]:
        """Writes the objects under their keys. Returns a code for each; 0 means that the pool holds the whole
        object.

        A key that found no room is tried once more. No step but the first begins after `deadline`.
        """
        codes = [LATE] * len(batch.keys)
        wanted: Sequence[int] = range(len(codes))
        for _ in range(2):
            for first in range(0, len(wanted), self._step):
                if first and time.monotonic() >= deadline:
                    break
                part = wanted[first : first + self._step]
                for index, code in zip(part, self._put_part(batch.take(part), config), strict=True):
                    codes[index] = code
            wanted = [index for index, code in enumerate(codes) if status_of(code) is Status.NO_SPACE]
            if not wanted or time.monotonic() >= deadline:
                break
            time.sleep(_RETRY_FULL_AFTER_S)
        self._breaker.learn("a transfer", codes)
        return codes

    def _put_part(self, part: Batch, config: Any) -> list[int]:
        """Puts objects in a session, at the cost of `batch_put_from`.

        `batch_put_from` returns 0 for a key that another writer has begun and may never end. A session
        reports such keys, and keys that already exist.
        """
        watch = self._watch()
        # 1. Mooncake's client refuses a key whose last session is still open
        if left := [key for key in part.keys if key in self._unrevoked]:
            self._revoke(left)
        codes = self._client.batch_put_session_start(part.keys, part.sizes, config)
        # 2. write the keys that we have begun, and end them; give up keys that were not written whole, with
        # all copies
        ours = [index for index, code in enumerate(codes) if code == 0]
        if ours:
            some = part.take(ours)
            written = self._client.batch_put_from_multi_buffer_ranges(
                some.keys,
                [[address] for address in some.addresses],
                [[size] for size in some.sizes],
                [[0]] * len(ours),
            )
            for index, code in zip(ours, written, strict=True):
                codes[index] = min(code, 0)
            whole = [index for index in ours if codes[index] == 0]
            if whole:
                ended = self._client.batch_put_session_end([part.keys[i] for i in whole])
                for index, code in zip(whole, ended, strict=True):
                    codes[index] = code
            if broken := [part.keys[i] for i in ours if codes[i] != 0]:
                self._revoke(broken)
        self._forfeit_if_given_up(part, codes, watch)
        # 3. the other keys exist already, or another writer has begun them, perhaps on another thread of ours
        others = [
            index for index, code in enumerate(codes) if status_of(code) in (Status.BUSY, Status.INVALID)
        ]
        if others:
            there = self._client.batch_is_exist([part.keys[i] for i in others])
            for index, exists in zip(others, there, strict=True):
                if exists == 1:
                    codes[index] = 0
        return codes

    def _revoke(self, keys: list[str]) -> None:
        """Gives up sessions. If the master does not answer, a session stays open in Mooncake's client, which
        then refuses its key (-600).

        Such a session is revoked again before the next put.
        """
        for key, code in zip(keys, self._client.batch_put_session_revoke(keys), strict=True):
            if code == 0 or status_of(code) is Status.MISSING:
                self._unrevoked.discard(key)
            else:
                self._unrevoked.add(key)

    # --- both -----------------------------------------------------------------------------------------------

    def _forfeit_if_given_up(self, part: Batch, codes: list[int], watch: Watch) -> bool:
        """Forfeits the slots of a step whose transfers may go on although the step has ended. Returns whether
        any transfer failed."""
        failed = any(status_of(code) is Status.TRANSFER_FAILED for code in codes)
        if failed and watch.passed():
            log.warning(
                "Mooncake gave up a transfer of %d objects that may go on; their memory is not used again",
                len(part.keys),
            )
            for pool in self._memory:
                pool.forfeit(part.slots)
        return failed

    # --- peers ----------------------------------------------------------------------------------------------

    def _without_silent_peers(self, keys: list[str], replicas: dict[str, Replica], now: float) -> list[int]:
        """Returns the indices of the keys to read. Leaves out the keys of silent peers, unless this read is
        the peer's trial."""
        busy = frozenset[str]().union(*list(self._stalled.values()))
        # ask once for each peer, so that a silent peer gets a single trial, not a trial for each key
        peers = frozenset(replica.peer for replica in replicas.values())
        asked = {peer: self.peers.may_ask(peer, now, busy) for peer in peers}
        return [index for index, key in enumerate(keys) if key not in replicas or asked[replicas[key].peer]]

    def _learn(self, keys: list[str], codes: list[int], replicas: dict[str, Replica]) -> None:
        """Learns from the codes of a read which peers deliver."""
        now = time.monotonic()
        peers = [replicas[key].peer if key in replicas else "" for key in keys]
        delivered = {peer for peer, code in zip(peers, codes, strict=True) if peer and code >= 0}
        failed = {
            peer
            for peer, code in zip(peers, codes, strict=True)
            if peer and status_of(code) is Status.TRANSFER_FAILED
        }
        for peer in delivered:
            self.peers.delivered(peer)
        for peer in failed - delivered:
            self.peers.failed(peer, now)
        self.peers.tried(frozenset(peers))

    def _replicas(self, keys: list[str]) -> dict[str, Replica]:
        """Returns the replica from which each object is read. Leaves out unknown keys, and keys that this
        process reads from its own segment.

        If there are several copies in memory, Mooncake reads its own, or else the first that the master
        names. If that fails, it tries no other (`SelectBestReplica` in
        mooncake-store/include/replica_selection.h).
        """
        found: dict[str, Replica] = {}
        for key, descriptors in self._client.batch_get_replica_desc(list(keys)).items():
            buffers = [
                descriptor.get_memory_descriptor().buffer_descriptor
                for descriptor in descriptors
                if descriptor.is_memory_replica()
            ]
            if buffers and all(buffer.transport_endpoint != self.own_peer for buffer in buffers):
                first = buffers[0]
                found[key] = Replica(first.transport_endpoint, first.buffer_address, first.size)
        return found
