"""The report as a table for people, and as JSON for scripts."""

from __future__ import annotations

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launch.doctor.finding import DoctorReport, Finding, Verdict

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.BROKEN: "bold red", Verdict.SKIPPED: "dim"}


def as_json(report: DoctorReport) -> str:
    """Returns one JSON object: `DoctorReport`, field by field."""
    return msgspec.json.encode(report).decode()


def report_table(report: DoctorReport) -> Group:
    """Returns the findings in the order of the checks; each problem says why it matters and what to do."""
    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in report.findings:
        style = _STYLES[finding.verdict]
        table.add_row(finding.check, f"[{style}]{finding.verdict.value}[/]", _told(finding))
    return Group(table, Text(summary(report), "red" if report.broken else "green"))


def summary(report: DoctorReport) -> str:
    """Returns one line."""
    counts = {verdict: sum(one.verdict is verdict for one in report.findings) for verdict in Verdict}
    shown = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    return f"{'something is broken' if report.broken else 'nothing is broken'}: {shown}"


def _told(finding: Finding) -> str:
    about = f"[bold]{escape(finding.about)}[/]: " if finding.about else ""
    lines = [f"{about}{escape(finding.found)}"]
    if finding.why:
        lines.append(f"[dim]why:[/] {escape(finding.why)}")
    if finding.repair:
        lines.append(f"[dim]repair:[/] [cyan]{escape(finding.repair)}[/]")
    return "\n".join(lines)
