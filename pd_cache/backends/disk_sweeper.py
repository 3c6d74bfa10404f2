"""DiskSweeper: deletes the files of a disk tier, and keeps its budget true to the files that are there.

A file that cannot be deleted costs the budget a place. The keeper tries again, and the place comes back when the file is gone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from pd_cache.backends.disk_health import DiskHealth
from pd_cache.backends.faults import DiskFault, fault_of, name_of
from pd_cache.backends.folder import ObjectFolder
from pd_cache.backends.index import EvictingIndex
from pd_cache.metrics import TierMetrics
from transfer.calls import CallThreads
from transfer.errors import Status


class DiskSweeper:
    """Deletes files, one after another. Thread-safe."""

    def __init__(
        self, folder: ObjectFolder, index: EvictingIndex[str], places: int, health: DiskHealth, metrics: TierMetrics
    ) -> None:
        """`places`: the index's capacity while every file can be deleted."""
        self.litter: deque[str] = deque()
        """Files that are still to be deleted. Code that adds one need not sweep: the next write does, before it uses any room."""
        self._folder = folder
        self._index = index
        self._places = places
        self._health = health
        self._metrics = metrics
        self._sweeping = threading.Lock()
        # its own thread, so that deletions go on even if late calls hold all other threads
        self._deletions = CallThreads(f"{metrics.tier}-delete", 1, limit=2)

    def unlink(self, names: Sequence[str], seconds: float) -> None:
        """Puts files on the list and calls `sweep_soon`."""
        self.litter.extend(names)
        self.sweep_soon(seconds)

    def sweep_soon(self, seconds: float) -> None:
        """Sweeps on another thread, so that a disk that hangs does not hold up callers that read, put or remove."""
        # refused if another sweep is already queued; that one finds the same files
        self._deletions.submit(self.sweep, time.monotonic() + seconds)

    def sweep(self) -> Status:
        """Deletes the files on the list. Returns NO_SPACE if some of them could not be deleted and keep their places.

        Returns another status if the disk is in trouble; the files then stay on the list.
        """
        with self._sweeping:
            some_stay = False
            while self.litter:
                deleted = self._delete(self.litter[0])
                if deleted not in (Status.OK, Status.NO_SPACE):
                    return deleted
                self.litter.popleft()
                some_stay |= deleted is Status.NO_SPACE
            return Status.NO_SPACE if some_stay else Status.OK

    def fit(self) -> None:
        """Takes a place from the budget for each file that could not be deleted."""
        most = self._places - self._folder.left
        if self._index.capacity > most:
            self._index.shrink(most)
            with self._health.changed:
                self._health.changed.notify_all()  # the keeper tries again to delete them

    def grow(self) -> None:
        """Tries again to delete the files that are left, and lets the budget grow as far as the file system has room.

        Raises OSError if the room cannot be found out.
        """
        self._folder.unlink_left()
        self._index.grow(self._folder.room(), self._places - self._folder.left)

    def close(self, seconds: float) -> bool:
        """Stops the deleting thread. Returns False if a deletion still runs after `seconds`."""
        return self._deletions.close(seconds)

    def _delete(self, name: str) -> Status:
        try:
            self._folder.unlink(name)
        except OSError as error:
            self.fit()
            if fault_of(error) is DiskFault.OBJECT:
                self._metrics.spoiled("a deletion", name_of(error), str(error))
            elif (status := self._health.judge("a deletion", error, writing=True)) is not Status.INTERNAL:
                return status
            return Status.NO_SPACE if self._folder.is_left(name) else Status.OK
        return Status.OK
