"""DiskWriter: puts objects into the folder of a disk tier. Two puts of one key are one write.

The caller seals an object and hands it over; it holds only memory and a place among the writes. The writing threads, which no user
interrupts, do the rest: they make room in the index, delete the objects that were evicted, and write and publish the new one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from pd_cache.backends.disk_health import DiskHealth, DiskState
from pd_cache.backends.disk_sweeper import DiskSweeper
from pd_cache.backends.faults import DiskFault, fault_of
from pd_cache.backends.folder import ObjectFolder
from pd_cache.backends.index import EvictingIndex, Removal, Room
from pd_cache.backends.places import Place, Share
from pd_cache.backends.slots import StagedObject
from pd_cache.metrics import TierMetrics
from transfer.calls import Call, CallThreads
from transfer.errors import Status
from transfer.locks import Condition

T = TypeVar("T")

_EVICTED_FOR_ONE = 8
"""The most objects that are evicted for one of the same size. If they are not enough, another program takes the space they leave."""


class _Write:
    """One object on its way to the disk."""

    __slots__ = ("begun", "call", "deadline", "digest", "ended", "place", "staged", "status")

    def __init__(self, digest: str, staged: StagedObject, place: Place, deadline: float) -> None:
        self.digest = digest
        self.staged = staged
        self.place = place
        self.deadline = deadline
        self.call: Call[None] | None = None
        self.begun: float | None = None
        """When a thread began it, by `time.monotonic()`."""
        self.status = Status.TIMEOUT
        self.ended = False


class WriteUnderWay(NamedTuple):
    """A write that a caller waits for. The caller or another one has begun it."""

    write: _Write
    deadline: float
    """The deadline of this caller."""
    joined: bool


class DiskWriter:
    """Writes into one folder, on `threads` threads. Thread-safe."""

    def __init__(
        self,
        folder: ObjectFolder,
        index: EvictingIndex[str],
        sweeper: DiskSweeper,
        health: DiskHealth,
        metrics: TierMetrics,
        *,
        slots: int,
        threads: int,
        limit: int,
        usual_ms: int,
    ) -> None:
        """`slots`: how many slots writes may hold. `limit`: how many calls may be queued. `usual_ms`: the usual time limit of a write."""
        self._folder = folder
        self._index = index
        self._sweeper = sweeper
        self._health = health
        self._metrics = metrics
        self._usual_ms = usual_ms
        self.slots = Share(slots, health.changed, lambda: health.writable)
        self._under_way: dict[str, _Write] = {}
        self._changed = Condition()
        """Notified when a write ends."""
        self._threads = CallThreads(f"{metrics.tier}-write", threads, limit=limit)

    def begin(self, key: str, digest: str, item: StagedObject, deadline: float) -> Status | WriteUnderWay:
        """Begins to write an object, or joins the write of the same key. A key names its content, so both have the same bytes."""
        if not self._health.writable:
            return self._health.refusal
        with self._changed:
            write = self._under_way.get(digest)
            if write is not None and time.monotonic() < write.deadline:
                return WriteUnderWay(write, deadline, joined=True)
            if self._index.contains([digest])[0]:
                return Status.OK
            place = self.slots.take(0.0)
            if place is None:
                return self._rejection()
            item.seal(key)  # before another put of the key, or a reader, could see it
            write = _Write(digest, item.share(), place, deadline)
            write.call = self._threads.submit(
                functools.partial(self._carry_out, write), deadline, functools.partial(self._ended, write)
            )
            if write.call is None:
                return self._rejection()
            self._under_way[digest] = write
            return WriteUnderWay(write, deadline, joined=False)

    def outcome(self, waiting: WriteUnderWay) -> Status:
        """Waits for a write until the caller's own deadline. Returns its status."""
        write, deadline, joined = waiting
        with self._changed:
            if self._changed.wait_for(lambda: write.ended, max(0.0, deadline - time.monotonic())):
                return write.status
        if not joined and write.call is not None:
            write.call.abandon()
        if write.begun is not None:
            self._health.late("a write", deadline - write.begun, self._usual_ms)
        return Status.TIMEOUT

    def remove(self, digest: str) -> Removal:
        """Takes an object out of the index, and puts its file on the sweeper's list. An object that is being written is not published."""
        with self._changed:
            if self._under_way.pop(digest, None) is not None:
                return Removal.REMOVED
            return self._index.remove(digest, self._sweeper.litter.append)

    def note(self, key: str, value: bytes, deadline: float) -> Status:
        """Begins to leave a small text for people in the folder."""
        call = self._threads.submit(functools.partial(self._note, key, value), deadline)
        return self._rejection() if call is None else Status.OK

    def with_room(self, write: Callable[[], T]) -> T:
        """Calls `write`, and returns its result. If the file system is full, evicts objects and shrinks the budget, then tries again."""
        for _ in range(_EVICTED_FOR_ONE):
            try:
                return write()
            except OSError as error:
                if fault_of(error) is not DiskFault.NO_ROOM or not self._give_up_one(error):
                    raise
        return write()

    def count(self) -> None:
        """Reports how much the tier holds."""
        self._metrics.holds(len(self._index) * self._folder.file_bytes)

    def close(self, seconds: float) -> bool:
        """Finishes the writes that were begun. Returns False if some still run after `seconds`."""
        return self._threads.close(seconds)

    def _rejection(self) -> Status:
        """Returns why no thread took a call: the threads are closed or overloaded."""
        return Status.CLOSED if self._health.state is DiskState.CLOSED else Status.OVERLOADED

    # --- on the writing threads ----------------------------------------------------------------------------------

    def _carry_out(self, write: _Write) -> None:
        write.begun = time.monotonic()
        if self._health.state in (DiskState.OFF, DiskState.READ_ONLY):
            write.status = self._health.refusal
            return
        place = self._make_room(write.digest)
        if isinstance(place, Status):
            write.status = place
            return
        try:
            write.status = self._write(write, place)
        finally:
            place.release()

    def _make_room(self, digest: str) -> Place | Status:
        """Returns a place in the budget, after the files that were evicted for it are deleted; or the reason why there is none."""
        for _ in range(_EVICTED_FOR_ONE):
            room, evicted, place = self._index.reserve(digest)
            self._sweeper.litter.extend(evicted)
            self._metrics.evicted(len(evicted))
            swept = self._sweeper.sweep()
            if place is None:
                return self._refused(room)
            if swept is Status.OK:
                return place
            place.release()
            if swept is not Status.NO_SPACE:
                return swept
        return Status.NO_SPACE

    def _refused(self, room: Room) -> Status:
        if room is Room.PRESENT:
            return Status.OK
        return Status.CLOSED if self._health.state is DiskState.CLOSED else Status.NO_SPACE

    def _write(self, write: _Write, place: Place) -> Status:
        try:
            name = self.with_room(lambda: self._folder.write(write.digest, write.staged.slot.pages))
        except OSError as error:
            self._sweeper.fit()  # the incomplete file may still be there
            return self._health.judge("a write", error, writing=True)
        self._health.worked()
        with self._changed:
            # leaves the list and enters the index in one step, so that a removal finds it in one of them
            published = self._leave(write) and self._index.fill(place, write.digest, name)
        if not published:
            self._sweeper.unlink([name], self._usual_ms / 1000)
        self.count()
        return Status.OK

    def _give_up_one(self, error: OSError) -> bool:
        name = self._index.give_up()
        if name is None:
            return False
        self._metrics.evicted(1)
        self._metrics.shrunk(self._index.capacity * self._folder.file_bytes, str(error))
        self.count()
        with self._health.changed:
            self._health.changed.notify_all()  # the keeper lets the budget grow again
        self._sweeper.litter.append(name)
        self._sweeper.sweep()
        return True

    def _leave(self, write: _Write) -> bool:
        """Takes a write off the list. Returns False if its key was removed meanwhile."""
        if self._under_way.get(write.digest) is not write:
            return False
        del self._under_way[write.digest]
        return True

    def _ended(self, write: _Write) -> None:
        """Runs exactly once, when the call has ended or can never begin."""
        write.staged.release()  # first: a caller that wakes up may need memory at once
        self.slots.give_back(write.place)
        with self._changed:
            self._leave(write)
            write.ended = True
            self._changed.notify_all()

    def _note(self, key: str, value: bytes) -> None:
        try:
            self.with_room(lambda: self._folder.note(key, value))
        except OSError as error:
            self._health.judge("a note", error, writing=True)
