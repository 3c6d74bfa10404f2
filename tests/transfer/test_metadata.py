"""The other kinds of metadata service: served by the master over HTTP, and a real etcd."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.supervise import end
from tests.support.needs import NO_ETCD
from tests.support.pool import Pool, free_port
from tests.support.waiting import wait_for
from transfer.errors import Status
from transfer.staging import StagingPool
from transfer.store import GetResult, MooncakeStore


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """`host:port` of an etcd of its own."""
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip(NO_ETCD)
    port, peers = free_port(), free_port()
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
    command = [binary, "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", client,
               "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
               "--initial-cluster", f"default={peer}"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"{client}/health", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False

    try:
        wait_for(healthy, 20, "etcd")
        yield f"127.0.0.1:{port}"
    finally:
        assert not end([process], 60)


def round_trip(pool: Pool, metadata: str) -> None:
    """Put on one node, get on another, through the given metadata service."""
    settings = pool.settings(transfer={"metadata": metadata}).transfer
    with MooncakeStore(settings, master=pool.address) as store:
        store.wait_open(60)
        staging = StagingPool(8192, 4096, prefaulted=False)
        store.attach(staging)
        slot = staging.lease(time.monotonic() + 1)
        assert slot is not None
        slot.view[:] = b"m" * 4096
        assert store.start_put(["k"], [slot], [4096], timeout=20).results() == [Status.OK]
        slot.view[:] = bytes(4096)
        assert store.start_get(["k"], [slot], timeout=20).results() == [GetResult(Status.OK, 4096)]
        assert bytes(slot.view) == b"m" * 4096
        slot.release()


def test_http_metadata_is_served_by_the_master(make_pool: Callable[..., Pool]) -> None:
    metadata = f"http://127.0.0.1:{free_port()}/metadata"
    round_trip(make_pool(metadata=metadata).start(), metadata)


def test_etcd_metadata(make_pool: Callable[..., Pool], etcd: str) -> None:
    metadata = f"etcd://{etcd}"
    round_trip(make_pool(metadata=metadata).start(), metadata)
