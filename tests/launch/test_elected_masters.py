"""Two masters of which etcd elects one: hits come back by themselves however etcd fails, and when the leader
dies, the keys are still there.

One cluster for all tests: it takes a minute to start and to stop.
"""

import random

import pytest

from launch.watch.asker import cluster_status
from tests.support.cli import run_program
from tests.support.cluster import (
    CHUNK,
    OUTAGES,
    broken,
    complete,
    examined,
    fetched,
    free_node,
    kill,
    started,
)
from tests.support.etcd import Etcd
from tests.support.leaks import no_leaks
from tests.support.needs import needs_etcd
from tests.support.pool import free_port
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.slow(seconds=300),  # nearly all of it waits for leases that Mooncake and etcd let run out
    needs_etcd,
]
CHUNKS = 2
PROMPT = random.Random(1).choices(range(512), k=CHUNKS * CHUNK + 3)
MASTERS = ("master-0", "master-1")


def role(cluster, name):
    port = getattr(cluster.config.node(name), "metrics_port", 0)
    try:
        health = fetched(f"http://127.0.0.1:{port}/health", timeout=2).body
    except OSError:
        return "gone"
    return "leader" if health.get("service_ready") else str(health.get("role"))


def ask(cluster):
    return complete(cluster.urls["proxy"], PROMPT)


def hit(cluster):
    answer = ask(cluster)
    return answer.status == 200 and answer.cached == (CHUNKS * CHUNK, CHUNKS * CHUNK)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind():
    """Of all tests together: they start etcd anew."""
    with no_leaks():
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("elected") / "cluster.yaml"


@pytest.fixture(scope="module")
def elected(file):
    etcd = Etcd(file.parent)
    try:
        nodes = [
            *(free_node(name, client_ttl_s=20) for name in MASTERS),
            *(free_node(name, port=free_port()) for name in ("store-0", "store-1")),
            *(free_node(name, segment_size=0) for name in ("decode-0", "prefill-0")),
            free_node("proxy"),
        ]
        sections = {
            "transfer": OUTAGES["transfer"],
            "master": {"ha": True},
            "discovery": {"kind": "etcd", "endpoints": [etcd.start().endpoint], "ttl_s": 2},
            # masters that lost etcd do not stop when asked
            "supervisor": {"ready_timeout_s": 180, "stop_grace_s": 6},
            "nodes": nodes,
        }
        with started(file.parent, name="elected", **sections) as cluster:
            yield cluster, etcd
    finally:
        etcd.stop()


def test_of_elected_masters_the_leader_drains(elected, file):
    cluster, _ = elected
    wait_for(lambda: hit(cluster), "hits")
    # in a process of its own: of elected masters, Mooncake knows one etcd a process, for ever
    run_program("drain", "store-0", "-c", file)
    states = {row.name: row.memory for row in cluster_status(cluster.config).nodes}
    assert (states["store-0"], states["store-1"]) == ("drained", "")
    wait_for(lambda: hit(cluster), "hits in what moved")


def test_hits_survive_every_way_in_which_etcd_fails_and_then_the_death_of_the_leader(elected, file):
    """One cluster: an outage is followed by the next."""
    cluster, etcd = elected

    def led():
        return "leader" in {role(cluster, name) for name in MASTERS}

    assert sorted(role(cluster, name) for name in MASTERS) == ["leader", "standby"]
    assert broken(examined(file)) == set()
    wait_for(lambda: hit(cluster), "hits")

    etcd.stop()
    wait_for(lambda: not hit(cluster), "no hit")
    wait_for(lambda: not led(), "no leader")
    status = cluster_status(cluster.config)
    assert not status.well
    assert "none of 2 masters leads" in status.problems[0]
    assert "etcdctl endpoint health" in status.problems[0]
    etcd.start()
    wait_for(led, "a leader again")  # before that, no prompt is worth being computed
    wait_for(lambda: hit(cluster), "hits again")
    wait_for(lambda: cluster_status(cluster.config).well, "the cluster being well again")

    # both masters have followed the other's log by now: neither would want to lead without it
    etcd.stop()
    etcd.wipe()
    etcd.start()
    wait_for(lambda: not hit(cluster), "no hit")
    wait_for(lambda: hit(cluster), "hits although etcd knows nothing any more")
    wait_for(lambda: cluster_status(cluster.config).well, "the cluster being well again")

    roles = {role(cluster, name): name for name in MASTERS}
    # what the leader wrote to its log reaches the standby within its polling interval of a second
    seen = [ask(cluster) for _ in range(30)]
    kill(cluster, roles["leader"])
    wait_for(
        lambda: seen.append(ask(cluster)) or role(cluster, roles["standby"]) == "leader", "the standby leads"
    )
    wait_for(lambda: seen.append(ask(cluster)) or hit(cluster), "the same keys are found")
    assert {answer.status for answer in seen} == {200}
    assert len({tuple(answer.tokens) for answer in seen}) == 1
