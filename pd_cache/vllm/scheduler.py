"""The connector's part in the scheduler: what to look up, what to load, what to store, and when blocks are given back.

Everything runs on the scheduler's thread. While requests wait for loads, that thread spins through its loop, and asks about each request
hundreds of times a second. So a request is looked up once, and everything else here is a few dictionary operations.

`SchedulerSide` ties together parts with one subject each: requests (`tracked.py`), stores (`stores.py`), prompts that are loaded while they are
computed elsewhere (`streams.py`), and what vLLM's own prefix cache may hold (`own_cache.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase
from pd_cache.handoff import Announcement, BadParams, Handoff, PrefillWork, next_pause, read_params, write_params
from pd_cache.lookup import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import KEY, MissReason, RequestReport, StoreOutcome
from pd_cache.tracing import UNTRACED, Tracing
from pd_cache.versions import WeightsVersion
from pd_cache.vllm.lora import Adapters
from pd_cache.vllm.own_cache import OutdatedRequests
from pd_cache.vllm.steps import GroupChunks, LoadOp, Step, StepReport
from pd_cache.vllm.stores import Stores
from pd_cache.vllm.streams import Streams
from pd_cache.vllm.tracked import (
    NO_SPAN,
    ChunkPlan,
    FoundPrefix,
    PromptChunks,
    ProposedLoad,
    TrackedRequest,
    request_span,
)

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.pd_cache")  # below vLLM's own logger, whose handlers and level it inherits


class SchedulerSide:
    """One per engine, on the scheduler's thread."""

    def __init__(
        self,
        plan: ChunkPlan,
        adapters: Adapters,
        metrics: CacheMetrics,
        *,
        on_report: Callable[[str, RequestReport], None] | None = None,
        tracing: Tracing = UNTRACED,
        version: WeightsVersion | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_report` is called with the id of each request that ends, and with its report. `version`: that of the engine's weights, in
        which lookups look, too. `close` closes `adapters` and `tracing`."""
        self._plan = plan
        self._chunk = plan.chunk
        self._config = plan.settings.connector
        self._adapters = adapters
        self._on_report = on_report
        self._tracing = tracing
        self._clock = clock
        self.metrics = metrics
        self._chunks = PromptChunks(plan, metrics)
        self._version = version or WeightsVersion()
        self._outdated = OutdatedRequests(self._version.state)
        self.stores = Stores(plan, self._chunks, self._outdated, metrics, tracing)
        self.streams = Streams(plan, self._chunks, tracing)
        self._namespaces: tuple[str, ...] = ()
        """Fingerprints of the namespaces of all layer groups. The first group names the chunks."""
        self._lookup: LookupClient | None = None
        self._manager: KVCacheManager
        self._requests: dict[str, TrackedRequest] = {}
        self._loads: list[LoadOp] = []
        self._expecting = False
        self._refused = False
        """True if vLLM ran out of blocks for a request in this step. It then asks about no request behind it."""
        self._loads_nothing = False
        """Whether nothing is loaded in the next step, because vLLM refuses blocks to each load and nothing else goes on."""
        self._holding: dict[str, int] = {}
        """Requests that hold blocks for a load and have computed nothing since, and the number of blocks that all tokens of each need."""

    # --- before the first request --------------------------------------------------------------------------------

    def open(self, metadata: Sequence[CacheMetadata], lookup: LookupClient) -> None:
        """Takes the lookup client, once the workers' KV tensors are known. From now on, chunks can be named and looked up. `metadata` has
        an entry for each layer group, of each pipeline stage."""
        spaces = [one.namespace(self._plan.settings.node.cache) for one in metadata]
        self._chunks.database = ChunkedTokenDatabase(spaces[0])
        self._namespaces = tuple(space.fingerprint() for space in spaces)
        self._lookup = lookup

    def bind(self, manager: KVCacheManager) -> None:
        """Takes the manager that knows each request's blocks."""
        self._manager = manager
        self.stores.bind(manager)
        self.streams.bind(manager)
        self._outdated.bind(manager)

    def close(self) -> None:
        """Closes the lookup client and the adapters. Idempotent."""
        self._adapters.close()
        self._tracing.close()
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            lookup.close()

    # --- a request's way -----------------------------------------------------------------------------------------

    def track(self, request: Request) -> TrackedRequest:
        """Returns what is known of a request, which may have arrived just now."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            try:
                handoff = read_params(request.kv_transfer_params)
            except BadParams as error:
                self.metrics.trouble("lookup", "bad_handoff", detail=str(error))
                handoff = Handoff()
            lora = request.lora_request
            adapter = None if lora is None else self._adapters.of(lora.lora_name, lora.lora_path)
            tracked = TrackedRequest(request, handoff, self._clock(), adapter)
            self._requests[request.request_id] = tracked
        return tracked

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Returns how many tokens beyond `computed` can be loaded, or None if vLLM has to ask again later; and whether any are loaded, which is
        done while other requests compute."""
        tracked, lookup = self.track(request), self._lookup
        tracked.load = None
        self._refused = True  # unless vLLM has to ask again, or finds blocks
        self._holding.pop(request.request_id, None)  # vLLM asks only for requests without blocks
        tracked.at_hand = computed
        self._outdated.forget(request.request_id)
        self._follow()
        if tracked.streams:
            return self._matched_stream(tracked, computed)
        takes_over = self.streams.under_way and tracked.handoff.announced is not None and self._chunks.nameable(tracked)
        if takes_over and self.streams.take_over(self._chunks.names(tracked, self._plan.most(request))):
            return self._ask_again()
        tracked.outcome.asked(computed)
        may_load = tracked.may_load and not request.skip_reading_prefix_cache
        if lookup is None or not may_load or not self._chunks.nameable(tracked):
            if not self._chunks.identified(tracked):
                tracked.outcome.looked_up(0, "media_unidentified")
            return 0, False
        now, at_hand, found = self._clock(), computed // self._chunk * self._chunk, tracked.found
        awaited = self._awaited(tracked, now) if lookup.available and self._version.label is not None else 0
        # the engine may have evicted since what it had at hand then, and the pool was never asked for that
        if found is None or found.start > at_hand or (found.end < awaited and now >= tracked.next_poll):
            names = self._chunks.names(tracked, self._most(tracked))
            tracked.looked_up = True
            if tracked.looking is NO_SPAN:
                asked = len(names) * self._chunk
                tracked.looking = request_span(
                    self._tracing, "pd_cache.lookup", request, asked=asked, announced=awaited
                )
            reach = lookup.find(names, request.request_id, at_hand=at_hand // self._chunk)
            if tracked.handoff.announced is not None:
                tracked.outcome.streamed += self._chunk * self.streams.came(names[: at_hand // self._chunk])
            parting = reach.leading * self._chunk if reach.leading > reach.chunks else 0
            near = (reach.near.memory * self._chunk, reach.near.disk * self._chunk)
            found = tracked.found = FoundPrefix(at_hand, reach.chunks * self._chunk, parting, *near)
            tracked.outcome.looked_up(found.end, self._reason(tracked, found.end, reach.reason))
            if found.end >= awaited:
                tracked.looking.note(found=found.end, reason=reach.reason)
                tracked.looking.end()
                tracked.looking = NO_SPAN
            else:
                tracked.poll_s = next_pause(tracked.poll_s)
                tracked.next_poll = self._clock() + tracked.poll_s
        if found.end < awaited:
            return self._ask_again()
        # vLLM ends a step at this place, so that states can be stored there and kept in vLLM's own cache. It sets the field anew each time
        # it asks
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, found.parting)
        loadable = self._plan.loadable(request)
        external = min(found.end, loadable) - computed
        if external <= 0 or self._loads_nothing:
            return 0, False
        end = min(found.end, -(-loadable // self._chunk) * self._chunk)
        if not self._fits(request, end):
            return self._wait_for_room(tracked, now), False
        tracked.no_room_since = None
        tracked.load = ProposedLoad(computed, end, external)
        return external, True

    def _matched_stream(self, tracked: TrackedRequest, computed: int) -> tuple[int | None, bool]:
        """Returns what `matched_tokens` does, for a request that only has its prompt's chunks loaded as they appear. If nobody cancels it, vLLM
        computes it in the end."""
        if self._clock() >= tracked.arrived + self.streams.longest_s:
            return 0, False
        waits = self._lookup is not None and self._lookup.available and not tracked.has_streamed
        if waits and not self._loads_nothing and self.streams.possible and self._chunks.nameable(tracked):
            tracked.load = self.streams.propose(tracked, computed)
        return self._ask_again() if tracked.load is None else (tracked.load.tokens, True)

    def _ask_again(self) -> tuple[None, bool]:
        """Has vLLM ask about a request again, because another node is storing what it waits for."""
        self._expecting, self._refused = True, False
        return None, False

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Plans the load for this step. vLLM has allocated blocks for the part of our proposal that it accepts."""
        self._refused = False
        tracked = self.track(request)
        proposed, tracked.load = tracked.load, None
        if external <= 0 or proposed is None:
            return
        ids = blocks.get_block_ids()
        if tracked.streams and external == proposed.tokens:
            self.streams.begin(tracked, proposed, ids[self._plan.layers[0].number])
            return
        first, last = proposed.start // self._chunk, proposed.end // self._chunk
        parts = [self._load_part(tracked, place, ids, proposed) for place in range(len(self._plan.layers))]
        # with several groups, a window or a state, no blocks are reported: vLLM would go on at the first of them, with a window or a state
        # that was never loaded
        failing = parts[0].blocks if self._plan.plain else []
        # if vLLM takes another number of tokens than was proposed, we cannot know which ones. Then none are loaded, and vLLM computes all
        # of them
        wanted = [part for part in parts if part.names] if external == proposed.tokens else []
        self._loads.append(LoadOp(request.request_id, wanted, failing, self._outdated.weights.label))
        tracked.loaded = external
        tracked.outcome.began_load(external, keeps_part=bool(failing))
        tracked.loading.end("given up")
        tracked.loading = request_span(self._tracing, "pd_cache.load", request, asked=external)
        self._holding[request.request_id] = self._plan.needed_blocks(request, proposed.end)
        for place in range(len(self._plan.layers)):
            if first <= tracked.planned.get(place, 0):
                tracked.planned[place] = max(tracked.planned.get(place, 0), last)

    def near(self, request: Request, external: int) -> tuple[int, int]:
        """Returns how many of the tokens that are to be loaded lay in this host's memory when they were looked up, and how many on its disk."""
        found = self.track(request).found
        memory = 0 if found is None else min(found.memory, external)
        return memory, 0 if found is None else min(found.disk, external - memory)

    def begin_step(self, output: SchedulerOutput) -> Step:
        """Returns what has to be done with this step, whatever else is planned."""
        self._follow()
        now, label = self._clock(), self._outdated.weights.label
        # a request that waits for the blocks of streams may hold up the requests that would end these streams
        stuck = self._refused and not output.total_num_scheduled_tokens
        ended = self.streams.give_way(now, needed=stuck)
        self._loads += ended
        self._loads_nothing, self._refused = stuck and not ended and self.streams.reserving, False
        if self._lookup is not None and self._lookup.available and (stream := self.streams.due(now)) is not None:
            stream.tracked.looked_up = True
            found = self._lookup.find(stream.names, stream.tracked.id, at_hand=stream.done)
            self._loads += self.streams.load(stream, found, label, now)
        step = Step(
            loads=self._loads,
            label=label,
            nothing_to_compute=output.total_num_scheduled_tokens == 0,
            expecting=self._expecting or self.streams.under_way,
        )
        self._loads = []
        self._expecting = False
        return step

    def plan_stores(self, step: Step, output: SchedulerOutput) -> None:
        """Adds to `step` the stores of the chunks that this step completes."""
        self.stores.note_undrafted(output, self._requests)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            self._holding.pop(request_id, None)
            tracked = self._requests.get(request_id)
            if tracked is not None:
                request = tracked.request
                tracked.found = None  # after a preemption it is looked up again, with what it has stored until then
                tracked.outcome.over = True
                if self._storable(tracked):
                    step.stores += self.stores.plan(tracked, request.num_computed_tokens + scheduled)
        state = output.kv_connector_block_state
        for request_id, offers in (state.boundary_state_offloads if state is not None else {}).items():
            if (tracked := self._requests.get(request_id)) is not None and self._storable(tracked):
                step.stores += self.stores.plan_states(tracked, offers)

    def take_report(self, report: StepReport) -> None:
        """Takes in what the workers have done since the last report."""
        for number, (ranks, outcomes) in report.jobs.items():
            job = self.stores.advance(number, ranks, outcomes)
            if job is not None and job.chunks.group == 0 and self._lookup is not None:
                ended = zip(job.chunks.names, job.outcomes, strict=True)
                self._lookup.stored([name for name, outcome in ended if outcome is not StoreOutcome.NOT])
        for request_id, (ranks, loaded) in report.streams.items():
            self._loads += self.streams.advance(request_id, ranks, loaded, self._clock())
        for request_id, loaded in report.loads.items():
            if (tracked := self._requests.get(request_id)) is None:
                continue
            failed = loaded.reason != "none"
            tracked.outcome.loaded(loaded)
            tracked.loading.note(loaded=loaded.chunks * self._chunk, reason=loaded.reason)
            tracked.loading.end("failed" if failed else "")
            tracked.loading = NO_SPAN
            if failed:  # what the pool had is gone: vLLM computes it, and it is stored again
                tracked.may_load = False
                tracked.found = None
                tracked.planned.clear()
                tracked.loaded = 0

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forgets the request. Returns the `kv_transfer_params` for the node that decodes it; None if no node asked for them."""
        try:
            return self._finished(request)
        finally:  # not before: until then, it must be known that nothing of an outdated request is stored
            self._outdated.forget(request.request_id)

    def _finished(self, request: Request) -> dict[str, Any] | None:
        tracked = self._requests.pop(request.request_id, None)
        self._holding.pop(request.request_id, None)
        self._loads += self.streams.leave(request.request_id)
        if tracked is not None:
            tracked.looking.end("the request ended")
            tracked.loading.end("the request ended")
        if tracked is None or self._chunks.database is None:
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if self._lookup is not None and tracked.looked_up:
            self._lookup.end(request.request_id)
        ours = self._report(tracked, request, computed)
        if not tracked.handoff.announce:
            return {"pd_cache": ours} if ours else None
        chunks = max(0, tracked.stored_of(min(computed, request.num_prompt_tokens)) // self._chunk - self._plan.ahead)
        if not self._storable(tracked):
            chunks = 0
        if tracked.adapter is not None:  # nothing was stored before its digest was known
            chunks = min(chunks, tracked.planned.get(0, 0))
        cached = request.prefill_stats.num_cached_tokens if request.prefill_stats is not None else tracked.loaded
        namespace, *further = self._labelled()
        announcement = write_params(
            Announcement(
                prefix_tokens=chunks * self._chunk,
                namespace=namespace,
                further=tuple(further),
                prefill=PrefillWork(
                    cached, max(0, request.num_prompt_tokens - cached), ours.get(KEY, {}).get("reason", "")
                ),
            ),
            media_hashed=tracked.handoff.media_hashed,
        )
        announcement["pd_cache"].update(ours)
        return announcement

    def _report(self, tracked: TrackedRequest, request: Request, computed: int) -> dict[str, Any]:
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
        announced = tracked.handoff.announced
        if announced is not None and announced.prefill is not None:
            told["prefill"] = msgspec.to_builtins(announced.prefill)
        return told

    # --- weights -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Notes that the engine has other weights: it is out until they get a label."""
        self._version.reset()
        self._follow()

    def _follow(self) -> None:
        """Takes notice of other weights, or of a label of theirs that another thread has taken: what was found or computed before is outdated.

        A label comes when the weights have changed, and some engines hear of the change before it is made.
        """
        if self._version.state is self._outdated.weights:
            return
        self.streams.stop()
        for tracked in self._requests.values():
            tracked.found = None
            tracked.planned.clear()
        self._outdated.begin(self._version.state, self._requests.values())

    def _labelled(self) -> list[str]:
        """Returns the namespaces of all layer groups as keys have them, with the label of the weights."""
        label = self._outdated.weights.label
        return [f"{one}.{label}" if label else one for one in self._namespaces]

    # --- inside --------------------------------------------------------------------------------------------------

    def _most(self, tracked: TrackedRequest) -> int:
        """Returns how many chunks are looked up: no more than the request allows to load."""
        most, limit = self._plan.most(tracked.request), tracked.handoff.max_load_tokens
        return most if limit is None else min(most, (tracked.at_hand + limit) // self._chunk + self._plan.ahead)

    def _reason(self, tracked: TrackedRequest, end: int, reason: MissReason) -> MissReason:
        """Returns why a lookup found no more than `end` tokens, if `reason` is what the lookup says."""
        most = self._most(tracked)
        if most < self._plan.most(tracked.request) and end >= (most - self._plan.ahead) * self._chunk:
            return "limited"
        announced = 0 if tracked.handoff.announced is None else tracked.handoff.announced.prefix_tokens
        if reason not in ("missing", "never_stored") or end >= min(
            announced // self._chunk * self._chunk, most * self._chunk
        ):
            return reason
        return "other_namespace" if tracked.foreign else "deadline"

    def _fits(self, request: Request, end: int) -> bool:
        """Returns whether this request and all that hold blocks for a load could compute the rest of their tokens at the same time.

        vLLM cannot preempt a request that waits after its load. So requests that leave each other no blocks would wait for ever. vLLM 0.32
        prevents that only for full attention. For layers with a window it counts too few blocks: `_request_remaining_blocks` compares
        `max_admission_blocks_per_request` with a list that also has an entry for each block before the window.
        """
        if self._plan.plain:
            return True
        others = sum(self._holding.values())
        usable = self._manager.block_pool.num_gpu_blocks - 1  # one is the null block
        return not others or others + self._plan.needed_blocks(request, end) <= usable

    def _wait_for_room(self, tracked: TrackedRequest, now: float) -> int | None:
        """Returns None while the request waits for blocks; 0 if it has waited for as long as a load may take, so that vLLM computes it.

        Meanwhile vLLM asks for the requests behind it. If some of their loads always fit, the load of a long prompt never does.
        """
        if tracked.no_room_since is None:
            tracked.no_room_since = now
        if now - tracked.no_room_since < self._config.load_timeout_ms / 1000:
            self._refused = False
            return None
        self.metrics.trouble("retrieve", "no_blocks")
        tracked.outcome.looked_up(0 if tracked.found is None else tracked.found.end, "no_blocks")
        tracked.may_load = False
        return 0

    def _awaited(self, tracked: TrackedRequest, now: float) -> int:
        """Returns how long a prefix, in tokens, the request waits for because a prefill node is storing it."""
        announced = tracked.handoff.announced
        if announced is None or tracked.foreign or now >= tracked.arrived + self._plan.settings.handoff_wait_s:
            return 0
        if not announced.serves(own := self._labelled()):
            tracked.foreign = True
            theirs = ", ".join((announced.namespace, *announced.further))
            detail = f"a prefill node stores in {theirs}, this node reads {', '.join(own)}"
            self.metrics.trouble("lookup", "other_namespace", detail=detail)
            return 0
        most = self._most(tracked) - self._plan.ahead
        return max(0, min(announced.prefix_tokens // self._chunk, most)) * self._chunk

    def _load_part(
        self, tracked: TrackedRequest, place: int, ids: Sequence[Sequence[int]], proposed: ProposedLoad
    ) -> GroupChunks:
        """Returns what a layer group has to load. Left out are tokens that the engine has at hand, and those for which vLLM allocated no
        block."""
        group, tail = self._plan.layers[place], self._plan.tails[place]
        per_chunk = self._chunk // group.block_size
        last = proposed.end // self._chunk
        first = max(proposed.start // self._chunk, last - tail) if tail else proposed.start // self._chunk
        needed = -(-(proposed.start + proposed.tokens) // group.block_size)
        blocks = list(ids[group.number][first * per_chunk : min(last * per_chunk, needed)])
        at_hand = min(len(blocks), max(0, proposed.start // group.block_size - first * per_chunk))
        null = self._manager.block_pool.null_block.block_id  # vLLM puts it in place of each block that it has freed
        while at_hand < len(blocks) and tail and blocks[at_hand] == null:
            at_hand += 1
        skipped = at_hand // per_chunk
        blocks = [-1] * (at_hand - skipped * per_chunk) + blocks[at_hand:]
        blocks += [-1] * (last * per_chunk - needed)
        return GroupChunks(place, self._chunks.names_of(tracked, group, first + skipped, last), blocks)

    def _storable(self, tracked: TrackedRequest) -> bool:
        known = self._plan.stores and self._chunks.database is not None
        return (
            known
            and self._outdated.weights.label is not None
            and tracked.id not in self._outdated
            and self._chunks.nameable(tracked)
        )
