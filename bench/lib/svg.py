"""Plots as self-contained SVG: bars in pairs, lines, and a matrix. Readable on light and dark; nothing to install."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

SERIES = 8
"""How many series one plot can distinguish."""
_LIGHT = "--ink:#1e293b;--quiet:#475569;--grid:#cbd5e1;--paper:#ffffff;" + ";".join(
    f"--c{index}:{color}"
    for index, color in enumerate(
        ("#2563eb", "#94a3b8", "#d97706", "#059669", "#be185d", "#7c3aed", "#0e7490", "#854d0e")
    )
)
_DARK = "--ink:#e2e8f0;--quiet:#a8b3c4;--grid:#3b4659;--paper:#111827;" + ";".join(
    f"--c{index}:{color}"
    for index, color in enumerate(
        ("#60a5fa", "#8492a6", "#fbbf24", "#34d399", "#f472b6", "#a78bfa", "#22d3ee", "#ca8a04")
    )
)
STYLE = "\n".join(
    (
        f"svg.plot{{{_LIGHT}}}",
        f"@media (prefers-color-scheme:dark){{svg.plot{{{_DARK}}}}}",
        "svg.plot text{font:13px sans-serif;fill:var(--ink)}",
        "svg.plot .s{font-size:11px;fill:var(--quiet)}",
        "svg.plot line{stroke:var(--grid)}",
        "svg.plot .paper{fill:var(--paper)}",
        "svg.plot .g{fill:var(--grid);fill-opacity:.4}",
        *(f"svg.plot .c{n}{{fill:var(--c{n})}} svg.plot .l{n}{{stroke:var(--c{n})}}" for n in range(SERIES)),
    )
)
"""What a page with inline plots needs once."""
_MARKED = 40
"""Lines of up to so many points show each of them."""


class Plot(NamedTuple):
    """A plot of `width` × `height` pixels."""

    title: str
    width: float
    height: float
    body: str

    def svg(self) -> str:
        """Returns the plot as a file of its own."""
        return self._element(f'xmlns="http://www.w3.org/2000/svg" width="{self.width:.0f}" height="{self.height:.0f}"', f"<style>{STYLE}</style>\n")  # fmt: skip

    def inline(self) -> str:
        """Returns the plot as a part of a page that has `STYLE`."""
        return self._element(
            f'role="img" aria-label="{escape(self.title)}" style="max-width:{self.width:.0f}px;min-width:min({self.width:.0f}px,32rem)"'
        )

    def _element(self, attributes: str, style: str = "") -> str:
        return (
            f'<svg class="plot" {attributes} viewBox="0 0 {self.width:.0f} {self.height:.0f}">\n{style}'
            f'<rect class="paper" width="100%" height="100%"/>\n{self.body}\n</svg>\n'
        )


class Bars(NamedTuple):
    """One group of a bar plot."""

    label: str
    values: tuple[float, ...]


def bar_plot(title: str, unit: str, series: Sequence[str], groups: Sequence[Bars]) -> Plot:
    """Horizontal bars, one a series in each group, with their values written beside them."""
    _check_series(series)
    left, width, bar, gap = 210, 430, 15, 14
    legend, top = _legend(series, 16, 44, left + width)
    step = len(series) * bar + gap
    most = max((value for group in groups for value in group.values), default=0.0) or 1.0
    parts = [_text(16, 24, title), *legend]
    for index, group in enumerate(groups):
        y = top + index * step
        parts.append(_text(left - 8, y + len(series) * bar / 2 + 4, group.label, anchor="end"))
        for number, value in enumerate(group.values):
            length = value / most * width
            place = y + number * bar
            parts.append(f'<rect class="c{number}" x="{left}" y="{place}" width="{length:.1f}" height="{bar - 2}"/>')
            parts.append(_text(left + length + 6, place + bar - 4, f"{value:.2f} {unit}", small=True))
    return Plot(title, left + width + 110, top + len(groups) * step, "\n".join(parts))


def line_plot(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log_x: bool = True,
    y_most: float | None = None,
) -> Plot:
    """Returns lines through points; x logarithmic (then above zero), unless `log_x` is false; y from zero to `y_most`, if it is given.

    Where there are few different x, these are the ticks.
    """
    _check_series(tuple(lines))
    left, width, height = 64, 520, 240
    legend, top = _legend(tuple(lines), 16, 46, left + width)
    top += 8
    xs = sorted({float(x) for points in lines.values() for x, _ in points})
    assert xs, "a plot without points"

    def scale(x: float) -> float:
        return math.log10(x) if log_x else x

    low, high = scale(xs[0]), scale(xs[-1])
    step = _nice((y_most or 1.1 * max(y for points in lines.values() for _, y in points) or 1.0) / 5)
    most = y_most or step * math.ceil(1.1 * max(y for points in lines.values() for _, y in points) / step or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (scale(x) - low) / ((high - low) or 1.0) * width, top + height - min(y, most) / most * height

    parts = [_text(16, 24, title), *legend]
    for tick in _x_ticks(xs, log_x):
        x, _ = place(tick, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + height}"/>')
        parts.append(_text(x, top + height + 18, f"{tick:,.10g}", anchor="middle", small=True))
    for number in range(int(most / step + 1e-9) + 1):
        y = place(xs[0], number * step)[1]
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, f"{number * step:,.10g}", anchor="end", small=True))
    parts.append(_text(left + width / 2, top + height + 38, x_label, anchor="middle", small=True))
    if y_label:
        parts.append(_text(left, top - 8, y_label, small=True))
    for color, points in enumerate(lines.values()):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline class="l{color}" points="{path}" fill="none" stroke-width="2"/>')
        if len(points) <= _MARKED:
            for point in points:
                parts.append('<circle class="c{}" cx="{:.1f}" cy="{:.1f}" r="3"/>'.format(color, *place(*point)))
    return Plot(title, left + width + 30, top + height + 52, "\n".join(parts))


def matrix_plot(
    title: str, unit: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]]
) -> Plot:
    """Returns a cell for each row and column, darker the larger its value, which is written in it; None leaves it empty.

    Where a row and a column have the same name, the cell is grey: it does not compare with the others.
    """
    left = 20 + max(7 * len(name) for name in rows)
    cell_width, cell_height, top = max(64, *(7 * len(name) + 10 for name in columns)), 30, 72
    compared = [
        value
        for name, row in zip(rows, values, strict=True)
        for other, value in zip(columns, row, strict=True)
        if value is not None and name != other
    ]
    most = max(compared, default=0.0) or 1.0
    parts = [_text(16, 24, f"{title}, {unit}"), _text(left, 44, "to", small=True), _text(16, 62, "from", small=True)]
    parts += [
        _text(left + (index + 0.5) * cell_width, top - 8, name, anchor="middle", small=True)
        for index, name in enumerate(columns)
    ]
    for index, row in enumerate(values):
        y = top + index * cell_height
        parts.append(_text(left - 8, y + cell_height / 2 + 4, rows[index], anchor="end"))
        for column, value in enumerate(row):
            x = left + column * cell_width
            if value is not None:
                # at most half of the colour, so that the number on it is readable
                kind = "g" if rows[index] == columns[column] else f'c0" fill-opacity="{0.5 * value / most:.2f}'
                parts.append(
                    f'<rect class="{kind}" x="{x}" y="{y}" width="{cell_width - 2}" height="{cell_height - 2}"/>'
                )
                parts.append(_text(x + cell_width / 2 - 1, y + cell_height / 2 + 4, f"{value:.2f}", anchor="middle"))
    width = max(left + len(columns) * cell_width + 16, 32 + 7 * len(title) + 8 * len(unit))
    return Plot(title, width, top + len(rows) * cell_height + 12, "\n".join(parts))


def _check_series(names: Sequence[str]) -> None:
    if not 1 <= len(names) <= SERIES:
        raise ValueError(f"{len(names)} series; a plot can tell 1 to {SERIES} apart")


def _x_ticks(xs: Sequence[float], log_x: bool) -> list[float]:
    if len(xs) <= 8:
        return list(xs)
    if log_x:
        low, high = math.log10(xs[0]), math.log10(xs[-1])
        return [10.0**tick for tick in range(math.ceil(low), math.floor(high) + 1)]
    step = _nice((xs[-1] - xs[0]) / 6)
    return [step * number for number in range(math.ceil(xs[0] / step), math.floor(xs[-1] / step) + 1)]


def _nice(value: float) -> float:
    """Returns the next 1, 2, 2.5 or 5 times a power of ten from `value` on."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= value * (1 - 1e-9))


def _legend(names: Sequence[str], x: float, y: float, width: float) -> tuple[list[str], float]:
    """Returns the legend's parts, and where the plot may begin below it."""
    parts, start = [], x
    for color, name in enumerate(names):
        length = 34 + 6.5 * len(name)
        if x > start and x + length > width:
            x, y = start, y + 18
        parts.append(f'<rect class="c{color}" x="{x:.1f}" y="{y - 10}" width="11" height="11"/>')
        parts.append(_text(x + 16, y, name, small=True))
        x += length
    return parts, y + 18


def _text(x: float, y: float, text: str, *, anchor: str = "start", small: bool = False) -> str:
    kind = ' class="s"' if small else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
