"""PdCacheL2Adapter: an L2 adapter of LMCache over an `ObjectCache`. Imports LMCache; see `lmcache`.

1. Every task ends, at the latest at `timeout_s`, and the pool's trouble is a failed store or a miss.
2. A load copies into LMCache's memory on a thread of ours, so nothing writes there after the task, or `close`, has ended.
3. LMCache's key has neither types nor shapes. Each value bears those of its object, and a load into memory of others is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cache.adapters.lmcache import LMCacheOptions
from pd_cache.adapters.lmcache_lanes import LaneL2Adapter
from pd_cache.adapters.options import read_options, settings_of
from pd_cache.deadline import Deadline
from pd_cache.object_cache import PART_BYTES, ObjectCache
from pd_cache.values import TensorForm
from transfer.errors import Status

log = logging.getLogger(__name__)

_REMEMBERED = 1 << 18
"""How many keys that were stored here are remembered with their sizes, for LMCache's accounts."""


class PdCacheL2Adapter(LaneL2Adapter):
    """Stores and loads LMCache's objects in a Mooncake pool. Thread-safe."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """Takes `adapter_params` (`LMCacheOptions`). Does not wait for the pool.

        Raises ConfigError for parameters that cannot be used, MissingLibraryError if Mooncake cannot be loaded.
        """
        options = read_options(params, LMCacheOptions, "adapter_params")
        settings = settings_of(options)
        part = PART_BYTES if options.part_size is None else int(options.part_size)
        self.cache = ObjectCache.open(settings, f"lmcache\n{options.namespace}", part_bytes=part)
        exist_s = settings.transfer.timeouts.exist_ms / 1000
        super().__init__(
            "lmcache",
            options.threads,
            log.warning,
            timeout=options.timeout_s,
            lookup_timeout=min(options.timeout_s, exist_s),
            capacity=int(options.capacity),
        )
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """The bytes of what was stored here and is still there, as far as is known, by name; the oldest are forgotten first."""
        self._lock = threading.Lock()
        self._closed = False

    # --- on the threads ---------------------------------------------------------------------------------------------

    def store(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> int | None:
        names, values = _names(keys), [one.byte_array for one in objects]
        statuses = self.cache.put_many(names, values, forms=[_form(one) for one in objects], timeout=deadline)
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
        return stored if all(status is Status.OK for status in statuses) else None

    def lookup(self, keys: Sequence[Any], deadline: Deadline) -> list[bool]:
        names = _names(keys)
        statuses = self.cache.exists_many(names, timeout=deadline)
        self._forget(keys, names, statuses)
        return [status is Status.OK for status in statuses]

    def load(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> list[bool]:
        buffers = [one.byte_array for one in objects]
        reasons = self.cache.read_into(_names(keys), buffers, forms=[_form(one) for one in objects], timeout=deadline)
        loaded = [key for key, reason in zip(keys, reasons, strict=True) if not reason]
        if loaded:
            self._notify_keys_accessed(loaded)
        return [not reason for reason in reasons]

    # --- the rest of LMCache's interface ----------------------------------------------------------------------------

    def delete(self, keys: list[Any]) -> None:
        """Removes objects. Reports those that were there, and those that the pool has lost since they were stored. Never raises."""
        if not keys or self._closed:
            return
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
        self._closed = True
        self.cache.close()  # first: tasks under way then end at once
        super().close()

    def _forget(self, keys: Sequence[Any], names: Sequence[str], statuses: Sequence[Status]) -> None:
        """Reports objects as deleted that were stored here and are missing now: the pool evicts by itself. Otherwise LMCache would count
        them for ever, and its eviction would choose them again and again."""
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
    return [repr((one.chunk_hash, one.model_name, one.kv_rank, one.object_group_id, one.cache_salt)) for one in keys]


def _form(one: Any) -> TensorForm | None:
    """Returns what the types and shapes of a `MemoryObj` are; None if it does not say."""
    meta = getattr(one, "meta", None)
    if meta is None:
        return None
    if meta.shapes and meta.dtypes:
        return TensorForm.of_many(meta.shapes, meta.dtypes)
    return TensorForm.of_many([meta.shape], [meta.dtype])
