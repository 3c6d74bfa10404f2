"""Reserves an address for a single server."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pd_cache.runtime import RuntimeFolderError, lock_file, own_folder, runtime_folder, temporary_folder
from pd_cache.wire.channel import CacheServerError

_SHARED = Path("/tmp")


def own_address(url: str, stack: contextlib.ExitStack) -> Path:
    """Makes sure that no other server can listen at `url` until `stack` is closed. Returns the path for the lifeline's socket.

    Raises CacheServerError if another server listens there, or if other users can write beside the socket.
    """
    try:
        if not url.startswith("ipc://"):
            return stack.enter_context(temporary_folder()) / "lifeline"
        path = Path(url.removeprefix("ipc://"))
        if path.parent == runtime_folder() or path.parent.parent == _SHARED:
            with own_folder(path.parent):
                pass  # the result of the check stays true: no other user can replace the folder
        else:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not stack.enter_context(lock_file(path.with_name(f"{path.name}.lock"))):
            raise CacheServerError(f"another cache server already listens at {url}")
    except (RuntimeFolderError, OSError) as error:
        raise CacheServerError(f"{url}: {error}; or choose another url") from None
    stack.callback(path.unlink, missing_ok=True)
    return path.with_name(f"{path.name}.fds")
