"""Which answers a soak calls late, and what it excuses."""

from __future__ import annotations

from typing import Any

from bench.suites.soak.judge import ALLOWANCE_S, TICK_S, Span, Ticker, seconds_late
from bench.suites.soak.leaks import DESCRIPTORS, Footprint, grown
from bench.suites.soak.ledger import Ledger
from bench.suites.soak.verdict import SoakOutcome


def test_an_answer_has_its_deadline_and_the_allowance() -> None:
    assert seconds_late(Span(10, 13), 3.0) == 0
    assert seconds_late(Span(10, 13 + ALLOWANCE_S), 3.0) == 0
    assert seconds_late(Span(10, 14 + ALLOWANCE_S), 3.0) == 1


def test_time_that_was_taken_from_the_caller_does_not_count_but_no_more_than_that() -> None:
    answer = Span(100, 160)
    assert seconds_late(answer, 3.0, stops=[Span(90, 170)]) == 0
    assert seconds_late(answer, 3.0, stops=[Span(90, 110), Span(150, 155)]) == 60 - 3 - ALLOWANCE_S - 15
    assert seconds_late(answer, 3.0, starved=40) == 60 - 3 - ALLOWANCE_S - 40
    assert seconds_late(answer, 3.0, stops=[Span(0, 90)], ticks=[Span(170, 200)]) == 60 - 3 - ALLOWANCE_S


def test_a_ticker_notes_when_the_machine_stood_still_and_nothing_else() -> None:
    ticker = Ticker()
    for now in (0.0, TICK_S, 2 * TICK_S, 5.0, 5.0 + TICK_S):
        ticker.tick(now)
    assert ticker.late == [Span(2 * TICK_S, 5.0)]


def _end(lane: str, begin: float, end: float, **changes: Any) -> dict[str, Any]:
    usual = {
        "e": "end", "lane": lane, "n": 4, "kind": "retrieve", "bound": 1.0, "begin": begin, "end": end, "starved": 0.0, "hit": 0,
        "compared": 100, "tokens": 0, "weights": 0, "wrong": 0, "first": [], "complaint": "", "raised": False, "prompt": None,
    }  # fmt: skip
    return {**usual, **changes}


def test_only_the_stops_of_its_own_process_excuse_an_answer() -> None:
    ledger = Ledger()
    ledger.event("engine-a", _end("engine-a/0", 100, 130))
    assert len(ledger.late({"store-0": [Span(90, 140)]}, [])) == 1
    assert not ledger.late({"engine-a": [Span(90, 140)]}, [])


def test_an_operation_that_is_never_answered_is_overdue_unless_its_process_ended() -> None:
    ledger = Ledger()
    ledger.event("engine-b", {"e": "begin", "lane": "engine-b/1", "n": 7, "kind": "store", "bound": 2.0, "t": 50.0})
    assert not ledger.overdue(51.0, 1.0, {})
    assert "engine-b/1 store 7" in ledger.overdue(100.0, 1.0, {})[0]
    assert ledger.next_of("engine-b") == {"engine-b/1": 8}
    ledger.forget("engine-b")
    assert not ledger.overdue(100.0, 1.0, {})


def test_a_wrong_slot_an_exception_and_an_impossible_answer_each_fail_the_run() -> None:
    for changes in ({"wrong": 3}, {"raised": True, "complaint": "OSError"}, {"complaint": "lookup answered 3 of 16"}):
        ledger = Ledger()
        ledger.event("engine-a", _end("engine-a/0", 1, 2, **changes))
        outcome = SoakOutcome(
            seed=1, minutes=1, wrong=ledger.wrong, wrong_slots=ledger.wrong_slots, raised=ledger.raised
        )
        assert outcome.failed
    assert not SoakOutcome(seed=1, minutes=1).failed


def test_more_descriptors_than_allowed_is_a_leak_and_a_node_that_is_gone_is_one() -> None:
    before = {"proxy": Footprint(1, 20, 8, 100 << 20), "cache": Footprint(1, 20, 8, 100 << 20)}
    after = {"proxy": Footprint(1, 21 + DESCRIPTORS, 8, 100 << 20)}
    assert grown(before, {**before}) == []
    found = grown(before, after)
    assert len(found) == 2
    assert "descriptors" in found[0]
    assert "does not run" in found[1]


def test_a_load_of_earlier_weights_is_wrong_from_a_second_after_their_reset_on() -> None:
    ledger = Ledger()
    for number, end in ((1, 50.0), (2, 60.0)):
        ledger.event("engine-b", {"e": "reset", "number": number, "taken": True, "complaint": "", "end": end})
    ledger.event("engine-a", _end("engine-a/0", 49.0, 55.0, tokens=16, weights=0))
    ledger.event("engine-a", _end("engine-a/0", 60.9, 61.0, tokens=16, weights=1))
    ledger.event("engine-a", _end("engine-a/0", 99.0, 99.1, tokens=16, weights=2))
    ledger.event("engine-a", _end("engine-a/0", 99.0, 99.1, tokens=0, weights=0))
    assert (ledger.wrong, round(ledger.latest_old_s, 3)) == ([], 0.9)
    ledger.event("engine-a", _end("engine-a/1", 51.1, 51.2, tokens=16, weights=0))
    (wrong,) = ledger.wrong
    assert "KV of weights 0, 1.10 s after their reset" in wrong
