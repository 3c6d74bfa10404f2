"""Nodes that are watched: real servers are asked, one that answers, one that hangs, one that is not there;
and what their answers make of them."""

import threading
import time
from contextlib import closing

import msgspec
import pytest

from launch.discovery import View, file_records
from launch.http import NOBODY
from launch.masters import Segment
from launch.run.health_server import Response, serving
from launch.watch.asker import Asker, ask_node
from launch.watch.figures import NodeReading
from launch.watch.state import NodeStatus, WatchedNodes, page_of
from pd_cache.cluster import CacheServerNode, ClusterConfig, MasterNode, NodeRecord
from tests.support.pool import free_port
from tests.support.waiting import PATIENCE_S, wait_for

PREFILL = NodeRecord(name="prefill-0", role="prefill", address="http://10.0.0.1:8100")
DECODE = NodeRecord(name="decode-0", role="decode", address="http://10.0.0.2:8200")
STORE = NodeRecord(name="store-0", role="store", address="10.0.0.3:50052")
MASTER = NodeRecord(name="master", role="master", address="10.0.0.1:50051", metrics="http://10.0.0.1:9003")


def answer(record, at, load=0.0, **fields):
    return NodeStatus(
        record=record, at=at, reading=NodeReading(at=at, counts={("bytes", "retrieve"): load}, **fields)
    )


@pytest.fixture
def watched():
    found = WatchedNodes()
    found.update(View((DECODE, MASTER, PREFILL, STORE)))
    found.take([answer(PREFILL, 0.0), answer(DECODE, 0.0)])
    found.take([answer(PREFILL, 2.0, 200.0), answer(DECODE, 2.0, 800.0)])
    return found


def nodes(watched, now):
    return watched.status(now).nodes


def test_a_node_that_does_not_answer_is_down_says_why_and_shows_no_figures(watched):
    watched.take(
        [
            answer(DECODE, 3.0, 800.0, queued=7.0),
            NodeStatus(record=DECODE, at=4.0, state="down", why="refused"),
        ]
    )
    row = nodes(watched, 5.0)[1]
    assert (row.state, row.why, row.silent_s, row.rates, row.reading.queued) == (
        "down",
        "refused",
        2.0,
        None,
        None,
    )
    watched.take([answer(DECODE, 7.0, 900.0)])
    row = nodes(watched, 7.0)[1]
    assert (row.state, row.rates and row.rates.load) == ("up", 25.0)


def test_a_node_that_has_not_answered_for_long_is_down_too(watched):
    assert [row.name for row in nodes(watched, 2.0)] == ["prefill-0", "decode-0", "store-0", "master"], (
        "a request's way"
    )
    assert [row.state for row in nodes(watched, 12.0)] == ["up", "up", "not asked", "asking"]
    assert [row.state for row in nodes(watched, 12.1)] == ["down", "down", "not asked", "asking"]


@pytest.mark.parametrize(
    "metrics, why",
    [
        (
            "pd_cache_pool_up 0",
            "calls do not go to the pool: its breaker is open, or its client is not open yet",
        ),
        ('pd_cache_tier_off{tier="disk"} 1', "switched off: disk"),
        (
            'pd_cache_proxy_node_up{node="a"} 0\npd_cache_proxy_node_up{node="b"} 0',
            "skips 2 of its nodes",
        ),
    ],
)
def test_a_node_that_says_that_something_does_not_work_is_degraded(metrics, why):
    with serving("127.0.0.1", 0, lambda path: Response(200, f"{metrics}\n".encode()), 8) as (_, port):
        found = ask_node(record("decode-0", port), NOBODY)
    assert (found.state, found.why) == ("degraded", why)


def test_a_node_that_has_not_registered_again_since_an_outage_is_degraded(watched):
    watched.update(View((DECODE, PREFILL), doubted=frozenset({"decode-0"})))
    assert [(row.state, row.why) for row in nodes(watched, 4.0)] == [("up", ""), ("degraded", "not registered again since discovery was away")]  # fmt: skip


def test_segments_show_at_their_owners_and_all_of_them_at_the_master(watched):
    own, other = Segment("10.0.0.3:50052", 100, "", 40), Segment("10.0.0.1:13000", 100, "", 7)
    watched.take([NodeStatus(record=MASTER, at=3.0, leads="leader", segments=(own, other))])
    watched.take([answer(PREFILL, 4.0, segments=("10.0.0.1:13000",))])
    assert [row.segments for row in nodes(watched, 4.0)] == [(other,), (), (own,), (own, other)]


def test_the_clusters_hit_rate_is_that_of_prefill_nodes_as_long_as_these_have_prompts(watched):
    def tokens(at, computed, pool):
        return NodeReading(at=at, counts={("tokens", "computed"): computed, ("tokens", "loaded"): pool})

    watched.take([NodeStatus(record=DECODE, reading=tokens(4.0, 10, 90))])
    assert watched.status(4.0).hit == 0.9
    watched.take([NodeStatus(record=PREFILL, reading=tokens(4.0, 60, 40))])
    assert watched.status(4.0).hit == 0.4


# --- asking ---


def record(name, port):
    return NodeRecord(name=name, role="decode", address=f"http://127.0.0.1:{port}")


