"""pd-cache as a storage backend of SGLang's HiCache: `--hicache-storage-backend dynamic` with the class
`PdCacheStorage` of this module.

HiCache keeps pages of KV in a pool of the host's memory and hands them to a storage backend. docs/adapters.md
shows the flags. The calls run on SGLang's storage threads, each with a deadline, and raise nothing.

Pages are copied between staging memory and SGLang's host pool, and never transferred straight into it. A late
transfer may go on after its caller has given up (docs/architecture.md, "Staging memory and deadlines"), and
by then SGLang may have given the page to another prompt.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from pd_cache.adapters.options import read_options, settings_of
from pd_cache.adapters.sglang_pages import (
    OPTIONS,
    SGLANGS_OWN,
    PoolPages,
    StorageOptions,
    namespace_of,
    prefix_of,
)
from pd_cache.adapters.versioned_names import VersionedNames
from pd_cache.errors import ConfigError, LayoutError
from pd_cache.objects.object_cache import PART_BYTES, ObjectCache
from pd_cache.sparse_log import SparseLog
from transfer.deadlines import left
from transfer.errors import PoolUnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")


class PdCacheStorage(HiCacheStorage):
    """A HiCache backend in pd-cache's pool and tiers, with the v1 and v2 calls."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Waits neither for the pool nor for a disk. The options are in `storage_config.extra_config`.

        Raises ConfigError for wrong options, if `interface_v1` is missing, and for an SGLang whose page
        hashes leave out adapters and salts.
        """
        given = dict(storage_config.extra_config or {})
        own = {key: given.pop(key) for key in SGLANGS_OWN & given.keys()}
        options = read_options(given, StorageOptions, OPTIONS)
        _check_hashes()
        if not own.get("interface_v1"):
            raise ConfigError(f'{OPTIONS}: needs "interface_v1": 1; else SGLang copies each page twice')
        self._config = storage_config
        self._settings = settings_of(options)
        self._namespace = namespace_of(
            storage_config,
            _server_args(),
            revision=options.revision,
            salts=(options.namespace, str(own.get("extra_backend_tag", ""))),
        )
        self._seconds = options.timeout_s
        self._pools: dict[str, PoolPages] = {}
        self._indices_only = False
        """Whether the pages of the main pool have no bytes: other pools have them."""
        self.cache: ObjectCache | None = None
        """The cache; None before a host pool is registered."""
        self._names: VersionedNames | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._log = SparseLog()
        self._stats: list[tuple[bool, int, float]] = []

    # --- host pools -----------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers SGLang's main host pool, whose pages are as large as an object. Raises LayoutError, as
        for any other pool, if its memory cannot be addressed page by page."""
        self.mem_pool_host = mem_pool_host
        self._register("kv", mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = str(host_pool_name)
        if name != "kv":
            self._register(name, host_pool)

    def on_host_pools_registered(self) -> None:
        """Opens the cache. Raises ValueError if the staging memory is too small for a page,
        MissingLibraryError without Mooncake."""
        self._opened()

    # --- v1 -------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns how many leading pages are there. Sends one request."""
        pool = self._pools.get("kv")
        if pool is None:
            return 0
        return self._safely("exists", lambda: _leading(self._opened().exist(pool.names(keys))), 0)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Loads pages into the host pool. Nothing is written to it after the call has returned."""
        return self._pages("kv", keys, host_indices, load=True)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host pool that are not there yet."""
        return self._pages("kv", keys, host_indices, load=False)

    # --- v2 -------------------------------------------------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Returns the longest prefix that can be restored from all pools. Sends one request. SGLang's own
        class describes the arguments."""
        return self._safely(
            "exists", lambda: self._restorable(keys, pool_transfers or []), PoolTransferResult(0, {}, [])
        )

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._pages_of_all(transfers, load=True)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._pages_of_all(transfers, load=False)

    # --- single tensors, by which SGLang moves pages without `interface_v1` ---------------------------------

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    get = batch_get = set = batch_set = _unused

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # --- life -----------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Notes that the weights have changed: this process no longer finds older pages. Returns whether that
        is done."""

        def begin() -> bool:
            self._opened().reset()
            return True

        return self._safely("clear", begin, False)

    def get_stats(self) -> Any:
        """Returns the pages that were moved since the last call and their GB/s, as SGLang's own backends do;
        None without storage metrics."""
        if not self._config.enable_storage_metrics:
            return None
        with self._lock:
            moved, self._stats = self._stats, []
        collector = importlib.import_module("sglang.srt.observability.metrics_collector")
        stats = collector.StorageMetrics()
        for load, pages, speed in moved:
            (stats.prefetch_pgs if load else stats.backup_pgs).append(pages)
            (stats.prefetch_bandwidth if load else stats.backup_bandwidth).append(speed)
        return stats

    def close(self) -> None:
        """Ends the calls under way, at the latest at their deadlines. Idempotent."""
        with self._lock:
            self._closed = True
            cache = self.cache
        if cache is not None:
            cache.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _register(self, name: str, host: Any) -> None:
        if name == "kv" and getattr(host, "kv_buffer", True) is None:
            self._indices_only = True
            return
        try:
            self._pools[name] = PoolPages(host, prefix_of(self._config, name, host))
        except (ValueError, AttributeError, TypeError) as error:
            raise LayoutError(
                f"pages of pool {name}: {error}. Use --hicache-mem-layout page_first"
            ) from error

    def _opened(self) -> VersionedNames:
        """Returns the open cache. Opens it for objects of the main pool's pages, or of the largest page.
        Raises PoolUnavailableError if it was closed before that."""
        if self._names is not None:
            return self._names
        with self._lock:
            if self._closed:
                raise PoolUnavailableError("this backend is closed")
            if self._names is None:
                sizes = {name: pool.bytes for name, pool in self._pools.items()}
                part = sizes.get("kv") or max(sizes.values(), default=PART_BYTES)
                self.cache = ObjectCache.open(self._settings, self._namespace, part_bytes=part)
                self._names = VersionedNames(self.cache)
            return self._names

    def _pages_of_all(self, transfers: Any, *, load: bool) -> dict[str, list[bool]]:
        """Moves pages of several pools, one after another, all with one deadline."""
        end = time.monotonic() + self._seconds
        return {
            transfer.name: self._pages(
                str(transfer.name), transfer.keys or [], transfer.host_indices, load=load, end=end
            )
            for transfer in transfers
        }

    def _pages(
        self, name: str, keys: Sequence[str], indices: Any, *, load: bool, end: float | None = None
    ) -> list[bool]:
        end = time.monotonic() + self._seconds if end is None else end
        if name == "kv" and self._indices_only:
            return [True] * len(keys)
        return self._safely(
            "get" if load else "set",
            lambda: self._move(name, keys, indices, load, end),
            [False] * len(keys),
        )

    def _move(self, name: str, keys: Sequence[str], indices: Any, load: bool, end: float) -> list[bool]:
        opened, pool = self._opened(), self._pools.get(name)
        if not keys:
            return []
        if pool is None or indices is None:
            raise ValueError(f"pool {name} is not registered, or its pages were not given")
        begun = time.perf_counter()
        seconds = left(end)
        names = pool.names(keys)
        values = pool.values(indices.cpu())
        if len(values) != len(keys):
            raise ValueError(f"pool {name}: got {len(keys)} keys and {len(values)} pages")
        if load:
            done = [not reason for reason in opened.read_into(names, values, timeout=seconds)]
        else:
            done = opened.put(names, values, timeout=seconds)
        if self._config.enable_storage_metrics and any(done):
            moved = len(values[0]) * sum(done)
            speed = moved / max(time.perf_counter() - begun, 1e-9) / (1 << 30)
            with self._lock:
                self._stats.append((load, sum(done), speed))
        return done

    def _restorable(self, keys: Sequence[str], transfers: Sequence[Any]) -> Any:
        """Returns the longest prefix that all pools can restore, each pool's part of it, and all prefixes
        that can be restored."""
        kv = self._pools.get("kv")
        asked = [kv.names(keys)] if kv is not None else []
        policies = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
        judged = [transfer for transfer in transfers if transfer.hit_policy in policies]
        for transfer in judged:
            pool = self._pools.get(str(transfer.name))
            asked.append([] if pool is None else pool.names(keys))
        answers = iter(self._opened().exist([name for names in asked for name in names]))
        found = [[next(answers) for _ in names] or [False] * len(keys) for names in asked]
        pages = _leading(found.pop(0)) if kv is not None else len(keys)
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer, there in zip(judged, found, strict=True):
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                good = set(range(1, _leading(there[:pages]) + 1))
            else:
                tail = max(1, len(transfer.keys or ()))
                good = {end for end in range(1, pages + 1) if all(there[max(0, end - tail) : end])}
            if good:
                hits[transfer.name] = max(good)
            restorable &= good
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _safely(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """Returns the result of the call, or `otherwise` if it fails. SGLang goes on without the cache."""
        try:
            return call()
        except Exception as error:
            count = self._log.admit((what, type(error).__name__), 1)
            if count is not None:
                log.exception("%s failed (%d times)", what, count)
            return otherwise


def _leading(found: Sequence[bool]) -> int:
    """Returns how many leading values are true."""
    return next((index for index, there in enumerate(found) if not there), len(found))


def _server_args() -> Mapping[str, Any]:
    """Returns the arguments of SGLang's server, as SGLang resolved them; none outside a server."""
    try:
        context = importlib.import_module("sglang.srt.runtime_context").get_context()
        return dict(context.resolved_server_args_dict())
    except ValueError as error:
        log.warning(
            "SGLang does not report its settings (%s), so the names of pages identify the model only by its name",
            error,
        )
        return {}


def _check_hashes() -> None:
    """Raises ConfigError if SGLang's page hashes leave out LoRA adapters and cache salts."""
    if not hasattr(importlib.import_module("sglang.srt.mem_cache.utils"), "storage_namespace_seed"):
        raise ConfigError(
            "this SGLang names pages by their tokens only, so that requests with different LoRA adapters or cache salts would share KV "
            "(sglang#26747); use SGLang 0.5.23"
        )
