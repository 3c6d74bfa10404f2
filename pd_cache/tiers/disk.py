"""LocalDiskBackend: keeps objects as files, within a byte budget. The files survive a restart.

Reads, writes and deletions run on threads of their own, with bounded queues and deadlines (`transfer.calls`). The index knows which object
lies in which file, without a system call. `disk_files` does what touches the disk.

1. An error of one file leaves the tier on: the file leaves the index, and the next put of its key writes another one. The error's number
   shows that it concerns one file, or a check does, which writes a page to the folder and reads it back. But three errors in a row that a
   dead disk could have caused switch the tier off. Then every call returns at once. Callers can only make the state worse; only the keeper,
   a thread that tries the folder every `retry_s`, makes it better.
2. A read-only folder is still read. If the file system has less room than `capacity`, objects are evicted and the budget shrinks. The
   keeper lets it grow again. A file that cannot be deleted costs the budget a place until it is gone.
3. A disk that hangs holds a bounded share of the memory: usually a quarter of the slots for reads, and half of them for writes.
   No caller waits for a deletion.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from pd_cache.config import DiskTier
from pd_cache.metrics import TierMetrics
from pd_cache.tiers.base import PutOutcome, StorageBackend
from pd_cache.tiers.disk_files import (
    PAGE,
    DiskFault,
    DiskHealth,
    DiskState,
    FolderContents,
    ObjectFolder,
    digest_of,
    fault_of,
    name_of,
    state_of,
)
from pd_cache.tiers.index import Entry, EvictingIndex
from pd_cache.tiers.memory import SELF_SIZED, Damage, Fetched, ObjectMemory, Staged, inspect
from transfer.calls import Call, CallThreads
from transfer.errors import PoolUnavailableError, Status
from transfer.settings import Timeouts

log = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH_BYTES = 64 << 20
_EVICTED_FOR_ONE = 8
"""The most objects that are evicted for one of the same size. If they are not enough, another program takes the space they leave."""


class _Share:
    """Limits how many slots the reads or the writes of a tier may hold. Waiting for one ends early if the tier becomes unusable."""

    def __init__(self, most: int, health: DiskHealth, *, writing: bool) -> None:
        self.taken = 0
        self._most = max(1, most)
        self._health = health
        self._writing = writing

    def take(self, seconds: float) -> bool:
        """Takes one, waiting up to `seconds` for it. Returns whether it did."""
        with self._health.changed:
            self._wait_below(self._most, seconds)
            taken = self.taken < self._most
            self.taken += taken
            return taken

    def give_back(self) -> None:
        """Gives one back, and wakes the threads that wait for one."""
        with self._health.changed:
            self.taken -= 1
            self._health.changed.notify_all()

    def wait_half_free(self, seconds: float) -> bool:
        """Waits until at most half of them are taken. Returns False after `seconds`."""
        with self._health.changed:
            return self._wait_below(self._most // 2 + 1, seconds)

    def _wait_below(self, most: int, seconds: float) -> bool:
        health = self._health
        return health.changed.wait_for(
            lambda: self.taken < most or not (health.writable if self._writing else health.readable),
            min(seconds, threading.TIMEOUT_MAX),
        )


class _Write:
    """One object on its way to the disk."""

    __slots__ = ("begun", "call", "deadline", "digest", "ended", "staged", "status")

    def __init__(self, digest: str, staged: Staged, deadline: float) -> None:
        self.digest = digest
        self.staged = staged
        self.deadline = deadline
        self.call: Call[None] | None = None
        self.begun: float | None = None
        """When a thread began it, by `time.monotonic()`."""
        self.status = Status.TIMEOUT
        self.ended = False


class _Put(NamedTuple):
    """A put under way; see `base.PutOutcome`."""

    backend: LocalDiskBackend
    parts: list[tuple[_Write, bool] | Status]
    """For each key its write, and whether another put has begun it; or the status."""
    deadline: float

    def results(self) -> list[Status]:
        return [
            part if isinstance(part, Status) else self.backend._written(*part, self.deadline) for part in self.parts
        ]


class _OnDisk(NamedTuple):
    """An object that was read, and whose trailer is intact."""

    expected: int
    """The checksum that the payload must have."""
    entry: Entry[str]


class _Read(NamedTuple):
    """A read into `staged` that is under way, or the reason why there is none."""

    call: Call[_OnDisk | str] | None
    staged: Staged | None
    reason: str = ""

    def release(self) -> None:
        """Gives up the read. A call that runs keeps its own reference to the memory until it ends."""
        if self.call is not None:
            self.call.abandon()
        if self.staged is not None:
            self.staged.release()


class LocalDiskBackend(StorageBackend):
    """Keeps objects in one folder, within a byte budget."""

    tier = "disk"

    def __init__(
        self,
        memory: ObjectMemory,
        tier: DiskTier,
        timeouts: Timeouts,
        metrics: TierMetrics,
        *,
        slots: int | None = None,
    ) -> None:
        """Begins to open the folder. Does not wait for it. `slots`: how many of the memory's slots are for transfers (by default all); this
        tier may hold a share of them."""
        self.memory = memory
        self.payload_bytes = memory.payload_bytes
        self.batch_size = max(1, min(memory.pool.slots // 4, _BATCH_BYTES // max(1, self.payload_bytes)))
        file_bytes = -(-memory.object_bytes // PAGE) * PAGE
        self._places = tier.capacity // file_bytes
        """The index's capacity while there is room and every file can be deleted."""
        self.index: EvictingIndex[str] = EvictingIndex(self._places, tier.policy)
        self.folder = ObjectFolder(Path(tier.path), file_bytes, direct=tier.direct, sync=tier.sync)
        self.health = DiskHealth(self.folder, metrics, tier.retry_s)
        self._timeouts = timeouts
        self._metrics = metrics
        self._retry_s = tier.retry_s
        self._ahead = tier.threads + 1
        if not self._places:
            log.warning("tier %s holds nothing: its capacity is smaller than one object", metrics.tier)
        slots = memory.pool.slots if slots is None else slots
        # enough for one reader with everything that it reads ahead, unless memory is short
        self._read_slots = _Share(max(slots // 4, min(self._ahead, slots // 2)), self.health, writing=False)
        self._write_slots = _Share(slots // 2, self.health, writing=True)
        self._under_way: dict[str, _Write] = {}
        self._writes_changed = threading.Condition()
        """Guards `_under_way`; notified when a write ends."""
        self._litter: deque[str] = deque()
        """Files that are still to be deleted. Code that adds one need not sweep: the next write does, before it uses any room."""
        self._sweeping = threading.Lock()
        # every call except notes holds a slot
        limit = memory.pool.slots + 256
        self._reads = CallThreads(f"{metrics.tier}-read", tier.threads, limit=limit)
        self._writes = CallThreads(f"{metrics.tier}-write", tier.threads, limit=limit)
        # its own thread, so that deletions go on even if late calls hold all other threads
        self._deletions = CallThreads(f"{metrics.tier}-delete", 1, limit=2)
        self._keeper = threading.Thread(target=self._keep, name=f"{metrics.tier}-keeper", daemon=True)
        self._keeper.start()

    @property
    def available(self) -> bool:
        return self.health.readable

    def wait_available(self, timeout: float) -> None:
        health = self.health
        with health.changed:
            health.changed.wait_for(lambda: health.state is not DiskState.OPENING, min(timeout, threading.TIMEOUT_MAX))
            if not health.readable:
                raise PoolUnavailableError(f"{self.folder.root} is {health.state.value}: {health.trouble}")

    def batched_contains(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        if not self.available:
            return [self.health.refusal] * len(keys)
        found = self.index.contains([digest_of(key) for key in keys])
        return [Status.OK if there else Status.MISSING for there in found]

    def batched_get(
        self, keys: Sequence[str], *, payload_bytes: int | None = None, timeout: float | None = None
    ) -> Generator[Fetched, None, None]:
        size = self.memory.read_size(payload_bytes)
        longest = self._timeouts.get_ms / 1000
        deadline = None if timeout is None else time.monotonic() + timeout
        ahead: deque[_Read] = deque()
        started = 0
        refusal = ""
        try:
            while started < len(keys) or ahead:
                while started < len(keys) and len(ahead) < self._ahead:
                    seconds = longest if deadline is None else min(longest, max(0.0, deadline - time.monotonic()))
                    # only a reader that holds no memory waits for some, so two readers never wait for each other
                    read = self._start_read(keys[started], size, seconds, 0.0 if ahead else seconds)
                    if isinstance(read, str):
                        refusal = read
                        break
                    started += 1
                    ahead.append(read)
                if not ahead:
                    for _ in keys[started:]:
                        yield Fetched(None, refusal)
                    return
                yield self._finish(keys[started - len(ahead)], size, ahead.popleft())
        finally:
            for left in ahead:
                left.release()

    def stage(self, *, payload_bytes: int | None = None, timeout: float | None = None) -> Staged | None:
        deadline = time.monotonic() + self._put_seconds(timeout)
        if not self.wait_room(timeout):
            return None
        return self.memory.stage(max(0.0, deadline - time.monotonic()), payload_bytes=payload_bytes)

    def wait_room(self, timeout: float | None = None) -> bool:
        return self._write_slots.wait_half_free(self._put_seconds(timeout))

    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        deadline = time.monotonic() + self._put_seconds(timeout)
        try:
            parts = [self._begin(key, digest_of(key), item, deadline) for key, item in zip(keys, items, strict=True)]
        finally:
            for item in items:
                item.release()
        return _Put(self, parts, deadline)

    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None, force: bool = False) -> list[Status]:
        if self.health.state not in (DiskState.ON, DiskState.FULL):
            return [self.health.refusal] * len(keys)
        return [self._remove(digest_of(key)) for key in keys]

    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        if not self.health.writable:
            return self.health.refusal
        call = self._writes.submit(
            functools.partial(self._note, key, value), time.monotonic() + self._put_seconds(None)
        )
        return self._rejection() if call is None else Status.OK

    def close(self) -> None:
        well = self.health.writable
        if not self.health.close():
            return
        end = time.monotonic() + self._timeouts.close_ms / 1000
        drained = True
        for threads in (self._writes, self._reads, self._deletions):
            drained &= threads.close(max(0.0, end - time.monotonic()))
        self._keeper.join(max(0.0, end - time.monotonic()))
        drained &= not self._keeper.is_alive()
        self.index.close()
        self.memory.close()
        if drained:
            if well:
                self._sweep()
            self.folder.close()
        else:
            log.warning(
                "tier %s: calls to the disk outlived close(); this process keeps its folder", self._metrics.tier
            )

    def _put_seconds(self, timeout: float | None) -> float:
        return self._timeouts.put_ms / 1000 if timeout is None else timeout

    def _rejection(self) -> Status:
        """Returns why no thread took a call: the threads are closed or overloaded."""
        return Status.CLOSED if self.health.state is DiskState.CLOSED else Status.OVERLOADED

    def _count(self) -> None:
        """Reports how much the tier holds."""
        self._metrics.holds(len(self.index) * self.folder.file_bytes)

    # --- reading -------------------------------------------------------------------------------------------------

    def _start_read(self, key: str, size: int, seconds: float, patience: float) -> _Read | str:
        """Begins to read a key. Returns the reason as text if no memory came free within `patience` seconds."""
        if not self.available:
            return _Read(None, None, self.health.refusal.value)
        digest = digest_of(key)
        if not self.index.contains([digest])[0]:
            return _Read(None, None, Status.MISSING.value)
        latest = time.monotonic() + patience
        if not self._read_slots.take(patience):
            return self._rejection().value
        staged: Staged | None = None
        try:
            room = self.memory.payload_bytes if size == SELF_SIZED else size
            staged = self.memory.stage(max(0.0, latest - time.monotonic()), payload_bytes=room)
        finally:
            if staged is None:
                self._read_slots.give_back()
        if staged is None:
            return self.memory.refusal
        target = staged.share()
        call = self._reads.submit(
            functools.partial(self._read, key, digest, target, size),
            time.monotonic() + seconds,
            functools.partial(self._read_ended, target),
        )
        return _Read(call, staged, "" if call is not None else self._rejection().value)

    def _read_ended(self, target: Staged) -> None:
        """Runs exactly once, when a read has ended or can never begin."""
        target.release()
        self._read_slots.give_back()

    def _read(self, key: str, digest: str, target: Staged, size: int) -> _OnDisk | str:
        """Reads an object, on a reading thread. Returns what it found, or the reason why that is of no use."""
        if self.health.state is DiskState.OFF:
            return Status.TIER_OFF.value
        entry = self.index.pin(digest)
        if entry is None:  # evicted meanwhile
            return Status.MISSING.value
        try:
            return self._read_file(key, entry, target, size)
        finally:
            if self.index.unpin(entry) and self.health.state is not DiskState.CLOSED:
                self._litter.append(entry.resource)
                self._sweep_soon()

    def _read_file(self, key: str, entry: Entry[str], target: Staged, size: int) -> _OnDisk | str:
        if entry.damaged:
            return self._discard(entry, Damage.CORRUPT)
        try:
            nbytes = self.folder.read(entry.resource, target.slot.pages)
        except OSError as error:
            return self._unread(entry, error)
        self.health.worked()
        whole = nbytes == self.folder.file_bytes
        found = inspect(key, target.slot.view[: target.object_bytes if whole else nbytes], size)
        return self._discard(entry, found) if isinstance(found, Damage) else _OnDisk(found, entry)

    def _unread(self, entry: Entry[str], error: OSError) -> str:
        """Returns why a file was not read. The index forgets the file if the error concerns only this file."""
        with contextlib.suppress(OSError):
            if isinstance(error, FileNotFoundError) and self.folder.is_held:
                self.index.discard(entry)
                self._count()
                return Status.MISSING.value
        status = self.health.judge("a read", error, writing=False)
        return self._discard(entry, Damage.UNREADABLE) if status is Status.INTERNAL else status.value

    def _discard(self, entry: Entry[str], damage: Damage) -> str:
        """Forgets a useless file, so that the next put of its key writes it again. Returns the damage as the reason of a miss."""
        self.index.discard(entry)
        self._count()
        self._metrics.healed()
        return damage.value

    def _finish(self, key: str, size: int, read: _Read) -> Fetched:
        """Waits for a read. Returns its object, or the reason why there is none."""
        found: _OnDisk | str = read.reason
        if read.call is not None:
            try:
                found = read.call.outcome(Status.TIMEOUT.value)
            except BaseException:
                read.release()
                raise
            if found == Status.TIMEOUT.value:
                self.health.late("a read", read.call.had_s, self._timeouts.get_ms)
        if read.staged is None or isinstance(found, str):
            read.release()
            return Fetched(None, str(found))
        read.staged.cut(size)
        read.staged.sealed_for = key
        fetched, entry = Fetched(read.staged, expected=found.expected), found.entry
        fetched.tier = self.tier

        def checked(one: Fetched) -> None:  # on the caller's thread, so the next read of the entry discards it
            entry.failures = entry.failures + 1 if one.reason else 0

        fetched.when_checked(checked)
        return fetched

    # --- writing: two puts of one key are one write --------------------------------------------------------------

    def _begin(self, key: str, digest: str, item: Staged, deadline: float) -> tuple[_Write, bool] | Status:
        """Begins to write an object, or joins the write of the same key. A key names its content, so both have the same bytes."""
        if not self.health.writable:
            return self.health.refusal
        with self._writes_changed:
            write = self._under_way.get(digest)
            if write is not None and time.monotonic() < write.deadline:
                return write, True
            if self.index.contains([digest])[0]:
                return Status.OK
            item.seal(key)  # before another put of the key, or a reader, could see it
            if not self._write_slots.take(0.0):
                return self._rejection()
            write = _Write(digest, item.share(), deadline)
            write.call = self._writes.submit(
                functools.partial(self._carry_out, write), deadline, functools.partial(self._write_ended, write)
            )
            if write.call is None:
                return self._rejection()
            self._under_way[digest] = write
            return write, False

    def _written(self, write: _Write, joined: bool, deadline: float) -> Status:
        """Waits for a write until the caller's own deadline. Returns its status."""
        with self._writes_changed:
            seconds = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            if self._writes_changed.wait_for(lambda: write.ended, seconds):
                return write.status
        if not joined and write.call is not None:
            write.call.abandon()
        if write.begun is not None:
            self.health.late("a write", deadline - write.begun, self._timeouts.put_ms)
        return Status.TIMEOUT

    def _carry_out(self, write: _Write) -> None:
        """Writes and publishes an object, on a writing thread."""
        write.begun = time.monotonic()
        if self.health.state in (DiskState.OFF, DiskState.READ_ONLY):
            write.status = self.health.refusal
            return
        refusal = self._make_room(write.digest)
        write.status = self._write(write) if refusal is None else refusal

    def _make_room(self, digest: str) -> Status | None:
        """Reserves a place in the budget, and deletes the files that were evicted for it. Returns None, or the reason why there is no place."""
        for _ in range(_EVICTED_FOR_ONE):
            refusal, evicted = self.index.reserve(digest)
            self._litter.extend(evicted)
            self._metrics.evicted(len(evicted))
            swept = self._sweep()
            if refusal is not None:
                return refusal
            if swept is Status.OK:
                return None
            self.index.unreserve()
            if swept is not Status.NO_SPACE:
                return swept
        return Status.NO_SPACE

    def _write(self, write: _Write) -> Status:
        """Writes an object, and puts it into the reserved place."""
        name = ""
        try:
            name = self._with_room(lambda: self.folder.write(write.digest, write.staged.slot.pages))
        except OSError as error:
            self._fit()  # the incomplete file may still be there
            return self.health.judge("a write", error, writing=True)
        finally:
            if not name:
                self.index.unreserve()
        self.health.worked()
        with self._writes_changed:
            # leaves the list and enters the index in one step, so that a removal finds it in one of them
            if self._under_way.get(write.digest) is write:
                del self._under_way[write.digest]
                published = self.index.fill(write.digest, name)
            else:  # removed meanwhile
                published = False
                self.index.unreserve()
        if not published:
            self._litter.append(name)
            self._sweep_soon()
        self._count()
        return Status.OK

    def _with_room(self, write: Callable[[], T]) -> T:
        """Calls `write`, and returns its result. If the file system is full, evicts objects and shrinks the budget, then tries again."""
        for _ in range(_EVICTED_FOR_ONE):
            try:
                return write()
            except OSError as error:
                if fault_of(error) is not DiskFault.NO_ROOM or not self._give_up_one(error):
                    raise
        return write()

    def _give_up_one(self, error: OSError) -> bool:
        name = self.index.give_up()
        if name is None:
            return False
        self._metrics.evicted(1)
        self._metrics.shrunk(self.index.capacity * self.folder.file_bytes, str(error))
        self._count()
        self._wake_keeper()
        self._litter.append(name)
        self._sweep()
        return True

    def _write_ended(self, write: _Write) -> None:
        """Runs exactly once, when the call has ended or can never begin."""
        write.staged.release()  # first: a caller that wakes up may need memory at once
        self._write_slots.give_back()
        with self._writes_changed:
            if self._under_way.get(write.digest) is write:
                del self._under_way[write.digest]
            write.ended = True
            self._writes_changed.notify_all()

    def _note(self, key: str, value: bytes) -> None:
        try:
            self._with_room(lambda: self.folder.note(key, value))
        except OSError as error:
            self.health.judge("a note", error, writing=True)

    # --- deleting ------------------------------------------------------------------------------------------------

    def _remove(self, digest: str) -> Status:
        with self._writes_changed:
            # an object that is being written is not published
            if self._under_way.pop(digest, None) is None:
                removed = self.index.remove(digest)
                if isinstance(removed, Status):
                    return removed
                self._litter.append(removed)
        self._sweep_soon()
        self._count()
        return Status.OK

    def _sweep_soon(self) -> None:
        """Sweeps on another thread, so that a disk that hangs does not hold up callers that read, put or remove."""
        # refused if another sweep is already queued; that one finds the same files
        self._deletions.submit(self._sweep, time.monotonic() + self._put_seconds(None))

    def _sweep(self) -> Status:
        """Deletes the litter. Returns NO_SPACE if some files could not be deleted and keep their places.

        Returns another status if the disk is in trouble; the files then stay litter.
        """
        with self._sweeping:
            some_stay = False
            while self._litter:
                deleted = self._delete(self._litter[0])
                if deleted not in (Status.OK, Status.NO_SPACE):
                    return deleted
                self._litter.popleft()
                some_stay |= deleted is Status.NO_SPACE
            return Status.NO_SPACE if some_stay else Status.OK

    def _delete(self, name: str) -> Status:
        try:
            self.folder.unlink(name)
        except OSError as error:
            self._fit()
            if fault_of(error) is DiskFault.OBJECT:
                self._metrics.spoiled("a deletion", name_of(error), str(error))
            elif (status := self.health.judge("a deletion", error, writing=True)) is not Status.INTERNAL:
                return status
            return Status.NO_SPACE if self.folder.is_left(name) else Status.OK
        return Status.OK

    def _fit(self) -> None:
        """Takes a place from the budget for each file that could not be deleted. The keeper tries again to delete it."""
        most = self._places - self.folder.left
        if self.index.capacity > most:
            self.index.shrink(most)
            self._wake_keeper()

    # --- the keeper ----------------------------------------------------------------------------------------------

    def _wake_keeper(self) -> None:
        with self.health.changed:
            self.health.changed.notify_all()

    def _keep(self) -> None:
        """The keeper thread: opens the folder, tries it again while it is switched off, and lets the budget grow again."""
        health = self.health
        while True:
            try:
                self._tend()
            except Exception as error:  # nothing but close() ends this thread
                log.exception("tier %s: the keeper of its folder failed; it goes on", self._metrics.tier)
                health.settle(DiskState.OFF, f"opening the folder failed: {error!r}", Status.INTERNAL.value)
            with health.changed:
                health.changed.wait_for(lambda: not health.writable or self._is_small)
                if health.changed.wait_for(lambda: health.state is DiskState.CLOSED, self._retry_s):
                    return

    @property
    def _is_small(self) -> bool:
        """Whether the budget is smaller than `capacity`."""
        return self.index.capacity < self._places

    def _tend(self) -> None:
        if self.health.writable:
            try:
                self._grow()
            except OSError as error:
                self.health.judge("looking for room", error, writing=True)
        else:
            opened = False
            try:
                if not self.folder.is_held:
                    self.index.clear()
                    self._take_in(self.folder.open())
                    self._sweep()
                opened = True
                self._with_room(self.folder.probe)
                self._grow()  # before anybody writes: a write that finds a small budget evicts what still has room
            except OSError as error:
                state = state_of(error) if opened else DiskState.OFF
                self.health.settle(state, f"opening the folder failed: {error}", name_of(error))
                return
            self.health.settle(DiskState.ON)
        self._sweep()

    def _grow(self) -> None:
        """Tries again to delete the files that are left, and lets a budget that is too small grow as far as the file system has room.

        Raises OSError if the room cannot be found out.
        """
        if self._is_small:
            try:
                self.folder.unlink_left()
                self.index.grow(self.folder.room(), self._places - self.folder.left)
            finally:
                self._metrics.budget(self.index.capacity * self.folder.file_bytes)

    def _take_in(self, found: FolderContents) -> None:
        """Fills the index with the objects that the folder holds, oldest first."""
        for digest, name in found.objects:
            refusal, evicted = self.index.reserve(digest)
            self._litter.extend(evicted)
            if refusal is None:
                self.index.fill(digest, name)
            elif refusal is not Status.OK:
                self._litter.append(name)
        self._metrics.ignored("foreign", found.foreign)
        self._metrics.ignored("torn", found.torn)
        self._fit()
        self._count()
