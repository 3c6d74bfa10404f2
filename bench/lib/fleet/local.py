"""Participants on this machine alone: a process each, which find one another as those of a cluster do."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.lib.fleet.crew import importable
from bench.lib.fleet.options import FleetOptions, Plan, plan
from bench.lib.fleet.site import Place, Site
from launch.process import spawn_child
from launch.topology import free_port
from pd_cache.config import BenchConfig, ClusterConfig, MasterNode, StoreNode, dump_config
from transfer.settings import MIN_SEGMENT, ByteSize

_WAIT_S = 60.0
_STOP_S = 20.0


@contextmanager
def local_participants(bench: str, site: Callable[[Place], Site], count: int) -> Iterator[Plan]:
    """The plan of `node-0`, this process, which leads; the others are started, and ended afterwards."""
    names = [f"node-{index}" for index in range(count)]
    port = free_port("127.0.0.1")
    config = ClusterConfig(
        name="bench",
        bench=BenchConfig(port=port),
        nodes=(MasterNode(name="master", port=0), *(StoreNode(name=name, segment_size=ByteSize(MIN_SEGMENT)) for name in names)),
    )  # fmt: skip
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        options = FleetOptions(file, names[0], ",".join(names), None, _WAIT_S)
        try:
            for name in names[1:]:
                command = [sys.executable, "-m", "bench.lib.fleet", bench, importable(site), "-c", str(file)]
                children.append(
                    spawn_child([*command, "--node", name, "--nodes", str(options.nodes)], stdout=subprocess.DEVNULL)
                )
            yield plan(options)
        finally:
            for child in children:
                _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """It has been told to end, or has lost its coordinator; kill it if it takes no notice."""
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
