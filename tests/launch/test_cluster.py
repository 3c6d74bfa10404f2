"""The main job, end to end: real Mooncake, real processes, a real model, and their deaths."""

import itertools
import json
import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from launch.watch.asker import cluster_status
from tests.support.cli import cli, cli_json
from tests.support.cluster import (
    CHUNK,
    OUTAGES,
    complete,
    fetched,
    free_node,
    kill,
    metric_at,
    nodes_of_every_role,
    started,
)
from tests.support.waiting import PATIENCE_S, beside, wait_for
from transfer.settings import mooncake_version

pytestmark = pytest.mark.slow(seconds=90)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("cluster") / "cluster.yaml"


@pytest.fixture(scope="module")
def cluster(file):
    """A healthy cluster that no test of this module breaks: the prefill node has a cache of its own, the
    decode node a cache server."""
    streams = {"wait_ms": 60_000, "stream": "always"}
    with started(file.parent, nodes=nodes_of_every_role(), handoff=streams) as running:
        yield running


@pytest.fixture
def prompt():
    """Prompts that no other test has used."""
    rng = random.Random(time.monotonic_ns())
    return lambda length: [rng.randrange(512) for _ in range(length)]


def test_each_node_takes_from_the_pool_what_others_stored_and_computes_the_rest(cluster, alone, prompt):
    prefix = prompt(4 * CHUNK)
    first, second = prefix + prompt(90), prefix + prompt(90)
    for tokens, salt, cached in (
        (first, "", (0, 5 * CHUNK)),  # the decode node takes exactly the whole chunks
        (second, "", (4 * CHUNK, 5 * CHUNK)),  # the prefill node reuses the shared prefix
        (prefix, "", (4 * CHUNK - 1, 4 * CHUNK - 1)),  # a full hit leaves one token to compute
        (prefix[: CHUNK - 1], "", (0, 0)),  # shorter than a chunk
        (first, "one", (0, 5 * CHUNK)),  # tenants are kept apart
        (first, "two", (0, 5 * CHUNK)),
        (first, "one", (5 * CHUNK, 5 * CHUNK)),
    ):
        answer = complete(cluster.urls["proxy"], tokens, **({"cache_salt": salt} if salt else {}))
        assert (answer.status, answer.tokens, answer.cached) == (200, alone(tokens), cached)
        assert answer.body["usage"]["prompt_tokens"] == len(tokens)


def test_the_decode_node_loads_what_is_stored_while_the_prefill_node_computes_the_rest(
    cluster, alone, file, prompt
):
    """The longest prompt takes the prefill node 15 steps. On a busy machine the decode node may be too late
    for all of them."""

    answers = []

    def streamed():
        tokens = prompt(960)
        answer = complete(cluster.urls["proxy"], tokens)
        assert answer.tokens == alone(tokens)
        assert answer.cached == (0, 15 * CHUNK - 1)
        answers.append(answer)
        return answer.body["pd_cache"]["report"]["streamed"]

    wait_for(streamed, "a prompt that was streamed")
    told = cli("explain", answers[-1].headers["X-Request-Id"], "-c", file).stdout
    assert "came while the prefill node computed others" in told


@pytest.mark.usefixtures("patient")
def test_status_tells_of_every_node(cluster, prompt, file):
    complete(cluster.urls["proxy"], prompt(2 * CHUNK))
    rows = {row["name"]: row for row in cli_json("status", "-c", file)["nodes"]}
    assert set(rows) == {node.name for node in cluster.config.nodes}
    assert {row["state"] for row in rows.values()} == {"up"}
    assert {row["mooncake"] for row in rows.values() if row["role"] != "master"} == {mooncake_version()}
    assert rows["master"]["bytes_by_tier"]["pool"] > 0
    assert 0 < rows["decode-0"]["hit_rate"] <= 1
    assert rows["prefill-0"]["hit_rate"] is not None
    assert rows["cache-0"]["hit_rate"] is None, "prompts are counted where they are asked for: by the engines"
    for name in ("prefill-0", "decode-0", "proxy", "cache-0"):
        assert 0 < time.time() - rows[name]["up_since"] < 3600
        assert rows[name]["in_flight"] == 0
    assert rows["prefill-0"]["fingerprint"] == rows["decode-0"]["fingerprint"] is not None
    table = cli("status", "-c", file).stdout
    assert "discovery: static" in table
    assert "decode-0" in table


