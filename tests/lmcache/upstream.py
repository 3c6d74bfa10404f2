"""A plugin for pytest (`-p tests.lmcache.upstream`) that gives LMCache's own tests of its adapters ours in
their place.

`PD_CACHE_MASTER` names the master of a pool.
"""

import os
import uuid

import lmcache.v1.distributed.l2_adapters.fs_l2_adapter as fs
import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as mock

from pd_cache.adapters.lmcache import PdCacheL2Adapter
from pd_cache.metrics import CacheMetrics
from pd_cache.objects.object_cache import ObjectCache
from pd_cache.objects.values import OVERHEAD
from tests.support.backends import SharedPoolBackend

PART = 64 << 10
_backends = []


def _shared(settings, namespace, **options):
    """Opens one client of the pool for all tests: opening and closing one takes a second."""
    if not _backends:
        _backends.append(SharedPoolBackend(settings, PART + OVERHEAD, slots=1))
    return ObjectCache(_backends[0], namespace, part_bytes=PART, metrics=CacheMetrics())


class _Config:
    """Takes whatever the replaced adapter's configuration takes."""

    def __init__(self, **options):
        self.capacity = int(options.get("max_size_gb", 0) * (1 << 30))


class Ours(PdCacheL2Adapter):
    """Our adapter, made as LMCache's tests make theirs, with a namespace of its own."""

    def __init__(self, config):
        super().__init__(
            {
                "master": os.environ["PD_CACHE_MASTER"],
                "namespace": uuid.uuid4().hex,
                "capacity": config.capacity,
                "transfer": {"staging_size": 16 << 20, "prefault": False},
            }
        )


ObjectCache.open = staticmethod(_shared)
mock.MockL2Adapter, mock.MockL2AdapterConfig = Ours, _Config
fs.FSL2Adapter, fs.FSL2AdapterConfig = Ours, _Config


def pytest_unconfigure():
    """Closes the client of the pool."""
    while _backends:
        _backends.pop().really_close()
