"""`pd-cache top`: what the nodes do now, in a terminal of any size. docs/monitoring.md says what its figures mean.

`Screen` (pure) is what the user looks at: rows in an order, the selected node, and what keys do. `draw` makes lines of it, `top` is the loop.
"""

from __future__ import annotations

import contextlib
import io
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

from launch.discovery import Directory, open_directory
from launch.figures import TIMINGS, TRENDS, Rates, hit_rate, shown_age, tenant_cells
from launch.http import proxy_access
from launch.supervise import StopFlag, stop_on_signals
from launch.watched import TIMEOUT_S, Asker, NodeRow, WatchedNodes
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.machine import shown_bytes
from pd_cache.decoding import one_line
from pd_cache.reasons import MEANINGS

Key = Literal["up", "down", "sort", "reverse", "follow", "back", "help", "quit"]

_SYNC_S, _TICK_S, _REDRAW_S = 5.0, 0.1, 0.5
_STALE_S = 10.0
"""After how many seconds without a new reading a node counts as silent. The time from one question to the next is added."""
_PLAIN_WIDTH = 200
"""The width of one table where there is no terminal to say one."""
_DETAILS = 14
"""The most lines about the selected node below the table."""
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"up": "green", "ill": "yellow", "silent": "red", "asking": "dim", "-": "dim", "DOWN": "bold red"}
_KEYS: dict[bytes, Key] = {
    b"q": "quit", b"Q": "quit", b"\x04": "quit", b"j": "down", b"k": "up", b"s": "sort", b"r": "reverse",
    b"f": "follow", b"\r": "follow", b"\n": "follow", b"h": "help", b"?": "help", b"\x1b": "back", b"\x1b[A": "up", b"\x1b[B": "down",
    b"\x1bOA": "up", b"\x1bOB": "down",
}  # fmt: skip
_HELP = """
↑ ↓ or k j    select a node           Enter or f   follow it, and back
s             next order              r            the other way round
h or ?        this help               q            end

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
    """The nodes, their order, and the one that is selected."""

    def __init__(self, nodes: WatchedNodes) -> None:
        self.nodes = nodes
        self.order: Column = COLUMNS[0]
        self.reversed = False
        self.selected = ""
        """The name of the selected node; empty if there is none."""
        self.following = False
        self.helping = False

    def rows(self, now: float) -> list[NodeRow]:
        """Returns all nodes in the chosen order, figures from the largest down. Nodes without a figure come last, and then silent ones."""
        rows = self.nodes.rows(now)
        if self.selected not in (row.name for row in rows):
            self.selected, self.following = rows[0].name if rows else "", False
        if self.order.figure is None:
            rows = rows[::-1] if self.reversed else rows
        else:
            known = [(value, row) for row in rows if (value := self.order.figure(row)) is not None]
            known.sort(key=lambda pair: pair[0], reverse=not self.reversed)
            rows = [row for _, row in known] + [row for row in rows if self.order.figure(row) is None]
        return sorted(rows, key=_is_silent)

    def press(self, key: Key, now: float) -> bool:
        """Does what a key stands for. Returns False if it ends the program."""
        names = [row.name for row in self.rows(now)]
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


def _is_silent(row: NodeRow) -> bool:
    return row.state == "silent"


class Column(NamedTuple):
    """A column of the table: shown if there is room after those of a lower rank."""

    title: str
    width: int
    rank: int
    cell: Callable[[NodeRow], str]
    left: bool = False
    figure: Callable[[NodeRow], float | None] | None = None
    """What rows can be sorted by."""


def _pair(row: NodeRow, *timings: str) -> str:
    found = {} if row.rates is None else row.rates.quantiles
    return next((f"{seconds(found[one][0]):>5} {seconds(found[one][1]):>5}" for one in timings if one in found), "")


def _source(row: NodeRow, name: str) -> str:
    sources = None if row.rates is None else row.rates.sources
    if sources is None or (sources["loaded"] and name != "engine"):  # it does not say from which tier
        return ""
    return percent(sources[name]) if sources[name] else "-"


def _moved(row: NodeRow, what: Literal["load", "store", "lookups"]) -> float | None:
    """Proxies and masters move nothing."""
    return None if row.rates is None or row.role in ("proxy", "master") else getattr(row.rates, what)


def _queue(row: NodeRow) -> str:
    return "+".join(short(one) for one in (row.reading.queued, row.reading.running) if one is not None)


def _staging(row: NodeRow) -> float | None:
    return (row.reading.staging_used or 0.0) / row.reading.staging if row.reading.staging else None


def _breaker(row: NodeRow) -> str:
    return {None: "", True: "up", False: "DOWN"}[row.reading.pool_up]


def _given(row: NodeRow) -> str:
    if any(segment.shown_status for segment in row.segments) and row.role != "master":
        return "drain"  # the details say how far it is
    size = sum(segment.size_bytes for segment in row.segments)
    return percent(sum(segment.allocator_used_bytes for segment in row.segments) / size) if size else ""


def _trend(row: NodeRow, width: int) -> str:
    moved = [sum(both) for both in zip(row.history.trend("load"), row.history.trend("store"), strict=True)]
    return sparkline(moved if row.role != "proxy" else [], width)


_TREND = "trend"
COLUMNS = (
    Column("node", 14, 0, lambda row: row.name, left=True),
    Column("role", 12, 12, lambda row: row.role, left=True),
    Column("state", 6, 0, lambda row: row.state, left=True),
    Column("hit", 4, 0, lambda row: percent(row.hit), figure=lambda row: row.hit),
    Column("engine", 6, 6, lambda row: _source(row, "engine")),
    Column("memory", 6, 6, lambda row: _source(row, "memory")),
    Column("disk", 4, 6, lambda row: _source(row, "disk")),
    Column("pool", 4, 6, lambda row: _source(row, "pool")),
    Column("load/s", 6, 0, lambda row: rate(_moved(row, "load")), figure=lambda row: _moved(row, "load")),
    Column("store/s", 7, 0, lambda row: rate(_moved(row, "store")), figure=lambda row: _moved(row, "store")),
    Column("look/s", 6, 0, lambda row: rate(_moved(row, "lookups")), figure=lambda row: _moved(row, "lookups")),
    Column("p50   p99", 11, 0, lambda row: _pair(row, "first byte", "first token", "lookup"), figure=lambda row: row.p99),
    Column("lookup 50 99", 12, 7, lambda row: _pair(row, "lookup")),
    Column("queue", 6, 0, _queue, figure=lambda row: row.reading.queued),
    Column("staging", 7, 8, lambda row: percent(_staging(row))),
    Column("breaker", 7, 8, _breaker),
    Column("evict/s", 7, 9, lambda row: rate(row.evicted) if row.rates is not None and row.rates.evictions else "", figure=lambda row: row.evicted),
    Column("gives", 5, 10, _given),
    Column("why computed", 22, 11, lambda row: "" if row.rates is None else ", ".join(one for one, _, _ in row.rates.missed), left=True),
    Column(_TREND, 8, 1, lambda row: _trend(row, _PLAIN_WIDTH), left=True),
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


def table(rows: Sequence[NodeRow], width: int, screen: Screen | None = None) -> RenderableType:
    """Returns the rows as a table that is as wide as `width`; silent nodes come last, with the reason in place of figures."""
    columns, silent = columns_for(width), list[Text]()
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        chosen = screen is not None and column.title == screen.order.title
        shown.add_column(
            Text(column.title, "bold underline" if chosen else "bold"),
            width=column.width, no_wrap=True, justify="left" if column.left else "right",
        )  # fmt: skip
    for row in rows:
        style = "reverse" if screen is not None and row.name == screen.selected else ""
        if row.state == "silent":
            since = "" if row.silent_s is None else f" for {shown_age(row.silent_s)}"
            line = Text(f"{row.name:<{COLUMNS[0].width}} ", style, no_wrap=True, overflow="ellipsis")
            silent.append(line.append(f"silent no answer{since}: {row.why}", "red"))
        else:
            cells = [_trend(row, one.width) if one.title == _TREND else one.cell(row) for one in columns]
            shown.add_row(*(Text(text, _STYLES.get(text, "")) for text in cells), style=style)
    return Group(shown, *silent)


def _bar(used: float, size: float, name: str = "") -> str:
    full = round(max(0.0, min(1.0, used / size if size else 0.0)) * 20)
    return f"{'█' * full}{'·' * (20 - full)} {shown_bytes(int(used))} of {shown_bytes(int(size))}  {name}"


def details(row: NodeRow, width: int) -> RenderableType:
    """Returns all that is known of one node."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=8)
    grid.add_column()

    def add(label: str, *parts: str, style: str = "") -> None:
        if parts:
            grid.add_row(label, Text("  ".join(parts), style))

    reading, rates = row.reading, row.rates or Rates()
    if row.why:
        add("why", row.why, style=_STYLES[row.state])
    add("tokens", *(f"{name} {percent(part)}" for name, part in (rates.sources or {}).items() if part))
    add("p50/p99", *(f"{name} {' / '.join(_pair(row, name).split())}" for name in TIMINGS if _pair(row, name)))
    if reading.staging:
        add("staging", _bar(reading.staging_used or 0.0, reading.staging))
    state = [f"pool {_breaker(row).lower()}"] if _breaker(row) else []
    state += [f"{tier} holds {shown_bytes(int(size))}" for tier, size in reading.tier_bytes.items() if size]
    state += [f"{tier} evicts {rate(value)}/s" for tier, value in rates.evictions.items() if value]
    add("now", *state, *([f"{rate(rates.requests)} requests/s"] if rates.requests else []))
    for one in row.segments:
        name = f"{one_line(one.segment_name)}  {one.shown_status}".rstrip()
        add("gives", _bar(one.allocator_used_bytes, one.size_bytes, name))
    for tenant, counts in reading.tenants.items():
        size, quota, hit, evicted = tenant_cells(counts)
        add("tenant", tenant, f"{size} of {quota}" if quota else "", f"hit {hit or '-'}", f"{evicted} chunks evicted")
    for reason, tokens, when in rates.missed[:5]:
        meaning = MEANINGS.get(reason, "")  # type: ignore[call-overload]
        add("computed", f"{short(tokens):>5} tokens, last {shown_age(when)} ago: {reason}: {meaning}")
    if row.role in ("prefill", "decode", "cache-server"):
        for name in TRENDS:
            trend = row.history.trend(name)
            bars = sparkline(trend, min(len(trend), width - 17))
            add(
                "look/s" if name == "lookups" else f"{name}/s",
                f"{rate(max(trend, default=0.0)):>6} {bars}",
                style="cyan",
            )
    title = Text.assemble((row.name, "bold"), f" {row.role}  {row.record.address}  ", (row.state, _STYLES[row.state]))
    return Group(Rule(title, align="left", style="dim"), grid)


