"""`up`: every node of a file that belongs on this machine, each in its own process, supervised."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.supervisor import Program, StopEvent, Supervisor, to_stderr
from launch.topology import check_machine, choose_ports, local_nodes
from pd_cache.config import ROLES, ClusterConfig, Node, Source, dump_config, runtime_folder
from pd_cache.errors import ConfigError

_STARTED_TOGETHER = (("master",), ("store",), ("cache-server",), ("prefill", "decode"), ("proxy",))
assert tuple(role for group in _STARTED_TOGETHER for role in group) == ROLES


@dataclass(frozen=True)
class Cluster:
    """Nodes that run on this machine."""

    config: ClusterConfig
    """The file, with every port chosen."""
    supervisor: Supervisor

    @property
    def urls(self) -> dict[str, str]:
        """Where each node answers, by name."""
        return dict(self.supervisor.ready_urls)


def quiet(line: str) -> None:
    """A sink for what the nodes print where nobody watches; a node that fails shows its last lines all the same."""


@contextmanager
def running(
    config: ClusterConfig,
    source: Source,
    *,
    stop: StopEvent | None = None,
    sink: Callable[[str], None] = to_stderr,
) -> Iterator[Cluster]:
    """Start this machine's nodes, each when those it needs are ready; stop them in reverse order at the end.

    Every process runs `pd-cache launch ROLE` on a copy of the file in which each port is chosen. ConfigError or
    SupervisorError if they cannot all be started; those that were are stopped again. `sink` gets what they print.
    """
    mine = local_nodes(config)
    if not mine:
        hosts = ", ".join(sorted({node.host for node in config.nodes}))
        raise ConfigError(f"{source.file}: no node of this file belongs on this machine; its hosts are {hosts}")
    check_machine(config, source, mine)
    resolved = choose_ports(config)
    with tempfile.TemporaryDirectory(prefix="pd-cache-") as folder:
        file = Path(folder) / source.file.name
        file.write_text(dump_config(resolved), encoding="utf-8")
        with _noted(source.file, file), Supervisor(resolved.supervisor, sink=sink) as supervisor:
            supervisor.start(
                [[_program(node, file) for node in mine if node.role in roles] for roles in _STARTED_TOGETHER], stop
            )
            yield Cluster(resolved, supervisor)


def running_copy(file: Path) -> Path:
    """Where `up` leaves a copy of a file in which every port is chosen, for as long as it runs."""
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    return runtime_folder() / f"up-{digest}.yaml"


@contextmanager
def _noted(file: Path, resolved: Path) -> Iterator[None]:
    copy = running_copy(file)
    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours = copy.parent.stat().st_uid == os.getuid()  # else `status` is told the ports by hand
    if ours:
        shutil.copyfile(resolved, copy)
    try:
        yield
    finally:
        if ours:
            copy.unlink(missing_ok=True)


def _program(node: Node, file: Path) -> Program:
    command = (sys.executable, "-m", "launch", "launch", node.role, "-c", str(file), "--node", node.name)
    return Program(name=node.name, argv=command)
