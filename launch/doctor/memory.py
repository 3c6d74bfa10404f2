"""Memory: what this host's nodes need of it, what it has, and what it lets be locked, shared and mapped in huge pages."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.doctor.finding import Finding, broken, ok, skipped, warning
from launch.status import shown_bytes
from pd_cache.cluster import ClusterConfig, EngineNode, Node, ReferenceEngineConfig
from pd_cache.config import LocalTier
from transfer.settings import ByteSize

_CAP_IPC_LOCK = 14
_TIGHT = 0.9
"""Of the memory that is free: more than this leaves nothing to engines and page cache."""
_SHM_LEAST = 64 << 20
"""Docker's own size of /dev/shm."""


@dataclass(frozen=True)
class Need:
    """Bytes that one node of the file holds for as long as it runs, besides its engine."""

    node: str
    segment: int
    """Memory that it gives to the pool."""
    staging: int
    """Staging memory and local tiers on the CPU: one registered region."""

    @property
    def total(self) -> int:
        return self.segment + self.staging


def needs(config: ClusterConfig, nodes: Iterable[Node]) -> list[Need]:
    """What each of `nodes` needs."""
    caching = config.caching_nodes()
    tiers = sum(
        int(tier.capacity) for tier in config.cache.tiers if isinstance(tier, LocalTier) and tier.device == "cpu"
    )
    found = (
        Need(node.name, config.segment_size(node), int(config.transfer.staging_size) + tiers if node in caching else 0)
        for node in nodes
    )
    return [need for need in found if need.total]


def memory_findings(
    config: ClusterConfig | None, nodes: Collection[Node], running: Collection[str], root: Path = Path("/")
) -> Iterator[Finding]:
    """Compare with what `nodes`, those of this machine, need. `running`: names of those that have their memory already."""
    wanted = needs(config, nodes) if config is not None else []
    yield _free_finding(wanted, running, root)
    rdma = config is not None and config.transfer.protocol == "rdma"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield memlock_finding(wanted, None if soft == resource.RLIM_INFINITY else soft, root, rdma=rdma)
    yield from _huge_page_findings(wanted, root)
    yield _shared_finding(config, nodes, root)


# --- free memory -----------------------------------------------------------------------------------------------------


def _free_finding(wanted: list[Need], running: Collection[str], root: Path) -> Finding:
    check, why = (
        "memory.free",
        "segments and staging memory are made resident at the start; what does not fit is killed",
    )
    total, free, limiter = available(root)
    have = f"{_size(free)} free of {_size(total)} ({limiter})"
    everything = sum(need.total for need in wanted)
    missing = sum(need.total for need in wanted if need.node not in running)
    if not wanted:
        return ok(check, have)
    parts = ", ".join(f"{need.node} {_size(need.total)}" for need in wanted)
    if everything > total:
        return broken(
            check, f"the nodes of this host need {_size(everything)} ({parts}), and it has {_size(total)} ({limiter})",
            why=why, repair="lower segment_size of these nodes, transfer.staging_size or the local tier's capacity",
        )  # fmt: skip
    if not missing:
        return ok(check, f"{have}; all nodes of this host have theirs: {_size(everything)}")
    found = f"{have}; nodes that do not run yet need {_size(missing)} ({parts})"
    if missing > free:
        return broken(
            check, found, why=why, repair="end what else uses memory (ps aux --sort=-rss), or lower segment_size"
        )
    if missing > free * _TIGHT:
        return warning(check, found, why="little is left to engines", repair="lower segment_size of these nodes")
    return ok(check, found)


def available(root: Path) -> tuple[int, int, str]:
    """Bytes that this process and its children may have at all, how many of them are free now, and what limits that."""
    info = _meminfo(root)
    total, free, limiter = info.get("MemTotal", 0), info.get("MemAvailable", 0), "the machine"
    for limit, used in _cgroup_limits(root):
        if limit < total:
            total, limiter = limit, "its cgroup"
        free = min(free, max(0, limit - used))
    return total, free, limiter


