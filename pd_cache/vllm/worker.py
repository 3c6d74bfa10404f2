"""The connector's part in a worker: moves KV between vLLM's blocks and the pool, off the model's thread.

Each load and store waits for the pool only until its deadline. On a GPU, its thread has a CUDA stream of its
own. Copies and steps follow this order:

1. A store reads blocks after the step that computes them: the store's thread waits for the mark that `save`
   made at the end of that step. It waits for no later step.
2. A load waits for no step, and no step waits for a load. vLLM gives a load only blocks that no step under
   way reads or writes (`defer_block_free`), and schedules the request's first step after
   `take_ended_loads` has reported the load.
3. No load or store touches a block after its end was reported. Before the report, the reporting thread waits
   on the host for its own copies and for those of the other layer groups. So vLLM may then give the blocks of
   a store to another request, and read the blocks of a load.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from pd_cache.cache import BlockCache
from pd_cache.paged import own_stream
from pd_cache.reasons import Loaded, StoreOutcome
from pd_cache.versions import WeightsVersion
from pd_cache.vllm.costs import LinkTime
from pd_cache.vllm.steps import GroupChunks, LoadOp, Step, StepReport, StoreOp

_LOADERS = 2
_IDLE_WAIT_S = 0.002
"""How long a step without computation waits for a transfer to end. vLLM spins through such steps, and a
spinning thread slows the copying threads down. A request that arrives meanwhile is scheduled up to this much
later."""


class EndedLoads(NamedTuple):
    """Loads that ended since the last step."""

    finished: set[str]
    failed: set[str]
    """The requests of `finished` whose loads failed as a whole; see `LoadOp.blocks`."""
    bad_blocks: set[int]
    """The blocks that were not loaded, for the other failed loads."""


class WorkerSide:
    """One per worker. `start`, `save` and `take_*` are called on the model's thread, once a step."""

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[BlockCache, bool]]],
        *,
        load_timeout_s: float,
        device: torch.device,
        version: WeightsVersion,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`groups`: for each layer group, the caches of its parts on this rank, and for each part whether
        this rank stores its chunks; another rank may store the same KV. The caller closes the caches.
        `device` is the device of the blocks. `version`, which the caches share, follows the labels of the
        steps."""
        self._caches = [[cache for cache, _ in parts] for parts in groups]
        self._storing = [[cache for cache, stores in parts if stores] for parts in groups]
        self._first = next(cache for parts in self._caches for cache in parts)
        self._load_timeout_s = load_timeout_s
        self._device = device
        self._version = version
        self._clock = clock
        self._load_queue: queue.SimpleQueue[tuple[LoadOp, float] | None] = queue.SimpleQueue()
        """The queued loads, and when each has to end."""
        self._store_queue: queue.SimpleQueue[tuple[StoreOp, Any] | None] = queue.SimpleQueue()
        """Stores, and the mark at the end of the step that computes the chunks. The scheduler bounds their
        number."""
        self._changed = threading.Condition()
        self._under_way = 0
        self._wanted: set[str] = set()
        """Requests whose load is queued or running."""
        self._link_time = LinkTime()
        self._ended = EndedLoads(set(), set(), set())
        self._report = StepReport()
        self._closing = False
        self._loaders = ThreadPoolExecutor(
            _LOADERS * sum(map(len, groups)), "pd-cache-load", own_stream, (device,)
        )
        """Threads that load the second and further parts of a load. There are enough for `_LOADERS` loads at
        the same time, so no part waits for another."""
        targets = {f"load-{number}": self._run_loads for number in range(_LOADERS)} | {
            "store": self._run_stores
        }
        self._threads = [
            threading.Thread(target=target, name=f"pd-cache-{name}", daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def start(self, step: Step) -> None:
        """Begins this step's loads. From now on, loads and queued stores count only if they have the label of
        this step's weights."""
        if step.label != self._version.label:
            self._version.reset(step.label)
        deadline = self._clock() + self._load_timeout_s
        for op in step.loads:
            with self._changed:
                self._under_way += 1
                if not op.streams:
                    self._wanted.add(op.request_id)
            self._load_queue.put((op, deadline))

    def save(self, step: Step) -> None:
        """Queues this step's stores. They run after the forward pass, which has already been launched."""
        after = self._first.mark() if step.stores else None
        with self._changed:
            self._under_way += len(step.stores)
        for op in step.stores:
            self._store_queue.put((op, after))

    def take_ended_loads(self, step: Step, finished: set[str]) -> EndedLoads:
        """Returns the loads that have ended; vLLM then schedules their requests. Gives up loads of `finished`
        requests that have not begun."""
        with self._changed:
            self._wanted -= finished
            something_ended = self._ended.finished or self._report.jobs or self._report.streams
            if step.nothing_to_compute and (self._under_way or step.expecting) and not something_ended:
                self._changed.wait(_IDLE_WAIT_S)
            ended, self._ended = self._ended, EndedLoads(set(), set(), set())
        return ended

    def take_report(self, step: Step) -> StepReport | None:
        """Returns the report for the scheduler; None if nothing ended, and the step computes nothing."""
        with self._changed:
            self._report.work = step.work
            if self._report == StepReport():
                return None
            report, self._report = self._report, StepReport()
            return report

    def close(self, timeout: float) -> bool:
        """Gives up queued loads and stores, and waits at most `timeout` seconds for running ones. Returns
        False if any still run."""
        self._closing = True
        for _ in range(_LOADERS):
            self._load_queue.put(None)
        self._store_queue.put(None)
        deadline = self._clock() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        self._loaders.shutdown(wait=False)
        return not any(thread.is_alive() for thread in self._threads)

    # --- inside ---------------------------------------------------------------------------------------------

    def _run_loads(self) -> None:
        """Runs on two threads: one load after another, all its groups at the same time, until its deadline.
        Notes their ends for `take_*`."""
        own_stream(self._device)
        while (item := self._load_queue.get()) is not None:
            op, deadline = item
            wanted, end = op.streams or op.request_id in self._wanted, Loaded(0, "error")
            with self._changed:
                began = self._link_time.passed(self._clock(), 1)
            if wanted and not self._closing:
                end = self._load(op, deadline)
            with self._changed:
                took = self._link_time.passed(self._clock(), -1) - began
                self._under_way -= 1
                if op.streams:
                    self._report.streams[op.request_id] = (1, end)
                else:
                    self._wanted.discard(op.request_id)
                    self._ended.finished.add(op.request_id)
                    if wanted:
                        self._report.loads[op.request_id] = (took, end)
                        self._note_failure(op, end)
                self._changed.notify_all()

    def _note_failure(self, op: LoadOp, end: Loaded) -> None:
        """Notes what vLLM has to compute if a load failed: the blocks from the first that was not loaded, or
        all tokens of the load. Call with the lock held."""
        if end.reason == "none":
            return
        if op.blocks:
            good = end.chunks * len(op.blocks) // len(op.parts[0].names) if op.parts else 0
            self._ended.bad_blocks.update(block for block in op.blocks[good:] if block >= 0)
        else:
            self._ended.failed.add(op.request_id)

    def _load(self, op: LoadOp, deadline: float) -> Loaded:
        """Loads the chunks of all groups at the same time, and waits for all groups. Returns the worst result
        of the groups that failed or, if none failed, the result of the first group."""
        parts = [(part, cache) for part in op.parts for cache in self._caches[part.group]]
        others = [self._loaders.submit(self._load_part, op, deadline, *part) for part in parts[1:]]
        ends = [self._load_part(op, deadline, *part) for part in parts[:1]]
        ends += [other.result() for other in others]
        failed = [
            end if end.reason != "none" else Loaded(end.chunks, "error")
            for (part, _), end in zip(parts, ends, strict=True)
            if end.chunks < len(part.names)
        ]
        if failed:
            return min(failed, key=attrgetter("chunks"))
        return ends[0] if ends else Loaded(0, "none" if op.parts else "error")

    def _load_part(self, op: LoadOp, deadline: float, part: GroupChunks, cache: BlockCache) -> Loaded:
        """Loads the chunks of one group. Raises nothing: vLLM computes blocks that were not loaded."""
        if (timeout := deadline - self._clock()) <= 0:
            cache.metrics.trouble("retrieve", "deadline", len(part.names))
            return Loaded(0, "deadline")
        try:
            blocks = _kept_blocks(part, cache)
            return cache.load(part.names, blocks, session=op.request_id, label=op.label, timeout=timeout)
        except Exception as error:  # noqa: BLE001 - see above
            reason = f"error_{type(error).__name__}"
            cache.metrics.trouble("retrieve", reason, len(part.names), detail=str(error))
            return Loaded(0, "error")

    def _run_stores(self) -> None:
        own_stream(self._device)
        while (item := self._store_queue.get()) is not None:
            op, after = item
            parts = [self._store_part(op, after, cache) for cache in self._storing[op.chunks.group]]
            # without parts, another rank has the same KV, and stores it
            parts = parts or [[StoreOutcome.BEFORE] * len(op.chunks.names)]
            outcomes = [StoreOutcome.together(of_chunk) for of_chunk in zip(*parts, strict=True)]
            with self._changed:
                self._under_way -= 1
                self._report.jobs[op.job] = (1, outcomes)
                self._changed.notify_all()

    def _store_part(self, op: StoreOp, after: Any, cache: BlockCache) -> list[StoreOutcome]:
        """Stores the chunks of one part of the layers. Raises nothing: a chunk that was not stored is
        computed again."""
        names = op.chunks.names
        try:
            if not self._closing:
                return cache.store(names, _kept_blocks(op.chunks, cache), after=after, label=op.label)
        except Exception as error:  # noqa: BLE001 - see above
            cache.metrics.trouble("store", f"error_{type(error).__name__}", len(names), detail=str(error))
        return [StoreOutcome.NOT] * len(names)


def _kept_blocks(chunks: GroupChunks, cache: BlockCache) -> list[int]:
    """Returns the blocks that a part of the layers keeps: the last blocks of each chunk."""
    per_chunk = len(chunks.blocks) // len(chunks.names)
    first = per_chunk - cache.chunk_size // cache.block_size
    return [block for at, block in enumerate(chunks.blocks) if at % per_chunk >= first]
