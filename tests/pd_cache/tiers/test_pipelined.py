"""The read-ahead wrapper: bounded, on a thread of its own, and nothing is lost on the way."""

import threading
import time

import pytest

from pd_cache.tiers.pipelined import PipelinedBackend
from tests.support.backends import Subject, make_local, make_memory
from tests.support.waiting import wait_for
from transfer.deadlines import end_in
from transfer.errors import Status

PAYLOAD = 64
KEYS = [f"k{n}" for n in range(12)]


class Watched:
    """A local tier whose fetches are noted, and can be held back or fail."""

    def __init__(self, backend, monkeypatch):
        self.fetched = []
        self.ends = []
        self.closed = threading.Event()
        self.gate = threading.Semaphore(1000)
        self.fail_at = None
        real = backend.batched_fetch

        def watched(keys, *, payload_bytes=None, end=None):
            self.ends.append(end)
            try:
                for key, (fetched,) in zip(
                    keys, real(keys, payload_bytes=payload_bytes, end=end), strict=True
                ):
                    if not self.gate.acquire(timeout=60):
                        raise AssertionError("held back for too long")
                    if key == self.fail_at:
                        fetched.release()
                        raise RuntimeError("broken inside")
                    self.fetched.append((key, threading.current_thread().name))
                    yield [fetched]
            finally:
                self.closed.set()

        monkeypatch.setattr(backend, "batched_fetch", watched)


@pytest.fixture
def subject():
    local = make_local(make_memory(PAYLOAD, 40), 20)
    local.together = 1
    one = Subject(PipelinedBackend(local, depth=3), {"local": local}, None)
    one.put({key: key.encode().ljust(PAYLOAD) for key in KEYS})
    try:
        yield one
    finally:
        one.backend.close()
        wait_for(lambda: one.backend.memory.pool.in_use == 0, "all memory free")


@pytest.fixture
def inner(subject, monkeypatch):
    local = subject.bases["local"]
    return Watched(local, monkeypatch)


def test_the_first_chunk_comes_without_a_second_thread_and_the_next_are_fetched_meanwhile(subject, inner):
    fetches = subject.backend.batched_get(KEYS, end=(end := end_in(60)))
    first = next(fetches)
    assert inner.ends == [end]
    assert inner.fetched[0] == (KEYS[0], threading.current_thread().name)
    wait_for(lambda: len(inner.fetched) > 1, "reading ahead while the first is used")
    assert all(thread.startswith("read-ahead") for _, thread in inner.fetched[1:])
    first.release()
    rest = list(fetches)
    assert [bytes(one.payload or b"").strip().decode() for one in rest] == KEYS[1:]
    for one in rest:
        one.release()


def test_no_more_than_its_depth_is_fetched_ahead_and_nothing_for_a_single_chunk(subject, inner):
    before = threading.active_count()
    (single,) = subject.backend.batched_get(KEYS[:1])
    assert threading.active_count() == before
    single.release()
    inner.fetched.clear()
    fetches = subject.backend.batched_get(KEYS)
    for taken in range(1, 6):
        next(fetches).release()
        wait_for(lambda n=taken: len(inner.fetched) == n + 3)
        time.sleep(0.01)
        assert len(inner.fetched) == taken + 3
    fetches.close()


def test_a_reader_that_stops_does_not_wait_for_what_is_under_way(subject, inner):
    inner.gate = threading.Semaphore(2)  # the third fetch hangs
    fetches = subject.backend.batched_get(KEYS)
    next(fetches).release()
    wait_for(lambda: len(inner.fetched) == 2)
    fetches.close()
    assert not inner.closed.is_set()
    inner.gate.release(100)
    assert inner.closed.wait(60), "the thread ends with the fetch that it waited for"
    local = subject.bases["local"]
    wait_for(lambda: local.batched_remove(KEYS) == [Status.OK] * len(KEYS), "nothing pinned any more")


def test_what_breaks_inside_is_raised_where_the_chunk_is_waited_for(subject, inner):
    inner.fail_at = KEYS[3]
    fetches = subject.backend.batched_get(KEYS)
    for _ in range(3):
        next(fetches).release()
    with pytest.raises(RuntimeError, match="broken inside"):
        next(fetches)


def test_a_backend_that_leaves_out_chunks_is_an_error(subject, inner):
    real = subject.backend.inner.batched_fetch
    subject.backend.inner.batched_fetch = lambda keys, **options: real(keys[:2], **options)
    with pytest.raises(ValueError, match=f"gave 2 outcomes for {len(KEYS)} keys"):
        subject.get(KEYS)


def test_a_reader_whose_backend_is_closed_gets_an_answer_for_every_key(subject, inner):
    fetches = subject.backend.batched_get(KEYS)
    reasons = []
    for count, fetched in enumerate(fetches):
        if count == 1:
            subject.backend.close()
        reasons.append(fetched.reason)
        fetched.release()
    assert len(reasons) == len(KEYS)
    assert reasons[0] == ""
