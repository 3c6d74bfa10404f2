"""Runs benches on one machine or two. Of two machines, one serves; the other connects, leads and prints the
report.

    pd-cache bench bandwidth --serve 10.0.0.1:50070      on one machine: until Ctrl-C, bench after bench
    pd-cache bench bandwidth --connect 10.0.0.1:50070      on the other

A bench is a `Site` and a function that leads. The site's methods `(self, job) -> result` are steps. Each site
has a process of its own, on this machine or the other. The machine that connects leads: it makes the sites do
steps at the same time (`Crew.run`). msgspec encodes jobs and results. A site that needs further processes,
such as many clients, has a crew of its own. Every wait of the leading machine has a deadline. Nothing is
authenticated.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import zmq

import pd_cache
from bench.lib.pool import config_option
from bench.lib.report import Check, finish
from launch.run.supervise import end, spawn_child
from pd_cache.cluster import ClusterConfig, MasterNode, dump_config, load_config
from pd_cache.cluster.machine import host_of, port_of, source_address
from pd_cache.decoding import msgpack_decoder
from pd_cache.errors import ConfigError, PdCacheError
from pd_cache.runtime import temporary_folder

J = TypeVar("J")
R = TypeVar("R")
MOST = 1024
"""The most processes of a crew."""
_OPEN, _LEAVE = b"+", b"-"
"""Messages in place of a step's name: open the site, close the site."""
_HELLO_S, _START_S, _GRACE_S = 30.0, 300.0, 20.0
"""The time in which the other machine must answer; in which a crew's processes must start, with the bench's
imports; and in which they must end."""


class PeerError(PdCacheError):
    """The other machine, or a process of a crew, failed or did not answer in time."""


@dataclass(frozen=True)
class Location:
    """The place of a site: the name of its machine, the address at which the other machine reaches it, and
    its machine's cluster file."""

    node: str
    host: str
    config: ClusterConfig

    @classmethod
    def here(cls) -> Location:
        """Returns this machine, for a bench without a cluster file."""
        return cls(
            "node", "127.0.0.1", ClusterConfig(name="bench", nodes=(MasterNode(name="master", port=0),))
        )


class Site:
    """Base of a bench's own class. A site is made when a bench begins, and is always closed at its end."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.held = ExitStack()
        """Everything that the site has opened. It is released in a bounded time."""


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a click command the arguments `file`, `serve` and `connect` of `conduct`."""
    for add in (
        click.option("--connect", metavar="HOST:PORT", help="Lead, with the machine that serves at this address."),
        click.option("--serve", metavar="HOST:PORT", help="Take part in what another machine leads that connects to this address."),
        config_option,
    ):  # fmt: skip
        command = add(command)
    return command


def conduct(
    site: type[Site],
    lead: Callable[[Crew], dict[str, Any]],
    checks_of: Callable[[dict[str, Any]], list[Check]],
    *,
    local: int,
    file: Path | None,
    serve: str | None,
    connect: str | None,
    **output: Any,
) -> None:
    """Takes part in a bench. The leading machine reports what `lead` returns. A serving machine serves until
    Ctrl-C.

    Without `serve` and `connect`, `local` sites run on this machine. `site` is a class that can be imported.
    `output` is for `finish`.
    """
    config = Location.here().config if file is None else load_config(file)
    if serve is not None:
        host, _ = _address(serve)
        with suppress(KeyboardInterrupt):
            serve_site(site, f"tcp://{serve}", Location("node-1", host, config))
        return
    reached, host = connect or (config.master_address if file is not None else ""), "127.0.0.1"
    if reached:  # this machine's address as the host of that address sees it
        try:
            host = source_address(*_address(reached))
        except OSError as error:
            raise ConfigError(f"{reached}: {error}") from None
    own = Location("node", host, config)
    with closing(Crew(site, own, 1 if connect else local, connect)) as crew:
        figures = lead(crew)
    finish(figures, checks_of(figures), **output)


