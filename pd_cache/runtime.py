"""The folder in which processes of a user leave files for one another: sockets, locks, and notes about what
runs.

The folder belongs to the user alone: `$XDG_RUNTIME_DIR/pd-cache` or `/tmp/pd-cache-UID`. In /tmp, every local
user can create that folder first, or a link of that name. So nothing in it is trusted until the folder itself
has been opened without following a link, and its owner and mode have been read from the open folder. After
that no other user can replace it: /tmp is sticky, and the folder's mode is 0700.

A file is valid only while its writer holds a lock on it. The kernel releases the lock when the writer ends,
however it ends. A pid would not be enough, because the kernel may have given it to another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pd_cache.errors import PdCacheError

_SHARED = Path("/tmp")
_TEMPORARY = "tmp-"
_READ_LIMIT = 4 << 20


class RuntimeFolderError(PdCacheError):
    """The folder for runtime files may not be this user's own."""


def runtime_folder() -> Path:
    """Returns the folder of this user's sockets and notes. It need not exist; `own_folder` makes and checks
    it."""
    return _folders()[0]


def _folders() -> list[Path]:
    """Returns the folders that processes of this user may have chosen: not every process has
    XDG_RUNTIME_DIR."""
    shared = _SHARED / f"pd-cache-{os.geteuid()}"
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    if named.startswith("/"):
        try:
            os.close(_opened(Path(named)))
        except (OSError, RuntimeFolderError):
            pass
        else:
            return [Path(named) / "pd-cache", shared]
    return [shared]


@contextmanager
def own_folder(path: Path | None = None) -> Iterator[int]:
    """Makes the folder (by default `runtime_folder()`) if it does not exist, and yields a descriptor of it.

    Raises RuntimeFolderError if it is a link, belongs to another user, or is open to others.
    """
    path = path or runtime_folder()
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        descriptor = _opened(path)
    except OSError as error:
        raise RuntimeFolderError(
            f"{path}: cannot be used for runtime files: {error.strerror}; {_REPAIR}"
        ) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Makes a folder inside the runtime folder, and removes it at the end.

    It also removes such folders that killed processes left behind. Raises RuntimeFolderError for the same
    reasons as `own_folder`.
    """
    with own_folder() as parent:
        base = runtime_folder()
        for name in os.listdir(parent):
            if name.startswith(_TEMPORARY) and not _is_in_use(name, parent):
                shutil.rmtree(base / name, ignore_errors=True)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=base))
        holder = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        # locked before it gets its name, because other processes take an unlocked folder for a dead process's
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = new.rename(base / f"{_TEMPORARY}{new.name.removeprefix('new-')}")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(holder)


@contextmanager
def note(name: str, text: str) -> Iterator[str | None]:
    """Leaves `text` under `name` in the runtime folder while the context lasts; see `read_note`.

    Yields None. If a living process has already left a note under this name, yields that note instead, and
    leaves nothing.
    """
    if (other := read_note(name)) is not None:
        yield other
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(own_folder())
        with temporary_folder() as private:
            draft = private / name
            file = stack.enter_context(open(_made(draft), "w", encoding="utf-8"))
            file.write(text)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # for the reason in `temporary_folder`
            os.rename(draft, name, dst_dir_fd=folder)
        try:
            yield None
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)


def read_note(name: str) -> str | None:
    """Returns the note of a living process of this user; None if there is none. Raises RuntimeFolderError for
    the same reasons as `own_folder`."""
    for number, path in enumerate(_folders()):
        try:
            folder = _opened(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            if number:  # a folder that we do not use; it may be another user's
                continue
            raise RuntimeFolderError(f"{path}: {error.strerror}; {_REPAIR}") from None
        try:
            found = _read(name, folder)
        finally:
            os.close(folder)
        if found is not None:
            return found
    return None


def _read(name: str, folder: int) -> str | None:
    try:
        descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
    except OSError:
        return None
    with open(descriptor, encoding="utf-8") as file:
        return file.read(_READ_LIMIT) if _locked(descriptor) else None


@contextmanager
def lock_file(path: Path) -> Iterator[bool]:
    """Holds a lock on a file, which is removed afterwards. Yields False immediately if another process holds
    the lock.

    A file left behind by a killed process is taken over.
    """
    with open(_made(path), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)


_REPAIR = "remove it, or set XDG_RUNTIME_DIR to a folder of your own with mode 0700"


def _opened(path: Path) -> int:
    """Returns a descriptor of a folder that belongs to this user alone.

    Raises OSError if the folder does not exist, RuntimeFolderError if it does not belong to this user alone.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found, above = os.fstat(descriptor), path.parent.stat()
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid():
            raise RuntimeFolderError(f"{path}: belongs to another user; {_REPAIR}")
        if mode & 0o077:
            raise RuntimeFolderError(
                f"{path}: has mode {mode:04o}, so that others may look into it; {_REPAIR}"
            )
        if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
            raise RuntimeFolderError(
                f"{path}: others may rename it, because {path.parent} is not sticky; {_REPAIR}"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _made(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)


def _locked(descriptor: int) -> bool:
    """Returns whether another open file holds a lock on this one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_in_use(name: str, folder: int) -> bool:
    """Returns whether the process that made a temporary folder is still alive."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return True  # not our folder
    try:
        return _locked(descriptor)
    finally:
        os.close(descriptor)
