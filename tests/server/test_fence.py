"""The fence between an engine and a server that is late."""

import subprocess
import sys
import threading
from contextlib import closing
from functools import partial

import pytest

from pd_cache.server.fence import SLOTS, AbandonedError, Fence, FenceView
from tests.support.pool import ROOT
from tests.support.waiting import beside, wait_for


@pytest.fixture
def fence():
    with closing(Fence()) as one:
        yield one


@pytest.fixture
def view(fence):
    with closing(FenceView(fence.descriptor)) as other:
        yield other


def admit(fence, *, loads=True):
    return fence.admit(loads=loads)


def use_again(fence, slot):
    """Admits moves until one has this slot."""
    while (place := admit(fence))[0] != slot:
        fence.revoke(*place)
    return place


def refused(view, place):
    """Whether the server may neither write nor read."""
    for passing in (view.writing, view.reading):
        with pytest.raises(AbandonedError), passing(*place):
            raise AssertionError("passed without a ticket")
    return True


def test_a_move_passes_until_its_ticket_is_revoked(fence, view):
    place, other = admit(fence), admit(fence)
    for passing in (view.writing, view.reading, view.writing):
        with passing(*place):
            pass
    with view.writing(*place):
        assert not fence.revoke(*place), "the server is in the middle of a copy into the blocks"
        assert fence.revoke(*other), "slots are fenced one by one"
        assert refused(view, other)
    assert fence._page.lock(place[0]), "as in the middle of a revocation"
    with pytest.raises(AbandonedError), view.writing(*place):
        raise AssertionError("wrote while the engine took the ticket away")
    fence._page.unlock(place[0])
    assert fence.revoke(*place)
    assert refused(view, place)


@pytest.mark.parametrize("used_again", [False, True])
def test_a_ticket_to_read_is_revoked_at_once_and_the_reader_learns_of_it(fence, view, used_again):
    """As when a server was stopped in the middle of a store."""
    place = admit(fence, loads=False)

    def revoke():
        assert fence.revoke(*place)
        assert not used_again or use_again(fence, place[0])

    with pytest.raises(AbandonedError), view.reading(*place):
        revoke()
    assert refused(view, place)


@pytest.mark.parametrize("loads", [True, False])
def test_nothing_is_copied_after_a_revocation_however_the_two_race(fence, view, loads):
    for _ in range(200):
        place = admit(fence, loads=loads)
        blocks, used, started = [0], [0], threading.Event()

        def copy(place=place, blocks=blocks, used=used, started=started):
            started.set()
            try:
                while loads:
                    with view.writing(*place):
                        blocks[0] = 1
                while True:
                    with view.reading(*place):
                        read = blocks[0]
                    used[0] = read
            except AbandonedError:
                return

        with beside(copy):
            started.wait()
            wait_for(partial(fence.revoke, *place))
            blocks[0] = -1  # the engine's again
        assert (blocks[0], used[0]) == (-1, 0)


def test_close_takes_all_tickets_away_and_says_how_many_copies_it_could_not_end():
    with closing(Fence()) as fence, closing(FenceView(fence.descriptor)) as other:
        places = [admit(fence) for _ in range(3)]
        with other.writing(*places[1]):
            assert fence.close() == 1
            assert refused(other, places[0])
            assert not fence.revoke(*places[1]), "the server still writes"
            assert fence.admit(loads=True) is None
        assert fence.close() == 0
        for place in places:
            assert refused(other, place)
            assert fence.revoke(*place), "there is nothing left to wait for"


def test_a_slot_that_is_used_again_has_another_ticket(fence, view):
    old = admit(fence)
    fence.revoke(*old)
    new = use_again(fence, old[0])
    assert fence.revoke(*old), "nothing is left of the old move"
    assert len(fence._taken) == 1
    assert refused(view, old)
    with view.writing(*new):
        pass


def test_a_load_that_is_late_does_not_release_the_lock_of_its_slots_next_move(fence, view):
    """As when a server has two threads, was stopped, and goes on with a load that its engine gave up long
    ago."""
    old = admit(fence)
    fence.revoke(*old)
    new = use_again(fence, old[0])
    late = threading.Thread(target=refused, args=(view, old))
    with view.writing(*new):
        late.start()
        late.join(0.2)  # it may wait for its turn
        assert not fence.revoke(*new), "the server still writes"
    late.join()
    assert fence.revoke(*new)


def test_slots_are_bounded_and_come_back(fence):
    places = [admit(fence) for _ in range(SLOTS)]
    assert fence.admit(loads=True) is None
    assert len(fence._taken) == SLOTS
    for place in places:
        fence.revoke(*place)
    assert len(fence._taken) == 0


def test_the_lock_of_a_process_that_was_killed_in_the_middle_is_gone(fence):
    place = admit(fence)
    program = (
        "import sys, time; from pd_cache.server.fence import FenceView; view = FenceView(int(sys.argv[1]))\n"
        "with view.writing(int(sys.argv[2]), int(sys.argv[3])): print('inside', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, *map(str, (fence.descriptor, *place))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, pass_fds=[fence.descriptor]) as process:
        try:
            assert process.stdout.readline() == b"inside\n"
            assert not fence.revoke(*place)
        finally:
            process.kill()
    assert fence.revoke(*place)
