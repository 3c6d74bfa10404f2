"""Two masters of which etcd elects one: hits come back by themselves however etcd fails, and when the leader dies, the keys are still there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.operate.watched import cluster_status
from launch.run.up import LocalCluster
from tests.support.cluster import CHUNK, OUTAGES, Answer, broken, complete, examined, fetched, free_node, kill, started
from tests.support.etcd import Etcd
from tests.support.needs import needs_etcd
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.slow(seconds=300),  # nearly all of it waits for leases that Mooncake and etcd let run out
    needs_etcd,
]
PROMPT = random.Random(1).choices(range(512), k=5 * CHUNK + 3)
MASTERS = ("master-0", "master-1")


def role(cluster: LocalCluster, name: str) -> str:
    port = getattr(cluster.config.node(name), "metrics_port", 0)
    try:
        health = fetched(f"http://127.0.0.1:{port}/health", timeout=2).body
    except OSError:
        return "gone"
    return "leader" if health.get("service_ready") else str(health.get("role"))


def ask(cluster: LocalCluster) -> Answer:
    return complete(cluster.urls["proxy"], PROMPT)


def hit(cluster: LocalCluster) -> bool:
    answer = ask(cluster)
    return answer.status == 200 and answer.cached == (5 * CHUNK, 5 * CHUNK)


@pytest.fixture
def elected(make_etcd: Callable[..., Etcd], tmp_path: Path) -> Iterator[tuple[LocalCluster, Etcd]]:
    etcd = make_etcd().start()
    nodes = [
        *(free_node(name, client_ttl_s=20) for name in MASTERS),
        *(free_node(name) for name in ("store-0", "decode-0", "prefill-0", "proxy")),
    ]
    discovery = {"kind": "etcd", "endpoints": [etcd.endpoint], "ttl_s": 2}
    sections = {"transfer": OUTAGES["transfer"], "master": {"ha": True}, "discovery": discovery, "nodes": nodes}
    with started(tmp_path, name="elected", **sections) as cluster:
        yield cluster, etcd


def test_hits_survive_every_way_in_which_etcd_fails_and_then_the_death_of_the_leader(elected, tmp_path):
    """One cluster: an outage is followed by the next."""
    cluster, etcd = elected

    def led() -> bool:
        return "leader" in {role(cluster, name) for name in MASTERS}

    assert sorted(role(cluster, name) for name in MASTERS) == ["leader", "standby"]
    # in a process of its own: of elected masters, Mooncake knows one etcd a process, for ever
    assert broken(examined(tmp_path / "cluster.yaml")) == set()
    wait_for(lambda: hit(cluster), 20, "hits")

    etcd.stop()
    wait_for(lambda: not hit(cluster), 20, "no hit")
    wait_for(lambda: not led(), 20, "no leader")
    status = cluster_status(cluster.config)
    assert not status.well
    assert "none of 2 masters leads" in status.problems[0]
    assert "etcdctl endpoint health" in status.problems[0]
    etcd.start()
    wait_for(led, 120, "a leader again")  # before that, no prompt is worth being computed
    wait_for(lambda: hit(cluster), 120, "hits again")
    wait_for(lambda: cluster_status(cluster.config).well, 30, "the cluster being well again")

    # both masters have followed the other's log by now: neither would want to lead without it
    etcd.stop()
    etcd.wipe()
    etcd.start()
    wait_for(lambda: not hit(cluster), 20, "no hit")
    wait_for(lambda: hit(cluster), 120, "hits although etcd knows nothing any more")
    wait_for(lambda: cluster_status(cluster.config).well, 30, "the cluster being well again")

    roles = {role(cluster, name): name for name in MASTERS}
    # what the leader wrote to its log reaches the standby within its polling interval of a second
    seen = [ask(cluster) for _ in range(30)]
    kill(cluster, roles["leader"])
    wait_for(lambda: seen.append(ask(cluster)) or role(cluster, roles["standby"]) == "leader", 40, "the standby leads")
    wait_for(lambda: seen.append(ask(cluster)) or hit(cluster), 30, "the same keys are found")
    assert {answer.status for answer in seen} == {200}
    assert len({tuple(answer.tokens) for answer in seen}) == 1
