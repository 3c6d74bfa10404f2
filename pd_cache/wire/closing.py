"""Closes file descriptors that other processes sent."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Sequence

from pd_cache.wire.sealed import may_be_sealed

log = logging.getLogger(__name__)


class Closer:
    """Closes descriptors without waiting for any of them.

    To close a descriptor can take for ever: a file waits for its file system, a lingering socket for its peer. The calling thread
    closes memory, which never waits. A thread of this object, started when it is first needed, closes everything else.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def close_all(self, descriptors: Sequence[int]) -> None:
        """Closes the descriptors, now or soon."""
        for descriptor in descriptors:
            if may_be_sealed(descriptor):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            else:
                self._waiting.put(descriptor)
                self._start()

    def stop(self) -> None:
        """Ends the thread. A thread that a descriptor holds up ends with the process."""
        with self._lock:
            thread = self._thread
        self._waiting.put(-1)
        if thread is not None:
            thread.join(1)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pd-cache-closing", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (descriptor := self._waiting.get()) >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
