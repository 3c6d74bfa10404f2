"""A small disaggregated cluster for tests, and a client for what its nodes serve."""

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import yaml
from prometheus_client.parser import text_string_to_metric_families

from launch.doctor.report import DoctorReport, Verdict
from launch.run.up import running
from launch.watch.asker import cluster_status
from pd_cache.cluster import dump_config, load_config, read_config
from tests.support.cli import program
from tests.support.pool import ROOT, free_port
from tests.support.waiting import wait_for

ENGINE = {
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
OUTAGES = {
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
    headers: dict

    @property
    def tokens(self):
        return self.body["choices"][0]["token_ids"]

    @property
    def cached(self):
        """Tokens that the prefill and the decode node took from the pool."""
        usage = self.body["pd_cache"]
        return ((usage["prefill"] or {}).get("cached_tokens", 0), usage["self"]["cached_tokens"])


_NODES = {
    "master": {"port": 0, "metrics_port": 0, "client_ttl_s": 2},
    "store": {"segment_size": "64MiB"},
    "cache-server": {"metrics_port": 0, "segment_size": 0},
    "prefill": {"port": 0},
    "decode": {"port": 0},
    "proxy": {"port": 0},
}


def free_node(name, **changes):
    """A node of the role that its name begins with, every port free."""
    role = next(role for role in _NODES if role.split("-")[0] == name.split("-")[0])
    return {"name": name, "role": role, **_NODES[role], **changes}


def nodes_of_every_role():
    """Nodes of which only the store gives memory, and only the decode node leaves its cache to a cache
    server."""
    store, decode = free_node("store-0", metrics_port=0), free_node("decode-0", cache_server="cache-0")
    return [
        free_node("master"),
        store,
        free_node("cache-0"),
        free_node("prefill-0", segment_size=0),
        decode,
        free_node("proxy"),
    ]


def cluster_file(folder, **changes):
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
        "nodes": [free_node(name) for name in ("master", "store-0", "prefill-0", "decode-0", "proxy")],
        **changes,
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def with_ports(config):
    """The same cluster, with a port that no other test is given wherever a node has port 0."""
    nodes = (
        msgspec.structs.replace(node, **{key: free_port() for key, port in node.ports.items() if port == 0})
        for node in config.nodes
    )
    return msgspec.structs.replace(config, nodes=tuple(nodes))


@contextmanager
def started(folder, **changes):
    """The cluster of `cluster_file`, running, every node with its pool. The file has the ports of the nodes,
    so that commands find them."""
    file = cluster_file(folder, **changes)
    file.write_text(dump_config(with_ports(load_config(file))))
    config, source = read_config(file)
    with running(config, source) as cluster:
        wait_for(lambda: all(row.state in ("up", "not asked") for row in cluster_status(cluster.config).nodes), "every node up")  # fmt: skip
        yield cluster


def fetched(url, body=None, *, headers=None, timeout=120.0):
    """What a GET is answered with, or a POST of `body` as JSON, whatever its status: JSON decoded, all else
    as text."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read().decode()
        return Answer(
            answer.status, json.loads(text) if text[:1] in ("{", "[") else text, dict(answer.headers)
        )


def complete(url, prompt, timeout=120.0, headers=None, **fields):
    """Post a completion and read the whole answer, whatever its status."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **fields}
    return fetched(f"{url}/v1/completions", body, headers=headers, timeout=timeout)


def metric_at(url, name, headers=None, **labels):
    """The sum of a metric of a node over all label sets that have `labels`."""
    lines = [
        line
        for line in str(fetched(f"{url}/metrics", headers=headers).body).splitlines()
        if line.startswith(name)
    ]
    samples = [one for family in text_string_to_metric_families("\n".join(lines)) for one in family.samples]
    return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())


def examined(file, *inside):
    """What `pd-cache doctor` says in a process of its own. `inside`: the command that runs it on a host of
    `tests.support.hosts`."""
    command = [*inside, *program("doctor", "--json", "-c", file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=180, check=False)
    assert done.stdout, done.stderr.decode()[-2000:]
    report = msgspec.json.decode(done.stdout, type=DoctorReport)
    assert done.returncode == (1 if report.broken else 0)
    return report


def broken(report):
    """What is broken: the check, and what it is about."""
    return {
        (finding.check, finding.about) for finding in report.findings if finding.verdict is Verdict.BROKEN
    }


def kill(cluster, name):
    """SIGKILL a node of the cluster; nothing restarts it."""
    os.killpg(cluster.supervisor.pids[name], signal.SIGKILL)
