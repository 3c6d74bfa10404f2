"""The main job, end to end: real Mooncake, real processes, a real model, and their deaths."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.status import cluster_status
from launch.up import LocalCluster
from pd_cache.cluster import dump_config
from tests.support.cluster import (
    CHUNK,
    OUTAGES,
    Answer,
    complete,
    kill,
    nodes_of_every_role,
    started,
)
from tests.support.waiting import PATIENCE_S, wait_for
from transfer.settings import mooncake_version

pytestmark = pytest.mark.slow(seconds=90)

Tokens = list[int]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A healthy cluster that no test of this module breaks: the prefill node has a cache of its own, the decode node a cache server."""
    streams = {"wait_ms": 60_000, "stream": "always"}
    with started(tmp_path_factory.mktemp("cluster"), nodes=nodes_of_every_role(), handoff=streams) as running:
        yield running


@pytest.fixture
def prompt() -> Callable[..., Tokens]:
    """Prompts that no other test has used, unless the seed is given again."""

    def make(length: int, seed: int | None = None) -> Tokens:
        rng = random.Random(seed if seed is not None else time.monotonic_ns())
        return [rng.randrange(512) for _ in range(length)]

    return make


def url_of(cluster: LocalCluster) -> str:
    return cluster.urls["proxy"]


@pytest.fixture
def file(cluster: LocalCluster, tmp_path: Path) -> str:
    (tmp_path / "running.yaml").write_text(dump_config(cluster.config))
    return str(tmp_path / "running.yaml")


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
        answer = complete(url_of(cluster), tokens, **({"cache_salt": salt} if salt else {}))
        assert (answer.status, answer.tokens, answer.cached) == (200, alone(tokens), cached)
        assert answer.body["usage"]["prompt_tokens"] == len(tokens)


def test_many_prompts_with_overlapping_prefixes_at_once(cluster: LocalCluster, alone: Any, prompt: Any) -> None:
    prefix = prompt(6 * CHUNK)
    prompts = [prefix[: CHUNK * (index % 7)] + prompt(20 + index) for index in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda tokens: complete(url_of(cluster), tokens), prompts))
    assert [answer.status for answer in answers] == [200] * 16
    assert [answer.tokens for answer in answers] == [alone(tokens) for tokens in prompts]


def test_the_decode_node_loads_what_is_stored_while_the_prefill_node_computes_the_rest(cluster, alone, file, prompt):
    """The longest prompt takes the prefill node 15 steps. On a busy machine the decode node may be too late for all of them."""

    answers: list[Answer] = []

    def streamed() -> bool:
        tokens = prompt(960)
        answer = complete(url_of(cluster), tokens)
        assert answer.tokens == alone(tokens)
        assert answer.cached == (0, 15 * CHUNK - 1)
        answers.append(answer)
        return bool(answer.body["pd_cache"]["report"]["streamed"])

    wait_for(streamed, what="a prompt that was streamed")
    done = CliRunner().invoke(main, ["explain", answers[-1].headers["X-Request-Id"], "-c", file])
    assert "came while the prefill node computed others" in done.output


