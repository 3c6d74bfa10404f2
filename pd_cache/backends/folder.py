"""ObjectFolder: keeps each object in a file, in fanned-out folders that one process holds. All files have one size.

    <path>/<file bytes>/<n>/lock                        locked while a process uses folder n
    <path>/<file bytes>/<n>/tmp/<serial>                being written
    <path>/<file bytes>/<n>/<xx>/<digest>-<serial>      an object; xx are the digest's first two digits
    <path>/<file bytes>/<n>/stray-<name>-<number>       something that was found in the place of a folder of ours

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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pd_cache.backends.faults import MAY_NOT, DiskFault, fault_of

log = logging.getLogger(__name__)

PAGE = 4096
_FOLDERS = 64
"""The most processes that may share one path."""
_NAME = re.compile(r"(?P<digest>[0-9a-f]{32})-[0-9a-f]{1,16}")
_SERIALS = 1 << 56
"""The limit of our serials. A larger one in a name is not ours, so counting does not continue from it."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


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
        self._moving_aside = threading.Lock()
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
        """Takes a folder and returns its contents. While a folder is taken, further calls return empty contents."""
        if self.is_held:
            return FolderContents([], 0, 0)
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
            self._ensure(final.parent)
            temporary.rename(final)
        except BaseException:
            self._discard(temporary)
            raise
        if self._sync:
            self._sync_folder(final.parent)
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
        self._ensure(self._root / "tmp")
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

    @property
    def _flags(self) -> int:
        return _DIRECT if self._direct else 0

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
            for file, status in _looked_at(files):
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
        self._ensure(self._root / "tmp")
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

    def _ensure(self, folder: Path) -> None:
        """Makes sure that a folder of ours exists. Moves anything else in its place aside."""
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not _is_folder(folder):
                with self._moving_aside:
                    self._move_aside(folder)

    def _move_aside(self, path: Path) -> None:
        """Makes a folder where something else was. Another thread may do the same."""
        if os.path.lexists(path) and not _is_folder(path):
            numbers = (self._root / f"stray-{path.name}-{number}" for number in itertools.count(1))
            aside = next(candidate for candidate in numbers if not os.path.lexists(candidate))
            os.rename(path, aside)
            log.warning("%s was not a folder; renamed it to %s", path, aside.name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)

    def _write_temporary(self, pages: memoryview) -> Path:
        """Writes a new file with these bytes. Returns its path; the name is a serial that no object has."""
        try:
            temporary, descriptor = self._new_file()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            # its folder was deleted, or something else is in its place
            self._ensure(self._root / "tmp")
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
                return path, self._create(path)
            except FileExistsError:  # an old file that could not be deleted
                continue

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags | self._flags, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        self._through_the_page_cache()
        with contextlib.suppress(FileNotFoundError):  # some file systems create the file before they refuse
            path.unlink()
        return os.open(path, flags, 0o600)

    def _read_whole(self, path: Path, pages: memoryview) -> int:
        descriptor = self._open_to_read(path)
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

    def _open_to_read(self, path: Path) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        refused = False
        try:
            descriptor = os.open(path, flags | self._flags)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            refused = True
            descriptor = os.open(path, flags)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO, "not a regular file", str(path))
        except BaseException:
            os.close(descriptor)
            raise
        if refused:
            self._through_the_page_cache()
        return descriptor

    def _through_the_page_cache(self) -> None:
        log.info("%s: this file system has no direct I/O; using the page cache", self._root)
        self._direct = False

    @staticmethod
    def _sync_folder(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_folder(path: Path) -> bool:
    """Returns whether a path is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _takes_room(path: Path) -> bool:
    """Returns whether a path is a regular file."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a bad block: the file may well be there
        return True


def _looked_at(files: list[os.DirEntry[str]]) -> Iterator[tuple[os.DirEntry[str], os.stat_result | None]]:
    """Yields entries with their status, or with None if it cannot be found out."""
    for file in files:
        try:
            yield file, file.stat(follow_symlinks=False)
        except OSError:
            yield file, None
