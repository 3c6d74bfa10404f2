"""Two places on one machine for a bench's nodes, on both sides of a link of a given rate."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import click

from launch.run.supervise import end, spawn_child

_COMMANDS = ("ip", "tc", "unshare", "nsenter")


class Place(NamedTuple):
    """The place of a node and all its processes."""

    host: str
    port: int
    enter: tuple[str, ...]
    """The beginning of a command line that runs a program there."""
    device: str
    """The network device at this place's end of the link."""


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
def linked(rate: str) -> Iterator[tuple[Place, Place]]:
    """Yields the places on both sides of a link. `rate`, in the form of `tc`, is its rate in each direction.
    Raises ClickException if this user or machine cannot have such a link."""
    if os.geteuid() != 0 or not all(map(shutil.which, _COMMANDS)):
        needs = f"it needs root, and the commands {', '.join(_COMMANDS)}"
        raise click.ClickException(f"--link makes a network namespace: {needs}")
    # the namespace and the link end with this process
    holder = spawn_child(
        ("unshare", "--net", "sh", "-c", "echo && exec sleep infinity"), stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        number = os.getpid() % 256
        enter = ("nsenter", f"--target={holder.pid}", "--net")
        here = Place(f"198.18.{number}.1", 0, (), f"pd-bench-{number}")
        there = Place(f"198.18.{number}.2", 8000, enter, "eth0")
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
