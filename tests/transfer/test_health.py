"""When a pool counts as down, and when a silent peer is asked again, with the clock in hand."""

from transfer.health import FORGOTTEN_S, TRIAL_S, CircuitBreaker, Peers
from transfer.settings import BreakerSettings, TransferSettings


def test_a_silent_peer_is_tried_by_one_caller_at_a_time_and_less_and_less_often_until_it_delivers():
    peers = Peers(1.0, longest_s=3.0)
    assert not peers.any_silent(0.0)
    assert peers.may_ask("a", 0.0)
    peers.failed("a", 0.0)
    assert peers.any_silent(0.0)
    assert not peers.may_ask("a", 0.5)
    assert peers.may_ask("b", 0.5)
    for trial, too_early in ((1.0, 2.9), (3.0, 5.9), (6.0, 8.9)):
        assert peers.may_ask("a", trial)
        assert not peers.may_ask("a", trial), "the trial is under way"
        peers.failed("a", trial)
        peers.tried({"a"})
        assert not peers.may_ask("a", too_early)
    assert peers.may_ask("a", 9.0), "never rarer than the longest pause"
    peers.delivered("a")
    assert peers.may_ask("a", 0.0)
    assert not peers.any_silent(0.0)


def test_one_trial_at_a_time_and_one_that_nobody_reported_on_is_followed_by_another():
    peers = Peers(1.0)
    peers.failed("a", 0.0)
    peers.failed("b", 0.0)
    assert peers.may_ask("a", 1.0)
    peers.delivered("healthy")
    peers.tried({"healthy", "b"})
    assert not peers.may_ask("b", 2.0), (
        "trials never hold more than one thread, and reads of other peers end none"
    )
    assert peers.may_ask("b", 1.0 + TRIAL_S)
    peers.tried({"b"})  # its objects were gone
    assert peers.may_ask("b", 1.1 + TRIAL_S), "it told nothing, and is over"
    peers.failed("b", 1.1 + TRIAL_S)
    peers.tried({"b"})
    assert peers.may_ask("a", 1.1 + TRIAL_S), "reported on"


def test_a_peer_that_still_holds_a_thread_is_not_tried_with_another():
    peers = Peers(1.0)
    peers.failed("a", 0.0)
    assert not peers.may_ask("a", 1.0, busy={"a"})
    assert peers.may_ask("a", 1.0, busy={"b"})


def test_a_peer_that_is_gone_from_the_pool_is_forgotten_and_one_that_still_has_objects_is_not():
    """Otherwise each read would ask the master where its objects lie, for the life of the process."""
    peers = Peers(1.0, longest_s=1000.0)
    peers.failed("gone", 0.0)
    peers.failed("stopped", 0.0)
    for now in range(10, 91, 10):
        if peers.may_ask("stopped", float(now)):
            peers.failed("stopped", float(now))
            peers.tried({"stopped"})
    assert peers.any_silent(91.0)
    assert peers.may_ask("gone", 91.0)
    assert not peers.may_ask("stopped", 91.0)
    assert not peers.any_silent(91.0 + FORGOTTEN_S + 1)


def test_the_breaker_opens_after_calls_in_a_row_that_nothing_answered():
    breaker = CircuitBreaker("a pool", TransferSettings(breaker=BreakerSettings(failures=3)))
    down, missing, failed_transfer = [-900, -900], [-900, -704], [-800]
    for codes, opened in (
        (down, False),
        (down, False),
        (missing, False),  # an answer
        (down, False),
        (down, False),
        (failed_transfer, False),  # says nothing about the master
        (down, True),
        (down, True),
        ([1, 0], False),
    ):
        breaker.learn("a call", codes)
        assert breaker.down is opened


def test_a_time_out_counts_only_if_the_call_had_a_fair_time():
    breaker = CircuitBreaker("a pool", TransferSettings(breaker=BreakerSettings(failures=1)))
    breaker.timed_out("a call", 0.1)
    assert not breaker.down
    breaker.timed_out("a call", 0.5)
    assert breaker.down
    assert breaker.well_until == 0.0
