"""Plots as self-contained SVG: bars in pairs, and lines over a logarithmic axis. Enough for the docs, and nothing to install."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

_COLORS = ("#2563eb", "#94a3b8", "#d97706", "#059669")
_STYLE = "text{font:13px sans-serif;fill:#1e293b}.s{font-size:11px;fill:#475569}line{stroke:#cbd5e1}"


class Bars(NamedTuple):
    """One group of a bar plot."""

    label: str
    values: tuple[float, ...]


def bar_plot(title: str, unit: str, series: Sequence[str], groups: Sequence[Bars]) -> str:
    """Horizontal bars, one a series in each group, with their values written beside them."""
    left, width, bar, gap = 210, 430, 15, 14
    top = 62
    most = max(value for group in groups for value in group.values)
    step = len(series) * bar + gap
    parts = [_text(16, 24, title), *_legend(series, 16, 44)]
    for index, group in enumerate(groups):
        y = top + index * step
        parts.append(_text(left - 8, y + len(series) * bar / 2 + 4, group.label, anchor="end"))
        for number, value in enumerate(group.values):
            length = value / most * width
            place = y + number * bar
            parts.append(
                f'<rect x="{left}" y="{place}" width="{length:.1f}" height="{bar - 2}" fill="{_COLORS[number]}"/>'
            )
            parts.append(_text(left + length + 6, place + bar - 4, f"{value:.2f} {unit}", small=True))
    return _page(left + width + 110, top + len(groups) * step, parts)


def line_plot(title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Lines through points, x logarithmic, y from zero."""
    left, top, width, height = 64, 70, 520, 240
    xs = [x for points in lines.values() for x, _ in points]
    low, high = math.log10(min(xs)), math.log10(max(xs))
    most = 1.25 * max(y for points in lines.values() for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / ((high - low) or 1.0)
        return left + across * width, top + height - y / most * height

    parts = [_text(16, 24, title), *_legend(tuple(lines), 16, 46)]
    for tick in range(math.ceil(low), math.floor(high) + 1):
        x, _ = place(10.0**tick, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + height}"/>')
        parts.append(_text(x, top + height + 18, f"{10**tick:,}", anchor="middle", small=True))
    for part in range(5):
        value = most * part / 4
        y = place(10**low, value)[1]
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, f"{value:.2f}", anchor="end", small=True))
    parts.append(_text(left + width / 2, top + height + 38, x_label, anchor="middle", small=True))
    parts.append(_text(left, top - 8, y_label, small=True))
    for color, points in zip(_COLORS, lines.values(), strict=False):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for point in points:
            parts.append('<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'.format(*place(*point), color))
    return _page(left + width + 30, top + height + 52, parts)


def _legend(names: Sequence[str], x: float, y: float) -> list[str]:
    parts = []
    for color, name in zip(_COLORS, names, strict=False):
        parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{color}"/>')
        parts.append(_text(x + 16, y, name, small=True))
        x += 34 + 7 * len(name)
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", small: bool = False) -> str:
    kind = ' class="s"' if small else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _page(width: float, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n<style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
