"""pd-cache's connector, which also counts vLLM's empty steps: those in which no request computes, while loads are under way. `bench ttft` has
vLLM load it from here."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from pd_cache.vllm import connector
from pd_cache.vllm.steps import Step

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput


class PdCacheConnector(connector.PdCacheConnector):
    """After each row of such steps, it adds a line to the file that PD_CACHE_BENCH_STEPS names: their number, their seconds, and the seconds
    of processor time that the engine's thread took meanwhile."""

    _steps, _began = 0, (0.0, 0.0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        step = super().build_connector_meta(scheduler_output)
        assert isinstance(step, Step)
        now = time.perf_counter(), time.thread_time()
        if step.nothing_to_compute and (self._steps or step.loads):
            self._began = self._began if self._steps else now
            self._steps += 1
        elif self._steps:
            seconds, processor = (end - begin for begin, end in zip(self._began, now, strict=True))
            with open(os.environ["PD_CACHE_BENCH_STEPS"], "a") as file:
                file.write(f"{self._steps} {seconds} {processor}\n")
            self._steps = 0
        return step
