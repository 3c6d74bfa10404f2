"""An address that is one server's alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path

from pd_cache.server.channel import CacheServerError


def own_address(url: str, stack: contextlib.ExitStack) -> Path:
    """Make sure that nobody else listens at `url`, or can, until `stack` is closed; where the lifeline's socket goes.

    CacheServerError where another server does, or others than this user may write beside the socket.
    """
    if not url.startswith("ipc://"):
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-cache-"))) / "lifeline"
    path = Path(url.removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if path.parent.parent == Path("/tmp") and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022):
        raise CacheServerError(f"{path.parent} belongs to somebody else, or others may write to it; choose another url")
    lock = stack.enter_context(path.with_name(f"{path.name}.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CacheServerError(f"another cache server listens at {url}") from None
    stack.callback(path.unlink, missing_ok=True)
    return path.with_name(f"{path.name}.fds")
