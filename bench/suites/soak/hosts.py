"""Hosts that are network namespaces on one bridge, each with a cable that can be pulled; or this machine's loopback alone.

Namespaces need an isolated run (`isolate`): names and addresses are fixed, and everything vanishes with the run.
"""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from pd_cache.cluster.addresses import free_port

_BRIDGE = "soak"
_SUBNET = "10.77.0"


class Host(NamedTuple):
    """Where nodes run."""

    name: str
    address: str
    cable: str
    """The outer end of its link; empty for a host that has none."""

    def inside(self, *command: str) -> tuple[str, ...]:
        """Returns a command that runs `command` on this host."""
        return ("ip", "netns", "exec", self.name, *command) if self.cable else command

    def cut(self) -> None:
        """Pull the cable."""
        _run("ip", "link", "set", self.cable, "down")

    def mend(self) -> None:
        """Plug it in again."""
        _run("ip", "link", "set", self.cable, "up")


class Hosts:
    """The hosts of a run."""

    def __init__(self, linked: bool) -> None:
        """`linked`: whether hosts have links of their own; otherwise all are 127.0.0.1."""
        self._linked = linked
        self._hosts: dict[str, Host] = {}
        self._ports = 21_000
        if linked:
            _run("ip", "link", "add", _BRIDGE, "type", "bridge")
            _run("ip", "addr", "add", f"{_SUBNET}.254/24", "dev", _BRIDGE)
            _run("ip", "link", "set", _BRIDGE, "up")

    def __getitem__(self, name: str) -> Host:
        if name not in self._hosts:
            self._hosts[name] = self._make(name, len(self._hosts) + 1) if self._linked else Host(name, "127.0.0.1", "")
        return self._hosts[name]

    def port(self) -> int:
        """Returns a port that no other node of the run has."""
        self._ports += 1
        return self._ports if self._linked else free_port("127.0.0.1")

    def close(self) -> None:
        """Removes all hosts; processes on them must have ended."""
        for host in self._hosts.values():
            if host.cable:
                subprocess.run(("ip", "link", "del", host.cable), capture_output=True, timeout=20, check=False)
                subprocess.run(("ip", "netns", "del", host.name), capture_output=True, timeout=20, check=False)
        if self._linked:
            subprocess.run(("ip", "link", "del", _BRIDGE), capture_output=True, timeout=20, check=False)
        self._hosts.clear()

    def left(self) -> list[str]:
        """Links and namespaces that are still there after `close`."""
        if not self._linked:
            return []
        namespaces = _run("ip", "netns", "list").split()
        links = [line.split(":")[1].strip() for line in _run("ip", "-o", "link").splitlines()]
        return [f"namespace {name}" for name in namespaces] + [f"link {name}" for name in links if name != "lo"]

    def _make(self, name: str, number: int) -> Host:
        host = Host(name, f"{_SUBNET}.{number}", f"cable{number}")
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", host.cable, "master", _BRIDGE, "up")
        _run(*host.inside("ip", "addr", "add", f"{host.address}/24", "dev", "eth0"))
        for link in ("lo", "eth0"):
            _run(*host.inside("ip", "link", "set", link, "up"))
        return host


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, timeout=20, text=True).stdout
