"""`bench serve` and `bench replay` across hosts, each a network namespace, on a cluster that runs there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench.lib.shrunken import allotted_bytes, object_bytes
from launch.process import spawn_child
from tests.support.cluster import cluster_file
from tests.support.hosts import Host, Network, why_not
from tests.support.pool import ROOT, Node
from tests.support.traces import conversations, write_trace

pytestmark = pytest.mark.slow
ROLES = (("master", "a"), ("prefill", "a"), ("decode", "b"), ("proxy", "c"))
"""Nodes, named by their roles, and their hosts. The pool's memory is that of a."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    if reason := why_not():
        pytest.skip(reason)
    with closing(Network(4)) as network:
        yield {name: network.host(name) for name in "abc"}


@pytest.fixture(scope="module")
def cluster(hosts: dict[str, Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of a cluster at work; its pool has room for what all tests put there."""
    ports: dict[str, dict[str, Any]] = {
        "master": {"port": 50051, "metrics_port": 9003},
        "prefill": {"port": 8100, "segment_size": "64MiB"},
        "decode": {"port": 8100},
        "proxy": {"port": 8000},
    }
    tree = [{"name": role, "role": role, "host": hosts[host].address, **ports[role]} for role, host in ROLES]
    file = cluster_file(tmp_path_factory.mktemp("cluster"), nodes=tree)
    nodes: list[Node] = []
    try:
        for role, host in ROLES:
            nodes.append(Node(role, role, file, wait=role == "master", host=hosts[host]))
        for node in nodes[1:]:
            node.wait_ready()
        yield file
    finally:
        for node in reversed(nodes):
            node.stop()


@pytest.fixture
def measure(hosts: dict[str, Host], cluster: Path) -> Callable[..., dict[str, Any]]:
    """Runs a bench on a and b; the only row of what the coordinator on b printed, `decode` being the first name."""

    def run(bench: str, *arguments: str) -> dict[str, Any]:
        command = (sys.executable, "-m", "launch", "bench", bench, "-c", str(cluster), "--json", *arguments)
        machines = {
            name: spawn_child(hosts[name].inside(*command), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for name in "ab"
        }
        try:
            out, errors = machines["b"].communicate(timeout=300)
            assert machines["b"].returncode == 0, errors.decode()
            assert machines["a"].communicate(timeout=60)[0] == b""
            assert machines["a"].returncode == 0
        finally:
            for machine in machines.values():
                machine.kill()
                machine.communicate()
        (row,) = json.loads(out)["results"]
        return dict(row)

    return run


def test_generators_on_two_hosts_put_a_cluster_under_load(hosts: dict[str, Host], measure: Any) -> None:
    before = {name: hosts[name].sent() for name in "ab"}
    load = {
        "--rate": 10,
        "--requests": 24,
        "--prompt-tokens": 640,
        "--shared": 0.8,
        "--prefixes": 2,
        "--output-tokens": 4,
    }
    row = measure("serve", "--only-reuse", *(str(part) for option in load.items() for part in option))
    assert (row["answered"], row["errors"]) == (24, {})
    assert 0 < row["hit_rate"] <= row["ideal_hit_rate"]
    for name, sent in before.items():
        assert hosts[name].sent() - sent > 12 * 640, "both sent their share"


def test_two_hosts_replay_a_trace_on_the_clusters_pool(measure: Any, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl.gz", conversations(20, 4))
    row = measure("replay", "--trace", str(trace))
    assert row["hit_rate"] == row["ideal"]
    assert row["stored"] == 20 * 12
    assert row["capacity_chunks"] == (64 << 20) // allotted_bytes(object_bytes(4096))