def _summary(nodes: WatchedNodes, rows: Sequence[NodeRow], source: str, now: float) -> Text:
    """Returns the first line: the cluster as a whole."""
    line = Text.assemble((f"{len(rows)} nodes", "bold"), no_wrap=True)
    if silent := sum(row.state == "silent" for row in rows):
        line.append(f", {silent} silent", "bold red")
    if (sources := nodes.sources(now)) is not None:
        parts = ", ".join(f"{name} {percent(part)}" for name, part in sources.items() if part and name != "computed")
        line.append(f"   hit {percent(hit_rate(sources))}", "bold").append(f" ({parts})" if parts else "")
    # what engines load and store; a cache server moves the same bytes for them
    rates = [row.rates for row in rows if row.rates is not None and row.role in ("prefill", "decode")]
    for name, value in {" load": sum(one.load for one in rates), "store": sum(one.store for one in rates)}.items():
        line.append(f"  {name} {short(value) if value >= 0.5 else '0 '}B/s")
    return line.append(f"   {source}", "dim")


def draw(screen: Screen, width: int, height: int, now: float, source: str = "") -> Layout:
    """Returns the whole screen."""
    rows = screen.rows(now)
    chosen = next((row for row in rows if row.name == screen.selected), None)
    order = f"{screen.order.title}{' reversed' if screen.reversed else ''}"
    keys = f"↑↓ select  Enter follow  s sort: {order}  r reverse  h help  q end"
    body = Layout()
    if screen.helping:
        body.update(Text(_HELP, overflow="ellipsis", no_wrap=True))
    elif chosen is None or screen.following:
        body.update("" if chosen is None else details(chosen, width))
    else:
        most = max(1, height - 3 - max(0, min(_DETAILS, height - 3 - min(len(rows), 8))))
        first = max(0, min(rows.index(chosen) - most + 1, len(rows) - most))  # so that the selected one is in sight
        seen = rows[first : first + most]
        body.split_column(
            Layout(table(seen, width, screen), size=len(seen) + 1), Layout(details(chosen, width), minimum_size=0)
        )
    layout = Layout()
    layout.split_column(
        Layout(_summary(screen.nodes, rows, source, now), size=1),
        body,
        Layout(Text(keys, "dim", no_wrap=True, overflow="ellipsis"), size=1),
    )
    return layout