def _meminfo(root: Path) -> dict[str, int]:
    """`/proc/meminfo` in bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+)( kB)?", _read(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in lines}


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, without the page cache, of each memory cgroup that we are in; of version 2 and of version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = top / path.strip("/")
        # in a container the path may be that of the host; then only the top is there
        for folder in dict.fromkeys((here, *here.parents)):
            if not folder.is_relative_to(top):
                break
            limit, used = _read(folder / names[0]), _read(folder / names[1])
            if limit.isdigit() and used.isdigit():
                cached = re.search(rf"^{names[2]} (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
                yield int(limit), max(0, int(used) - (int(cached[1]) if cached else 0))


# --- locked memory ---------------------------------------------------------------------------------------------------


def memlock_finding(wanted: list[Need], limit: int | None, root: Path, *, rdma: bool) -> Finding:
    """Compare the limit of locked memory, in bytes (None: there is none), with the largest process."""
    check = "memory.memlock"
    shown = "unlimited" if limit is None else _size(limit)
    if not rdma:
        return skipped(check, f"the limit is {shown}; only transfer.protocol: rdma locks memory")
    largest = max((need.total for need in wanted), default=0)
    if limit is None or limit >= largest:
        return ok(check, f"the limit is {shown}, the largest process locks {_size(largest)}")
    if _capable(root, _CAP_IPC_LOCK):
        return ok(check, f"the limit is {shown}, and does not hold for this user (CAP_IPC_LOCK)")
    return broken(
        check, f"the limit is {shown}, and the largest process locks {_size(largest)}",
        why="RDMA locks every byte that it registers: registering the segment fails",
        repair="ulimit -l unlimited   # for good: LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 of docker",
    )  # fmt: skip


def _capable(root: Path, capability: int) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", _read(root / "proc/self/status"), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> capability & 1)


# --- huge pages ------------------------------------------------------------------------------------------------------


def _huge_page_findings(wanted: list[Need], root: Path) -> Iterator[Finding]:
    check = "memory.huge_pages"
    modes = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", modes)
    if match is None:
        yield skipped(check, "this kernel does not tell of transparent huge pages")
    elif match[1] == "never":
        yield warning(
            check, "transparent huge pages are switched off", why="filling segments takes longer, and so do transfers",
            repair="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )  # fmt: skip
    else:
        yield ok(check, f"transparent huge pages: {match[1]}")
    if os.environ.get("MC_STORE_USE_HUGEPAGE", "0") not in ("", "0", "false"):
        info = _meminfo(root)
        page, free = info.get("Hugepagesize", 2 << 20), info.get("HugePages_Free", 0)
        segment = sum(need.segment for need in wanted)
        if free * page < segment:
            yield broken(
                "memory.hugetlb", f"MC_STORE_USE_HUGEPAGE is set; {_size(free * page)} are reserved, segments need {_size(segment)}",
                why="Mooncake's setup fails without reserved pages",
                repair=f"sysctl vm.nr_hugepages={-(-segment // page)}   # or unset MC_STORE_USE_HUGEPAGE",
            )  # fmt: skip


# --- shared memory ---------------------------------------------------------------------------------------------------


def _shared_finding(config: ClusterConfig | None, nodes: Collection[Node], root: Path) -> Finding:
    check = "memory.shm"
    try:
        room = os.statvfs(root / "dev/shm")
    except OSError:
        size = free = 0
    else:
        size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    have = f"/dev/shm: {_size(free)} free of {_size(size)}"
    sharing = [node.name for node in nodes if isinstance(node, EngineNode) and node.cache_server]
    cpu = config is not None and isinstance(config.engine, ReferenceEngineConfig)
    if not sharing or not cpu:
        return ok(check, have) if free else skipped(check, "there is no /dev/shm; no node of this host needs it")
    if free < _SHM_LEAST:
        return broken(
            check, f"{have}; {', '.join(sharing)} share their KV memory with a cache server through it",
            why="an engine on the CPU moves its paged buffer there, and cannot start without room",
            repair="mount -o remount,size=50% /dev/shm; in a container: docker run --shm-size",
        )  # fmt: skip
    return ok(check, f"{have}; {', '.join(sharing)} share their KV memory with a cache server through it")


def _size(value: int) -> str:
    return str(ByteSize(value)) if value and value % (1 << 30) == 0 else shown_bytes(value)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeError):
        return ""
