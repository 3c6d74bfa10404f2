"""LocalDiskBackend: keeps objects as files, within a byte budget. The files survive a restart.

Reads and writes run on their own threads, with bounded queues and deadlines (`transfer.calls`). The index knows which object lies in
which file, without a system call.

1. A file that cannot be read leaves the index, and the next put of its key writes another file. Only trouble of the folder itself
   switches the tier off (`disk_health.py`). Every call then returns at once, until the keeper finds that the folder works again.
2. If the file system has less room than `capacity`, objects are evicted and the budget shrinks. It grows again when there is room.
   A file that cannot be deleted keeps its place in the budget (`disk_sweeper.py`).
3. A disk that hangs holds a bounded share of the memory: usually a quarter of the slots for reads, and half of them for writes.
   No caller waits for a deletion.
4. The tier's own threads take pins and places in the budget; no user interrupts these threads. A caller holds only memory and a place
   among the reads or writes (`places.py`). Both come back when the caller forgets them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from pd_cache.backends.base import Fetched, PutOutcome, Staged, StorageBackend
from pd_cache.backends.disk_health import DiskHealth, DiskState, state_of
from pd_cache.backends.disk_sweeper import DiskSweeper
from pd_cache.backends.disk_writer import DiskWriter, WriteUnderWay
from pd_cache.backends.eviction import make_policy
from pd_cache.backends.faults import name_of
from pd_cache.backends.folder import PAGE, FolderContents, ObjectFolder, digest_of
from pd_cache.backends.index import Entry, EvictingIndex, Pin, Removal, Room
from pd_cache.backends.objects import SELF_SIZED, Damage, inspect
from pd_cache.backends.places import Place, Share
from pd_cache.backends.slots import FetchedObject, ObjectMemory, StagedObject
from pd_cache.config import EvictionName
from pd_cache.metrics import TierMetrics
from transfer.calls import Call, CallThreads
from transfer.errors import PoolUnavailableError, Status
from transfer.settings import Timeouts

log = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20


class _Writes:
    """A put under way; see `base.PutOutcome`."""

    def __init__(self, writer: DiskWriter, parts: list[Status | WriteUnderWay]) -> None:
        self._writer = writer
        self._parts = parts

    def results(self) -> list[Status]:
        return [part if isinstance(part, Status) else self._writer.outcome(part) for part in self._parts]


class _OnDisk(NamedTuple):
    """An object that was read, and whose trailer is intact."""

    expected: int
    """The checksum that the payload must have."""
    entry: Entry[str]
    size: int
    """The size that its payload should have, as its reader gave it."""


class _Read(NamedTuple):
    """A read into `staged` that is under way, or the reason why there is none."""

    call: Call[_OnDisk | str] | None
    staged: StagedObject | None
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
        path: Path,
        capacity: int,
        *,
        policy: EvictionName,
        direct: bool,
        sync: bool,
        threads: int,
        retry_s: float,
        timeouts: Timeouts,
        metrics: TierMetrics,
        slots: int | None = None,
    ) -> None:
        """Begins to open the folder. Does not wait for it.

        `capacity`: the bytes of all files. `threads`: for reads, and as many again for writes. `slots`: how many of the memory's slots
        are for transfers (by default all); this tier may hold a share of them.
        """
        self.memory = memory
        self.payload_bytes = memory.payload_bytes
        self.batch_size = max(1, min(memory.pool.slots // 4, _BATCH_BYTES // max(1, self.payload_bytes)))
        file_bytes = -(-memory.object_bytes // PAGE) * PAGE
        self._places = capacity // file_bytes
        self.index: EvictingIndex[str] = EvictingIndex(self._places, make_policy(policy, self._places))
        self.folder = ObjectFolder(path, file_bytes, direct=direct, sync=sync)
        self._timeouts = timeouts
        self._metrics = metrics
        self._retry_s = retry_s
        self._ahead = threads + 1
        self.health = DiskHealth(self.folder, metrics, retry_s)
        if not self._places:
            log.warning("tier %s holds nothing: its capacity is smaller than one object", metrics.tier)
        slots = memory.pool.slots if slots is None else slots
        # enough for one reader with everything that it reads ahead, unless memory is short
        self._read_slots = Share(
            max(slots // 4, min(self._ahead, slots // 2)), self.health.changed, lambda: self.health.readable
        )
        # every call except notes holds a slot
        limit = memory.pool.slots + 256
        self._reads = CallThreads(f"{metrics.tier}-read", threads, limit=limit)
        self.sweeper = DiskSweeper(self.folder, self.index, self._places, self.health, metrics)
        self.writer = DiskWriter(
            self.folder,
            self.index,
            self.sweeper,
            self.health,
            metrics,
            slots=slots // 2,
            threads=threads,
            limit=limit,
            usual_ms=timeouts.put_ms,
        )
        self._keeper = threading.Thread(target=self._keep, name=f"{metrics.tier}-keeper", daemon=True)
        self._keeper.start()

    @property
    def available(self) -> bool:
        return self.health.readable

    def wait_available(self, timeout: float) -> None:
        health = self.health
        with health.changed:
            health.changed.wait_for(lambda: health.state is not DiskState.OPENING, timeout)
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
                        yield FetchedObject(None, refusal)
                    return
                yield self._finish(keys[started - len(ahead)], ahead.popleft())
        finally:
            for left in ahead:
                left.release()

    def stage(self, *, payload_bytes: int | None = None, timeout: float | None = None) -> Staged | None:
        deadline = time.monotonic() + self._put_seconds(timeout)
        if not self.wait_room(timeout):
            return None
        return self.memory.stage(max(0.0, deadline - time.monotonic()), payload_bytes=payload_bytes)

    def wait_room(self, timeout: float | None = None) -> bool:
        return self.writer.slots.wait_half_free(self._put_seconds(timeout))

    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        seconds = self._put_seconds(timeout)
        deadline = time.monotonic() + seconds
        return _Writes(self.writer, [self._put(key, item, deadline) for key, item in zip(keys, items, strict=True)])

    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None, force: bool = False) -> list[Status]:
        if self.health.state not in (DiskState.ON, DiskState.FULL):
            return [self.health.refusal] * len(keys)
        return [self._remove(digest_of(key)) for key in keys]

    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        if not self.health.writable:
            return self.health.refusal
        return self.writer.note(key, value, time.monotonic() + self._put_seconds(None))

    def close(self) -> None:
        well = self.health.writable
        if not self.health.close():
            return
        end = time.monotonic() + self._timeouts.close_ms / 1000
        drained = True
        for threads in (self.writer, self._reads, self.sweeper):
            drained &= threads.close(max(0.0, end - time.monotonic()))
        self._keeper.join(max(0.0, end - time.monotonic()))
        drained &= not self._keeper.is_alive()
        self.index.close()
        self.memory.close()
        if drained:
            if well:
                self.sweeper.sweep()
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

    def _put(self, key: str, item: StagedObject, deadline: float) -> Status | WriteUnderWay:
        try:
            return self.writer.begin(key, digest_of(key), item, deadline)
        finally:
            item.release()

    def _remove(self, digest: str) -> Status:
        removal = self.writer.remove(digest)
        if removal is Removal.REMOVED:
            self.sweeper.sweep_soon(self._put_seconds(None))
            self.writer.count()
        return {Removal.REMOVED: Status.OK, Removal.MISSING: Status.MISSING, Removal.PINNED: Status.BUSY}[removal]

    # --- reading -------------------------------------------------------------------------------------------------

    def _start_read(self, key: str, size: int, seconds: float, patience: float) -> _Read | str:
        """Begins to read a key. Returns the reason as text if no memory came free within `patience` seconds."""
        if not self.available:
            return _Read(None, None, self.health.refusal.value)
        digest = digest_of(key)
        if not self.index.contains([digest])[0]:
            return _Read(None, None, Status.MISSING.value)
        latest = time.monotonic() + patience
        place = self._read_slots.take(patience)
        if place is None:
            return self._rejection().value
        room = self.memory.payload_bytes if size == SELF_SIZED else size
        staged = self.memory.stage(max(0.0, latest - time.monotonic()), payload_bytes=room)
        if staged is None:
            self._read_slots.give_back(place)
            return self.memory.refusal
        target = staged.share()
        call = self._reads.submit(
            functools.partial(self._read, key, digest, target, size),
            time.monotonic() + seconds,
            functools.partial(self._ended, target, place),
        )
        return _Read(call, staged, "" if call is not None else self._rejection().value)

    def _ended(self, target: StagedObject, place: Place) -> None:
        """Runs exactly once, when a read has ended or can never begin."""
        target.release()
        self._read_slots.give_back(place)

    def _read(self, key: str, digest: str, target: StagedObject, size: int) -> _OnDisk | str:
        """Reads an object, on a reading thread. Returns what it found, or the reason why that is of no use."""
        if self.health.state is DiskState.OFF:
            return Status.TIER_OFF.value
        pin = self.index.pin(digest)
        if pin is None:  # evicted meanwhile
            return Status.MISSING.value
        try:
            return self._read_file(key, pin, target, size)
        finally:
            if self.index.unpin(pin) and self.health.state is not DiskState.CLOSED:
                self.sweeper.unlink([pin.entry.resource], self._put_seconds(None))

    def _read_file(self, key: str, pin: Pin[str], target: StagedObject, size: int) -> _OnDisk | str:
        if pin.entry.damaged:
            self._discard(pin)
            self._metrics.healed()
            return Damage.CORRUPT.value
        try:
            nbytes = self.folder.read(pin.entry.resource, target.slot.pages)
        except OSError as error:
            return self._unread(pin, error)
        self.health.worked()
        whole = nbytes == self.folder.file_bytes
        found = inspect(key, target.slot.view[: target.object_bytes if whole else nbytes], size)
        if not isinstance(found, Damage):
            return _OnDisk(found, pin.entry, size)
        self._discard(pin)
        self._metrics.healed()
        return found.value

    def _unread(self, pin: Pin[str], error: OSError) -> str:
        """Returns why a file was not read. The index forgets the file if the error concerns only this file."""
        with contextlib.suppress(OSError):
            if isinstance(error, FileNotFoundError) and self.folder.is_held:
                self._discard(pin)
                return Status.MISSING.value
        status = self.health.judge("a read", error, writing=False)
        if status is Status.INTERNAL:
            self._discard(pin)
            self._metrics.healed()
            return Damage.UNREADABLE.value
        return str(status.value)

    def _finish(self, key: str, read: _Read) -> Fetched:
        """Waits for a read. Returns its object, or the reason why there is none."""
        found: _OnDisk | str = read.reason
        if read.call is not None:
            found = read.call.outcome(Status.TIMEOUT.value)
            if found == Status.TIMEOUT.value:
                self.health.late("a read", read.call.had_s, self._timeouts.get_ms)
        if read.staged is None or isinstance(found, str):
            read.release()
            return FetchedObject(None, str(found))
        read.staged.cut(found.size)
        read.staged.sealed_for = key
        fetched, entry = FetchedObject(read.staged, expected=found.expected), found.entry
        fetched.tier = self.tier
        fetched.when_checked(lambda one: self._checked(entry, one))
        return fetched

    def _checked(self, entry: Entry[str], fetched: FetchedObject) -> None:
        """Runs on the caller's thread, so the next read of the entry discards it."""
        entry.failures = entry.failures + 1 if fetched.reason else 0

    def _discard(self, pin: Pin[str]) -> None:
        """Forgets a useless file, so that the next put of its key writes it again."""
        self.index.discard(pin.entry)
        self.writer.count()

    # --- health --------------------------------------------------------------------------------------------------

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
        if not self.health.writable:
            opened = False
            try:
                if not self.folder.is_held:
                    self.index.clear()
                    self._take_in(self.folder.open())
                    self.sweeper.sweep()
                opened = True
                self.writer.with_room(self.folder.probe)
                self._grow()  # before anybody writes: a write that finds a small budget evicts what still has room
            except OSError as error:
                state = state_of(error) if opened else DiskState.OFF
                self.health.settle(state, f"opening the folder failed: {error}", name_of(error))
                return
            self.health.settle(DiskState.ON)
        else:
            try:
                self._grow()
            except OSError as error:
                self.health.judge("looking for room", error, writing=True)
        self.sweeper.sweep()

    def _grow(self) -> None:
        """Lets a budget that is too small grow. Raises OSError if the room cannot be found out."""
        if self._is_small:
            try:
                self.sweeper.grow()
            finally:
                self._metrics.budget(self.index.capacity * self.folder.file_bytes)

    def _take_in(self, found: FolderContents) -> None:
        """Fills the index with the objects that the folder holds, oldest first."""
        for digest, name in found.objects:
            room, evicted, place = self.index.reserve(digest)
            self.sweeper.litter.extend(evicted if room is not Room.NONE else (*evicted, name))
            if place is not None:
                self.index.fill(place, digest, name)
        self._metrics.ignored("foreign", found.foreign)
        self._metrics.ignored("torn", found.torn)
        self.sweeper.fit()
        self.writer.count()
