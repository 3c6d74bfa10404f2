"""Draws what `pd-cache top` shows, for a terminal of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from rich.console import Group
from rich.text import Text

from launch.figures.readings import TIMINGS
from launch.top.watched import NodeRow, WatchedCluster
from pd_cache.cluster.memory import shown_bytes
from pd_cache.decoding import one_line
from pd_cache.misses import MEANINGS

_BARS = "▁▂▃▄▅▆▇█"
_GAP = 1
_STYLES = {"up": "green", "ill": "yellow", "silent": "red", "asking": "dim", "-": "dim"}
_HELP = (
    "↑ ↓ or k j    select a node           Enter or f   follow it, and back",
    "s             next order              r            the other way round",
    "h or ?        this help               q            end",
    "",
    "hit           prompt tokens of the last minute that were not computed;",
    "              in the first line: at the prefill nodes",
    "engine        the part that was in the engine's own cache",
    "memory …pool  the parts that were loaded from each tier",
    "load store    bytes a second that the cache gave to the engine, and took",
    "p50 p99       of the last minute; the first byte at proxies, the first",
    "              token at engines, lookups at others",
    "queue         requests that wait + requests that run",
    "staging       the part in use of the memory between engine and tiers",
    "breaker       up; DOWN while calls do not go to the pool",
    "gives         the part in use of the memory that it gives to the pool",
    "why computed  the last minute's reasons, the latest first",
)


# --- texts for figures -----------------------------------------------------------------------------------------------


def rate(value: float | None) -> str:
    """Returns bytes a second in at most 6 characters, `-` for none at all."""
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


def seconds(value: float | None) -> str:
    """Returns a duration in at most 5 characters."""
    if value is None:
        return ""
    if math.isinf(value):
        return "long"
    for unit, factor in (("µ", 1e6), ("m", 1e3)):
        if value * factor < 999.5:
            return f"{value * factor:.{0 if value * factor >= 9.95 else 1}f}{unit}s"
    return f"{value:.1f}s" if value < 99.5 else f"{value:.0f}s"


def percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def ago(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns the last `width` values as bars, the largest of them as the highest. Blank where there are none yet."""
    shown = [value if math.isfinite(value) else 0.0 for value in values][-width:] if width > 0 else []
    most = max(shown, default=0.0)
    bars = "".join(
        _BARS[min(len(_BARS) - 1, math.ceil(value / most * len(_BARS)) - 1)] if value > 0 else " " for value in shown
    )
    return bars.rjust(max(0, width))


# --- the table -------------------------------------------------------------------------------------------------------


class ScreenColumn(NamedTuple):
    """A column of the table: shown if there is room after those of a lower rank."""

    title: str
    width: int
    rank: int
    cell: Callable[[NodeRow], str]
    left: bool = False
    order: str = ""
    """Which order sorts by it."""


def _pair(timing: str) -> Callable[[NodeRow], str]:
    def cell(row: NodeRow) -> str:
        found = None if row.rates is None else row.rates.quantiles.get(timing)
        return "" if found is None else f"{seconds(found[0]):>5} {seconds(found[1]):>5}"

    return cell


def _main_pair(row: NodeRow) -> str:
    return next((text for name in ("first byte", "first token", "lookup") if (text := _pair(name)(row))), "")


def _source(name: str) -> Callable[[NodeRow], str]:
    def cell(row: NodeRow) -> str:
        sources = None if row.rates is None else row.rates.sources
        if sources is None or (sources["loaded"] and name != "engine"):  # it does not say from which tier
            return ""
        return percent(sources[name]) if sources[name] else "-"

    return cell


def _moved(what: Literal["load", "store", "lookups"]) -> Callable[[NodeRow], str]:
    """Proxies and masters move nothing."""
    return lambda row: rate(None if row.rates is None or row.role in ("proxy", "master") else getattr(row.rates, what))


