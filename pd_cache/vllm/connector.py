"""PdCacheConnector: the class that vLLM loads.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PdCacheConnector",
        "kv_connector_module_path": "pd_cache.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"config_file": "cluster.yaml"}}'

Before the first request, settings and models that cannot work raise an exception that says why. After that,
no hook raises: the connector counts and logs the failure, and the hook returns the value that it would return
without a cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from pd_cache.cache import CacheEngineBuilder
from pd_cache.chunks import CacheMetadata, Namespace
from pd_cache.config import CacheConfig
from pd_cache.errors import ConfigError, PdCacheError, UnsupportedModelError
from pd_cache.groups import LayerGroups
from pd_cache.layout import PageKind
from pd_cache.lookup import BypassLookupClient, LookupClient, MooncakeLookupClient, PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import ChunkHistory
from pd_cache.server.client import ServerLookupClient
from pd_cache.tracing import open_tracing
from pd_cache.versions import WeightsVersion
from pd_cache.vllm.files import NAMESPACE_FILE, answering, write_about
from pd_cache.vllm.layers import (
    KeptLayers,
    cache_tokens,
    described,
    group_tensors,
    kept_layers,
    parts_of,
)
from pd_cache.vllm.lora import Adapters
from pd_cache.vllm.model import (
    adapter_settings,
    check_supported,
    draft_layers,
    drafted_up_to,
    drafter_identity,
    fitted,
    hashes_media,
    model_identity,
    place_of,
)
from pd_cache.vllm.plan import ChunkPlan
from pd_cache.vllm.scheduler import SchedulerSide
from pd_cache.vllm.settings import read_settings
from pd_cache.vllm.stats import CacheStats, PromCacheMetrics
from pd_cache.vllm.steps import Step, StepReport
from pd_cache.vllm.worker import WorkerSide
from pd_cache.vllm.worker_caches import WorkerGroup, engine_name, on_all_cores, open_caches

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.pd_cache")  # below vLLM's own logger, whose handlers and level it inherits

TESTED = ("0.32.0",)
"""The versions of vLLM with which `tests/vllm` has run."""

_NEEDED = (
    "bind_kv_cache_manager",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_handshake_metadata",
    "get_transfer_results",
    "has_pending_block_frees",
    "has_pending_push_work",
    "on_new_request",
    "set_xfer_handshake_metadata_pp_aware",
)
"""Hooks of `KVConnectorBase_V1` that a version of vLLM must have. Without them, KV could be wrong, or blocks
would not be given back."""

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def never_fails(op: str, otherwise: Any = None) -> Callable[[_Hook], _Hook]:
    """A decorator for hooks: counts and logs an exception, and returns `otherwise` instead. No request may
    fail because the cache does."""

    def guarded(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def safe(self: PdCacheConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # of any kind: vLLM must keep serving
                self._metrics.trouble(op, f"error_{type(error).__name__}", detail=str(error))
                logger.exception("pd-cache: %s failed; vLLM goes on without it", op)
                return otherwise

        return cast(_Hook, safe)

    return guarded


@dataclasses.dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """A worker's message to the scheduler about its KV tensors; sent once."""

    metadata: list[CacheMetadata]
    """An entry for each layer group."""
    pid: int
    instance: str
    """The name under which the worker's process knows the engine."""


class PdCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores and loads the KV of prompts in a pool that all nodes share. The scheduler has an instance, and
    so has each worker.

    It supports vLLM's hybrid memory allocator: layers with sliding windows or states have layer groups of
    their own (`layers.py`).
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ConfigError, UnsupportedModelError or IncompatibleVllmError if the settings, the model or
        vLLM's version cannot work."""
        check_version(vllm.__version__, KVConnectorBase_V1)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        check_supported(vllm_config, kv_cache_config)
        if transfer.kv_load_failure_policy != "recompute" and role is KVConnectorRole.SCHEDULER:
            logger.warning(
                "kv_load_failure_policy is %r: a chunk that cannot be loaded fails its request. Set it to 'recompute' to have "
                "vLLM compute the prompt instead",
                transfer.kv_load_failure_policy,
            )
        stores = transfer.is_kv_producer
        if transfer.kv_role == "kv_producer":
            # our producers load, too. Unless vLLM takes this engine for a consumer, vLLM 0.32 with
            # asynchronous scheduling gives the blocks of a running load to another request (docs/vllm.md)
            transfer.kv_role = "kv_both"
        settings = read_settings(transfer.kv_connector_extra_config, transfer.kv_role)
        self._draft = draft_layers(vllm_config, kv_cache_config)
        self._layers = kept_layers(kv_cache_config, self._draft)
        hash_block_size = kv_cache_config.hash_block_size or self._layers[0].block_size
        self._settings = fitted(settings, vllm_config, self._layers, hash_block_size)
        file = os.environ.get(NAMESPACE_FILE)
        self._file = Path(file) if file else None
        self._metrics = CacheMetrics()
        self._version = WeightsVersion()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._resources = contextlib.ExitStack()
        self._handshake: Handshake | None = None
        self._bad_blocks: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            if self._file is not None:
                self._file.unlink(missing_ok=True)  # left by an earlier start
            plan = ChunkPlan(
                self._settings,
                self._layers,
                hash_block_size,
                stores=stores,
                ranks=vllm_config.parallel_config.world_size,
                dense=kv_cache_config.prefix_cache_retention_interval != 0,
                drafted_up_to=drafted_up_to(vllm_config),
                hashes_media=hashes_media(vllm_config),
            )
            adapters = Adapters(adapter_settings(vllm_config))
            tracing = open_tracing(settings.tracing, settings.role, settings.name or settings.node.host)
            self._resources.callback(tracing.close)
            self._resources.callback(adapters.close)
            self._scheduler = SchedulerSide(
                plan,
                adapters,
                self._metrics,
                tracing=tracing,
                version=self._version,
            )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object = None) -> bool:
        """Returns False, because loads and stores would go on while vLLM sleeps. vLLM asks since 0.33."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False, because a chunk that was not stored is computed again when it is needed."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Returns the layout in which each head of a page is contiguous, so that nodes of different
        tensor-parallel size can share chunks."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    # --- worker: before the first step ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the cache for these tensors. Does not wait for the pool. Raises UnsupportedModelError if a
        pipeline stage keeps no KV, or if pages of these tensors cannot be copied."""
        config, settings = self._vllm_config, self._settings
        identity = model_identity(config, settings.connector.revision)
        ranks, rank = config.parallel_config.tensor_parallel_size, get_tensor_model_parallel_rank()
        found = [self._parts_of(group, kv_caches, identity, rank, ranks) for group in self._layers]
        groups = [part for parts in found for part in parts]
        if not groups:
            raise UnsupportedModelError(
                f"{config.model_config.model}: one of its pipeline stages keeps no KV"
            )
        worker = get_pp_group().rank_in_group * ranks + rank
        instance = f"vllm-{self._kv_transfer_config.engine_id}-{worker}"
        with on_all_cores(), contextlib.ExitStack() as stack:
            world_size = config.parallel_config.world_size
            opened = open_caches(
                settings, groups, instance, worker, world_size, self._metrics, self._version, stack
            )
            caches = iter(opened)
            self._resources = stack.pop_all()
            self._worker = WorkerSide(
                [[(next(caches), part.stores) for part in parts] for parts in found],
                load_timeout_s=settings.connector.load_timeout_ms / 1000,
                device=groups[0].kv_caches[0].device,
                version=self._version,
            )
        self._handshake = Handshake([group.metadata for group in groups], os.getpid(), instance)
        for group in groups:
            namespace = group.metadata.namespace(settings.node.cache)
            logger.info("pd-cache: namespace %s: %s", namespace.fingerprint(), namespace.manifest().decode())

    def _parts_of(
        self,
        group: KeptLayers,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        identity: str,
        rank: int,
        ranks: int,
    ) -> list[WorkerGroup]:
        """Returns the parts of a layer group: their tensors on this rank, and which shards of a chunk these
        hold. The list is empty if this pipeline stage has no layers of the group."""
        config, name = self._kv_cache_config, self._vllm_config.model_config.model
        drafter = (
            drafter_identity(self._vllm_config, self._settings.connector.revision) if group.drafts else ""
        )
        stages = self._vllm_config.parallel_config.pipeline_parallel_size
        numbers = [other.number for other in self._layers if other.kind == group.kind]
        names = {layer for number in numbers for layer in config.kv_cache_groups[number].layer_names}
        alike = names & self._draft.names if group.drafts else names - self._draft.names
        parts = parts_of(group, config, self._draft)
        alone = not group.drafts and sum(not kept.drafts for kept in self._layers) == len(parts) == 1
        found, chunk = [], self._settings.node.cache.chunk_tokens
        for kept, layers in parts:
            kv = group_tensors(kept, kv_caches, layers, config.num_blocks, name, chunk)
            plain = alone and kept.kind == "full"
            if plain and kv.layout.kind is PageKind.OPAQUE:
                raise UnsupportedModelError(
                    f"{name}: its attention kernel uses smaller blocks than vLLM, of {kept.block_size} tokens; set --block-size to "
                    "the kernel's"
                )
            # each pipeline stage has other layers, and so a namespace of its own
            whole = plain and stages == 1
            said = None if whole else described(kept, layers, kv, chunk, drafter, alike.difference(layers))
            metadata, stores = place_of(
                identity,
                kv.layout,
                name,
                rank=rank,
                ranks=ranks,
                replicas=config.kv_tp_replicas,
                shards=self._settings.shards,
                latent=kept.latent,
                group=said,
            )
            found.append(WorkerGroup(metadata, kv.layout, kv.tensors, stores))
        return found

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Returns this worker's message to the scheduler."""
        return self._handshake

    # --- worker: each step ----------------------------------------------------------------------------------

    @never_fails("start_load_kv")
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begins the step's loads."""
        if self._worker is not None:
            self._worker.start(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing, because all loads have ended before a request computes."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing, because chunks are stored whole, after the step that completes them."""

    @never_fails("wait_for_save")
    def wait_for_save(self) -> None:
        """Queues the step's stores once the step is launched. Their thread waits for its computation, then
        gathers. The scheduler keeps their blocks until they have ended."""
        if self._worker is not None:
            self._worker.save(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the requests whose loads have ended."""
        if self._worker is None:
            return KVConnectorTransferResults()
        loads = self._worker.take_ended_loads(self._step(), finished_req_ids)
        self._bad_blocks = loads.bad_blocks
        return KVConnectorTransferResults(finished_recving=loads.finished, failed_recving=loads.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks that the loads in the last `get_transfer_results` could not load."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns this worker's report for the scheduler: the loads and stores that have ended."""
        return None if self._worker is None else self._worker.take_report(self._step())

    # --- scheduler: before the first request ----------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Takes vLLM's manager of blocks; called once."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Opens the lookups; called once, with the handshakes of all workers by pipeline stage and
        tensor-parallel rank.

        Raises UnsupportedModelError for the same reasons as `of_all_stages`, and ConfigError if the
        handshakes are another connector's.
        """
        if self._scheduler is None:
            return
        known = {place: worker for place, worker in sorted(metadata.items()) if isinstance(worker, Handshake)}
        if not known:
            raise ConfigError(
                "no worker has reported its KV tensors to pd-cache's scheduler: vLLM's MultiConnector passes on only what its first "
                "connector reports"
            )
        cache = self._settings.node.cache
        groups = of_all_stages(known, cache, self._vllm_config.model_config.model)
        with on_all_cores():  # the worker may live in this process
            lookup = self._open_lookup(groups, next(iter(known.values())))
        self._resources.callback(lookup.close)
        self._scheduler.open(groups, lookup)
        spaces = tuple(group.namespace(cache) for group in groups)
        if self._file is not None:
            self._publish(self._file, spaces, self._scheduler)

    @never_fails("namespace")
    def _publish(self, file: Path, namespaces: tuple[Namespace, ...], scheduler: SchedulerSide) -> None:
        # with xxhash, PYTHONHASHSEED must stay secret, but the namespace has a digest of its 32 bits
        secret = namespaces[0].hash_seed.startswith("xxhash")
        longest = self._vllm_config.model_config.max_model_len
        streams, kv_tokens = scheduler.streams.possible, cache_tokens(self._kv_cache_config)
        write_about(file, () if secret else namespaces, kv_tokens, streams, longest)
        self._resources.enter_context(answering(file, self._version, scheduler.costs, scheduler.reports))

    def _open_lookup(self, groups: Sequence[CacheMetadata], worker: Handshake) -> LookupClient:
        """Returns the lookup client, which depends on where the workers' caches are:

        - in a cache server: a `ServerLookupClient` asks the server;
        - in this process, with all layer groups: a `BypassLookupClient` asks the worker's engine;
        - otherwise: a `MooncakeLookupClient` asks the pool's master.
        """
        node, url, metrics = self._settings.node, self._settings.server_url, self._metrics
        metadata, *further = groups
        timeout_ms = self._settings.connector.lookup_timeout_ms
        timeouts = msgspec.structs.replace(node.transfer.timeouts, exist_ms=timeout_ms)
        transfer = msgspec.structs.replace(node.transfer, timeouts=timeouts)
        node, seconds = msgspec.structs.replace(node, transfer=transfer), timeout_ms / 1000
        if url is not None:
            logger.info("pd-cache: lookups ask the cache server at %s", url)
            return ServerLookupClient(
                node, metadata, url, seconds, further=further, metrics=metrics, version=self._version
            )
        if worker.pid == os.getpid():
            names = [engine_name(worker.instance, place) for place in range(len(groups))]
            engines = [engine for name in names if (engine := CacheEngineBuilder.get(name)) is not None]
            if len(engines) == len(groups):
                logger.info("pd-cache: lookups ask the worker's engine")
                first, layers = engines[0], LayerGroups([engine.database for engine in engines])
                prefix = PrefixLookup(layers, first.backend, self._version, metrics, first.mover.history)
                return BypassLookupClient(node, metadata, prefix, timeout=seconds, metrics=metrics)
        logger.info("pd-cache: lookups ask the master at %s", node.master)
        return MooncakeLookupClient(
            node,
            metadata,
            node.master,
            further=further,
            metrics=metrics,
            history=ChunkHistory(),
            version=self._version,
        )

    # --- scheduler: each step -------------------------------------------------------------------------------

    @never_fails("on_new_request")
    def on_new_request(self, request: Request) -> None:
        """Begins to track a request that has arrived."""
        self._scheduling().track(request)

    @never_fails("lookup", otherwise=(0, False))  # for what comes before and after `LookupClient.find`
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns how many tokens can be loaded beyond those at hand, and whether they are loaded
        asynchronously, as all loads are."""
        return self._scheduling().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plans the load: vLLM has allocated blocks for `num_external_tokens` of the matched tokens."""
        # not guarded, because a request whose load never begins would never end. Only naming the chunks could
        # fail, and `matched_tokens` has named them
        self._scheduling().allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Returns the number of tokens to load by their source, to a chunk. The pool is
        `external_unspecified`, as other remote stores are in vLLM."""
        sources = (CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.EXTERNAL_UNSPECIFIED)
        split = self._scheduling().track(request).by_tier(num_external_tokens)
        return {source: tokens for source, tokens in zip(sources, split, strict=True) if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Returns the workers' loads and stores of this step."""
        # not guarded, because requests wait for these loads; it only takes what `allocated` has planned
        step = self._scheduling().begin_step(scheduler_output)
        self._plan_streams(step)
        self._plan_stores(step, scheduler_output)
        return step

    @never_fails("stream")
    def _plan_streams(self, step: Step) -> None:
        self._scheduling().plan_streams(step)

    @never_fails("store")
    def _plan_stores(self, step: Step, output: SchedulerOutput) -> None:
        self._scheduling().plan_stores(step, output)

    @never_fails("report")
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes in the workers' reports."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._scheduling().take_report(report)

    @never_fails("request_finished", otherwise=(False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Lets vLLM free the request's blocks. Stores under way have references of their own to the blocks
        that they read."""
        return False, self._scheduling().finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for a model with several layer groups."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Returns whether the engine has to keep stepping, so that stores and streams give their blocks
        back."""
        return self._scheduling().stores.under_way or self._scheduling().streams.leaving

    def has_pending_block_frees(self) -> bool:
        """Returns whether the end of a store will free blocks. vLLM then waits for them instead of preempting
        a request."""
        return self._scheduling().stores.frees_blocks

    # --- both -----------------------------------------------------------------------------------------------

    @never_fails("reset", otherwise=False)
    def reset_cache(self) -> bool:
        """Notes that this engine's weights have changed. It finds, loads and stores nothing until `pd-cache
        reset` gives the new weights a label.

        vLLM calls this for `/reset_prefix_cache?reset_external=true`, and when it is paused or put to sleep.
        """
        self._scheduling().reset()
        return True

    @never_fails("stats")
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns what was counted since the last call."""
        added = self._metrics.take_added()
        return CacheStats({"|".join(key): value for key, value in added.items()}) if added else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Returns statistics with this payload."""
        return CacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Returns the counters for Prometheus, on vLLM's /metrics."""
        return PromCacheMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Stops loads and stores, and closes everything that was opened."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(self._settings.node.transfer.timeouts.close_ms / 1000)
        self._resources.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler

    def _step(self) -> Step:
        step = self._connector_metadata
        return step if isinstance(step, Step) else Step()


def of_all_stages(
    handshakes: Mapping[tuple[int, int], Handshake], cache: CacheConfig, model: str
) -> list[CacheMetadata]:
    """Returns the layer groups of all pipeline stages. A chunk counts as found if the objects of all stages
    are there.

    `handshakes` are by pipeline stage and rank. Raises UnsupportedModelError if the ranks of a stage have
    different KV, or if two layer groups have the same namespace.
    """
    stages: dict[int, list[CacheMetadata]] = {}
    for (stage, _), handshake in sorted(handshakes.items()):
        first, groups = stages.setdefault(stage, handshake.metadata), handshake.metadata
        if [group.namespace(cache) for group in groups] != [group.namespace(cache) for group in first]:
            raise UnsupportedModelError(f"{model}: its ranks have different KV: {first} and {groups}")
    groups = [group for metadata in stages.values() for group in metadata]
    if len({group.namespace(cache) for group in groups}) < len(groups):
        raise UnsupportedModelError(f"{model}: two of its layer groups have the same namespace: {groups}")
    return groups


class IncompatibleVllmError(PdCacheError):
    """The installed vLLM has another connector interface."""


def check_version(version: str, base: type) -> None:
    """Warns of a version that was not tested. Raises IncompatibleVllmError if the interface lacks a
    method."""
    tested = ", ".join(TESTED)
    lacking = [name for name in _NEEDED if not hasattr(base, name)]
    if lacking:
        raise IncompatibleVllmError(
            f"vLLM {version} has another connector interface than this pd-cache needs: KVConnectorBase_V1 lacks "
            f"{', '.join(lacking)}. Tested versions of vLLM: {tested}"
        )
    if version.split("+")[0] not in TESTED:
        logger.warning(
            "pd-cache was tested with vLLM %s; this is %s, and may behave differently", tested, version
        )
