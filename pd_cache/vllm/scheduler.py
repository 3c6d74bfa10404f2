"""The connector's part in the scheduler: what to look up, what to load, what to store, and when blocks are given back.

Everything runs on the scheduler's thread, which spins through its loop while requests wait for loads: hundreds of times a second for one
request. So a request is looked up once, and everything else here is a few dictionary operations.

Blocks that a store still reads carry a reference of ours, as if a request held them. So it does not matter whether the request that
computed them has finished, or was aborted or preempted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pd_cache.blocks import StoreOutcome
from pd_cache.handoff import Announcement, BadParams, Handoff, PrefillWork, read_params, write_params
from pd_cache.lookup import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase, ExtraKey
from pd_cache.vllm.settings import Settings
from pd_cache.vllm.steps import LoadOp, Step, StepReport, StoreOp

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.distributed.kv_events import BlockStored, KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_FIRST_POLL_S, _LONGEST_POLL_S = 0.001, 0.020
"""How often an announced prefix is looked up again."""


Describe = Callable[["Request", int, int], "list[BlockStored]"]
"""Returns the KV events for a request's chunks from one number to before another."""


class _FoundPrefix(NamedTuple):
    """The answer to a request's lookup."""

    start: int
    """Tokens before this were not looked up: the engine held them."""
    end: int


class _Proposal(NamedTuple):
    """A load that was proposed to vLLM, which has not accepted it yet."""

    start: int
    """Tokens that the engine holds."""
    end: int
    """The pool has the whole chunks up to here."""
    tokens: int
    """The number of tokens reported to vLLM."""


class _Tracked:
    """What is known of one request."""

    def __init__(self, request: Request, handoff: Handoff, arrived: float) -> None:
        self.request = request
        self.handoff = handoff
        self.arrived = arrived
        self.names: list[bytes] = []
        """Names of the whole chunks so far; grows with the request."""
        self.found: _FoundPrefix | None = None
        self.looked_up = False
        self.next_poll = 0.0
        self.poll_s = _FIRST_POLL_S
        self.load: _Proposal | None = None
        self.loaded = 0
        """Tokens that were loaded, for the hand-off."""
        self.may_load = True
        self.planned = 0
        """Chunks that need no more storing: planned already, or in the pool."""


class _Job(NamedTuple):
    """A store under way."""

    request_id: str
    first: int
    """Number of its first chunk in the request."""
    blocks: list[int]
    chunks: int
    events: list[BlockStored]
    """The events to publish for each chunk; empty if KV events are off."""


