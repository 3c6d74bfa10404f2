"""What `top` shows of recorded answers, in which order, and what keys do. No node is asked, and the clock is a number."""

from __future__ import annotations

import pytest

from launch.figures import NodeReading
from launch.masters import Segment
from launch.top.asker import NodeAnswer
from launch.top.watched import WatchedCluster
from pd_cache.cluster import NodeRecord

PREFILL = NodeRecord(name="prefill-0", role="prefill", address="http://10.0.0.1:8100")
DECODE = NodeRecord(name="decode-0", role="decode", address="http://10.0.0.2:8200")
STORE = NodeRecord(name="store-0", role="store", address="10.0.0.3:50052")
MASTER = NodeRecord(name="master", role="master", address="10.0.0.1:50051", metrics="http://10.0.0.1:9003")


def answer(name: str, at: float, load: float = 0.0, **fields: object) -> NodeAnswer:
    return NodeAnswer(name, at, NodeReading(at=at, counts={("bytes", "retrieve"): load}, **fields))  # type: ignore[arg-type]


@pytest.fixture
def watched() -> WatchedCluster:
    found = WatchedCluster()
    found.update([DECODE, MASTER, PREFILL, STORE])
    found.take([answer("prefill-0", 0.0), answer("decode-0", 0.0)])
    found.take([answer("prefill-0", 2.0, 200.0), answer("decode-0", 2.0, 800.0)])
    return found


def names(watched: WatchedCluster, now: float = 2.0) -> list[str]:
    return [row.name for row in watched.rows(now)]


def test_rows_stand_in_the_order_of_a_requests_way(watched: WatchedCluster) -> None:
    assert names(watched) == ["prefill-0", "decode-0", "store-0", "master"]
    watched.press("reverse", 2.0)
    assert names(watched) == ["master", "store-0", "decode-0", "prefill-0"]


def test_s_sorts_by_the_next_figure_and_nodes_without_it_come_last(watched: WatchedCluster) -> None:
    for _ in range(2):
        watched.press("sort", 2.0)
    assert watched.order == "load"
    assert names(watched) == ["decode-0", "prefill-0", "store-0", "master"]
    watched.press("reverse", 2.0)
    assert names(watched) == ["prefill-0", "decode-0", "store-0", "master"]


def test_a_node_that_does_not_answer_is_silent_says_why_and_shows_no_figures(watched: WatchedCluster) -> None:
    watched.take([NodeAnswer("decode-0", 4.0, None, "refused")])
    row = watched.rows(5.0)[1]
    assert (row.state, row.why, row.silent_s, row.rates, row.reading) == ("silent", "refused", 3.0, None, None)
    watched.take([answer("decode-0", 6.0, 900.0)])
    row = watched.rows(6.0)[1]
    assert (row.state, row.rates and row.rates.load) == ("up", 25.0)


def test_a_node_that_was_not_asked_for_long_is_silent_too(watched: WatchedCluster) -> None:
    assert [row.state for row in watched.rows(13.0)] == ["silent", "silent", "-", "asking"]


def test_a_node_that_is_asked_seldom_is_not_silent_meanwhile() -> None:
    watched = WatchedCluster(stale_s=40.0)
    watched.update([DECODE])
    watched.take([answer("decode-0", 0.0)])
    assert [row.state for at in (39.0, 41.0) for row in watched.rows(at)] == ["up", "silent"]


def test_a_node_whose_breaker_is_open_is_ill(watched: WatchedCluster) -> None:
    watched.take([answer("decode-0", 4.0, pool_up=False)])
    row = watched.rows(4.0)[1]
    assert row.state == "ill"
    assert "do not go to the pool" in row.why


def test_segments_show_at_their_owners_and_all_of_them_at_the_master(watched: WatchedCluster) -> None:
    own, other = Segment("10.0.0.3:50052", 100, "", 40), Segment("10.0.0.1:13000", 100, "", 7)
    watched.take([NodeAnswer("master", 3.0, NodeReading(at=3.0), segments=[own, other])])
    watched.take([answer("prefill-0", 4.0, segments=("10.0.0.1:13000",))])
    assert [row.segments for row in watched.rows(4.0)] == [(other,), (), (own,), (own, other)]


def test_the_selection_stays_with_its_node_when_rows_move_and_when_others_go(watched: WatchedCluster) -> None:
    assert watched.selected == "prefill-0"
    watched.press("down", 2.0)
    watched.press("sort", 2.0)
    watched.update([DECODE])
    assert watched.selected == "decode-0"
    watched.press("follow", 2.0)
    watched.update([PREFILL])
    assert (watched.selected, watched.following) == ("prefill-0", False)


def test_the_selection_stops_at_both_ends(watched: WatchedCluster) -> None:
    watched.press("up", 2.0)
    assert watched.selected == "prefill-0"
    watched.press("last", 2.0)
    watched.press("down", 2.0)
    assert watched.selected == "master"


def test_q_ends_and_escape_only_goes_back(watched: WatchedCluster) -> None:
    watched.press("follow", 2.0)
    assert watched.following
    assert watched.press("back", 2.0)
    assert not watched.following
    assert not watched.press("quit", 2.0)


def test_no_nodes_are_no_trouble() -> None:
    watched = WatchedCluster()
    watched.update([])
    for key in ("up", "down", "first", "last", "sort", "follow"):
        assert watched.press(key, 0.0)  # type: ignore[arg-type]
    assert watched.rows(0.0) == []


def test_the_clusters_hit_rate_is_that_of_prefill_nodes_as_long_as_these_have_prompts(watched: WatchedCluster) -> None:
    def tokens(at: float, computed: float, pool: float) -> NodeReading:
        return NodeReading(at=at, counts={("tokens", "computed"): computed, ("tokens", "loaded"): pool})

    watched.take([NodeAnswer("decode-0", 4.0, tokens(4.0, 10, 90))])
    sources = watched.sources(4.0)
    assert sources is not None
    assert sources["computed"] == 0.1
    watched.take([NodeAnswer("prefill-0", 4.0, tokens(4.0, 60, 40))])
    sources = watched.sources(4.0)
    assert sources is not None
    assert sources["computed"] == 0.6
