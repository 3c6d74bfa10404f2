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


class BarPlot(NamedTuple):
    """Horizontal bars, one a series in each group, with their values beside them."""

    title: str
    unit: str
    series: Sequence[str]
    groups: Mapping[str, Sequence[float]]

    def svg(self) -> str:
        """Returns the plot as an SVG document."""
        return _drawn(self.title, 1.2 + 0.4 * len(self.groups), self._draw)

    def _draw(self, axes: Axes) -> None:
        height = 0.8 / len(self.series)
        for index, name in enumerate(self.series):
            places = [number + index * height for number in range(len(self.groups))]
            bars = axes.barh(places, [values[index] for values in self.groups.values()], height, label=name)
            axes.bar_label(bars, fmt=f"%.2f {self.unit}", padding=3, fontsize="small")
        axes.set_yticks([number + 0.4 - height / 2 for number in range(len(self.groups))], list(self.groups))
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.legend()


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


class MatrixPlot(NamedTuple):
    """A cell for each pair of names, darker the larger its value, which is written in it; None leaves it empty.

    Cells of a name with itself do not compare with the others, and have no colour.
    """

    title: str
    names: Sequence[str]
    values: Sequence[Sequence[float | None]]
    """Rows: from; columns: to."""

    def svg(self) -> str:
        """Returns the plot as an SVG document."""
        return _drawn(self.title, 1.2 + 0.5 * len(self.names), self._draw)

    def _draw(self, axes: Axes) -> None:
        count = len(self.names)
        colours = [[float("nan") if row == column or (value := self.values[row][column]) is None else value for column in range(count)] for row in range(count)]  # fmt: skip
        most = max((value for row in colours for value in row if value == value), default=1.0)
        axes.imshow(colours, cmap="Blues", vmin=0, vmax=2 * most, aspect="auto")  # the numbers on them stay readable
        for row in range(count):
            for column in range(count):
                if (value := self.values[row][column]) is not None:
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center")
        axes.set_xticks(range(count), list(self.names))
        axes.set_yticks(range(count), list(self.names))
        axes.set_xlabel("to")
        axes.set_ylabel("from")


Plot = BarPlot | LinePlot | MatrixPlot


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
