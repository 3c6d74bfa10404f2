"""Deadlines, quarantine and the breaker, without any pool."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import wait_for
from transfer.calls import CallThreads
from transfer.errors import Status, TransferError, status_of
from transfer.settings import ByteSize
from transfer.staging import Quota, Slot, StagingPool, mapping_at, prefault_segment


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def threads() -> object:
    made = CallThreads("test", 1, limit=3)
    yield made
    made.close(5)


def test_a_call_returns_its_value_and_raises_its_error(threads: CallThreads) -> None:
    call = threads.submit(lambda: 7, soon())
    assert call is not None
    assert call.outcome(0) == 7
    assert call.outcome(0) == 7, "a second look finds the same"
    broken = threads.submit(lambda: 1 // 0, soon())
    assert broken is not None
    with pytest.raises(ZeroDivisionError):
        broken.outcome(0)


def test_a_call_that_outlives_its_deadline_is_abandoned_and_ends_later(threads: CallThreads) -> None:
    release, ended = threading.Event(), threading.Event()
    call = threads.submit(release.wait, soon(0.05), ended.set)
    assert call is not None
    assert call.outcome(False) is False
    assert not ended.is_set(), "what the call was given is let go of only when it returned"
    assert threads.submit(lambda: True, soon()) is None, "every thread is held by an overdue call"
    release.set()
    wait_for(ended.is_set)


def test_a_call_whose_turn_comes_too_late_never_starts(threads: CallThreads) -> None:
    release = threading.Event()
    ran: list[int] = []
    ended: list[int] = []
    first = threads.submit(release.wait, soon())
    late = threads.submit(lambda: ran.append(1), soon(0.01), lambda: ended.append(1))
    assert first is not None
    assert late is not None
    assert late.outcome(None) is None
    release.set()
    wait_for(lambda: ended)
    assert not ran


def test_a_queued_call_lets_go_when_its_deadline_passes_though_the_thread_is_held(threads: CallThreads) -> None:
    release = threading.Event()
    ended: list[int] = []
    threads.submit(release.wait, soon(60))
    late = threads.submit(lambda: 1, soon(0.01), lambda: ended.append(1))
    assert late is not None
    assert late.outcome(0) == 0
    assert ended == [1], "nothing it was given is held until the thread is free"
    late.abandon()
    assert ended == [1]
    release.set()


def test_a_queued_call_that_nobody_waits_for_any_more_lets_go_at_once_and_a_running_one_when_it_ends(
    threads: CallThreads,
) -> None:
    release, ended = threading.Event(), []
    running = threads.submit(release.wait, soon(60), lambda: ended.append("running"))
    queued = threads.submit(lambda: 1, soon(60), lambda: ended.append("queued"))
    assert running is not None
    assert queued is not None
    wait_for(lambda: running.started)
    running.abandon()
    queued.abandon()
    assert ended == ["queued"]
    release.set()
    wait_for(lambda: ended == ["queued", "running"])
    assert queued.outcome(0) == 0


def test_a_spare_thread_takes_the_place_of_a_late_one_and_goes_when_that_is_back() -> None:
    threads = CallThreads("test", 1, spare=1)
    stuck, also = threading.Event(), threading.Event()
    try:
        late = threads.submit(stuck.wait, soon(0.02))
        assert late is not None
        late.outcome(False)
        other = threads.submit(lambda: 7, soon(60))
        assert other is not None
        assert other.outcome(0) == 7, "one peer that hangs does not hold up the others"
        later = threads.submit(also.wait, soon(0.02))
        assert later is not None
        later.outcome(False)
        assert threads.submit(lambda: 1, soon(60)) is None, "at most one spare"
        stuck.set()
        also.set()
        wait_for(lambda: len(threads._threads) == 1)
        again = threads.submit(lambda: 8, soon(60))
        assert again is not None
        assert again.outcome(0) == 8
    finally:
        stuck.set()
        also.set()
        threads.close(5)


def test_a_call_that_is_queued_behind_one_that_becomes_late_gets_a_spare_thread() -> None:
    threads = CallThreads("test", 1, spare=1)
    stuck = threading.Event()
    try:
        threads.submit(stuck.wait, soon(0.05))
        queued = threads.submit(lambda: 7, soon(60))
        assert queued is not None
        assert queued.outcome(0) == 7
    finally:
        stuck.set()
        threads.close(5)


def test_a_call_is_queued_although_no_spare_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = CallThreads("test", 1, spare=1)
    release = threading.Event()
    try:
        late = threads.submit(release.wait, soon(0.01))
        assert late is not None
        wait_for(lambda: threads.late == 1)

        def refused(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refused)
        gone: list[int] = []
        assert threads.submit(lambda: 1, soon(60), lambda: gone.append(1)) is None
        assert gone == [1], "every thread is late: the call lets go of what it was given"
    finally:
        release.set()
        assert threads.close(60)


def test_a_full_queue_refuses_and_lets_go_at_once(threads: CallThreads) -> None:
    release = threading.Event()
    ended: list[int] = []
    running = threading.Event()
    assert threads.submit(lambda: running.set() or release.wait(), soon()) is not None
    assert running.wait(60), "a call that a thread is about to take may not count"
    calls = [threads.submit(release.wait, soon(), lambda: ended.append(1)) for _ in range(3)]
    assert [call is None for call in calls] == [False, False, True]
    assert len(ended) == 1
    release.set()


def test_closed_threads_refuse_and_close_reports_what_still_runs() -> None:
    threads = CallThreads("test", 1)
    release = threading.Event()
    threads.submit(release.wait, soon())
    assert threads.close(0.05) is False
    assert threads.submit(lambda: 1, soon()) is None
    release.set()
    assert threads.close(5) is True


def test_a_slot_returns_to_the_pool_with_its_last_reference() -> None:
    staging = StagingPool(4 * 4096, 4000, prefaulted=True)
    slots = [staging.try_lease() for _ in range(4)]
    assert staging.try_lease() is None
    slot = slots[0]
    assert slot is not None
    slot.retain()
    slot.release()
    assert staging.try_lease() is None
    slot.release()
    again = staging.try_lease()
    assert again is not None
    assert again.address == slot.address
    again.release()
    with pytest.raises(TransferError, match="more often"):
        slot.release()
    with pytest.raises(TransferError, match="last reference"):
        slot.retain()
    staging.check_integrity()
    staging.close()


def test_the_last_slots_are_left_to_those_that_wait() -> None:
    staging = StagingPool(8 * 4096, 4096, prefaulted=False, headroom=2)
    ahead = [slot for _ in range(8) if (slot := staging.try_lease()) is not None]
    assert len(ahead) == 6
    waited = [staging.lease(soon(60)) for _ in range(2)]
    assert None not in waited
    staging.close()


class Registry:
    """What a client was asked to register; negative ints are codes."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: list[tuple[int, int]] = []

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append((address, size))
        return self.code


