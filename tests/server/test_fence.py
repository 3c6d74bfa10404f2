"""The fence between an engine and a server that is late."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from pd_cache.server.fence import SLOTS, AbandonedError, Fence, FenceView
from pd_cache.server.memory import sealed_memory
from tests.support.pool import ROOT
from tests.support.waiting import wait_for


@pytest.fixture
def fence() -> Iterator[Fence]:
    one = Fence()
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def view(fence: Fence) -> Iterator[FenceView]:
    other = FenceView(fence.descriptor)
    try:
        yield other
    finally:
        other.close()


def test_who_has_a_ticket_passes_until_it_is_revoked(fence: Fence, view: FenceView) -> None:
    place = fence.admit(loads=True)
    assert place is not None
    for _ in range(2):
        with view.writing(*place):
            pass
    assert fence.revoke(*place)
    with pytest.raises(AbandonedError), view.writing(*place):
        raise AssertionError("passed without a ticket")


def test_a_ticket_cannot_be_revoked_while_somebody_passes(fence: Fence, view: FenceView) -> None:
    slot, ticket = fence.admit(loads=True) or (0, 0)
    with view.writing(slot, ticket):
        assert not fence.revoke(slot, ticket)
    assert fence.revoke(slot, ticket)


def revoke(fence: Fence, slot: int, ticket: int, used_again: bool) -> None:
    assert fence.revoke(slot, ticket)
    assert not used_again or use_again(fence, slot)


def use_again(fence: Fence, slot: int) -> tuple[int, int]:
    """Admits moves until one has this slot."""
    while (place := fence.admit(loads=True)) is not None and place[0] != slot:
        fence.revoke(*place)
    assert place is not None
    return place


def test_a_ticket_to_read_is_revoked_at_once_and_the_reader_learns_of_it(fence: Fence, view: FenceView) -> None:
    """As when a server was stopped in the middle of a store."""
    slot, ticket = fence.admit(loads=False) or (0, 0)
    with view.reading(slot, ticket):
        pass
    for used_again in (False, True):
        slot, ticket = fence.admit(loads=False) or (0, 0)
        with pytest.raises(AbandonedError), view.reading(slot, ticket):
            revoke(fence, slot, ticket, used_again)
    with pytest.raises(AbandonedError), view.reading(slot, ticket):
        raise AssertionError("began to read without a ticket")


def test_what_is_read_while_a_ticket_is_revoked_is_never_used_however_the_two_race(
    fence: Fence, view: FenceView
) -> None:
    for _ in range(200):
        slot, ticket = fence.admit(loads=False) or (0, 0)
        blocks, used, started = [ticket], [], threading.Event()

        def copy(slot=slot, ticket=ticket, blocks=blocks, used=used, started=started) -> None:  # type: ignore[no-untyped-def]
            started.set()
            try:
                while True:
                    with view.reading(slot, ticket):
                        read = blocks[0]
                    used.append(read)
            except AbandonedError:
                return

        copier = threading.Thread(target=copy)
        copier.start()
        started.wait()
        assert fence.revoke(slot, ticket)
        blocks[0] = -1  # the engine's again
        copier.join()
        assert -1 not in used


def test_close_takes_all_tickets_away(view: FenceView) -> None:
    fence = Fence()
    other = FenceView(fence.descriptor)
    try:
        places = [fence.admit(loads=True) for _ in range(3)]
        assert all(places)
        assert fence.close() == 0
        for place in places:
            assert place is not None
            with pytest.raises(AbandonedError), other.writing(*place):
                raise AssertionError("passed after close()")
            assert fence.revoke(*place), "there is nothing left to wait for"
    finally:
        other.close()


def test_close_says_how_many_copies_it_could_not_end_and_ends_them_later() -> None:
    fence = Fence()
    other = FenceView(fence.descriptor)
    try:
        slot, ticket = fence.admit(loads=True) or (0, 0)
        with other.writing(slot, ticket):
            assert fence.close() == 1
            assert not fence.revoke(slot, ticket), "the server still writes"
            assert fence.admit(loads=True) is None
        assert fence.close() == 0
        with pytest.raises(AbandonedError), other.writing(slot, ticket):
            raise AssertionError("passed after close()")
    finally:
        other.close()
        fence.close()


def test_slots_are_fenced_one_by_one(fence: Fence, view: FenceView) -> None:
    one, other = fence.admit(loads=True), fence.admit(loads=True)
    assert one is not None
    assert other is not None
    with view.writing(*one):
        assert fence.revoke(*other)
        with pytest.raises(AbandonedError), view.writing(*other):
            raise AssertionError("passed without a ticket")


def test_a_slot_that_is_used_again_has_another_ticket(fence: Fence, view: FenceView) -> None:
    old = fence.admit(loads=True)
    assert old is not None
    fence.revoke(*old)
    new = use_again(fence, old[0])
    assert fence.revoke(*old), "as after an interrupt, when nobody knows whether it was revoked"
    assert fence.taken == 1
    with pytest.raises(AbandonedError), view.writing(*old):
        raise AssertionError("passed with an old ticket")
    with view.writing(*new):
        pass


def test_a_load_that_is_late_does_not_release_the_lock_of_its_slots_next_move(fence: Fence, view: FenceView) -> None:
    """As when a server has two threads, was stopped, and goes on with a load that its engine gave up long ago."""
    old = fence.admit(loads=True)
    assert old is not None
    fence.revoke(*old)
    new = use_again(fence, old[0])

    def write_late() -> None:
        with pytest.raises(AbandonedError), view.writing(*old):
            raise AssertionError("passed with an old ticket")

    late = threading.Thread(target=write_late)
    with view.writing(*new):
        late.start()
        late.join(0.2)  # it may wait for its turn
        assert not fence.revoke(*new), "the server still writes"
    late.join()
    assert fence.revoke(*new)


def test_slots_are_bounded_and_come_back(fence: Fence) -> None:
    places = [fence.admit(loads=True) for _ in range(SLOTS)]
    assert fence.admit(loads=True) is None
    assert fence.taken == SLOTS
    for place in places:
        assert place is not None
        fence.revoke(*place)
    assert fence.taken == 0


def test_the_lock_of_a_process_that_was_killed_in_the_middle_is_gone(fence: Fence) -> None:
    slot, ticket = fence.admit(loads=True) or (0, 0)
    program = (
        "import sys, time; from pd_cache.server.fence import FenceView; view = FenceView(int(sys.argv[1]))\n"
        "with view.writing(int(sys.argv[2]), int(sys.argv[3])): print('inside', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(fence.descriptor), str(slot), str(ticket)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        pass_fds=[fence.descriptor],
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == b"inside\n"
            assert not fence.revoke(slot, ticket)
        finally:
            process.kill()
            process.wait()
    assert fence.revoke(slot, ticket)


def test_nothing_is_written_after_a_revocation_however_the_two_race(fence: Fence, view: FenceView) -> None:
    blocks = [0]
    for _ in range(200):
        slot, ticket = fence.admit(loads=True) or (0, 0)
        started = threading.Event()

        def copy(slot: int = slot, ticket: int = ticket, started: threading.Event = started) -> None:
            started.set()
            try:
                while True:
                    with view.writing(slot, ticket):
                        blocks[0] = ticket
            except AbandonedError:
                return

        copier = threading.Thread(target=copy)
        copier.start()
        started.wait()
        wait_for(lambda slot=slot, ticket=ticket: fence.revoke(slot, ticket))  # type: ignore[misc]
        blocks[0] = -1  # the engine's again
        copier.join()
        assert blocks[0] == -1


def test_a_file_that_is_no_fence_is_refused(fence: Fence) -> None:
    descriptor = sealed_memory("other", 1 << 20)
    try:
        os.pwrite(descriptor, bytes(1 << 20), 0)
        with pytest.raises(ValueError, match="a fence has"):
            FenceView(descriptor)
    finally:
        os.close(descriptor)
