"""`pd-cache top`: what the nodes do now, as one table that is renewed until `q` or Ctrl-C. docs/monitoring.md
says what its columns mean."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import termios
import time
import tty
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.discovery import open_directory
from launch.http import proxy_access
from launch.run.supervise import stop_on_signals
from launch.watch.asker import SYNC_S, Asker, watched_nodes
from launch.watch.figures import shown_age
from launch.watch.state import ClusterStatus, NodeStatus
from pd_cache.cluster import ENGINES, ClusterConfig

_STDIN = 0
_REDRAW_S = 0.5
_STALE_S = 10.0
"""A node that has not answered for this time, and for one interval between questions, is down."""
WIDEST = 200
"""The width of the table if the output is not a terminal."""
_WIDE = 120
"""The least width at which the table has all columns."""
_STYLES = {"up": "green", "degraded": "yellow", "asking": "dim", "not asked": "dim"}


# --- texts for figures --------------------------------------------------------------------------------------


def rate(value: float) -> str:
    """Returns a rate in at most 6 characters; `-` for none."""
    return short(value) if value >= 0.5 else "-"


def short(value: float) -> str:
    """Returns a number in at most 5 characters, with k, M, G … for thousands."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            digits = 0 if value >= 99.95 or (not unit and value == int(value)) else 1
            return f"{value:.{digits}f}{unit}"
        value /= 1000
    return "huge"


def seconds(value: float) -> str:
    """Returns a duration in at most 5 characters."""
    if math.isinf(value):
        return "long"
    for unit, factor in (("µ", 1e6), ("m", 1e3)):
        if value * factor < 999.5:
            return f"{value * factor:.{0 if value * factor >= 9.95 else 1}f}{unit}s"
    return f"{value:.1f}s" if value < 99.5 else f"{value:.0f}s"


def percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


# --- the table ----------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table."""

    title: str
    width: int
    """0 for the remaining width."""
    cell: Callable[[NodeStatus], str]
    left: bool = False
    wide: bool = False
    """Whether only wide terminals show it."""


def _pair(node: NodeStatus) -> str:
    found = {} if node.rates is None else node.rates.quantiles
    pairs = (found[name] for name in ("first byte", "first token", "lookup") if name in found)
    return next((f"{seconds(median):>5} {seconds(most):>5}" for median, most in pairs), "")


def _rate(node: NodeStatus, what: Literal["load", "store", "lookups", "evictions"]) -> str:
    return "" if node.rates is None else rate(getattr(node.rates, what))


def _queue(node: NodeStatus) -> str:
    return "+".join(
        short(count) for count in (node.reading.queued, node.reading.running) if count is not None
    )


def _staging(node: NodeStatus) -> str:
    whole = node.reading.staging
    return percent((node.reading.staging_used or 0.0) / whole) if whole else ""


def _missed(node: NodeStatus) -> str:
    return ", ".join(reason for reason, _ in node.rates.missed) if node.rates else ""


COLUMNS = (
    Column("node", 14, lambda node: node.name, left=True),
    Column("role", 12, lambda node: node.role, left=True, wide=True),
    Column("state", 9, lambda node: node.memory or node.state, left=True),
    Column("hit", 4, lambda node: percent(node.hit)),
    Column("load/s", 6, lambda node: _rate(node, "load")),
    Column("store/s", 7, lambda node: _rate(node, "store")),
    Column("look/s", 6, lambda node: _rate(node, "lookups")),
    Column("p50   p99", 11, _pair),
    Column("queue", 6, _queue),
    Column("staging", 7, _staging, wide=True),
    Column("evict/s", 7, lambda node: _rate(node, "evictions"), wide=True),
    Column("why computed", 0, _missed, left=True, wide=True),
)


def table(nodes: Sequence[NodeStatus], width: int) -> Group:
    """Returns the reasons why nodes do not work, and below them a table of what the other nodes do, `width`
    columns wide."""
    columns = [column for column in COLUMNS if width >= _WIDE or not column.wide]
    rest, troubles = width - sum(column.width + 1 for column in columns), list[Text]()
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.left else "right"
        shown.add_column(Text(column.title), width=column.width or rest, no_wrap=True, justify=justify)
    for node in nodes:
        if node.state in ("down", "degraded"):
            since = (
                "" if node.state != "down" or node.silent_s is None else f" for {shown_age(node.silent_s)}"
            )
            style = "red" if node.state == "down" else "yellow"
            line = f"{node.name:<{COLUMNS[0].width}} {node.state}{since}: {node.why}"
            troubles.append(Text(line, style, no_wrap=True, overflow="ellipsis"))
        if node.state != "down":
            cells = [column.cell(node) for column in columns]
            shown.add_row(*(Text(text, _STYLES.get(text, "")) for text in cells))
    return Group(*troubles, shown)


def summary(status: ClusterStatus, name: str) -> Text:
    """Returns the first line: the cluster as a whole."""
    nodes, line = status.nodes, Text(no_wrap=True)
    line.append(f"{len(nodes)} nodes", "bold")
    if down := sum(node.state == "down" for node in nodes):
        line.append(f", {down} down", "bold red")
    for trouble in status.troubles:
        line.append(f", {trouble.found.partition(':')[0]}", "bold red")
    if status.hit is not None:
        line.append(f"   hit {percent(status.hit)}", "bold")
    # counted at engines, because a cache server moves the same bytes for them
    rates = [node.rates for node in nodes if node.rates is not None and node.role in ENGINES]
    for what, value in {
        " load": sum(each.load for each in rates),
        "store": sum(each.store for each in rates),
    }.items():
        line.append(f"  {what} {short(value) if value >= 0.5 else '0 '}B/s")
    return line.append(f"   {name}, {status.source}", "dim")


def plain(status: ClusterStatus, name: str, width: int) -> Group:
    """Returns the cluster `name` as text: its first line, and the table."""
    return Group(summary(status, name), table(status.nodes, width))


def follow(config: ClusterConfig, console: Console, interval_s: float) -> None:
    """Shows the nodes until a signal or the key `q`. `interval_s`: how often each node is asked."""
    watched = watched_nodes(config, stale_s=_STALE_S + interval_s)
    keyboard = [_STDIN] if os.isatty(_STDIN) else []
    # lines of the log, such as those about discovery, would spoil the screen, which shows the same
    logging.disable(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        stop, directory = stack.enter_context(stop_on_signals()), stack.enter_context(open_directory(config))
        asker = stack.enter_context(contextlib.closing(Asker(proxy_access(config), interval_s)))
        directory.wait_synced(SYNC_S)
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        if keyboard:
            stack.callback(termios.tcsetattr, _STDIN, termios.TCSADRAIN, termios.tcgetattr(_STDIN))
            tty.setcbreak(_STDIN)
        while not stop.is_set():
            if select.select(keyboard, [], [], _REDRAW_S)[0] and os.read(_STDIN, 1) in (b"q", b""):
                return
            now = time.monotonic()
            watched.update(directory.view(), directory.wait_synced(0.0))
            watched.take(asker.poll(watched.asked, now))
            live.update(plain(watched.status(now), config.name, console.width), refresh=True)
