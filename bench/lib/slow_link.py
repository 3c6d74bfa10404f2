"""A pool behind a slow link: in a network namespace of its own, whose link to this machine's processes lets only so much through."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import click

from launch.supervisor import Program, Supervisor
from launch.up import quiet
from pd_cache.cluster import ClusterConfig, MasterNode, StoreNode, dump_config
from transfer.settings import ByteSize, TransferSettings

_MASTER_PORT, _METRICS_PORT, _STORE_PORT = 50051, 9003, 50052
"""In the namespace nothing else listens."""


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except subprocess.CalledProcessError as error:
        raise click.ClickException(f"{' '.join(command)}: {error.stderr.decode().strip()}") from None


class DistantPool(NamedTuple):
    """A pool at the other end of a link."""

    master: str
    """Its `host:port`."""
    here: str
    """The address at which it reaches this machine's processes."""


@contextmanager
def pool_behind(rate: str, segment_size: int, transfer: TransferSettings) -> Iterator[DistantPool]:
    """Yields a pool with `segment_size` bytes of memory, prefaulted, behind a link of `rate`.

    `rate` is in the words of `tc`, e.g. `1gbit`, and holds for each direction. Raises ClickException without root, `ip` and `tc`.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise click.ClickException("a link between network namespaces needs root, and `ip` and `tc` (Debian: iproute2)")
    name = f"pdbench{os.getpid()}"
    outside, subnet = f"pdb{os.getpid()}", f"10.199.{os.getpid() % 250}"
    with ExitStack() as stack:
        _run("ip", "netns", "add", name)
        stack.callback(_run, "ip", "netns", "del", name)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        stack.callback(subprocess.run, ("ip", "link", "del", outside), capture_output=True, timeout=60)
        inside = ("ip", "netns", "exec", name)
        shape = ("root", "tbf", "rate", rate, "burst", "256k", "latency", "100ms")
        for command in (
            ("ip", "addr", "add", f"{subnet}.1/24", "dev", outside),
            ("ip", "link", "set", outside, "up"),
            (*inside, "ip", "addr", "add", f"{subnet}.2/24", "dev", "eth0"),
            (*inside, "ip", "link", "set", "lo", "up"),
            (*inside, "ip", "link", "set", "eth0", "up"),
            ("tc", "qdisc", "add", "dev", outside, *shape),
            (*inside, "tc", "qdisc", "add", "dev", "eth0", *shape),
        ):
            _run(*command)
        host = f"{subnet}.2"
        nodes = (
            MasterNode(name="master", host=host, port=_MASTER_PORT, metrics_port=_METRICS_PORT),
            StoreNode(name="store", host=host, port=_STORE_PORT, segment_size=ByteSize(segment_size)),
        )
        config = ClusterConfig(name="bench", transfer=transfer, nodes=nodes)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-cache-bench-"))
        file = Path(folder) / "pool.yaml"
        file.write_text(dump_config(config))
        launch = (*inside, sys.executable, "-m", "launch", "launch")
        programs = [[Program(node.name, (*launch, node.role, "-c", str(file), "--node", node.name))] for node in nodes]
        supervisor = stack.enter_context(Supervisor(config.supervisor, sink=quiet))
        supervisor.start(programs)
        yield DistantPool(f"{host}:{_MASTER_PORT}", f"{subnet}.1")
