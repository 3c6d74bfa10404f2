"""ObjectFolder: files of one size, each an object, in fanned-out folders that one process holds.

    <path>/<file bytes>/<n>/lock                        held while a process uses folder n
    <path>/<file bytes>/<n>/tmp/<serial>                being written
    <path>/<file bytes>/<n>/<xx>/<digest>-<serial>      an object; xx are the digest's first two digits

A file is an object (payload and trailer) filled up with zeros to whole pages, so that direct I/O can move it in one piece.
It is written under a temporary name and renamed when it is whole; the serial keeps two writers of one key apart. The digest
is of the key, so that any key makes a safe name. What a name promises is not believed: objects are checked when read.

Processes that share a path each take a folder of their own, the first that is free. A folder is given up when its process
ends, whichever way, and found again with all that is in it by the next that starts.
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
import shutil
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

PAGE = 4096
_FOLDERS = 64
"""Processes that may share one path."""
_NAME = re.compile(r"(?P<digest>[0-9a-f]{32})-[0-9a-f]{1,16}")
_DIRECT: int = getattr(os, "O_DIRECT", 0)


def digest_of(key: str) -> str:
    """The 32 hexadecimal digits that stand for a key."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Found(NamedTuple):
    """What was there when the folder was opened."""

    objects: list[tuple[str, str]]
    """Digest and name of each object, oldest first; of two of one digest only the newer."""
    foreign: int
    """Files that are not ours: left alone."""
    torn: int
    """Files with a name of ours that are not whole, and writes that never ended: deleted."""


class ObjectFolder:
    """One process's files. The I/O methods raise OSError; they may run on several threads at once."""

    def __init__(self, path: Path, file_bytes: int, *, direct: bool, sync: bool) -> None:
        """Nothing is touched yet. `file_bytes`: of every file, whole pages. `sync`: data first, name afterwards."""
        assert file_bytes % PAGE == 0
        self._base = path / str(file_bytes)
        self._root = self._base
        self._file_bytes = file_bytes
        self._direct = direct and bool(_DIRECT)
        self._sync = sync
        self._lock = -1
        self._serials = itertools.count(1)

    @property
    def root(self) -> Path:
        """The folder that this process holds."""
        return self._root

    def open(self) -> Found:
        """Take a folder and see what is in it. Once it succeeded, a further call takes nothing and finds nothing."""
        if self._lock >= 0:
            return Found([], 0, 0)
        self._lock = self._take()
        try:
            return self._scan()
        except BaseException:
            self.close()
            raise

    def write(self, digest: str, pages: memoryview) -> str:
        """Write an object and publish it; its name."""
        serial = f"{next(self._serials):x}"
        name = f"{digest}-{serial}"
        temporary, final = self._root / "tmp" / serial, self.path_of(name)
        try:
            self._write_whole(temporary, pages)
            final.parent.mkdir(exist_ok=True)
            temporary.rename(final)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        if self._sync:
            self._sync_folder(final.parent)
        return name

    def read(self, name: str, pages: memoryview) -> int:
        """Read an object; how many bytes there were."""
        descriptor = os.open(self.path_of(name), os.O_RDONLY | os.O_CLOEXEC | self._flags)
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

    def unlink(self, name: str) -> None:
        """Delete an object; nothing happens if it is gone."""
        with contextlib.suppress(FileNotFoundError):
            self.path_of(name).unlink()

    def probe(self) -> None:
        """Try whether an object could be written now. OSError if not."""
        (self._root / "tmp").mkdir(parents=True, exist_ok=True)
        temporary = self._root / "tmp" / f"probe-{next(self._serials):x}"
        try:
            with mmap.mmap(-1, self._file_bytes) as zeros, memoryview(zeros) as pages:
                self._write_whole(temporary, pages)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def note(self, key: str, value: bytes) -> None:
        """Leave a small text for people, whole or not at all."""
        temporary = self._root / "tmp" / f"note-{next(self._serials):x}"
        temporary.write_bytes(value)
        temporary.rename(self._root / f"note-{digest_of(key)}")

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        descriptor, self._lock = self._lock, -1
        if descriptor >= 0:
            os.close(descriptor)

    def path_of(self, name: str) -> Path:
        return self._root / name[:2] / name

    @property
    def _flags(self) -> int:
        return _DIRECT if self._direct else 0

    def _take(self) -> int:
        for index in range(_FOLDERS):
            root = self._base / str(index)
            (root / "tmp").mkdir(parents=True, exist_ok=True)
            descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        raise OSError(errno.EBUSY, f"{_FOLDERS} processes hold folders below it already", str(self._base))

    def _scan(self) -> Found:
        torn = sum(1 for _ in (self._root / "tmp").iterdir())
        shutil.rmtree(self._root / "tmp")
        (self._root / "tmp").mkdir()
        seen: list[tuple[int, str, str]] = []
        foreign = 0
        highest = 0
        for folder in os.scandir(self._root):
            if folder.name in ("lock", "tmp") or folder.name.startswith("note-"):
                continue
            if not folder.is_dir(follow_symlinks=False):
                foreign += 1
                continue
            for file in os.scandir(folder):
                match = _NAME.fullmatch(file.name)
                if match is None or file.name[:2] != folder.name or not file.is_file(follow_symlinks=False):
                    foreign += 1
                    continue
                status = file.stat(follow_symlinks=False)
                if status.st_size != self._file_bytes:
                    torn += 1
                    os.unlink(file)
                    continue
                highest = max(highest, int(file.name[33:], 16))
                seen.append((status.st_mtime_ns, match["digest"], file.name))
        self._serials = itertools.count(highest + 1)
        newest: dict[str, str] = {}
        for _, digest, name in sorted(seen):
            if (older := newest.pop(digest, None)) is not None:
                self.unlink(older)
            newest[digest] = name
        return Found(list(newest.items()), foreign, torn)

    def _write_whole(self, path: Path, pages: memoryview) -> None:
        descriptor = self._create(path)
        try:
            done = 0
            while done < len(pages):
                done += os.pwritev(descriptor, [pages[done:]], done)
            if self._sync:
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags | self._flags, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        log.info("%s: no direct I/O on this file system, files go through the page cache", self._root)
        self._direct = False
        with contextlib.suppress(FileNotFoundError):  # some file systems refuse after they have created it
            path.unlink()
        return os.open(path, flags, 0o600)

    @staticmethod
    def _sync_folder(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
