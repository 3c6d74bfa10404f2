"""LocalDiskBackend: objects as files, with a byte budget that survives a restart.

Reads and writes run on threads of their own, bounded and with deadlines (`transfer.calls`); what is where is answered from
the index, without a system call. A folder that fails, or is full, is switched off and tried again later; meanwhile every
call answers at once. A full one can still be read.
"""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from pd_cache.backends.base import Fetched, PutOutcome, Staged, StorageBackend
from pd_cache.backends.eviction import PolicyName, make_policy
from pd_cache.backends.folder import PAGE, Found, ObjectFolder, digest_of
from pd_cache.backends.index import Entry, EvictingIndex, Removal, Room
from pd_cache.backends.memory import FetchedObject, ObjectMemory, StagedObject
from pd_cache.backends.objects import inspect
from pd_cache.metrics import TierMetrics
from transfer.calls import Call, CallThreads
from transfer.errors import PoolUnavailableError, Status
from transfer.settings import Timeouts

log = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BATCH_BYTES = 64 << 20
_FAIR_S = 2.0
"""A disk that has not answered within this hangs."""
_PATIENCE_S = 3600.0
"""For deletions, which nobody waits for: one that was dropped would leave a file that nobody counts."""


class _Write:
    """One object on its way to the disk."""

    __slots__ = ("call", "digest", "evicted", "settled", "staged")

    def __init__(self, digest: str, staged: StagedObject, evicted: list[str]) -> None:
        self.digest = digest
        self.staged = staged
        self.evicted = evicted
        """Files that made room for it and are still there."""
        self.call: Call[Status] | None = None
        self.settled = False
        """Whether its reservation was used or given back."""


class _Writes:
    """What became of a put; see `base.PutOutcome`."""

    def __init__(self, backend: LocalDiskBackend, parts: list[Status | Call[Status]], patience: float) -> None:
        self._backend = backend
        self._parts = parts
        self._patience = patience

    def results(self) -> list[Status]:
        return [
            part if isinstance(part, Status) else self._backend._outcome(part, self._patience) for part in self._parts
        ]


class _Read(NamedTuple):
    """A key that was asked for: a read under way into `staged`, or the reason why there is none."""

    call: Call[str] | None
    staged: StagedObject | None
    reason: str = ""
    patience: float = 0.0
    """Seconds that the call was given."""

    def release(self) -> None:
        """Nobody waits for it any more; the call has a reference of its own, as long as it runs."""
        if self.staged is not None:
            self.staged.release()


