"""PdCacheL2Adapter: LMCache's `L2AdapterInterface` (0.5.6) over an `ObjectCache`. Imports LMCache; see `lmcache`.

1. Every task ends, at the latest at `timeout_s`, and the pool's trouble is a failed store or a miss.
2. A load copies into LMCache's memory on a thread of ours, so nothing writes there after the task has ended.
3. LMCache's key has neither types nor shapes. Each value bears those of its object, and a load into memory of others is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from pd_cache.adapters.lmcache import LMCacheOptions
from pd_cache.adapters.options import read_options, settings_of
from pd_cache.adapters.tasks import TaskLane
from pd_cache.object_cache import PART_BYTES, ObjectCache
from pd_cache.values import TensorForm
from transfer.errors import Status

log = logging.getLogger(__name__)

_CLOSE_S = 10.0
_REMEMBERED = 1 << 18
"""How many keys that were stored here are remembered with their sizes, for LMCache's accounts."""


class PdCacheL2Adapter(L2AdapterInterface):
    """Stores and loads LMCache's objects in a Mooncake pool. Thread-safe."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """Takes `adapter_params` (`LMCacheOptions`). Does not wait for the pool.

        Raises ConfigError for parameters that cannot be used, MissingLibraryError if Mooncake cannot be loaded.
        """
        options = read_options(params, LMCacheOptions, "adapter_params")
        super().__init__(int(options.capacity))
        part = PART_BYTES if options.part_size is None else int(options.part_size)
        self._timeout = options.timeout_s
        self.cache = ObjectCache.open(settings_of(options), f"lmcache\n{options.namespace}", part_bytes=part)
        complain = log.warning
        self._stores: TaskLane[L2StoreResult] = TaskLane("lmcache-store", options.threads, complain)
        self._lookups: TaskLane[Bitmap] = TaskLane("lmcache-lookup", 1, complain)
        self._loads: TaskLane[Bitmap] = TaskLane("lmcache-load", options.threads, complain)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """The bytes of what was stored here, by name; the oldest are forgotten first."""
        self._lock = threading.Lock()
        self._closed = False

    # --- event descriptors ------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._stores.event

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event

    def get_load_event_fd(self) -> int:
        return self._loads.event

    # --- tasks ------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begins to store objects. The task succeeds if the pool holds all of them in the end."""
        return self._stores.submit(
            lambda seconds: self._store(keys, objects, seconds), L2StoreResult(False, 0), self._timeout
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Begins to look keys up. What is found is protected by the lease that the pool's master gives with its answer."""
        return self._lookups.submit(
            lambda seconds: _bits(
                [status is Status.OK for status in self.cache.exists_many(_names(keys), timeout=seconds)]
            ),
            Bitmap(len(keys)),
            self._timeout,
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Does nothing: a lease ends by itself, and cannot be given back."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begins to load objects. An object whose bit is not set in the result may hold anything."""
        return self._loads.submit(lambda seconds: self._load(keys, objects, seconds), Bitmap(len(keys)), self._timeout)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def delete(self, keys: list[Any]) -> None:
        """Removes objects. Reports those that were there. Never raises."""
        if not keys or self._closed:
            return
        try:
            names = _names(keys)
            statuses = self.cache.remove_many(names, timeout=self._timeout)
            gone = [index for index, status in enumerate(statuses) if status is Status.OK]
            with self._lock:
                sizes = [self._sizes.pop(names[index], 0) for index in gone]
            if gone:
                self._notify_keys_deleted([keys[index] for index in gone], sizes)
        except Exception:
            log.exception("deleting %d objects failed", len(keys))

    def report_status(self) -> dict[str, Any]:
        """Returns whether the pool can be used now, and what has been counted."""
        totals = {"/".join(name): count for name, count in self.cache.metrics.totals().items() if count}
        return {
            "is_healthy": self.cache.available,
            "type": type(self).__name__,
            "namespace": self.cache.namespace,
            "part_bytes": self.cache.part_bytes,
            "counts": totals,
        }

    def close(self) -> None:
        """Ends all tasks, those that wait as failed, and closes the descriptors. Idempotent."""
        self._closed = True
        self.cache.close()  # first: tasks under way then end at once
        for lane in (self._stores, self._lookups, self._loads):
            lane.close(_CLOSE_S)

    # --- on the threads ---------------------------------------------------------------------------------------------

    def _store(self, keys: Sequence[Any], objects: Sequence[Any], seconds: float) -> L2StoreResult:
        names, values = _names(keys), [one.byte_array for one in objects]
        statuses = self.cache.put_many(names, values, forms=[_form(one) for one in objects], timeout=seconds)
        new: dict[str, int] = {}
        with self._lock:
            for index, status in enumerate(statuses):
                if status is Status.OK and names[index] not in self._sizes:
                    self._sizes[names[index]] = len(values[index])
                    new[names[index]] = index
            while len(self._sizes) > _REMEMBERED:
                self._sizes.popitem(last=False)
        if new:
            self._notify_keys_stored([keys[index] for index in new.values()], [len(values[i]) for i in new.values()])
        stored = sum(len(values[index]) for index in new.values())
        return L2StoreResult(all(status is Status.OK for status in statuses), stored)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any], seconds: float) -> Bitmap:
        buffers = [one.byte_array for one in objects]
        reasons = self.cache.read_into(_names(keys), buffers, forms=[_form(one) for one in objects], timeout=seconds)
        loaded = [key for key, reason in zip(keys, reasons, strict=True) if not reason]
        if loaded:
            self._notify_keys_accessed(loaded)
        return _bits([not reason for reason in reasons])


def _names(keys: Sequence[Any]) -> list[str]:
    """Returns a name for each `ObjectKey`, of all its fields."""
    return [repr((one.chunk_hash, one.model_name, one.kv_rank, one.object_group_id, one.cache_salt)) for one in keys]


def _form(one: Any) -> TensorForm | None:
    """Returns what the types and shapes of a `MemoryObj` are; None if it does not say."""
    meta = getattr(one, "meta", None)
    if meta is None:
        return None
    if meta.shapes and meta.dtypes:
        return TensorForm.of_many(meta.shapes, meta.dtypes)
    return TensorForm.of_many([meta.shape], [meta.dtype])


def _bits(flags: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(flags))
    for index, flag in enumerate(flags):
        if flag:
            bitmap.set(index)
    return bitmap
