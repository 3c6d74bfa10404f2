"""`pd-cache top`: what the nodes do now, in a terminal of any size. docs/monitoring.md says what its figures mean.

`Screen` (pure) is what the user looks at: nodes in an order, the selected node, and what keys do. `draw` makes lines of it, `follow` is the loop.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from launch.discovery import open_directory
from launch.http import proxy_access
from launch.operate.figures import TIMINGS, TRENDS, Rates, hit_rate, shown_age
from launch.operate.state import ClusterStatus, NodeStatus
from launch.operate.watched import SYNC_S, Asker, watched_nodes
from launch.run.supervise import stop_on_signals
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.machine import shown_bytes
from pd_cache.decoding import one_line
from pd_cache.reasons import MEANINGS

Key = Literal["up", "down", "sort", "reverse", "follow", "back", "help", "quit"]

_TICK_S, _REDRAW_S = 0.1, 0.5
_STALE_S = 10.0
"""A node is down after so many seconds without an answer, and one interval between questions."""
WIDEST = 200
"""The width of one table where there is no terminal to say one."""
_DETAILS = 14
"""The most lines about the selected node below the table."""
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"up": "green", "degraded": "yellow", "down": "red", "asking": "dim", "not asked": "dim", "DOWN": "bold red"}
_KEYS: dict[bytes, Key] = {
    b"q": "quit", b"Q": "quit", b"\x04": "quit", b"j": "down", b"k": "up", b"s": "sort", b"r": "reverse",
    b"f": "follow", b"\r": "follow", b"\n": "follow", b"h": "help", b"?": "help", b"\x1b": "back", b"\x1b[A": "up", b"\x1b[B": "down",
    b"\x1bOA": "up", b"\x1bOB": "down",
}  # fmt: skip
_HELP = """
↑ ↓ or k j    select a node           Enter or f   follow it, and back
s             next order              r            the other way round
h or ?        this help               q            end

state         up; degraded: it answers, but not all of it works; down: it
              does not answer; asking; not asked: it has no address for it
hit           the part of the last minute's prompt tokens that was loaded;
              in the first line: at the prefill nodes
engine        the part that was in the engine's own cache
memory …pool  the parts that were loaded from each tier
load store    bytes a second that the cache gave to the engine, and took
p50 p99       of the last minute; the first byte at proxies, the first
              token at engines, lookups at others
queue         requests that wait + requests that run
staging       the part in use of the memory between engine and tiers
breaker       up; DOWN while calls do not go to the pool
gives         the part in use of the memory that it gives to the pool
why computed  the last minute's reasons, the latest first"""


# --- texts for figures -----------------------------------------------------------------------------------------------


