"""A small disaggregated cluster for tests, and a client for its proxy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from launch.doctor import DoctorReport, Verdict
from launch.status import cluster_status
from launch.up import LocalCluster, running
from pd_cache.cluster import ClusterConfig, read_config
from tests.support.pool import ROOT, free_port
from tests.support.waiting import wait_for

ENGINE: dict[str, Any] = {
    "kind": "reference",
    "model": {
        "name": "tiny",
        "random": {"seed": 3, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2},
    },
    "block_size": 16,
    "num_blocks": 512,
    "max_model_len": 1024,
    "step_tokens": 64,
    "threads": 1,
}  # fmt: skip
CHUNK = 64
OUTAGES: dict[str, Any] = {
    "transfer": {
        "staging_size": "8MiB",
        "breaker": {"failures": 2, "probe_interval_ms": 200},
        "timeouts": {"exist_ms": 300, "get_ms": 1000, "put_ms": 1000, "close_ms": 2000},
    },
    "handoff": {"wait_ms": 500, "stream": "always"},
}
"""Sections for `cluster_file` where something is broken on purpose, and waited for until a deadline."""


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]

    @property
    def tokens(self) -> list[int]:
        return list(self.body["choices"][0]["token_ids"])

    @property
    def cached(self) -> tuple[int, int]:
        """Tokens that the prefill and the decode node took from the pool."""
        usage = self.body["pd_cache"]
        return ((usage["prefill"] or {}).get("cached_tokens", 0), usage["self"]["cached_tokens"])


def cluster_file(folder: Path, **changes: Any) -> Path:
    """A master, a store, a prefill and a decode node and a proxy, every port free.

    Its deadlines are those of a cluster that works: no machine is so busy that it misses them. See `OUTAGES`.
    """
    tree = {
        "name": "test",
        "transfer": {
            "staging_size": "8MiB",
            "breaker": {"probe_interval_ms": 200},
            "timeouts": {"exist_ms": 10_000, "get_ms": 10_000, "put_ms": 10_000, "close_ms": 10_000},
        },
        "cache": {"chunk_size": CHUNK},
        "engine": ENGINE,
        "handoff": {"wait_ms": 60_000},
        "proxy": {"direct_tokens": 0},  # every prompt takes the whole way, unless a test says otherwise
        "supervisor": {"ready_timeout_s": 180, "stop_grace_s": 30},
        "nodes": [
            {"name": "master", "role": "master", "port": 0, "metrics_port": 0, "client_ttl_s": 2},
            {"name": "store-0", "role": "store", "segment_size": "64MiB"},
            {"name": "prefill-0", "role": "prefill", "port": 0},
            {"name": "decode-0", "role": "decode", "port": 0},
            {"name": "proxy", "role": "proxy", "port": 0},
        ],
        **changes,
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def nodes_of_every_role() -> list[dict[str, Any]]:
    """Nodes of which only the store gives memory, and only the decode node leaves its cache to a cache server."""
    return [
        {"name": "master", "role": "master", "port": 0, "metrics_port": 0, "client_ttl_s": 2},
        {"name": "store-0", "role": "store", "segment_size": "64MiB", "metrics_port": 0},
        {"name": "cache-0", "role": "cache-server", "metrics_port": 0, "segment_size": 0},
        {"name": "prefill-0", "role": "prefill", "port": 0, "segment_size": 0},
        {"name": "decode-0", "role": "decode", "port": 0, "cache_server": "cache-0"},
        {"name": "proxy", "role": "proxy", "port": 0},
    ]


def _with_ports(config: ClusterConfig) -> ClusterConfig:
    """Ports that nobody else is given: one that `up` chooses may be taken by a connection of another test before its node begins."""
    nodes = (
        msgspec.structs.replace(node, **{key: free_port() for key, port in node.ports.items() if port == 0})
        for node in config.nodes
    )
    return msgspec.structs.replace(config, nodes=tuple(nodes))


@contextmanager
def started(folder: Path, **changes: Any) -> Iterator[LocalCluster]:
    """The cluster of `cluster_file`, running, every node with its pool."""
    config, source = read_config(cluster_file(folder, **changes))
    with running(_with_ports(config), source) as cluster:
        wait_for(lambda: all(row.state == "up" or not row.asked for row in cluster_status(cluster.config).nodes), what="every node up")  # fmt: skip
        yield cluster


def complete(url: str, prompt: Any, timeout: float = 120.0, raw: bytes | None = None, **fields: Any) -> Answer:
    """Post a completion and read the whole answer, whatever its status."""
    body = raw if raw is not None else json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **fields}).encode()  # fmt: skip
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return Answer(answer.status, json.load(answer), dict(answer.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, json.loads(error.read()), dict(error.headers))


def health_at(url: str) -> dict[str, Any]:
    """What a proxy says of its nodes, whether or not it can serve."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            return dict(json.load(error))


def examined(file: Path, *inside: str) -> DoctorReport:
    """What `pd-cache doctor` says in a process of its own. `inside`: the command that runs it on a host of `tests.support.hosts`."""
    command = [*inside, sys.executable, "-m", "launch", "doctor", "--json", "-c", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=180, check=False)
    assert done.stdout, done.stderr.decode()[-2000:]
    report = msgspec.json.decode(done.stdout, type=DoctorReport)
    assert done.returncode == (1 if report.broken else 0)
    return report


def broken(report: DoctorReport) -> set[tuple[str, str]]:
    """What is broken: the check, and what it is about."""
    return {(finding.check, finding.about) for finding in report.findings if finding.verdict is Verdict.BROKEN}


def kill(cluster: LocalCluster, name: str) -> None:
    """SIGKILL a node of the cluster; nothing restarts it."""
    os.killpg(cluster.supervisor.pids[name], signal.SIGKILL)
