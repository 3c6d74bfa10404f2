"""The connector's part in a worker: moves KV between vLLM's blocks and the pool, off the model's thread.

A load or store never touches a block after it was reported as ended: the thread that copies is the one that reports, and it
waits for the pool only until its deadline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pd_cache.blocks import BlockCache, StoreOutcome
from pd_cache.reasons import Loaded
from pd_cache.vllm.steps import LoadOp, Step, StepReport, StoreOp

_LOADERS = 2
_IDLE_WAIT_S = 0.002
"""How long a step without computation waits for a transfer to end. vLLM spins through such steps, and a thread that spins keeps the
copying threads from running; a request that arrives meanwhile is scheduled that much later."""


class _LoadUnderWay(NamedTuple):
    op: LoadOp
    deadline: float


class _StoreUnderWay(NamedTuple):
    op: StoreOp
    after: Any
    """The mark at the end of the step that computes the chunks."""


class _LoadEnd(NamedTuple):
    restored: Loaded
    bad_blocks: set[int] | None = None
    """The blocks that the load left without KV; None if it did not fail."""


class EndedLoads(NamedTuple):
    """Loads that ended since the last step."""

    finished: set[str]
    failed: set[str]
    """Those of `finished` that failed as a whole; see `LoadOp.blocks`."""
    bad_blocks: set[int]
    """The blocks that were not loaded, of the other loads that failed."""


class WorkerSide:
    """One per worker. `start`, `save` and `take_*` are called on the model's thread, once a step."""

    def __init__(
        self,
        caches: Sequence[BlockCache | None],
        *,
        stores: Sequence[bool],
        load_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`caches`: one for each group of layers; the caller keeps them. None for a group of which this rank has no layers. `stores` is
        false for such a group, and for one whose KV another rank stores, too."""
        self._caches = tuple(caches)
        self._first = next(cache for cache in caches if cache is not None)
        self._metrics = self._first.metrics
        self._clock = clock
        self._stores = tuple(stores)
        self._load_timeout_s = load_timeout_s
        self._ends: dict[str, _LoadEnd] = {}
        """The loads within this step that have ended, by request."""
        self._load_queue: queue.SimpleQueue[_LoadUnderWay | None] = queue.SimpleQueue()
        self._store_queue: queue.SimpleQueue[_StoreUnderWay | None] = (
            queue.SimpleQueue()
        )  # the scheduler bounds its length
        self._changed = threading.Condition()
        self._under_way = 0
        self._wanted: set[str] = set()
        """Requests whose load is queued or running."""
        self._ended_loads: set[str] = set()
        self._failed_loads: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = StepReport()
        self._closing = False
        self._threads = [
            threading.Thread(target=target, name=f"pd-cache-{name}", daemon=True)
            for name, target in (
                *((f"load-{index}", self._run_loads) for index in range(_LOADERS)),
                ("store", self._run_stores),
            )
        ]
        for thread in self._threads:
            thread.start()

    def start(self, step: Step) -> None:
        """Begins this step's loads, and ends those whose requests compute in this step."""
        deadline = self._clock() + self._load_timeout_s
        self._ends = {}
        for op in step.loads:
            if op.in_step:
                self._ends[op.request_id] = self._load(op, deadline)
            else:
                with self._changed:
                    self._under_way += 1
                    self._wanted.add(op.request_id)
                self._load_queue.put(_LoadUnderWay(op, deadline))

    def save(self, step: Step) -> None:
        """Queues this step's stores. The forward pass has been launched, and a mark stands for its end."""
        if not step.stores:
            return
        after = self._first.mark()
        for op in step.stores:
            with self._changed:
                if self._stores[op.chunks.group]:
                    self._under_way += 1
                else:
                    self._report.jobs[op.job] = (1, [StoreOutcome.BEFORE] * len(op.chunks.names))
            if self._stores[op.chunks.group]:
                self._store_queue.put(_StoreUnderWay(op, after))

    def take_loads(self, step: Step, finished: set[str]) -> EndedLoads:
        """Returns the loads that ended; all those of requests that computed in this step have. Gives up loads of `finished` requests that
        have not begun."""
        with self._changed:
            for op in step.loads:
                if op.in_step:  # a load of which nothing is known has failed
                    lost = _LoadEnd(Loaded(0, "error"), _blocks(op.blocks))
                    self._note_end(op, self._ends.pop(op.request_id, lost))
            self._wanted -= finished
            if step.nothing_to_compute and (self._under_way or step.expecting) and not self._something_ended():
                self._changed.wait(_IDLE_WAIT_S)
            ended, self._ended_loads = self._ended_loads, set()
            failed, self._failed_loads = self._failed_loads, set()
            bad, self._bad_blocks = self._bad_blocks, set()
        return EndedLoads(ended, failed, bad)

    def take_report(self) -> StepReport | None:
        """Returns the report for the scheduler; None if nothing ended."""
        with self._changed:
            if not self._report.jobs and not self._report.loads:
                return None
            report, self._report = self._report, StepReport()
            return report

    def close(self, timeout: float) -> bool:
        """Gives up what is queued, and waits at most `timeout` seconds for what runs. Returns False if something still runs."""
        self._closing = True
        for _ in range(_LOADERS):
            self._load_queue.put(None)
        self._store_queue.put(None)
        deadline = self._clock() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- inside --------------------------------------------------------------------------------------------------

    def _something_ended(self) -> bool:
        return bool(self._ended_loads or self._bad_blocks or self._report.jobs)

    def _run_loads(self) -> None:
        while (item := self._load_queue.get()) is not None:
            op = item.op
            wanted = op.request_id in self._wanted
            end = _LoadEnd(Loaded(0, "not_asked"), None if not wanted else _blocks(op.blocks))
            if wanted and not self._closing:
                end = self._load(op, item.deadline)
            with self._changed:
                self._under_way -= 1
                self._wanted.discard(op.request_id)
                self._ended_loads.add(op.request_id)
                self._note_end(op, end)
                self._changed.notify_all()

    def _note_end(self, op: LoadOp, end: _LoadEnd) -> None:
        """Notes how a load ended. Call with the lock held."""
        self._report.loads[op.request_id] = end.restored
        if end.bad_blocks is None:
            return
        self._report.failed_loads.add(op.request_id)
        if op.blocks:
            self._bad_blocks |= end.bad_blocks
        else:
            self._failed_loads.add(op.request_id)

    def _load(self, op: LoadOp, deadline: float) -> _LoadEnd:
        """Loads chunks of all groups, until one fails."""
        if not op.parts:
            return _LoadEnd(Loaded(0, "error"), _blocks(op.blocks))
        first: Loaded | None = None
        for part in op.parts:
            cache, remaining = self._caches[part.group], deadline - self._clock()
            if cache is None:
                continue
            restored = Loaded(0, "deadline")
            try:
                if remaining > 0:
                    restored = cache.restore(
                        part.names, part.blocks, session=op.request_id, epoch=op.epoch, timeout=remaining
                    )
                else:
                    self._metrics.trouble("retrieve", "deadline", len(part.names))
            except Exception as error:  # noqa: BLE001 - whatever the error is, vLLM computes the blocks
                self._unexpected("retrieve", len(part.names), error)
                restored = Loaded(0, "error")
            if restored.chunks < len(part.names):
                return _LoadEnd(restored, _blocks(op.blocks[restored.chunks * len(op.blocks) // len(part.names) :]))
            first = first or restored
        return _LoadEnd(first or Loaded(0))

    def _run_stores(self) -> None:
        while (item := self._store_queue.get()) is not None:
            op, chunks = item.op, item.op.chunks
            cache, outcomes = self._caches[chunks.group], [StoreOutcome.NOT] * len(chunks.names)
            try:
                if not self._closing and cache is not None:
                    outcomes = cache.store(chunks.names, chunks.blocks, after=item.after, epoch=op.epoch)
            except Exception as error:  # noqa: BLE001 - a chunk that is not stored is computed again, no more
                self._unexpected("store", len(chunks.names), error)
            with self._changed:
                self._under_way -= 1
                self._report.jobs[op.job] = (1, outcomes)
                self._changed.notify_all()

    def _unexpected(self, op: str, chunks: int, error: Exception) -> None:
        self._metrics.trouble(op, f"error_{type(error).__name__}", chunks, detail=str(error))


def _blocks(blocks: Sequence[int]) -> set[int]:
    """Returns the blocks that are not left out."""
    return {block for block in blocks if block >= 0}
