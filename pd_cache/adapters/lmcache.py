"""The L2 adapter for LMCache's server: `--l2-adapter '{"type": "plugin", "module_path": "pd_cache.adapters.lmcache", ...}'`.

LMCache imports this module and asks it for the class by name. Only then is LMCache itself imported, by `lmcache_plugin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from pd_cache.adapters.options import AdapterOptions
from transfer.settings import ByteSize

if TYPE_CHECKING:
    from pd_cache.adapters.lmcache_plugin import PdCacheL2Adapter

__all__ = ["LMCacheOptions", "PdCacheL2Adapter"]


class LMCacheOptions(AdapterOptions, frozen=True, kw_only=True):
    """`adapter_params` of the adapter's JSON."""

    part_size: ByteSize | None = None
    """The most bytes of one object in the pool; all that share a namespace need the same. A larger object of LMCache's is cut into parts."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """How many stores, and how many loads, run at the same time."""
    capacity: ByteSize = ByteSize(0)
    """How many bytes of its own LMCache may keep in the pool before it evicts some itself, if it has an eviction policy for L2. 0 leaves
    eviction to the pool."""


def __getattr__(name: str) -> Any:
    if name == "PdCacheL2Adapter":
        from pd_cache.adapters.lmcache_plugin import PdCacheL2Adapter

        return PdCacheL2Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
