"""The walk of docs/operations.md, "Change the master without a cold cache", with real nodes; and beside it the same without the second pool."""

from __future__ import annotations

import contextlib
import math
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from launch.versions import known_versions
from pd_cache.cluster.machine import port_of
from tests.support.cluster import CHUNK, ENGINE, complete
from tests.support.pool import PATIENT, Node, Pool, free_port
from tests.support.waiting import wait_for

PROMPTS = [[random.Random(seed).randrange(512) for _ in range(3 * CHUNK + 1)] for seed in range(6)]


@contextmanager
def serving(folder: Path, pool: Pool, second: Pool | None = None) -> Iterator[str]:
    """A prefill node, a decode node and a proxy over a pool that is there, as they are after a restart; yields the proxy's address."""
    tiers: list[dict[str, Any]] = [{"kind": "mooncake"}]
    if second is not None:
        tiers.append({"kind": "mooncake", "master": second.address})
    tree = {
        "transfer": {"staging_size": "8MiB", "breaker": {"probe_interval_ms": 200}, "timeouts": PATIENT},
        "cache": {"chunk_size": CHUNK, "tiers": tiers},
        "engine": ENGINE,
        "handoff": {"wait_ms": 60_000},
        "proxy": {"direct_tokens": 0},  # every prompt takes the whole way
        "nodes": [
            {"name": "master", "role": "master", "port": pool.port, "metrics_port": pool.metrics_port, "versions_port": port_of(pool.versions), "lease_ttl_ms": pool.lease_ttl_ms},
            *({"name": role, "role": role, "port": free_port()} for role in ("prefill", "decode", "proxy")),
        ],
    }  # fmt: skip
    file = folder / f"nodes-{free_port()}.yaml"
    file.write_text(yaml.safe_dump(tree))
    with contextlib.ExitStack() as stack:
        nodes = {}
        for role in ("prefill", "decode", "proxy"):
            nodes[role] = Node(role, role, file)
            stack.callback(nodes[role].stop)
        wait_for(lambda: _with_weights(pool) >= {"prefill", "decode"}, what="both know which weights are current")
        for role in ("prefill", "decode"):
            wait_for(lambda at=nodes[role].address: second is None or _reaches_second(at), what="both pools reached")
        yield nodes["proxy"].address


def _with_weights(pool: Pool) -> set[str]:
    found = known_versions([pool.versions])
    return {name for one in found.values() for name, label in one.processes.values() if label is not None}


def _reaches_second(address: str) -> bool:
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as page:
        return 'pd_cache_tier_off{tier="mooncake-1"} 0.0' in page.read().decode()


def hit_rate(proxy: str) -> float:
    """Asks for each prompt once; the share of their chunks that the prefill node loaded."""
    answers = [complete(proxy, prompt) for prompt in PROMPTS]
    assert {answer.status for answer in answers} == {200}
    return sum(answer.cached[0] for answer in answers) / (3 * CHUNK * len(PROMPTS))


MANY = [[random.Random(1000 + seed).randrange(512) for _ in range(3 * CHUNK + 1)] for seed in range(100)]


def hits(proxy: str, seconds: float) -> list[tuple[float, float]]:
    """One client that asks for one of a hundred prompts after the other, at random: of each answer when it came, in seconds, and the share of
    the prompt's chunks that the prefill node loaded."""
    rng, begun, found = random.Random(0), time.monotonic(), []
    while (now := time.monotonic() - begun) < seconds:
        answer = complete(proxy, MANY[rng.randrange(len(MANY))])
        assert answer.status == 200
        found.append((now, answer.cached[0] / (3 * CHUNK)))
    return found


def back_after(found: list[tuple[float, float]]) -> float:
    """From when on 30 answers in a row have at least 90 % of the hits of a warm pool, in seconds."""
    rates = [fmean(hit for _, hit in found[at : at + 30]) for at in range(len(found) - 30)]
    return next((found[at][0] for at, rate in enumerate(rates) if rate >= 0.9), math.inf)


def told(when: str, found: list[tuple[float, float]]) -> None:
    """Prints the hit rate of each second; for docs/operations.md."""
    by_second = [[hit for at, hit in found if int(at) == second] for second in range(int(found[-1][0]) + 1)]
    print(
        f"{when:28}", *(f"{fmean(one):4.2f}" for one in by_second if one), f"{len(found) / found[-1][0]:.0f} a second"
    )


@pytest.mark.slow(seconds=150)
def test_the_hits_are_back_in_no_time_if_the_old_pool_is_read_as_a_second_one(make_pool, tmp_path):
    blue, green, cold = (make_pool().start() for _ in range(3))
    with serving(tmp_path, blue) as proxy:
        assert {complete(proxy, prompt).status for prompt in MANY} == {200}
        told("before", hits(proxy, 5))
    with serving(tmp_path, cold) as proxy:
        without = hits(proxy, 25)
        told("restart, without the tier", without)
    with serving(tmp_path, green, second=blue) as proxy:
        during = hits(proxy, 25)
        told("during: with the tier", during)
        blue.end()
        told("the old master is gone", hits(proxy, 5))
    with serving(tmp_path, green) as proxy:
        after = hits(proxy, 5)
        told("after: the tier is gone, too", after)
    seconds = {"with the tier": back_after(during), "without": back_after(without)}
    print("90 % of the hits are back after", *(f"{took:.1f} s {how}" for how, took in seconds.items()))
    assert seconds["with the tier"] < 0.5 < seconds["without"]
    assert fmean(hit for _, hit in after) > 0.9


@pytest.mark.slow(seconds=90)
def test_hits_go_on_while_the_master_is_changed(make_pool: Callable[..., Pool], tmp_path: Path) -> None:
    blue = make_pool().start()
    with serving(tmp_path, blue) as proxy:
        assert [hit_rate(proxy) for _ in range(2)] == [0, 1]
    green, cold = make_pool().start(), make_pool().start()
    with serving(tmp_path, cold) as proxy:
        assert hit_rate(proxy) == 0, "without the second pool"
    with serving(tmp_path, green, second=blue) as proxy:
        assert hit_rate(proxy) == 1, "from the first request on"
        wait_for(lambda: len(green.keys()) == 3 * len(PROMPTS), what="all of it in the new pool")
        blue.end()
        assert hit_rate(proxy) == 1, "the old master may go before its tier does"
    with serving(tmp_path, green) as proxy:
        assert hit_rate(proxy) == 1, "without the tier"