def test_a_stream_carries_the_same_tokens(cluster: LocalCluster, alone: Any, prompt: Any) -> None:
    tokens = prompt(2 * CHUNK + 3)
    body = json.dumps({"model": "tiny", "prompt": tokens, "max_tokens": 8, "stream": True, "ignore_eos": True})
    request = urllib.request.Request(
        f"{url_of(cluster)}/v1/completions", body.encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        lines = [line[6:].strip() for line in stream if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert [token for event in events for choice in event["choices"] for token in choice["token_ids"]] == alone(tokens)
    assert events[-1]["pd_cache"]["self"]["cached_tokens"] == 2 * CHUNK


@pytest.mark.usefixtures("patient")
def test_status_tells_of_every_node(cluster: LocalCluster, prompt: Any, file: str) -> None:
    complete(url_of(cluster), prompt(2 * CHUNK))
    done = CliRunner().invoke(main, ["status", "-c", file, "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)["nodes"]}
    assert set(rows) == {node.name for node in cluster.config.nodes}
    assert {row["state"] for row in rows.values()} == {"up"}
    assert {row["mooncake"] for row in rows.values()} == {mooncake_version()}
    assert rows["master"]["bytes_by_tier"]["mooncake"] > 0
    assert 0 < rows["decode-0"]["hit_rate"] <= 1
    assert rows["prefill-0"]["hit_rate"] is not None
    assert rows["cache-0"]["hit_rate"] is None, "prompts are counted where they are asked for: by the engines"
    for name in ("prefill-0", "decode-0", "proxy", "cache-0"):
        assert 0 < time.time() - rows[name]["up_since"] < 3600
        assert rows[name]["in_flight"] == 0
    assert rows["prefill-0"]["fingerprint"] == rows["decode-0"]["fingerprint"] is not None
    table = CliRunner().invoke(main, ["status", "-c", file])
    assert table.exit_code == 0
    assert "discovery: static" in table.stdout
    assert "decode-0" in table.stdout


def test_top_and_the_proxys_page_say_what_every_node_does(cluster: LocalCluster, prompt: Any, file: str) -> None:
    tokens = prompt(4 * CHUNK + 1)

    def well(event: Any) -> bool:
        nodes = {node["name"]: node for node in event["nodes"]}
        told = all(nodes[name]["hit"] is not None for name in ("prefill-0", "decode-0"))
        return told and bool(event["segments"]) and all(segment["size"] for segment in event["segments"])

    with urllib.request.urlopen(url_of(cluster) + "/ui/events", timeout=PATIENCE_S) as events:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            line = events.readline()
            if line.startswith(b"data: "):
                if well(event := json.loads(line[6:])):
                    break
                assert time.monotonic() < deadline, event
                complete(url_of(cluster), tokens)  # something to be counted between any two answers of the nodes
    assert event["slow"][0]["hops"][0]["asked"]

    done = CliRunner().invoke(main, ["top", "-c", file, "--interval", "0.5"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    states = {line.split()[0]: line.split()[2] for line in lines[2:]}
    assert states == {node.name: "up" for node in cluster.config.nodes}


@pytest.mark.usefixtures("patient")
def test_after_a_reset_a_prompt_is_computed_and_stored_again(cluster, alone, prompt, file):
    tokens = prompt(3 * CHUNK + 2)
    complete(url_of(cluster), tokens)
    assert complete(url_of(cluster), tokens).cached == (3 * CHUNK, 3 * CHUNK)
    done = CliRunner().invoke(main, ["reset", "-c", file, "--model", "tiny"])
    assert done.exit_code == 0, done.output
    assert "tiny: version " in done.stdout
    assert "decode-0" in done.stdout
    unknown = CliRunner().invoke(main, ["reset", "-c", file, "--model", "none"])
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "no node serves none: they serve tiny" in unknown.stderr
    answers = [complete(url_of(cluster), tokens) for _ in range(2)]
    assert [answer.cached for answer in answers] == [(0, 3 * CHUNK), (3 * CHUNK, 3 * CHUNK)]
    assert {tuple(answer.tokens) for answer in answers} == {tuple(alone(tokens))}
    listed = json.loads(CliRunner().invoke(main, ["pool", "ls", "-c", file, "--json"]).stdout)["namespaces"]
    assert {(one["model"], one["current"]) for one in listed} == {("tiny", True), ("tiny", False)}
    assert all("decode-0" in one["nodes"] for one in listed)
    old = CliRunner().invoke(main, ["pool", "rm", "-c", file, "tiny", "--old", "--yes"])
    assert int(old.stdout.split()[0]) >= 3
    assert complete(url_of(cluster), tokens).cached == (3 * CHUNK, 3 * CHUNK), "what is current stays"
    (left,) = json.loads(CliRunner().invoke(main, ["pool", "ls", "-c", file, "--json"]).stdout)["namespaces"]
    assert left["current"] is True


# --- explain ---------------------------------------------------------------------------------------------------------


def explained(file: str, *arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["explain", *arguments, "-c", file, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_a_request_is_explained_hop_by_hop(cluster: LocalCluster, file: str, prompt: Any) -> None:
    answer = complete(url_of(cluster), prompt(3 * CHUNK + 8))
    request = answer.headers["X-Request-Id"]
    prefill, decode = explained(file, request)["hops"]
    assert (prefill["hop"], prefill["node"]) == ("prefill", "prefill-0")
    assert (prefill["report"]["computed"], prefill["report"]["reason"]) == (200, "never_stored")
    assert answer.body["pd_cache"]["prefill"]["reason"] == "never_stored"
    assert (decode["hop"], decode["node"]) == ("decode", "decode-0")
    assert decode["report"] == answer.body["pd_cache"]["report"]
    assert {**decode["report"], "streamed": 0} == {
        "streamed": 0, "asked": 200, "at_hand": 0, "found": 192, "loaded": 192, "memory": 0, "disk": 0, "pool": 192, "computed": 8, "reason": "none",
    }  # fmt: skip
    text = CliRunner().invoke(main, ["explain", request, "-c", file]).stdout
    assert "prefill at prefill-0: 200 tokens" in text
    assert "never_stored: the node that looked has neither stored this chunk nor found it before" in text
    direct = complete(cluster.urls["decode-0"], prompt(CHUNK - 1))  # past the proxy
    (hop,) = explained(file, direct.body["id"])["hops"]
    assert (hop["hop"], hop["node"], hop["report"]["reason"]) == ("decode", "decode-0", "too_short")
    assert explained(file, "never-heard-of", code=1)["hops"] == []


def test_a_prompt_is_explained_by_what_each_node_would_find(cluster, file, prompt, tmp_path):
    def found(*more: str) -> set[tuple[Any, ...]]:
        nodes = explained(file, "--prompt", str(tmp_path / "prompt"), *more)["nodes"]
        assert [one["node"] for one in nodes] == ["prefill-0", "decode-0"]
        return {(one["tokens"], one["found"], one["reason"]) for one in nodes}

    tokens = prompt(3 * CHUNK + 8)
    (tmp_path / "prompt").write_text(json.dumps(tokens))
    assert found() == {(200, 0, "missing")}
    complete(url_of(cluster), tokens)
    assert found() == {(200, 192, "none")}
    assert found("--cache-salt", "other") == {(200, 0, "missing")}
    (tmp_path / "prompt").write_text("short, ünd with letters of two bytes")
    assert found() == {(37, 0, "too_short")}


# --- deaths ----------------------------------------------------------------------------------------------------------


class Mended:
    """What ends a supervisor's watch: the cluster works again, its dead nodes started anew."""

    def __init__(self, cluster: LocalCluster, tokens: Tokens) -> None:
        self._cluster = cluster
        self._tokens = tokens
        self._end = time.monotonic() + 2 * PATIENCE_S

    def wait(self, timeout: float | None = None) -> bool:
        assert time.monotonic() < self._end, "the cluster does not come back"
        time.sleep(timeout or 0)
        answer = complete(url_of(self._cluster), self._tokens)
        return answer.status == 200 and min(answer.cached) >= len(self._tokens) - 1


def test_deaths_in_the_middle_of_requests_give_no_wrong_token_and_leave_none_unanswered(tmp_path, alone, prompt):
    """One cluster loses one node after the other. Each stays dead until all requests are answered, and is back before the next dies."""
    with started(tmp_path, nodes=nodes_of_every_role(), **OUTAGES) as cluster:
        url = url_of(cluster)
        for victim in ("store-0", "master", "prefill-0", "cache-0"):
            cluster.supervisor.wait(Mended(cluster, prompt(3 * CHUNK)))
            shared = prompt(6 * CHUNK)
            prompts = [shared + prompt(30) for _ in range(24)]
            complete(url, prompts[0])
            answers: list[Answer | None] = [None] * len(prompts)

            def ask(index: int, prompts: list[Tokens] = prompts, answers: list[Answer | None] = answers) -> None:
                answers[index] = complete(url, prompts[index])

            threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
            for thread in threads[:8]:
                thread.start()
            wait_for(lambda answers=answers: any(answers), 60, "the first answer")
            kill(cluster, victim)
            for thread in threads[8:]:
                thread.start()
            for thread in threads:
                thread.join(180)
            assert not any(thread.is_alive() for thread in threads), f"{victim}: a request was left unanswered"
            for tokens, answer in zip(prompts, answers, strict=True):
                assert answer is not None
                assert answer.status == 200, victim
                assert answer.tokens == alone(tokens), victim
            if victim == "cache-0":
                status = {row.name: row.state for row in cluster_status(cluster.config).nodes}
                assert status["cache-0"].startswith("no answer")
                assert status["decode-0"] == "up"
            if victim == "store-0":

                def evicted(tokens: Tokens = prompts[0]) -> bool:
                    return (complete(url, tokens).body["pd_cache"]["prefill"] or {}).get("reason") == "evicted"

                wait_for(evicted, what="chunks that went with their node count as evicted")
