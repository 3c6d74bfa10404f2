"""Memory: what this host's nodes need of it, what it has, and what it lets be locked, shared and mapped in huge pages."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from launch.doctor.finding import Finding, broken, ok, skipped, warning
from pd_cache.cluster import ClusterConfig, EngineNode, Node, ReferenceEngineConfig
from pd_cache.cluster.memory import (
    Need,
    largest_need,
    locked_limit,
    locked_shortage,
    machine_memory,
    meminfo,
    needs,
    read_text,
    shortage,
    shown_needs,
    shown_size,
)

_TIGHT = 0.9
"""The share of the free memory: more than this leaves too little to engines and the page cache."""
_SHM_LEAST = 64 << 20
"""Docker's own size of /dev/shm."""


def memory_findings(
    config: ClusterConfig | None, nodes: Collection[Node], running: Collection[str], root: Path = Path("/")
) -> Iterator[Finding]:
    """Compares with what `nodes`, those of this machine, need. `running`: names of those that have their memory already."""
    wanted = needs(config, nodes) if config is not None else []
    yield _free_finding(wanted, running, root)
    rdma = config is not None and config.transfer.protocol == "rdma"
    yield memlock_finding(wanted, locked_limit(), root, rdma=rdma)
    yield from _huge_page_findings(wanted, root)
    yield _shared_finding(config, nodes, root)


# --- free memory -----------------------------------------------------------------------------------------------------


def _free_finding(wanted: list[Need], running: Collection[str], root: Path) -> Finding:
    check, why = (
        "memory.free",
        "segments and staging memory are made resident at the start; what does not fit is killed",
    )
    memory = machine_memory(root)
    have = f"{shown_size(memory.free)} free of {shown_size(memory.total)} ({memory.limiter})"
    missing = sum(need.total for need in wanted if need.node not in running)
    if not wanted:
        return ok(check, have)
    if lacking := shortage(wanted, memory):
        return broken(
            check, lacking, why=why,
            repair="lower segment_size of these nodes, transfer.staging_size or the local tier's capacity",
        )  # fmt: skip
    if not missing:
        return ok(
            check, f"{have}; all nodes of this host have theirs: {shown_size(sum(need.total for need in wanted))}"
        )
    found = f"{have}; nodes that do not run yet need {shown_size(missing)} ({shown_needs(wanted)})"
    if missing > memory.free:
        return broken(
            check, found, why=why, repair="end what else uses memory (ps aux --sort=-rss), or lower segment_size"
        )
    if missing > memory.free * _TIGHT:
        return warning(check, found, why="little is left to engines", repair="lower segment_size of these nodes")
    return ok(check, found)


# --- locked memory ---------------------------------------------------------------------------------------------------


def memlock_finding(wanted: list[Need], limit: int | None, root: Path, *, rdma: bool) -> Finding:
    """Compares the limit of locked memory, in bytes (None: there is none), with the largest process."""
    check = "memory.memlock"
    shown = "unlimited" if limit is None else shown_size(limit)
    if not rdma:
        return skipped(check, f"the limit is {shown}; only transfer.protocol: rdma locks memory")
    if lacking := locked_shortage(wanted, limit, root):
        return broken(
            check, lacking, why="RDMA locks every byte that it registers: registering the segment fails",
            repair="ulimit -l unlimited   # for good: LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 of docker",
        )  # fmt: skip
    largest = largest_need(wanted)
    if limit is None or limit >= largest:
        return ok(check, f"the limit is {shown}, the largest process locks {shown_size(largest)}")
    return ok(check, f"the limit is {shown}, and does not hold for this user (CAP_IPC_LOCK)")


# --- huge pages ------------------------------------------------------------------------------------------------------


def _huge_page_findings(wanted: list[Need], root: Path) -> Iterator[Finding]:
    check = "memory.huge_pages"
    modes = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
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
        info = meminfo(root)
        page, free = info.get("Hugepagesize", 2 << 20), info.get("HugePages_Free", 0)
        segment = sum(need.segment for need in wanted)
        if free * page < segment:
            yield broken(
                "memory.hugetlb", f"MC_STORE_USE_HUGEPAGE is set; {shown_size(free * page)} are reserved, segments need {shown_size(segment)}",
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
    have = f"/dev/shm: {shown_size(free)} free of {shown_size(size)}"
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
