"""The options that every bench across machines has, and what they mean for this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.lib.fleet.messages import end_if_stuck
from bench.lib.fleet.site import Location
from pd_cache.cluster import ClusterConfig, EtcdDiscovery, Node, StoreNode, read_config
from pd_cache.cluster.addresses import is_local
from pd_cache.errors import ConfigError, PdCacheError


@dataclass(frozen=True)
class FleetOptions:
    """As given on the command line. Without a `file` the bench runs on this machine alone."""

    file: Path | None = None
    node: str | None = None
    nodes: str | None = None
    coordinator: str | None = None
    wait_s: float = 120.0
    local: int | None = None


@dataclass(frozen=True)
class Participation:
    """How this process takes part."""

    location: Location
    """Where this machine is in it."""
    expected: frozenset[str] | int
    """All participants' names, or how many they are."""
    coordinator: str | None
    """None for the first by name of the participants that will have come."""
    wait_s: float


def fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a click command the options, as a `FleetOptions` named `fleet`; errors are one line and an exit code."""

    @click.option("-c", "--config", "file", type=click.Path(path_type=Path), help="The cluster's YAML file; without it the bench runs on this machine alone.")  # fmt: skip
    @click.option("--node", help="Which participant this machine is, by the name of its node in the file.")
    @click.option("--nodes", help="All participants, as NAME,NAME,…, or with etcd also their number. By default the first node with a cache or memory of every host in the file.")  # fmt: skip
    @click.option("--coordinator", help="Who leads and prints the report; by default the first participant by name.")
    @click.option("--wait", "wait_s", default=120.0, show_default=True, type=click.FloatRange(1.0), help="Seconds to wait for the others.")  # fmt: skip
    @click.option("--local", type=click.IntRange(1, 64), help="Without a file: how many participants to run on this machine.")  # fmt: skip
    @functools.wraps(command)
    def with_fleet(
        file: Path | None,
        node: str | None,
        nodes: str | None,
        coordinator: str | None,
        wait_s: float,
        local: int | None,
        **others: Any,
    ) -> Any:
        options = FleetOptions(file, node, nodes, coordinator, wait_s, local)
        try:
            return command(fleet=options, **others)
        except PdCacheError as error:
            shown = click.UsageError(str(error)) if isinstance(error, ConfigError) else click.ClickException(str(error))
            end_if_stuck(shown.exit_code, f"Error: {error}")
            raise shown from error
        except KeyboardInterrupt:
            end_if_stuck(1, "Aborted!")
            raise

    return with_fleet


def plan(options: FleetOptions) -> Participation:
    """Returns what `options` mean on this machine. Raises ConfigError where they cannot be followed."""
    if options.file is None:
        raise ConfigError("--node, --nodes and --coordinator need the cluster's file: -c FILE")
    config, _ = read_config(options.file)
    expected = _expected(config, options.nodes)
    name = options.node or _only_local(config, expected)
    node = config.node(name)
    if node is None:
        raise ConfigError(
            f"--node {name}: no such node in the file; there are: {', '.join(n.name for n in config.nodes)}"
        )
    if not is_local(node.host):
        raise ConfigError(f"--node {name}: its host {node.host} is not an address of this machine")
    leader = options.coordinator
    if isinstance(expected, frozenset):
        for who, option in ((name, "--node"), (leader, "--coordinator")):
            if who is not None and who not in expected:
                raise ConfigError(
                    f"{option} {who}: is none of the participants, which are {', '.join(sorted(expected))}"
                )
        leader = leader or min(expected)
    if not isinstance(config.discovery, EtcdDiscovery):
        if leader is None:
            raise ConfigError("--nodes: with a number, and without etcd, --coordinator must be given")
        if config.node(leader) is None:
            raise ConfigError(
                f"the coordinator {leader} is no node of the file, and without etcd its address is not known"
            )
    return Participation(Location(name, node.host, config), expected, leader, options.wait_s)


def _expected(config: ClusterConfig, nodes: str | None) -> frozenset[str] | int:
    etcd = isinstance(config.discovery, EtcdDiscovery)
    if nodes is None:
        if etcd:
            raise ConfigError("with etcd the file need not name all nodes: say --nodes NUMBER, or --nodes NAME,NAME,…")
        return frozenset(default_participants(config))
    if nodes.isdigit():
        if not 1 <= int(nodes) <= 4096:
            raise ConfigError(f"--nodes {nodes}: 1 to 4096 are allowed")
        return int(nodes)
    names = [name.strip() for name in nodes.split(",")]
    known = {node.name for node in config.nodes}
    for name in names:
        if not name or names.count(name) > 1:
            raise ConfigError(f"--nodes {nodes}: names, each once, separated by commas")
        if not etcd and name not in known:
            raise ConfigError(f"--nodes: {name}: no such node in the file; there are: {', '.join(sorted(known))}")
    return frozenset(names)


def default_participants(config: ClusterConfig) -> list[str]:
    """Returns the first node of every host that has a cache or gives memory; of all hosts' first nodes where there are none such."""
    caching = config.caching_nodes()
    chosen: list[Node] = [node for node in config.nodes if node in caching or isinstance(node, StoreNode)]
    chosen = chosen or list(config.nodes)
    first = {node.host: node.name for node in reversed(chosen)}
    return sorted(first.values())


def _only_local(config: ClusterConfig, expected: frozenset[str] | int) -> str:
    names = default_participants(config) if isinstance(expected, int) else sorted(expected)
    here = [name for name in names if (node := config.node(name)) is not None and is_local(node.host)]
    if not here:
        raise ConfigError(
            f"no participant is on this machine; they are {', '.join(names) or 'none'}: say so with --node, or --nodes"
        )
    if len(here) > 1:
        raise ConfigError(
            f"{len(here)} participants are on this machine ({', '.join(here)}); say which with --node NAME"
        )
    return here[0]
