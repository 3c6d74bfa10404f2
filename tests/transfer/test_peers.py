"""When a silent peer is asked again, with the clock in hand."""

from __future__ import annotations

from transfer.peers import _MOST, TRIAL_S, Peers


def test_all_peers_may_be_asked_until_one_fails() -> None:
    peers = Peers(1.0)
    assert not peers.any_silent
    assert peers.may_ask("a", 0.0)
    assert peers.failed("a", 0.0)
    assert peers.any_silent
    assert not peers.may_ask("a", 0.5)
    assert peers.may_ask("b", 0.5)


def test_a_silent_peer_is_tried_by_one_caller_at_a_time_and_less_and_less_often() -> None:
    peers = Peers(1.0, longest_s=3.0)
    peers.failed("a", 0.0)
    assert peers.may_ask("a", 1.0)
    assert not peers.may_ask("a", 1.0), "the trial is under way"
    assert not peers.failed("a", 1.0), "it was silent before"
    peers.tried({"a"})
    assert not peers.may_ask("a", 2.9)
    assert peers.may_ask("a", 3.0)
    peers.failed("a", 3.0)
    peers.tried({"a"})
    assert peers.may_ask("a", 6.0), "never rarer than the longest pause"


def test_a_peer_that_delivers_is_like_any_other() -> None:
    peers = Peers(1.0)
    peers.failed("a", 0.0)
    assert peers.delivered("a")
    assert not peers.delivered("a")
    assert peers.may_ask("a", 0.0)
    assert not peers.any_silent


def test_one_trial_at_a_time_and_one_that_nobody_reported_on_is_followed_by_another() -> None:
    peers = Peers(1.0)
    peers.failed("a", 0.0)
    peers.failed("b", 0.0)
    assert peers.may_ask("a", 1.0)
    assert not peers.may_ask("b", 2.0), "trials never hold more than one thread"
    assert peers.may_ask("b", 1.0 + TRIAL_S)
    peers.failed("b", 1.0 + TRIAL_S)
    peers.tried({"b"})
    assert peers.may_ask("a", 1.0 + TRIAL_S), "reported on"


def test_reads_of_other_peers_do_not_end_a_trial() -> None:
    peers = Peers(1.0)
    peers.failed("a", 0.0)
    assert peers.may_ask("a", 1.0)
    peers.delivered("healthy")
    peers.failed("b", 1.0)
    peers.tried({"healthy", "b"})
    assert not peers.may_ask("a", 2.0)


def test_a_trial_that_told_nothing_is_over_when_its_read_is() -> None:
    peers = Peers(1.0)
    peers.failed("a", 0.0)
    assert peers.may_ask("a", 1.0)
    peers.tried({"a"})  # its objects were gone
    assert peers.may_ask("a", 1.1)


def test_a_peer_that_still_holds_a_thread_is_not_tried_with_another() -> None:
    peers = Peers(1.0)
    peers.failed("a", 0.0)
    assert not peers.may_ask("a", 1.0, busy={"a"})
    assert peers.may_ask("a", 1.0, busy={"b"})


def test_the_peers_that_are_remembered_are_bounded() -> None:
    peers = Peers(1.0)
    for number in range(_MOST + 10):
        peers.failed(str(number), 0.0)
    assert peers.may_ask("0", 0.0)
    assert not peers.may_ask(str(_MOST), 0.0)