def rate(value: float | None) -> str:
    """Returns a number a second in at most 6 characters, `-` for none at all."""
    if value is None:
        return ""
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


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns the last `width` values as bars, the largest of them as the highest. Blank where there are none yet."""
    shown = list(values)[-width:] if width > 0 else []
    most, steps = max(shown, default=0.0), len(_BARS)
    bars = "".join(_BARS[min(steps, math.ceil(value / most * steps)) - 1] if value > 0 else " " for value in shown)
    return bars.rjust(max(0, width))


# --- what the user looks at ------------------------------------------------------------------------------------------


class Screen:
    """The last reading of the cluster, the order of its nodes, and the selected node."""

    def __init__(self, status: ClusterStatus) -> None:
        self.status = status
        self.order: Column = COLUMNS[0]
        self.reversed = False
        self.selected = ""
        """The name of the selected node; empty if there is none."""
        self.following = False
        self.helping = False

    def nodes(self) -> list[NodeStatus]:
        """Returns all nodes in the chosen order, figures from the largest down. Nodes without a figure come last, and then those that are down."""
        nodes = self.status.nodes
        if self.selected not in (node.name for node in nodes):
            self.selected, self.following = nodes[0].name if nodes else "", False
        if self.order.figure is None:
            nodes = nodes[::-1] if self.reversed else nodes
        else:
            known = [(value, node) for node in nodes if (value := self.order.figure(node)) is not None]
            known.sort(key=lambda pair: pair[0], reverse=not self.reversed)
            nodes = [node for _, node in known] + [node for node in nodes if self.order.figure(node) is None]
        return sorted(nodes, key=_is_down)

    def press(self, key: Key) -> bool:
        """Does what a key stands for. Returns False if it ends the program."""
        names = [node.name for node in self.nodes()]
        match key:
            case "quit":
                return False
            case "up" | "down" if names:
                at = names.index(self.selected) + (1 if key == "down" else -1)
                self.selected = names[max(0, min(len(names) - 1, at))]
            case "sort":
                orders = [COLUMNS[0], *(column for column in COLUMNS if column.figure is not None)]
                self.order = orders[(orders.index(self.order) + 1) % len(orders)]
            case "reverse":
                self.reversed = not self.reversed
            case "follow":
                self.following = bool(names) and not self.following
            case "help":
                self.helping = not self.helping
            case "back":
                self.following = self.helping = False
        return True


def _is_down(node: NodeStatus) -> bool:
    return node.state == "down"


class Column(NamedTuple):
    """A column of the table: shown if there is room after those of a lower rank."""

    title: str
    width: int
    rank: int
    cell: Callable[[NodeStatus], str]
    left: bool = False
    figure: Callable[[NodeStatus], float | None] | None = None
    """The figure to sort rows by."""


def _pair(node: NodeStatus, *timings: str) -> str:
    found = {} if node.rates is None else node.rates.quantiles
    return next((f"{seconds(found[name][0]):>5} {seconds(found[name][1]):>5}" for name in timings if name in found), "")


def _source(node: NodeStatus, name: str) -> str:
    sources = None if node.rates is None else node.rates.sources
    if sources is None or (sources["loaded"] and name != "engine"):  # it does not say from which tier
        return ""
    return percent(sources[name]) if sources[name] else "-"


def _moved(node: NodeStatus, what: Literal["load", "store", "lookups"]) -> float | None:
    return None if node.moves is None else getattr(node.moves, what)


def _queue(node: NodeStatus) -> str:
    return "+".join(short(count) for count in (node.reading.queued, node.reading.running) if count is not None)


def _staging(node: NodeStatus) -> float | None:
    return (node.reading.staging_used or 0.0) / node.reading.staging if node.reading.staging else None


def _breaker(node: NodeStatus) -> str:
    return {None: "", True: "up", False: "DOWN"}[node.reading.pool_up]


def _evicted(node: NodeStatus) -> float | None:
    return sum(node.rates.evictions.values()) if node.rates is not None and node.rates.evictions else None


def _given(node: NodeStatus) -> str:
    if node.memory:
        return "drain"  # the details say how far it is
    given = node.segments or ()
    size = sum(segment.size_bytes for segment in given)
    return percent(sum(segment.allocator_used_bytes for segment in given) / size) if size else ""


def _trend(node: NodeStatus, width: int) -> str:
    moved = [sum(both) for both in zip(node.history.trend("load"), node.history.trend("store"), strict=True)]
    return sparkline(moved if node.role != "proxy" else [], width)


_TREND = "trend"
COLUMNS = (
    Column("node", 14, 0, lambda node: node.name, left=True),
    Column("role", 12, 12, lambda node: node.role, left=True),
    Column("state", 9, 0, lambda node: node.state, left=True),
    Column("hit", 4, 0, lambda node: percent(node.hit), figure=lambda node: node.hit),
    Column("engine", 6, 6, lambda node: _source(node, "engine")),
    Column("memory", 6, 6, lambda node: _source(node, "memory")),
    Column("disk", 4, 6, lambda node: _source(node, "disk")),
    Column("pool", 4, 6, lambda node: _source(node, "pool")),
    Column("load/s", 6, 0, lambda node: rate(_moved(node, "load")), figure=lambda node: _moved(node, "load")),
    Column("store/s", 7, 0, lambda node: rate(_moved(node, "store")), figure=lambda node: _moved(node, "store")),
    Column("look/s", 6, 0, lambda node: rate(_moved(node, "lookups")), figure=lambda node: _moved(node, "lookups")),
    Column("p50   p99", 11, 0, lambda node: _pair(node, "first byte", "first token", "lookup"), figure=lambda node: node.p99),
    Column("lookup 50 99", 12, 7, lambda node: _pair(node, "lookup")),
    Column("queue", 6, 0, _queue, figure=lambda node: node.reading.queued),
    Column("staging", 7, 8, lambda node: percent(_staging(node))),
    Column("breaker", 7, 8, _breaker),
    Column("evict/s", 7, 9, lambda node: rate(_evicted(node)), figure=_evicted),
    Column("gives", 5, 10, _given),
    Column("why computed", 22, 11, lambda node: "" if node.rates is None else ", ".join(reason for reason, _, _ in node.rates.missed), left=True),
    Column(_TREND, 8, 1, lambda node: _trend(node, WIDEST), left=True),
)  # fmt: skip


def columns_for(width: int) -> list[Column]:
    """Returns the columns that fit into `width` characters. What is left over goes to the reasons and the trend."""
    left, chosen = width + 1, []
    for rank in sorted({column.rank for column in COLUMNS}):
        together = [column for column in COLUMNS if column.rank == rank]
        needed = sum(column.width + 1 for column in together)
        if needed > left and rank:
            break
        left -= needed
        chosen += together
    growing = [column for column in chosen if column.title in (_TREND, "why computed")]
    spare = max(0, left) // max(1, len(growing))
    return [
        column._replace(width=column.width + spare) if column in growing else column
        for column in COLUMNS
        if column in chosen
    ]


# --- drawing ---------------------------------------------------------------------------------------------------------


def table(nodes: Sequence[NodeStatus], width: int, screen: Screen | None = None) -> RenderableType:
    """Returns the nodes as a table that is as wide as `width`; those that are down come last, with the reason in place of figures."""
    columns, down = columns_for(width), list[Text]()
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        chosen = screen is not None and column.title == screen.order.title
        shown.add_column(
            Text(column.title, "bold underline" if chosen else "bold"),
            width=column.width, no_wrap=True, justify="left" if column.left else "right",
        )  # fmt: skip
    for node in nodes:
        style = "reverse" if screen is not None and node.name == screen.selected else ""
        if _is_down(node):
            since = "" if node.silent_s is None else f" for {shown_age(node.silent_s)}"
            line = Text(f"{node.name:<{COLUMNS[0].width}} ", style, no_wrap=True, overflow="ellipsis")
            down.append(line.append(f"down{since}: {node.why}", "red"))
        else:
            cells = [_trend(node, column.width) if column.title == _TREND else column.cell(node) for column in columns]
            shown.add_row(*(Text(text, _STYLES.get(text, "")) for text in cells), style=style)
    return Group(shown, *down)


def _bar(used: float, size: float, name: str = "") -> str:
    full = round(max(0.0, min(1.0, used / size if size else 0.0)) * 20)
    return f"{'█' * full}{'·' * (20 - full)} {shown_bytes(int(used))} of {shown_bytes(int(size))}  {name}"


def details(node: NodeStatus, width: int) -> RenderableType:
    """Returns all that is known of one node."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=8)
    grid.add_column()

    def add(label: str, *parts: str, style: str = "") -> None:
        if parts:
            grid.add_row(label, Text("  ".join(parts), style))

    reading, rates = node.reading, node.rates or Rates()
    for why in filter(None, (node.why, node.difference)):
        add("why", why, style=_STYLES[node.state])
    add("tokens", *(f"{name} {percent(part)}" for name, part in (rates.sources or {}).items() if part))
    add("p50/p99", *(f"{name} {' / '.join(_pair(node, name).split())}" for name in TIMINGS if _pair(node, name)))
    if reading.staging:
        add("staging", _bar(reading.staging_used or 0.0, reading.staging))
    state = [f"pool {_breaker(node).lower()}"] if _breaker(node) else []
    state += [f"{tier} holds {shown_bytes(int(size))}" for tier, size in reading.tier_bytes.items() if size]
    state += [f"{tier} evicts {rate(value)}/s" for tier, value in rates.evictions.items() if value]
    add("now", *state, *([f"{rate(rates.requests)} requests/s"] if rates.requests else []))
    for segment in node.segments or ():
        name = f"{one_line(segment.segment_name)}  {segment.shown_status}".rstrip()
        add("gives", _bar(segment.allocator_used_bytes, segment.size_bytes, name))
    for reason, tokens, when in rates.missed[:5]:
        meaning = MEANINGS.get(reason, "")  # type: ignore[call-overload]
        add("computed", f"{short(tokens):>5} tokens, last {shown_age(when)} ago: {reason}: {meaning}")
    if node.role in ("prefill", "decode", "cache-server"):
        for name in TRENDS:
            trend = node.history.trend(name)
            bars = sparkline(trend, min(len(trend), width - 17))
            add(
                "look/s" if name == "lookups" else f"{name}/s",
                f"{rate(max(trend, default=0.0)):>6} {bars}",
                style="cyan",
            )
    title = Text.assemble(
        (node.name, "bold"), f" {node.role}  {node.record.address}  ", (node.state, _STYLES[node.state])
    )
    return Group(Rule(title, align="left", style="dim"), grid)


