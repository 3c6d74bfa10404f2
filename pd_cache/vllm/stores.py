"""The scheduler's stores. Keeps the blocks that a store reads until the store ends.

The connector holds a reference to each of these blocks, as if a request used it. So the request that computed
the block may finish, or be aborted or preempted, meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import StoreOutcome
from pd_cache.tracing import TraceSpan, Tracing
from pd_cache.vllm.own_cache import OutdatedRequests
from pd_cache.vllm.plan import ChunkPlan
from pd_cache.vllm.steps import GroupChunks, StoreOp
from pd_cache.vllm.tracked import TrackedRequest, request_span

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@dataclass
class StoreJob:
    """A store under way."""

    chunks: GroupChunks
    outcomes: list[StoreOutcome]
    """For each chunk, the joint outcome of the ranks that are done."""
    remaining: int
    """How many ranks are not done."""
    span: TraceSpan


class Stores:
    """The stores of an engine. Runs on the scheduler's thread."""

    def __init__(
        self,
        plan: ChunkPlan,
        manager: KVCacheManager,
        outdated: OutdatedRequests,
        metrics: CacheMetrics,
        tracing: Tracing,
    ) -> None:
        self._plan = plan
        self._manager = manager
        self._outdated = outdated
        self._metrics = metrics
        self._tracing = tracing
        self._undrafted = False
        """Whether vLLM has skipped the draft model in a step, so that blocks of vLLM's own cache may lack the
        draft model's KV."""
        self._jobs: dict[int, StoreJob] = {}
        self._next_job = 0
        self._chunks_under_way = 0

    def note_undrafted(self, computed: Mapping[TrackedRequest, int]) -> None:
        """Notes whether vLLM skips the draft model in a step because a request has too many tokens for it.
        `computed`: for each request of the step, its tokens after the step."""
        most = self._plan.drafted_up_to
        if most is not None and max(computed.values(), default=0) > most:
            self._undrafted = True
            for tracked in computed:
                tracked.drafted = False

    def plan(self, tracked: TrackedRequest, computed: int) -> list[StoreOp]:
        """Returns the stores of the chunks that are complete with the request's first `computed` tokens and
        not planned yet."""
        return [
            self._begin(chunks, tracked.request)
            for place, run in tracked.to_store(computed, self._undrafted)
            if (chunks := self._chunks_of(tracked, place, run)) is not None
        ]

    def plan_states(self, tracked: TrackedRequest, offers: Iterable[tuple[int, int, int]]) -> list[StoreOp]:
        """Returns the stores of the states that vLLM hands over. An offer is the index of vLLM's group, a
        block, and the number of tokens that the state covers."""
        request, chunk_size = tracked.request, self._plan.chunk
        most = tracked.storable(request.num_tokens)
        places = {
            group.number: place for place, group in enumerate(self._plan.layers) if group.kind == "state"
        }
        ops: list[StoreOp] = []
        for number, block, tokens in offers:
            place = places.get(number)
            if place is None or tokens % chunk_size or not 0 < tokens <= most or not self._room(1):
                continue
            chunk = tokens // chunk_size - 1
            before = [-1] * (chunk_size // self._plan.layers[place].block_size - 1)
            names = tracked.names.first(chunk + 1)[chunk:]
            ops.append(self._begin(GroupChunks(place, names, [*before, block]), request))
        return ops

    def advance(self, number: int, ranks: int, outcomes: Sequence[StoreOutcome]) -> StoreJob | None:
        """Notes that `ranks` more ranks are done with a job. When all are done, gives the job's blocks back,
        and returns the job."""
        if (job := self._jobs.get(number)) is None:
            return None
        job.outcomes = [StoreOutcome.together(pair) for pair in zip(job.outcomes, outcomes, strict=True)]
        job.remaining -= ranks
        if job.remaining > 0:
            return None
        del self._jobs[number]
        self._chunks_under_way -= len(job.outcomes)
        count = job.outcomes.count
        job.span.note(stored=count(StoreOutcome.NEW), missing=count(StoreOutcome.NOT))
        job.span.end()
        pool = self._manager.block_pool
        # the last block first: vLLM evicts in the order of freeing, and later requests need a prompt's
        # beginning more than its end
        pool.free_blocks(pool.blocks[block] for block in reversed(job.chunks.blocks) if block >= 0)
        return job

    @property
    def under_way(self) -> bool:
        """Whether stores are under way. The engine has to keep stepping until they have ended."""
        return bool(self._jobs)

    @property
    def frees_blocks(self) -> bool:
        """Whether the end of a store will free blocks to which only the store has a reference."""
        pool = self._manager.block_pool
        held = (block for job in self._jobs.values() for block in job.chunks.blocks if block >= 0)
        return any(pool.blocks[block].ref_cnt == 1 for block in held)

    def _chunks_of(self, tracked: TrackedRequest, place: int, run: range) -> GroupChunks | None:
        """Returns the chunks of a run that can be stored, because vLLM still has their blocks and the queue
        has room. None if there are none."""
        group = self._plan.layers[place]
        per_chunk = self._plan.chunk // group.block_size
        ids = self._manager.get_block_ids(tracked.id)[group.number]
        first, blocks = run.start, list(ids[run.start * per_chunk : run.stop * per_chunk])
        if group.kind == "window":
            null = self._manager.block_pool.null_block.block_id  # stands for each block that vLLM has freed
            gone = max((at + 1 for at, block in enumerate(blocks) if block == null), default=0)
            # a load does not need those blocks of a chunk that lie before the window at the chunk's end
            needed = -(-max(0, group.window - 1) // group.block_size)
            skipped = max(0, -(-(gone - max(0, per_chunk - needed)) // per_chunk))
            first += skipped
            blocks = blocks[skipped * per_chunk :]
            gone = max(0, gone - skipped * per_chunk)
            blocks = [-1] * gone + blocks[gone:]
        count = self._room(run.stop - first)
        if count <= 0:
            return None
        names = tracked.names.of(group, first, first + count)
        return GroupChunks(place, names, blocks[: count * per_chunk])

    def _room(self, chunks: int) -> int:
        """Returns for how many of `chunks` chunks the queue has room, and counts the others as dropped."""
        room = min(chunks, self._plan.settings.connector.store_queue - self._chunks_under_way)
        if room < chunks:
            self._metrics.trouble("store", "queue_full", chunks - room)
        return room

    def _begin(self, chunks: GroupChunks, request: Request) -> StoreOp:
        """Begins a store. Until `advance`, its references keep vLLM from giving the blocks to others."""
        pool, count = self._manager.block_pool, len(chunks.names)
        pool.touch([pool.blocks[block] for block in chunks.blocks if block >= 0])
        number = self._next_job
        self._next_job += 1
        self._chunks_under_way += count
        span = request_span(self._tracing, "pd_cache.store", request, asked=count)
        self._jobs[number] = StoreJob(chunks, [StoreOutcome.BEFORE] * count, self._plan.ranks, span)
        label = self._outdated.weights.label
        assert label is not None, "nothing is stored while the engine is out"
        return StoreOp(number, chunks, label)
