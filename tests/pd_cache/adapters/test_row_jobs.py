"""Jobs on rows of a memory, and versions of names: what the adapters of vLLM's tiering and SGLang stand
on."""

import threading
import uuid

import pytest

from pd_cache.adapters.tasks import RowJobs
from pd_cache.adapters.versioned_names import VersionedNames
from pd_cache.config import CacheConfig, LocalTier, NodeSettings
from pd_cache.objects.object_cache import ObjectCache
from tests.support.waiting import wait_for

ROW = 100


class Names:
    """Values by name in this process, and a gate that transfers wait for."""

    def __init__(self):
        self.label = ""
        self.values = {}
        self.labels = []
        self.open = threading.Event()
        self.open.set()
        self.under_way = threading.Semaphore(0)

    def put(self, names, values, *, label, timeout):
        self._wait(timeout)
        self.labels.append(label)
        self.values.update(zip(names, map(bytes, values), strict=True))
        return [True] * len(names)

    def read_into(self, names, buffers, *, timeout):
        self._wait(timeout)
        if b"bad" in names:
            raise RuntimeError("what nobody foresaw")
        for name, buffer in zip(names, buffers, strict=True):
            if name in self.values:
                buffer[:] = self.values[name]
        return ["" if name in self.values else "missing" for name in names]

    def _wait(self, timeout):
        assert not timeout.passed
        self.under_way.release()
        assert self.open.wait(60)


class Jobs:
    def __init__(self):
        self.names, self.memory = Names(), bytearray(8 * ROW)
        memory, names = memoryview(self.memory), self.names
        self.its = RowJobs(names, memory, ROW, seconds=60, most_stored=4, threads=1)

    def ended(self, count):
        results = []
        wait_for(lambda: results.extend(self.its.finished()) or len(results) >= count, "the end of jobs")
        return sorted(results)


@pytest.fixture
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.names.open.set()
    assert jobs.its.close()
    assert jobs.its.close()


def test_rows_are_stored_and_loaded_and_a_job_says_which(jobs):
    jobs.memory[:] = bytes(range(8)) * ROW
    row = bytes(jobs.memory[2 * ROW : 3 * ROW])
    jobs.its.store(1, [b"a"], [2], label="e")
    assert jobs.ended(1)[0][:4] == (1, False, (b"a",), (True,))
    jobs.memory[:] = bytes(8 * ROW)
    jobs.its.load(2, [b"a", b"hole"], [5, 6])
    assert jobs.ended(1)[0].done == (True, False)
    assert bytes(jobs.memory) == bytes(5 * ROW) + row + bytes(2 * ROW)
    assert jobs.names.labels == ["e"]


def test_stores_are_bounded_and_one_more_fails_at_once(jobs):
    jobs.names.open.clear()
    jobs.its.store(1, [b"a"], [0])
    jobs.names.under_way.acquire()
    jobs.its.store(2, [b"b", b"c"], [1, 2])
    jobs.its.store(3, [b"d", b"e", b"f"], [3, 4, 5])
    assert [(one.job, one.done) for one in jobs.ended(1)] == [(3, (False,) * 3)]
    jobs.names.open.set()
    assert [(one.job, all(one.done)) for one in jobs.ended(2)] == [(1, True), (2, True)]


def test_after_close_jobs_fail_and_the_memory_is_free(jobs):
    assert jobs.its.close()
    jobs.its.store(1, [b"a"], [0])
    assert jobs.ended(1)[0].done == (False,)
    jobs.memory.clear()  # BufferError while anybody has a view of it


LONELY = NodeSettings(master="", cache=CacheConfig(tiers=(LocalTier(capacity="1MiB"),)))


@pytest.fixture
def cache():
    with ObjectCache.open(LONELY, uuid.uuid4().hex, part_bytes=ROW) as made:
        yield made


def test_a_reset_hides_values_also_if_it_comes_during_a_load(cache, monkeypatch):
    names = VersionedNames(cache)
    assert names.put([b"a"], [b"x"]) == [True]
    assert names.read_into([b"a"], [bytearray(1)]) == [""]
    before, read = names.label, cache.read_into

    def read_after_a_reset(*given, **options):
        names.reset()
        return read(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "read_into", read_after_a_reset)
        assert names.read_into([b"a"], [bytearray(1)]) == ["reset"]
    assert names.exist([b"a"]) == [False]
    assert names.put([b"b"], [b"y"], label=before) == [False], "it was computed before the reset"
    assert names.put([b"b"], [b"y"]) == [True]
    assert names.exist([b"b"]) == [True]
