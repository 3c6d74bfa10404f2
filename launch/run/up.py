"""`up`: runs all nodes of this machine, each in its own process, supervised. Also has the code that `launch`
shares: which node a process runs, and on which ports."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch.discovery.directory import describe_node
from launch.run.supervise import Program, StopFlag, Supervisor, to_stderr
from pd_cache.cluster import (
    ENGINES,
    ROLES,
    CacheServerNode,
    ClusterConfig,
    EtcdDiscovery,
    Node,
    Problem,
    Source,
    dump_config,
    parse_config,
)
from pd_cache.cluster.machine import bound_socket, check_machine, local_nodes
from pd_cache.errors import ConfigError
from pd_cache.runtime import RuntimeFolderError, note, read_note, temporary_folder

log = logging.getLogger(__name__)

_STARTED_TOGETHER = (("master",), ("store",), ("cache-server",), ENGINES, ("proxy",))
assert tuple(role for group in _STARTED_TOGETHER for role in group) == ROLES


@dataclass(frozen=True)
class LocalCluster:
    """Nodes that run on this machine."""

    config: ClusterConfig
    """The file, with every port chosen."""
    supervisor: Supervisor

    @property
    def urls(self) -> dict[str, str]:
        """The URL of each node, by name."""
        return dict(self.supervisor.ready_urls)


def welcome(cluster: LocalCluster, file: Path) -> str:
    """Returns what `up` prints once all nodes are ready: their number and, if there is a proxy, the page to
    watch and a command to try."""
    config, urls = cluster.config, cluster.urls
    lines = [f"all {len(urls)} nodes{'' if len(urls) == len(config.nodes) else ' of this machine'} are ready"]
    proxy = next((urls[node.name] for node in config.by_role("proxy") if node.name in urls), None)
    model = next((describe_node(config, node, "").model for node in config.by_role("decode", "both")), None)
    if proxy is not None and model is not None:
        lines.append(f"watch {proxy}/ui in a browser, or: pd-cache top -c {file}")
        lines.append("try, twice (the second is a hit; `pd-cache explain` takes the id in its answer):")
        key = " -H 'Authorization: Bearer KEY'" if config.proxy.api_keys_file else ""
        body = f"""'{{"model": "{model}", "max_tokens": 4, "prompt": ['$(seq -s, 1000)']}}'"""
        lines.append(f"  curl -s {proxy}/v1/completions -H 'Content-Type: application/json'{key} -d {body}")
    return "\n".join(lines)


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
    """Starts this machine's nodes, each when the nodes that it needs are ready, and stops them in reverse
    order at the end.

    Every process runs `pd-cache launch ROLE` on a copy of the file in which each port is chosen. If a node
    cannot be started, stops the others and raises ConfigError or SupervisorError. Raises ConfigError, too, if
    the nodes run already, and RuntimeFolderError if this user has no runtime folder of their own. If `stop`
    is set before all nodes are ready, no further node is started. `sink` gets the nodes' output, and a line
    `ready NAME URL` for each that is ready.
    """
    mine = local_nodes(config)
    if not mine:
        hosts = ", ".join(sorted({node.host for node in config.nodes}))
        raise ConfigError(
            f"{source.file}: no node of this file belongs on this machine; its hosts are {hosts}"
        )
    with ExitStack() as stack:
        resolved = stack.enter_context(chosen_ports(config, mine))
        text = f"# pid {os.getpid()}\n{dump_config(resolved)}"
        folder = stack.enter_context(temporary_folder())
        other = stack.enter_context(note(_note_of(source.file), text))
        if other is not None:
            runs = other.partition("\n")[0].removeprefix("# ")
            raise ConfigError(
                f"{source.file}: it runs here already, {runs}; stop that, or start another copy of the file"
            )
        check_machine(config, source, mine)
        file = folder / source.file.name
        file.write_text(text, encoding="utf-8")
        with Supervisor(resolved.supervisor, sink=sink) as supervisor:
            supervisor.start(
                [
                    [program_of(node, file) for node in mine if node.role in roles]
                    for roles in _STARTED_TOGETHER
                ],
                stop,
            )
            yield LocalCluster(resolved, supervisor)


def running_config(file: Path) -> ClusterConfig | None:
    """Returns the configuration, with every port chosen, of a living `up` of `file`; None if there is none.

    Ignores notes that another user could have left, and the notes of an `up` that was killed.
    """
    try:
        text = read_note(_note_of(file))
    except RuntimeFolderError as error:
        log.warning("%s", error)  # no `up` of ours runs, because `up` refuses such a folder
        return None
    return None if text is None else parse_config(text, file)[0]


def _note_of(file: Path) -> str:
    return f"up-{hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:16]}.yaml"


_HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_WHEN_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def proxy_env() -> dict[str, str]:
    """Returns what a proxy's environment has beside this process's. It puts the proxy's objects into huge
    pages, which saves processor time: after other programs ran, the processor looks up fewer pages. Empty if
    this process's environment chooses an allocator, or without huge pages: then Python's is faster."""
    library, version = platform.libc_ver()
    huge = library == "glibc" and [int(part) for part in version.split(".")] >= [2, 35]
    huge = huge and _WHEN_HUGE.exists() and "[never]" not in _WHEN_HUGE.read_text()
    return _HUGE_PAGES if huge and not _HUGE_PAGES.keys() & os.environ.keys() else {}


def program_of(node: Node, file: Path) -> Program:
    """Returns the command that runs a node of `file`, in which each port is chosen. It logs details if this
    process logs them."""
    details = ["-v"] if log.isEnabledFor(logging.DEBUG) else []
    command = (
        sys.executable,
        "-m",
        "launch",
        *details,
        "launch",
        node.role,
        "-c",
        str(file),
        "--node",
        node.name,
    )
    return Program(node.name, command, proxy_env() if node.role == "proxy" else None)


# --- which node, and on which ports -------------------------------------------------------------------------


@contextmanager
def chosen_ports(config: ClusterConfig, nodes: Iterable[Node]) -> Iterator[ClusterConfig]:
    """Yields the same cluster with a free port wherever one of `nodes` has port 0. It also has the address
    of each cache server, because a process with another environment would choose another folder for the
    socket.

    While the block runs, a socket that does not listen is bound to each of these ports, so that the kernel
    gives none of them to a server or a connection of another program: not before the node starts, and not
    while it is started again. The node itself sets SO_REUSEADDR, as most servers do, and can bind its port.
    """
    mine = {node.name for node in nodes}
    with ExitStack() as stack:
        chosen: list[Node] = []
        for node in config.nodes:
            ports = {
                key: stack.enter_context(bound_socket(node.host, 0)).getsockname()[1]
                for key, port in node.ports.items()
                if node.name in mine and port == 0
            }
            chosen.append(msgspec.structs.replace(node, **ports))
        config = msgspec.structs.replace(config, nodes=tuple(chosen))
        written = (
            msgspec.structs.replace(node, url=config.server_url(node))
            if isinstance(node, CacheServerNode)
            else node
            for node in config.nodes
        )
        yield msgspec.structs.replace(config, nodes=tuple(written))


def pick_node(config: ClusterConfig, role: str, name: str | None) -> Node:
    """Returns the node to launch: the named node, or the only node of the role on this machine. Raises
    ConfigError otherwise."""
    known = ", ".join(node.name for node in config.by_role(role))
    if not known:
        raise ConfigError(f"expected one {role} node, but the file has none")
    if name is not None:
        node = config.node(name)
        if node is None or node.role != role:
            raise ConfigError(f"--node: expected the name of a {role} node ({known}), got {name}")
        return node
    found = [node for node in local_nodes(config) if node.role == role]
    if len(found) != 1:
        raise ConfigError(
            f"expected one {role} node on this machine, got {len(found)}; the file has: {known}; "
            "say which with --node NAME"
        )
    return found[0]


def unresolved_port(config: ClusterConfig, node: Node) -> Problem | None:
    """Returns a problem if the node has to know a port that the file leaves open: other processes learn it
    only from the file."""
    if isinstance(config.discovery, EtcdDiscovery):
        return None  # other processes learn the port from etcd
    known = ("master", *ENGINES) if node.role == "proxy" else ("master",)
    for index, other in enumerate(config.nodes):
        if other.role in known and getattr(other, "port", None) == 0 and other.name != node.name:
            return Problem(
                ("nodes", index, "port"),
                f"a {node.role} node has to know this port: write one, or let `pd-cache up` choose for all nodes",
            )
    return None
