"""Two places on one machine for a bench's nodes: on loopback, or on both sides of a link of a given rate."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import click

from bench.lib.vllm_server import ENV
from launch.run.supervise import end, spawn_child

_COMMANDS = ("ip", "tc", "unshare", "nsenter")


class Place(NamedTuple):
    """The place of a node and all its processes."""

    host: str
    core: int
    port: int
    enter: tuple[str, ...]
    gpu: bool
    """Whether the node computes on a GPU. Otherwise it gets only its core."""
    device: str = ""
    """The network device at this place's end of the link."""

    @property
    def env(self) -> dict[str, str]:
        """The environment of its vLLM. Without UCX_TLS, NIXL would bypass the link, through the machine's
        memory."""
        hosts = dict.fromkeys(("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST"), self.host)
        ports = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + self.core)}
        return {**ENV, "VLLM_CPU_OMP_THREADS_BIND": str(self.core), **hosts, **ports, "UCX_TLS": "tcp"}

    @property
    def before(self) -> tuple[str, ...]:
        """The beginning of a command line that runs a program there."""
        return self.enter if self.gpu else (*self.enter, "taskset", "-c", str(self.core))


def check_rates(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """A click callback that refuses rates without a unit and negative rates. `tc` accepts both; it reads a
    number without a unit as bits a second."""
    for rate in given:
        if not re.fullmatch(r"[1-9][0-9]{0,3}[mg]bit", rate):
            message = f"expected a rate from 1mbit to 9999gbit, got {rate!r}"
            raise click.BadParameter(message, context, parameter)
    return given


@contextmanager
def linked(rate: str | None, *, gpu: bool) -> Iterator[tuple[Place, Place]]:
    """Yields the prefill node's place and the decode node's. `rate`, in the form of `tc`, is the rate of
    their link in each direction; None means loopback. Raises ClickException if this user or machine cannot
    have such a link."""
    if rate is None:
        yield Place("127.0.0.1", 0, 0, (), gpu), Place("127.0.0.1", 1, 0, (), gpu)
        return
    if os.geteuid() != 0 or not all(map(shutil.which, _COMMANDS)):
        needs = f"it needs root, and the commands {', '.join(_COMMANDS)}"
        raise click.ClickException(f"--link makes a network namespace: {needs}")
    # the namespaces and the link end with this process; UCX reads in /sys which devices there are
    script = "mount -t sysfs sysfs /sys && echo && exec sleep infinity"
    holder = spawn_child(("unshare", "--net", "--mount", "sh", "-c", script), stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        number = os.getpid() % 256
        enter = ("nsenter", f"--target={holder.pid}", "--net", "--mount")
        here = Place(f"198.18.{number}.1", 0, 0, (), gpu, f"pd-bench-{number}")
        there = Place(f"198.18.{number}.2", 1, 8000, enter, gpu, "eth0")
        _run(
            "ip", "link", "add", here.device, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)
        )
        for place in (here, there):
            _run(*place.enter, "ip", "addr", "add", f"{place.host}/30", "dev", place.device)
            _run(*place.enter, "ip", "link", "set", place.device, "up")
        limit((here, there), rate)
        _run(*there.enter, "ip", "link", "set", "lo", "up")
        yield here, there
    finally:
        end([holder], 0)
        holder.stdout.close()


def limit(places: Iterable[Place], rate: str) -> None:
    """Changes the rate of the link between two places of `linked`."""
    shape = ("root", "tbf", "rate", rate, "burst", "128k", "latency", "100ms")
    for place in places:
        _run(*place.enter, "tc", "qdisc", "replace", "dev", place.device, *shape)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise click.ClickException(f"--link: {' '.join(command)}: {done.stderr.strip()}")
