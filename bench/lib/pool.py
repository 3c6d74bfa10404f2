"""Clusters and pools of the bench's own, so that the bench and the cluster's pool do not disturb each
other."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import msgspec

from bench.lib.report import file_type
from launch.run.up import LocalCluster, quiet, running
from pd_cache.cluster import ClusterConfig, MasterNode, Node, StoreNode, dump_config, parse_config
from transfer.settings import TransferSettings, prepare
from transfer.store import load_mooncake

config_option = click.option("-c", "--config", "file", type=file_type, help="The cluster's YAML file.")


@contextmanager
def cluster_here(config: ClusterConfig) -> Iterator[LocalCluster]:
    """Runs a cluster on this machine, and yields it when it is ready."""
    name = f"bench-{uuid.uuid4().hex}.yaml"  # its own, because a file runs only once
    with running(*parse_config(dump_config(config), name), sink=quiet) as cluster:
        yield cluster


@contextmanager
def local_pool(
    segment_size: int,
    *,
    host: str = "127.0.0.1",
    transfer: TransferSettings | None = None,
    master: MasterNode | None = None,
) -> Iterator[str]:
    """Yields `host:port` of the master of a new pool, for clients on any machine. No other process knows it.

    If `segment_size` is not 0, a store node with as many prefaulted bytes runs beside the master. `master`
    says how the master evicts.
    """
    nodes: list[Node] = [
        msgspec.structs.replace(master or MasterNode(name="master"), host=host, port=0, metrics_port=0)
    ]
    if segment_size:
        nodes.append(StoreNode(name="store", host=host, segment_size=segment_size))
    own = ClusterConfig(name="bench", transfer=transfer or TransferSettings(), nodes=tuple(nodes))
    with cluster_here(own) as cluster:
        yield cluster.config.master_address


def bench_transfer(config: ClusterConfig) -> TransferSettings:
    """Returns the file's `transfer` section for a client of a bench's own pool. The client has no segment,
    unless the caller adds one."""
    return msgspec.structs.replace(config.transfer, metadata="P2PHANDSHAKE", segment_size=0)


@contextmanager
def raw_client(
    master: str, host: str = "127.0.0.1", transfer: TransferSettings | None = None
) -> Iterator[Any]:
    """Yields a bare Mooncake client without a segment, in the same environment. Benches compare pd-cache with
    it."""
    settings = transfer or TransferSettings()
    prepare(
        settings
    )  # Mooncake reads these variables at the first setup() of a process, which is the next one
    client = load_mooncake().MooncakeDistributedStore()
    devices = ",".join(settings.devices)
    code = client.setup(host, "P2PHANDSHAKE", 0, 16 << 20, settings.protocol, devices, master)
    if code != 0:
        raise RuntimeError(f"raw Mooncake setup answered {code}")
    try:
        yield client
    finally:
        client.close()
