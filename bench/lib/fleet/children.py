"""Participants that are processes of this machine: those of a bench without a file, and the many clients of one site (`Crew`).

Each is `python -m bench.lib.fleet.child`, does steps as another machine does, and ends by itself when its coordinator is gone.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from bench.lib.fleet.coordinator import Fleet
from bench.lib.fleet.messages import FleetError, close_socket, open_socket
from bench.lib.fleet.options import FleetOptions, Participation, plan
from bench.lib.fleet.site import Location, Site
from launch.process import end
from pd_cache.cluster import BenchConfig, ClusterConfig, MasterNode, StoreNode, dump_config
from pd_cache.cluster.addresses import free_port
from transfer.settings import MIN_SEGMENT, ByteSize

J = TypeVar("J", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)

MOST = 1024
"""Processes of a crew."""
_WAIT_S = 60.0
_START_S = 300.0
"""For the processes of a crew, which import what the bench does. One that ends is noticed immediately."""
_END_S = 20.0
_CREW = "crew"


def start(bench: str, site: type[Site], address: str, file: Path, node: str, host: str) -> subprocess.Popen[bytes]:
    """Starts a participant `node` of the bench whose coordinator is at `address`."""
    command = [sys.executable, "-m", "bench.lib.fleet.child", bench, importable(site), address, str(file), node, host]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits until all have ended, which they do by themselves once they are asked to; kills those that do not."""
    end(processes, _END_S, ask=False)


@contextmanager
def local_participants(bench: str, site: type[Site], count: int) -> Iterator[Participation]:
    """Yields the plan of `node-0`, this process, which leads; the others are started, and ended afterwards."""
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
        try:
            for name in names[1:]:
                children.append(start(bench, site, f"tcp://127.0.0.1:{port}", file, name, "127.0.0.1"))
            yield plan(FleetOptions(file, names[0], ",".join(names), None, _WAIT_S))
        finally:
            wait(children)


class Crew:
    """Processes with a site each. Not thread-safe, but that `close` may be called while a step runs."""

    def __init__(self, site: type[Site], location: Location) -> None:
        """No process yet. `site` is a class that can be imported; its location is named `NODE-0`, `NODE-1` …"""
        self._site = site
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._closed = False
        self._using = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="pd-cache-bench-")
        self._file = Path(self._folder.name) / "cluster.yaml"
        self._file.write_text(dump_config(location.config), encoding="utf-8")
        self._address = f"ipc://{self._folder.name}/crew.sock"
        self._socket = open_socket(zmq.ROUTER)
        self._socket.bind(self._address)
        self._fleet = Fleet(self._socket, _CREW, location, frozenset())

    def __len__(self) -> int:
        return len(self._processes)

    def grow(self, count: int) -> None:
        """Starts processes until there are `count`. Raises FleetError for too many, and if one does not start."""
        if count > MOST:
            raise FleetError(f"{count} processes; {MOST} are allowed")
        location = self._fleet.location
        with self._using:
            for index in range(len(self._processes), 0 if self._closed else count):
                name = f"{location.node}-{index}"
                self._processes[name] = start(_CREW, self._site, self._address, self._file, name, location.host)
            self._fleet.expected = frozenset(self._processes)
            self._fleet.gather(_START_S + 5 * count, watch=self._all_run)

    def _all_run(self) -> None:
        if ended := [name for name, process in self._processes.items() if process.poll() is not None]:
            raise FleetError(f"{', '.join(ended)}: its process ended")

    def run(self, step: Callable[[Any, J], R], job: J, *, timeout_s: float, of: range | None = None) -> list[R]:
        """Has the processes `of` this range, by default all, do the job, beginning together. Raises FleetError as `Fleet.run`."""
        names = list(self._processes)
        chosen = names if of is None else names[of.start : of.stop]
        with self._using:
            results = self._fleet.run(step, dict.fromkeys(chosen, job), timeout_s=timeout_s)
        return [results[name] for name in chosen]

    def close(self) -> None:
        """Ends all of them; kills those that do not end."""
        self._closed = True
        self._fleet.stop()
        with self._using:
            self._fleet.end("")
            close_socket(self._socket)
        wait(list(self._processes.values()))
        self._folder.cleanup()


def importable(site: object) -> str:
    """`module:name` of a class, also of one of the module that the program was started with."""
    module, name = getattr(site, "__module__", ""), getattr(site, "__qualname__", "")
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    assert name.isidentifier(), f"{site} cannot be imported by another process"
    return f"{module}:{name}"


def imported(address: str) -> Any:
    """Returns what `importable` named."""
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)
