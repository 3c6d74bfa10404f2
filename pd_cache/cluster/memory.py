"""Compares the memory that the nodes of a machine need with what the machine and its cgroups allow."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pd_cache.cluster.schema import ClusterConfig, Node
from pd_cache.config import LocalTier
from transfer.settings import ByteSize

_CAP_IPC_LOCK = 14


class Need(NamedTuple):
    """The bytes that a node of the file holds for as long as it runs, besides its engine."""

    node: str
    segment: int
    """The memory that it gives to the pool."""
    staging: int
    """Its staging memory and local tiers on the CPU, which are one registered region."""

    @property
    def total(self) -> int:
        return self.segment + self.staging


def needs(config: ClusterConfig, nodes: Iterable[Node]) -> list[Need]:
    """Returns what each of `nodes` needs. Leaves out nodes that need none."""
    caching = config.caching_nodes()
    tiers = sum(
        int(tier.capacity) for tier in config.cache.tiers if isinstance(tier, LocalTier) and tier.device == "cpu"
    )
    found = (
        Need(node.name, config.segment_size(node), int(config.transfer.staging_size) + tiers if node in caching else 0)
        for node in nodes
    )
    return [need for need in found if need.total]


class MachineMemory(NamedTuple):
    """The bytes that this process and its children may have."""

    total: int
    free: int
    """The part of them that is free now. The page cache counts as free."""
    limiter: str
    """What sets the total: `the machine` or `its cgroup`."""


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Returns the memory of the machine whose `/proc` and `/sys` are below `root`, within the limits of this process's cgroups."""
    info = meminfo(root)
    total, free, limiter = info.get("MemTotal", 0), info.get("MemAvailable", 0), "the machine"
    for limit, used in _cgroup_limits(root):
        if limit < total:
            total, limiter = limit, "its cgroup"
        free = min(free, max(0, limit - used))
    return MachineMemory(total, free, limiter)


def shortage(wanted: Sequence[Need], memory: MachineMemory) -> str | None:
    """Returns why a machine is too small for its nodes, even if nothing else runs there; None if it is not."""
    everything = sum(need.total for need in wanted)
    if everything <= memory.total:
        return None
    return (
        f"the nodes of this host need {shown_size(everything)} ({shown_needs(wanted)}), but it has "
        f"{shown_size(memory.total)} ({memory.limiter})"
    )


def locked_limit() -> int | None:
    """Returns how many bytes this process may lock; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def locked_shortage(wanted: Sequence[Need], limit: int | None, root: Path = Path("/")) -> str | None:
    """Returns why RDMA, which locks every byte that it registers, cannot register a node's memory; None if it can."""
    largest = largest_need(wanted)
    if limit is None or limit >= largest or may_lock_all(root):
        return None
    return f"the limit is {shown_size(limit)}, but the largest process locks {shown_size(largest)}"


def may_lock_all(root: Path = Path("/")) -> bool:
    """Returns whether this process is exempt from the limit of locked memory (CAP_IPC_LOCK)."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", read_text(root / "proc/self/status"), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def largest_need(wanted: Iterable[Need]) -> int:
    return max((need.total for need in wanted), default=0)


def shown_needs(wanted: Iterable[Need]) -> str:
    """Returns what each node needs, for people."""
    return ", ".join(f"{need.node} {shown_size(need.total)}" for need in wanted)


def shown_size(value: int) -> str:
    """Returns a size as text: as the file spells it for whole GiB, otherwise rounded."""
    return str(ByteSize(value)) if value and value % (1 << 30) == 0 else shown_bytes(value)


def shown_bytes(value: float) -> str:
    """Returns a number of bytes as text for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Returns `/proc/meminfo` in bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+)( kB)?", read_text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in lines}


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and the use, without the page cache, of each memory cgroup of this process, of version 2 or 1."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = top / path.strip("/")
        # in a container the path may be that of the host; then only the top folder exists
        for folder in dict.fromkeys((here, *here.parents)):
            if not folder.is_relative_to(top):
                break
            limit, used = read_text(folder / names[0]), read_text(folder / names[1])
            if limit.isdigit() and used.isdigit():
                cached = re.search(rf"^{names[2]} (\d+)", read_text(folder / "memory.stat"), re.MULTILINE)
                yield int(limit), max(0, int(used) - (int(cached[1]) if cached else 0))


def read_text(file: Path) -> str:
    """Returns the text of a file of the kernel; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeError):
        return ""
