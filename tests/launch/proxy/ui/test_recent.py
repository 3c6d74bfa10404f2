"""The last hour's requests, with a clock of the test's own."""

from __future__ import annotations

import pytest

from launch.proxy.metrics import HopReport, Trip
from launch.proxy.ui.recent import MINUTES, SLOWEST, RecentRequests
from pd_cache.reasons import RequestReport


class Clock:
    def __init__(self) -> None:
        self.now = 10_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recent(clock: Clock) -> RecentRequests:
    return RecentRequests(clock)


def report(**fields: int) -> RequestReport:
    return RequestReport(asked=sum(fields.get(name, 0) for name in ("at_hand", "loaded", "computed")), **fields)


def trip(prefill: RequestReport | None, decode: RequestReport | None, client: str = "", to: str = "d") -> Trip:
    return Trip(client, (HopReport("prefill", "p", prefill), HopReport("decode", to, decode)))


def test_a_prompt_counts_where_it_came_first_and_not_again_at_the_decode_node(recent: RecentRequests) -> None:
    recent.note(
        "a",
        1.0,
        0.5,
        200,
        trip(
            report(at_hand=100, loaded=300, memory=100, pool=200, computed=50), report(loaded=449, pool=512, computed=1)
        ),
    )
    (minute,) = [one for one in recent.minutes() if one is not None]
    assert minute.sources == {"engine": 100, "memory": 100, "disk": 0, "pool": 200, "computed": 50}


def test_chunks_that_were_read_for_a_token_that_is_computed_do_not_count_as_more_than_was_loaded(
    recent: RecentRequests,
) -> None:
    recent.note("a", 1.0, 0.5, 200, Trip("", (HopReport("decode", "d", report(loaded=255, pool=256, computed=1)),)))
    (minute,) = [one for one in recent.minutes() if one is not None]
    assert (minute.sources["pool"], minute.sources["computed"]) == (255, 1)


def test_a_request_without_a_report_is_said_to_be_one(recent: RecentRequests) -> None:
    recent.note("a", 1.0, 0.5, 200, trip(None, report(loaded=100)))
    (minute,) = [one for one in recent.minutes() if one is not None]
    assert (minute.requests, minute.untold, minute.sources["pool"]) == (1, 1, 0)


def test_an_hour_of_minutes_is_kept_and_those_without_requests_are_blank(recent: RecentRequests, clock: Clock) -> None:
    for _ in range(100):
        clock.now += 120
        recent.note("a", 1.0, 0.5, 200, trip(report(computed=1), None))
    minutes = recent.minutes()
    assert len(minutes) == MINUTES
    assert sum(one is not None for one in minutes) == MINUTES // 2
    clock.now += 3600
    assert not any(recent.minutes())


def test_the_slowest_are_those_whose_first_byte_took_longest_within_the_hour(
    recent: RecentRequests, clock: Clock
) -> None:
    recent.note("long ago", 100.0, 100.0, 200, trip(None, None))
    clock.now += 3500
    for number in range(500):
        recent.note(f"{number}", 1000.0, float(number % 100), 200, trip(None, None))
    recent.note("no first byte", 99.5, None, 504, trip(None, None))
    found = recent.slowest()
    assert [one.request_id for one in found[:2]] == ["long ago", "no first byte"]
    assert len(found) == SLOWEST
    clock.now += 200
    assert recent.slowest()[0].request_id == "no first byte"
    clock.now += 3600
    assert recent.slowest() == []


def test_a_client_sees_its_own_slow_requests_only(recent: RecentRequests) -> None:
    recent.note("a", 1.0, 0.5, 200, trip(None, None, "alice"))
    recent.note("b", 1.0, 0.5, 200, trip(None, None, "bob"))
    assert [one.request_id for one in recent.slowest("bob")] == ["b"]
    assert len(recent.slowest()) == 2


def test_flows_are_of_the_last_two_minutes(recent: RecentRequests, clock: Clock) -> None:
    clock.now = 6000.0
    for _ in range(18):
        recent.note("a", 1.0, 0.5, 200, trip(report(computed=1), report(loaded=60, memory=40, pool=40)))
        clock.now += 10
    clock.now -= 30  # half of the third minute is over
    requests_s, flows = recent.lately()
    assert requests_s == pytest.approx(12 / 90)
    assert flows["p", "d"] == pytest.approx((12 / 90, 12 * 30 / 90)), "what it had in memory came from no other node"
    clock.now += 180
    assert recent.lately() == (0, {})


def test_what_is_kept_has_a_bound(recent: RecentRequests, clock: Clock) -> None:
    for number in range(20_000):
        recent.note(f"{number}", float(number), float(number), 200, trip(None, report(loaded=1), to=f"d{number}"))
        clock.now += 0.01 if number % 300 else 60
    kept = [minute for minute in recent.minutes() if minute is not None]
    assert sum(len(minute.flows) for minute in kept) <= 2 * 300
    assert sum(len(minute.slow) for minute in kept) <= MINUTES * SLOWEST