class Crew:
    """The sites of a bench, by name: `NODE-0`, `NODE-1` …, where `NODE` is the location's. For one thread."""

    def __init__(self, site: type[Site], location: Location, count: int, connect: str | None = None) -> None:
        """Starts `count` processes on this machine, which end with this process. Asks the machine that serves
        at `connect`, if given. Waits until each has its site. `site` is a class that can be imported."""
        self.location = location
        self.later = ExitStack()
        """Things to close after all sites, such as a pool."""
        folder = self.later.enter_context(temporary_folder())
        self._processes: list[subprocess.Popen[bytes]] = []
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        (folder / "cluster.yaml").write_text(dump_config(location.config))
        what = f"{site.__module__}:{site.__name__}"
        try:
            for number in range(count):
                address = f"ipc://{folder}/{location.node}-{number}"
                command = (sys.executable, "-P", "-m", __name__, what, address, location.host)
                self._processes.append(spawn_child(command, stdout=subprocess.DEVNULL))
                self._ask(f"{location.node}-{number}", site, address)
            if connect is not None:
                self._ask(served := f"{location.node}-{count}", site, f"tcp://{connect}")
                self._answer(served, time.monotonic() + _HELLO_S)
            deadline = time.monotonic() + _START_S + 5 * count
            for process, node in zip(self._processes, self._peers, strict=False):
                while process.poll() is None and time.monotonic() < deadline:
                    if self._peers[node].poll(1000):
                        break
                self._answer(node, time.monotonic())
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._peers)

    def run(self, method: Callable[[Any, J], R], jobs: Mapping[str, J], *, timeout_s: float) -> dict[str, R]:
        """Makes the named sites do their jobs at the same time. Returns their results. Raises PeerError if a
        site fails or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        for node, job in jobs.items():
            self._peers[node].send_multipart([method.__name__.encode(), msgspec.msgpack.encode(job)])
        decode: Callable[[bytes], R] = msgpack_decoder(typing.get_type_hints(method)["return"])
        return {node: decode(self._answer(node, deadline)) for node in jobs}

    def everywhere(self, method: Callable[[Any, J], R], job: J, *, timeout_s: float) -> dict[str, R]:
        """Makes all sites do the same job."""
        return self.run(method, dict.fromkeys(self._peers, job), timeout_s=timeout_s)

    def close(self) -> None:
        """Closes all sites, and ends the processes of this machine. Kills processes that do not end."""
        with self.later:
            for node in [*self._peers][len(self._processes) :]:
                with suppress(PeerError):  # it is gone, or closes its site by itself
                    self._peers[node].send_multipart([_LEAVE])
                    self._answer(node, time.monotonic() + _HELLO_S)
            end(self._processes, _GRACE_S)
            for peer in self._peers.values():
                peer.close()

    def _ask(self, node: str, site: type[Site], address: str) -> None:
        """Asks the process at `address` to open the site; `_answer` waits until it has."""
        peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self._peers[node] = peer
        peer.setsockopt(zmq.LINGER, 0)
        # so that the site can be closed while an answer is outstanding
        peer.setsockopt(zmq.REQ_RELAXED, 1)
        peer.setsockopt(zmq.REQ_CORRELATE, 1)
        peer.connect(address)
        peer.send_multipart(_hello(site))

    def _answer(self, node: str, deadline: float) -> bytes:
        """Returns a site's answer. Raises PeerError if it is an error, or does not come by the deadline
        (`time.monotonic()`)."""
        peer = self._peers[node]
        address = peer.getsockopt_string(zmq.LAST_ENDPOINT)
        if not peer.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            raise PeerError(f"{address} does not answer; does it run, with --serve?")
        outcome, answer = peer.recv_multipart()
        if outcome != b"ok":
            raise PeerError(f"{address}: {answer.decode(errors='replace')}")
        return answer


def serve_site(site: type[Site], address: str, location: Location) -> None:
    """Serves one bench after the other at this address, until an exception ends it. A site is closed when its
    bench ends, or when the next bench begins."""
    listener: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    listener.setsockopt(zmq.LINGER, 1000)
    current: Site | None = None
    with closing(listener):
        try:
            listener.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"--serve {address}: {error}") from None
        try:
            while True:
                asked = listener.recv_multipart()
                # opened again, in case the last leading machine has disappeared
                if current is not None and asked[0] in (_OPEN, _LEAVE):
                    current.held.close()
                    current = None
                answer = [b"ok", b""]
                try:
                    if asked[0] == _OPEN:
                        if asked != _hello(site):
                            raise ValueError(
                                f"here is {site.__name__} of pd-cache {pd_cache.__version__}, not {asked}"
                            )
                        current = site(location)
                    elif asked[0] != _LEAVE:
                        answer[1] = _do(current, asked)
                except Exception as error:  # noqa: BLE001 - the machine that leads reports it
                    answer = [b"error", f"{type(error).__name__}: {error}".encode()]
                listener.send_multipart(answer)
        finally:
            if current is not None:
                current.held.close()


def _hello(site: type[Site]) -> list[bytes]:
    return [_OPEN, site.__name__.encode(), pd_cache.__version__.encode()]


def _do(site: Site | None, asked: list[bytes]) -> bytes:
    method = getattr(type(site), asked[0].decode())
    decode = msgpack_decoder(typing.get_type_hints(method)["job"])
    return msgspec.msgpack.encode(method(site, decode(asked[1])))


def _address(text: str) -> tuple[str, int]:
    host, port = host_of(text), port_of(text)
    if not host or not port:
        raise ConfigError(f"{text}: expected HOST:PORT")
    return host, port


def main(site: str, address: str, host: str) -> None:
    """Runs a process of a crew."""
    module, _, name = site.partition(":")
    kind: type[Site] = getattr(importlib.import_module(module), name)
    path = Path(address.removeprefix("ipc://"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a worker that does not end then is killed
    with suppress(KeyboardInterrupt):
        serve_site(kind, address, Location(path.name, host, load_config(path.parent / "cluster.yaml")))


if __name__ == "__main__":
    main(*sys.argv[1:])
