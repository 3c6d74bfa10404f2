"""The connector's part in a worker, over a cache that does what the test says."""

import threading

import pytest
import torch

from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Loaded, StoreOutcome
from pd_cache.versions import WeightsVersion
from pd_cache.vllm.steps import GroupChunks, LoadOp, Step, StepReport, StoreOp
from pd_cache.vllm.worker import EndedLoads, WorkerSide
from tests.support.made import made
from tests.support.waiting import PATIENCE_S, Clock, wait_for

NAMES = [b"a" * 16, b"b" * 16, b"c" * 16]
BLOCKS = [10, 11, 12, 13, 14, 15]
"""Two for each of `NAMES`."""
CHUNKS = GroupChunks(0, NAMES, BLOCKS)


class Cache:
    """Loads `loads` chunks, or raises it. Answers while `gate` is open."""

    chunk_size, block_size = 8, 4

    def __init__(self):
        self.metrics = CacheMetrics()
        self.gate = threading.Event()
        self.gate.set()
        self.loads = len(NAMES)
        self.reason = "evicted"
        self.calls = []

    def mark(self):
        return "mark"

    def _called(self, what, how):
        self.calls.append((what, how))
        assert self.gate.wait(PATIENCE_S)
        if isinstance(self.loads, Exception):
            raise self.loads
        return self.loads

    def load(self, names, blocks, *, session, label, timeout):
        loaded = self._called(session, timeout)
        return Loaded(loaded, "none" if loaded == len(names) else self.reason)

    def store(self, names, blocks, *, after, label):
        self._called("store", after)
        return [StoreOutcome.NEW] * len(names)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cache():
    return Cache()


@pytest.fixture
def make(cache, clock):
    def worker(*, groups=(((cache, True),),), **given):
        given = {"version": WeightsVersion(), **given}
        return WorkerSide(groups, load_timeout_s=5.0, device=torch.device("cpu"), clock=clock, **given)

    def end(side):
        cache.gate.set()
        assert side.close(PATIENCE_S)

    yield from made(worker, end)


def load(request, blocks=BLOCKS):
    return LoadOp(request, [GroupChunks(0, NAMES, blocks)], blocks)


def start(side, *loads):
    side.start(Step(loads=list(loads)))


def report(side):
    """The next one."""
    return wait_for(lambda: side.take_report(Step()))


def ended(side, *requests):
    """Waits until these loads have ended."""
    all_of = EndedLoads(set(), set(), set())

    def all_ended():
        for known, new in zip(all_of, side.take_ended_loads(Step(), set()), strict=True):
            known |= new
        return all_of.finished >= set(requests)

    wait_for(all_ended, "the loads' end")
    return all_of


def begun(side, cache, *requests):
    """These loads have begun, and go on until the gate opens."""
    cache.gate.clear()
    start(side, *map(load, requests))
    wait_for(lambda: len(cache.calls) == len(requests))


@pytest.mark.parametrize(
    "loads, reason, bad, told",
    [
        (3, "", set(), Loaded(3)),
        (1, "evicted", {12, 13, 14, 15}, Loaded(1, "evicted")),
        (1, "none", {12, 13, 14, 15}, Loaded(1, "error")),
        (RuntimeError("no"), "", set(BLOCKS[1:]), Loaded(0, "error")),
    ],
)
def test_a_load_is_reported_once_with_the_blocks_that_it_left_without_kv_and_its_time(
    make, cache, clock, loads, reason, bad, told
):
    cache.loads, cache.reason = loads, reason
    side = make()
    cache.gate.clear()
    start(side, load("a", [-1, *BLOCKS[1:]]))
    wait_for(lambda: cache.calls)
    clock.now += 2
    cache.gate.set()
    assert ended(side, "a") == EndedLoads({"a"}, set(), bad)
    assert report(side) == StepReport(loads={"a": (2.0, told)})
    assert (side.take_ended_loads(Step(), set()), side.take_report(Step())) == (
        EndedLoads(set(), set(), set()),
        None,
    )
    assert cache.calls == [("a", 5.0)]
    if isinstance(loads, Exception):
        assert cache.metrics.totals()["troubles", "retrieve", "error_RuntimeError"] == 3


def test_a_load_without_names_has_failed(make, cache):
    side = make()
    start(side, LoadOp("a", [], BLOCKS))
    assert ended(side, "a").bad_blocks == set(BLOCKS)
    assert not cache.calls