def test_slots_that_wait_for_peers_are_bounded_by_their_quota_and_leave_the_others_alone() -> None:
    staging = StagingPool(8 * 4096, 4096, prefaulted=False)
    puts = Quota(4, headroom=1)
    ahead = [slot for _ in range(8) if (slot := staging.try_lease(puts)) is not None]
    assert len(ahead) == 3, "the last of the quota is left to those that wait"
    waited = staging.lease(soon(60), puts)
    assert waited is not None
    assert staging.lease(soon(0.01), puts) is None
    others = [slot for _ in range(8) if (slot := staging.try_lease()) is not None]
    assert len(others) == 4

    waited.settle()
    waited.settle()
    assert staging.lease(soon(0.01), puts) is None, "the quota has room, the pool has none"
    others.pop().release()
    again = staging.lease(soon(60), puts)
    assert again is not None
    others.pop().release()
    assert staging.lease(soon(0.01), puts) is None
    ahead[0].retain()
    ahead[0].release()
    assert staging.lease(soon(0.01), puts) is None, "a call has it still"
    ahead.pop(0).release()
    assert staging.lease(soon(60), puts) is not None
    for slot in (*ahead, waited, again, *others):
        slot.release()
    staging.check_integrity()
    staging.close()


def test_a_lease_that_waits_for_its_quota_gets_what_another_settles() -> None:
    staging = StagingPool(4 * 4096, 4096, prefaulted=False)
    puts, reads = Quota(1), Quota(1)
    first, read = staging.lease(soon(60), puts), staging.lease(soon(60), reads)
    assert first is not None
    assert read is not None
    got: list[Slot | None] = []
    waiters = [
        threading.Thread(target=lambda quota=quota: got.append(staging.lease(soon(60), quota)))
        for quota in (puts, reads)
    ]
    for waiter in waiters:
        waiter.start()
    read.settle()
    waiters[1].join(60)
    assert [slot is not None for slot in got] == [True]
    first.settle()
    waiters[0].join(60)
    assert [slot is not None for slot in got] == [True, True]
    staging.close()


def test_overdue_calls_let_go_as_soon_as_their_memory_is_wanted(threads: CallThreads) -> None:
    staging = StagingPool(4096, 4096, prefaulted=False)
    staging.reclaim = threads.drop_overdue
    release = threading.Event()
    running = threads.submit(release.wait, soon(60))
    assert running is not None
    wait_for(lambda: running.started)
    slot = staging.try_lease()
    assert slot is not None
    overdue = threads.submit(lambda: 1, soon(0.05), slot.release)
    assert overdue is not None
    assert staging.lease(soon(60)) is not None, "though nobody waits for the call, and the thread is held"
    release.set()
    staging.close()


