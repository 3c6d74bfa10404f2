"""DiskWriter: puts objects into the folder of a disk tier. Two puts of one key are one write.

The caller seals an object and hands it over; it holds nothing but memory and a place among the writes. All else happens on the writing
threads, which no user interrupts: an object is given room in the index, what it displaces is deleted, it is written and published.
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
"""At most this many objects make room for one of the same size: if that is not enough, another program takes the space they leave."""


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
        """When a thread took it up."""
        self.status = Status.TIMEOUT
        self.ended = False


class WriteUnderWay(NamedTuple):
    """What one caller waits for: a write that it, or another caller, has begun."""

    write: _Write
    deadline: float
    """This caller's own."""
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
        """`slots`: how many slots writes may hold. `limit`: how many calls may be queued. `usual_ms`: the time that a write usually has."""
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
        """Begin to write an object, or join the write of the same key; a key names its content, so those are the same bytes."""
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
        """Waits for a write until the caller's own deadline."""
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
        """Take an object out of the index, and put its file on the sweeper's list. One that is being written is not published."""
        with self._changed:
            if self._under_way.pop(digest, None) is not None:
                return Removal.REMOVED
            return self._index.remove(digest, self._sweeper.litter.append)

    def note(self, key: str, value: bytes, deadline: float) -> Status:
        """Leave a small text for people in the folder."""
        call = self._threads.submit(functools.partial(self._note, key, value), deadline)
        return self._rejection() if call is None else Status.OK

    def with_room(self, write: Callable[[], T]) -> T:
        """Carry out a write. If the file system is full, the oldest objects make room for it, and their places in the budget go."""
        for _ in range(_EVICTED_FOR_ONE):
            try:
                return write()
            except OSError as error:
                if fault_of(error) is not DiskFault.NO_ROOM or not self._give_up_one(error):
                    raise
        return write()

    def count(self) -> None:
        """Report how much the tier holds."""
        self._metrics.holds(len(self._index) * self._folder.file_bytes)

    def close(self, seconds: float) -> bool:
        """Carry out what was begun. Returns False if some of it still runs after that time."""
        return self._threads.close(seconds)

    def _rejection(self) -> Status:
        """The reason why no thread took a call: the threads are closed, or overloaded."""
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
        """Returns a place in the budget, with nothing of ours left on the disk that was to make room for it."""
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
            self._sweeper.fit()  # what was begun may not have been deleted
            return self._health.judge("a write", error, writing=True)
        self._health.worked()
        with self._changed:
            # leaves the list in the same step in which it enters the index, so that a removal finds it in one of them
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
        """Take a write off the list. Returns False if its key was removed meanwhile."""
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
