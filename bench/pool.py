"""A pool for a bench: a master and one store node, each in a process of its own, on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.up import quiet, running
from pd_cache.config import ClusterConfig, MasterNode, StoreNode, dump_config, read_config
from transfer.environment import prepare
from transfer.settings import ByteSize, TransferSettings
from transfer.store import load_mooncake


@contextmanager
def local_pool(segment_size: int) -> Iterator[str]:
    """`host:port` of the master of a pool with `segment_size` bytes of memory, prefaulted."""
    with _pool(segment_size, TransferSettings()) as config:
        yield config.master_address


@contextmanager
def host_pool(segment_size: int) -> Iterator[tuple[str, str]]:
    """`host:port` of a master, and of the `mooncake_client` that owns `segment_size` bytes of memory, prefaulted."""
    with _pool(segment_size, TransferSettings(client="host")) as config:
        store = config.node("store")
        assert isinstance(store, StoreNode)
        yield config.master_address, f"{store.host}:{store.port}"


@contextmanager
def _pool(segment_size: int, transfer: TransferSettings) -> Iterator[ClusterConfig]:
    nodes = (
        MasterNode(name="master", port=0, metrics_port=0),
        StoreNode(name="store", segment_size=ByteSize(segment_size)),
    )
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder:
        file = Path(folder) / "pool.yaml"
        file.write_text(dump_config(ClusterConfig(name="bench", transfer=transfer, nodes=nodes)))
        config, source = read_config(file)
        with running(config, source, sink=quiet) as cluster:
            yield cluster.config


@contextmanager
def raw_client(master: str) -> Iterator[Any]:
    """A bare Mooncake client without a segment: the raw thing that benches compare with, in the same environment."""
    prepare(TransferSettings())  # read at the first setup() of a process, and this is it
    client = load_mooncake().MooncakeDistributedStore()
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
    if code != 0:
        raise RuntimeError(f"raw Mooncake setup answered {code}")
    try:
        yield client
    finally:
        client.close()


@contextmanager
def raw_host_client(address: str) -> Iterator[Any]:
    """A bare dummy client of the `mooncake_client` at `address`."""
    client = load_mooncake().MooncakeDistributedStore()
    code = client.setup_dummy(0, 16 << 20, address)
    if code != 0:
        raise RuntimeError(f"raw Mooncake setup_dummy answered {code}")
    try:
        yield client
    finally:
        client.close()
