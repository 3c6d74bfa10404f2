"""What every bench prints: its figures, and beside them the targets and whether they were met."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


class Check(NamedTuple):
    """A target: `value` must be at least, or at most, `limit`."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def ok(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def progress() -> Progress:
    """A progress bar on stderr where a person watches, nothing elsewhere."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def finish(results: Mapping[str, Any], checks: Iterable[Check], *, as_json: bool, strict: bool) -> None:
    """Print the report; with `strict`, exit with 1 if a check failed."""
    listed = list(checks)
    ok = all(check.ok for check in listed)
    if as_json:
        rows = [{"name": c.name, "value": round(c.value, 4), "limit": round(c.limit, 4), "ok": c.ok} for c in listed]
        click.echo(json.dumps({**results, "checks": rows, "ok": ok}))
    else:
        _tables(results, listed)
    if strict and not ok:
        sys.exit(1)


def _tables(results: Mapping[str, Any], checks: list[Check]) -> None:
    console = Console()
    rows = results.get("results")
    if isinstance(rows, list):
        table = Table(*(str(key) for key in rows[0]))
        for row in rows:
            table.add_row(*(_shown(value) for value in row.values()))
    else:
        table = Table("figure", "value")
        for name, value in results.items():
            table.add_row(name, _shown(value))
    console.print(table)
    targets = Table("target", "value", "limit", "")
    for check in checks:
        relation = "≥" if check.at_least else "≤"
        verdict = "[green]met[/]" if check.ok else "[red]missed[/]"
        targets.add_row(check.name, _shown(check.value), f"{relation} {_shown(check.limit)}", verdict)
    console.print(targets)


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
