"""LaneL2Adapter: LMCache's `L2AdapterInterface` (0.5.6), reduced to three methods that work. Imports LMCache; see `lmcache`.

LMCache submits tasks, polls an event descriptor of each kind, and asks for results. Here each kind is a `TaskLane`, which runs the methods.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from pd_cache.adapters.tasks import TaskLane
from pd_cache.deadline import Deadline

_CLOSE_S = 10.0


class LaneL2Adapter(L2AdapterInterface):
    """Thread-safe. A task that raises, or that cannot be run in time, has stored, found or loaded nothing."""

    def __init__(
        self,
        name: str,
        threads: int,
        complain: Callable[[str], None],
        *,
        timeout: float,
        lookup_timeout: float,
        capacity: int = 0,
    ) -> None:
        """`name` is for the threads: `threads` for stores, as many for loads, and one for lookups. `complain` is called with a line about
        tasks that raised. `timeout` and `lookup_timeout`: the seconds that a task may take. `capacity` (bytes) is for LMCache's eviction."""
        super().__init__(capacity)
        self._timeout, self._lookup_timeout = timeout, lookup_timeout
        self._stores: TaskLane[L2StoreResult] = TaskLane(f"{name}-store", threads, complain)
        self._lookups: TaskLane[Bitmap] = TaskLane(f"{name}-lookup", 1, complain)
        self._loads: TaskLane[Bitmap] = TaskLane(f"{name}-load", threads, complain)

    # --- on the threads ---------------------------------------------------------------------------------------------

    @abstractmethod
    def store(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> int | None:
        """Stores objects. Returns how many bytes were not there before, or None if they are not all there now."""

    @abstractmethod
    def lookup(self, keys: Sequence[Any], deadline: Deadline) -> list[bool]:
        """Returns for each key whether there is an object, which is protected until it is loaded."""

    @abstractmethod
    def load(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> list[bool]:
        """Loads objects into LMCache's memory. Returns for each whether it is there. Must not write there after it has returned."""

    # --- LMCache's interface ----------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._stores.event

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event

    def get_load_event_fd(self) -> int:
        return self._loads.event

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begins to store objects. The task succeeds if all of them are there in the end."""

        def store(deadline: Deadline) -> L2StoreResult:
            stored = self.store(keys, objects, deadline)
            return L2StoreResult(stored is not None, stored or 0)

        return self._stores.submit(store, L2StoreResult(False, 0), self._timeout)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Begins to look keys up."""
        return self._lookups.submit(
            lambda deadline: _bits(self.lookup(keys, deadline)), Bitmap(len(keys)), self._lookup_timeout
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Does nothing: the lease of Mooncake's master ends by itself, and cannot be given back."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begins to load objects. An object whose bit is not set in the result may hold anything."""
        return self._loads.submit(
            lambda deadline: _bits(self.load(keys, objects, deadline)), Bitmap(len(keys)), self._timeout
        )

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def close(self) -> None:
        """Ends all tasks, those that wait as failed, and closes the descriptors. Idempotent."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close(_CLOSE_S)


def _bits(flags: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(flags))
    for index, flag in enumerate(flags):
        if flag:
            bitmap.set(index)
    return bitmap