class SchedulerSide:
    """One per engine, on the scheduler's thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        stores: bool,
        block_size: int,
        ranks: int,
        describe: Describe | None,
        metrics: CacheMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stores` is false for a consumer; `describe` is None if the engine's KV events are off."""
        self._clock = clock
        self._settings = settings
        self._options = settings.connector
        self._stores = stores
        self._block_size = block_size
        self._ranks = ranks
        self._describe = describe
        self.metrics = metrics
        self._chunk = settings.node.cache.chunk_size
        self._blocks_per_chunk = self._chunk // block_size
        self._token_mode = settings.node.cache.hash_mode == "tokens"
        self._database: ChunkedTokenDatabase | None = None
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
        self._stored_events: list[KVCacheEvent] = []

    # --- before the first request --------------------------------------------------------------------------------

    def open(self, metadata: CacheMetadata, lookup: LookupClient) -> None:
        """Takes the lookup client, once the workers' KV tensors are known: from now on, chunks can be named and looked up."""
        self._database = ChunkedTokenDatabase(metadata.namespace(self._settings.node.cache))
        self._lookup = lookup

    def bind(self, manager: KVCacheManager) -> None:
        """Takes the manager that knows each request's blocks."""
        self._manager = manager

    def close(self) -> None:
        """Closes the lookup client. Idempotent."""
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            lookup.close()

    # --- a request's way -----------------------------------------------------------------------------------------

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Returns how many tokens beyond `computed` can be loaded; None if vLLM has to ask again later."""
        tracked = self._track(request)
        tracked.load = None
        if self._lookup is None or not tracked.may_load or not self._nameable(request):
            return 0, False
        found = self._find(tracked, self._lookup, computed)
        if found is None:
            self._expecting = True
            return None, False
        # one token is left to compute: its logits are needed
        external = min(found.end, request.num_tokens - 1) - computed
        if external <= 0:
            return 0, False
        tracked.load = _Proposal(computed, found.end, external)
        return external, self._options.load == "async"

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Plans the load for this step: vLLM has allocated blocks for the part of our proposal that it accepts."""
        tracked = self._track(request)
        proposed, tracked.load = tracked.load, None
        if external <= 0 or proposed is None:
            return
        first, last = proposed.start // self._chunk, proposed.end // self._chunk
        ids = blocks.get_block_ids()[0][first * self._blocks_per_chunk : last * self._blocks_per_chunk]
        at_hand = proposed.start // self._block_size - first * self._blocks_per_chunk
        # if vLLM takes another number of tokens than was proposed, we cannot know which: load none, and vLLM computes
        # all of them
        names = self._names(tracked, last)[first:] if external == proposed.tokens else []
        self._loads.append(LoadOp(request.request_id, names, [-1] * at_hand + list(ids[at_hand:])))
        tracked.loaded = external
        if first <= tracked.planned:
            tracked.planned = max(tracked.planned, last)

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
        return step

    def plan_stores(self, step: Step, output: SchedulerOutput) -> None:
        """Adds the chunks that this step completes."""
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                request = tracked.request
                # only when the forward pass is over can it be known whether a load before it failed, and what the pass
                # computed is worth nothing then: wait for the outcome before any of it is stored
                certain = -request.num_in_flight_tokens if self._options.load == "sync" else scheduled
                step.stores += self._plan_stores(tracked, request.num_computed_tokens + certain)

    def take_report(self, report: StepReport) -> None:
        """Takes in what the workers have done since the last report."""
        for job, (ranks, outcomes) in report.jobs.items():
            self._advance(job, ranks, outcomes)
        for request_id in report.failed_loads:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                # what the pool had is gone: compute it, and store it again
                tracked.may_load = False
                tracked.found = None
                tracked.planned = 0
                tracked.loaded = 0

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forgets the request. Returns what to hand to the node that decodes it."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None or self._database is None:
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if self._options.load == "sync":  # otherwise all is planned, and what still loads is not computed
            self._late += self._plan_stores(tracked, computed)
        if self._lookup is not None and tracked.looked_up:
            self._lookup.end(request.request_id)
        if not tracked.handoff.announce:
            return None
        computed = min(computed, request.num_prompt_tokens)
        cached = request.prefill_stats.num_cached_tokens if request.prefill_stats is not None else tracked.loaded
        return write_params(
            Announcement(
                prefix_tokens=computed // self._chunk * self._chunk if self._stores else 0,
                namespace=self._database.namespace.fingerprint(),
                prefill=PrefillWork(cached, max(0, request.num_prompt_tokens - cached)),
            )
        )

    def track(self, request: Request) -> None:
        """Begins to track a request that has arrived."""
        self._track(request)

    # --- blocks --------------------------------------------------------------------------------------------------

    @property
    def storing(self) -> bool:
        """Whether stores are under way; the engine has to keep stepping to learn of their end."""
        return bool(self._jobs)

    @property
    def frees_blocks(self) -> bool:
        """Whether the end of a store will free blocks that only the store holds."""
        pool = self._pool()
        return any(pool.blocks[block].ref_cnt == 1 for job, _, _ in self._jobs.values() for block in job.blocks)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Returns `BlockStored` for chunks that all ranks have stored."""
        events, self._stored_events = self._stored_events, []
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
            tracked = self._requests[request.request_id] = _Tracked(request, handoff, self._clock())
        return tracked

    def _nameable(self, request: Request) -> bool:
        """Returns whether the request's chunks can be named: a prompt of embeddings has no tokens to hash."""
        if request.skip_reading_prefix_cache:
            return False
        return not self._token_mode or request.prompt_embeds is None

    def _find(self, tracked: _Tracked, lookup: LookupClient, computed: int) -> _FoundPrefix | None:
        """Returns the answer to the request's one lookup; None while an announced prefix is still awaited."""
        at_hand = computed // self._chunk * self._chunk
        known = tracked.found
        now = self._clock()
        awaited = self._awaited(tracked, now) if lookup.available else 0
        # what was at hand then may have been evicted since, and the pool was never asked for it
        if known is not None and known.start <= at_hand and (known.end >= awaited or now < tracked.next_poll):
            return known if known.end >= awaited else None
        request = tracked.request
        names = self._names(tracked, request.num_tokens // self._chunk)
        tracked.looked_up = True
        end = lookup.find(names, request.request_id, at_hand=at_hand)
        tracked.found = _FoundPrefix(at_hand, end)
        if end < awaited:
            tracked.next_poll = self._clock() + tracked.poll_s
            tracked.poll_s = min(2 * tracked.poll_s, _LONGEST_POLL_S)
            return None
        return tracked.found

    def _awaited(self, tracked: _Tracked, now: float) -> int:
        """Returns how many tokens are worth waiting for, because a prefill node is storing them."""
        announced = tracked.handoff.announced
        if announced is None or now >= tracked.arrived + self._settings.handoff_wait_s:
            return 0
        assert self._database is not None
        if announced.namespace not in ("", self._database.namespace.fingerprint()):
            self.metrics.trouble(
                "lookup",
                "other_namespace",
                detail=f"a prefill node stores in {announced.namespace}, this node reads {self._database.manifest_key}",
            )
            tracked.handoff = Handoff(tracked.handoff.announce)
            return 0
        length: int = tracked.request.num_tokens
        return min(announced.prefix_tokens, length) // self._chunk * self._chunk

    def _names(self, tracked: _Tracked, count: int) -> list[bytes]:
        """Returns the names of the request's first chunks, up to `count` of them."""
        assert self._database is not None
        names, request = tracked.names, tracked.request
        if len(names) < count:
            if self._token_mode:
                tracked.names = names = self._database.hash_tokens(list(request.all_token_ids), _isolation(request))
            else:
                new = request.block_hashes[len(names) * self._blocks_per_chunk : count * self._blocks_per_chunk]
                names += self._database.stride_hashes(new)
        return names[:count]

    def _plan_stores(self, tracked: _Tracked, computed: int) -> list[StoreOp]:
        """Returns a store of the chunks that are complete with the request's first `computed` tokens, if there are any."""
        if (
            not self._stores
            or self._database is None
            or (self._token_mode and tracked.request.prompt_embeds is not None)
        ):
            return []
        request = tracked.request
        if not self._options.store_generated:
            computed = min(computed, request.num_prompt_tokens)
        # vLLM also counts tokens that it only speculates on; the certain ones are in the request
        complete = min(computed, request.num_tokens) // self._chunk
        if complete <= tracked.planned:
            return []
        names = self._names(tracked, complete)
        first, last = tracked.planned, len(names)
        tracked.planned = last
        room = self._options.store_queue - self._chunks_under_way
        if last - first > room:
            self.metrics.trouble("store", "queue_full", last - first - room)
            last = first + room
        if last <= first:
            return []
        assert self._manager is not None
        ids = self._manager.get_block_ids(request.request_id)[0]
        blocks = list(ids[first * self._blocks_per_chunk : last * self._blocks_per_chunk])
        events = self._describe(request, first, last) if self._describe is not None else []
        job = _Job(request.request_id, first, blocks, last - first, events)
        return [self._begin(job, names)]

    def _begin(self, job: _Job, names: Sequence[bytes]) -> StoreOp:
        pool = self._pool()
        pool.touch([pool.blocks[block] for block in job.blocks])
        number = self._next_job
        self._next_job += 1
        self._chunks_under_way += job.chunks
        self._jobs[number] = (job, self._ranks, [StoreOutcome.BEFORE] * job.chunks)
        return StoreOp(number, list(names[job.first : job.first + job.chunks]), job.blocks)

    def _advance(self, number: int, ranks: int, outcomes: Sequence[StoreOutcome]) -> None:
        """Notes that some ranks are done with a job. When all are, its blocks are given back."""
        if number not in self._jobs:
            return
        job, remaining, before = self._jobs[number]
        both = [StoreOutcome.together(pair) for pair in zip(before, outcomes, strict=True)]
        if remaining > ranks:
            self._jobs[number] = (job, remaining - ranks, both)
            return
        del self._jobs[number]
        self._chunks_under_way -= job.chunks
        pool = self._pool()
        # the last first: what is freed first is evicted first, and a prefix is worth more than what follows it
        pool.free_blocks(pool.blocks[block] for block in reversed(job.blocks))
        self._stored_events += [
            event for event, outcome in zip(job.events, both, strict=False) if outcome is StoreOutcome.NEW
        ]
        tracked = self._requests.get(job.request_id)
        if tracked is not None and tracked.found is not None and StoreOutcome.NOT not in both:
            start, end = job.first * self._chunk, (job.first + job.chunks) * self._chunk
            if start <= tracked.found.end < end:
                tracked.found = _FoundPrefix(tracked.found.start, end)  # useful if the request is preempted


def _isolation(request: Request) -> tuple[ExtraKey, ...]:
    """Returns, for token mode, what a request's KV depends on besides tokens, or must be kept apart by."""
    parts: list[ExtraKey] = []
    if request.cache_salt:
        parts += ["salt", request.cache_salt]
    if request.lora_request is not None:
        parts += ["lora", request.lora_request.name]
    for feature in request.mm_features:
        parts += ["mm", feature.identifier, feature.mm_position.offset]
    return tuple(parts)
