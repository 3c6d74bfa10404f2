"""Two masters of which etcd elects one: nodes follow the leader when it dies, and the keys are still there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.up import LocalCluster
from tests.support.cluster import CHUNK, OUTAGES, Answer, broken, complete, examined, fetched, free_node, kill, started
from tests.support.etcd import Etcd
from tests.support.needs import needs_etcd
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.slow(seconds=220),  # nearly all of it waits for leases that Mooncake and etcd let run out
    needs_etcd,
]


def role(cluster: LocalCluster, name: str) -> str:
    port = getattr(cluster.config.node(name), "metrics_port", 0)
    try:
        health = fetched(f"http://127.0.0.1:{port}/health", timeout=2).body
    except OSError:
        return "gone"
    return "leader" if health.get("service_ready") else str(health.get("role"))


def sections(etcd: Etcd) -> dict[str, Any]:
    masters = [free_node(f"master-{n}", client_ttl_s=20) for n in range(2)]
    nodes = [*masters, *(free_node(name) for name in ("store-0", "decode-0", "prefill-0", "proxy"))]
    discovery = {"kind": "etcd", "endpoints": [etcd.endpoint], "ttl_s": 2}
    return {"transfer": OUTAGES["transfer"], "master": {"ha": True}, "discovery": discovery, "nodes": nodes}


def test_clients_follow_the_leader_and_no_key_is_lost_with_it(make_etcd: Callable[..., Etcd], tmp_path: Path) -> None:
    etcd = make_etcd().start()
    rng = random.Random(1)
    prompt = [rng.randrange(512) for _ in range(5 * CHUNK + 3)]
    with started(tmp_path, name="elected", **sections(etcd)) as cluster:

        def ask() -> Answer:
            answer = complete(cluster.urls["proxy"], prompt)
            assert answer.status == 200
            return answer

        roles = {name: role(cluster, name) for name in ("master-0", "master-1")}
        assert sorted(roles.values()) == ["leader", "standby"]
        leader, standby = sorted(roles, key=lambda name: roles[name])
        # in a process of its own: of elected masters, Mooncake knows one etcd a process, for ever
        assert broken(examined(tmp_path / "cluster.yaml")) == set()
        first = ask()
        wait_for(lambda: ask().cached[0] == 5 * CHUNK, 10, "a hit on the prefill node, too")
        # what the leader wrote to its log reaches the standby within its polling interval of a second
        seen = [ask() for _ in range(30)]
        kill(cluster, leader)
        wait_for(lambda: seen.append(ask()) or role(cluster, standby) == "leader", 40, "the standby leads")
        wait_for(lambda: seen.append(ask()) or seen[-1].cached == (5 * CHUNK, 5 * CHUNK), 30, "the same keys are found")
        assert {tuple(answer.tokens) for answer in seen} == {tuple(first.tokens)}
