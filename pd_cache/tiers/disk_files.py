"""The files of a disk tier, what their errors mean, and whether their folder can be used.

`ObjectFolder` keeps each object in a file, in fanned-out folders that one process holds. All files have one size.

    <path>/<file bytes>/<n>/lock                        locked while a process uses folder n
    <path>/<file bytes>/<n>/tmp/<serial>                being written
    <path>/<file bytes>/<n>/<xx>/<digest>-<serial>      an object; xx are the digest's first two digits

A file is an object (payload and trailer) and whatever lay behind it in memory, up to the size of the largest object in whole pages, so
that direct I/O can move it in one piece. It is written under a temporary name and renamed when it is whole. The serial keeps two writers
of one key apart. The digest is that of the key, so that any key makes a safe name. Names are not trusted: objects are checked when they
are read.

Processes that share a path each take their own folder, the first that is free. However a process ends, its folder becomes free, and
the next process that starts finds it with its contents. If nothing can be written, an existing folder can still be taken and read.

Our paths are opened without following links and without waiting. A symbolic link, a pipe or a folder in the place of a file is an
error of that one file.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import hashlib
import itertools
import logging
import mmap
import os
import re
import stat
import threading
from pathlib import Path
from typing import NamedTuple

from pd_cache.metrics import TierMetrics
from transfer.errors import Status

log = logging.getLogger(__name__)

PAGE = 4096
_FOLDERS = 64
"""The most processes that may share one path."""
_NAME = re.compile(r"(?P<digest>[0-9a-f]{32})-[0-9a-f]{1,16}")
_SERIALS = 1 << 56
"""The limit of our serials. A larger one in a name is not ours, so counting does not continue from it."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_STRIKES = 3
_FAIR_S = 2.0
"""A disk that has not answered within this time hangs."""
_FAIR = 0.9
"""The part of that time that a call must have had."""


class DiskFault(enum.Enum):
    """What the number of an error says."""

    OBJECT = "object"
    """It concerns one file only: something else is in its place, or this process may not touch it."""
    UNCLEAR = "unclear"
    """One bad block or a dead disk: a check of the folder decides."""
    NO_ROOM = "no_room"
    """The file system, or a quota, is full: deleting files helps."""
    TOO_LARGE = "too_large"
    """A limit that deleting files does not change."""
    READ_ONLY = "read_only"
    PROCESS = "process"
    """This process lacks something. The error says nothing about the disk."""


_FAULTS = {
    DiskFault.OBJECT: (
        errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG,
        errno.ENOTDIR, errno.ENOTEMPTY, errno.ENXIO, errno.ETXTBSY, errno.EXDEV,
    ),
    DiskFault.NO_ROOM: (errno.ENOSPC, errno.EDQUOT),
    DiskFault.TOO_LARGE: (errno.EFBIG,),
    DiskFault.READ_ONLY: (errno.EROFS,),
    DiskFault.PROCESS: (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN),
}  # fmt: skip
_BY_NUMBER = {number: fault for fault, numbers in _FAULTS.items() for number in numbers}

MAY_NOT = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""Error numbers of a folder that can be read but not written."""


def fault_of(error: OSError) -> DiskFault:
    """Returns what an error of one file says."""
    return _BY_NUMBER.get(error.errno or 0, DiskFault.UNCLEAR)


def name_of(error: OSError) -> str:
    """Returns the error's symbol in lower case, such as `eio`, for a metric's label."""
    return errno.errorcode.get(error.errno or 0, "unknown").lower()


# --- files ------------------------------------------------------------------------------------------------------------


def digest_of(key: str) -> str:
    """Returns the 32 hexadecimal digits that stand for a key."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class FolderContents(NamedTuple):
    """The contents of the folder when it was opened."""

    objects: list[tuple[str, str]]
    """The digest and the name of each object, oldest first. Of two objects with one digest, only the newer is listed."""
    foreign: int
    """How many files are not ours. They are left alone."""
    torn: int
    """How many files of ours are not whole, or belong to writes that never ended. They are deleted."""


