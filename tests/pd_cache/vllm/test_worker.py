"""The connector's part in a worker, over a cache that does what the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pd_cache.blocks import StoreOutcome
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Loaded
from pd_cache.vllm.steps import GroupChunks, LoadOp, Step, StepReport, StoreOp
from pd_cache.vllm.worker import EndedLoads, WorkerSide
from tests.pd_cache.vllm.histories import Clock
from tests.support.waiting import PATIENCE_S, wait_for

NAMES = [b"a" * 16, b"b" * 16, b"c" * 16]
BLOCKS = [10, 11, 12, 13, 14, 15]
"""Two for each of `NAMES`."""


class Cache:
    """Loads `loads` chunks, or raises it. Answers while `gate` is open."""

    def __init__(self) -> None:
        self.metrics = CacheMetrics()
        self.gate = threading.Event()
        self.gate.set()
        self.loads: int | Exception = len(NAMES)
        self.calls: list[tuple[str, Any]] = []

    def mark(self) -> str:
        return "mark"

    def retrieve(self, names: Any, blocks: Any, *, session: str, timeout: float) -> int:
        self.calls.append((session, timeout))
        assert self.gate.wait(PATIENCE_S)
        if isinstance(self.loads, Exception):
            raise self.loads
        return self.loads

    def restore(self, names: Any, blocks: Any, *, session: str, epoch: str, timeout: float) -> Loaded:
        loaded = self.retrieve(names, blocks, session=session, timeout=timeout)
        return Loaded(loaded, "none" if loaded == len(names) else "evicted")

    def store(self, names: Any, blocks: Any, *, after: Any, epoch: str) -> list[StoreOutcome]:
        self.calls.append(("store", after))
        assert self.gate.wait(PATIENCE_S)
        if isinstance(self.loads, Exception):
            raise self.loads
        return [StoreOutcome.NEW] * len(names)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def make(cache: Cache, clock: Clock) -> Iterator[Callable[..., WorkerSide]]:
    made: list[WorkerSide] = []

    def worker(*, stores: bool = True) -> WorkerSide:
        side = WorkerSide(
            [cache],  # type: ignore[list-item]
            stores=[stores],
            load_timeout_s=5.0,
            clock=clock,
        )
        made.append(side)
        return side

    yield worker
    cache.gate.set()
    for side in made:
        assert side.close(PATIENCE_S)


def load(request: str, blocks: list[int] | None = None, *, in_step: bool = False) -> LoadOp:
    places = BLOCKS if blocks is None else blocks
    return LoadOp(request, [GroupChunks(0, NAMES, places)], places, in_step=in_step)


def finished(side: WorkerSide, *requests: str) -> set[int]:
    """Wait until these loads have ended; returns the bad blocks."""
    ended: set[str] = set()
    bad: set[int] = set()

    def all_ended() -> bool:
        result = side.take_loads(Step(), set())
        ended.update(result.finished)
        bad.update(result.bad_blocks)
        return ended >= set(requests)

    wait_for(all_ended, what="the loads' end")
    return bad


def reported(side: WorkerSide) -> StepReport:
    found: list[StepReport] = []

    def there() -> bool:
        report = side.take_report()
        found.extend([] if report is None else [report])
        return bool(found)

    wait_for(there, what="the worker's report")
    return found[0]


def test_a_load_is_reported_once_and_whole(make: Any, cache: Cache) -> None:
    side = make()
    side.start(Step(loads=[load("a")]))
    assert finished(side, "a") == set()
    assert side.take_loads(Step(), set()).finished == set()
    assert reported(side) == StepReport(loads={"a": Loaded(3)})
    assert side.take_report() is None
    assert cache.calls == [("a", 5.0)]


def test_the_blocks_of_chunks_that_were_not_loaded_are_bad(make: Any, cache: Cache) -> None:
    cache.loads = 1
    side = make()
    side.start(Step(loads=[load("a", [-1, 11, 12, 13, 14, 15])]))
    assert finished(side, "a") == {12, 13, 14, 15}
    assert reported(side) == StepReport(loads={"a": Loaded(1, "evicted")})


def test_a_rank_without_layers_of_a_group_loads_the_others_and_reports_stores_at_once(
    cache: Cache, clock: Clock
) -> None:
    caches: Any = [cache, None]
    side = WorkerSide(caches, stores=[True, False], load_timeout_s=5.0, clock=clock)
    parts = [GroupChunks(place, NAMES, BLOCKS) for place in (1, 0)]
    side.start(Step(loads=[LoadOp("a", parts, [])]))
    assert finished(side, "a") == set()
    assert cache.calls == [("a", 5.0)]
    side.save(Step(stores=[StoreOp(7, parts[0])]))
    assert reported(side).jobs == {7: (1, [StoreOutcome.BEFORE] * 3)}
    assert side.close(PATIENCE_S)


def test_a_load_without_blocks_to_report_fails_as_a_whole(make: Any, cache: Cache) -> None:
    side, parts = make(), [GroupChunks(0, NAMES, BLOCKS)]
    cache.loads = 2
    side.start(Step(loads=[LoadOp("a", parts, [])]))
    results: list[EndedLoads] = []

    def ended() -> bool:
        results.append(side.take_loads(Step(), set()))
        return bool(results[-1].finished)

    wait_for(ended)
    assert results[-1] == EndedLoads({"a"}, {"a"}, set())


def test_a_cache_that_raises_makes_all_of_a_loads_blocks_bad(make: Any, cache: Cache) -> None:
    cache.loads = RuntimeError("no")
    side = make()
    side.start(Step(loads=[load("a", [-1, *BLOCKS[1:]])]))
    assert finished(side, "a") == set(BLOCKS[1:])
    assert cache.metrics.totals()["troubles", "retrieve", "error_RuntimeError"] == 3


def test_a_load_without_names_fails_without_asking_the_cache(make: Any, cache: Cache) -> None:
    side = make()
    side.start(Step(loads=[LoadOp("a", [], BLOCKS)]))
    assert finished(side, "a") == set(BLOCKS)
    assert not cache.calls


def test_a_load_that_waited_for_longer_than_its_deadline_is_not_begun(make: Any, cache: Cache, clock: Clock) -> None:
    cache.gate.clear()
    side = make()
    side.start(Step(loads=[load("a"), load("b")]))  # as many as there are threads
    wait_for(lambda: len(cache.calls) == 2)
    side.start(Step(loads=[load("late")]))
    clock.now += 5.0
    cache.gate.set()
    assert finished(side, "a", "b", "late") == set(BLOCKS)
    assert cache.metrics.totals()["troubles", "retrieve", "deadline"] == 3
    assert len(cache.calls) == 2


def test_a_load_of_a_request_that_was_aborted_before_it_began_is_given_up(make: Any, cache: Cache) -> None:
    cache.gate.clear()
    side = make()
    side.start(Step(loads=[load("a"), load("b")]))
    wait_for(lambda: len(cache.calls) == 2)
    side.start(Step(loads=[load("aborted")]))
    side.take_loads(Step(), {"aborted"})
    cache.gate.set()
    finished(side, "a", "b", "aborted")
    assert {session for session, _ in cache.calls} == {"a", "b"}


def test_a_load_of_a_request_that_is_aborted_while_it_runs_is_reported_when_its_blocks_are_free(
    make: Any, cache: Cache
) -> None:
    cache.gate.clear()
    side = make()
    side.start(Step(loads=[load("a")]))
    wait_for(lambda: len(cache.calls) == 1)
    assert side.take_loads(Step(), {"a"}).finished == set(), "the cache may still write to them"
    cache.gate.set()
    finished(side, "a")


def test_a_sync_load_has_ended_when_start_returns(make: Any, cache: Cache) -> None:
    cache.loads = 2
    side, step = make(), Step(loads=[load("a", in_step=True)])
    side.start(step)
    assert cache.calls == [("a", 5.0)]
    result = side.take_loads(step, set())
    assert (result.finished, result.bad_blocks) == (set(), {14, 15})
    assert reported(side).loads["a"].reason == "evicted"


def test_a_load_within_a_step_that_never_began_has_failed(make: Any) -> None:
    """For whatever reason: what the step has computed must not count."""
    side = make()
    assert side.take_loads(Step(loads=[load("a", in_step=True)]), set()).bad_blocks == set(BLOCKS)


def test_a_store_comes_after_the_step_that_computes_it(make: Any, cache: Cache) -> None:
    side = make()
    side.save(Step(stores=[StoreOp(7, GroupChunks(0, NAMES, BLOCKS))]))
    assert reported(side).jobs == {7: (1, [StoreOutcome.NEW] * 3)}
    assert cache.calls == [("store", "mark")]


def test_a_store_that_raises_is_reported_so_that_its_blocks_are_given_back(make: Any, cache: Cache) -> None:
    cache.loads = RuntimeError("no")
    side = make()
    side.save(Step(stores=[StoreOp(7, GroupChunks(0, NAMES, BLOCKS))]))
    assert reported(side).jobs == {7: (1, [StoreOutcome.NOT] * 3)}


def test_a_replica_reports_at_once_what_another_rank_stores(make: Any, cache: Cache) -> None:
    side = make(stores=False)
    side.save(Step(stores=[StoreOp(7, GroupChunks(0, NAMES, BLOCKS))]))
    assert reported(side).jobs == {7: (1, [StoreOutcome.BEFORE] * 3)}
    assert not cache.calls


def test_close_gives_up_what_is_queued_and_waits_for_what_runs(make: Any, cache: Cache) -> None:
    cache.gate.clear()
    side = make()
    side.save(Step(stores=[StoreOp(1, GroupChunks(0, NAMES, BLOCKS)), StoreOp(2, GroupChunks(0, NAMES, BLOCKS))]))
    wait_for(lambda: len(cache.calls) == 1)
    assert not side.close(0.0), "a store still runs"
    cache.gate.set()
    assert side.close(PATIENCE_S)
    assert len(cache.calls) == 1
