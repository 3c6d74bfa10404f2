"""`up`: every node of a file that belongs on this machine, each in its own process, supervised."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.supervise import Program, StopFlag, Supervisor, to_stderr
from launch.topology import choose_ports, choose_sockets
from pd_cache.cluster import ROLES, ClusterConfig, Node, Source, dump_config, parse_config
from pd_cache.cluster.machine import check_machine, local_nodes
from pd_cache.errors import ConfigError
from pd_cache.runtime import RuntimeFolderError, note, read_note, temporary_folder

log = logging.getLogger(__name__)

_STARTED_TOGETHER = (("master",), ("store",), ("cache-server",), ("prefill", "decode"), ("proxy",))
assert tuple(role for group in _STARTED_TOGETHER for role in group) == ROLES


@dataclass(frozen=True)
class LocalCluster:
    """Nodes that run on this machine."""

    config: ClusterConfig
    """The file, with every port chosen."""
    supervisor: Supervisor

    @property
    def urls(self) -> dict[str, str]:
        """Where each node answers, by name."""
        return dict(self.supervisor.ready_urls)


def quiet(line: str) -> None:
    """Drops the nodes' output; a node that fails still shows its last lines."""


@contextmanager
def running(
    config: ClusterConfig,
    source: Source,
    *,
    stop: StopFlag | None = None,
    sink: Callable[[str], None] = to_stderr,
) -> Iterator[LocalCluster]:
    """Starts this machine's nodes, each when those it needs are ready, and stops them in reverse order at the end.

    Every process runs `pd-cache launch ROLE` on a copy of the file in which each port is chosen. Raises ConfigError or SupervisorError if
    they cannot all be started, after stopping those that were, and RuntimeFolderError if this user has no runtime folder of their own.
    `sink` gets the nodes' output.
    """
    mine = local_nodes(config)
    if not mine:
        hosts = ", ".join(sorted({node.host for node in config.nodes}))
        raise ConfigError(f"{source.file}: no node of this file belongs on this machine; its hosts are {hosts}")
    check_machine(config, source, mine)
    resolved = choose_sockets(choose_ports(config))
    text = dump_config(resolved)
    with temporary_folder() as folder, note(_note_of(source.file), text) as noted:
        if not noted:
            log.warning("another `up` runs %s here; `status` and `doctor` go on showing that one", source.file)
        file = folder / source.file.name
        file.write_text(text, encoding="utf-8")
        with Supervisor(resolved.supervisor, sink=sink) as supervisor:
            supervisor.start(
                [[_program(node, file) for node in mine if node.role in roles] for roles in _STARTED_TOGETHER], stop
            )
            yield LocalCluster(resolved, supervisor)


def running_config(file: Path) -> ClusterConfig | None:
    """Returns the configuration, with every port chosen, of a living `up` of `file`; None if there is none.

    Ignores notes that another user could have left there, and those of an `up` that was killed.
    """
    try:
        text = read_note(_note_of(file))
    except RuntimeFolderError as error:
        log.warning("%s", error)  # no `up` of ours runs, because `up` refuses such a folder
        return None
    return None if text is None else parse_config(text, file)[0]


def _note_of(file: Path) -> str:
    return f"up-{hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:16]}.yaml"


def _program(node: Node, file: Path) -> Program:
    command = (sys.executable, "-m", "launch", "launch", node.role, "-c", str(file), "--node", node.name)
    return Program(name=node.name, argv=command)