# --- the loop --------------------------------------------------------------------------------------------------------


def top(config: ClusterConfig, *, once: bool = False, interval_s: float = 2.0) -> None:
    """Shows the nodes until `q` or a signal. Prints them once, as plain text, if `once` is set, or if standard output is no terminal or one that
    cannot move its cursor (`TERM=dumb`).

    `interval_s`: how often each node is asked.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and arrows are question marks where the locale has none
    console, source = Console(), f"{config.name}, {config.discovery.__struct_config__.tag}"
    once = once or not console.is_terminal or console.is_dumb_terminal
    nodes = WatchedNodes(_STALE_S + interval_s, since_start=once)
    with (
        stop_on_signals() as stop,
        open_directory(config) as directory,
        contextlib.closing(Asker(proxy_access(config), interval_s)) as asker,
    ):
        directory.wait_synced(_SYNC_S)
        if not once:
            _follow(console, directory, asker, nodes, source, stop)
            return
        # every node is asked twice, so that there are rates; this is too short only where this machine is slow
        deadline = time.monotonic() + 5 * TIMEOUT_S + 2 * interval_s
        while not stop.wait(_TICK_S):
            now = time.monotonic()
            nodes.update(directory.view().nodes)
            nodes.take(asker.poll(nodes.asked, now))
            rows = sorted(nodes.rows(now), key=_is_silent)
            if now > deadline or all(row.state in ("-", "silent") or row.history.readings > 1 for row in rows):
                break
        else:
            return
    width = console.width if console.is_terminal else max(console.width, _PLAIN_WIDTH)
    plain = Console(width=width, highlight=False)
    with plain.capture() as captured:
        plain.print(_summary(nodes, rows, source, now), table(rows, width), sep="\n")
    for line in captured.get().splitlines():
        print(line.rstrip())


def _follow(
    console: Console, directory: Directory, asker: Asker, nodes: WatchedNodes, source: str, stop: StopFlag
) -> None:
    screen, drawn, size = Screen(nodes), 0.0, console.size
    # lines of the log, such as those about discovery, would spoil the screen, which shows the same
    logging.disable(logging.CRITICAL)
    with keyboard() as typed, Live(console=console, screen=True, auto_refresh=False) as live:
        while not stop.is_set():
            view, now = directory.view(), time.monotonic()
            nodes.update(view.nodes)
            answers = asker.poll(nodes.asked, now)
            nodes.take(answers)
            keys = typed(_TICK_S)
            if not all(screen.press(key, now) for key in keys):
                return
            if keys or answers or size != console.size or now - drawn >= _REDRAW_S:
                drawn, size = now, console.size
                stale = "" if view.stale_since is None else f", silent for {now - view.stale_since:.0f} s"
                live.update(draw(screen, size.width, size.height, now, source + stale), refresh=True)


def read_keys(typed: bytes) -> list[Key]:
    """Returns the keys among what was typed. Ignores all others."""
    return [_KEYS[one] for one in re.findall(rb"(?s)\x1b[\[O][^@-~]*[@-~]?|.", typed) if one in _KEYS]


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
