"""Processes beside a site, on the same machine: what a bench needs that has many clients of one pool.

Each has a site of its own and does steps as the machines of a fleet do. One that loses its connection, because whoever started it
is gone, ends by itself.
"""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.lib.fleet.coordinator import Fleet
from bench.lib.fleet.errors import FleetError
from bench.lib.fleet.members import Member
from bench.lib.fleet.site import Place, Site
from bench.lib.fleet.wire import Connection
from pd_cache.config import dump_config

J = TypeVar("J", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)

MOST = 1024
"""Processes of a crew."""
_END_S = 20.0


class Crew:
    """Processes with a site each. Not thread-safe, but that `close` may be called while a step runs."""

    def __init__(self, site: type[Site], place: Place) -> None:
        """No process yet. `site` is a class that can be imported; its place is named `NODE-0`, `NODE-1` …"""
        self._site = site
        self._place = place
        self._changed = threading.Condition()
        self._members: list[Member] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._folder = tempfile.TemporaryDirectory(prefix="pd-cache-bench-")
        self._file = Path(self._folder.name) / "cluster.yaml"
        self._file.write_text(dump_config(place.config), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._members)

    def grow(self, count: int) -> None:
        """Start processes until there are `count`. FleetError for too many."""
        if count > MOST:
            raise FleetError(f"{count} processes; {MOST} are allowed")
        while len(self._members) < count and not self._closed:
            name = f"{self._place.node}-{len(self._members)}"
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "bench.lib.fleet.child", importable(self._site), str(theirs.fileno())]
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(self._file), name, self._place.host],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                    )
                )
            connection = Connection(ours)
            member = Member(name, self._place.host, self._changed, connection)
            self._members.append(member)
            connection.follow(member.take, member.gone)

    def run(self, step: Callable[[Any, J], R], job: J, *, timeout_s: float, of: range | None = None) -> list[R]:
        """Have the processes `of` this range, by default all, do the job, beginning together. FleetError as of `Fleet.run`."""
        chosen = self._members if of is None else self._members[of.start : of.stop]
        results = Fleet(None, self._members, self._changed).run(
            step, {member.node: job for member in chosen}, timeout_s=timeout_s
        )
        return [results[member.node] for member in chosen]

    def close(self) -> None:
        """End all of them; kill those that do not end."""
        self._closed = True
        for member in self._members:
            assert member.connection is not None
            member.connection.close("")
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def importable(site: object) -> str:
    """`module:name` of a class, also of one of the module that the program was started with."""
    module, name = getattr(site, "__module__", ""), getattr(site, "__qualname__", "")
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    assert name.isidentifier(), f"{site} cannot be imported by another process"
    return f"{module}:{name}"


def imported(address: str) -> Any:
    """What `importable` named."""
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)