class LocalDiskBackend(StorageBackend):
    """A byte budget of objects in one folder."""

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
    ) -> None:
        """Begin to open the folder; does not wait for it. `capacity`: bytes of files. `threads`: each way."""
        self.memory = memory
        self.payload_bytes = memory.payload_bytes
        self.batch_size = max(1, min(memory.pool.slots // 4, _BATCH_BYTES // max(1, self.payload_bytes)))
        self._file_bytes = -(-memory.object_bytes // PAGE) * PAGE
        places = capacity // self._file_bytes
        self.index: EvictingIndex[str] = EvictingIndex(places, make_policy(policy, places))
        self.folder = ObjectFolder(path, self._file_bytes, direct=direct, sync=sync)
        self._timeouts = timeouts
        self._metrics = metrics
        self._retry_s = retry_s
        self._ahead = threads + 1
        self._writing: dict[str, _Write] = {}
        self._state = "opening"
        """`opening`, `on`, `full` (reads only), `off` or `closed`."""
        self._changed = threading.Condition()
        self._trouble = "not opened yet"
        if not places:
            log.warning("tier %s holds nothing: its capacity is less than one object", metrics.tier)
        # every call holds a slot, except deletions: what is queued is bounded by the memory
        limit = memory.pool.slots + 256
        self._reads = CallThreads(f"{metrics.tier}-read", threads, limit=limit)
        self._writes = CallThreads(f"{metrics.tier}-write", threads, limit=limit)
        self._keeper = threading.Thread(target=self._keep, name=f"{metrics.tier}-keeper", daemon=True)
        self._keeper.start()

    @property
    def available(self) -> bool:
        return self._state in ("on", "full")

    def wait_available(self, timeout: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._state != "opening", timeout) or not self.available:
                raise PoolUnavailableError(f"{self.folder.root} is {self._state}: {self._trouble}")

    def batched_contains(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        if not self.available:
            return [self._refusal()] * len(keys)
        found = self.index.contains([digest_of(key) for key in keys])
        return [Status.OK if there else Status.MISSING for there in found]

    def batched_get(self, keys: Sequence[str], *, timeout: float | None = None) -> Generator[Fetched, None, None]:
        longest = self._timeouts.get_ms / 1000
        deadline = None if timeout is None else time.monotonic() + timeout
        ahead: deque[_Read] = deque()
        started = 0
        try:
            while started < len(keys) or ahead:
                while started < len(keys) and len(ahead) < self._ahead:
                    seconds = longest if deadline is None else min(longest, max(0.0, deadline - time.monotonic()))
                    # only a reader that holds nothing waits for memory: two of them can never wait for each other
                    read = self._start_read(keys[started], seconds, 0.0 if ahead else seconds)
                    if read is None:
                        break
                    started += 1
                    ahead.append(read)
                if not ahead:
                    for _ in keys[started:]:
                        yield FetchedObject(None, self.memory.refusal)
                    return
                yield self._finish(keys[started - len(ahead)], ahead.popleft())
        finally:
            for left in ahead:
                left.release()

    def stage(self, *, timeout: float | None = None) -> Staged | None:
        return self.memory.stage(self._timeouts.put_ms / 1000 if timeout is None else timeout)

    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        seconds = self._timeouts.put_ms / 1000 if timeout is None else timeout
        deadline = time.monotonic() + seconds
        return _Writes(self, [self._put(key, item, deadline) for key, item in zip(keys, items, strict=True)], seconds)

    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        if not self.available:
            return [self._refusal()] * len(keys)
        return [self._remove(digest_of(key)) for key in keys]

    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        if self._state != "on":
            return self._refusal()
        call = self._writes.submit(functools.partial(self._note, key, value), time.monotonic() + _PATIENCE_S)
        return self._rejection() if call is None else Status.OK

    def close(self) -> None:
        with self._changed:
            if self._state == "closed":
                return
            self._state = "closed"
            self._changed.notify_all()
        end = time.monotonic() + self._timeouts.close_ms / 1000
        drained = True
        for threads in (self._writes, self._reads):
            drained &= threads.close(max(0.0, end - time.monotonic()))
        self._keeper.join(max(0.0, end - time.monotonic()))
        drained &= not self._keeper.is_alive()
        self.index.close()
        self.memory.close()
        if drained:
            self.folder.close()
        else:
            log.warning("tier %s: the disk outlived close(); its folder stays taken", self._metrics.tier)

    def _rejection(self) -> Status:
        """Why no thread took a call: they are closed, or have too much to do."""
        return Status.CLOSED if self._state == "closed" else Status.OVERLOADED

    # --- writing -------------------------------------------------------------------------------------------------

    def _put(self, key: str, item: StagedObject, deadline: float) -> Status | Call[Status]:
        digest = digest_of(key)
        try:
            if self._state != "on":
                return self._refusal()
            with self._changed:
                under_way = self._writing.get(digest)
                if under_way is not None and under_way.call is not None:
                    return under_way.call  # content is named by its key: those are the same bytes
                room, evicted = self.index.reserve(digest)
                write = _Write(digest, item, evicted)
                if room is Room.RESERVED:
                    self._writing[digest] = write
                    # sealed before another put of the key, or a reader, could see it
                    item.seal(key)
                    write.staged = item.share()
                    write.call = self._writes.submit(
                        functools.partial(self._write, write), deadline, functools.partial(self._ended, write)
                    )
                    self._metrics.evicted(len(evicted))
                    return write.call or self._rejection()
            self._unlink(evicted)
            self._metrics.evicted(len(evicted))
            if room is Room.PRESENT:
                return Status.OK
            return Status.CLOSED if self._state == "closed" else Status.NO_SPACE
        finally:
            item.release()

    def _write(self, write: _Write) -> Status:
        """On a writing thread: make room, write, publish."""
        try:
            while write.evicted:
                self.folder.unlink(write.evicted[-1])
                write.evicted.pop()
            name = self.folder.write(write.digest, write.staged.slot.pages)
        except OSError as error:
            return self._failed("a write", error)
        with self._changed:
            # off the list in the same step in which it appears in the index: a removal finds it in one of them
            wanted = self._settle(write)
            published = wanted and self.index.fill(write.digest, name)
            if not wanted:
                self.index.cancel()
        if not published:
            self._unlink_now(name)
        self._count()
        return Status.OK

    def _ended(self, write: _Write) -> None:
        """The call is over, or never began; runs exactly once."""
        with self._changed:
            if not write.settled:
                self._settle(write)
                self.index.cancel()
        self._unlink(write.evicted)
        write.staged.release()

    def _settle(self, write: _Write) -> bool:
        """Note that the write's reservation is dealt with; False if its key was removed while it was under way."""
        write.settled = True
        wanted = self._writing.get(write.digest) is write
        if wanted:
            del self._writing[write.digest]
        return wanted

    def _outcome(self, call: Call[Status], patience: float) -> Status:
        status = call.outcome(Status.TIMEOUT)
        if status is Status.TIMEOUT:
            self._late("a write", call.started, patience, self._timeouts.put_ms)
        return status

    def _remove(self, digest: str) -> Status:
        with self._changed:
            if self._writing.pop(digest, None) is not None:
                return Status.OK  # it will not be published
            removal, name = self.index.remove(digest)
        if name is not None:
            self._unlink([name])
            self._count()
        return {Removal.REMOVED: Status.OK, Removal.MISSING: Status.MISSING, Removal.PINNED: Status.BUSY}[removal]

    def _note(self, key: str, value: bytes) -> None:
        try:
            self.folder.note(key, value)
        except OSError as error:
            self._failed("a note", error)

    def _unlink(self, names: list[str]) -> None:
        """Delete files, off this thread where that can be had."""
        for name in names:
            if self._writes.submit(functools.partial(self._unlink_now, name), time.monotonic() + _PATIENCE_S) is None:
                self._unlink_now(name)

    def _unlink_now(self, name: str) -> None:
        try:
            self.folder.unlink(name)
        except OSError as error:
            self._failed("a deletion", error)

    # --- reading -------------------------------------------------------------------------------------------------

    def _start_read(self, key: str, seconds: float, patience: float) -> _Read | None:
        """Begin to read a key; None if no memory came free within `patience` seconds."""
        if not self.available:
            return _Read(None, None, self._refusal().value)
        entry = self.index.pin(digest_of(key))
        if entry is None:
            return _Read(None, None, Status.MISSING.value)
        staged = self.memory.stage(patience)
        if staged is None:
            self._unpin(entry)
            return None
        target = staged.share()

        def let_go() -> None:
            target.release()
            self._unpin(entry)

        call = self._reads.submit(functools.partial(self._read, key, entry, target), time.monotonic() + seconds, let_go)
        return _Read(call, staged, "" if call is not None else self._rejection().value, seconds)

    def _read(self, key: str, entry: Entry[str], target: StagedObject) -> str:
        """On a reading thread: read and check; what is wrong, if anything is."""
        try:
            nbytes = self.folder.read(entry.resource, target.slot.pages)
        except FileNotFoundError:  # somebody deleted it
            self._discard(entry)
            return Status.MISSING.value
        except OSError as error:
            return self._failed("a read", error).value
        data = target.slot.view[: self.memory.object_bytes if nbytes == self._file_bytes else nbytes]
        damage = inspect(key, data, self.payload_bytes)
        if damage is None:
            return ""
        self._discard(entry)
        return damage.value

    def _finish(self, key: str, read: _Read) -> Fetched:
        """Wait for a read; its object, or why there is none."""
        reason = read.reason
        if read.call is not None:
            reason = read.call.outcome(Status.TIMEOUT.value)
            if reason == Status.TIMEOUT.value:
                self._late("a read", read.call.started, read.patience, self._timeouts.get_ms)
        if read.staged is not None and not reason:
            read.staged.sealed_for = key
            return FetchedObject(read.staged)
        read.release()
        return FetchedObject(None, reason)

    def _discard(self, entry: Entry[str]) -> None:
        """The file is no good: the next put of its key shall write it again."""
        self.index.discard(entry)
        self._count()

    def _unpin(self, entry: Entry[str]) -> None:
        if self.index.unpin(entry) and self._state != "closed":
            self._unlink([entry.resource])

    # --- health --------------------------------------------------------------------------------------------------

    def _refusal(self) -> Status:
        """Why a call is not begun."""
        if self._state == "closed":
            return Status.CLOSED
        return Status.NO_SPACE if self._state == "full" else Status.TIER_OFF

    def _count(self) -> None:
        self._metrics.holds(len(self.index) * self._file_bytes)

    def _late(self, what: str, started: bool, patience: float, usual_ms: int) -> None:
        """A deadline passed. A disk that hangs counts as failed; a long queue, or an impatient caller, says nothing."""
        if started and patience >= min(_FAIR_S, usual_ms / 1000):
            self._switch_off("off", f"{what} got no answer in {patience:g} s", Status.TIMEOUT.value)

    def _failed(self, what: str, error: OSError) -> Status:
        """Switch off, and say what that means for the call at hand."""
        full = error.errno in _FULL
        reason = errno.errorcode.get(error.errno or 0, "unknown").lower()
        self._switch_off("full" if full else "off", f"{what} failed: {error}", reason)
        return Status.NO_SPACE if full else Status.TIER_OFF

    def _switch_off(self, state: str, trouble: str, reason: str) -> None:
        with self._changed:
            if self._state in ("closed", "off") or self._state == state:
                return
            self._state, self._trouble = state, trouble
            self._changed.notify_all()
        self._metrics.switched_off(reason)
        log.warning(
            "tier %s: %s; %s until it works again, which is tried every %g s",
            self._metrics.tier,
            trouble,
            "nothing is written" if state == "full" else "it is not used",
            self._retry_s,
        )

    def _keep(self) -> None:
        """The keeper thread: opens the folder, and tries it again while it is switched off."""
        while True:
            self._try()
            with self._changed:
                self._changed.wait_for(lambda: self._state != "on")
                if self._changed.wait_for(lambda: self._state == "closed", self._retry_s):
                    return

    def _try(self) -> None:
        try:
            found = self.folder.open()
            self._take_in(found)
            self.folder.probe()
        except OSError as error:
            self._failed("opening the folder", error)
            return
        with self._changed:
            if self._state == "closed":
                return
            before, self._state = self._state, "on"
            self._changed.notify_all()
        self._metrics.switched_on()
        log.info(
            "tier %s: %s is %s, %d objects", self._metrics.tier, self.folder.root,
            "open" if before == "opening" else "back", len(self.index),
        )  # fmt: skip

    def _take_in(self, found: Found) -> None:
        """Fill the index with what was there, oldest first."""
        for digest, name in found.objects:
            room, evicted = self.index.reserve(digest)
            for old in evicted if room is not Room.NONE else (*evicted, name):
                self.folder.unlink(old)
            if room is Room.RESERVED:
                self.index.fill(digest, name)
        self._metrics.ignored("foreign", found.foreign)
        self._metrics.ignored("torn", found.torn)
        self._count()
