"""How the participants of a bench find their coordinator.

`static`: it listens on `bench.port` of its node's host, as the file says. `etcd`: each participant registers the address at which it
would listen, below `/pd-cache/CLUSTER/bench/BENCH/`, apart from the nodes, so that nothing is routed to it.
"""

from __future__ import annotations

import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import NamedTuple

import zmq

from bench.lib.fleet.messages import FleetError, close_socket, open_socket
from bench.lib.fleet.options import Participation
from launch.discovery import View
from pd_cache.cluster import EtcdDiscovery, NodeRecord
from pd_cache.errors import ConfigError


class Meeting(NamedTuple):
    """What a participant knows once it knows which one leads."""

    leader: str
    listener: zmq.Socket[bytes] | None
    """At the coordinator: where participants come."""
    find: Callable[[], str]
    """The coordinator's address as it is known now; empty while it is not."""


@contextmanager
def meeting(plan: Participation, bench: str, tell: Callable[[str], None]) -> Iterator[Meeting]:
    """Calls `tell` with what it waits for. Raises FleetError if it is not clear within the plan's time which participant leads."""
    discovery = plan.location.config.discovery
    with ExitStack() as stack:
        if isinstance(discovery, EtcdDiscovery):
            yield _by_etcd(plan, bench, discovery, tell, stack)
        else:
            yield _by_file(plan, stack)


def _by_file(plan: Participation, stack: ExitStack) -> Meeting:
    config, leader = plan.location.config, plan.coordinator
    assert leader is not None
    node, port = config.node(leader), config.bench.port
    assert node is not None  # the plan saw to both
    listener = None
    if leader == plan.location.node:
        listener = listen(node.host, port)
        stack.callback(close_socket, listener)
    return Meeting(leader, listener, lambda: f"tcp://{node.host}:{port}")


def _by_etcd(
    plan: Participation, bench: str, discovery: EtcdDiscovery, tell: Callable[[str], None], stack: ExitStack
) -> Meeting:
    from launch.discovery.etcd import EtcdRegistration, EtcdWatch

    location, folder = plan.location, f"bench/{bench}"
    listener = listen(location.host, 0)
    stack.callback(close_socket, listener)
    port = str(listener.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")[2]
    changed = threading.Event()

    def wake(_: View) -> None:
        changed.set()

    watch = stack.enter_context(EtcdWatch(discovery, location.config.name, folder=folder, on_change=wake))
    registration = stack.enter_context(closing(EtcdRegistration(discovery, location.config.name, folder=folder)))
    registration.announce(NodeRecord(name=location.node, role=f"bench-{bench}", address=f"{location.host}:{port}"))
    leader = plan.coordinator
    deadline = time.monotonic() + plan.wait_s
    while leader is None:  # the first by name, of as many as there will be
        changed.clear()
        names = [record.name for record in watch.view().nodes]
        if len(names) == plan.expected and location.node in names:
            leader = min(names)
            break
        tell(f"{len(names)} of {plan.expected} nodes registered in etcd: {', '.join(names) or 'none'}")
        if (remaining := deadline - time.monotonic()) <= 0:
            raise FleetError(
                f"{len(names)} nodes ({', '.join(names) or 'none'}) registered for {bench} in etcd within {plan.wait_s:g} s; "
                f"--nodes says {plan.expected}"
            )
        changed.wait(min(remaining, 1.0))

    def find() -> str:
        return next((f"tcp://{record.address}" for record in watch.view().nodes if record.name == leader), "")

    return Meeting(leader, listener if leader == location.node else None, find)


def listen(host: str, port: int) -> zmq.Socket[bytes]:
    """Returns a socket that listens on the address. Raises ConfigError if that cannot be."""
    listener = open_socket(zmq.ROUTER)
    try:
        listener.bind(f"tcp://{sockets.gethostbyname(host)}:{port or '*'}")
    except (OSError, zmq.ZMQError) as error:
        close_socket(listener)
        hint = "; choose another `bench.port` in the file" if port else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from None
    return listener
