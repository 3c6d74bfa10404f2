"""Pools for benches, of their own: what is measured neither disturbs the cluster's pool nor is disturbed by it."""

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
def local_pool(
    segment_size: int, *, transfer: TransferSettings | None = None, master: MasterNode | None = None
) -> Iterator[str]:
    """Yields `host:port` of the master of a pool with `segment_size` bytes of memory, prefaulted. `master` says how it evicts."""
    with _pool(segment_size, transfer or TransferSettings(), master) as cluster:
        yield cluster.config.master_address


@contextmanager
def watched_pool(segment_size: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields the same as `local_pool`, and the pids of the processes `master` and `store`."""
    with _pool(segment_size, TransferSettings()) as cluster:
        yield cluster.config.master_address, dict(cluster.supervisor.pids)


@contextmanager
def whole_pool(segment_size: int, master: MasterNode) -> Iterator[ClusterConfig]:
    """Yields the file of a pool as `local_pool` makes it, with every port in it."""
    with _pool(segment_size, TransferSettings(), master) as cluster:
        yield cluster.config


@contextmanager
def own_master(config: ClusterConfig, host: str, segment_size: int = 0, **changes: Any) -> Iterator[str]:
    """Yields `host:port` of a master on this machine, for clients with `bench_transfer(config)` on any machine.

    Its settings are those of the file's master, except for `changes` (fields of `MasterNode`), and no other process knows of it. A store
    node with `segment_size` bytes, prefaulted, runs beside it if that is not 0.
    """
    usual = next((node for node in config.nodes if isinstance(node, MasterNode)), MasterNode(name="master"))
    master = msgspec.structs.replace(usual, host=host, port=0, metrics_port=0, **changes)
    stores = [StoreNode(name="store", host=host, segment_size=ByteSize(segment_size))] if segment_size else []
    with _running(bench_transfer(config), master, *stores) as own:
        yield own.config.master_address


def bench_transfer(config: ClusterConfig) -> TransferSettings:
    """Returns the file's `transfer` section for a client of a bench's own pool: without a segment unless it is given one."""
    return msgspec.structs.replace(config.transfer, metadata="P2PHANDSHAKE", segment_size=ByteSize(0))


@contextmanager
def _pool(segment_size: int, transfer: TransferSettings, master: MasterNode | None = None) -> Iterator[LocalCluster]:
    own = msgspec.structs.replace(master or MasterNode(name="master"), port=0, metrics_port=0)
    with _running(transfer, own, StoreNode(name="store", segment_size=ByteSize(segment_size))) as cluster:
        yield cluster


@contextmanager
def _running(transfer: TransferSettings, *nodes: Node) -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder:
        file = Path(folder) / "pool.yaml"
        file.write_text(dump_config(ClusterConfig(name="bench", transfer=transfer, nodes=nodes)))
        config, source = read_config(file)
        with running(config, source, sink=quiet) as cluster:
            yield cluster


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
