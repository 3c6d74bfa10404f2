"""`pd-cache status`: the cluster as one table, and as one JSON object."""

from __future__ import annotations

import time

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launch.watch.figures import shown_age
from launch.watch.state import SKEW, ClusterStatus
from pd_cache.cluster import different_lengths
from pd_cache.cluster.machine import shown_bytes
from pd_cache.decoding import one_line


def status_table(status: ClusterStatus) -> Group:
    """Returns the cluster's state as text for people, at most 80 columns wide. Texts that may be long stand
    below the table."""
    table = Table(box=None, pad_edge=False)
    for column in ("node", "role"):
        table.add_column(column, no_wrap=True)
    for column in ("state", "up for", "hit", "holds", "in flight"):
        table.add_column(column, overflow="fold")
    details = []
    names = {node.record.address: node.name for node in status.nodes}
    for node in status.nodes:
        reading = node.reading
        held = [f"{tier} {shown_bytes(size)}" for tier, size in reading.tier_bytes.items() if size]
        table.add_row(
            node.name,
            node.role,
            escape(", ".join(filter(None, (node.state, node.leads, node.memory)))),
            "" if reading.started is None else shown_age(max(0.0, time.time() - reading.started)),
            "" if node.hit is None else f"{node.hit:.1%}",
            escape("\n".join(held)),
            "" if node.in_flight is None else str(node.in_flight),
        )
        if node.why:
            details.append(Text(f"{node.name}: {node.state}: {node.why}", "" if node.well else "red"))
        if reading.errors:
            errors = ", ".join(f"{reason} {count:.0f}" for reason, count in reading.errors.items())
            details.append(Text(f"{node.name}: errors since its start: {errors}", "yellow"))
        for address, role in node.roles.items():
            doing = f"{role.does} for {shown_age(role.for_s)}, as {node.name} says: {role.why}"
            details.append(Text(f"{names.get(address, one_line(address))}: {one_line(doing)}"))
        if node.difference:
            details.append(Text(f"{node.name}: {node.difference}", "yellow"))
    details += map(Text, status.weights)
    details += [Text(problem, "red") for problem in status.problems]
    if (skew := status.skew) is not None and not skew.fails:
        details.append(Text(f"{skew.found}: {SKEW[False]}", "yellow"))
    if lengths := different_lengths(node.record for node in status.nodes):
        details.append(
            Text(f"{lengths}: a node refuses prompts that are longer than its own limit", "yellow")
        )
    return Group(Text(f"discovery: {status.source}"), table, *details)


def as_dict(status: ClusterStatus) -> dict[str, object]:
    """Returns the cluster's state for scripts. A node's record and its answers form one object."""
    nodes = [
        {
            **msgspec.to_builtins(node.record),
            "state": node.state,
            "why": node.why,
            "difference": node.difference,
            "up_since": node.reading.started,
            "hit_rate": node.hit,
            "bytes_by_tier": node.reading.tier_bytes,
            "in_flight": node.in_flight,
            "errors": node.reading.errors,
            "leads": node.leads,
            "roles": msgspec.to_builtins(node.roles),
            "segments": [segment.segment_name for segment in (node.role != "master" and node.segments) or ()],
            "memory": node.memory,
        }
        for node in status.nodes
    ]
    return {
        "discovery": status.source,
        "well": status.well,
        "problems": status.problems,
        "weights": status.weights,
        "nodes": nodes,
    }