def _queue(row: NodeRow) -> str:
    if row.reading is None or (row.reading.queued is None and row.reading.running is None):
        return ""
    waiting = "" if row.reading.queued is None else short(row.reading.queued)
    running = "" if row.reading.running is None else short(row.reading.running)
    return f"{waiting}+{running}" if waiting and running else waiting or running


def _staging(row: NodeRow) -> str:
    if row.reading is None or not row.reading.staging:
        return ""
    return percent((row.reading.staging_used or 0.0) / row.reading.staging)


def _pool(row: NodeRow) -> str:
    if row.reading is None or row.reading.pool_up is None:
        return ""
    return "up" if row.reading.pool_up else "DOWN"


def _given(row: NodeRow) -> str:
    size = sum(segment.size_bytes for segment in row.segments)
    return percent(sum(segment.allocator_used_bytes for segment in row.segments) / size) if size else ""


def _missed(row: NodeRow) -> str:
    return "" if row.rates is None else ", ".join(reason for reason, _, _ in row.rates.missed)


def _trend(row: NodeRow, width: int) -> str:
    loads, stores = list(row.history.loads), list(row.history.stores)
    moved = [one + other for one, other in zip(loads, stores, strict=True)]
    if row.role == "proxy" or not any(moved):
        return " " * width
    return sparkline(moved, width)


_TREND = "trend"
COLUMNS = (
    ScreenColumn("node", 14, 0, lambda row: row.name, left=True, order="name"),
    ScreenColumn("role", 12, 12, lambda row: row.role, left=True),
    ScreenColumn("state", 6, 0, lambda row: row.state, left=True),
    ScreenColumn("hit", 4, 0, lambda row: percent(None if row.rates is None else row.rates.hit), order="hit"),
    ScreenColumn("engine", 6, 6, _source("engine")),
    ScreenColumn("memory", 6, 6, _source("memory")),
    ScreenColumn("disk", 4, 6, _source("disk")),
    ScreenColumn("pool", 4, 6, _source("pool")),
    ScreenColumn("load/s", 6, 0, _moved("load"), order="load"),
    ScreenColumn("store/s", 7, 0, _moved("store"), order="store"),
    ScreenColumn("look/s", 6, 0, _moved("lookups"), order="lookups"),
    ScreenColumn("p50   p99", 11, 0, _main_pair, order="p99"),
    ScreenColumn("lookup 50 99", 12, 7, _pair("lookup")),
    ScreenColumn("queue", 6, 0, _queue, order="queue"),
    ScreenColumn("staging", 7, 8, _staging),
    ScreenColumn("breaker", 7, 8, _pool),
    ScreenColumn("evict/s", 7, 9, lambda row: "" if row.rates is None or not row.rates.evictions else rate(row.evicted), order="evictions"),
    ScreenColumn("gives", 5, 10, _given),
    ScreenColumn("why computed", 22, 11, _missed, left=True),
    ScreenColumn(_TREND, 8, 1, lambda row: "", left=True),
)  # fmt: skip


