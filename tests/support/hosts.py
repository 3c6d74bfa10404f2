"""Hosts made of network namespaces, each with an address of its own and a link that can be slowed down and
cut."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.needs import NO_IPROUTE, NO_ROOT

RATE = "1gbit"


def why_not():
    """Why this machine cannot have such hosts; None if it can."""
    if os.geteuid() != 0:
        return NO_ROOT
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return NO_IPROUTE
    try:
        probe = Network(0)
        try:
            probe.host("probe")
        finally:
            probe.close()
    except subprocess.CalledProcessError as error:
        return f"this kernel does not let us build network namespaces: {error.stderr.decode().strip()}"
    return None


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, timeout=180)


class Host:
    """One namespace, on the network's bridge."""

    def __init__(self, network, name, number):
        self.name = name
        self.address = f"{network.subnet}.{number}"
        self._namespace = f"{network.prefix}-{name}"
        self._cable = f"{network.prefix}-{number}"
        """The end of its link that is outside."""
        _run("ip", "netns", "add", self._namespace)
        _run(
            "ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._namespace
        )
        _run("ip", "link", "set", self._cable, "master", network.bridge, "up")
        for command in (
            ("ip", "addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("ip", "link", "set", "lo", "up"),
            ("ip", "link", "set", "eth0", "up"),
        ):
            _run(*self.inside(*command))
        self.limit(RATE)

    def inside(self, *command):
        """A command that runs `command` on this host."""
        return ("ip", "netns", "exec", self._namespace, *command)

    def limit(self, rate):
        """Let both directions of the link carry no more than this, e.g. `4mbit`."""
        shape = ("root", "tbf", "rate", rate, "burst", "128k", "latency", "100ms")
        _run("tc", "qdisc", "replace", "dev", self._cable, *shape)
        _run(*self.inside("tc", "qdisc", "replace", "dev", "eth0", *shape))

    def cut(self):
        """Pull the cable."""
        _run("ip", "link", "set", self._cable, "down")

    def mend(self):
        """Plug it in again."""
        _run("ip", "link", "set", self._cable, "up")

    def block(self, other):
        """Let nothing of this host reach `other` any more, nor what answers it; everybody else still does."""
        _run(*self.inside("ip", "route", "add", "unreachable", f"{other.address}/32"))

    def unblock(self, other):
        """Undo `block`."""
        _run(*self.inside("ip", "route", "del", "unreachable", f"{other.address}/32"))

    def sent(self):
        """Bytes that the host has sent so far."""
        return int(Path(f"/sys/class/net/{self._cable}/statistics/rx_bytes").read_text())

    def received(self):
        """Bytes that the host has received so far."""
        return int(Path(f"/sys/class/net/{self._cable}/statistics/tx_bytes").read_text())

    def remove(self):
        subprocess.run(("ip", "link", "del", self._cable), capture_output=True, timeout=180)
        subprocess.run(("ip", "netns", "del", self._namespace), capture_output=True, timeout=180)


class Network:
    """A bridge with hosts on it; this process reaches them all."""

    def __init__(self, number=1):
        """`number` keeps the networks of one process apart."""
        self.prefix = f"pd{os.getpid() % 100_000}{number}"
        self.bridge = f"{self.prefix}-br"
        self.subnet = f"10.{200 + number}.{os.getpid() % 250}"
        self._hosts = []
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        try:
            _run("ip", "addr", "add", f"{self.subnet}.254/24", "dev", self.bridge)
            _run("ip", "link", "set", self.bridge, "up")
        except BaseException:
            self.close()
            raise

    def host(self, name):
        """A new host, with its link at 1 Gbit/s."""
        number = len(self._hosts) + 1
        try:
            self._hosts.append(Host(self, name, number))
        except BaseException:
            subprocess.run(("ip", "netns", "del", f"{self.prefix}-{name}"), capture_output=True, timeout=180)
            raise
        return self._hosts[-1]

    def close(self):
        """Remove everything; processes on the hosts must have ended."""
        for host in self._hosts:
            host.remove()
        subprocess.run(("ip", "link", "del", self.bridge), capture_output=True, timeout=180)
