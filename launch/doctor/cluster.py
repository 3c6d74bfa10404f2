"""Checks what the cluster's nodes report: which of them answer, their versions and namespaces, which master leads, which give memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pd_cache
from launch.doctor.finding import Finding, broken, ok, skipped, warning
from launch.masters import Segment
from launch.status import ClusterStatus, NodeStatus
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.memory import shown_bytes

_UP = "pd-cache up -c FILE"


def discovery_finding(config: ClusterConfig, status: ClusterStatus) -> Finding:
    """Returns whether discovery's view is fresh."""
    check, kind = "cluster.discovery", str(config.discovery.__struct_config__.tag)
    if status.source == kind:
        return ok(check, f"{kind}: {len(status.nodes)} nodes")
    return broken(
        check, status.source, why="nodes that come are not found, and those that left are still asked",
        repair="etcdctl endpoint health; discovery.endpoints, user, tls in the file",
    )  # fmt: skip


def record_findings(status: ClusterStatus) -> Iterator[Finding]:
    """Records in discovery that cannot be read."""
    for name, why in status.unreadable.items():
        yield broken(
            "cluster.record", why, name, why="the node of that name is not found, if there is one; others are not concerned",
            repair="start that node, which writes the record again; where there is none: etcdctl del, under /pd-cache",
        )  # fmt: skip


def node_findings(status: ClusterStatus) -> Iterator[Finding]:
    """Yields which nodes answer, as `pd-cache status` sees it. If none answers, that is a single finding."""
    check = "cluster.node"
    asked = [row for row in status.nodes if row.asked]
    if asked and not any(row.up for row in asked):
        yield broken(
            check, f"none of the {len(asked)} nodes that take questions answers", why="the cluster is not running, or not from here",
            repair=_UP,
        )  # fmt: skip
        return
    for row in status.nodes:
        if row.silent:
            yield broken(
                check, row.state, row.name, why=f"a {row.record.role} node is missing",
                repair=f"on {row.host}: {_UP}; or pd-cache launch {row.record.role} -c FILE --node {row.name}",
            )  # fmt: skip
        elif row.state.startswith("degraded"):
            yield broken(
                check, row.state, row.name, why="it answers, and says that not all of it works",
                repair="its log, and the other findings about it",
            )  # fmt: skip
        elif row.asked:
            yield ok(check, row.state, row.name)


def version_findings(rows: Iterable[NodeStatus]) -> Iterator[Finding]:
    """Nodes with another version of pd-cache than this one."""
    check, ours = "cluster.version", pd_cache.__version__
    told = [row for row in rows if row.record.version]
    same = [row.name for row in told if row.record.version == ours]
    if same:
        yield ok(check, f"{ours} on {', '.join(same)}")
    for row in told:
        if row.record.version != ours:
            yield warning(
                check, f"{row.record.version}, and {ours} here", row.name,
                why="versions may name chunks in other ways, and cache servers refuse engines of another one",
                repair=f"on {row.host}: pip install pd-cache=={ours}",
            )  # fmt: skip


def fingerprint_findings(rows: Sequence[NodeStatus]) -> Iterator[Finding]:
    """Nodes that never share a hit with the others. Nodes that serve another model are not meant to."""
    check = "cluster.fingerprint"
    known = [row for row in rows if row.record.fingerprint]
    if known and not any(row.difference for row in known):
        names = ", ".join(row.name for row in known)
        yield ok(check, f"{names}: one namespace, so they share hits")
    usual = {row.record.model for row in known if not row.difference}
    for row in known:
        if row.difference:
            make = broken if row.record.model in usual else warning
            yield make(
                check, row.difference, row.name, why="what one of them stores, the other computes again",
                repair="make cache and engine of the file, and the model's folder, the same on both",
            )  # fmt: skip


def master_findings(config: ClusterConfig, status: ClusterStatus) -> Iterator[Finding]:
    """Returns whether exactly one master leads."""
    check = "cluster.master"
    masters, leading = status.masters, [row.name for row in status.leading]
    for row in masters:
        if row.leads:
            yield ok(check, "leads" if row.name in leading else row.leads, row.name)
    if masters and len(leading) != 1:
        found = f"{len(leading)} of {len(masters)} masters lead" + (f": {', '.join(leading)}" if leading else "")
        yield broken(
            check, found,
            why="each of them knows only some of the keys" if leading else "without a leader no key can be found or stored",
            repair="pd-cache launch master -c FILE; with master.ha: etcdctl endpoint health, then the masters' logs",
        )  # fmt: skip
    if config.masters.ha and len(masters) < 2:
        yield warning(
            check, f"master.ha is set, and there is {len(masters)} master", why="nobody takes over when it dies",
            repair="nodes: give the file a second master, on another host",
        )  # fmt: skip


def segment_findings(rows: Iterable[NodeStatus], segments: Sequence[Segment]) -> Iterator[Finding]:
    """Returns whether the pool has the memory that the nodes of each host are to give."""
    check = "cluster.segments"
    promised: dict[str, int] = defaultdict(int)
    names: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.record.capacity.segment_bytes:
            promised[row.host] += row.record.capacity.segment_bytes
            names[row.host].append(row.name)
    mounted: Mapping[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        mounted[segment.host].append(segment)
    for host, size in promised.items():
        here = sum(segment.size_bytes for segment in mounted[host])
        found = f"{', '.join(names[host])}: {shown_bytes(size)} promised, {shown_bytes(here)} in the pool"
        if here < size:
            yield broken(
                check, found, host, why="chunks that should land there have no room, and those that lay there are gone",
                repair=f"on {host}: {_UP}; a node that hangs or died loses its segment after client_ttl_s",
            )  # fmt: skip
        else:
            yield ok(check, found, host)
    if not promised and not segments:
        yield broken(
            check, "no node gives memory to the pool", why="every store fails: there is nowhere to put a chunk",
            repair="nodes: give one a segment_size, or add a node of role store",
        )  # fmt: skip


def unknown_segments(reason: str) -> Finding:
    """Returns the finding in place of all those that need the list of segments."""
    return skipped("cluster.segments", reason)
