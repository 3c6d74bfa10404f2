"""pd-cache as a secondary tier of vLLM's KV offloading: `{"type": "PdCacheTierManager", "module_path":
"pd_cache.adapters.vllm_tier"}`.

vLLM's `OffloadingConnector` with its `TieringOffloadingSpec` keeps chunks in the host's memory, its primary
tier, and hands them to secondary tiers. It groups layers and gathers the shares of the tensor-parallel ranks
itself. docs/adapters.md shows the settings. The tier runs in vLLM's scheduler, so nothing here waits, apart
from `drain_jobs` and `shutdown`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
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
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pd_cache.adapters.options import AdapterOptions, read_options, settings_of, weights_of
from pd_cache.adapters.tasks import RowJobs
from pd_cache.adapters.versioned_names import VersionedNames
from pd_cache.config import LineOrEmpty
from pd_cache.objects.object_cache import ObjectCache

log = logging.getLogger(__name__)

_ROWS_IN_FLIGHT = 2
"""All stores together may hold 1 / `_ROWS_IN_FLIGHT` of the primary tier's rows. vLLM pins these rows, and
needs the others for itself."""


_SHARE_OF_A_REQUEST = 4
"""When a request loads chunks, 1 / `_SHARE_OF_A_REQUEST` of the primary tier's rows stay free. vLLM 0.32 pins
no chunk between its load and its use. So if a prompt had more chunks than there are rows, its last chunks
would evict its first chunks, which would be loaded again, for ever."""


class TierOptions(AdapterOptions, frozen=True, kw_only=True):
    """The keys of the tier's entry in `secondary_tiers`, besides vLLM's own."""

    revision: LineOrEmpty = ""
    """Identifies the weights, together with the model's name, in place of a digest of the model's files. It
    has to change whenever the weights change."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """How many jobs run at the same time in each direction."""
    locality: Literal["LOCAL", "REMOTE"] | None = "REMOTE"
    """The locality by which vLLM's `load_tier_filter` selects this tier."""


FORMAT = 1
"""The version of the format. Tiers of other versions never find the values."""


class _Lookups(AsyncLookupManager):
    """vLLM's own bookkeeping of lookups; each step's lookups of a request are one request to the pool."""

    def __init__(self, names: VersionedNames, tier_type: str) -> None:
        self._names = names
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._names.exist(keys)


class PdCacheTierManager(SecondaryTierManager):
    """A secondary tier in pd-cache's pool and tiers. Trouble of the pool is a miss or a failed job, never an
    exception."""

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED
    """Not `disk`, which vLLM would derive from the medium, because most of the pool is memory."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        """Waits neither for the pool nor for a disk. `given` are the tier's further keys, which are
        `TierOptions`.

        Raises ConfigError for options that are wrong, ValueError if the staging memory is too small for a
        row.
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
        settings = settings_of(options)
        self.cache = ObjectCache.open(
            settings, namespace, part_bytes=self._block_size_bytes, most_bytes=self._block_size_bytes
        )
        self._names = VersionedNames(self.cache)
        rows = primary_kv_view.nbytes // self._block_size_bytes
        self._jobs = RowJobs(
            self._names,
            primary_kv_view.cast("B"),
            self._block_size_bytes,
            seconds=options.timeout_s,
            most_stored=max(1, rows // _ROWS_IN_FLIGHT),
            threads=options.threads,
        )
        self._lookups = _Lookups(self._names, tier_type)
        self._closed = False
        self._most_loads = max(1, rows - rows // _SHARE_OF_A_REQUEST)
        self._loads: dict[str, set[OffloadKey]] = {}
        """The keys that were loaded for each request."""
        self._begun: dict[str, str] = {}
        """The weights version with which each request began. Its KV must not be stored under a later
        version."""

    # --- lookups --------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._begun[req_context.req_id] = self._names.label
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._closed:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        loads = self._loads.get(req_context.req_id, ())
        if key in loads or len(loads) >= self._most_loads:
            # the chunk was evicted from the primary tier before its use, or would evict other chunks of this
            # request
            return LookupResult.MISS
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._begun.pop(req_context.req_id, None)
        self._loads.pop(req_context.req_id, None)
        self._lookups.cleanup(req_context.req_id)

    # --- jobs -----------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        label = self._begun.get(job_metadata.req_context.req_id)
        self._jobs.store(job_metadata.job_id, *_places(job_metadata), label=label)

    def submit_load(self, job_metadata: TransferJob) -> None:
        if job_metadata.req_context.req_id in self._begun:
            self._loads.setdefault(job_metadata.req_context.req_id, set()).update(job_metadata.keys)
        self._jobs.load(job_metadata.job_id, *_places(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that have ended. A key that a load did not find counts as missing for its
        requests. Otherwise these would look it up and load it for ever."""
        results = []
        for ended in self._jobs.finished():
            done = [OffloadKey(name) for name, ok in zip(ended.names, ended.done, strict=True) if ok]
            missed = [OffloadKey(name) for name, ok in zip(ended.names, ended.done, strict=True) if not ok]
            if ended.is_load and missed:
                self._lookups.mark_miss(missed)
            results.append(
                JobResult(
                    job_id=ended.job,
                    success=not missed,
                    successful_keys=done if ended.is_load and missed and done else None,
                    transfer_time=ended.seconds,
                    transfer_bytes=len(done) * self._block_size_bytes,
                )
            )
        return results

    def drain_jobs(self) -> None:
        """Ends all jobs, and hides all values: vLLM drains its tiers when it resets its caches, because its
        weights may have changed."""
        self._jobs.drain()
        self._names.reset()
        # running requests still have KV of the old weights, which is no longer stored

    def shutdown(self) -> None:
        """Ends all jobs, and closes the cache. Raises RuntimeError if a transfer still uses vLLM's memory,
        which vLLM then keeps."""
        self._closed = True
        self._lookups.shutdown()
        ended = self._jobs.close()
        self.cache.close()
        if not ended:
            raise RuntimeError("a transfer still uses the primary tier's memory")


def _places(job: TransferJob) -> tuple[list[bytes], list[int]]:
    return [bytes(key) for key in job.keys], [int(chunk) for chunk in job.chunk_ids]


def namespace_of(config: Any, *, row_bytes: int, blocks_per_chunk: int, revision: str, salt: str) -> str:
    """Returns a text that is equal for two tiers if and only if they may use each other's rows.

    `config` is vLLM's `OffloadingConfig`; `row_bytes` is the size of a chunk in the primary tier. Raises
    ConfigError if the model's weights cannot be identified and there is no `revision`.
    """
    parallel = config.parallel
    # in vLLM's direct layout, the ranks' shares lie one after another, each with all layers. So the bytes
    # differ with the number of ranks, although vLLM calls the layout is_parallelism_agnostic
    alike = bool(config.replicated_layout or (config.canonical_layout and parallel.is_parallelism_agnostic))
    fields = {
        "format": FORMAT,
        "engine": "vllm-tiering",
        "weights": weights_of(config.model.name, revision, "the tier's entry in secondary_tiers"),
        "dtype": str(config.model.dtype),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": blocks_per_chunk,
        "row_bytes": row_bytes,
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups
        ],
        "ranks": [1] * 4
        if alike
        else [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "replicated": bool(config.replicated_layout),
        "layout": str(config.kv_cache_layout),
        "canonical": bool(config.canonical_layout),
        "salt": salt,
    }
    return json.dumps(fields, sort_keys=True)
