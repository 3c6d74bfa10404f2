"""LocalDiskBackend: objects as files, with a byte budget that survives a restart.

Reads and writes run on threads of their own, bounded and with deadlines (`transfer.calls`). The index knows which object lies in which
file, without a system call.

1. A file that cannot be read leaves the index, and the next put of its key writes another file. Only trouble of the folder itself
   switches the tier off (`disk_health.py`). Every call then returns at once, until the keeper finds that the folder works again.
2. The budget is what fits: if the file system has less room than `capacity`, the oldest objects make room, and the budget grows
   again when there is room.
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

from pd_cache.backends.base import Fetched, PutOutcome, Staged, StorageBackend
from pd_cache.backends.disk_health import DiskHealth, DiskState, state_of
from pd_cache.backends.eviction import PolicyName, make_policy
from pd_cache.backends.faults import Fault, fault_of, name_of
from pd_cache.backends.folder import PAGE, Found, ObjectFolder, digest_of
from pd_cache.backends.index import Entry, EvictingIndex, Removal, Room
from pd_cache.backends.memory import FetchedObject, ObjectMemory, StagedObject
from pd_cache.backends.objects import Damage, inspect
from pd_cache.metrics import TierMetrics
from transfer.calls import Call, CallThreads
from transfer.errors import PoolUnavailableError, Status
from transfer.locks import Condition
from transfer.settings import Timeouts

log = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH_BYTES = 64 << 20
_FAIR = 0.9
"""The part of that time which a call must have had."""
_FAIR_S = 2.0
"""A disk that has not answered within this hangs."""
_EVICTED_FOR_ONE = 8
"""At most this many objects make room for one of the same size: if that is not enough, another program takes the space they leave."""


class Share:
    """Limits how many slots the calls of one kind may hold. Waiting for a place ends early if the tier becomes unusable."""

    def __init__(self, most: int, changed: Condition, useful: Callable[[], bool]) -> None:
        self._most = max(1, most)
        self._taken = 0
        self._changed = changed
        self._useful = useful

    def take(self, seconds: float) -> bool:
        """Take a place, after waiting for one if need be. Returns False if none came free. Each place is given back once."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken < self._most or not self._useful(), seconds)
            taken = self._taken < self._most
            self._taken += taken
            return taken

    def give_back(self) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()

    def wait_half_free(self, seconds: float) -> bool:
        """Wait until at most half of the places are taken; returns False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._taken * 2 <= self._most or not self._useful(), seconds)


class _Write:
    """One object on its way to the disk."""

    __slots__ = ("call", "digest", "evicted", "settled", "staged")

    def __init__(self, digest: str, evicted: list[str]) -> None:
        self.digest = digest
        self.staged: StagedObject | None = None
        self.evicted = evicted
        """Files that made room for it and are still there."""
        self.call: Call[Status] | None = None
        self.settled = False
        """Whether its reservation has been used or given back."""


class _Writes:
    """What became of a put; see `base.PutOutcome`."""

    def __init__(self, backend: LocalDiskBackend, parts: list[Status | Call[Status]]) -> None:
        self._backend = backend
        self._parts = parts

    def results(self) -> list[Status]:
        return [part if isinstance(part, Status) else self._backend._outcome(part) for part in self._parts]


class _Read(NamedTuple):
    """A key that was asked for: a read into `staged` that is under way, or the reason why there is no read."""

    call: Call[str] | None
    staged: StagedObject | None
    reason: str = ""

    def release(self) -> None:
        """To be called when nobody waits for it any more. A call that runs keeps a reference of its own until it ends."""
        if self.call is not None:
            self.call.abandon()
        if self.staged is not None:
            self.staged.release()


class LocalDiskBackend(StorageBackend):
    """Keeps objects in one folder, within a byte budget."""

    def __init__(
        self,
        memory: ObjectMemory,
        path: Path,
        capacity: int,
        *,
        policy: PolicyName,
        direct: bool,
        sync: bool,
        threads: int,
        retry_s: float,
        timeouts: Timeouts,
        metrics: TierMetrics,
        slots: int | None = None,
    ) -> None:
        """Begin to open the folder; does not wait for it. `capacity`: bytes of files. `threads`: for reads, and as many for writes.

        `slots`: how many of the memory's slots are for transfers; this tier may hold a share of those. By default all of them.
        """
        self.memory = memory
        self.payload_bytes = memory.payload_bytes
        self.batch_size = max(1, min(memory.pool.slots // 4, _BATCH_BYTES // max(1, self.payload_bytes)))
        self._file_bytes = -(-memory.object_bytes // PAGE) * PAGE
        self._places = capacity // self._file_bytes
        self.index: EvictingIndex[str] = EvictingIndex(self._places, make_policy(policy, self._places))
        self.folder = ObjectFolder(path, self._file_bytes, direct=direct, sync=sync)
        self._timeouts = timeouts
        self._metrics = metrics
        self._retry_s = retry_s
        self._ahead = threads + 1
        self._lock = threading.RLock()
        self._writing: dict[str, _Write] = {}
        self._stuck: list[str] = []
        """Files that could not be deleted; each keeps its place in the budget."""
        self._litter: deque[str] = deque()
        """Files that are still to be deleted."""
        self._sweep_queued = False
        self.health = DiskHealth(self.folder, metrics, retry_s)
        if not self._places:
            log.warning("tier %s holds nothing: its capacity is less than one object", metrics.tier)
        slots = memory.pool.slots if slots is None else slots
        # one reader with everything that it reads ahead always fits, unless memory is short
        self._read_slots = Share(
            max(slots // 4, min(self._ahead, slots // 2)), self.health.changed, lambda: self.health.readable
        )
        self._write_slots = Share(slots // 2, self.health.changed, lambda: self.health.writable)
        # every call except notes holds a slot
        limit = memory.pool.slots + 256
        self._reads = CallThreads(f"{metrics.tier}-read", threads, limit=limit)
        self._writes = CallThreads(f"{metrics.tier}-write", threads, limit=limit)
        # threads of their own: deletions go on even if late calls hold all other threads
        self._deletions = CallThreads(f"{metrics.tier}-delete", 1, limit=2)
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

    def batched_get(self, keys: Sequence[str], *, timeout: float | None = None) -> Generator[Fetched, None, None]:
        longest = self._timeouts.get_ms / 1000
        deadline = None if timeout is None else time.monotonic() + timeout
        ahead: deque[_Read] = deque()
        started = 0
        refusal = ""
        try:
            while started < len(keys) or ahead:
                while started < len(keys) and len(ahead) < self._ahead:
                    seconds = longest if deadline is None else min(longest, max(0.0, deadline - time.monotonic()))
                    # only a reader that holds nothing waits for memory: two of them can never wait for each other
                    read = self._start_read(keys[started], seconds, 0.0 if ahead else seconds)
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

    def stage(self, *, timeout: float | None = None) -> Staged | None:
        deadline = time.monotonic() + self._put_seconds(timeout)
        if not self.wait_room(timeout):
            return None
        return self.memory.stage(max(0.0, deadline - time.monotonic()))

    def wait_room(self, timeout: float | None = None) -> bool:
        return self._write_slots.wait_half_free(self._put_seconds(timeout))

    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        seconds = self._put_seconds(timeout)
        deadline = time.monotonic() + seconds
        return _Writes(self, [self._put(key, item, deadline) for key, item in zip(keys, items, strict=True)])

    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
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
            log.warning("tier %s: the disk outlived close(); its folder stays taken", self._metrics.tier)

    def _put_seconds(self, timeout: float | None) -> float:
        return self._timeouts.put_ms / 1000 if timeout is None else timeout

    def _rejection(self) -> Status:
        """The reason why no thread took a call: the threads are closed, or overloaded."""
        return Status.CLOSED if self.health.state is DiskState.CLOSED else Status.OVERLOADED

    # --- writing -------------------------------------------------------------------------------------------------

    def _put(self, key: str, item: StagedObject, deadline: float) -> Status | Call[Status]:
        digest = digest_of(key)
        try:
            if not self.health.writable:
                return self.health.refusal
            with self._lock:
                under_way = self._writing.get(digest)
                if under_way is not None and under_way.call is not None:
                    return under_way.call  # a key names its content, so those are the same bytes
                if not self._write_slots.take(0.0):
                    return Status.OK if self.index.contains([digest])[0] else self._rejection()
                room, evicted = self.index.reserve(digest)
                if room is Room.RESERVED:
                    self._metrics.evicted(len(evicted))
                    write = _Write(digest, evicted)
                    self._writing[digest] = write
                    ended = functools.partial(self._ended, write)
                    try:
                        # sealed before another put of the key, or a reader, could see it
                        item.seal(key)
                        write.staged = item.share()
                    except BaseException:
                        ended()
                        raise
                    write.call = self._writes.submit(functools.partial(self._write, write), deadline, ended)
                    return write.call or self._rejection()
            self._write_slots.give_back()
            self._unlink(evicted)
            self._metrics.evicted(len(evicted))
            if room is Room.PRESENT:
                return Status.OK
            return Status.CLOSED if self.health.state is DiskState.CLOSED else Status.NO_SPACE
        finally:
            item.release()

    def _write(self, write: _Write) -> Status:
        """On a writing thread: make room, write, publish."""
        staged = write.staged
        assert staged is not None
        if self.health.state in (DiskState.OFF, DiskState.READ_ONLY):
            return self.health.refusal
        try:
            self._sweep()
            while write.evicted:
                deleted = self._delete(write.evicted[-1])
                if deleted in (Status.OK, Status.NO_SPACE):
                    write.evicted.pop()
                if deleted is not Status.OK:
                    return deleted
            name = self._with_room(lambda: self.folder.write(write.digest, staged.slot.pages))
        except OSError as error:
            return self.health.judge("a write", error, writing=True)
        self.health.worked()
        with self._lock:
            # leaves the list in the same step in which it enters the index, so that a removal finds it in one of them
            wanted = self._settle(write)
            published = wanted and self.index.fill(write.digest, name)
            if not wanted:
                self.index.cancel()
        if not published:
            self._unlink([name])
        self._count()
        return Status.OK

    def _with_room(self, write: Callable[[], T]) -> T:
        """Carry out a write. If the file system is full, the oldest objects make room for it, and their places in the budget go."""
        for _ in range(_EVICTED_FOR_ONE):
            try:
                return write()
            except OSError as error:
                if fault_of(error) is not Fault.NO_ROOM or not self._give_up_one(error):
                    raise
        return write()

    def _give_up_one(self, error: OSError) -> bool:
        name = self.index.give_up()
        if name is None:
            return False
        self._metrics.evicted(1)
        self._metrics.shrunk(self.index.capacity * self._file_bytes, str(error))
        self._count()
        with self.health.changed:
            self.health.changed.notify_all()  # the keeper lets the budget grow again
        self._litter.append(name)
        self._sweep()
        return True

    def _ended(self, write: _Write) -> None:
        """Runs exactly once, when the call has ended or can never begin."""
        with self._lock:
            if not write.settled:
                self._settle(write)
                self.index.cancel()
        self._unlink(write.evicted)
        if write.staged is not None:
            write.staged.release()
        self._write_slots.give_back()

    def _settle(self, write: _Write) -> bool:
        """Note that the write's reservation was used or given back. Returns False if its key was removed during the write."""
        write.settled = True
        wanted = self._writing.get(write.digest) is write
        if wanted:
            del self._writing[write.digest]
        return wanted

    def _outcome(self, call: Call[Status]) -> Status:
        status = call.outcome(Status.TIMEOUT)
        if status is Status.TIMEOUT:
            self._late("a write", call.had_s, self._timeouts.put_ms)
        return status

    def _remove(self, digest: str) -> Status:
        with self._lock:
            if self._writing.pop(digest, None) is not None:
                return Status.OK  # the write under way will not be published
            removal, name = self.index.remove(digest)
        if name is not None:
            self._unlink([name])
            self._count()
        return {Removal.REMOVED: Status.OK, Removal.MISSING: Status.MISSING, Removal.PINNED: Status.BUSY}[removal]

    def _note(self, key: str, value: bytes) -> None:
        try:
            self._with_room(lambda: self.folder.note(key, value))
        except OSError as error:
            self.health.judge("a note", error, writing=True)

    def _unlink(self, names: Sequence[str]) -> None:
        """Have files deleted on another thread: a disk that hangs must not hold up callers that read, put or remove."""
        if not names:
            return
        self._litter.extend(names)
        if not self._sweep_queued:
            self._sweep_queued = True
            # if this is refused, the next write or the keeper sweeps
            self._deletions.submit(self._sweep, time.monotonic() + self._put_seconds(None), self._sweep_over)

    def _sweep_over(self) -> None:
        self._sweep_queued = False

    def _sweep(self) -> None:
        """Delete the files that are to be deleted. Files that the disk does not delete stay on the list."""
        self._sweep_queued = False
        with contextlib.suppress(IndexError):
            while True:
                name = self._litter.popleft()
                if self._delete(name) not in (Status.OK, Status.NO_SPACE):
                    self._litter.append(name)
                    return

    def _delete(self, name: str) -> Status:
        """Delete a file, unless the disk is in trouble. Returns NO_SPACE for a file that cannot be deleted: it keeps its place, and
        the keeper tries again."""
        try:
            self.folder.unlink(name)
        except OSError as error:
            if fault_of(error) is Fault.OBJECT:
                self._metrics.spoiled("a deletion", name_of(error), str(error))
                if not self.folder.takes_room(name):
                    return Status.OK
                return self._stays(name)
            status = self.health.judge("a deletion", error, writing=True)
            return Status.OK if status is Status.INTERNAL else status
        return Status.OK

    def _stays(self, name: str) -> Status:
        """A file that cannot be deleted keeps its place in the budget until it can."""
        self._stuck.append(name)
        self.index.shrink()
        with self.health.changed:
            self.health.changed.notify_all()
        return Status.NO_SPACE

    # --- reading -------------------------------------------------------------------------------------------------

    def _start_read(self, key: str, seconds: float, patience: float) -> _Read | str:
        """Begin to read a key. Returns the reason if no memory came free within `patience` seconds."""
        if not self.available:
            return _Read(None, None, self.health.refusal.value)
        latest = time.monotonic() + patience
        with contextlib.ExitStack() as undo:  # nothing stays pinned if this is interrupted
            entry = self.index.pin(digest_of(key))
            if entry is None:
                return _Read(None, None, Status.MISSING.value)
            undo.callback(self._unpin, entry)
            if not self._read_slots.take(patience):
                return self._rejection().value
            undo.callback(self._read_slots.give_back)
            staged = self.memory.stage(max(0.0, latest - time.monotonic()))
            if staged is None:
                return self.memory.refusal
            target = staged.share()
            undo.callback(target.release)
            read = functools.partial(self._read, key, entry, target)
            call = self._reads.submit(read, time.monotonic() + seconds, undo.pop_all().close)
        return _Read(call, staged, "" if call is not None else self._rejection().value)

    def _read(self, key: str, entry: Entry[str], target: StagedObject) -> str:
        """On a reading thread: read and check an object. Returns what is wrong with it, if anything is."""
        if self.health.state is DiskState.OFF:
            return Status.TIER_OFF.value
        try:
            nbytes = self.folder.read(entry.resource, target.slot.pages)
        except OSError as error:
            return self._unread(entry, error)
        self.health.worked()
        data = target.slot.view[: self.memory.object_bytes if nbytes == self._file_bytes else nbytes]
        damage = inspect(key, data, self.payload_bytes)
        if damage is None:
            return ""
        self._discard(entry)
        self._metrics.healed()
        return damage.value

    def _unread(self, entry: Entry[str], error: OSError) -> str:
        """Returns why a file was not read. If the error is the file's own, the index forgets it."""
        with contextlib.suppress(OSError):
            if isinstance(error, FileNotFoundError) and self.folder.is_held:
                self._discard(entry)
                return Status.MISSING.value
        status = self.health.judge("a read", error, writing=False)
        if status is Status.INTERNAL:
            self._discard(entry)
            self._metrics.healed()
            return Damage.UNREADABLE.value
        return str(status.value)

    def _finish(self, key: str, read: _Read) -> Fetched:
        """Wait for a read. Returns its object, or the reason why there is none."""
        reason = read.reason
        if read.call is not None:
            reason = read.call.outcome(Status.TIMEOUT.value)
            if reason == Status.TIMEOUT.value:
                self._late("a read", read.call.had_s, self._timeouts.get_ms)
        if read.staged is not None and not reason:
            read.staged.sealed_for = key
            return FetchedObject(read.staged)
        read.release()
        return FetchedObject(None, reason)

    def _discard(self, entry: Entry[str]) -> None:
        """Forget a file that is no good, so that the next put of its key writes it again."""
        self.index.discard(entry)
        self._count()

    def _unpin(self, entry: Entry[str]) -> None:
        if self.index.unpin(entry) and self.health.state is not DiskState.CLOSED:
            self._unlink([entry.resource])

    # --- health --------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        self._metrics.holds(len(self.index) * self._file_bytes)

    def _late(self, what: str, had_s: float, usual_ms: int) -> None:
        """Called when a deadline passed. A disk that hangs counts as failed; a long queue or an impatient caller proves nothing:
        `had_s` is how long the disk itself has had."""
        if had_s >= _FAIR * min(_FAIR_S, usual_ms / 1000):
            self.health.late(what, had_s)

    def _keep(self) -> None:
        """The keeper thread: opens the folder, tries it again while it is switched off, and lets the budget grow again."""
        health = self.health
        while True:
            try:
                self._tend()
            except Exception as error:  # nothing but close() ends this thread
                log.exception("tier %s: its folder could not be looked after", self._metrics.tier)
                health.settle(DiskState.OFF, f"opening the folder failed: {error!r}", Status.INTERNAL.value)
            with health.changed:
                health.changed.wait_for(lambda: not health.writable or self._is_small)
                if health.changed.wait_for(lambda: health.state is DiskState.CLOSED, self._retry_s):
                    return

    @property
    def _is_small(self) -> bool:
        """Whether the file system had less room than `capacity`."""
        return self.index.capacity < self._places

    def _tend(self) -> None:
        if not self.health.writable:
            held = False
            try:
                if not self.folder.is_held:
                    self.index.clear()
                    self._stuck.clear()
                    self._take_in(self.folder.open())
                    self._sweep()
                held = True
                self._with_room(self.folder.probe)
            except OSError as error:
                state = state_of(error) if held else DiskState.OFF
                self.health.settle(state, f"opening the folder failed: {error}", name_of(error))
                return
            self.health.settle(DiskState.ON)
        if self._is_small:
            self._unstick()
            try:
                self.index.grow(self.folder.room(), self._places - len(self._stuck))
            except OSError as error:
                self.health.judge("looking for room", error, writing=True)
            self._metrics.budget(self.index.capacity * self._file_bytes)
        self._sweep()

    def _unstick(self) -> None:
        """Try again to delete what could not be deleted; a deleted file gives its place back."""
        for name in list(self._stuck):
            with contextlib.suppress(OSError):
                self.folder.unlink(name)
                self._stuck.remove(name)

    def _take_in(self, found: Found) -> None:
        """Fill the index with what was there, oldest first."""
        for digest, name in found.objects:
            room, evicted = self.index.reserve(digest)
            self._litter.extend(evicted if room is not Room.NONE else (*evicted, name))
            if room is Room.RESERVED:
                self.index.fill(digest, name)
        self._metrics.ignored("foreign", found.foreign)
        self._metrics.ignored("torn", found.torn)
        self._count()
