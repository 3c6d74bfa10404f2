"""LocalDiskBackend: keeps objects as files, within a byte budget. The files survive a restart.

    <path>/<file bytes>/<n>/lock                        locked while a process uses folder n
    <path>/<file bytes>/<n>/tmp/<serial>                being written
    <path>/<file bytes>/<n>/<xx>/<digest>-<serial>      an object; xx are the digest's first two digits

A file is an object (payload and trailer) and padding. All files are as large as the largest object in whole
pages, so that direct I/O can move a file in one piece; the padding is the bytes that follow the object in
memory. A file is written under a temporary name and renamed when it is whole. The serial keeps two writers of
a key apart. The digest is the key's, so that any key makes a safe name. Names are not trusted: objects are
checked when they are read.

Each process that shares a path takes a folder of its own, the first free one. However a process ends, its
folder becomes free, and the next process finds it with its contents.

Reads and writes run on threads of their own, with bounded queues and deadlines (`transfer.calls`). The index
knows which object lies in which file, without a system call.

1. A file that cannot be read or written costs only its object, which the next put writes again. Three such
   errors in a row switch the tier off, and so does a call without an answer within two seconds. Then every
   call returns at once. Only the keeper, a thread that tries the folder every `retry_s`, switches the tier on
   again.
2. A file system that is full, or cannot be written, is still read. A file that cannot be deleted stops writes
   until it can be, so the budget holds.
3. A disk that hangs holds a bounded share of the memory: usually a quarter of the slots for reads, and half
   of them for writes. No caller waits for a deletion.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import hashlib
import itertools
import logging
import mmap
import os
import re
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from pd_cache.chunks import Keys
from pd_cache.config import DiskTier
from pd_cache.metrics import TierMetrics
from pd_cache.tiers.base import PutOutcome, StorageBackend
from pd_cache.tiers.index import Entry, EvictingIndex
from pd_cache.tiers.memory import SELF_SIZED, Damage, Fetched, ObjectMemory, Staged, inspect
from transfer.calls import Call, CallThreads
from transfer.deadlines import End, end_or, left, sooner
from transfer.errors import PoolUnavailableError, Status
from transfer.settings import Timeouts
from transfer.staging import Quota

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE = 4096
_FOLDERS = 64
"""The most processes that may share one path."""
_NAME = re.compile(r"(?P<digest>[0-9a-f]{32})-(?P<serial>[0-9a-f]{1,16})")
_STRIKES = 3
"""After this many errors in a row, the folder counts as failed, not single files."""
_FAIR_S = 2.0
"""A disk that has not answered within this time counts as hanging."""
_FAIR = 0.9
"""A call proves that the disk hangs only if the disk worked on it for at least this share of `_FAIR_S` or, if
it is shorter, of the usual time-out."""

_CANNOT_WRITE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Status.NO_SPACE) | dict.fromkeys(
    (errno.EROFS, errno.EACCES, errno.EPERM), Status.READ_ONLY
)
"""Errors after which nothing can be written, and the status that puts then get. The tier can still be
read."""


def digest_of(key: str) -> str:
    """Returns the 32 hexadecimal digits that stand for a key."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _symbol(error: OSError) -> str:
    """Returns the error's symbol in lower case, such as `eio`, for a metric's label."""
    return errno.errorcode.get(error.errno or 0, "unknown").lower()


# --- files --------------------------------------------------------------------------------------------------


