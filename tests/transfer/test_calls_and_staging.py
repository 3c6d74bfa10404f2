"""Deadlines, quarantine, codes and sizes, without any pool."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.made import made
from tests.support.waiting import wait_for
from transfer.calls import CallThreads
from transfer.errors import Status, TransferError, status_of
from transfer.settings import ByteSize, TransferSettings
from transfer.staging import Quota, StagingPool, mapping_at, prefault_segment

PAGE = 4096


def soon(seconds=60.0):
    return time.monotonic() + seconds


class Held:
    """Threads whose calls `hold` until they are told to go on, and what calls have let go of, in order."""

    def __init__(self, count=1, **options):
        self.threads = CallThreads("test", count, **options)
        self.go_on = threading.Event()
        self.ended = []

    def submit(self, name, deadline, *, hold=False):
        """Submits a call that returns its name."""
        return self.threads.submit(self._run, deadline, lambda: self.ended.append(name), name, hold)

    def held(self, name, deadline):
        """Submits a call that holds a thread, which has begun it."""
        call = self.submit(name, deadline, hold=True)
        wait_for(lambda: call.started)
        return call

    def close(self):
        self.go_on.set()
        assert self.threads.close(60)

    def _run(self, name, hold):
        if hold:
            self.go_on.wait(60)
        return name


@pytest.fixture
def make_held():
    yield from made(Held, Held.close)


# --- calls --------------------------------------------------------------------------------------------------


def test_a_call_returns_its_value_and_raises_its_error(make_held):
    held = make_held()
    call = held.submit("a", soon())
    assert call.outcome("") == "a"
    assert call.outcome("") == "a", "a second look finds the same"
    broken = held.threads.submit(lambda: 1 // 0, soon())
    with pytest.raises(ZeroDivisionError):
        broken.outcome(0)


def test_a_call_that_outlives_its_deadline_keeps_what_it_was_given_until_it_returns(make_held):
    held = make_held()
    call = held.held("late", soon(0.1))
    assert call.outcome("nothing") == "nothing"
    call.abandon()
    assert held.ended == []
    assert held.submit("refused", soon()) is None, "every thread is held by an overdue call"
    assert held.ended == ["refused"]
    held.go_on.set()
    wait_for(lambda: held.ended == ["refused", "late"])


def test_a_queued_call_lets_go_at_its_deadline_or_when_nobody_waits_for_it_and_never_starts(make_held):
    held = make_held()
    held.held("running", soon())
    overdue, abandoned = held.submit("overdue", soon(0.01)), held.submit("abandoned", soon())
    assert overdue.outcome("nothing") == "nothing"
    assert held.ended == ["overdue"], "though the thread is still held"
    abandoned.abandon()
    abandoned.abandon()
    assert held.ended == ["overdue", "abandoned"]
    assert abandoned.outcome("nothing") == "nothing"
    held.go_on.set()
    wait_for(lambda: held.ended == ["overdue", "abandoned", "running"])
    assert not overdue.started
    assert not abandoned.started


def test_a_call_that_nobody_looked_at_does_not_start_after_its_deadline(make_held):
    held = make_held()
    held.held("running", soon())
    overdue = held.submit("overdue", soon(0.01))
    wait_for(lambda: time.monotonic() > overdue.deadline)
    held.go_on.set()
    wait_for(lambda: held.ended == ["running", "overdue"])
    assert not overdue.started


def test_spare_threads_take_the_place_of_late_ones_and_go_when_these_are_back(make_held):
    held = make_held(spare=1)
    held.held("late", soon(0.05))
    queued = held.submit("queued", soon())
    assert queued.outcome("") == "queued", (
        "one peer that hangs does not hold up the others, though it was not yet late"
    )
    held.held("late, too", soon(0.05))
    wait_for(lambda: held.threads.late == 2)
    assert held.submit("refused", soon()) is None, "at most one spare"
    before = threading.active_count()
    held.go_on.set()
    wait_for(lambda: threading.active_count() == before - 1, "the spare thread's end")
    again = held.submit("again", soon())
    assert again.outcome("") == "again"


def test_a_call_lets_go_if_no_spare_thread_can_be_started(make_held, monkeypatch):
    held = make_held(spare=1)
    held.held("late", soon(0.01))
    wait_for(lambda: held.threads.late == 1)

    def refused(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert held.submit("refused", soon()) is None
    assert held.ended == ["refused"]


def test_a_full_queue_and_closed_threads_refuse_and_close_reports_what_still_runs(make_held):
    held = make_held(limit=3)
    held.held("running", soon())
    calls = [held.submit(name, soon()) for name in ("second", "third", "refused")]
    assert [call is None for call in calls] == [False, False, True]
    assert held.ended == ["refused"]
    assert held.threads.close(0.05) is False
    assert held.submit("after close", soon()) is None
    held.go_on.set()
    assert held.threads.close(60) is True
    assert held.ended == ["refused", "after close", "running", "second", "third"]


# --- slots --------------------------------------------------------------------------------------------------


@pytest.fixture
def make_staging():
    def end(staging):
        staging.check_integrity()
        staging.close()

    yield from made(
        lambda slots, **options: StagingPool(slots * PAGE, PAGE, prefaulted=False, **options), end
    )


def lease(staging, quota=None):
    slot = staging.lease(soon(), quota)
    assert slot is not None
    return slot


def all_free(staging, quota=None):
    """Leases what can be had without waiting."""
    slots = []
    while (slot := staging.lease(0.0, quota)) is not None:
        slots.append(slot)
    return slots


def test_a_slot_returns_to_the_pool_with_its_last_reference(make_staging):
    staging = make_staging(4)
    slot = all_free(staging)[0]
    slot.retain()
    slot.release()
    assert staging.lease(0.0) is None
    slot.release()
    again = staging.lease(0.0)
    assert again.address == slot.address
    again.release()
    with pytest.raises(TransferError, match="more often"):
        slot.release()
    with pytest.raises(TransferError, match="last reference"):
        slot.retain()


def test_the_last_slots_of_the_pool_and_of_a_quota_are_left_to_leases_that_wait(make_staging):
    staging = make_staging(8, headroom=2)
    assert len(all_free(staging)) == 6
    assert {lease(staging), lease(staging)}
    staging = make_staging(8)
    puts = Quota(4, headroom=1)
    ahead = all_free(staging, puts)
    assert len(ahead) == 3
    waited = lease(staging, puts)
    assert staging.lease(soon(0.01), puts) is None
    assert len(all_free(staging)) == 4, "others have the rest"
    waited.settle()
    waited.settle()
    assert staging.lease(soon(0.01), puts) is None, "the quota has room, the pool has none"
    waited.release()
    assert lease(staging, puts)
    ahead[0].retain()
    ahead[0].release()
    assert staging.lease(soon(0.01), puts) is None, "a call has it still"
    ahead[0].release()
    assert lease(staging, puts)


@pytest.mark.parametrize("how", ["settle", "release"])
def test_a_waiting_lease_gets_what_another_gives_back_in_its_quota(make_staging, how):
    staging = make_staging(3 if how == "settle" else 2)
    quotas = [Quota(1), Quota(1)]
    first = [lease(staging, quota) for quota in quotas]
    got = []

    def wait(name, quota):
        got.append(name if staging.lease(soon(), quota) is not None else "nothing")

    waiters = [
        threading.Thread(target=wait, args=(name, quota)) for name, quota in zip("ab", quotas, strict=True)
    ]
    for waiter in waiters:
        waiter.start()
    getattr(first[1], how)()
    waiters[1].join(60)
    assert got == ["b"]
    staging.close()
    waiters[0].join(60)
    assert got == ["b", "nothing"], "a closed pool lends nothing"
    assert staging.lease(0.0) is None


class Registry:
    """What a client was asked to register; negative ints are codes."""

    def __init__(self, code=0):
        self.code = code
        self.registered = []

    def register_buffer(self, address, size):
        self.registered.append(size)
        return self.code


def test_forfeited_memory_is_never_leased_again_and_other_memory_takes_its_place(make_staging):
    staging, client = make_staging(4), Registry()
    slots = all_free(staging)
    lost = slots[:2]
    lost[0].view[:4] = b"read"
    assert staging.register(client) == 0
    staging.forfeit(lost)
    staging.forfeit(lost)
    assert client.registered == [4 * PAGE, 2 * PAGE], "all of it, and once as much as was lost"
    assert bytes(lost[0].view[:4]) == b"read", "its holder may still read it"
    addresses = {slot.address for slot in lost}
    for slot in slots:
        slot.release()
    assert staging.in_use == 0
    again = all_free(staging)
    assert len(again) == 4
    assert addresses.isdisjoint(slot.address for slot in again)
    lost[0].view[:4] = b"late"  # a late write finds its memory, and hurts nobody
    assert all(bytes(slot.view[:4]) != b"late" for slot in again)


def test_memory_that_cannot_be_replaced_or_was_replaced_too_often_makes_the_pool_smaller(make_staging):
    staging = make_staging(4)
    slot = lease(staging)
    moody = Registry()
    assert staging.register(moody) == 0
    moody.code = -600
    assert staging.register(Registry(-600)) == -600
    staging.forfeit([slot])
    slot.release()
    assert staging.slots == len(all_free(staging)) == 3
    one, client = make_staging(1), Registry()
    one.register(client)
    while (slot_left := one.lease(0.0)) is not None:
        one.forfeit([slot_left])
    assert len(client.registered) == 1 + 8
    assert one.slots == 0


def test_memory_that_took_the_place_of_other_memory_is_known_to_every_client_that_is_open(make_staging):
    staging, clients = make_staging(4), [Registry(), Registry(), Registry()]
    slots = all_free(staging)
    for client in clients[:2]:
        staging.register(client)
    staging.forfeit(slots[:1])
    staging.forget(clients[0])  # it is closed, and would crash
    staging.forfeit(slots[1:2])
    staging.register(clients[2])
    assert [client.registered for client in clients] == [
        [4 * PAGE, PAGE], [4 * PAGE, PAGE, PAGE], [4 * PAGE, PAGE, PAGE],
    ]  # fmt: skip


def test_pinned_memory_is_unpinned_on_close_and_never_given_back_to_the_kernel():
    events = []

    def pin(address, nbytes):
        events.append(f"pin {nbytes}")
        return lambda: events.append("unpin")

    staging = StagingPool(2 * PAGE, PAGE, prefaulted=False, pin=pin)
    slot = lease(staging)
    slot.view[:4] = b"read"
    staging.forfeit([slot])
    slot.release()
    assert bytes(slot.view[:4]) == b"read", "a GPU may still have its pages"
    staging.close()
    staging.close()
    assert events == [f"pin {2 * PAGE}", f"pin {PAGE}", "unpin", "unpin"]


def test_staging_that_holds_no_slot_says_what_it_needs():
    with pytest.raises(ValueError, match="make it at least 8192"):
        StagingPool(PAGE, 5000)


def test_only_a_mapping_that_is_large_enough_is_prefaulted(make_staging, caplog):
    maps = ["7f00-8000 rw-p 00000000 00:00 0\n", "8000-9000 r--p 00000000 00:00 0 /lib/x\n"]
    assert mapping_at(0x7F80, maps) == range(0x7F00, 0x8000)
    assert mapping_at(0x8010, maps) is None, "read-only"
    assert mapping_at(0xFFFF, maps) is None
    for base in (None, make_staging(1).address):
        prefault_segment(1 << 40, base)
    assert caplog.text.count("not prefaulted") == 2


# --- codes and sizes ----------------------------------------------------------------------------------------


@given(st.integers(min_value=-2000, max_value=-1))
def test_every_negative_code_has_a_meaning_that_is_not_ok(code):
    assert status_of(code) is not Status.OK


def test_codes_mean_what_mooncake_says():
    assert {code: status_of(code) for code in (0, 4096, -200, -703, -704, -707, -800, -801, -900, -901, -1010, -1103, -9999)} == {
        0: Status.OK, 4096: Status.OK, -200: Status.NO_SPACE, -703: Status.BUSY, -704: Status.MISSING,
        -707: Status.LEASE_EXPIRED, -800: Status.TRANSFER_FAILED, -801: Status.CHECKSUM, -900: Status.POOL_DOWN,
        -901: Status.POOL_DOWN, -1010: Status.POOL_DOWN, -1103: Status.TRANSFER_FAILED, -9999: Status.INTERNAL,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text, size",
    [
        *[("4GiB", 4 << 30), ("512MiB", 512 << 20), ("1.5KiB", 1536), ("1GB", 10**9), (77, 77), ("9", 9)],
        *[(text, 64 << 30) for text in ("64G", "64Gi", "64 GiB", "64g")],
        *[(text, None) for text in ("4Gib3", "-1", -1, True, None, "GiB", "1 apple", 1.5)],
    ],
)
def test_sizes_are_read_with_their_units_and_others_refused(text, size):
    if size is not None:
        assert ByteSize(text) == size
        assert TransferSettings(staging_size=text).staging_size == size
    else:
        with pytest.raises(ValueError, match="expected a size"):
            ByteSize(text)
        with pytest.raises(ValueError, match=r"staging_size: .* a size such as 512MiB"):
            TransferSettings(staging_size=text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_size_reads_back_from_its_own_text(size):
    assert ByteSize(str(ByteSize(size))) == size