def summary(status: ClusterStatus, name: str) -> Text:
    """Returns the first line: the cluster as a whole."""
    nodes, line = status.nodes, Text(no_wrap=True)
    line.append(f"{len(nodes)} nodes", "bold")
    if down := sum(map(_is_down, nodes)):
        line.append(f", {down} down", "bold red")
    for trouble in status.troubles:
        line.append(f", {trouble.found.partition(':')[0]}", "bold red")
    if (sources := status.sources) is not None:
        parts = ", ".join(f"{name} {percent(part)}" for name, part in sources.items() if part and name != "computed")
        line.append(f"   hit {percent(hit_rate(sources))}", "bold").append(f" ({parts})" if parts else "")
    # what engines load and store; a cache server moves the same bytes for them
    rates = [node.rates for node in nodes if node.rates is not None and node.role in ("prefill", "decode")]
    for what, value in {" load": sum(each.load for each in rates), "store": sum(each.store for each in rates)}.items():
        line.append(f"  {what} {short(value) if value >= 0.5 else '0 '}B/s")
    return line.append(f"   {name}, {status.source}", "dim")


def draw(screen: Screen, width: int, height: int, name: str) -> Layout:
    """Returns the whole screen. `name`: the cluster's."""
    nodes = screen.nodes()
    chosen = next((node for node in nodes if node.name == screen.selected), None)
    order = f"{screen.order.title}{' reversed' if screen.reversed else ''}"
    keys = f"↑↓ select  Enter follow  s sort: {order}  r reverse  h help  q end"
    body = Layout()
    if screen.helping:
        body.update(Text(_HELP, overflow="ellipsis", no_wrap=True))
    elif chosen is None or screen.following:
        body.update("" if chosen is None else details(chosen, width))
    else:
        most = max(1, height - 3 - max(0, min(_DETAILS, height - 3 - min(len(nodes), 8))))
        first = max(0, min(nodes.index(chosen) - most + 1, len(nodes) - most))  # so that the selected one is in sight
        seen = nodes[first : first + most]
        body.split_column(
            Layout(table(seen, width, screen), size=len(seen) + 1), Layout(details(chosen, width), minimum_size=0)
        )
    layout = Layout()
    layout.split_column(
        Layout(summary(screen.status, name), size=1),
        body,
        Layout(Text(keys, "dim", no_wrap=True, overflow="ellipsis"), size=1),
    )
    return layout


