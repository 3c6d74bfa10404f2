"""Clusters and pools for benches, of their own: what is measured neither disturbs the cluster's pool nor is disturbed by it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from launch.up import LocalCluster, quiet, running
from pd_cache.cluster import ClusterConfig, MasterNode, Node, StoreNode, dump_config, read_config
from transfer.settings import ByteSize, TransferSettings, prepare
from transfer.store import load_mooncake


@contextmanager
def cluster_here(config: ClusterConfig) -> Iterator[LocalCluster]:
    """Runs a cluster on this machine, and yields it when it is ready."""
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(dump_config(config))
        with running(*read_config(file), sink=quiet) as cluster:
            yield cluster


@contextmanager
def local_pool(
    segment_size: int, *, transfer: TransferSettings | None = None, master: MasterNode | None = None
) -> Iterator[str]:
    """Yields `host:port` of the master of a pool with `segment_size` bytes of memory, prefaulted. `master` says how it evicts."""
    own = msgspec.structs.replace(master or MasterNode(name="master"), port=0, metrics_port=0)
    nodes: tuple[Node, ...] = (own, StoreNode(name="store", segment_size=ByteSize(segment_size)))
    with cluster_here(ClusterConfig(name="bench", transfer=transfer or TransferSettings(), nodes=nodes)) as cluster:
        yield cluster.config.master_address


@contextmanager
def own_master(config: ClusterConfig, host: str, segment_size: int = 0) -> Iterator[str]:
    """Yields `host:port` of a master on this machine, for clients with `bench_transfer(config)` on any machine.

    Its settings are those of the file's master, and no other process knows of it. A store node with `segment_size` bytes, prefaulted,
    runs beside it if that is not 0.
    """
    usual = next((node for node in config.nodes if isinstance(node, MasterNode)), MasterNode(name="master"))
    nodes: list[Node] = [msgspec.structs.replace(usual, host=host, port=0, metrics_port=0)]
    if segment_size:
        nodes.append(StoreNode(name="store", host=host, segment_size=ByteSize(segment_size)))
    own = ClusterConfig(name="bench", transfer=bench_transfer(config), nodes=tuple(nodes))
    with cluster_here(own) as cluster:
        yield cluster.config.master_address


def bench_transfer(config: ClusterConfig) -> TransferSettings:
    """Returns the file's `transfer` section for a client of a bench's own pool: without a segment unless it is given one."""
    return msgspec.structs.replace(config.transfer, metadata="P2PHANDSHAKE", segment_size=ByteSize(0))


@contextmanager
def raw_client(master: str, host: str = "127.0.0.1", transfer: TransferSettings | None = None) -> Iterator[Any]:
    """Yields a bare Mooncake client without a segment: the raw thing that benches compare with, in the same environment."""
    settings = transfer or TransferSettings()
    prepare(settings)  # read at the first setup() of a process, and this is it
    client = load_mooncake().MooncakeDistributedStore()
    devices = ",".join(settings.devices)
    code = client.setup(host, "P2PHANDSHAKE", 0, 16 << 20, settings.protocol, devices, master)
    if code != 0:
        raise RuntimeError(f"raw Mooncake setup answered {code}")
    try:
        yield client
    finally:
        client.close()
