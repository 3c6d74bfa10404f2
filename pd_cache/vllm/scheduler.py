"""The connector's part in the scheduler: what to look up, what to load, what to store, and when blocks are given back.

Everything runs on the scheduler's thread. While requests wait for loads, that thread spins through its loop, and asks about each request
hundreds of times a second. So a request is looked up once, and everything else here is a few dictionary operations.

Each block that a store still reads has a reference of ours, as if a request used it. So it does not matter whether the request that
computed the block has finished, or was aborted or preempted meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pd_cache.blocks import StoreOutcome
from pd_cache.epochs import FIRST
from pd_cache.handoff import Announcement, BadParams, Handoff, PrefillWork, read_params, write_params
from pd_cache.lookup import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.misses import MissReason
from pd_cache.reports import KEY, RequestReport
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase, ExtraKey, fold_names, root, stride_hashes
from pd_cache.tracing import UNTRACED, Attribute, TraceSpan, Tracing
from pd_cache.vllm.adapters import Adapter, Adapters
from pd_cache.vllm.hiding import HiddenBlocks
from pd_cache.vllm.layers import KeptLayers, own_hit
from pd_cache.vllm.outcome import PromptOutcome
from pd_cache.vllm.pace import Pace
from pd_cache.vllm.settings import Settings
from pd_cache.vllm.steps import GroupChunks, LoadOp, Step, StepReport, StoreOp

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.distributed.kv_events import BlockStored, KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from pd_cache.vllm.events import ChunkEvents

log = logging.getLogger("vllm.pd_cache")  # below vLLM's own logger, whose handlers and level it inherits

_FIRST_POLL_S, _LONGEST_POLL_S = 0.001, 0.020
"""The first and the longest time between two lookups of an announced prefix."""
_RESET_AGAIN_S = 1.0
_CACHED_LATE = 3
"""How many steps after a block is full vLLM may put it into its own cache, at most."""


class _FoundPrefix(NamedTuple):
    """The answer to a request's lookup."""

    start: int
    """Tokens before this were not looked up: the engine had them at hand."""
    end: int
    parting: int = 0
    """Where prompts part, if that is behind the end; otherwise 0."""


class _Proposal(NamedTuple):
    """A load that was proposed to vLLM and that vLLM has not accepted yet."""

    start: int
    """Tokens that the engine has at hand."""
    end: int
    """The end of the last chunk that is loaded, whole or in part."""
    tokens: int
    """The number of tokens reported to vLLM."""
    in_step: bool
    """Whether the request computes in the step that begins the load."""


class _Tracked:
    """What is known of one request."""

    def __init__(self, request: Request, handoff: Handoff, arrived: float, adapter: Adapter | None) -> None:
        self.request = request
        self.adapter = adapter
        """Its LoRA adapter, if it has one."""
        self.identity = b""
        """The digest of its adapter, once it is known: the names of its chunks depend on it."""
        self.refused = False
        """Whether it was counted that the adapter cannot be identified."""
        self.handoff = handoff
        self.announced = handoff.announced
        self.arrived = arrived
        self.names: list[bytes] = []
        """Names of the whole chunks so far; grows with the request."""
        self.found: _FoundPrefix | None = None
        self.looked_up = False
        self.next_poll = 0.0
        self.poll_s = _FIRST_POLL_S
        self.load: _Proposal | None = None
        self.in_step = False
        """Whether it has a load in the step under way, whose end is not reported yet."""
        self.hidden: HiddenBlocks | None = None
        self.no_room_since: float | None = None
        """When other loads first left too few blocks for its load; None if there are enough."""
        self.loaded = 0
        """Tokens that were loaded, for the hand-off."""
        self.may_load = True
        self.at_hand = 0
        """Tokens that vLLM's own cache had."""
        self.outcome = PromptOutcome()
        self.looking: TraceSpan | None = None
        """The span of the lookup, while the request waits for what it finds."""
        self.loading: TraceSpan | None = None
        """The span of the load under way."""
        self.undrafted: int | None = None
        """Tokens from this one on were computed without the draft model."""
        self.planned: dict[int, int] = {}
        """For each layer group, how many chunks need not be stored any more: those that are planned, and those in the pool."""


class _Job(NamedTuple):
    """A store under way."""

    request_id: str
    first: int
    """Number of its first chunk in the request."""
    group: int
    """The layer group, by its place in `kept_layers`."""
    names: list[bytes]
    blocks: list[int]
    """The blocks of those chunks. A block at the start is -1 if no load will need it."""
    events: list[BlockStored]
    """The events to publish for each chunk; empty if KV events are off."""


class _Leftover:
    """Which blocks of a request of an earlier epoch vLLM's own cache may have got since they were last taken out."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        """Those that were taken out with the last step."""
        self._lengths: list[list[int]] = []
        """How many blocks the request had in each of the last steps, by vLLM's groups."""

    def begin_step(self, lengths: list[int]) -> list[int]:
        """Returns, for each group, from which place on blocks may have been cached. vLLM caches a block when it is full, and under
        asynchronous scheduling a step or two later."""
        before = self._lengths[0] if len(self._lengths) == _CACHED_LATE else [0] * len(lengths)
        self._lengths = [*self._lengths, lengths][-_CACHED_LATE:]
        return [max(0, one - 1) for one in before]


