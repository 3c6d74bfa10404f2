"""The last hour's requests, with a clock of the test's own."""

import pytest

from launch.openai import RecentReports
from launch.proxy.trips import HopReport, Trip
from launch.proxy.ui.recent import MINUTES, SLOWEST, EndedRequest, RecentRequests, first_token_within
from pd_cache.reasons import RequestReport
from tests.support.waiting import Clock


@pytest.fixture
def clock():
    return Clock(6000.0)


@pytest.fixture
def recent(clock):
    return RecentRequests(clock)


def report(**fields):
    return RequestReport(
        asked=sum(fields.get(name, 0) for name in ("at_hand", "loaded", "computed")), **fields
    )


def trip(prefill, decode=None, client=""):
    return Trip(client, (HopReport("prefill", "p", prefill), HopReport("decode", "d", decode)))


def note(recent, *reports):
    """Some request has ended, with these reports."""
    recent.note(EndedRequest("a", 1.0, 0.5, 200, trip(*reports)))


@pytest.mark.parametrize(
    "found, expected",
    [
        (report(at_hand=100, loaded=300, memory=100, pool=200, computed=50), (0, 100, 100, 0, 200, 50)),
        # a chunk was read for a token that is computed
        (report(loaded=255, pool=256, computed=1), (0, 0, 0, 0, 255, 1)),
        (None, (1, 0, 0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_a_prompt_counts_where_it_came_first_and_not_again_at_the_decode_node(recent, found, expected):
    note(recent, found, report(loaded=449, pool=512, computed=1))
    (minute,) = [one for one in recent.minutes() if one is not None]
    assert (minute.untold, *minute.sources.values()) == expected


def test_an_hour_of_minutes_is_kept_and_those_without_requests_are_blank(recent, clock):
    for _ in range(100):
        clock.now += 120
        note(recent, report(computed=1))
    minutes = recent.minutes()
    assert len(minutes) == MINUTES
    assert sum(one is not None for one in minutes) == MINUTES // 2
    clock.now += 3600
    assert not any(recent.minutes())


def test_the_slowest_are_those_whose_first_byte_took_longest_within_the_hour(recent, clock):
    recent.note(EndedRequest("long ago", 100.0, 100.0, 200, trip(None, client="alice")))
    clock.now += 3500
    for number in range(500):
        recent.note(EndedRequest(f"{number}", 1000.0, float(number % 100), 200, trip(None)))
    recent.note(EndedRequest("no first byte", 99.5, None, 504, trip(None)))
    found = recent.slowest()
    assert [one.request_id for one in found[:2]] == ["long ago", "no first byte"]
    assert len(found) == SLOWEST
    assert [one.request_id for one in recent.slowest("alice")] == ["long ago"], "a client sees its own"
    clock.now += 200
    assert recent.slowest()[0].request_id == "no first byte"
    clock.now += 3600
    assert recent.slowest() == []


def test_the_rate_is_that_of_the_present_minute_and_the_last(recent, clock):
    for _ in range(18):
        note(recent, report(computed=1))
        clock.now += 10
    clock.now -= 30  # half of the third minute is over
    assert recent.rate() == pytest.approx(12 / 90)
    clock.now += 180
    assert recent.rate() == 0


def test_what_is_kept_has_a_bound(recent, clock):
    for number in range(20_000):
        recent.note(
            EndedRequest(f"{number}", float(number), float(number), 200, trip(None, report(loaded=1)))
        )
        clock.now += 0.001 if number % 2000 else 60
    kept = [minute for minute in recent.minutes() if minute is not None]
    assert sum(len(minute.slow) for minute in kept) <= MINUTES * SLOWEST


def test_failures_are_counted_by_status_and_are_not_without_a_report(recent):
    for status in (200, 404, 503, 503):
        recent.note(EndedRequest("a", 1.0, None, status, Trip("", ())))
    (minute,) = [one for one in recent.minutes() if one is not None]
    assert (dict(minute.failed), minute.untold) == ({404: 1, 503: 2}, 1)


def test_first_token_times_are_those_of_streams(recent, clock):
    assert first_token_within(recent.minutes(), 0.5) is None
    for number in range(1, 101):
        recent.note(EndedRequest("a", 60.0, number / 100, 200, trip(None), streamed=True))
        recent.note(
            EndedRequest("a", 60.0, 50.0, 200, trip(None))
        )  # not streamed: its first byte is not its first token
        clock.now += 1
    assert first_token_within(recent.minutes(), 0.5) == 0.51
    assert first_token_within(recent.minutes(), 0.99) == 1.0


def test_hits_saved_what_they_would_have_taken_at_the_pace_of_misses(recent):
    recent.note(EndedRequest("hit", 9.0, 9.0, 200, trip(report(loaded=900, computed=100)), prefill_s=0.5))
    assert recent.saved_s() is None, "no prompt without hits to compare it with"
    recent.note(EndedRequest("miss", 9.0, 9.0, 200, trip(report(computed=500)), prefill_s=1.0))
    recent.note(EndedRequest("not streamed", 9.0, 9.0, 200, trip(report(computed=500))))
    assert recent.saved_s() == pytest.approx(1000 * 1.0 / 500 - 0.5)


def test_only_the_last_reports_are_kept():
    recent = RecentReports(most=2)
    for number, name in enumerate(("a", "b", "a", "c")):
        recent.note(name, number)
    assert [recent.get(name) for name in ("a", "b", "c", "d")] == [2, None, 3, None]
