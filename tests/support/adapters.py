"""Every adapter, and the plain client, built alike for the suite that all of them pass."""

import asyncio
import importlib.util
import threading
import warnings
from abc import ABC, abstractmethod

import msgspec
import pytest

from pd_cache.objects.async_cache import AsyncObjectCache
from pd_cache.objects.object_cache import ObjectCache
from tests.support.needs import NO_LMCACHE
from tests.support.waiting import wait_for
from transfer.errors import Status
from transfer.settings import Timeouts

PAGE = 20_000
"""Bytes of the values that every adapter can take: no whole number of anything."""


class AdapterSubject(ABC):
    """One instance of an adapter, as the engine or cache above it uses it. All of it may run on several
    threads at once."""

    @abstractmethod
    def store(self, values):
        """Stores values of `PAGE` bytes each. Returns for each whether others can load it now."""

    @abstractmethod
    def has(self, names):
        """Looks names up."""

    @abstractmethod
    def load(self, names):
        """Loads values of `PAGE` bytes. None for a miss."""

    @abstractmethod
    def wait_available(self):
        """Waits until the pool is open."""

    @abstractmethod
    def close(self):
        """Closes it, as its owner does."""


class _Plain(AdapterSubject):
    def __init__(self, settings, namespace):
        self.cache = ObjectCache.open(settings, namespace, part_bytes=PAGE)

    def _answer(self, call):
        return call

    def store(self, values):
        statuses = self._answer(self.cache.put_many(list(values), list(values.values())))
        return [status is Status.OK for status in statuses]

    def has(self, names):
        return [status is Status.OK for status in self._answer(self.cache.exists_many(names))]

    def load(self, names):
        return [outcome.value for outcome in self._answer(self.cache.get_many(names))]

    def wait_available(self):
        self.cache.wait_available(60)

    def close(self):
        self._answer(self.cache.close())


class _IntoMemory(_Plain):
    """The plain client, reading into the caller's memory, values in several parts."""

    def __init__(self, settings, namespace):
        self.cache = ObjectCache.open(settings, namespace, part_bytes=PAGE // 3)

    def load(self, names):
        buffers = [bytearray(PAGE) for _ in names]
        reasons = self.cache.read_into(names, buffers)
        return [None if reason else bytes(buffer) for reason, buffer in zip(reasons, buffers, strict=True)]


class _Async(_Plain):
    """The asyncio client, on a loop of its own."""

    def __init__(self, settings, namespace):
        self.cache = AsyncObjectCache(ObjectCache.open(settings, namespace, part_bytes=PAGE))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop-of-a-test")
        self._thread.start()

    def _answer(self, call):
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(300)

    def wait_available(self):
        self.cache.cache.wait_available(60)

    def end(self):
        """Ends the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


def _vllm_tier(settings, namespace):
    from tests.support.vllm_tier import VllmTierSubject  # it needs this module

    return VllmTierSubject(settings, namespace)


def _sglang(settings, namespace):
    from tests.support.sglang_host import SglangSubject  # it needs this module

    return SglangSubject(settings, namespace)


def options_of(settings, namespace):
    """The same settings as the users of an adapter write them, in JSON."""
    return {
        "master": settings.master,
        "transfer": msgspec.to_builtins(settings.transfer, enc_hook=int),
        "namespace": namespace,
        "timeout_s": max(settings.transfer.timeouts.put_ms / 1000, 3),
    }


class _LMCache(AdapterSubject):
    """The L2 plugin, made by LMCache's own factory, with LMCache's memory objects."""

    def __init__(self, settings, namespace):
        if importlib.util.find_spec("lmcache") is None:
            pytest.skip(NO_LMCACHE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what its imports deprecate is not ours
            from lmcache.v1.distributed.l2_adapters import create_l2_adapter
            from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

        plugin = {
            "module_path": "pd_cache.adapters.lmcache",
            "class_name": "PdCacheL2Adapter",
            "adapter_params": {**options_of(settings, namespace), "part_size": PAGE},
        }
        self.adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(plugin))
        self._stored = {}

    def store(self, values):
        # a task has one result for all that it stores
        tasks = [
            self.adapter.submit_store_task(self._keys([name]), [self._object(value)])
            for name, value in values.items()
        ]
        return [self._finished(lambda task=task: self._popped(task)).is_successful() for task in tasks]

    def has(self, names):
        task = self.adapter.submit_lookup_and_lock_task(self._keys(names), {})
        bits = self._finished(lambda: self.adapter.query_lookup_and_lock_result(task))
        self.adapter.submit_unlock(self._keys(names))
        return [bits.test(index) for index in range(len(names))]

    def load(self, names):
        objects = [self._object(bytes(PAGE)) for _ in names]
        task = self.adapter.submit_load_task(self._keys(names), objects)
        bits = self._finished(lambda: self.adapter.query_load_result(task))
        return [bytes(one.byte_array) if bits.test(index) else None for index, one in enumerate(objects)]

    def wait_available(self):
        self.adapter.cache.wait_available(60)

    def close(self):
        self.adapter.close()

    def _popped(self, task):
        self._stored.update(self.adapter.pop_completed_store_tasks())
        return self._stored.pop(task, None)

    @staticmethod
    def _finished(asked):
        (answer,) = wait_for(lambda: [one for one in [asked()] if one is not None], "the task's result")
        return answer

    @staticmethod
    def _keys(names):
        from lmcache.v1.distributed.api import ObjectKey

        return [ObjectKey(chunk_hash=name.encode(), model_name="a/model", kv_rank=0) for name in names]

    @staticmethod
    def _object(value):
        import torch
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        raw = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        meta = MemoryObjMetadata(
            shape=raw.shape,
            dtype=raw.dtype,
            address=0,
            phy_size=len(value),
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        return TensorMemoryObj(raw, meta, parent_allocator=None)


KINDS = {
    "objects": _Plain,
    "objects-in-parts": _IntoMemory,
    "asyncio": _Async,
    "vllm-tier": _vllm_tier,
    "sglang": _sglang,
    "lmcache": _LMCache,
}
"""Makes an adapter for a pool, in a namespace. A factory whose peer is not installed calls `pytest.skip` with
how to install it."""


ALIKE = frozenset(("objects-in-parts", "asyncio"))
"""Kinds that need no outages of their own: they stand on the plain client, as all others do."""


def end_subject(subject):
    """Closes a subject, twice, and ends what only the test needed."""
    subject.close()
    subject.close()
    if isinstance(subject, _Async):
        subject.end()


def impatient(settings):
    """Returns settings for outages: deadlines that pass soon, and a breaker that opens soon."""
    transfer = msgspec.structs.replace(
        settings.transfer,
        timeouts=Timeouts(exist_ms=500, get_ms=1000, put_ms=1000, close_ms=5000),
        breaker=msgspec.structs.replace(settings.transfer.breaker, failures=1, probe_interval_ms=200),
    )
    return msgspec.structs.replace(settings, transfer=transfer)
