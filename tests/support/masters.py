"""Clusters whose masters etcd elects."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from launch.up import LocalCluster
from tests.support.etcd import Etcd


def role(cluster: LocalCluster, name: str) -> str:
    node = cluster.config.node(name)
    port = getattr(node, "metrics_port", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            health = json.load(answer)
    except OSError:
        return "gone"
    return "leader" if health.get("service_ready") else str(health.get("role"))


def sections(etcd: Etcd) -> dict[str, Any]:
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
        "staging_size": "8MiB",
        "breaker": {"failures": 2, "probe_interval_ms": 200},
        "timeouts": {"exist_ms": 300, "get_ms": 1000, "put_ms": 1000, "close_ms": 2000},
    }
    return {"transfer": transfer, "master": {"ha": True}, "discovery": discovery, "nodes": nodes}