class ObjectFolder:
    """Reads, writes and deletes one process's files. The I/O methods raise OSError. They may run on several threads at once."""

    def __init__(self, path: Path, file_bytes: int, *, direct: bool, sync: bool) -> None:
        """Touches nothing yet. `file_bytes`: the size of every file, in whole pages. `sync`: flush a file's data before it is renamed."""
        assert file_bytes % PAGE == 0
        self._base = path / str(file_bytes)
        self._root = self._base
        self.file_bytes = file_bytes
        self._direct = direct and bool(_DIRECT)
        self._sync = sync
        self._lock = -1
        self._writable = False
        self._serials = itertools.count(1)
        self._left: set[Path] = set()
        """Files of ours that could not be deleted."""

    @property
    def root(self) -> Path:
        """The folder that this process has taken."""
        return self._root

    @property
    def is_held(self) -> bool:
        """Whether a folder is open and still there. Raises OSError if that cannot be found out."""
        if self._lock < 0:
            return False
        try:
            return os.path.samestat(os.stat(self._root / "lock"), os.fstat(self._lock))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False

    def open(self) -> FolderContents:
        """Takes a folder and returns its contents. Lets go of the folder that was taken before."""
        self.close()
        self._left.clear()  # the contents of the next folder are listed anyway
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
            if self._sync:
                self._sync_folder(final.parent)
        except BaseException:
            # whether it was renamed or not: a file that no caller knows of must not stay
            self._discard(temporary)
            self._discard(final)
            raise
        return name

    def read(self, name: str, pages: memoryview) -> int:
        """Reads an object into `pages`. Returns how many bytes it read."""
        return self._read_whole(self.path_of(name), pages)

    def unlink(self, name: str) -> None:
        """Deletes an object, if it is there. If it cannot be deleted, it counts in `left`."""
        self._unlink(self.path_of(name))

    @property
    def left(self) -> int:
        """How many files still take room because their deletion failed. `unlink_left` tries again."""
        return len(self._left)

    def is_left(self, name: str) -> bool:
        """Returns whether an object counts in `left`."""
        return self.path_of(name) in self._left

    def unlink_left(self) -> None:
        """Tries again to delete the files that are `left`."""
        for path in list(self._left):
            self._discard(path)

    def check(self) -> None:
        """Writes a page to the folder and reads it back. Raises OSError if that fails: then the folder is in trouble, not only a file."""
        if not self.is_held:
            raise OSError(errno.ENOENT, "the folder is gone", str(self._root))
        with mmap.mmap(-1, 2 * PAGE) as memory, memoryview(memory) as pages, pages[:PAGE] as page, pages[PAGE:] as back:
            page[:] = os.urandom(PAGE)
            temporary = self._write_temporary(page)
            try:
                if self._read_whole(temporary, back) != PAGE or page != back:
                    raise OSError(
                        errno.EIO, "a page was read back with other contents than were written", str(temporary)
                    )
            finally:
                self._discard(temporary)

    def probe(self) -> None:
        """Checks that an object can be written now. Raises OSError if not."""
        with mmap.mmap(-1, self.file_bytes) as zeros, memoryview(zeros) as pages:
            temporary = self._write_temporary(pages)
        self._discard(temporary)
        self.unlink_left()
        if not self._writable:  # it has become writable
            self._writable = True
            self._clear()

    def room(self) -> int:
        """Returns how many more objects the file system has room for. A quota may allow fewer."""
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize // self.file_bytes

    def note(self, key: str, value: bytes) -> None:
        """Writes a small text for people into the folder, whole or not at all."""
        (self._root / "tmp").mkdir(exist_ok=True)
        temporary = self._root / "tmp" / f"note-{next(self._serials):x}"
        try:
            temporary.write_bytes(value)
            temporary.rename(self._root / f"note-{digest_of(key)}")
        except BaseException:
            self._discard(temporary)
            raise

    def close(self) -> None:
        """Lets go of the folder. Idempotent."""
        descriptor, self._lock = self._lock, -1
        if descriptor >= 0:
            os.close(descriptor)

    def path_of(self, name: str) -> Path:
        return self._root / name[:2] / name

    def _take(self) -> int:
        refused: OSError | None = None
        for index in range(_FOLDERS):
            root = self._base / str(index)
            try:
                descriptor = self._open_lock(root)
            except OSError as error:
                if fault_of(error) is not DiskFault.OBJECT:
                    raise
                refused = refused or error  # something else is in its place
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            except BaseException:
                os.close(descriptor)
                raise
            self._root = root
            return descriptor
        raise refused or OSError(
            errno.EBUSY, f"{_FOLDERS} processes already use it, the most that may", str(self._base)
        )

    def _open_lock(self, root: Path) -> int:
        """Opens a folder's lock file, and creates it if need be. Opens it for reading only if nothing can be written."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | flags, 0o600)
        except OSError as error:
            if error.errno not in MAY_NOT:
                raise
            try:
                descriptor = os.open(root / "lock", os.O_RDONLY | flags)
            except FileNotFoundError:
                raise error from None
            self._writable = False
        else:
            self._writable = True
        return descriptor

    def _scan(self) -> FolderContents:
        torn = self._clear() if self._writable else 0
        seen: list[tuple[int, str, str]] = []
        foreign = 0
        highest = 0
        for folder in os.scandir(self._root):
            if folder.name in ("lock", "tmp") or folder.name.startswith("note-"):
                continue
            try:
                files = list(os.scandir(folder)) if folder.is_dir(follow_symlinks=False) else None
            except OSError as error:
                log.warning("ignoring a folder that cannot be listed: %s", error)
                files = None
            if files is None:
                foreign += 1
                continue
            for file in files:
                try:
                    status = file.stat(follow_symlinks=False)
                except OSError:
                    status = None
                match = _NAME.fullmatch(file.name)
                regular = status is not None and stat.S_ISREG(status.st_mode)
                if match is None or file.name[:2] != folder.name or status is None or not regular:
                    foreign += 1
                    continue
                if status.st_size != self.file_bytes:
                    torn += 1
                    self._delete_found(file.path)
                    continue
                serial = int(file.name[33:], 16)
                highest = max(highest, serial if serial < _SERIALS else 0)
                seen.append((status.st_mtime_ns, match["digest"], file.name))
        self._serials = itertools.count(max(highest + 1, next(self._serials)))
        newest: dict[str, str] = {}
        for _, digest, name in sorted(seen):
            if (older := newest.pop(digest, None)) is not None:
                self._delete_found(str(self.path_of(older)))
            newest[digest] = name
        return FolderContents(list(newest.items()), foreign, torn)

    def _clear(self) -> int:
        """Deletes what is left of writes that never ended, as far as possible. Returns how many there were."""
        (self._root / "tmp").mkdir(exist_ok=True)
        left = [entry.path for entry in os.scandir(self._root / "tmp")]
        for path in left:
            self._delete_found(path)
        return len(left)

    def _delete_found(self, path: str) -> None:
        """Deletes a useless file, if possible."""
        if self._writable:
            try:
                self._unlink(Path(path))
            except OSError as error:
                # the error's text escapes the path, which may not be valid UTF-8
                log.warning("could not delete a useless file: %s", error)

    def _write_temporary(self, pages: memoryview) -> Path:
        """Writes a new file with these bytes. Returns its path; the name is a serial that no object has."""
        try:
            temporary, descriptor = self._new_file()
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            # its folder was deleted
            (self._root / "tmp").mkdir(exist_ok=True)
            temporary, descriptor = self._new_file()
        try:
            try:
                done = 0
                while done < len(pages):
                    done += os.pwritev(descriptor, [pages[done:]], done)
                if self._sync:
                    os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            self._discard(temporary)
            raise
        return temporary

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            (self._left.add if _takes_room(path) else self._left.discard)(path)
            raise
        self._left.discard(path)

    def _discard(self, path: Path) -> None:
        """Deletes a file, if that is possible now."""
        with contextlib.suppress(OSError):
            self._unlink(path)

    def _new_file(self) -> tuple[Path, int]:
        while True:
            path = self._root / "tmp" / f"{next(self._serials):x}"
            try:
                return path, self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:  # an old file that could not be deleted
                continue

    def _read_whole(self, path: Path, pages: memoryview) -> int:
        descriptor = self._open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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

    def _open(self, path: Path, flags: int) -> int:
        """Opens a regular file for direct I/O, or through the page cache if the file system has no direct I/O."""
        refused = False
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC | (_DIRECT if self._direct else 0), 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            refused = True
            if flags & os.O_CREAT:  # some file systems create the file before they refuse
                path.unlink(missing_ok=True)
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO, "not a regular file", str(path))
        if refused:
            log.info("%s: this file system has no direct I/O; using the page cache", self._root)
            self._direct = False
        return descriptor

    @staticmethod
    def _sync_folder(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _takes_room(path: Path) -> bool:
    """Returns whether a path is a regular file."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a bad block: the file may well be there
        return True


