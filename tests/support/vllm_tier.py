"""vLLM's secondary tier as the suite of all adapters drives it: as vLLM's tiering manager does, over real
memory, without an engine."""

import importlib.util
import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.adapters import PAGE, AdapterSubject, options_of
from tests.support.needs import NO_VLLM
from tests.support.waiting import wait_for

ROWS = 16


def offloading_config(row_bytes, **changes):
    """What vLLM tells a spec about an engine of one rank."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    return OffloadingConfig(
        **{
            "groups": (OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer.0",), group_id=0),),
            "worker_kv_bytes_per_block": row_bytes,
            "enable_kv_cache_events": False,
            "extra_config": {},
            "engine_id": "test",
            "model": OffloadingModelConfig(name="model", dtype="float32"),
            "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            "parallel": OffloadingParallelConfig(
                **dict.fromkeys(
                    ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1
                ),
                rank=0,
                data_parallel_index=0,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
            **changes,
        }
    )


def open_tier(settings, memory, salt, *, row_bytes, **options):
    """A tier, with the options that its users write."""
    from pd_cache.adapters.vllm_tier import PdCacheTierManager

    spec = SimpleNamespace(config=offloading_config(row_bytes), blocks_per_chunk=1)
    given = {**options_of(settings, salt), "revision": "test", **options}
    return PdCacheTierManager(spec, memory, "PdCacheTierManager", **given)


class VllmTierSubject(AdapterSubject):
    """The tier, with a primary tier's memory of its own. Calls come from one thread at a time, as from vLLM's
    scheduler."""

    def __init__(self, settings, namespace):
        if importlib.util.find_spec("vllm") is None:
            pytest.skip(NO_VLLM)
        self.array = np.zeros((ROWS, PAGE), dtype=np.int8)
        self.tier = open_tier(settings, memoryview(self.array), namespace, row_bytes=PAGE)
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def _job(self, names, rows, *, load):
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        number = next(self._numbers)
        context = ReqContext(req_id=str(number))
        job = TransferJob(
            number, [name.encode() for name in names], np.array(rows, dtype=np.int32), load, context
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        (ended,) = wait_for(lambda: list(self.tier.get_finished_jobs()), "the end of a job")
        assert ended.job_id == number
        return ended

    def store(self, values):
        with self._lock:
            stored = []
            for name, value in values.items():
                self.array[0] = np.frombuffer(value, dtype=np.int8)
                stored.append(bool(self._job([name], [0], load=False).success))
            return stored

    def has(self, names):
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        with self._lock:
            context = ReqContext(req_id=f"lookup {next(self._numbers)}")
            self.tier.on_new_request(context)
            keys, found = [name.encode() for name in names], [LookupResult.RETRY] * len(names)

            def answered():
                found[:] = [self.tier.lookup(key, context) for key in keys]
                self.tier.on_schedule_end(ScheduleEndContext([], []))
                return LookupResult.RETRY not in found

            wait_for(answered, "an answer to each lookup")
            self.tier.on_request_finished(context)
            return [one is LookupResult.HIT for one in found]

    def load(self, names):
        with self._lock:
            loaded = []
            for start in range(0, len(names), ROWS):
                part = names[start : start + ROWS]
                self.array[:] = -1
                result = self._job(part, range(len(part)), load=True)
                good = (
                    {name.encode() for name in part} if result.success else set(result.successful_keys or ())
                )
                loaded += [
                    self.array[row].tobytes() if name.encode() in good else None
                    for row, name in enumerate(part)
                ]
            return loaded

    def wait_available(self):
        self.tier.cache.wait_available(60)
        wait_for(lambda: all(self.store({"ready": bytes(PAGE)})), "a store")

    def close(self):
        self.tier.shutdown()
