"""The connector's part in a worker: moves KV between vLLM's blocks and the pool, off the model's thread.

A load or store never touches a block after it was reported as ended: the thread that copies is the one that reports, and it
waits for the pool only until its deadline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from pd_cache.blocks import BlockCache, Restored, RestoresByLayers, StoreOutcome
from pd_cache.vllm.arrivals import StepArrivals
from pd_cache.vllm.steps import GroupChunks, LoadOp, Step, StepReport, StoreOp
from transfer.locks import Condition

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
    restored: Restored
    bad_blocks: set[int] | None = None
    """The blocks that the load left without KV; None if it did not fail."""
    seconds: float = 0.0


class _LayerLoads(NamedTuple):
    """The loads of a step whose requests compute in that step."""

    ops: list[LoadOp]
    deadline: float
    arrivals: StepArrivals
    ends: dict[str, _LoadEnd]
    """By request. Written by the thread that loads, and read when `arrivals` are over."""


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
        layers: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`caches`: one for each group of layers; the caller keeps them. None for a group of which this rank has no layers. `stores` is
        false for such a group, and for one whose KV another rank stores, too. `layers`: the names of the only group's layers, in order, if
        loads within a step are to go layer by layer; otherwise they end before the step computes anything."""
        self._caches = tuple(caches)
        self._first = next(cache for cache in caches if cache is not None)
        self._metrics = self._first.metrics
        self._clock = clock
        self._stores = tuple(stores)
        self._load_timeout_s = load_timeout_s
        self._layers = tuple(layers)
        self._in_step: _LayerLoads | None = None
        self._ends: dict[str, _LoadEnd] = {}
        """The loads within this step that have ended, by request."""
        self._layer_queue: queue.SimpleQueue[_LayerLoads | None] = queue.SimpleQueue()
        self._load_queue: queue.SimpleQueue[_LoadUnderWay | None] = queue.SimpleQueue()
        self._store_queue: queue.SimpleQueue[_StoreUnderWay | None] = (
            queue.SimpleQueue()
        )  # the scheduler bounds its length
        self._changed = Condition()
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
                *([("layers", self._run_layers)] if layers else []),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def by_layers(self) -> bool:
        """Whether loads within a step go layer by layer."""
        return bool(self._layers)

    def start(self, step: Step) -> None:
        """Begins this step's loads. Without `by_layers`, waits until those have ended whose requests compute in this step."""
        deadline = self._clock() + self._load_timeout_s
        self._ends = {}
        in_step = [op for op in step.loads if op.in_step]
        if in_step and self._layers:
            loads = _LayerLoads(in_step, deadline, StepArrivals(self._layers, len(in_step)), {})
            self._layer_queue.put(loads)
            self._in_step = loads
        for op in step.loads:
            if not op.in_step:
                with self._changed:
                    self._under_way += 1
                    self._wanted.add(op.request_id)
                self._load_queue.put(_LoadUnderWay(op, deadline))
            elif not self._layers:
                self._ends[op.request_id] = self._load(op, deadline)

    def wait_for_layer(self, layer: str) -> None:
        """Waits until a layer of this step's loads has arrived, or until the loads have ended, whichever comes first."""
        if self._in_step is not None:
            self._in_step.arrivals.wait_for(layer)

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
        self._end_in_step()
        with self._changed:
            for op in step.loads:
                if op.in_step:  # a load of which nothing is known has failed
                    lost = _LoadEnd(Restored(0, "error"), _blocks(op.blocks))
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
        self._layer_queue.put(None)
        deadline = self._clock() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    # --- inside --------------------------------------------------------------------------------------------------

    def _end_in_step(self) -> None:
        """Waits for the loads that went layer by layer. If the model did not wait for a layer of theirs, they have all failed, and later
        loads end before their step computes anything."""
        loads, self._in_step = self._in_step, None
        if loads is None:
            return
        if loads.arrivals.wait_over():
            self._ends = loads.ends
        else:
            self._layers = ()
            names = sum(len(part.names) for op in loads.ops for part in op.parts)
            self._metrics.trouble("retrieve", "not_awaited", names, detail="vLLM did not wait for all layers of a load")

    def _run_layers(self) -> None:
        while (loads := self._layer_queue.get()) is not None:
            try:
                self._load_layers(loads)
            finally:
                loads.arrivals.over()

    def _load_layers(self, loads: _LayerLoads) -> None:
        """Loads layer by layer, and of several loads each in turn."""
        began, layers = self._clock(), len(self._layers)
        running = {place: self._layers_of(op, loads.deadline) for place, op in enumerate(loads.ops)}
        while running:
            for place, load in list(running.items()):
                op, end = loads.ops[place], None
                try:
                    loads.arrivals.arrived(place, next(load))
                except StopIteration as stop:
                    end = stop.value
                except Exception as error:  # noqa: BLE001 - whatever the error is, vLLM computes the blocks
                    self._unexpected("retrieve", len(op.parts[0].names) if op.parts else 0, error)
                    end = _LoadEnd(Restored(0, "error"), _blocks(op.blocks))
                if end is not None:
                    loads.ends[op.request_id] = end._replace(seconds=self._clock() - began)
                    loads.arrivals.arrived(place, layers)
                    del running[place]

    def _layers_of(self, op: LoadOp, deadline: float) -> Generator[int, None, _LoadEnd]:
        """Loads the chunks of the only group. Yields how many layers have arrived."""
        cache, remaining = self._first, deadline - self._clock()
        if not op.parts or self._closing:
            return _LoadEnd(Restored(0, "not_asked" if op.parts else "error"), _blocks(op.blocks))
        (part,) = op.parts
        if remaining <= 0:
            self._metrics.trouble("retrieve", "deadline", len(part.names))
            return _LoadEnd(Restored(0, "deadline"), _blocks(op.blocks))
        assert isinstance(cache, RestoresByLayers)
        restored = yield from cache.restore_by_layers(
            part.names, part.blocks, session=op.request_id, epoch=op.epoch, timeout=remaining
        )
        return _end_of(op, part, restored)

    def _something_ended(self) -> bool:
        return bool(self._ended_loads or self._bad_blocks or self._report.jobs)

    def _run_loads(self) -> None:
        while (item := self._load_queue.get()) is not None:
            op = item.op
            wanted = op.request_id in self._wanted
            end = _LoadEnd(Restored(0, "not_asked"), None if not wanted else _blocks(op.blocks))
            if wanted and not self._closing:
                began = self._clock()
                end = self._load(op, item.deadline)
                end = end._replace(seconds=self._clock() - began)
            with self._changed:
                self._under_way -= 1
                self._wanted.discard(op.request_id)
                self._ended_loads.add(op.request_id)
                self._note_end(op, end)
                self._changed.notify_all()

    def _note_end(self, op: LoadOp, end: _LoadEnd) -> None:
        """Notes how a load ended. Call with the lock held."""
        self._report.loads[op.request_id] = end.restored
        self._report.load_seconds[op.request_id] = end.seconds
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
            return _LoadEnd(Restored(0, "error"), _blocks(op.blocks))
        first: Restored | None = None
        for part in op.parts:
            cache = self._caches[part.group]
            if cache is None:
                continue
            restored = self._load_part(cache, op, part, deadline)
            if restored.chunks < len(part.names):
                return _end_of(op, part, restored)
            first = first or restored
        return _LoadEnd(first or Restored(0))

    def _load_part(self, cache: BlockCache, op: LoadOp, part: GroupChunks, deadline: float) -> Restored:
        """Returns how many of a group's chunks were loaded, from the first."""
        try:
            remaining = deadline - self._clock()
            if remaining > 0:
                return cache.restore(part.names, part.blocks, session=op.request_id, epoch=op.epoch, timeout=remaining)
            self._metrics.trouble("retrieve", "deadline", len(part.names))
            return Restored(0, "deadline")
        except Exception as error:  # noqa: BLE001 - whatever the error is, vLLM computes the blocks
            self._unexpected("retrieve", len(part.names), error)
        return Restored(0, "error")

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


def _end_of(op: LoadOp, part: GroupChunks, restored: Restored) -> _LoadEnd:
    """Returns the end of a load of which `part` was the last part that moved."""
    if restored.chunks >= len(part.names):
        return _LoadEnd(restored)
    return _LoadEnd(restored, _blocks(op.blocks[restored.chunks * len(op.blocks) // len(part.names) :]))


def _blocks(blocks: Sequence[int]) -> set[int]:
    """Returns the blocks that are not left out."""
    return {block for block in blocks if block >= 0}