# --- what the folder may be used for ----------------------------------------------------------------------------------


class DiskState(enum.Enum):
    """How the folder can be used now."""

    OPENING = "opening"
    ON = "on"
    FULL = "full"
    """The folder can be read. Nothing can be written, and there is no object of ours to evict."""
    READ_ONLY = "read-only"
    OFF = "off"
    CLOSED = "closed"


_REFUSALS = {
    DiskState.FULL: Status.NO_SPACE,
    DiskState.READ_ONLY: Status.READ_ONLY,
    DiskState.CLOSED: Status.CLOSED,
}
_READABLE = frozenset({DiskState.ON, DiskState.FULL, DiskState.READ_ONLY})


class DiskHealth:
    """Decides what a disk tier may be used for, and whether an error concerns one file or the whole folder. Thread-safe."""

    def __init__(self, folder: ObjectFolder, metrics: TierMetrics, retry_s: float) -> None:
        self.state = DiskState.OPENING
        self.trouble = "not opened yet"
        self.changed = threading.Condition()
        """Notified when the state changes."""
        self._folder = folder
        self._metrics = metrics
        self._retry_s = retry_s
        self._strikes = 0

    @property
    def readable(self) -> bool:
        return self.state in _READABLE

    @property
    def writable(self) -> bool:
        return self.state is DiskState.ON

    @property
    def refusal(self) -> Status:
        """The status of calls that the present state does not allow."""
        return _REFUSALS.get(self.state, Status.TIER_OFF)

    def worked(self) -> None:
        """Ends a row of errors. Call it after a file was read or written."""
        self._strikes = 0

    def late(self, what: str, had_s: float, usual_ms: int) -> None:
        """Switches the tier off if the disk hangs. Call it when a deadline has passed.

        `had_s` is how long the disk itself has had: a long queue or an impatient caller proves nothing.
        """
        if had_s >= _FAIR * min(_FAIR_S, usual_ms / 1000):
            self._worsen(DiskState.OFF, f"{what} got no answer within {had_s:g} s", Status.TIMEOUT.value)

    def judge(self, what: str, error: OSError, *, writing: bool) -> Status:
        """Returns the status of a call that met an error: INTERNAL if it concerns one file. An error of the folder changes the state."""
        fault = fault_of(error)
        if fault in (DiskFault.OBJECT, DiskFault.UNCLEAR):
            trouble = self._asked(writing)
            if trouble is None:
                self._strikes += fault is DiskFault.UNCLEAR
                if fault is DiskFault.OBJECT or self._strikes < _STRIKES:
                    self._metrics.spoiled(what, name_of(error), str(error))
                    return Status.INTERNAL
            else:
                what, error, fault = f"{what} failed, and then a check of the folder", trouble, fault_of(trouble)
        if fault is DiskFault.PROCESS:
            self._metrics.spoiled(what, name_of(error), str(error))
            return Status.OVERLOADED
        self._worsen(state_of(error), f"{what} failed: {error}", name_of(error))
        return self.refusal

    def settle(self, state: DiskState, trouble: str = "", reason: str = "") -> None:
        """Sets the state that the keeper found when it tried the folder. A closed tier stays closed."""
        with self.changed:
            before = self.state
            if before in (state, DiskState.CLOSED):
                return
            self._strikes = 0
            self._switch(state, trouble)
        if state is DiskState.ON:
            self._metrics.switched_on()
            what = "open" if before is DiskState.OPENING else "back"
            log.info("tier %s: %s is %s", self._metrics.tier, self._folder.root, what)
        else:
            self._say(state, trouble, reason)

    def close(self) -> bool:
        """Sets the state to closed, for good. Returns False if it was closed before."""
        with self.changed:
            before = self.state
            self._switch(DiskState.CLOSED, "closed")
            return before is not DiskState.CLOSED

    def _asked(self, writing: bool) -> OSError | None:
        """Returns the folder's own error, if it has one that matters for reading or, with `writing`, for writing."""
        try:
            self._folder.check()
        except OSError as trouble:
            if writing or state_of(trouble) is DiskState.OFF:
                return trouble
        return None

    def _worsen(self, state: DiskState, trouble: str, reason: str) -> None:
        with self.changed:
            if self.state in (state, DiskState.OFF, DiskState.CLOSED):
                return
            self._switch(state, trouble)
        self._say(state, trouble, reason)

    def _switch(self, state: DiskState, trouble: str) -> None:
        self.state, self.trouble = state, trouble
        self.changed.notify_all()

    def _say(self, state: DiskState, trouble: str, reason: str) -> None:
        self._metrics.switched_off(reason)
        log.warning(
            "tier %s: %s; %s until its folder works again (next try in %g s)",
            self._metrics.tier,
            trouble,
            "the tier is not used" if state is DiskState.OFF else "nothing is written",
            self._retry_s,
        )


def state_of(error: OSError) -> DiskState:
    """Returns how a folder that gives this error can be used."""
    if fault_of(error) in (DiskFault.NO_ROOM, DiskFault.TOO_LARGE):
        return DiskState.FULL
    return DiskState.READ_ONLY if error.errno in MAY_NOT else DiskState.OFF
