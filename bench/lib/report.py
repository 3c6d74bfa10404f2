"""What every bench reports: its figures, and beside them the targets and whether they were met.

The report is tables for people, one JSON object for scripts, and, if a bench has a `Report`, a page with plots.
"""

from __future__ import annotations

import functools
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable
from rich.text import Text

from transfer.settings import ByteSize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 160
"""Columns of a page, and of what is not a terminal."""
_TICKS = 10
"""So many different x, or fewer, are the ticks."""
_NAME = re.compile(r"\b[a-z]+\d*(_[a-z0-9]+)+\b")
"""A figure as JSON names it."""
_WORDS = {
    "_per_s": " a second", "_gbps": ", GB/s", "_s": ", s", "_ms": ", ms", "_us": ", µs", "_bytes": ", bytes",
    "_p50": ", median", "_p90": ", 90 % within", "_p99": ", 99 % within", "ttft": "first token", "tpot": "time a token",
}  # fmt: skip
_WORD = re.compile("|".join(f"{part}(?![a-z0-9])" for part in _WORDS))
option = functools.partial(click.option, show_default=True)


def size(context: click.Context, parameter: click.Parameter, value: str) -> ByteSize:
    """Returns a click callback for sizes such as 4GiB."""
    try:
        return ByteSize.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


class Check(NamedTuple):
    """A target: `value` must be at least, or at most, `limit`."""

    name: str
    value: float
    limit: float
    from_below: bool

    @property
    def ok(self) -> bool:
        return self.value >= self.limit if self.from_below else self.value <= self.limit


def at_least(name: str, value: float, limit: float) -> Check:
    """Returns a target that is a lower limit."""
    return Check(name, value, limit, from_below=True)


def at_most(name: str, value: float, limit: float) -> Check:
    """Returns a target that is an upper limit."""
    return Check(name, value, limit, from_below=False)


class Table(NamedTuple):
    """Rows under columns; None is an empty cell."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""
    """What a reader has to know about it, in a sentence or two."""

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, object]], note: str = "") -> Table:
        """Returns a table of rows that have their columns' names."""
        return cls(title, list(rows[0]), [list(row.values()) for row in rows], note)


class LinePlot(NamedTuple):
    """Lines through points, on the page; not shown in terminals. x is above zero, on a logarithmic scale."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    caption: str = ""
    y_most: float | None = None
    """Where the plot ends at the top; by default above the largest y."""

    def svg(self) -> str:
        """Returns the plot as an SVG document. Needs Matplotlib, of the extra `bench`."""
        import matplotlib
        from matplotlib.figure import Figure

        # text stays text, and the same figures give the same file
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pd-cache", "text.parse_math": False}):
            figure = Figure(figsize=(7.5, 4.0), layout="constrained")
            self._draw(figure.subplots())
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
        text = file.getvalue()
        return text[text.index("<svg") :]

    def _draw(self, axes: Axes) -> None:
        for name, points in self.lines.items():
            axes.plot(*zip(*points, strict=True), label=name, marker=".")
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:,.10g}")
        if len(xs := sorted({x for points in self.lines.values() for x, _ in points})) <= _TICKS:
            axes.set_xticks(xs)
        axes.set_ylim(0, self.y_most)
        axes.set(title=self.title, xlabel=self.x_label, ylabel=self.y_label)
        axes.grid(alpha=0.3)
        axes.legend()


class Report(NamedTuple):
    """The contents of a bench's report, in order."""

    title: str
    summary: str
    """What was measured, in a sentence or two."""
    parts: Sequence[Table | LinePlot]
    about: Mapping[str, str]
    """How it was measured: the command, versions, machines, settings (`bench/lib/about.py`)."""


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a click command `--json` and `--check`: the arguments `as_json` and `strict` of `finish`."""
    command = click.option("--check", "strict", is_flag=True, help="Exit with 1 if a target is missed.")(command)
    return click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")(command)


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Does the same as `output_options`, and adds `--html`: the argument `html` of `finish`."""
    return output_options(click.option("--html", type=click.Path(path_type=Path, dir_okay=False), callback=_in_a_folder, help="Also write a page with plots to this file; it needs nothing else.")(command))  # fmt: skip


def _in_a_folder(context: click.Context, option: click.Parameter, file: Path | None) -> Path | None:
    """Found out before anything is measured."""
    if file is not None and not file.absolute().parent.is_dir():
        raise click.BadParameter(f"{file.absolute().parent} is no folder", context, option)
    return file


