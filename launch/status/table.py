"""The cluster's state as a table for people, and as JSON for scripts."""

from __future__ import annotations

from datetime import datetime

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launch.status.node_status import ClusterStatus
from pd_cache.cluster.memory import shown_bytes


def status_table(status: ClusterStatus) -> Group:
    """Returns the cluster's state as text for people."""
    table = Table()
    for column in ("node", "role"):
        table.add_column(column, no_wrap=True)
    for column in ("state", "up since", "hit rate", "bytes by tier", "in flight", "errors by reason"):
        table.add_column(column)
    for row in status.nodes:
        table.add_row(
            row.name,
            row.record.role,
            escape(f"{row.state}, {row.leads}" if row.leads else row.state),
            _shown_time(row.up_since),
            "" if row.hit_rate is None else f"{row.hit_rate:.1%}",
            escape("\n".join(f"{tier} {shown_bytes(value)}" for tier, value in row.bytes_by_tier.items())),
            "" if row.in_flight is None else str(row.in_flight),
            escape("\n".join(f"{reason} {count:.0f}" for reason, count in row.errors.items())),
        )
    differing = [Text(f"{row.name}: {row.difference}", "yellow") for row in status.nodes if row.difference]
    unreadable = [Text(f"{name}: its record cannot be read: {why}", "red") for name, why in status.unreadable.items()]
    problems = [Text(problem, "red") for problem in status.problems]
    return Group(Text(f"discovery: {status.source}"), table, *problems, *differing, *unreadable)


def _shown_time(at: float | None) -> str:
    if at is None:
        return ""
    try:
        return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # a node can send any number
        return f"{at:g}"


def as_json(status: ClusterStatus) -> str:
    """Returns the cluster's state for scripts: one JSON object, in which a node's record and its row are one."""
    nodes = []
    for row in status.nodes:
        shown = msgspec.to_builtins(row)
        nodes.append({**shown.pop("record"), **shown})
    return msgspec.json.encode(
        {
            "discovery": status.source,
            "well": status.well,
            "problems": status.problems,
            "nodes": nodes,
            "unreadable": status.unreadable,
        }
    ).decode()
