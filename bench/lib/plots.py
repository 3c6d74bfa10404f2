"""Plots of benches, as SVG. They hold what is to be drawn; Matplotlib, of the extra `bench`, is imported only when one is."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKED = 40
"""Lines of up to so many points show each of them."""
_TICKS = 10
"""So many different x, or fewer, are the ticks."""


class LinePlot(NamedTuple):
    """Lines through points."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = True
    """x above zero, on a logarithmic scale."""
    y_most: float | None = None
    """Where the plot ends at the top; by default above the largest y."""

    def svg(self) -> str:
        """Returns the plot as an SVG document."""
        return _drawn(self.title, 4.0, self._draw)

    def _draw(self, axes: Axes) -> None:
        for name, points in self.lines.items():
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, label=name, marker="o" if len(points) <= _MARKED else "", markersize=4)
        if self.log_x:
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.xaxis.set_major_formatter("{x:,.10g}")
            if len(xs := sorted({x for points in self.lines.values() for x, _ in points})) <= _TICKS:
                axes.set_xticks(xs)
        axes.set_ylim(0, self.y_most)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        axes.grid(alpha=0.3)
        axes.legend()


def _drawn(title: str, inches: float, draw: Callable[[Axes], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    # text stays text, and the same figures give the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pd-cache", "text.parse_math": False}):
        figure = Figure(figsize=(7.5, inches), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