def test_forfeited_memory_is_never_leased_again_and_other_memory_takes_its_place() -> None:
    staging = StagingPool(4 * 4096, 4096, prefaulted=False)
    slots = [staging.try_lease() for _ in range(4)]
    lost = [slot for slot in slots[:2] if slot is not None]
    lost[0].view[:4] = b"read"
    client = Registry()
    staging.forfeit(lost, client)
    staging.forfeit(lost, client)
    assert [size for _, size in client.registered] == [2 * 4096], "once, as much as was lost"
    assert bytes(lost[0].view[:4]) == b"read", "its holder may still read it"
    addresses = {slot.address for slot in lost}
    for slot in slots:
        assert slot is not None
        slot.release()
    assert staging.in_use == 0
    again = [staging.try_lease() for _ in range(4)]
    assert addresses.isdisjoint(slot.address for slot in again if slot is not None)
    assert staging.try_lease() is None
    staging.check_integrity()
    lost[0].view[:4] = b"late"  # a late write finds its memory, and hurts nobody
    assert all(bytes(slot.view[:4]) != b"late" for slot in again if slot is not None)
    staging.close()


def test_memory_that_cannot_be_replaced_makes_the_pool_smaller() -> None:
    staging = StagingPool(4 * 4096, 4096, prefaulted=False)
    slot = staging.try_lease()
    assert slot is not None
    staging.forfeit([slot], Registry(-600))
    slot.release()
    assert staging.slots == 3
    staging.check_integrity()
    assert len([slot for slot in [staging.try_lease() for _ in range(9)] if slot is not None]) == 3
    staging.close()


def test_what_a_pool_forfeits_is_bounded() -> None:
    staging = StagingPool(4096, 4096, prefaulted=False)
    client = Registry()
    for _ in range(20):
        slot = staging.try_lease()
        if slot is not None:
            staging.forfeit([slot], client)
    assert 1 <= len(client.registered) <= 8
    assert staging.slots == 0
    assert staging.lease(soon(0)) is None
    staging.close()


def test_a_waiting_lease_gets_the_slot_that_is_given_back_and_none_after_close() -> None:
    staging = StagingPool(4096, 100, prefaulted=False)
    slot = staging.try_lease()
    assert slot is not None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(staging.lease(soon())))
    waiter.start()
    slot.release()
    waiter.join(60)
    assert isinstance(got[0], Slot)
    assert got[0].address == slot.address
    closed = threading.Thread(target=lambda: got.append(staging.lease(soon())))
    closed.start()
    staging.close()
    closed.join(60)
    assert got[1] is None


def test_staging_that_holds_no_slot_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="make it at least 8192"):
        StagingPool(4096, 5000)


def test_pinned_staging_is_unpinned_on_close() -> None:
    events: list[str] = []

    def pin(address: int, nbytes: int) -> object:
        events.append(f"pin {nbytes}")
        return lambda: events.append("unpin")

    staging = StagingPool(8192, 4096, prefaulted=False, pin=pin)  # type: ignore[arg-type]
    staging.close()
    staging.close()
    assert events == ["pin 8192", "unpin"]


@given(st.integers(min_value=-2000, max_value=-1))
def test_every_negative_code_has_a_meaning_that_is_not_ok(code: int) -> None:
    assert status_of(code) is not Status.OK


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, Status.OK),
        (4096, Status.OK),
        (-200, Status.NO_SPACE),
        (-703, Status.BUSY),
        (-704, Status.MISSING),
        (-707, Status.LEASE_EXPIRED),
        (-800, Status.TRANSFER_FAILED),
        (-801, Status.CHECKSUM),
        (-900, Status.POOL_DOWN),
        (-901, Status.POOL_DOWN),
        (-1010, Status.POOL_DOWN),
        (-1103, Status.TRANSFER_FAILED),
        (-9999, Status.INTERNAL),
    ],
)
def test_codes_mean_what_mooncake_says(code: int, status: Status) -> None:
    assert status_of(code) is status


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("512MiB", 512 << 20), ("1.5KiB", 1536), ("1GB", 10**9), (77, 77), ("9", 9)]
)
def test_sizes_are_read_with_their_units(text: object, size: int) -> None:
    assert ByteSize.parse(text) == size


@pytest.mark.parametrize("text", ["4Gib3", "-1", -1, True, None, "GiB", "1 apple", 1.5])
def test_other_sizes_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        ByteSize.parse(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_size_reads_back_from_its_own_text(size: int) -> None:
    assert ByteSize.parse(str(ByteSize(size))) == size


def test_only_a_mapping_that_is_large_enough_is_prefaulted() -> None:
    maps = ["7f00-8000 rw-p 00000000 00:00 0\n", "8000-9000 r--p 00000000 00:00 0 /lib/x\n"]
    assert mapping_at(0x7F80, maps) == range(0x7F00, 0x8000)
    assert mapping_at(0x8010, maps) is None, "read-only"
    assert mapping_at(0xFFFF, maps) is None
    assert prefault_segment(1 << 40, None) is None
    staging = StagingPool(4096, 4096, prefaulted=False)
    assert prefault_segment(1 << 40, staging.address) is None
    staging.close()