def plain(status: ClusterStatus, name: str, width: int) -> Group:
    """Returns one table of all nodes, for where nothing can follow."""
    return Group(summary(status, name), table(sorted(status.nodes, key=_is_down), width))


# --- the loop --------------------------------------------------------------------------------------------------------


def follow(config: ClusterConfig, console: Console, interval_s: float) -> None:
    """Shows the nodes until `q` or a signal. `interval_s`: how often each node is asked."""
    watched = watched_nodes(config, stale_s=_STALE_S + interval_s)
    # lines of the log, such as those about discovery, would spoil the screen, which shows the same
    logging.disable(logging.CRITICAL)
    screen, drawn, size = Screen(watched.status(0.0)), 0.0, console.size
    with contextlib.ExitStack() as stack:
        stop, directory = stack.enter_context(stop_on_signals()), stack.enter_context(open_directory(config))
        asker = stack.enter_context(contextlib.closing(Asker(proxy_access(config), interval_s)))
        directory.wait_synced(SYNC_S)
        typed = stack.enter_context(keyboard())
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        while not stop.is_set():
            now = time.monotonic()
            watched.update(directory.view(), directory.wait_synced(0.0))
            answers = asker.poll(watched.asked, now)
            watched.take(answers)
            keys = typed(_TICK_S)
            if not all(map(screen.press, keys)):
                return
            if keys or answers or size != console.size or now - drawn >= _REDRAW_S:
                drawn, size = now, console.size
                screen.status = watched.status(now)
                live.update(draw(screen, size.width, size.height, config.name), refresh=True)


def read_keys(typed: bytes) -> list[Key]:
    """Returns the keys among what was typed. Ignores all others."""
    return [_KEYS[key] for key in re.findall(rb"(?s)\x1b[\[O][^@-~]*[@-~]?|.", typed) if key in _KEYS]


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float], list[Key]]]:
    """Yields a function that waits for keys, for so many seconds at most. Restores the terminal afterwards. Without a terminal at standard
    input, or when it is gone, there are no keys."""
    descriptor = sys.stdin.fileno()
    inputs = [descriptor] if os.isatty(descriptor) else []

    def wait(seconds: float) -> list[Key]:
        if not select.select(inputs, [], [], seconds)[0]:
            return []
        typed = b""
        with contextlib.suppress(OSError):
            typed = os.read(descriptor, 256)
        if not typed:
            inputs.clear()
        return read_keys(typed)

    before = termios.tcgetattr(descriptor) if inputs else None
    if before is not None:
        tty.setcbreak(descriptor)
    try:
        yield wait
    finally:
        if before is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