def test_an_answer_is_read_and_a_missing_one_says_why(well):
    answer = ask_node(record("a", well), NOBODY)
    assert answer.reading.at == answer.at <= time.monotonic()
    assert ask_node(record("b", port := free_port()), NOBODY).why == f"127.0.0.1:{port}: Connection refused"
    assert "this user runs no `up`" in ask_node(record("c", 0), NOBODY).why


@pytest.mark.parametrize(
    "body, why",
    [
        (
            b'{"status": "unavailable", "reason": "no decode node can be reached"}',
            ": no decode node can be reached",
        ),
        (b'{"status": "starting"}', ": starting"),
        (b"", ""),
        (b"\x1b[2J<html>", ""),
    ],
)
def test_a_health_of_503_is_degraded_with_the_reason_that_it_gives(body, why, watched):
    def respond(path):
        return Response(503, body) if path == "/health" else Response(200, b"pd_cache_pool_up 1\n")

    with serving("127.0.0.1", 0, respond, 8) as (_, port):
        row = ask_node(record("decode-0", port), NOBODY)
    assert (row.state, row.why, row.reading.pool_up) == ("degraded", f"/health answers 503{why}", True)


@pytest.mark.parametrize(
    "role, body, state",
    [
        ("decode", b'{"weights": "of another version"}', "degraded"),
        ("decode", b'{"status": "ok", "fing', "degraded"),
        ("proxy", b"<html>log in</html>", "down"),
        ("master", b"null", "down"),
    ],
)
def test_a_health_that_cannot_be_read_is_named(role, body, state):
    def respond(path):
        return Response(200, body if path == "/health" else b"pd_cache_pool_up 1\n")

    with serving("127.0.0.1", 0, respond, 8) as (_, port):
        url = f"http://127.0.0.1:{port}"
        asked = NodeRecord(name="n", role=role, address="h:1" if role == "master" else url, metrics=url)
        row = ask_node(asked, NOBODY)
    assert (row.state, row.why.partition(": ")[0]) == (state, "/health")


def test_a_store_is_asked_where_it_answers(well):
    store = NodeRecord(name="s", role="store", address="http-1:12345")
    assert not page_of(store)
    store = msgspec.structs.replace(store, metrics=f"http://127.0.0.1:{well}")
    assert page_of(store)
    assert ask_node(store, NOBODY).reading.counts


def test_a_cache_server_whose_port_launch_has_chosen_is_not_asked_and_counts_as_no_trouble():
    server = CacheServerNode(name="c")
    for port, page in (50051, ""), (0, "http://127.0.0.1:0"):  # of 0, nobody but `up` can have started it
        (_, told) = file_records(ClusterConfig(nodes=(MasterNode(name="m", port=port), server)))
        assert page_of(told) == page
    (told,) = file_records(
        ClusterConfig(nodes=(msgspec.structs.replace(server, url="ipc:///run/x", metrics_port=9),))
    )
    assert page_of(told) == "http://127.0.0.1:9"
    watched = WatchedNodes()
    records = [
        NodeRecord(name="c", role="cache-server", address="ipc:///run/x"),
        NodeRecord(name="s", role="store", address="h:1"),
    ]
    watched.update(View(tuple(records)))
    why = "it has no metrics_port"
    assert [(row.state, row.why) for row in nodes(watched, 1.0)] == [("not asked", why), ("not asked", f"{why}; the master shows its memory")]  # fmt: skip


def test_many_nodes_that_hang_delay_none_that_answers(well, mute, monkeypatch):
    monkeypatch.setattr("launch.watch.asker.TIMEOUT_S", 0.2)
    records = [record("well", well), *(record(f"mute{number}", mute) for number in range(40))]
    answers = []
    with closing(Asker(NOBODY, 0.05)) as asker:

        def enough():
            answers.extend(asker.poll(records, time.monotonic()))
            return sum(one.name == "well" and one.answers for one in answers) >= 20

        wait_for(enough, "answers of the one that is well")
    whys = {one.why.removeprefix(f"127.0.0.1:{mute}: ") for one in answers if one.name != "well"}
    assert whys <= {"no whole answer within 0.2 s", "timed out"}


@pytest.mark.parametrize("later, times", [(51.9, 1), (52.0, 2)])
def test_a_node_that_is_asked_is_not_asked_again_meanwhile_and_then_after_an_interval(
    monkeypatch, later, times
):
    asked = []
    let = threading.Event()

    def ask(record, _):
        asked.append(record.name)
        let.wait(PATIENCE_S)
        return NodeStatus(record=record, state="down", why="refused")

    monkeypatch.setattr("launch.watch.asker.ask_node", ask)
    asker, records = Asker(NOBODY, 2.0), [record("a", 1)]
    for now in (50.0, 51.0, 51.5):
        assert asker.poll(records, now) == []
    let.set()
    wait_for(lambda: asker.poll(records, 51.5), "its answer")
    records.append(record("b", 2))  # whose answer shows that what was due before it was asked
    wait_for(lambda: "b" in [one.name for one in asker.poll(records, later)], "its answer")
    asker.close()
    assert asked.count("a") == times