def test_top_and_the_proxys_page_say_what_every_node_does(cluster, prompt, file):
    tokens = prompt(4 * CHUNK + 1)

    def well(event):
        nodes = {node["name"]: node for node in event["nodes"]}
        told = all(nodes[name]["hit"] is not None for name in ("prefill-0", "decode-0"))
        return told and bool(event["segments"]) and all(segment["size"] for segment in event["segments"])

    with urllib.request.urlopen(cluster.urls["proxy"] + "/ui/events", timeout=PATIENCE_S) as events:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            line = events.readline()
            if line.startswith(b"data: "):
                if well(event := json.loads(line[6:])):
                    break
                assert time.monotonic() < deadline, event
                # something to be counted between any two answers of the nodes
                complete(cluster.urls["proxy"], tokens)
    assert event["slow"][0]["hops"][0]["asked"]

    nodes = cli_json("top", "-c", file, "--interval", "0.5")["nodes"]
    assert {node["name"]: node["state"] for node in nodes} == {
        node.name: "up" for node in cluster.config.nodes
    }


# --- explain ------------------------------------------------------------------------------------------------


def test_a_request_is_explained_hop_by_hop(cluster, file, prompt):
    answer = complete(cluster.urls["proxy"], prompt(3 * CHUNK + 8))
    request = answer.headers["X-Request-Id"]
    prefill, decode = cli_json("explain", request, "-c", file)["hops"]
    assert (prefill["hop"], prefill["node"]) == ("prefill", "prefill-0")
    assert (prefill["report"]["computed"], prefill["report"]["reason"]) == (200, "never_stored")
    assert answer.body["pd_cache"]["prefill"]["reason"] == "never_stored"
    assert (decode["hop"], decode["node"]) == ("decode", "decode-0")
    assert decode["report"] == answer.body["pd_cache"]["report"]
    assert {**decode["report"], "streamed": 0} == {
        "streamed": 0, "asked": 200, "at_hand": 0, "found": 192, "loaded": 192, "memory": 0, "disk": 0, "pool": 192, "computed": 8, "reason": "none",
    }  # fmt: skip
    text = cli("explain", request, "-c", file).stdout
    assert "prefill at prefill-0:\n  200 tokens:" in text
    assert "never_stored: the node that looked has neither stored this chunk nor found it before" in text
    direct = complete(cluster.urls["decode-0"], prompt(CHUNK - 1))  # past the proxy
    (hop,) = cli_json("explain", direct.body["id"], "-c", file)["hops"]
    assert (hop["hop"], hop["node"], hop["report"]["reason"]) == ("decode", "decode-0", "too_short")
    assert cli_json("explain", "never-heard-of", "-c", file, code=1)["hops"] == []


def test_a_prompt_is_explained_by_what_each_node_would_find(cluster, file, prompt, tmp_path):
    def found(*more):
        nodes = cli_json("explain", "--prompt", tmp_path / "prompt", "-c", file, *more)["nodes"]
        assert [one["node"] for one in nodes] == ["prefill-0", "decode-0"]
        return {(one["tokens"], one["found"], one["reason"]) for one in nodes}

    tokens = prompt(3 * CHUNK + 8)
    (tmp_path / "prompt").write_text(json.dumps(tokens))
    assert found() == {(200, 0, "missing")}
    complete(cluster.urls["proxy"], tokens)
    assert found() == {(200, 192, "none")}
    assert found("--cache-salt", "other") == {(200, 0, "missing")}
    (tmp_path / "prompt").write_text("short, ünd with letters of two bytes")
    assert found() == {(37, 0, "too_short")}


# --- deaths -------------------------------------------------------------------------------------------------


class Mended:
    """What ends a supervisor's watch: the cluster works again, its dead nodes started anew."""

    def __init__(self, cluster, tokens):
        self._cluster = cluster
        self._tokens = tokens
        self._end = time.monotonic() + 2 * PATIENCE_S

    def wait(self, timeout=None):
        assert time.monotonic() < self._end, "the cluster does not come back"
        time.sleep(timeout or 0)
        answer = complete(self._cluster.urls["proxy"], self._tokens)
        return answer.status == 200 and min(answer.cached) >= len(self._tokens) - 1


