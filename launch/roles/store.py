"""The role `store`: memory for the pool, given by this process or by the `mooncake_client` of its host."""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

from launch.discovery import Member
from launch.foreign import ForeignProgram, wheel_program
from launch.process import spawn_child
from launch.signals import stop_on_signals
from pd_cache.cluster import ClusterConfig, StoreNode
from transfer.environment import host_environment, split_master
from transfer.errors import PoolUnavailableError
from transfer.host import WAITS_FOR


def client_command(config: ClusterConfig, node: StoreNode) -> list[str]:
    """Returns the command of a host's `mooncake_client`. Raises RoleError if the wheel is not installed.

    Its segment is named by the address at which it listens, so that each follows from the other.
    """
    clients = sum(other.host == node.host for other in config.caching_nodes())
    # each can have its transfers under way in both directions, two control calls and a ping
    threads = node.threads or max(4, clients * (2 * config.transfer.threads + 3))
    master, _ = split_master(config.master_address)
    return [
        wheel_program("mooncake_client"),
        f"--host={node.host}:{node.port}",
        f"--port={node.port}",
        f"--master_server_address={master}",
        f"--metadata_server={config.transfer.metadata}",
        f"--protocol={config.transfer.protocol}",
        f"--device_names={','.join(config.transfer.devices)}",
        f"--global_segment_size={int(node.segment_size)}",
        f"--threads={threads}",
        "--logtostderr",
    ]


def run_store(config: ClusterConfig, node: StoreNode, ready: Callable[[str], None], member: Member) -> None:
    """Gives memory to the pool until asked to stop, then unmounts it, so that no key points at a node that is gone."""
    if config.transfer.client == "host":
        _run_host_client(config, node, ready, member)
    else:
        _run_segment(config, node, ready, member)


def _run_host_client(config: ClusterConfig, node: StoreNode, ready: Callable[[str], None], member: Member) -> None:
    """Runs a host's `mooncake_client` as a child that ends with this process, and unmounts its segment as it ends."""
    _, election = split_master(config.master_address)
    settings = config.supervisor
    listens = f"{node.host}:{node.port}"
    with stop_on_signals() as stop:
        deadline = time.monotonic() + settings.ready_timeout_s
        # without a master, mooncake_client aborts; only it finds out whether one of several leads
        while election is None and not _listening(config.master_address):
            if time.monotonic() > deadline:
                raise PoolUnavailableError(f"Mooncake master {config.master_address} not reachable")
            if stop.wait(0.2):
                return
        spawn = functools.partial(
            spawn_child,
            client_command(config, node),
            death_signal=signal.SIGTERM,
            blocked=WAITS_FOR,
            env=host_environment(config.transfer, election),
            stdout=subprocess.DEVNULL,
        )
        with (
            _questions(node, lambda: _listening(listens) or None, lambda: listens),
            ForeignProgram("mooncake_client", spawn, settings.stop_grace_s) as client,
        ):
            try:
                client.run(
                    stop,
                    serving=lambda: _listening(listens),
                    ready=lambda: ready(listens),
                    deadline=deadline,
                    hint=lambda: (
                        f"is the port {node.port} of {node.host} free, and is there memory for {node.segment_size}?"
                    ),
                    again=election is not None,  # it ends if no master leads yet
                )
            finally:
                member.leave()


def _run_segment(config: ClusterConfig, node: StoreNode, ready: Callable[[str], None], member: Member) -> None:
    """Mounts the segment from this process."""
    from transfer.store import MooncakeStore

    settings = config.settings_of(node)
    named = f"{settings.host}:{node.port}" if node.port else settings.host
    mounted: list[MooncakeStore] = []
    with (
        stop_on_signals() as stop,
        # first, so that a store that waits for its master says so
        _questions(node, lambda: mounted[0].available if mounted else None, lambda: mounted[0].hostname),
        MooncakeStore(
            settings.transfer, master=settings.master, host=named, segment_size=settings.segment_size
        ) as store,
    ):
        deadline = time.monotonic() + config.supervisor.ready_timeout_s
        while not stop.is_set():
            try:
                store.wait_open(0.2)
            except PoolUnavailableError:
                if time.monotonic() > deadline:
                    raise
            else:
                mounted.append(store)
                ready(store.hostname)
                stop.wait()
                member.leave()  # before Mooncake's close(), which holds the GIL for longer than a lease may last


@contextlib.contextmanager
def _questions(node: StoreNode, available: Callable[[], bool | None], segment: Callable[[], str]) -> Iterator[None]:
    """Answers `/health` and `/metrics` while the block runs, if the file has a port for them.

    `available` returns whether the pool answers, or None as long as the node gives no memory; `segment` the name of what it gives.
    """
    if node.metrics_port is None:
        yield
        return
    from prometheus_client import CollectorRegistry, ProcessCollector

    from launch.exposition import RoleHealth, exposed, health_of
    from pd_cache.metrics import BackendLevels, LevelCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    levels = LevelCollector()
    registry.register(levels)

    def given() -> BackendLevels:
        up = available()
        return BackendLevels(0, 0, 0, bool(up), "" if up is None else segment(), int(node.segment_size))

    levels.add(given)

    def health() -> RoleHealth:
        up = available()
        return RoleHealth("starting") if up is None else health_of(up)

    with exposed(node.host, node.metrics_port, registry, health):
        yield


def _listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True