def test_a_load_that_waited_for_longer_than_its_deadline_is_not_begun(make, cache, clock):
    side = make()
    begun(side, cache, "a", "b")  # as many as there are threads
    start(side, load("late"))
    clock.now += 5.0
    cache.gate.set()
    assert ended(side, "a", "b", "late").bad_blocks == set(BLOCKS)
    assert cache.metrics.totals()["troubles", "retrieve", "deadline"] == 3
    assert len(cache.calls) == 2
    took = {request: seconds for request, (seconds, _) in side.take_report(Step()).loads.items()}
    assert took == {"a": 2.5, "b": 2.5, "late": 0.0}, "two at once share the link"


def test_a_load_of_an_aborted_request_is_given_up_before_it_began_and_else_reported_when_its_blocks_are_free(
    make, cache
):
    side = make()
    begun(side, cache, "a", "b")
    start(side, load("aborted"))
    assert side.take_ended_loads(Step(), {"aborted", "a"}).finished == set(), (
        "the cache may still write to blocks of a"
    )
    cache.gate.set()
    ended(side, "a", "b", "aborted")
    assert {session for session, _ in cache.calls} == {"a", "b"}


def test_groups_load_at_the_same_time_and_a_failed_one_is_reported_when_the_others_copy_no_more(make):
    failed, slow = Cache(), Cache()
    failed.loads = 1
    slow.gate.clear()
    side = make(groups=[[(failed, True)], [(slow, True)]])
    parts = [GroupChunks(0, NAMES, BLOCKS), GroupChunks(1, NAMES, BLOCKS)]
    for first in (parts, parts[::-1]):
        start(side, LoadOp("a", first, []))
        wait_for(lambda: failed.calls and slow.calls, "both groups to be loading")
        assert side.take_ended_loads(Step(), set()).finished == set()
        slow.gate.set()
        assert ended(side, "a").failed == {"a"}
        slow.gate.clear()
        failed.calls.clear()
        slow.calls.clear()
    slow.gate.set()


def test_a_rank_without_layers_of_a_group_loads_the_others(make, cache):
    side = make(groups=[[(cache, True)], []])
    start(side, LoadOp("a", [GroupChunks(place, NAMES, BLOCKS) for place in (1, 0)], []))
    assert ended(side, "a") == EndedLoads({"a"}, set(), set())
    assert cache.calls == [("a", 5.0)]


def test_of_the_parts_of_a_group_the_one_that_did_least_counts(make):
    most, least, elsewhere = Cache(), Cache(), Cache()
    most.loads, least.loads = 2, 1
    side = make(groups=[[(most, True), (least, True), (elsewhere, False)]])
    start(side, load("a"))
    assert ended(side, "a").bad_blocks == set(BLOCKS[2:])
    assert report(side).loads == {"a": (0.0, Loaded(1, "evicted"))}
    assert elsewhere.calls, "what another rank stores is loaded, too"
    least.loads = RuntimeError("no")
    for job, outcome in ((1, StoreOutcome.NOT), (2, StoreOutcome.NEW)):
        side.save(Step(stores=[StoreOp(job, CHUNKS)]))
        assert report(side).jobs == {job: (1, [outcome] * 3)}
        least.loads = 3
    assert len(elsewhere.calls) == 1


@pytest.mark.parametrize(
    "stores, loads, outcome, calls",
    [
        (True, 3, StoreOutcome.NEW, [("store", "mark")]),
        (True, RuntimeError("no"), StoreOutcome.NOT, [("store", "mark")]),
        (False, 3, StoreOutcome.BEFORE, []),
    ],
    ids=["after the step that computes it", "one that raises", "what another rank stores"],
)
def test_the_end_of_a_store_is_reported_so_that_its_blocks_are_given_back(
    make, cache, stores, loads, outcome, calls
):
    cache.loads = loads
    side = make(groups=[[(cache, stores)]])
    side.save(Step(stores=[StoreOp(7, CHUNKS)]))
    assert report(side).jobs == {7: (1, [outcome] * 3)}
    assert cache.calls == calls


def test_close_gives_up_what_is_queued_and_waits_for_what_runs(make, cache):
    side = make()
    begun(side, cache, "a", "b")
    side.save(Step(stores=[StoreOp(1, CHUNKS), StoreOp(2, CHUNKS)]))
    wait_for(lambda: len(cache.calls) == 3)
    start(side, load("queued"))
    assert not side.close(0.0), "a store and two loads still run"
    cache.gate.set()
    assert side.close(PATIENCE_S)
    assert len(cache.calls) == 3
    assert ended(side, "queued").bad_blocks == set(BLOCKS)


def test_the_caches_take_the_version_of_the_weights_from_each_step(make):
    version = WeightsVersion()
    side = make(version=version)
    for label in ("w1", None, "", ""):
        side.start(Step(label=label))
        assert version.label == label