def progress() -> Progress:
    """Returns a progress bar on stderr where a person watches, nothing elsewhere."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def finish(
    results: Mapping[str, Any],
    checks: Iterable[Check],
    *,
    as_json: bool,
    strict: bool,
    report: Report | None = None,
    html: Path | None = None,
) -> None:
    """Prints the report; with `strict`, exits with 1 if a check failed.

    `results` are all figures, for JSON. `report`: how to show them to people; without one, they are shown as a table. `html`: write it as
    a page, too, which needs a `report`.
    """
    listed = list(checks)
    ok = all(check.ok for check in listed)
    rows = [{"name": c.name, "value": round(c.value, 4), "limit": round(c.limit, 4), "ok": c.ok} for c in listed]
    everything = {**results, "checks": rows, "ok": ok}
    tables = [_plain(results)] if report is None else [part for part in report.parts if isinstance(part, Table)]
    tables = [_in_words(table) for table in tables]
    targets = [Table("Targets", ("target", "value", "limit", ""), [_judged(check) for check in listed])][: len(listed)]
    if html is not None:
        assert report is not None, "a page needs a report"
        html.write_text(_page(report, [*targets, *tables], everything), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(everything))
    else:
        _draw(Console(width=None if sys.stdout.isatty() else _WIDTH), [*tables, *targets])
        if html is not None:
            click.echo(f"written: {html}")
    if strict and not ok:
        sys.exit(1)


def _plain(results: Mapping[str, Any]) -> Table:
    rows = results.get("results")
    if isinstance(rows, list):
        return Table.of("", rows)
    return Table("", ("", "value"), list(results.items()))


def _judged(check: Check) -> Sequence[object]:
    limit = f"{'≥' if check.from_below else '≤'} {shown(check.limit)}"
    return (in_words(check.name), check.value, limit, Text("met", "green") if check.ok else Text("missed", "red"))


def _draw(console: Console, tables: Iterable[Table]) -> None:
    for table in tables:
        drawn = RichTable(title=Text(table.title), caption=Text(table.note), box=SIMPLE)
        for name in table.columns:
            drawn.add_column(Text(name), overflow="fold")
        for row in table.rows:
            drawn.add_row(*(value if isinstance(value, Text) else Text(shown(value)) for value in row))
        console.print(drawn)


def in_words(text: str) -> str:
    """Returns a text in which the names of figures are words: `lookup_p50_ms` becomes `lookup, median, ms`."""
    return _NAME.sub(lambda found: _WORD.sub(lambda one: _WORDS[one[0]], found[0]).replace("_", " "), text)


def shown(value: object) -> str:
    """Returns a cell's text: floats with three digits behind the point, or none from 1000 on; `a: 1, b: 2` for a dict."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _in_words(table: Table) -> Table:
    """Names columns, and rows if their column has no name, in words."""
    rows = table.rows if table.columns[0] else [[in_words(str(row[0])), *row[1:]] for row in table.rows]
    return table._replace(columns=[in_words(name) for name in table.columns], rows=rows)


_STYLE = """:root{color-scheme:light dark}body{margin:1rem 2%;font-family:sans-serif}
div{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem}figure{margin:1rem 0;background:#fff;color:#222}svg{width:100%;height:auto}pre,section{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #8886;font-variant-numeric:tabular-nums}.n{text-align:right}
.met{color:light-dark(#047857,#34d399)}.missed{background:#b91c1c;color:#fff;font-weight:600}"""


def _html(table: Table) -> str:
    def cell(value: object) -> str:
        text = value.plain if isinstance(value, Text) else shown(value)
        kind = text if isinstance(value, Text) else "n" if isinstance(value, int | float) else ""
        return f'<td class="{kind}">{escape(text)}</td>'

    sides = ["n" if isinstance(value, int | float) else "" for value in (*table.rows, table.columns)[0]]
    head = "".join(f'<th class="{side}">{escape(name)}</th>' for side, name in zip(sides, table.columns, strict=True))
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows)
    title = f"<h2>{escape(table.title)}</h2><p>{escape(table.note)}</p>"
    return f"<section>{title}<table><tr>{head}</tr>{body}</table></section>"


def _page(report: Report, tables: Sequence[Table], results: Mapping[str, Any]) -> str:
    """Returns one HTML document that loads nothing: tables, plots, and all figures as JSON."""
    plots = [part for part in report.parts if isinstance(part, LinePlot)]
    parts = [
        f"<h1>{escape(report.title)}</h1><p>{escape(report.summary)}</p>",
        *map(_html, tables),
        "<div>",
        *(f"<figure>{plot.svg()}<figcaption>{escape(plot.caption)}</figcaption></figure>" for plot in plots),
        "</div>",
        _html(Table("How it was measured", ("", ""), list(report.about.items()))),
        f"<details><summary>All figures, as JSON</summary><pre>{escape(json.dumps(results, indent=1))}</pre></details>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(report.title)}</title>\n'
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">\n"""
        f"<style>{_STYLE}</style>\n" + "\n".join(parts) + "</html>\n"
    )
