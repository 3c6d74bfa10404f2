"""An L2 plugin for LMCache that calls a bare Mooncake client: what `lmcache bench l2` measures of Mooncake itself.

It transfers from and to LMCache's own memory, which it registers. It has no deadlines, no checksums and no copies, and is for benches only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from bench.lib.pool import raw_client
from pd_cache.adapters.lmcache import LaneL2Adapter
from pd_cache.objects.cache import Deadline

_PATIENCE_S = 60.0


class RawMooncakeL2Adapter(LaneL2Adapter):
    """One thread for each kind of task, one batch call for each task."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """Takes `{"master": "host:port", "prefix": "of the keys"}`."""
        super().__init__("raw", 1, timeout=_PATIENCE_S, lookup_timeout=_PATIENCE_S)
        self._open = ExitStack()
        self._client = self._open.enter_context(raw_client(params["master"]))
        assert l1_memory_desc is not None
        assert self._client.register_buffer(l1_memory_desc.ptr, l1_memory_desc.size) == 0
        self._prefix = str(params.get("prefix", "raw"))

    def store(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> int | None:
        codes = self._moved(self._client.batch_put_from, keys, objects)
        return None if any(codes) else sum(item.get_size() for item in objects)

    def lookup(self, keys: Sequence[Any], deadline: Deadline) -> list[bool]:
        return [code == 1 for code in self._client.batch_is_exist(self._names(keys))]

    def load(self, keys: Sequence[Any], objects: Sequence[Any], deadline: Deadline) -> list[bool]:
        return [code > 0 for code in self._moved(self._client.batch_get_into, keys, objects)]

    def close(self) -> None:
        super().close()
        self._open.close()

    def _moved(self, call: Callable[..., list[int]], keys: Sequence[Any], objects: Sequence[Any]) -> list[int]:
        return call(self._names(keys), [item.data_ptr for item in objects], [item.get_size() for item in objects])

    def _names(self, keys: Sequence[Any]) -> list[str]:
        return [f"{self._prefix}/{key.kv_rank}/{key.chunk_hash.hex()}" for key in keys]