def columns_for(width: int) -> list[ScreenColumn]:
    """Returns the columns that fit into `width` characters. What is left over goes to the reasons and the trend."""
    left, chosen = width + _GAP, []
    for rank in sorted({column.rank for column in COLUMNS}):
        together = [column for column in COLUMNS if column.rank == rank]
        needed = sum(column.width + _GAP for column in together)
        if needed > left and rank:
            break
        left -= needed
        chosen += together
    found = [column for column in COLUMNS if column in chosen]
    spare = max(0, left)
    growing = [index for index, column in enumerate(found) if column.title in (_TREND, "why computed")]
    for index in growing:
        found[index] = found[index]._replace(width=found[index].width + spare // len(growing))
    return found


def _fitted(text: str, width: int, left: bool) -> str:
    if len(text) > width:
        text = text[: width - 1] + "…"
    return text.ljust(width) if left else text.rjust(width)


def _head(columns: Iterable[ScreenColumn], watched: WatchedCluster) -> Text:
    line = Text(no_wrap=True)
    for column in columns:
        title = column.title
        chosen = bool(column.order) and column.order == watched.order
        line.append(_fitted(title, column.width, column.left) + " " * _GAP, "bold underline" if chosen else "bold")
    line.right_crop(_GAP)
    return line


def _line(row: NodeRow, columns: Sequence[ScreenColumn], chosen: bool) -> Text:
    line = Text(no_wrap=True, style="reverse" if chosen else "")
    silent = row.state == "silent"
    said = False
    for index, column in enumerate(columns):
        if silent and column.title == "hit":  # the reason takes the place of the figures
            width = sum(one.width + _GAP for one in columns[index:]) - _GAP
            what = (
                f"no answer for {ago(row.silent_s)}: {row.why}" if row.silent_s is not None else f"no answer: {row.why}"
            )
            line.append(_fitted(what, width, True), "red")
            said = True
            break
        text = _trend(row, column.width) if column.title == _TREND else column.cell(row)
        style = (
            _STYLES[row.state]
            if column.title == "state"
            else "bold red"
            if text == "DOWN"
            else "cyan"
            if column.title == _TREND
            else ""
        )
        line.append(_fitted(text, column.width, column.left) + " " * _GAP, style)
    if not said:
        line.right_crop(_GAP)
    return line


# --- one node --------------------------------------------------------------------------------------------------------


def _bar(part: float, width: int) -> str:
    full = round(max(0.0, min(1.0, part)) * width)
    return "█" * full + "·" * (width - full)


def details(row: NodeRow, width: int, height: int) -> list[Text]:
    """Returns all that is known of one node, in at most `height` lines."""
    lines = [_title(row, width)]
    if row.state in ("silent", "ill", "-") and row.why:
        lines.append(Text(row.why, _STYLES[row.state]))
    reading, rates = row.reading, row.rates
    if rates is not None and rates.sources is not None:
        parts = "  ".join(f"{name} {percent(part)}" for name, part in rates.sources.items() if part)
        lines.append(Text(f"tokens   {parts}"))
    timings = [f"{name} {' / '.join(_pair(name)(row).split())}" for name in TIMINGS if _pair(name)(row)]
    if timings:
        lines += _wrapped("p50/p99  ", timings, width)
    if reading is not None and reading.staging:
        used = (reading.staging_used or 0.0) / reading.staging
        lines.append(
            Text(
                f"staging  {_bar(used, 20)} {shown_bytes(int(reading.staging_used or 0))} of {shown_bytes(int(reading.staging))}"
            )
        )
    state = []
    if reading is not None and reading.pool_up is not None:
        state.append(f"pool {'up' if reading.pool_up else 'down'}")
    state += [
        f"{tier} holds {shown_bytes(int(size))}"
        for tier, size in (reading.tier_bytes if reading else {}).items()
        if size
    ]
    if rates is not None:
        state += [f"{tier} evicts {rate(value)}/s" for tier, value in rates.evictions.items() if value]
        if rates.requests:
            state.append(f"{rate(rates.requests)} requests/s")
    if state:
        lines += _wrapped("now      ", state, width)
    for segment in row.segments:
        part = segment.allocator_used_bytes / segment.size_bytes if segment.size_bytes else 0.0
        lines.append(
            Text(
                f"gives    {_bar(part, 20)} {shown_bytes(segment.allocator_used_bytes)} of {shown_bytes(segment.size_bytes)}  {one_line(segment.segment_name)}"
            )
        )
    if rates is not None:
        for reason, tokens, when in rates.missed[:5]:
            meaning = MEANINGS.get(reason, "")  # type: ignore[call-overload]
            lines.append(Text(f"computed {short(tokens):>5} tokens, last {ago(when)} ago: {reason}: {meaning}"))
    if row.role in ("prefill", "decode", "cache-server"):
        for name, trend in (
            ("load/s", row.history.loads),
            ("store/s", row.history.stores),
            ("look/s", row.history.lookups),
        ):
            label = f"{name:<8} {rate(max(trend, default=0.0)):>6} "
            lines.append(Text(label + sparkline(trend, min(len(trend), max(0, width - len(label)))), "cyan"))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines[: max(0, height)]


def _title(row: NodeRow, width: int) -> Text:
    title = Text(f"── {row.name} ", "bold")
    title.append(f"{row.role}  {row.record.address}  ", "")
    title.append(row.state, _STYLES[row.state])
    title.append(" " + "─" * max(0, width - len(title) - 1), "dim")
    return title


def _wrapped(label: str, parts: Sequence[str], width: int) -> list[Text]:
    lines, current = [], label
    for part in parts:
        if len(current) > len(label) and len(current) + len(part) + 2 > width:
            lines.append(Text(current))
            current = " " * len(label)
        current += part + "  "
    return [*lines, Text(current.rstrip())]


# --- the whole -------------------------------------------------------------------------------------------------------


def summary(watched: WatchedCluster, rows: Sequence[NodeRow], source: str, now: float) -> Text:
    """Returns the first line: the cluster as a whole."""
    silent = sum(row.state == "silent" for row in rows)
    line = Text(no_wrap=True)
    line.append(f"{len(rows)} nodes", "bold")
    if silent:
        line.append(f", {silent} silent", "bold red")
    sources = watched.sources(now)
    if sources is not None:
        parts = ", ".join(f"{name} {percent(part)}" for name, part in sources.items() if part and name != "computed")
        line.append(f"   hit {percent(1 - sources['computed'])}", "bold")
        line.append(f" ({parts})" if parts else "")
    # what engines load and store; a cache server moves the same bytes for them
    rates = [row.rates for row in rows if row.rates is not None and row.role in ("prefill", "decode")]
    line.append(
        f"   load {rate(sum(one.load for one in rates))}B/s  store {rate(sum(one.store for one in rates))}B/s".replace(
            "-B", "0 B"
        )
    )
    line.append(f"   {source}", "dim")
    return line


def draw(watched: WatchedCluster, width: int, height: int, now: float, source: str = "") -> Group:
    """Returns the whole screen, of exactly `height` lines at most."""
    rows = watched.rows(now)
    keys = Text(
        f"↑↓ select  Enter follow  s sort: {watched.order}{' reversed' if watched.reversed else ''}  r reverse  h help  q end",
        "dim",
        no_wrap=True,
    )
    lines = [summary(watched, rows, source, now)]
    chosen = next((row for row in rows if row.name == watched.selected), None)
    room = height - 2
    if watched.helping:
        lines += [Text(line, no_wrap=True) for line in ("", *_HELP)][:room]
    elif watched.following and chosen is not None:
        lines += details(chosen, width, room)
    else:
        columns = columns_for(width)
        below = [] if chosen is None else details(chosen, width, max(0, min(14, room - 1 - min(len(rows), 8))))
        most = max(1, room - 1 - len(below))
        first = _scrolled(rows, watched.selected, most)
        lines.append(_head(columns, watched))
        lines += [_line(row, columns, row.name == watched.selected) for row in rows[first : first + most]]
        lines += below
    lines = lines[: height - 1]
    lines += [Text("")] * (height - 1 - len(lines))
    for line in (*lines, keys):
        line.truncate(width, overflow="ellipsis")
    return Group(*lines, keys)


def _scrolled(rows: Sequence[NodeRow], selected: str, most: int) -> int:
    """Returns the first of `most` rows to show, such that the selected one is among them."""
    at = next((index for index, row in enumerate(rows) if row.name == selected), 0)
    return max(0, min(at - most + 1, len(rows) - most)) if at >= most else 0


def snapshot(watched: WatchedCluster, width: int, now: float, source: str) -> Group:
    """Returns the same once, for a file or a pipe: no keys, no selection, every node."""
    rows = watched.rows(now)
    columns = columns_for(width)
    plain = WatchedCluster()
    plain.order = watched.order
    lines = [summary(watched, rows, source, now), _head(columns, plain)]
    lines += [_line(row, columns, False) for row in rows]
    for line in lines:
        line.rstrip()
    return Group(*lines)
