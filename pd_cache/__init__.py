"""pd-cache: a shared KV cache over Mooncake for disaggregated prefill/decode LLM serving.

`__all__` is the public API. Its names are loaded at their first use: importing this package loads neither
torch nor Mooncake.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cache.cache import BlockCache, CacheEngine, CacheEngineBuilder, PromptCache
    from pd_cache.chunks import CacheMetadata
    from pd_cache.config import CacheConfig, DiskTier, LocalTier, MooncakeTier, NodeSettings
    from pd_cache.errors import ConfigError, LayoutError, PdCacheError
    from pd_cache.layout import KVLayout, PageKind
    from pd_cache.lookup import BypassLookupClient, LookupClient, MooncakeLookupClient
    from pd_cache.metrics import CacheMetrics
    from pd_cache.objects.async_cache import AsyncObjectCache
    from pd_cache.objects.object_cache import ObjectCache, ObjectOutcome
    from pd_cache.paged.base import Slots
    from pd_cache.reasons import StoreOutcome
    from pd_cache.server.adapters import LoadStoreOp, SchedulerAdapter, WorkerAdapter
    from pd_cache.server.client import RemoteCache, ServerLookupClient
    from pd_cache.server.protocol import EngineIdentity
    from transfer import PoolUnavailableError, TransferSettings

__version__ = "0.2.0"

_found = getattr(importlib.util.find_spec("transfer"), "origin", None) or ""
if os.path.dirname(_found) != os.path.join(os.path.dirname(__path__[0]), "transfer"):
    raise ImportError(
        f"pd-cache needs its own package `transfer`, which {_found} hides: rename that file", path=_found
    )

__all__ = [
    "AsyncObjectCache",
    "BlockCache",
    "BypassLookupClient",
    "CacheConfig",
    "CacheEngine",
    "CacheEngineBuilder",
    "CacheMetadata",
    "CacheMetrics",
    "ConfigError",
    "DiskTier",
    "EngineIdentity",
    "KVLayout",
    "LayoutError",
    "LoadStoreOp",
    "LocalTier",
    "LookupClient",
    "MooncakeLookupClient",
    "MooncakeTier",
    "NodeSettings",
    "ObjectCache",
    "ObjectOutcome",
    "PageKind",
    "PdCacheError",
    "PoolUnavailableError",
    "PromptCache",
    "RemoteCache",
    "SchedulerAdapter",
    "ServerLookupClient",
    "Slots",
    "StoreOutcome",
    "TransferSettings",
    "WorkerAdapter",
]

_MODULES = {
    "pd_cache.cache": ("BlockCache", "CacheEngine", "CacheEngineBuilder", "PromptCache"),
    "pd_cache.chunks": ("CacheMetadata",),
    "pd_cache.config": ("CacheConfig", "DiskTier", "LocalTier", "MooncakeTier", "NodeSettings"),
    "pd_cache.errors": ("ConfigError", "LayoutError", "PdCacheError"),
    "pd_cache.layout": ("KVLayout", "PageKind"),
    "pd_cache.lookup": ("BypassLookupClient", "LookupClient", "MooncakeLookupClient"),
    "pd_cache.metrics": ("CacheMetrics",),
    "pd_cache.objects.async_cache": ("AsyncObjectCache",),
    "pd_cache.objects.object_cache": ("ObjectCache", "ObjectOutcome"),
    "pd_cache.paged.base": ("Slots",),
    "pd_cache.reasons": ("StoreOutcome",),
    "pd_cache.server.adapters": ("LoadStoreOp", "SchedulerAdapter", "WorkerAdapter"),
    "pd_cache.server.client": ("RemoteCache", "ServerLookupClient"),
    "pd_cache.server.protocol": ("EngineIdentity",),
    "transfer": ("PoolUnavailableError", "TransferSettings"),
}
"""The same imports for use at run time; a test compares the two lists."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


_OLD_NAMES = {"ServerCache": "RemoteCache"}
"""Old names and their replacements. An old name works for one release, with a warning."""


def __getattr__(name: str) -> object:
    if name in _OLD_NAMES:
        new = _OLD_NAMES[name]
        warnings.warn(f"pd_cache.{name} is pd_cache.{new} now", DeprecationWarning, stacklevel=2)
        return __getattr__(new)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
