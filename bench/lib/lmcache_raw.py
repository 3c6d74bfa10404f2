"""An L2 plugin for LMCache that calls a bare Mooncake client: what `lmcache bench l2` measures of Mooncake itself.

It transfers from and to LMCache's own memory, which it registers. It has no deadlines, no checksums and no copies, and is for benches only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from bench.lib.pool import raw_client
from pd_cache.adapters.tasks import TaskLane

_PATIENCE_S = 60.0


class RawMooncakeL2Adapter(L2AdapterInterface):
    """One thread for each kind of task, one batch call for each task."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """Takes `{"master": "host:port"}`."""
        super().__init__()
        self._open = ExitStack()
        self._client = self._open.enter_context(raw_client(params["master"]))
        assert l1_memory_desc is not None
        assert self._client.register_buffer(l1_memory_desc.ptr, l1_memory_desc.size) == 0
        self._prefix = str(params.get("prefix", "raw"))
        self._stores: TaskLane[L2StoreResult] = TaskLane("raw-store", 1, print)
        self._lookups: TaskLane[Bitmap] = TaskLane("raw-lookup", 1, print)
        self._loads: TaskLane[Bitmap] = TaskLane("raw-load", 1, print)

    def get_store_event_fd(self) -> int:
        return self._stores.event

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event

    def get_load_event_fd(self) -> int:
        return self._loads.event

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        def store(_: float) -> L2StoreResult:
            codes = self._moved(self._client.batch_put_from, keys, objects)
            return L2StoreResult(not any(codes), sum(one.get_size() for one in objects))

        return self._stores.submit(store, L2StoreResult(False, 0), _PATIENCE_S)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        return self._lookups.submit(
            lambda _: _bits([code == 1 for code in self._client.batch_is_exist(self._names(keys))]),
            Bitmap(len(keys)),
            _PATIENCE_S,
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Does nothing."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._loads.submit(
            lambda _: _bits([code > 0 for code in self._moved(self._client.batch_get_into, keys, objects)]),
            Bitmap(len(keys)),
            _PATIENCE_S,
        )

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def close(self) -> None:
        for lane in (self._stores, self._lookups, self._loads):
            lane.close(_PATIENCE_S)
        self._open.close()

    def _moved(self, call: Callable[..., list[int]], keys: list[Any], objects: list[Any]) -> list[int]:
        return call(self._names(keys), [one.data_ptr for one in objects], [one.get_size() for one in objects])

    def _names(self, keys: list[Any]) -> list[str]:
        return [f"{self._prefix}/{one.kv_rank}/{one.chunk_hash.hex()}" for one in keys]


def _bits(flags: list[bool]) -> Bitmap:
    bitmap = Bitmap(len(flags))
    for index, flag in enumerate(flags):
        if flag:
            bitmap.set(index)
    return bitmap