class ObjectFolder:
    """Reads, writes and deletes a process's files. The I/O methods raise OSError. They may run on several
    threads at once.

    Useless files wait in line until `sweep` deletes them.
    """

    def __init__(self, path: Path, file_bytes: int, *, direct: bool) -> None:
        """Touches nothing yet. `file_bytes`: the size of every file, in whole pages."""
        assert file_bytes % PAGE == 0
        self.file_bytes = file_bytes
        self.root = path / str(file_bytes)
        """This process's own folder, once `open` has taken one; until then the parent folder."""
        self._base = self.root
        self._direct = direct
        self._lock = -1
        self._serials = itertools.count(1)
        self._litter: deque[Path] = deque()
        self._sweeping = threading.Lock()

    @property
    def is_held(self) -> bool:
        """Whether a folder is open and still there."""
        try:
            return self._lock >= 0 and os.path.samestat(os.stat(self.root / "lock"), os.fstat(self._lock))
        except OSError:
            return False

    def open(self) -> list[tuple[str, str]]:
        """Takes a folder and returns the digest and the name of each object in it, oldest first. Of two
        objects with the same digest, returns the newer.

        Gives the folder back that it held before. Leaves foreign files alone, and drops our own files that
        are not whole."""
        self.close()
        self._lock = self._take()
        try:
            return self._scan()
        except BaseException:
            self.close()
            raise

    def write(self, digest: str, pages: memoryview) -> str:
        """Writes an object and publishes it. Returns its name."""
        temporary = self._write_temporary(pages)
        name = f"{digest}-{temporary.name}"
        final = self.path_of(name)
        try:
            final.parent.mkdir(exist_ok=True)
            temporary.rename(final)
        except BaseException:
            self._litter.append(temporary)
            raise
        return name

    def read(self, name: str, pages: memoryview) -> int:
        """Reads an object into `pages`. Returns how many bytes it read."""
        descriptor = self._open(self.path_of(name), os.O_RDONLY)
        try:
            done = 0
            while done < len(pages):
                count = os.preadv(descriptor, [pages[done:]], done)
                done += count
                if not count or done % PAGE:
                    break
            return done
        finally:
            os.close(descriptor)

    def drop(self, *names: str) -> None:
        """Lets the next `sweep` delete objects."""
        self._litter += map(self.path_of, names)

    def sweep(self) -> None:
        """Deletes useless files. A file that cannot be deleted stays first in line."""
        with self._sweeping:
            while self._litter:
                self._litter[0].unlink(missing_ok=True)
                self._litter.popleft()

    def probe(self) -> None:
        """Writes an object and deletes it."""
        (self.root / "tmp").mkdir(exist_ok=True)
        with mmap.mmap(-1, self.file_bytes) as zeros, memoryview(zeros) as pages:
            self._litter.append(self._write_temporary(pages))
        self.sweep()

    def note(self, key: str, value: bytes) -> None:
        """Writes a small text for people into the folder, whole or not at all."""
        temporary = self.root / "tmp" / f"note-{next(self._serials):x}"
        try:
            temporary.write_bytes(value)
            temporary.rename(self.root / f"note-{digest_of(key)}")
        except BaseException:
            self._litter.append(temporary)
            raise

    def close(self) -> None:
        """Gives the folder back. Idempotent."""
        descriptor, self._lock = self._lock, -1
        if descriptor >= 0:
            os.close(descriptor)

    def path_of(self, name: str) -> Path:
        return self.root / name[:2] / name

    def _take(self) -> int:
        for index in range(_FOLDERS):
            root = self._base / str(index)
            root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException as error:
                os.close(descriptor)
                if not isinstance(error, BlockingIOError):
                    raise
                continue
            self.root = root
            return descriptor
        raise OSError(
            errno.EBUSY, f"{_FOLDERS} processes already use it; more are not allowed", str(self._base)
        )

    def _scan(self) -> list[tuple[str, str]]:
        (self.root / "tmp").mkdir(exist_ok=True)
        torn = [Path(entry.path) for entry in os.scandir(self.root / "tmp") if entry.is_file()]
        seen: list[tuple[int, str, str]] = []
        highest = 0
        for folder in os.scandir(self.root):
            if not folder.is_dir():
                continue
            for file in os.scandir(folder):
                match = _NAME.fullmatch(file.name)
                if match is None or file.name[:2] != folder.name or not file.is_file():
                    continue
                status = file.stat()
                if status.st_size != self.file_bytes:
                    torn.append(Path(file.path))
                    continue
                highest = max(highest, int(match["serial"], 16))
                seen.append((status.st_mtime_ns, match["digest"], file.name))
        self._serials = itertools.count(max(highest + 1, next(self._serials)))
        self._litter = deque(torn)
        newest: dict[str, str] = {}
        for _, digest, name in sorted(seen):
            if (older := newest.pop(digest, None)) is not None:
                self.drop(older)
            newest[digest] = name
        return list(newest.items())

    def _write_temporary(self, pages: memoryview) -> Path:
        """Writes these bytes to a new file. Returns its path, whose name is a serial that no object has."""
        path = self.root / "tmp" / f"{next(self._serials):x}"
        try:
            descriptor = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                done = 0
                while done < len(pages):
                    done += os.pwritev(descriptor, [pages[done:]], done)
            finally:
                os.close(descriptor)
        except BaseException:
            self._litter.append(path)
            raise
        return path

    def _open(self, path: Path, flags: int) -> int:
        """Opens a file for direct I/O, or through the page cache if the file system has no direct I/O."""
        flags |= os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        descriptor = os.open(path, flags, 0o600)
        if self._direct:
            log.info("%s: this file system has no direct I/O; using the page cache", self.root)
            self._direct = False
        return descriptor


