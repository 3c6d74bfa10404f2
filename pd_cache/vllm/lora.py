"""Computes digests of LoRA adapters' weights, which distinguish adapters of the same name.

vLLM identifies an adapter by its name and path. Two nodes may have different weights under both, and files
may change. Threads of our own read the files, so the scheduler never waits for them. Until an adapter's
digest is known, its requests neither load nor store.

vLLM does not say when it reads an adapter's files, and its own prefix cache keeps what earlier weights
computed. So only the first digest of a name and path counts. With each later request, a thread checks the
files. Once they have changed, nobody knows which weights computed a block, and the adapter loads and stores
nothing until vLLM is started again.
"""

from __future__ import annotations

import functools
import hashlib
import time
from pathlib import Path
from typing import Literal

from pd_cache.vllm.worker_caches import on_all_cores
from pd_cache.weights import FileStamp, WeightsError, adapter_digest, adapter_stamps
from transfer.calls import CallThreads

_LATE_S = 60.0
"""After this time, another thread takes over from a thread that reads an adapter, because the file system may
hang."""
_SPARE = 3
_CLOSE_S = 1.0

Unidentified = Literal["adapter_unread", "adapter_unreadable", "adapter_changed"]


class Adapter:
    """The digest of an adapter, if it is known. The scheduler's thread reads it. At most one thread of
    `Adapters` at a time writes it."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self.digest = b""
        """32 bytes; empty while the adapter cannot be identified."""
        self.why: Unidentified = "adapter_unread"
        """Why there is no digest."""
        self.detail = ""
        """The reason in words."""
        self.stamps: tuple[FileStamp, ...] | None = None
        """The stamps of the files when the digest was made."""
        self.checking = False


class Adapters:
    """Identifies an engine's adapters. `of` and `close` are called on the scheduler's thread."""

    def __init__(self, served: str = "") -> None:
        """`served` describes the engine's settings that change an adapter's KV."""
        self._served = served
        self._known: dict[tuple[str, str], Adapter] = {}
        """By name and path, as in vLLM's block hashes."""
        self._threads: CallThreads | None = None

    def of(self, name: str, path: str) -> Adapter:
        """Returns the state of an adapter, and makes a thread check its files. Does not wait for the
        check."""
        adapter = self._known.setdefault((name, path), Adapter(name, path))
        if not adapter.checking and adapter.why != "adapter_changed":
            adapter.checking = True
            check = functools.partial(self._check, adapter)
            done = functools.partial(setattr, adapter, "checking", False)
            self._reading().submit(check, time.monotonic() + _LATE_S, done)
        return adapter

    def close(self) -> None:
        """Ends the threads, except those that wait for a file system. Idempotent."""
        if self._threads is not None:
            self._threads.close(_CLOSE_S)

    def _reading(self) -> CallThreads:
        if self._threads is None:
            with on_all_cores():
                self._threads = CallThreads("pd-cache-adapters", 1, spare=_SPARE)
        return self._threads

    def _check(self, adapter: Adapter) -> None:
        """Reads an adapter, or, if it has been read, checks whether its files have changed."""
        folder = Path(adapter.path).expanduser()
        try:
            stamps = adapter_stamps(folder)
            digest = adapter_digest(folder) if adapter.stamps is None else ""
            if adapter_stamps(folder) != stamps:
                stamps = ()  # the files changed while they were read
        except (WeightsError, OSError, ValueError, RuntimeError) as error:
            if adapter.stamps is None:
                _refuse(adapter, "adapter_unreadable", str(error))
            return  # the files are gone, not replaced: the digest stays
        if adapter.stamps is None and stamps:
            described = hashlib.sha256(f"{digest} {self._served}".encode()).digest()
            adapter.stamps, adapter.digest = stamps, described
        elif adapter.stamps is not None and stamps != adapter.stamps:
            _refuse(
                adapter,
                "adapter_changed",
                f"{folder}: its files changed while vLLM ran; load others from a new path",
            )


def _refuse(adapter: Adapter, why: Unidentified, detail: str) -> None:
    adapter.detail, adapter.why, adapter.digest = detail, why, b""
