"""The L2 adapter for LMCache's server: `--l2-adapter '{"type": "plugin", "module_path":
"pd_cache.adapters.lmcache", ...}'`.

LMCache (0.5.6, 0.5.7) submits tasks, polls an event descriptor for each kind of task, and asks for results.
`PdCacheL2Adapter` runs the three kinds of tasks over an `ObjectCache`, each on the threads of a `TaskLane`.

1. Every task ends after `timeout_s` at the latest. Trouble in the pool is a failed store or a miss.
2. A load copies into LMCache's memory on our own thread, so nothing writes there after the task, or `close`,
   has ended.
3. LMCache's keys have neither types nor shapes. So each value holds the types and shapes of its object. A
   load into memory of other types or shapes is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from pd_cache.adapters.options import LMCacheOptions, read_options, settings_of
from pd_cache.adapters.tasks import TaskLane
from pd_cache.objects.object_cache import PART_BYTES, Deadline, ObjectCache
from pd_cache.objects.values import TensorForm
from transfer.errors import Status

log = logging.getLogger(__name__)

_CLOSE_S = 10.0
_REMEMBERED = 1 << 18
"""How many stored keys are remembered with their sizes, for LMCache's accounts."""


class PdCacheL2Adapter(L2AdapterInterface):
    """Stores and loads LMCache's objects in a Mooncake pool. Thread-safe. A task that raises, or that does
    not run in time, counts as a task that stored, found or loaded nothing."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """Takes `adapter_params` (`LMCacheOptions`). Does not wait for the pool.

        Raises ConfigError for parameters that cannot be used, MissingLibraryError if Mooncake cannot be
        loaded.
        """
        options = read_options(params, LMCacheOptions, "adapter_params")
        settings = settings_of(options)
        part = PART_BYTES if options.part_size is None else int(options.part_size)
        self.cache = ObjectCache.open(settings, f"lmcache\n{options.namespace}", part_bytes=part)
        super().__init__(int(options.capacity))  # for LMCache's eviction
        self._timeout = options.timeout_s
        self._lookup_timeout = min(options.timeout_s, settings.transfer.timeouts.exist_ms / 1000)
        self._stores: TaskLane[L2StoreResult] = TaskLane("lmcache-store", options.threads)
        self._lookups: TaskLane[Bitmap] = TaskLane("lmcache-lookup", 1)
        self._loads: TaskLane[Bitmap] = TaskLane("lmcache-load", options.threads)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """The sizes of objects that were stored here and may still be there, by name. The oldest are
        forgotten first."""
        self._lock = threading.Lock()

    # --- on the threads -------------------------------------------------------------------------------------

    def store(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> L2StoreResult:
        """Stores objects. Succeeds, with the number of bytes that are new, if all of them are there in the
        end."""
        names, values = _names(keys), [given.byte_array for given in objects]
        statuses = self.cache.put_many(
            names, values, forms=[_form(given) for given in objects], timeout=deadline
        )
        new, sizes = list[Any](), list[int]()
        with self._lock:
            for key, name, value, status in zip(keys, names, values, statuses, strict=True):
                if status is Status.OK and name not in self._sizes:
                    self._sizes[name] = len(value)
                    new.append(key)
                    sizes.append(len(value))
            while len(self._sizes) > _REMEMBERED:
                self._sizes.popitem(last=False)
        if new:
            self._notify_keys_stored(new, sizes)
        whole = all(status is Status.OK for status in statuses)
        return L2StoreResult(whole, sum(sizes) if whole else 0)

    def lookup(self, keys: Sequence[Any], deadline: Deadline) -> Bitmap:
        """Returns for each key whether there is an object. The first part of a found object is protected
        until its lease ends."""
        names = _names(keys)
        statuses = self.cache.exists_many(names, timeout=deadline)
        self._forget(keys, names, statuses)
        return _bits([status is Status.OK for status in statuses])

    def load(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> Bitmap:
        """Loads objects into LMCache's memory. Returns for each object whether it was loaded. Does not write
        there after it has returned."""
        buffers = [given.byte_array for given in objects]
        reasons = self.cache.read_into(
            _names(keys), buffers, forms=[_form(given) for given in objects], timeout=deadline
        )
        loaded = [key for key, reason in zip(keys, reasons, strict=True) if not reason]
        if loaded:
            self._notify_keys_accessed(loaded)
        return _bits([not reason for reason in reasons])

    # --- LMCache's interface --------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._stores.event

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event

    def get_load_event_fd(self) -> int:
        return self._loads.event

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begins to store objects."""
        return self._stores.submit(partial(self.store, keys, objects), L2StoreResult(False, 0), self._timeout)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Begins to look keys up."""
        return self._lookups.submit(partial(self.lookup, keys), Bitmap(len(keys)), self._lookup_timeout)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Does nothing: the lease of Mooncake's master ends by itself, and cannot be given back."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begins to load objects. The memory of an object whose bit is not set in the result may hold
        anything."""
        return self._loads.submit(partial(self.load, keys, objects), Bitmap(len(keys)), self._timeout)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def get_memory_tags(self) -> Any:
        """Returns the memory tags that LMCache 0.5.7 itself gives for Mooncake's pools."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags  # 0.5.6 has none

        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.REMOTE)

    def delete(self, keys: list[Any]) -> None:
        """Removes objects. Reports those that were there, and those that the pool has lost since they were
        stored. Never raises."""
        try:
            names = _names(keys)
            statuses = self.cache.remove_many(names, timeout=self._timeout)
            self._forget(keys, names, statuses)
            removed = [index for index, status in enumerate(statuses) if status is Status.OK]
            with self._lock:
                sizes = [self._sizes.pop(names[index], 0) for index in removed]
            if removed:
                self._notify_keys_deleted([keys[index] for index in removed], sizes)
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
        """Ends all tasks, and closes the descriptors. Tasks that wait fail. Idempotent."""
        self.cache.close()  # first: tasks under way then end at once
        for lane in (self._stores, self._lookups, self._loads):
            lane.close(_CLOSE_S)

    def _forget(self, keys: Sequence[Any], names: Sequence[str], statuses: Sequence[Status]) -> None:
        """Reports objects that were stored here and are now missing as deleted, because the pool evicts by
        itself. Otherwise LMCache would count them for ever, and its eviction would choose them again and
        again."""
        with self._lock:
            gone = [
                (key, self._sizes.pop(name))
                for key, name, status in zip(keys, names, statuses, strict=True)
                if status is Status.MISSING and name in self._sizes
            ]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])


def _names(keys: Sequence[Any]) -> list[str]:
    """Returns a name for each `ObjectKey`, of all its fields."""
    return [
        repr((key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt))
        for key in keys
    ]


def _form(memory: Any) -> TensorForm | None:
    """Returns the types and shapes of a `MemoryObj`; None if it has none."""
    meta = getattr(memory, "meta", None)
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