# --- the tier -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, slots=True)
class _Write:
    """An object on its way to the disk."""

    digest: str
    staged: Staged
    call: Call[Status] | None = None


class _Put(NamedTuple):
    """A put under way; see `base.PutOutcome`."""

    backend: LocalDiskBackend
    parts: list[Call[Status] | Status]
    """For each key its write, or the status if no write was begun."""

    def results(self) -> list[Status]:
        statuses = []
        for part in self.parts:
            status = part if isinstance(part, Status) else part.outcome(Status.TIMEOUT)
            if status is Status.TIMEOUT and isinstance(part, Call):
                self.backend._late("a write", part.had_s, self.backend._timeouts.put_ms)
            statuses.append(status)
        return statuses


class _Read(NamedTuple):
    """A read into `staged` that is under way, or the reason why no read was begun."""

    call: Call[int | str] | None
    staged: Staged | None
    reason: str = ""

    def release(self) -> None:
        """Gives up the read. A call that runs keeps its own reference to the memory until it ends."""
        if self.call is not None:
            self.call.abandon()
        if self.staged is not None:
            self.staged.release()


class LocalDiskBackend(StorageBackend):
    """Keeps objects in a folder, within a byte budget."""

    kind = "disk"

    def __init__(
        self,
        memory: ObjectMemory,
        tier: DiskTier,
        timeouts: Timeouts,
        metrics: TierMetrics,
        *,
        slots: int | None = None,
    ) -> None:
        """Begins to open the folder. Does not wait for it. `slots`: how many of the memory's slots are for
        transfers (by default all). This tier may hold a share of them."""
        self.memory = memory
        self.payload_bytes = memory.payload_bytes
        self.batch_size = memory.batch_size
        file_bytes = -(-memory.object_bytes // PAGE) * PAGE
        self.index: EvictingIndex[str] = EvictingIndex(tier.capacity // file_bytes, tier.policy)
        self.folder = ObjectFolder(Path(tier.path), file_bytes, direct=tier.direct)
        self._timeouts = timeouts
        self._metrics = metrics
        self._retry_s = tier.retry_s
        if not self.index.capacity:
            log.warning("tier %s holds nothing: its capacity is smaller than one object", metrics.tier)
        self.changed = threading.Condition()
        """Guards the fields below, and says when one of them changed."""
        self.state = Status.TIER_OFF
        """The status that puts get: OK, or why the tier takes none. With NO_SPACE and READ_ONLY it still
        serves reads."""
        self.trouble = ""
        """Why the state is not OK; empty before the folder is opened for the first time."""
        self._strikes = {True: 0, False: 0}
        """How many of the last writes (True) and reads (False) have failed in a row."""
        self._writing = 0
        """How many slots writes hold."""
        self._under_way: dict[str, _Write] = {}
        """The writes that are not published yet, by digest. A removed key leaves at once."""
        slots = memory.pool.slots if slots is None else slots
        self._ahead = tier.threads + 1
        # enough for everything that a reader reads ahead, unless memory is short
        self._reading = Quota(max(slots // 4, min(self._ahead, slots // 2)))
        self._most_writing = max(1, slots // 2)
        # every call except notes and deletions holds a slot
        limit = memory.pool.slots + 256
        self._reads = CallThreads(f"{metrics.tier}-read", tier.threads, limit=limit)
        self._writes = CallThreads(f"{metrics.tier}-write", tier.threads, limit=limit)
        self._keeper = threading.Thread(target=self._keep, name=f"{metrics.tier}-keeper", daemon=True)
        self._keeper.start()

    @property
    def available(self) -> bool:
        return self.state not in (Status.TIER_OFF, Status.CLOSED)

    def wait_available(self, timeout: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.available or self.trouble, min(timeout, threading.TIMEOUT_MAX))
            if not self.available:
                raise PoolUnavailableError(
                    f"{self.folder.root} cannot be used: {self.trouble or 'not opened yet'}"
                )

    def batched_contains(self, keys: Keys, end: End = None) -> list[Status]:
        if not self.available:
            return [self.state] * len(keys)
        found = self.index.contains([digest_of(key) for key in keys])
        return [Status.OK if there else Status.MISSING for there in found]

    def batched_fetch(
        self, keys: Keys, *, payload_bytes: int | None = None, end: End = None
    ) -> Generator[list[Fetched], None, None]:
        size = self.memory.read_size(payload_bytes)
        ahead: deque[_Read] = deque()
        started = 0
        try:
            while started < len(keys) or ahead:
                while started < len(keys) and len(ahead) < self._ahead:
                    until = sooner(end, self._timeouts.get_ms)
                    # only a reader that holds no memory waits for some, so two readers never wait for each
                    # other
                    read = self._start_read(keys[started], size, until, 0.0 if ahead else until)
                    if read is None:
                        break
                    started += 1
                    ahead.append(read)
                if not ahead:
                    yield [Fetched(None, self.memory.refusal) for _ in keys[started:]]
                    return
                yield [self._finish(keys[started - len(ahead)], size, ahead.popleft())]
        finally:
            for unused in ahead:
                unused.release()

    def stage(self, *, payload_bytes: int | None = None, end: End = None) -> Staged | None:
        end = end_or(end, self._timeouts.put_ms)
        return self.memory.stage(end, payload_bytes=payload_bytes) if self.wait_room(end) else None

    def wait_room(self, end: End = None) -> bool:
        """Waits until at most half of the slots for writes are taken, or the tier takes no puts."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self._writing <= self._most_writing // 2 or self.state is not Status.OK,
                min(left(end_or(end, self._timeouts.put_ms)), threading.TIMEOUT_MAX),
            )

    def batched_put(self, keys: Keys, staged: Sequence[Staged], end: End = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        deadline = end_or(end, self._timeouts.put_ms)
        try:
            return _Put(
                self, [self._begin(key, item, deadline) for key, item in zip(keys, items, strict=True)]
            )
        finally:
            for item in items:
                item.release()

    def batched_remove(self, keys: Keys, end: End = None, *, force: bool = False) -> list[Status]:
        if self.state not in (Status.OK, Status.NO_SPACE):
            return [self.state] * len(keys)
        return [self._remove(digest_of(key)) for key in keys]

    def annotate(self, key: str, value: bytes, end: End = None) -> Status:
        if self.state is not Status.OK:
            return self.state
        end = end_or(end, self._timeouts.put_ms)
        return (
            self._rejection() if self._writes.submit(self._note, end, None, key, value) is None else Status.OK
        )

    def close(self) -> None:
        with self.changed:
            before, self.state = self.state, Status.CLOSED
            self.changed.notify_all()
        if before is Status.CLOSED:
            return
        end = time.monotonic() + self._timeouts.close_ms / 1000
        drained = True
        for threads in (self._writes, self._reads):
            drained &= threads.close(left(end))
        self._keeper.join(left(end))
        drained &= not self._keeper.is_alive()
        self.index.close()
        self.memory.close()
        if drained:
            if before is Status.OK:
                self._sweep()
            self.folder.close()
        else:
            log.warning(
                "tier %s: calls to the disk outlived close(); this process keeps its folder",
                self._metrics.tier,
            )

    def _rejection(self) -> Status:
        """Returns why no thread took a call."""
        return Status.CLOSED if self.state is Status.CLOSED else Status.OVERLOADED

    def _count(self) -> None:
        """Reports how much the tier holds."""
        self._metrics.holds(len(self.index) * self.folder.file_bytes)

    # --- reading --------------------------------------------------------------------------------------------

    def _start_read(self, key: str, size: int, end: float, waits_until: float) -> _Read | None:
        """Begins to read a key. Returns None if no memory came free in time."""
        if not self.available:
            return _Read(None, None, self.state.value)
        digest = digest_of(key)
        if not self.index.contains([digest])[0]:
            return _Read(None, None, Status.MISSING.value)
        room = self.memory.payload_bytes if size == SELF_SIZED else size
        staged = self.memory.stage(waits_until, self._reading, payload_bytes=room)
        if staged is None:
            return None
        target = staged.share()
        ended = functools.partial(self._read_ended, target)
        call = self._reads.submit(self._read, end, ended, key, digest, target, size)
        return _Read(call, staged, "" if call is not None else self._rejection().value)

    def _read_ended(self, target: Staged) -> None:
        """Runs exactly once, when a read has ended or can never begin. From then on, the read's slot no
        longer waits for the disk."""
        target.slot.settle()
        target.release()

    def _read(self, key: str, digest: str, target: Staged, size: int) -> int | str:
        """Reads an object, on a reading thread. Returns the checksum that its payload must have, or why it
        cannot be used."""
        if self.state is Status.TIER_OFF:
            return Status.TIER_OFF.value
        entry = self.index.pin(digest)
        if entry is None:  # evicted meanwhile
            return Status.MISSING.value
        try:
            nbytes = self.folder.read(entry.resource, target.slot.pages)
            self._strikes[False] = 0
            whole = nbytes == self.folder.file_bytes
            found = inspect(key, target.slot.view[: target.object_bytes if whole else nbytes], size)
            return self._discard(entry, found) if isinstance(found, Damage) else found
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self.folder.is_held:
                self.index.discard(entry)
                self._count()
                return Status.MISSING.value
            status = self._failed("a read", error, writing=False)
            return self._discard(entry, Damage.UNREADABLE) if status is Status.INTERNAL else status.value
        finally:
            self._unpin(entry)

    def _unpin(self, entry: Entry[str]) -> None:
        if self.index.unpin(entry) and self.state is not Status.CLOSED:
            self.folder.drop(entry.resource)
            self._sweep_soon()

    def _discard(self, entry: Entry[str], damage: Damage) -> str:
        """Forgets a useless file, so that the next put of its key writes it again. Returns the damage as the
        reason of a miss."""
        self.index.discard(entry)
        self._count()
        self._metrics.healed()
        return damage.value

    def _finish(self, key: str, size: int, read: _Read) -> Fetched:
        """Waits for a read. Returns its object, or the reason why there is none."""
        found: int | str = read.reason
        if read.call is not None:
            try:
                found = read.call.outcome(Status.TIMEOUT.value)
            except BaseException:
                read.release()
                raise
            if found == Status.TIMEOUT.value:
                self._late("a read", read.call.had_s, self._timeouts.get_ms)
        if read.staged is None or isinstance(found, str):
            read.release()
            return Fetched(None, str(found))
        read.staged.cut(size)
        read.staged.sealed_for = key
        return Fetched(read.staged, expected=found, source=key, tier=self.kind)

    def _forget(self, damaged: Fetched) -> None:
        # not `_remove`, which other readers of the object would hold up
        if (entry := self.index.pin(digest_of(damaged.source))) is not None:
            self._discard(entry, Damage.CORRUPT)
            self._unpin(entry)

    # --- writing --------------------------------------------------------------------------------------------

    def _begin(self, key: str, item: Staged, deadline: float) -> Call[Status] | Status:
        """Begins to write an object, or joins a write of the same key that is under way. A key names its
        content, so both writes have the same bytes.

        Returns OK if the object is there, and BUSY if another put writes it with a later deadline.
        """
        digest = digest_of(key)
        item.seal(key)
        with self.changed:
            if self.state is not Status.OK:
                return self.state
            if self.index.contains([digest])[0]:
                return Status.OK
            if (other := self._under_way.get(digest)) is not None and other.call is not None:
                return other.call if other.call.deadline <= deadline else Status.BUSY
            if self._writing >= self._most_writing:
                return Status.OVERLOADED
            self._writing += 1
            write = self._under_way[digest] = _Write(digest, item.share())
            ended = functools.partial(self._write_ended, write)
            write.call = self._writes.submit(self._write, deadline, ended, write)
            return write.call or self._rejection()

    def _write(self, write: _Write) -> Status:
        """Writes and publishes an object, on a writing thread."""
        if self.state in (Status.TIER_OFF, Status.READ_ONLY):
            return self.state
        refusal, evicted = self.index.reserve(write.digest)
        self.folder.drop(*evicted)
        self._metrics.evicted(len(evicted))
        if refusal is not None:
            return refusal
        name = ""
        try:
            self.folder.sweep()  # before the write uses the room of evicted objects
            name = self.folder.write(write.digest, write.staged.slot.pages)
        except OSError as error:
            return self._failed("a write", error, writing=True)
        finally:
            if not name:
                self.index.unreserve()
        self._strikes[True] = 0
        with self.changed:
            # leaves the list and enters the index in one step, so that a removal finds the object in one of
            # the two
            if self._under_way.get(write.digest) is write:
                del self._under_way[write.digest]
                published = self.index.fill(write.digest, name)
            else:  # removed meanwhile
                published = False
                self.index.unreserve()
        if not published:
            self.folder.drop(name)
            self._sweep_soon()
        self._count()
        return Status.OK

    def _write_ended(self, write: _Write) -> None:
        """Runs exactly once, when the call has ended or can never begin."""
        write.staged.release()  # first: a caller that wakes up may need memory at once
        with self.changed:
            self._writing -= 1
            if self._under_way.get(write.digest) is write:
                del self._under_way[write.digest]
            self.changed.notify_all()

    def _note(self, key: str, value: bytes) -> None:
        try:
            self.folder.note(key, value)
        except OSError as error:
            self._failed("a note", error, writing=True)

    # --- deleting -------------------------------------------------------------------------------------------

    def _remove(self, digest: str) -> Status:
        with self.changed:
            # an object that is being written is not published
            if self._under_way.pop(digest, None) is None:
                removed = self.index.remove(digest)
                if isinstance(removed, Status):
                    return removed
                self.folder.drop(removed)
        self._sweep_soon()
        self._count()
        return Status.OK

    def _sweep_soon(self) -> None:
        """Sweeps on another thread, so that a disk that hangs does not hold up callers that read, put or
        remove."""
        # if it is refused, the next write sweeps
        self._writes.submit(self._sweep, end_or(None, self._timeouts.put_ms))

    def _sweep(self) -> None:
        try:
            self.folder.sweep()
        except OSError as error:
            self._failed("a deletion", error, writing=True)

    # --- what the folder can be used for --------------------------------------------------------------------

    def _late(self, what: str, had_s: float, usual_ms: int) -> None:
        """Switches the tier off if the disk hangs. Call it when a deadline has passed.

        `had_s` is the time for which the disk itself has worked on the call: a long queue or a short deadline
        proves nothing.
        """
        if had_s >= _FAIR * min(_FAIR_S, usual_ms / 1000):
            self._worsen(Status.TIER_OFF, f"{what} got no answer within {had_s:g} s", Status.TIMEOUT.value)

    def _failed(self, what: str, error: OSError, *, writing: bool) -> Status:
        """Returns the status of a call that met an error: INTERNAL if it concerns one file. An error of the
        folder changes the state."""
        state = _CANNOT_WRITE.get(error.errno or 0) if writing else None
        if state is None:
            self._strikes[writing] += 1
            if self._strikes[writing] >= _STRIKES or not self.folder.is_held:
                state = Status.TIER_OFF
        if state is None:
            self._metrics.spoiled(what, _symbol(error), str(error))
            return Status.INTERNAL
        self._worsen(state, f"{what} failed: {error}", _symbol(error))
        return self.state

    def _worsen(self, state: Status, trouble: str, reason: str) -> None:
        with self.changed:
            if self.state is not Status.TIER_OFF:
                self._settle(state, trouble, reason)

    def _settle(self, state: Status, trouble: str = "", reason: str = "") -> None:
        """Sets the state, and logs a change. A closed tier stays closed."""
        with self.changed:
            before, known = self.state, self.trouble
            if before is Status.CLOSED or (before is state and bool(known) == bool(trouble)):
                return
            self.state, self.trouble, self._strikes = state, trouble, {True: 0, False: 0}
            self.changed.notify_all()
        if state is Status.OK:
            self._metrics.switched_on()
            log.info("tier %s: %s is %s", self._metrics.tier, self.folder.root, "back" if known else "open")
            return
        self._metrics.switched_off(reason)
        log.warning(
            "tier %s: %s; %s until its folder works again (next try in %g s)",
            self._metrics.tier,
            trouble,
            "the tier is not used" if state is Status.TIER_OFF else "nothing is written",
            self._retry_s,
        )

    def _keep(self) -> None:
        """The keeper thread: opens the folder, and tries it again while it cannot be used."""
        while True:
            try:
                self._tend()
            except OSError as error:
                state = _CANNOT_WRITE.get(error.errno or 0) if self.folder.is_held else None
                self._settle(state or Status.TIER_OFF, f"opening the folder failed: {error}", _symbol(error))
            except Exception as error:  # only close() ends this thread
                log.exception("tier %s: the keeper of its folder failed; it goes on", self._metrics.tier)
                self._settle(Status.TIER_OFF, f"opening the folder failed: {error!r}", Status.INTERNAL.value)
            with self.changed:
                self.changed.wait_for(lambda: self.state is not Status.OK)
                if self.changed.wait_for(lambda: self.state is Status.CLOSED, self._retry_s):
                    return

    def _tend(self) -> None:
        """Opens the folder and fills the index with its objects, oldest first. Deletes useless files. Tries
        whether the folder works again."""
        if not self.folder.is_held:
            self.index.clear()
            for digest, name in self.folder.open():
                refusal, evicted = self.index.reserve(digest)
                self.folder.drop(*evicted)
                if refusal is None:
                    self.index.fill(digest, name)
                elif (
                    refusal is Status.NO_SPACE
                ):  # a tier that was closed meanwhile leaves its files to the next process
                    self.folder.drop(name)
            self._count()
            room = os.statvfs(self.folder.root)
            if (
                self.index.capacity - len(self.index)
            ) * self.folder.file_bytes > room.f_bavail * room.f_frsize:
                log.warning(
                    "tier %s: %s has less room than `capacity`: once it is full, nothing is evicted or written",
                    self._metrics.tier,
                    self.folder.root,
                )
        self.folder.sweep()
        if self.state is not Status.OK:
            self.folder.probe()
        self._settle(Status.OK)
