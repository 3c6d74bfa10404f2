"""PdCacheTierManager: vLLM's view of the tier. It runs in vLLM's scheduler, so nothing here waits, apart from `drain_jobs` and `shutdown`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from pd_cache.adapters.epoch_names import EpochNames
from pd_cache.adapters.options import read_options, settings_of
from pd_cache.adapters.row_jobs import RowJobs
from pd_cache.adapters.vllm_tier import TierOptions, namespace_of
from pd_cache.object_cache import ObjectCache

log = logging.getLogger(__name__)

_ROWS_IN_FLIGHT = 2
"""Stores may wait with one in this many rows of the primary tier: vLLM pins what waits, and needs the others for itself."""


_SHARE_OF_A_REQUEST = 4
"""A request may load chunks for all but one in this many rows of the primary tier. vLLM 0.32 pins no chunk between its load and its use: of a
prompt with more chunks than rows, the last ones would drive out the first, which would be loaded again, for ever."""


class _Lookups(AsyncLookupManager):
    """vLLM's own bookkeeping of lookups; each step's lookups of a request are one request to the pool."""

    def __init__(self, names: EpochNames, tier_type: str) -> None:
        self._names = names
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._names.exist(keys)


class PdCacheTierManager(SecondaryTierManager):
    """A secondary tier in pd-cache's pool and tiers. Trouble of the pool is a miss or a failed job, never an exception."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        """Waits neither for the pool nor for a disk. `given` are the tier's further keys, which are `TierOptions`.

        Raises ConfigError for options that are wrong, ValueError if the staging memory is too small for a row.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = read_options(given, TierOptions, "secondary_tiers")
        self.locality = None if options.locality is None else Locality(options.locality)
        config = offloading_spec.config
        namespace = namespace_of(
            config,
            row_bytes=self._block_size_bytes,
            blocks_per_chunk=offloading_spec.blocks_per_chunk,
            revision=options.revision,
            salt=options.namespace,
        )
        self.cache = ObjectCache.open(
            settings_of(options), namespace, part_bytes=self._block_size_bytes, most_bytes=self._block_size_bytes
        )
        self._names = EpochNames(self.cache)
        rows = primary_kv_view.nbytes // self._block_size_bytes
        self._jobs = RowJobs(
            self._names,
            primary_kv_view.cast("B"),
            self._block_size_bytes,
            load_s=options.timeout_s,
            store_s=options.timeout_s,
            most_waiting=max(1, rows // _ROWS_IN_FLIGHT),
            threads=options.threads,
        )
        self._lookups = _Lookups(self._names, tier_type)
        self._closed = False
        self._most_loads = max(1, rows - rows // _SHARE_OF_A_REQUEST)
        self._loads: dict[str, set[OffloadKey]] = {}
        """What has been loaded for each request."""
        self._begun: dict[str, str] = {}
        """The epoch in which each request began: what it computes may be of no later one."""
        self._not_looked_up: set[str] = set()
        """The requests of which no lookup has been answered: nothing of theirs is computed yet, and an answer may bring a later epoch."""

    # --- lookups -------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._begun[req_context.req_id] = self._names.last
        self._not_looked_up.add(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._closed:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        if req_context.req_id in self._not_looked_up:
            self._not_looked_up.discard(req_context.req_id)
            self._begun[req_context.req_id] = self._names.last
        loads = self._loads.get(req_context.req_id, ())
        if key in loads or len(loads) >= self._most_loads:
            # it was driven out of the primary tier before it could be used, or it would drive out others of this request
            return LookupResult.MISS
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._begun.pop(req_context.req_id, None)
        self._loads.pop(req_context.req_id, None)
        self._not_looked_up.discard(req_context.req_id)
        self._lookups.cleanup(req_context.req_id)

    # --- jobs ----------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        epoch = self._begun.get(job_metadata.req_context.req_id)
        self._jobs.store(job_metadata.job_id, *_places(job_metadata), epoch=epoch)

    def submit_load(self, job_metadata: TransferJob) -> None:
        if job_metadata.req_context.req_id in self._begun:
            self._loads.setdefault(job_metadata.req_context.req_id, set()).update(job_metadata.keys)
        self._jobs.load(job_metadata.job_id, *_places(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that have ended. What a load did not find counts as missing for the requests that asked for it, which otherwise
        would look it up and load it again for ever."""
        results = []
        for ended in self._jobs.finished():
            done = sum(ended.done)
            loaded: Collection[OffloadKey] | None = None
            if ended.is_load and done < len(ended.names):
                loaded = tuple(OffloadKey(name) for name, ok in zip(ended.names, ended.done, strict=True) if ok) or None
                self._lookups.mark_miss(
                    [OffloadKey(name) for name, ok in zip(ended.names, ended.done, strict=True) if not ok]
                )
            results.append(
                JobResult(
                    job_id=ended.job,
                    success=done == len(ended.names),
                    successful_keys=loaded,
                    transfer_time=ended.seconds,
                    transfer_bytes=done * self._block_size_bytes,
                )
            )
        return results

    def drain_jobs(self) -> None:
        """Ends all jobs, and begins a new epoch: vLLM drains its tiers when it resets its caches, because the weights may have changed."""
        self._jobs.drain()
        if not self._names.begin():
            log.warning("the pool did not take a reset; nothing is loaded or stored until it does")
        # requests that go on have KV of the epoch before: what they computed is not stored any more

    def shutdown(self) -> None:
        """Ends all jobs, and closes the cache. Raises RuntimeError if a transfer still uses vLLM's memory, which vLLM then keeps."""
        self._closed = True
        self._lookups.shutdown()
        ended = self._jobs.close()
        self.cache.close()
        if not ended:
            raise RuntimeError("a transfer still uses the primary tier's memory")


def _places(job: TransferJob) -> tuple[list[bytes], list[int]]:
    return [bytes(key) for key in job.keys], [int(chunk) for chunk in job.chunk_ids]