class SchedulerSide:
    """One per engine, on the scheduler's thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        stores: bool,
        layers: Sequence[KeptLayers],
        hash_block_size: int,
        retention: int | None = 0,
        drafted_up_to: int | None = None,
        ranks: int,
        describe: ChunkEvents | None,
        adapters: Adapters,
        metrics: CacheMetrics,
        on_report: Callable[[str, RequestReport], None] | None = None,
        tracing: Tracing = UNTRACED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stores` is false for a consumer. `layers` is what `kept_layers` returns. `hash_block_size` is the number of tokens of each of a
        request's block hashes. `retention` is vLLM's `prefix_cache_retention_interval`. `drafted_up_to` is the most tokens that any request
        of a step may have if the draft model is to run in that step. `describe` is None if the engine's KV events are off. This closes
        `adapters`. `on_report` is called with the id of each request that ends, and with its report. `tracing` is closed with this."""
        self._clock = clock
        self._tracing = tracing
        self._storing_spans: dict[int, TraceSpan] = {}
        """The spans of stores under way, by job."""
        self._settings = settings
        self._options = settings.connector
        self._stores = stores
        self._layers = tuple(layers)
        self._hash_block_size = hash_block_size
        self._retention = retention
        self._drafted_up_to = drafted_up_to
        self._undrafted = False
        """Whether vLLM has skipped the draft model in a step, so that blocks of vLLM's own cache may lack the draft model's KV."""
        self._ranks = ranks
        self._describe = describe
        self._adapters = adapters
        self._on_report = on_report
        self.metrics = metrics
        self.pace = Pace(clock)
        """How fast this engine loads and computes."""
        self._by_layers = False
        self._chunk = settings.node.cache.chunk_tokens
        self._tails = [group.tail(self._chunk) for group in layers]
        self._divisible = all(group.divisible for group in layers)
        self._ahead = max(group.ahead for group in layers)
        """1 if a layer group is ahead, so that a load leaves the last whole chunk to compute; otherwise 0."""
        self._token_mode = settings.node.cache.hash_mode == "tokens"
        self._database: ChunkedTokenDatabase | None = None
        self._namespaces: tuple[str, ...] = ()
        """Fingerprints of the namespaces of all layer groups. The first group names the chunks."""
        self._lookup: LookupClient | None = None
        self._manager: KVCacheManager | None = None
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[LoadOp] = []
        self._jobs: dict[int, tuple[_Job, int, list[StoreOutcome]]] = {}
        """For each job: the job itself, how many ranks still work on it, and the outcome of its chunks so far."""
        self._next_job = 0
        self._chunks_under_way = 0
        self._late: list[StoreOp] = []
        """Stores of requests that have finished since the last step."""
        self._expecting = False
        self._holding: dict[str, int] = {}
        """Requests that hold blocks for a load and have computed nothing since, and the number of blocks that all tokens of each need."""
        self._events: list[KVCacheEvent] = []
        self._epoch = FIRST
        """The epoch of the model's weights, as last known."""
        self._outdated: dict[str, _Leftover] = {}
        """Requests with KV of an earlier epoch: nothing of theirs is stored, nor kept in vLLM's own cache."""
        self._reset_due: float | None = None
        """When a reset that the pool has not taken yet is tried again; None if there is none. Until then, nothing is loaded or stored."""

    # --- before the first request --------------------------------------------------------------------------------

    def open(self, metadata: Sequence[CacheMetadata], lookup: LookupClient, *, by_layers: bool = False) -> None:
        """Takes the lookup client, once the workers' KV tensors are known. From now on, chunks can be named and looked up. `metadata` has
        an entry for each layer group, of each pipeline stage. `by_layers`: whether all workers can load layer by layer."""
        self._by_layers = by_layers
        spaces = [one.namespace(self._settings.node.cache) for one in metadata]
        self._database = ChunkedTokenDatabase(spaces[0])
        self._namespaces = tuple(space.fingerprint() for space in spaces)
        self._lookup = lookup

    def bind(self, manager: KVCacheManager) -> None:
        """Takes the manager that knows each request's blocks."""
        self._manager = manager

    def close(self) -> None:
        """Closes the lookup client and the adapters. Idempotent."""
        self._adapters.close()
        self._tracing.close()
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            lookup.close()

    # --- a request's way -----------------------------------------------------------------------------------------

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Returns how many tokens beyond `computed` can be loaded, or None if vLLM has to ask again later; and whether to load them while
        other requests compute."""
        tracked = self._track(request)
        tracked.load, tracked.in_step, tracked.hidden = None, False, None
        self._holding.pop(request.request_id, None)  # vLLM asks only for requests without blocks
        tracked.at_hand = computed
        self._note_outdated(tracked)
        tracked.outcome.asked(computed)
        may_load = tracked.may_load and not request.skip_reading_prefix_cache
        if self._lookup is None or not may_load or not self._nameable(tracked):
            return 0, False
        if self._reset_due is not None and (self._clock() < self._reset_due or not self.reset()):
            return 0, False
        found = self._find(tracked, self._lookup, computed)
        if found is None:
            self._expecting = True
            return None, False
        # vLLM ends a step at this place, so that states can be stored there and kept in vLLM's own cache. It sets the field anew each time
        # it asks
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, found.parting)
        loadable = self._loadable(request)
        external = min(found.end, loadable) - computed
        if external <= 0:
            return 0, False
        end = min(found.end, -(-loadable // self._chunk) * self._chunk)
        if not self._fits(request, end):
            return self._wait_for_room(tracked), False
        tracked.no_room_since = None
        in_step = self._loads_in_step(request, computed + external, external)
        tracked.load = _Proposal(computed, end, external, in_step)
        return external, not in_step

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Plans the load for this step. vLLM has allocated blocks for the part of our proposal that it accepts."""
        tracked = self._track(request)
        proposed, tracked.load = tracked.load, None
        if external <= 0 or proposed is None:
            return
        first, last = proposed.start // self._chunk, proposed.end // self._chunk
        ids = blocks.get_block_ids()
        parts = [self._load_part(tracked, place, ids, proposed) for place in range(len(self._layers))]
        # with several groups, a window or a state, no blocks are reported: vLLM would go on at the first of them, with a window or a state
        # that was never loaded
        failing = parts[0].blocks if len(parts) == 1 and not self._tails[0] else []
        # if vLLM takes another number of tokens than was proposed, we cannot know which ones. Then none are loaded, and vLLM computes all
        # of them
        wanted = [part for part in parts if part.names] if external == proposed.tokens else []
        self._loads.append(LoadOp(request.request_id, wanted, failing, self._epoch, proposed.in_step))
        tracked.in_step = proposed.in_step
        if proposed.in_step:
            assert self._manager is not None
            tracked.hidden = HiddenBlocks(self._manager, request, self._layers[0], proposed.start)
        tracked.loaded = external
        tracked.outcome.began_load(external, keeps_part=bool(failing))
        _end_span(tracked.loading, "given up")
        tracked.loading = self._span("pd_cache.load", request, asked=external)
        self._holding[request.request_id] = self._needed_blocks(request, proposed.end)
        for place in range(len(self._layers)):
            if first <= tracked.planned.get(place, 0):
                tracked.planned[place] = max(tracked.planned.get(place, 0), last)

    def begin_step(self, output: SchedulerOutput) -> Step:
        """Returns what has to be done with this step, whatever else is planned."""
        step = Step(
            loads=self._loads,
            stores=self._late,
            nothing_to_compute=output.total_num_scheduled_tokens == 0,
            expecting=self._expecting,
        )
        self._loads, self._late = [], []
        self._expecting = False
        self.pace.begin_step(output.num_scheduled_tokens, waits=any(load.in_step for load in step.loads))
        return step

    def end_step(self) -> None:
        """Notes that the workers are done with a step."""
        self.pace.end_step()

    def plan_stores(self, step: Step, output: SchedulerOutput) -> None:
        """Adds to `step` the stores of the chunks that this step completes."""
        self._note_undrafted(output)
        self._forget_outdated(list(self._outdated))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            self._holding.pop(request_id, None)
            tracked = self._requests.get(request_id)
            if tracked is not None:
                request = tracked.request
                if not tracked.in_step:
                    self._unhide(tracked)
                # the outcome of a load within a step is known only when the forward pass is over. If the load failed, what the pass
                # computed is worth nothing. So nothing of the pass is stored before the outcome is known
                certain = -request.num_in_flight_tokens if tracked.in_step else scheduled
                step.stores += self._plan_stores(tracked, request.num_computed_tokens + certain)
        state = output.kv_connector_block_state
        for request_id, offers in (state.boundary_state_offloads if state is not None else {}).items():
            if (tracked := self._requests.get(request_id)) is not None:
                step.stores += self._plan_states(tracked, offers)

    def take_report(self, report: StepReport) -> None:
        """Takes in what the workers have done since the last report."""
        for job, (ranks, outcomes) in report.jobs.items():
            self._advance(job, ranks, outcomes)
        for request_id, restored in report.loads.items():
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.outcome.loaded(restored)
                if restored.reason == "none":
                    self.pace.note_load(tracked.loaded, report.load_seconds.get(request_id, 0.0))
                if tracked.in_step:
                    tracked.in_step = False
                    self._unhide(tracked)
                if tracked.loading is not None:
                    tracked.loading.note(loaded=restored.chunks * self._chunk, reason=restored.reason)
                    tracked.loading.end("failed" if request_id in report.failed_loads else "")
                    tracked.loading = None
        for request_id in report.failed_loads:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                # what the pool had is gone: vLLM computes it, and it is stored again
                tracked.may_load = False
                tracked.found = None
                tracked.planned.clear()
                tracked.loaded = 0

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forgets the request. Returns the `kv_transfer_params` for the node that decodes it; None if no node asked for them."""
        outdated = request.request_id in self._outdated
        if outdated:
            self._forget_outdated([request.request_id])
            del self._outdated[request.request_id]
        tracked = self._requests.pop(request.request_id, None)
        self._holding.pop(request.request_id, None)
        self.pace.forget(request.request_id)
        if tracked is not None:
            _end_span(tracked.looking, "the request ended")
            _end_span(tracked.loading, "the request ended")
        if tracked is None or self._database is None:
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        # otherwise all stores are planned already, and tokens that are still loading are not computed
        if tracked.in_step:
            self._late += self._plan_stores(tracked, computed)
        if not (tracked.in_step and request.num_in_flight_tokens):
            self._unhide(tracked)
        if self._lookup is not None and tracked.looked_up:
            self._lookup.end(request.request_id)
        ours = self._report(tracked, request, computed)
        if not tracked.handoff.announce:
            return {"pd_cache": ours} if ours else None
        stores = self._stores and not outdated and self._reset_due is None
        chunks = max(0, min(computed, request.num_prompt_tokens) // self._chunk - self._ahead) if stores else 0
        if tracked.adapter is not None:  # nothing was stored before its digest was known
            chunks = min(chunks, tracked.planned.get(0, 0))
        cached = request.prefill_stats.num_cached_tokens if request.prefill_stats is not None else tracked.loaded
        announcement = write_params(
            Announcement(
                prefix_tokens=chunks * self._chunk,
                namespace=self._namespaces[0],
                further=self._namespaces[1:],
                adapter=self._adapter_tag(tracked),
                prefill=PrefillWork(
                    cached, max(0, request.num_prompt_tokens - cached), ours.get(KEY, {}).get("reason", "")
                ),
            )
        )
        announcement["pd_cache"].update({KEY: ours[KEY]} if KEY in ours else {})
        return announcement

    def _report(self, tracked: _Tracked, request: Request, computed: int) -> dict[str, Any]:
        """Returns what an answer says about its request, besides what the decode node needs. Counts and logs it.

        It is empty for a request that ended before its prompt was computed.
        """
        report = tracked.outcome.report(request.num_prompt_tokens, self._chunk)
        if report is None or computed < request.num_prompt_tokens:
            return {}
        self.metrics.request(report)
        log.info("request %s: %s", request.request_id, report.line())
        if self._on_report is not None:
            try:
                self._on_report(request.request_id, report)
            except OSError as error:
                self.metrics.trouble("report", "not_written", detail=str(error))
        told: dict[str, Any] = {KEY: msgspec.to_builtins(report)}
        announced = tracked.announced
        if announced is not None and announced.prefill is not None:
            told["prefill"] = msgspec.to_builtins(announced.prefill)
        return told

    def track(self, request: Request) -> None:
        """Begins to track a request that has arrived."""
        self._track(request)

    # --- epochs --------------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Begins a new epoch of the model's weights, for all nodes. Returns whether the pool has taken it. If it has not, later lookups try
        again, at most one a second."""
        epoch = None if self._lookup is None else self._lookup.reset()
        if epoch is None:
            self.metrics.trouble("lookup", "reset_failed")
            self._reset_due = self._clock() + _RESET_AGAIN_S
            return False
        self._reset_due = None
        self._begin_epoch(epoch)
        return True

    def _begin_epoch(self, epoch: str) -> None:
        """Notes a new epoch. What requests have computed so far belongs to an earlier one, and so does what vLLM's own cache holds."""
        self._epoch = epoch
        for request_id, tracked in self._requests.items():
            tracked.found = tracked.hidden = None
            tracked.planned.clear()
            if tracked.at_hand or tracked.request.num_computed_tokens:
                self._outdated.setdefault(request_id, _Leftover())
        # chunks of earlier epochs are not announced, because no node can find them
        self._events = []
        self._jobs = {
            number: (job._replace(events=[]), ranks, outcomes) for number, (job, ranks, outcomes) in self._jobs.items()
        }
        if self._manager is not None:
            pool = self._pool()
            pool.evict_blocks(set(range(pool.num_gpu_blocks)))

    def _note_outdated(self, tracked: _Tracked) -> None:
        """Notes whether a request that is about to begin, or begins anew, has KV of an earlier epoch at hand: while there are such requests,
        what vLLM's own cache has for it may be theirs."""
        request_id = tracked.request.request_id
        if tracked.at_hand and self._outdated:
            self._outdated.setdefault(request_id, _Leftover())
        elif request_id in self._outdated:
            self._forget_outdated([request_id])
            del self._outdated[request_id]

    def _forget_outdated(self, request_ids: Sequence[str]) -> None:
        """Takes out of vLLM's own cache what these requests of earlier epochs have put there since the last step."""
        if not request_ids or self._manager is None:
            return
        found: set[int] = set()
        for request_id in request_ids:
            leftover = self._outdated[request_id]
            by_group = self._manager.get_blocks(request_id).blocks
            if not any(by_group):  # preempted: those that it had may still be in the cache
                found |= leftover.blocks
                continue
            new = leftover.begin_step([len(blocks) for blocks in by_group])
            leftover.blocks = {
                block.block_id for blocks, start in zip(by_group, new, strict=True) for block in blocks[start:]
            }
            found |= leftover.blocks
        self._pool().evict_blocks(found)

    # --- blocks --------------------------------------------------------------------------------------------------

    @property
    def storing(self) -> bool:
        """Whether stores are under way. If so, the engine has to keep stepping to learn of their end."""
        return bool(self._jobs)

    @property
    def frees_blocks(self) -> bool:
        """Whether the end of a store will free blocks to which only the store has a reference."""
        pool = self._pool()
        return any(
            pool.blocks[block].ref_cnt == 1 for job, _, _ in self._jobs.values() for block in job.blocks if block >= 0
        )

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Returns `BlockStored` for chunks that all ranks have stored, and `BlockRemoved` for those that a lookup found evicted."""
        events, self._events = self._events, []
        return events

    # --- inside --------------------------------------------------------------------------------------------------

    def _pool(self) -> BlockPool:
        assert self._manager is not None
        return self._manager.block_pool

    def _track(self, request: Request) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            try:
                handoff = read_params(request.kv_transfer_params)
            except BadParams as error:
                self.metrics.trouble("lookup", "bad_handoff", detail=str(error))
                handoff = Handoff()
            lora = request.lora_request
            adapter = None if lora is None else self._adapters.of(lora.lora_name, lora.lora_path)
            tracked = self._requests[request.request_id] = _Tracked(request, handoff, self._clock(), adapter)
        return tracked

    def _loads_in_step(self, request: Request, end: int, tokens: int) -> bool:
        """Returns whether to load `tokens` tokens, up to before the one with the number `end`, in the step that computes those behind
        them."""
        if self._options.load in ("async", "sync"):
            return self._options.load == "sync"
        # vLLM writes what it computes into a layer's pages before it waits for the layer. So no block may be both loaded and computed
        if not self._by_layers or end % self._layers[0].block_size or end >= request.num_tokens:
            return False
        if self._options.load == "layerwise":
            return True
        return self.pace.alone(request.request_id) and self.pace.gains(tokens, request.num_tokens - end)

    def _unhide(self, tracked: _Tracked) -> None:
        """Puts those blocks back into vLLM's own prefix cache that are known to be good by now."""
        request = tracked.request
        if tracked.hidden is not None and not tracked.hidden.show(
            request.num_computed_tokens - request.num_in_flight_tokens
        ):
            tracked.hidden = None

    def _nameable(self, tracked: _Tracked) -> bool:
        """Returns whether the request's chunks can be named. A prompt of embeddings has no tokens to hash, and without its digest an adapter
        could be taken for another. Counts a request without a digest once."""
        adapter = tracked.adapter
        if adapter is not None and not (digest := adapter.digest):
            if not tracked.refused:
                tracked.refused = True
                detail = f"adapter {adapter.name!r}: {adapter.detail or 'its files are still being read'}"
                self.metrics.trouble("lookup", adapter.why, detail=detail)
            return False
        if adapter is not None:
            tracked.identity = digest
        return not self._token_mode or tracked.request.prompt_embeds is None

    def _find(self, tracked: _Tracked, lookup: LookupClient, computed: int) -> _FoundPrefix | None:
        """Returns the answer to the request's one lookup; None while the request still waits for an announced prefix."""
        at_hand = computed // self._chunk * self._chunk
        known = tracked.found
        now = self._clock()
        awaited = self._awaited(tracked, now) if lookup.available else 0
        # the engine may have evicted since what it had at hand then, and the pool was never asked for that
        if known is not None and known.start <= at_hand and (known.end >= awaited or now < tracked.next_poll):
            return known if known.end >= awaited else None
        request = tracked.request
        names = self._names(tracked, self._most_chunks(request))
        tracked.looked_up = True
        if tracked.looking is None:
            tracked.looking = self._span("pd_cache.lookup", request, asked=len(names) * self._chunk, announced=awaited)
        reach = lookup.survey(names, request.request_id, at_hand=at_hand)
        if reach.epoch is not None and reach.epoch != self._epoch:
            self._begin_epoch(reach.epoch)
        end = reach.chunks * self._chunk
        self._note_lookup(tracked, end, reach.reason)
        tracked.found = _FoundPrefix(at_hand, end, reach.leading * self._chunk if reach.leading > reach.chunks else 0)
        if end >= awaited:
            tracked.looking.note(found=end, reason=reach.reason)
            tracked.looking.end()
            tracked.looking = None
            if reach.reason == "evicted" and self._describe is not None:
                self._events += self._describe.missing(request, reach.leading)
        if end < awaited:
            tracked.next_poll = self._clock() + tracked.poll_s
            tracked.poll_s = min(2 * tracked.poll_s, _LONGEST_POLL_S)
            return None
        return tracked.found

    def _note_lookup(self, tracked: _Tracked, end: int, reason: MissReason) -> None:
        announced = tracked.announced
        awaited = 0 if announced is None else announced.prefix_tokens // self._chunk * self._chunk
        serves = announced is None or announced.serves(self._namespaces)
        tracked.outcome.looked_up(
            end, reason, min(awaited, self._most_chunks(tracked.request) * self._chunk), serves=serves
        )

    def _fits(self, request: Request, end: int) -> bool:
        """Returns whether this request and all that hold blocks for a load could compute the rest of their tokens at the same time.

        vLLM cannot preempt a request that waits after its load. So requests that leave each other no blocks would wait for ever. vLLM 0.32
        prevents that only for full attention. For layers with a window it counts too few blocks: `_request_remaining_blocks` compares
        `max_admission_blocks_per_request` with a list that also has an entry for each block before the window.
        """
        if len(self._layers) == 1 and not self._tails[0]:
            return True
        others = sum(self._holding.values())
        usable = self._pool().num_gpu_blocks - 1  # one is the null block
        return not others or others + self._needed_blocks(request, end) <= usable

    def _wait_for_room(self, tracked: _Tracked) -> int | None:
        """Returns None while the request waits for blocks; 0 if it has waited for as long as a load may take, so that vLLM computes it.

        Meanwhile vLLM asks for the requests behind it. If some of their loads always fit, the load of a long prompt never does.
        """
        now = self._clock()
        if tracked.no_room_since is None:
            tracked.no_room_since = now
        if now - tracked.no_room_since < self._options.load_timeout_ms / 1000:
            return None
        self.metrics.trouble("retrieve", "no_blocks")
        tracked.outcome.refused("no_blocks")
        tracked.may_load = False
        return 0

    def _needed_blocks(self, request: Request, end: int) -> int:
        """Returns the most blocks that the request holds until all of its tokens are computed, if the tokens before `end` are loaded."""
        total = 0
        for group in {
            group.number: group for group in self._layers
        }.values():  # a draft model's group may be over the same blocks as another group
            blocks = -(-request.num_tokens // group.block_size)
            if group.kind == "window":
                blocks -= max(0, end - group.window + 1) // group.block_size
            elif group.kind == "state":
                # one block for the state that was loaded, one for the state that is computed, and one for a boundary between them
                blocks = min(blocks, 3)
            total += blocks
        return total

    def _awaited(self, tracked: _Tracked, now: float) -> int:
        """Returns how long a prefix, in tokens, the request waits for because a prefill node is storing it."""
        announced = tracked.handoff.announced
        if announced is None or now >= tracked.arrived + self._settings.handoff_wait_s:
            return 0
        if not announced.serves(self._namespaces):
            self.metrics.trouble(
                "lookup",
                "other_namespace",
                detail=f"a prefill node stores in {', '.join((announced.namespace, *announced.further))}, this node reads "
                f"{', '.join(self._namespaces)}",
            )
            tracked.handoff = Handoff(tracked.handoff.announce)
            return 0
        if announced.adapter and announced.adapter != self._adapter_tag(tracked):
            self.metrics.trouble("lookup", "other_adapter", detail="a prefill node computed with another LoRA adapter")
            tracked.handoff = Handoff(tracked.handoff.announce)
            return 0
        most = self._most_chunks(tracked.request) - self._ahead
        return max(0, min(announced.prefix_tokens // self._chunk, most)) * self._chunk

    def _adapter_tag(self, tracked: _Tracked) -> str:
        """Returns what distinguishes the names of chunks of the request's adapter from those of others; empty without an adapter."""
        adapter = tracked.adapter
        if adapter is None or not tracked.identity:
            return ""
        named = () if self._token_mode else (adapter.name, adapter.path)  # vLLM's hashes take these in
        return root((tracked.identity, *named)).hex()

    def _most_chunks(self, request: Request) -> int:
        """Returns how many chunks are looked up. vLLM has to compute the last token, and some layers can be loaded only up to a chunk's
        end. If a group is ahead, a load leaves the last of these chunks to compute."""
        length: int = request.num_tokens
        if self._options.recompute == "block":
            return min(length // self._chunk, -(-self._loadable(request) // self._chunk) + self._ahead)
        return (length if self._divisible or self._ahead else length - 1) // self._chunk

    def _loadable(self, request: Request) -> int:
        """Returns how many of a request's tokens may be loaded at most. vLLM has to compute the last one: its logits are needed."""
        length: int = request.num_tokens
        if self._options.recompute == "token":
            return length - 1
        end = own_hit(length, self._layers)
        # a window or a state can be restored only at a chunk's end
        return end // self._chunk * self._chunk if any(self._tails) else end

    def _names(self, tracked: _Tracked, count: int) -> list[bytes]:
        """Returns the names of the request's first `count` chunks, or of fewer if it has fewer whole chunks."""
        assert self._database is not None
        names, request = tracked.names, tracked.request
        if len(names) < count:
            if self._token_mode:
                tracked.names = names = self._database.hash_tokens(list(request.all_token_ids), _isolation(tracked))
            else:
                stride = self._chunk // self._hash_block_size
                new = request.block_hashes[len(names) * stride : count * stride]
                further = stride_hashes(new, stride)
                # vLLM's hashes take in the adapter's name and path, and not its weights
                names += fold_names(further, tracked.identity) if tracked.identity else further
        return names[:count]

    def _names_of(self, tracked: _Tracked, group: KeptLayers, first: int, last: int) -> list[bytes]:
        """Returns the names under which the pool has a group's chunks from `first` to before `last`."""
        return self._names(tracked, last + group.ahead)[first + group.ahead :]

    def _note_undrafted(self, output: SchedulerOutput) -> None:
        """Notes the requests of a step in which vLLM skips the draft model, because one of them has too many tokens for it."""
        if self._drafted_up_to is None:
            return
        step = [
            (tracked, scheduled)
            for request_id, scheduled in output.num_scheduled_tokens.items()
            if (tracked := self._requests.get(request_id)) is not None
        ]
        if all(tracked.request.num_computed_tokens + count <= self._drafted_up_to for tracked, count in step):
            return
        self._undrafted = True
        for tracked, _ in step:
            start = tracked.request.num_computed_tokens
            tracked.undrafted = start if tracked.undrafted is None else min(start, tracked.undrafted)

    def _load_part(
        self, tracked: _Tracked, place: int, ids: Sequence[Sequence[int]], proposed: _Proposal
    ) -> GroupChunks:
        """Returns what a layer group has to load. Left out are tokens that the engine has at hand, and those for which vLLM allocated no
        block."""
        group, tail = self._layers[place], self._tails[place]
        per_chunk = self._chunk // group.block_size
        last = proposed.end // self._chunk
        first = max(proposed.start // self._chunk, last - tail) if tail else proposed.start // self._chunk
        needed = -(-(proposed.start + proposed.tokens) // group.block_size)
        blocks = list(ids[group.number][first * per_chunk : min(last * per_chunk, needed)])
        at_hand = min(len(blocks), max(0, proposed.start // group.block_size - first * per_chunk))
        while at_hand < len(blocks) and tail and blocks[at_hand] == self._null:
            at_hand += 1
        skipped = at_hand // per_chunk
        blocks = [-1] * (at_hand - skipped * per_chunk) + blocks[at_hand:]
        blocks += [-1] * (last * per_chunk - needed)
        return GroupChunks(place, self._names_of(tracked, group, first + skipped, last), blocks)

    @property
    def _null(self) -> int:
        """The number of the block that vLLM puts into a request's list in place of each block that it has freed."""
        number: int = self._pool().null_block.block_id
        return number

    def _plan_stores(self, tracked: _Tracked, computed: int) -> list[StoreOp]:
        """Returns the stores of the chunks that are complete with the request's first `computed` tokens and not planned yet."""
        request = tracked.request
        if not self._may_store(tracked):
            return []
        # vLLM also counts tokens that are only drafted. The request has those that are certain
        complete = min(computed, request.num_tokens) // self._chunk
        ops: list[StoreOp] = []
        for place, group in enumerate(self._layers):
            first = tracked.planned.get(place, 0)
            last = complete - group.ahead
            if group.drafts:
                if tracked.undrafted is not None:
                    last = min(last, tracked.undrafted // self._chunk)
                if self._undrafted:
                    first = max(first, -(-tracked.at_hand // self._chunk))
            if group.kind == "state" or last <= first:
                continue
            last = min(last, len(self._names(tracked, complete)) - group.ahead)
            tracked.planned[place] = last
            for run in self._wanted(tracked, place, first, last):
                ops += self._plan_run(tracked, place, run)
        return ops

    def _may_store(self, tracked: _Tracked) -> bool:
        if not self._stores or self._database is None:
            return False
        if self._reset_due is not None or tracked.request.request_id in self._outdated:
            return False
        return self._nameable(tracked)

    def _wanted(self, tracked: _Tracked, place: int, first: int, last: int) -> list[range]:
        """Returns which of the chunks from `first` to before `last` a load could need of a layer group, in runs."""
        request, tail = tracked.request, self._tails[place]
        prompt = request.num_prompt_tokens // self._chunk
        if not self._options.store_generated:
            last = min(last, prompt - self._layers[place].ahead)
        if not tail or self._retention is None:
            return [range(first, last)] if first < last else []
        # a load of the same prompt ends before its last token; a load of a prompt that continues it ends at some place behind that
        end = prompt - 1 if self._ahead else (request.num_prompt_tokens - 1) // self._chunk
        ends = max(0, end - tail)
        junction = request.shared_prefix_boundary // self._chunk
        period = self._retention // self._chunk
        runs: list[range] = []
        for number in range(first, last):
            periodic = period > 0 and number % period >= period - tail
            if number >= ends or junction - tail <= number < junction or periodic:
                if runs and runs[-1].stop == number:
                    runs[-1] = range(runs[-1].start, number + 1)
                else:
                    runs.append(range(number, number + 1))
        return runs

    def _plan_run(self, tracked: _Tracked, place: int, run: range) -> list[StoreOp]:
        """Returns the store of a run of chunks, of those for which the queue has room and vLLM still has the blocks."""
        request, group = tracked.request, self._layers[place]
        assert self._manager is not None
        per_chunk = self._chunk // group.block_size
        ids = self._manager.get_block_ids(request.request_id)[group.number]
        first, blocks = run.start, list(ids[run.start * per_chunk : run.stop * per_chunk])
        if group.kind == "window":
            gone = next((at for at, block in enumerate(blocks) if block != self._null), len(blocks))
            # a load does not need those blocks of a chunk that lie before the window at the chunk's end
            needed = -(-max(0, group.window - 1) // group.block_size)
            skipped = max(0, -(-(gone - max(0, per_chunk - needed)) // per_chunk))
            first += skipped
            blocks = blocks[skipped * per_chunk :]
            gone = max(0, gone - skipped * per_chunk)
            blocks = [-1] * gone + blocks[gone:]
        count = self._room(run.stop - first)
        if count <= 0:
            return []
        names = self._names_of(tracked, group, first, first + count)
        events = (
            self._describe.stored(request, first, first + count) if self._describe is not None and place == 0 else []
        )
        return [self._begin(_Job(request.request_id, first, place, names, blocks[: count * per_chunk], events))]

    def _plan_states(self, tracked: _Tracked, offers: Iterable[tuple[int, int, int]]) -> list[StoreOp]:
        """Returns the stores of the states that vLLM hands over. Each offer is the number of vLLM's group, a block, and how many tokens the
        state covers."""
        request = tracked.request
        if not self._may_store(tracked):
            return []
        places = {group.number: place for place, group in enumerate(self._layers) if group.kind == "state"}
        ops: list[StoreOp] = []
        for number, block, tokens in offers:
            place = places.get(number)
            if place is None or tokens % self._chunk or not 0 < tokens <= request.num_tokens or not self._room(1):
                continue
            chunk = tokens // self._chunk - 1
            before = [-1] * (self._chunk // self._layers[place].block_size - 1)
            names = self._names(tracked, chunk + 1)[chunk:]
            ops.append(self._begin(_Job(request.request_id, chunk, place, names, [*before, block], [])))
        return ops

    def _room(self, chunks: int) -> int:
        """Returns how many of `chunks` chunks the queue has room for, and counts the others as dropped."""
        room = min(chunks, self._options.store_queue - self._chunks_under_way)
        if room < chunks:
            self.metrics.trouble("store", "queue_full", chunks - room)
        return room

    def _begin(self, job: _Job) -> StoreOp:
        pool = self._pool()
        pool.touch([pool.blocks[block] for block in job.blocks if block >= 0])
        number = self._next_job
        self._next_job += 1
        self._chunks_under_way += len(job.names)
        self._jobs[number] = (job, self._ranks, [StoreOutcome.BEFORE] * len(job.names))
        if self._tracing.on and (tracked := self._requests.get(job.request_id)) is not None:
            self._storing_spans[number] = self._span("pd_cache.store", tracked.request, asked=len(job.names))
        return StoreOp(number, GroupChunks(job.group, job.names, job.blocks), self._epoch)

    def _span(self, name: str, request: Request, **attributes: Attribute) -> TraceSpan:
        """Begins a span under the trace context that vLLM has taken from the request. vLLM hands it on only with `--otlp-traces-endpoint`."""
        span = self._tracing.begin(name, getattr(request, "trace_headers", None), request_id=request.request_id)
        span.note(**attributes)
        return span

    def _advance(self, number: int, ranks: int, outcomes: Sequence[StoreOutcome]) -> None:
        """Notes that `ranks` more ranks are done with a job. When all are, gives its blocks back."""
        if number not in self._jobs:
            return
        job, remaining, before = self._jobs[number]
        both = [StoreOutcome.together(pair) for pair in zip(before, outcomes, strict=True)]
        if remaining > ranks:
            self._jobs[number] = (job, remaining - ranks, both)
            return
        del self._jobs[number]
        if (span := self._storing_spans.pop(number, None)) is not None:
            span.note(stored=both.count(StoreOutcome.NEW), missing=both.count(StoreOutcome.NOT))
            span.end()
        self._chunks_under_way -= len(job.names)
        pool = self._pool()
        # the last block first: vLLM evicts first what was freed first, and a prefix is worth more than what follows it
        pool.free_blocks(pool.blocks[block] for block in reversed(job.blocks) if block >= 0)
        self._events += [event for event, outcome in zip(job.events, both, strict=False) if outcome is StoreOutcome.NEW]
        if job.group == 0 and self._lookup is not None:
            self._lookup.stored(
                [name for name, outcome in zip(job.names, both, strict=True) if outcome is not StoreOutcome.NOT]
            )
        tracked = self._requests.get(job.request_id)
        alone = len(self._layers) == 1 and not self._tails[0]
        if alone and tracked is not None and tracked.found is not None and StoreOutcome.NOT not in both:
            start, end = job.first * self._chunk, (job.first + len(job.names)) * self._chunk
            if start <= tracked.found.end < end:
                tracked.found = _FoundPrefix(tracked.found.start, end)  # useful if the request is preempted


def _end_span(span: TraceSpan | None, why: str) -> None:
    if span is not None:
        span.end(why)


def _isolation(tracked: _Tracked) -> tuple[ExtraKey, ...]:
    """Returns, for token mode, what keeps a request's chunks apart from those of other requests with the same tokens."""
    parts: list[ExtraKey] = []
    request = tracked.request
    if request.cache_salt:
        parts += ["salt", request.cache_salt]
    if tracked.identity:
        parts += ["lora", tracked.identity]
    for feature in request.mm_features:
        parts += ["mm", feature.identifier, feature.mm_position.offset]
    return tuple(parts)
