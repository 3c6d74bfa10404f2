"""Two masters of which etcd elects one: nodes follow the leader when it dies, and the keys are still there."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.status import cluster_status
from launch.up import Cluster
from pd_cache.config import dump_config
from tests.support.cluster import CHUNK, Answer, complete, kill, started
from tests.support.etcd import Etcd
from tests.support.needs import needs_etcd
from tests.support.pool import ROOT
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    needs_etcd,
]


def role(cluster: Cluster, name: str) -> str:
    node = cluster.config.node(name)
    port = getattr(node, "metrics_port", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            health = json.load(answer)
    except OSError:
        return "gone"
    return "leader" if health.get("service_ready") else str(health.get("role"))


def sections(etcd: Etcd, client: str) -> dict[str, Any]:
    """Of the file: two masters, memory, engines and a proxy."""
    masters = [
        {"name": f"master-{n}", "role": "master", "port": 0, "metrics_port": 0, "client_ttl_s": 20} for n in range(2)
    ]
    nodes = [
        *masters,
        {"name": "store-0", "role": "store", "segment_size": "64MiB"},
        {"name": "decode-0", "role": "decode", "port": 0},
        {"name": "prefill-0", "role": "prefill", "port": 0},
        {"name": "proxy", "role": "proxy", "port": 0},
    ]
    discovery = {"kind": "etcd", "endpoints": [etcd.endpoint], "ttl_s": 2}
    transfer = {
        "client": client,
        "staging_size": "8MiB",
        "breaker": {"failures": 2, "probe_interval_ms": 200},
        "timeouts": {"exist_ms": 300, "get_ms": 1000, "put_ms": 1000, "close_ms": 2000},
    }
    return {"transfer": transfer, "master": {"ha": True}, "discovery": discovery, "nodes": nodes}


@pytest.mark.parametrize("client", ["embedded", "host"])
def test_clients_follow_the_leader_and_no_key_is_lost_with_it(
    client: str, make_etcd: Callable[..., Etcd], tmp_path: Path
) -> None:
    etcd = make_etcd().start()
    rng = random.Random(1)
    prompt = [rng.randrange(512) for _ in range(5 * CHUNK + 3)]
    with started(tmp_path, name="elected", **sections(etcd, client)) as cluster:

        def ask() -> Answer:
            answer = complete(cluster.urls["proxy"], prompt)
            assert answer.status == 200
            return answer

        roles = {name: role(cluster, name) for name in ("master-0", "master-1")}
        assert sorted(roles.values()) == ["leader", "standby"]
        leader, standby = sorted(roles, key=lambda name: roles[name])
        file = tmp_path / "running.yaml"
        file.write_text(dump_config(cluster.config))
        # in a process of its own: of elected masters, Mooncake knows one etcd a process, for ever
        command = [sys.executable, "-m", "launch", "doctor", "--json", "-c", str(file)]
        examined = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=180)
        assert [one for one in json.loads(examined.stdout)["findings"] if one["verdict"] == "broken"] == []
        first = ask()
        wait_for(lambda: ask().cached[0] == 5 * CHUNK, 10, "a hit on the prefill node, too")
        # what the leader wrote to its log reaches the standby within its polling interval of a second
        seen = [ask() for _ in range(30)]
        kill(cluster, leader)
        wait_for(lambda: seen.append(ask()) or role(cluster, standby) == "leader", 40, "the standby leads")
        wait_for(lambda: seen.append(ask()) or seen[-1].cached == (5 * CHUNK, 5 * CHUNK), 30, "the same keys are found")
        assert {tuple(answer.tokens) for answer in seen} == {tuple(first.tokens)}


def lose_disk(etcd: Etcd) -> None:
    etcd.stop()
    etcd.wipe()
    etcd.start()


def lose_keys(etcd: Etcd) -> None:
    client = etcd.client()
    for prefix in ("mooncake-store/", "/"):
        client.delete_prefix(prefix)
    client.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lose", [Etcd.stop, lose_disk, lose_keys], ids=["dies", "loses its disk", "loses its keys"])
def test_hits_come_back_by_themselves_after_etcd_fails_and_while_it_is_dead_status_says_why_there_are_none(
    lose: Callable[[Etcd], None], make_etcd: Callable[..., Etcd], tmp_path: Path
) -> None:
    etcd = make_etcd().start()
    rng = random.Random(2)
    prompt = [rng.randrange(512) for _ in range(5 * CHUNK + 3)]
    with started(tmp_path, name="elected", **sections(etcd, "embedded")) as cluster:

        def hit() -> bool:
            answer = complete(cluster.urls["proxy"], prompt)
            return answer.status == 200 and answer.cached == (5 * CHUNK, 5 * CHUNK)

        wait_for(hit, 20, "hits")
        if lose is lose_disk:  # once both masters have followed the other's log, neither wants to lead without it
            etcd.stop()
            wait_for(lambda: not hit(), 20, "no hit")
            etcd.start()
            wait_for(hit, 30, "hits in between")
        lose(etcd)
        wait_for(lambda: not hit(), 20, "no hit")
        if etcd.process is None:
            wait_for(lambda: "leader" not in {role(cluster, f"master-{n}") for n in range(2)}, 20, "no leader")
            status = cluster_status(cluster.config)
            assert not status.well
            assert "none of 2 masters leads" in status.problems[0]
            assert "etcdctl endpoint health" in status.problems[0]
            etcd.start()
        wait_for(hit, 120, "hits again")
        wait_for(lambda: cluster_status(cluster.config).well, 30, "the cluster being well again")
