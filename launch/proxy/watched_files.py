"""Reads files again when they change: keys and certificates."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pd_cache.errors import ConfigError

log = logging.getLogger(__name__)

_LOOK_S = 2.0

_Signature = tuple[tuple[int, int, int] | None, ...]


class _WatchedFile(NamedTuple):
    what: str
    files: Sequence[str]
    load: Callable[[], None]


class WatchedFiles:
    """Loads files, and loads them again when they change. If a file cannot be used, logs that and keeps what was loaded before."""

    def __init__(self) -> None:
        self._watches: list[_WatchedFile] = []
        self._seen: dict[str, _Signature] = {}
        self._said: dict[str, str] = {}
        """What was logged about unusable files. It is logged once, and the files are tried again at each look."""

    def add(self, what: str, files: Sequence[str], load: Callable[[], None]) -> None:
        """Calls `load` now, and on another thread whenever one of `files` changes.

        `load` must raise ConfigError if a file cannot be used, and then change nothing. `what` names the files in the log.
        """
        self._seen[what] = _signature(files)  # first, so that a file that changes while it is read is read again
        load()
        self._watches.append(_WatchedFile(what, files, load))

    def look(self) -> None:
        """Loads the files that changed since the last look."""
        for watch in self._watches:
            signature = _signature(watch.files)
            if signature == self._seen[watch.what]:
                continue
            try:
                watch.load()
            except ConfigError as error:
                if self._said.get(watch.what) != str(error):
                    log.error(
                        "%s changed and cannot be used; the previous contents stay in force: %s", watch.what, error
                    )
                self._said[watch.what] = str(error)
            else:
                self._seen[watch.what] = signature
                self._said.pop(watch.what, None)
                log.info("%s changed and was read again", watch.what)

    async def follow(self) -> None:
        """Looks every two seconds, for ever. Looks on another thread, because a file may be on a server that does not answer."""
        while self._watches:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self.look)


def _signature(files: Sequence[str]) -> _Signature:
    """Returns a value that changes when a file is written, replaced or removed. Follows links, because secrets are mounted through them."""
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            status = os.stat(file)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