def test_deaths_in_the_middle_of_requests_give_no_wrong_token_and_leave_none_unanswered(
    tmp_path, alone, prompt
):
    """One cluster loses one node after the other. Each stays dead until all requests are answered, and is
    back before the next dies."""
    with started(tmp_path, nodes=nodes_of_every_role(), **OUTAGES) as cluster:
        url = cluster.urls["proxy"]
        for victim in ("store-0", "master", "prefill-0", "cache-0"):
            cluster.supervisor.wait(Mended(cluster, prompt(3 * CHUNK)))
            shared = prompt(6 * CHUNK)
            prompts = [shared + prompt(30) for _ in range(12)]
            complete(url, prompts[0])
            with ThreadPoolExecutor(len(prompts)) as threads:
                asked = [threads.submit(complete, url, tokens) for tokens in prompts[:4]]
                wait_for(lambda asked=asked: any(one.done() for one in asked), "the first answer")
                kill(cluster, victim)
                asked += [threads.submit(complete, url, tokens) for tokens in prompts[4:]]
                answers = [one.result() for one in asked]
            assert [(one.status, one.tokens) for one in answers] == [
                (200, alone(tokens)) for tokens in prompts
            ], victim
            if victim == "cache-0":
                status = {row.name: row.state for row in cluster_status(cluster.config).nodes}
                assert status["cache-0"] == "down"
                assert status["decode-0"] == "up"
            if victim == "store-0":

                def evicted(tokens=prompts[0]):
                    return (complete(url, tokens).body["pd_cache"]["prefill"] or {}).get(
                        "reason"
                    ) == "evicted"

                wait_for(evicted, "chunks that went with their node count as evicted")


# --- limits that hold ---------------------------------------------------------------------------------------


@contextmanager
def eight_clients(url, tokens, pause_s=0.0):
    """While the block runs, each asks again and again, with a salt of its own, so that the pool has nothing
    of it. Yields the list of clients and their answers."""
    answers, stop = [], threading.Event()

    def ask(client):
        for number in itertools.count():
            answers.append((client, complete(url, tokens, cache_salt=f"{client}.{number}")))
            if stop.wait(pause_s):
                return

    with beside(*(partial(ask, client) for client in range(8))):
        try:
            yield answers
        finally:
            stop.set()


def test_an_overload_is_refused_in_part_and_answered_right_in_part(tmp_path, alone, prompt):
    settings = {"direct_tokens": 0, "limits": {"ttft_s": 0.01}}
    nodes = [free_node(name) for name in ("master", "store-0", "prefill-0", "decode-0", "proxy")]
    with started(tmp_path, nodes=nodes, proxy=settings) as cluster:
        url, tokens = cluster.urls["proxy"], prompt(6 * CHUNK + 6)
        with eight_clients(url, tokens) as answers:
            for status in (200, 429):
                wait_for(lambda status=status: sum(one.status == status for _, one in answers) > 8, "answers of both kinds")  # fmt: skip
        refused = [answer for _, answer in answers if answer.status != 200]
        assert {(one.status, one.body["error"]["code"]) for one in refused} == {(429, "over_ttft_s")}
        assert all(int(one.headers["Retry-After"]) >= 1 for one in refused)
        expected = alone(tokens)
        assert all(answer.tokens == expected for _, answer in answers if answer.status == 200)
        assert complete(url, tokens, cache_salt="after").status == 200
        assert metric_at(url, "pd_cache_proxy_refused_total") == len(refused)


# --- roles that follow the load -----------------------------------------------------------------------------


def test_nodes_take_the_places_of_dead_ones_and_every_token_stays_right(tmp_path, alone, prompt):
    engines = [{**free_node("decode-0"), "name": f"engine-{number}", "role": "both"} for number in range(4)]
    nodes = [free_node("master"), free_node("store-0"), *engines, free_node("proxy")]
    settings = {"direct_tokens": 0, "roles": {"auto": True, "min_prefill": 2}}
    with started(tmp_path, nodes=nodes, proxy=settings, **OUTAGES) as cluster:
        url, tokens = cluster.urls["proxy"], prompt(6 * CHUNK + 6)
        expected, living = alone(tokens), [node["name"] for node in engines]

        def prefilling():
            roles = fetched(f"{url}/health").body["roles"]
            return [name for name in living if roles[cluster.urls[name]]["does"] == "prefill"]

        assert prefilling() == ["engine-0", "engine-1"]
        with eight_clients(url, tokens, pause_s=0.2) as answers:
            for victim, left in (
                ("engine-0", ["engine-1", "engine-2"]),
                ("engine-1", ["engine-2"]),
                ("engine-3", []),
            ):
                kill(cluster, victim)
                living.remove(victim)
                wait_for(lambda left=left: prefilling() == left, "another node in its place")
                count = len(answers)
                # so that no request, which is tried on two nodes only, meets two deaths
                wait_for(
                    lambda count=count: len({client for client, _ in answers[count:]}) == 8,
                    "an answer for each client",
                )
        assert {(one.status, tuple(one.tokens)) for _, one in answers} == {(200, tuple(expected))}
        assert metric_at(url, "pd_cache_proxy_node_role", hop="decode") >= 1
        shown = cli("status", "-c", tmp_path / "cluster.yaml", code=1).stdout
        assert "engine-2: decode for " in shown
        assert "as proxy says: too few nodes were alive" in shown
