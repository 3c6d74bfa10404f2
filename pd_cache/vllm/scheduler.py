"""The connector's part in the scheduler. It passes vLLM's hooks on to requests, stores and streams.

Everything runs on the scheduler's thread. While requests wait for loads, this thread spins through its loop,
and asks about each request hundreds of times a second. So all steps but a lookup are a few dictionary
operations, and only a request that waits for other nodes is looked up again, after a pause.

`tracked.py` decides by the state of a single request. Here is what also depends on other requests, on the
pool or on vLLM's blocks. `stores.py` has the stores, `streams.py` the prompts that are loaded while other
nodes compute them, and `own_cache.py` keeps KV of earlier weights out of vLLM's own cache.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase, Namespace
from pd_cache.handoff import Announcement, PrefillWork, write_params
from pd_cache.lookup import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import KEY, RequestReport, StoreOutcome
from pd_cache.tracing import UNTRACED, Tracing
from pd_cache.versions import WeightsVersion
from pd_cache.vllm.costs import HANDOFF_MARGIN, MARGIN, Costs, NotWorth, StepWork
from pd_cache.vllm.lora import Adapters
from pd_cache.vllm.own_cache import OutdatedRequests
from pd_cache.vllm.plan import ChunkPlan
from pd_cache.vllm.steps import LoadOp, Step, StepReport
from pd_cache.vllm.stores import Stores
from pd_cache.vllm.streams import Streams
from pd_cache.vllm.tracked import NO_SPAN, TrackedRequest, request_span

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.pd_cache")  # below vLLM's own logger, whose handlers and level it inherits

_MOST_REPORTS = 4096


class SchedulerSide:
    """The hooks of an engine. Call `bind` and `open` before the first request."""

    stores: Stores
    streams: Streams
    _outdated: OutdatedRequests
    _manager: KVCacheManager
    _lookup: LookupClient
    _database: ChunkedTokenDatabase
    _spaces: Sequence[Namespace]
    """The namespaces of all layer groups. The first group names the chunks."""
    _namespaces: tuple[str, ...]
    """The fingerprints of `_spaces`."""

    def __init__(
        self,
        plan: ChunkPlan,
        adapters: Adapters,
        metrics: CacheMetrics,
        *,
        tracing: Tracing = UNTRACED,
        version: WeightsVersion | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`version`: the version of the engine's weights, which the lookup client uses, too. The caller
        closes `adapters` and `tracing`."""
        self._plan = plan
        self._adapters = adapters
        self.metrics = metrics
        self._tracing = tracing
        self._version = version or WeightsVersion()
        self._clock = clock
        self.costs = Costs()
        self.reports = deque[tuple[str, RequestReport]](maxlen=_MOST_REPORTS)
        """The reports on the requests that ended last, with their ids. Other threads read it."""
        self._requests: dict[str, TrackedRequest] = {}
        self._next = Step()
        """The next step, as far as it is planned."""
        self._unallocated = False
        """Whether the request that vLLM asked about last has no blocks yet. If it has none at the step's end,
        vLLM ran out of blocks for it, and did not ask about the requests after it."""
        self._holding: dict[str, int] = {}
        """The requests that hold blocks for a load and have computed nothing since. For each, the blocks that
        all of its tokens need."""

    def bind(self, manager: KVCacheManager) -> None:
        """Takes the manager that knows each request's blocks."""
        self._manager = manager
        self._outdated = OutdatedRequests(self._version.state, manager)
        self.stores = Stores(self._plan, manager, self._outdated, self.metrics, self._tracing)
        self.streams = Streams(self._plan, manager, self._tracing)

    def open(self, metadata: Sequence[CacheMetadata], lookup: LookupClient) -> None:
        """Takes the lookup client, once the workers' KV tensors are known. The caller closes it. `metadata`
        has an entry for each layer group of each pipeline stage."""
        spaces = [group.namespace(self._plan.settings.node.cache) for group in metadata]
        self._database = ChunkedTokenDatabase(spaces[0])
        self._spaces = spaces
        self._namespaces = tuple(space.fingerprint() for space in spaces)
        self._lookup = lookup

    # --- a request's way ------------------------------------------------------------------------------------

    def track(self, request: Request) -> TrackedRequest:
        """Returns the state of a request, which may be new."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            lora = request.lora_request
            adapter = None if lora is None else self._adapters.of(lora.lora_name, lora.lora_path)
            tracked = TrackedRequest(
                request, adapter, self._plan, self._database, self.metrics, self._clock()
            )
            self._requests[request.request_id] = tracked
        return tracked

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Returns how many tokens beyond `computed` can be loaded, or None if vLLM has to ask again later.
        Also returns whether there is a load; it runs while other requests compute."""
        tracked = self.track(request)
        tracked.asked(computed)
        self._holding.pop(tracked.id, None)  # vLLM asks only for requests without blocks
        self._outdated.forget(tracked.id)
        weights_changed, now = self._follow(), self._clock()
        tokens: int | None = 0
        if weights_changed and computed:
            # vLLM's own cache has just been emptied. So vLLM does not notice if it found a state there that
            # is computed only in this step
            tokens = None
        elif tracked.streams:
            tokens = self._match_stream(tracked, now)
        elif tracked.handoff.announced is not None and self._waits_for_stream(tracked, now):
            tokens = None
        else:
            tracked.begin_report()
            if tracked.may_load and tracked.names.possible:
                self._look_up(tracked, now)
                tokens = self._match(tracked, now)
        self._next.expecting |= tokens is None
        self._unallocated = tokens is not None  # until `allocated`
        return tokens, bool(tokens)

    def _look_up(self, tracked: TrackedRequest, now: float) -> None:
        """Looks the prompt up once. Again only if chunks for which the request waits may be there by now."""
        waits = tracked.handoff.announced is not None and self._outdated.weights.label is not None
        if waits and self._lookup.available:
            tracked.wait_for_announced(self._labelled(), now)
        if not tracked.needs_lookup(now):
            return
        chunk, names = self._plan.chunk, tracked.names.first(tracked.most)
        at_hand = tracked.at_hand // chunk
        if tracked.span is NO_SPAN:
            asked = {"asked": len(names) * chunk, "announced": tracked.awaited * chunk}
            tracked.span = request_span(self._tracing, "pd_cache.lookup", tracked.request, **asked)
        found = self._lookup.find(names, tracked.id, chunks_at_hand=at_hand)
        tracked.looked_up(found, self.streams.came(names[:at_hand]) if waits else 0, self._clock())

    def _match(self, tracked: TrackedRequest, now: float) -> int | None:
        """Returns how many of the found tokens can be loaded; None while the request waits for announced
        chunks, or for blocks of other loads."""
        tokens = tracked.propose()
        if tokens and not tracked.decided:
            tokens = self._decide(tracked, tokens, now)
        if tracked.lacks_chunks:
            return None
        tracked.end_span()
        if not tokens or self.streams.block_loads:
            return 0
        fits = self._plan.plain or self._fits(tracked)
        return tokens if fits else tracked.wait_for_room(now)

    def _decide(self, tracked: TrackedRequest, proposed: int, now: float) -> int:
        """Returns how many of the proposed tokens to load: fewer if vLLM would compute them before their load
        ends. This is decided once for a request."""
        tracked.decided = True
        why = self._not_worth(tracked, tracked.by_tier(proposed), now)
        # a part of a window or a state is of no use
        if why is None or (why.probe and not self._plan.plain):
            return proposed
        tracked.decline(self._compared(proposed, why), self._plan.chunk if why.probe else 0)
        tokens = tracked.propose()
        self.metrics.counts.add("loads_declined_tokens", by=proposed - tokens)
        return tokens

    def _waits_for_stream(self, tracked: TrackedRequest, now: float) -> bool:
        """Returns whether the request waits for the load of a stream, which it takes over."""
        loading = self.streams.take_over(tracked)
        if not loading or tracked.declined:
            return False
        return tracked.decided or self._not_worth(tracked, (0, 0, loading), now) is None

    def _not_worth(self, tracked: TrackedRequest, tokens: Sequence[int], now: float) -> NotWorth | None:
        """Returns why these tokens, by tier, are not worth loading; None if they are."""
        margin = MARGIN if tracked.handoff.announced is None else HANDOFF_MARGIN
        return self.costs.not_worth(tokens, tracked.at_hand, self._earlier(tracked), now, margin)

    def _compared(self, tokens: int, why: NotWorth) -> str:
        chunks = tokens / self._plan.chunk
        size = sum(space.chunk_bytes * min(chunks, space.tail or math.inf) for space in self._spaces)
        return (
            f"{tokens:,} tokens would load in {why.load_s:.3g} s at {size / why.load_s / 1e6:.3g} MB/s; "
            f"computing them takes {why.compute_s:.3g} s"
        )

    def _earlier(self, tracked: TrackedRequest | None = None) -> list[tuple[int, float]]:
        """Returns the prompts that vLLM would compute before `tracked`, as for `Costs.not_worth`."""
        earlier = []
        for other in self._requests.values():
            begin = other.request.num_computed_tokens - other.request.num_in_flight_tokens
            end = other.request.num_prompt_tokens
            if other is not tracked and other.outcome.over and begin < end:
                earlier.append((end - begin, (begin + end) / 2))
        return earlier

    def _match_stream(self, tracked: TrackedRequest, now: float) -> int | None:
        """Returns how many tokens a stream can load; None while it waits for blocks. vLLM computes the
        prompt of a stream that nobody cancels."""
        if now >= tracked.arrived + self.streams.longest_s:
            return 0
        if tracked.may_load and tracked.names.possible and self._lookup.available:
            tracked.proposed = self.streams.propose(tracked)
        return tracked.proposed or None

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Plans the load for this step. vLLM has allocated blocks for `external` of the proposed tokens, and
        lets the request wait until `WorkerSide.take_ended_loads` returns it."""
        self._unallocated = False
        tracked = self.track(request)
        if external <= 0 or not tracked.proposed:
            tracked.computes()
            return
        ids, whole = blocks.get_block_ids(), external == tracked.proposed
        if tracked.streams and whole:
            self.streams.begin(tracked, ids[self._plan.layers[0].number])
            return
        self._holding[tracked.id] = tracked.needed_blocks
        parts = tracked.begin_load(external, ids, self._manager.block_pool.null_block.block_id)
        # with several groups, a window or a state, the load fails as a whole: otherwise vLLM would use
        # everything before the first failed block, with a window or a state that was never loaded
        failing = parts[0].blocks if self._plan.plain else []
        # if vLLM takes another number of tokens, we cannot know which tokens; so nothing is loaded, and vLLM
        # computes all tokens
        wanted = [part for part in parts if part.names] if whole else []
        self._next.loads.append(LoadOp(tracked.id, wanted, failing, self._outdated.weights.label))
        self.costs.load_began(tracked.id, tracked.by_tier(external), self._clock())
        tracked.end_span("given up")
        tracked.span = request_span(self._tracing, "pd_cache.load", request, asked=external)

    def begin_step(self, output: SchedulerOutput) -> Step:
        """Returns the step with the loads that `allocated` has planned."""
        self._follow()
        step, self._next = self._next, Step()
        step.label = self._outdated.weights.label
        step.nothing_to_compute = not output.total_num_scheduled_tokens
        return step

    def plan_streams(self, step: Step) -> None:
        """Adds to `step` the loads of streams."""
        now = self._clock()
        # a request that waits for blocks of streams may block the requests that would end these streams
        self.streams.give_way(now, needed=self._unallocated and step.nothing_to_compute)
        self._unallocated = False
        if self._lookup.available:
            self.streams.look_up(self._lookup, step.label, now)
        step.loads += self.streams.take_ops()
        step.expecting |= self.streams.under_way

    def plan_stores(self, step: Step, output: SchedulerOutput) -> None:
        """Adds to `step` the stores of the chunks that this step completes."""
        computed = {
            tracked: tracked.request.num_computed_tokens + scheduled
            for request_id, scheduled in output.num_scheduled_tokens.items()
            if (tracked := self._requests.get(request_id)) is not None
        }
        self.stores.note_undrafted(computed)
        for tracked, end in computed.items():
            self._holding.pop(tracked.id, None)
            if self._storable(tracked):
                step.stores += self.stores.plan(tracked, end)
        step.work = self._work(computed)
        state = output.kv_connector_block_state
        for request_id, offers in (state.boundary_state_offloads if state is not None else {}).items():
            if (tracked := self._requests.get(request_id)) is not None and self._storable(tracked):
                step.stores += self.stores.plan_states(tracked, offers)

    def take_report(self, report: StepReport) -> None:
        """Takes in a report: what the workers have done since the last one."""
        for number, (ranks, outcomes) in report.jobs.items():
            job = self.stores.advance(number, ranks, outcomes)
            if job is not None and job.chunks.group == 0:
                ended = zip(job.chunks.names, job.outcomes, strict=True)
                self._lookup.stored([name for name, outcome in ended if outcome is not StoreOutcome.NOT])
        for request_id, (ranks, loaded) in report.streams.items():
            self.streams.advance(request_id, ranks, loaded)
        if report.work is not None:
            self._count("compute", self.costs.step_ended(report.work, self._clock()))
        for request_id, (seconds, loaded) in report.loads.items():
            whole = loaded.reason == "none"
            took = seconds if whole or loaded.reason == "deadline" else None
            self._count("load", self.costs.load_ended(request_id, took, whole=whole))
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.load_ended(loaded)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forgets the request. Returns the `kv_transfer_params` of its answer: its report, and the
        announcement for a decode node; None if there is neither."""
        request_id = request.request_id
        tracked = self._requests.pop(request_id, None)
        stored = tracked is not None and self._storable(tracked)
        self._outdated.forget(request_id)
        self._holding.pop(request_id, None)
        self.streams.leave(request_id)
        self.costs.load_ended(request_id, None)
        if tracked is None:
            return None
        tracked.end_span("the request ended")
        self._lookup.end(request_id)
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        report = tracked.report(computed)
        ours = {} if report is None else self._published(tracked, report)
        if not tracked.handoff.announce:
            return {"pd_cache": ours} if ours else None
        namespace, *further = self._labelled()
        length = request.num_prompt_tokens
        params = write_params(
            Announcement(
                prefix_tokens=tracked.announceable(computed) if stored else 0,
                namespace=namespace,
                further=tuple(further),
                prefill=PrefillWork(0, length)
                if report is None
                else PrefillWork(length - report.computed, report.computed, report.reason),
            ),
            media_hashed=tracked.handoff.media_hashed,
        )
        params["pd_cache"].update(ours)
        return params

    def _published(self, tracked: TrackedRequest, report: RequestReport) -> dict[str, Any]:
        """Counts, logs and keeps a report. Returns the report for the request's answer, together with the
        prefill node's work."""
        self.metrics.request(report)
        log.info("request %s: %s", tracked.id, report.line())
        self.reports.append((tracked.id, report))
        ours: dict[str, Any] = {KEY: msgspec.to_builtins(report)}
        announced = tracked.handoff.announced
        if announced is not None and announced.prefill is not None:
            ours["prefill"] = msgspec.to_builtins(announced.prefill)
        return ours

    # --- weights --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Notes that the engine's weights have changed: the engine is out until they get a label."""
        self._version.reset()
        self._follow()

    def _follow(self) -> bool:
        """If the weights or their label have changed, drops everything that was found or computed before.
        Returns whether they have changed.

        A new label counts as a change, because some engines learn of new weights before they have them, and
        get the label afterwards.
        """
        state = self._version.state
        if state is self._outdated.weights:
            return False
        self._outdated.begin(state, self._requests.values())
        self.streams.stop()
        for tracked in self._requests.values():
            tracked.forget_pool()
        return True

    def _labelled(self) -> list[str]:
        """Returns the namespaces of all layer groups with the label of the weights, as in keys."""
        label = self._outdated.weights.label
        return [f"{space}.{label}" if label else space for space in self._namespaces]

    # --- inside ---------------------------------------------------------------------------------------------

    def _work(self, computed: Mapping[TrackedRequest, int]) -> StepWork | None:
        """Returns what a step computes; None if it computes nothing. `computed`: for each request of the
        step, its tokens after the step."""
        prompts = tokens = squares = 0
        for tracked, end in computed.items():
            begin = tracked.request.num_computed_tokens
            prompts += max(0, min(end, tracked.request.num_prompt_tokens) - begin)
            tokens += end - begin
            squares += end**2 - begin**2
        return StepWork(self._clock(), prompts, tokens, squares / 2) if computed else None

    def _fits(self, tracked: TrackedRequest) -> bool:
        """Returns whether there are enough blocks for all tokens of this request, and of all requests that
        hold blocks for a load.

        vLLM cannot preempt a request that waits after its load. So requests that leave each other no blocks
        would wait for ever. vLLM 0.32 prevents that only for full attention. For layers with a window it
        counts too few blocks: `_request_remaining_blocks` compares `max_admission_blocks_per_request` with a
        list that also has an entry for each block before the window.
        """
        others = sum(self._holding.values())
        usable = self._manager.block_pool.num_gpu_blocks - 1  # without the null block
        return not others or others + tracked.needed_blocks <= usable

    def _count(self, op: str, measured: tuple[int, float] | None) -> None:
        """Counts the tokens and seconds of a load or a step, which change the costs."""
        if measured is not None:
            self.metrics.counts.add("measured_tokens", op, by=measured[0])
            self.metrics.counts.add("measured_seconds", op, by=measured[1])
            self.costs.set_declines(self._earlier(), self._clock())

    def _storable(self, tracked: TrackedRequest) -> bool:
        """Returns whether chunks of the request are stored. They are not if this engine only loads, if its
        weights have no label or have changed since the request began, or if the chunks cannot be named."""
        known = self._outdated.weights.label is not None and tracked.id not in self._outdated
        return self._plan.stores and known and tracked.names.possible
