"""A bench's report: its figures, its targets and whether they were met, and how it was measured.

The report is tables for people, or one JSON object for scripts.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import pd_cache
from transfer.settings import mooncake_version

_WIDTH = 160
"""Columns, if the output is not a terminal."""
T = TypeVar("T")
option = functools.partial(click.option, show_default=True)
file_type = click.Path(path_type=Path, exists=True, dir_okay=False)
"""The type of an option that names a file."""


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


def all_at_least(figures: Mapping[str, float], **limits: float) -> list[Check]:
    """Returns targets for figures by their names."""
    return [at_least(name, figures[name], limit) for name, limit in limits.items()]


def all_at_most(figures: Mapping[str, float], **limits: float) -> list[Check]:
    """Returns targets for figures by their names."""
    return [at_most(name, figures[name], limit) for name, limit in limits.items()]


Rows = list[dict[str, Any]]
"""A table: each row maps columns to values."""
Report = tuple[dict[str, Any], list[Check]]
"""A bench's figures and targets."""


# --- how it was measured ------------------------------------------------------------------------------------

_LOAD = " ".join(f"{value:.1f}" for value in os.getloadavg())
"""The machine's load before the bench, which itself adds load."""


def about() -> dict[str, str]:
    """Returns what a reader needs to compare the figures with others: the command, when and where it ran, and
    versions. The load is from before the bench."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        "machine": f"{socket.gethostname()}: {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, load {_LOAD}",
        "versions": f"pd-cache {pd_cache.__version__}, Mooncake {mooncake_version()}, Python {platform.python_version()}",
    }


# --- a bench's end ------------------------------------------------------------------------------------------


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a click command `--json` and `--check`: the arguments `as_json` and `strict` of `finish`."""
    command = click.option("--check", "strict", is_flag=True, help="Exit with 1 if a target is missed.")(
        command
    )
    return click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")(command)


def tracked(items: Sequence[T], what: str) -> Iterator[T]:
    """Yields the items. Meanwhile a progress bar is on stderr, if that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield from bar.track(items, description=what)


def finish(results: Mapping[str, Any], checks: Iterable[Check], *, as_json: bool, strict: bool) -> None:
    """Prints the report of the click command that runs; with `strict`, exits with 1 if a check failed.

    `results` are all figures. In the tables for people, each list of rows is a table; the other figures share
    one.
    """
    facts, listed = about(), list(checks)
    ok = all(check.ok for check in listed)
    if as_json:
        rows = [
            {"name": c.name, "value": round(c.value, 4), "limit": round(c.limit, 4), "ok": c.ok}
            for c in listed
        ]
        click.echo(json.dumps({"about": facts, **results, "checks": rows, "ok": ok}))
    else:
        tables = {name: value for name, value in results.items() if isinstance(value, list)}
        tables["figures"] = [
            {"figure": name, "value": value} for name, value in results.items() if name not in tables
        ]
        tables["targets"] = [
            {
                "target": check.name,
                "value": check.value,
                "limit": f"{'≥' if check.from_below else '≤'} {shown(check.limit)}",
                "": "met" if check.ok else "missed",
            }
            for check in listed
        ]
        tables["how it was measured"] = [{"": name, "value": fact} for name, fact in facts.items()]
        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        for title, rows in tables.items():
            if rows:
                columns, cells = laid_out(rows)
                table = Table(title=Text(title), box=SIMPLE)
                for column in columns:
                    table.add_column(Text(column), overflow="fold")
                for row in cells:
                    table.add_row(*(Text(shown(value)) for value in row))
                console.print(table)
    if strict and not ok:
        sys.exit(1)


def laid_out(rows: Sequence[Mapping[str, object]]) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    """Returns the columns and the cells of `rows`. A row maps columns to values. If there are few rows with
    many columns, each row becomes a column of the table, and the names of its values are the first column."""
    names = list(rows[0])
    if len(names) <= 4 * len(rows):
        return names, [list(row.values()) for row in rows]
    first, *others = names
    heads = [f"{first} {shown(row[first])}" for row in rows]
    return ["", *heads], [[name, *(row[name] for row in rows)] for name in others]


def shown(value: object) -> str:
    """Returns a cell's text. A float has three digits after the point, or none from 1000 on. A dict becomes
    `a: 1, b: 2`."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
