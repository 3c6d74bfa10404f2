"""The findings of checks, and the report: a table, or JSON with the fields of `DoctorReport`."""

from __future__ import annotations

import enum

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

# --- findings -----------------------------------------------------------------------------------------------


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could, or it may break later."""
    BROKEN = "broken"
    """Something that this machine or cluster needs does not work."""
    SKIPPED = "skipped"
    """Not checked, because it is not needed here or cannot be found out."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    check: str
    """`SUBJECT.NAME`, such as `memory.free`: the same from one version to the next."""
    verdict: Verdict
    found: str
    about: str = ""
    """The node, device, library or address that was checked; empty for the machine or the cluster as a
    whole."""
    why: str = ""
    """Why the finding matters; empty if all is well."""
    repair: str = ""
    """A command, a key of the file, or the next step; empty if there is nothing to do."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one run."""

    schema: int = 1
    """Rises when a field changes its meaning or is removed. It does not rise for new fields and checks."""
    version: str
    """The version of pd-cache."""
    host: str
    file: str | None
    broken: int
    """The number of findings with the verdict `broken`."""
    warnings: int
    findings: list[Finding]


def ok(check: str, found: str, about: str = "") -> Finding:
    return Finding(check=check, verdict=Verdict.OK, found=found, about=about)


def skipped(check: str, found: str, about: str = "", repair: str = "") -> Finding:
    return Finding(check=check, verdict=Verdict.SKIPPED, found=found, about=about, repair=repair)


def warning(check: str, found: str, about: str = "", *, why: str, repair: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARNING, found=found, about=about, why=why, repair=repair)


def broken(check: str, found: str, about: str = "", *, why: str, repair: str) -> Finding:
    return Finding(check=check, verdict=Verdict.BROKEN, found=found, about=about, why=why, repair=repair)


# --- the report ---------------------------------------------------------------------------------------------


_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.BROKEN: "bold red", Verdict.SKIPPED: "dim"}


def report_table(report: DoctorReport) -> Group:
    """Returns the findings in the order of the checks; each problem says why it matters and what to do."""
    table = Table()
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in report.findings:
        style = _STYLES[finding.verdict]
        table.add_row(finding.check, f"[{style}]{finding.verdict.value}[/]", _cell(finding))
    counts = {verdict: sum(finding.verdict is verdict for finding in report.findings) for verdict in Verdict}
    shown = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    summary = f"{'something is broken' if report.broken else 'nothing is broken'}: {shown}"
    return Group(table, Text(summary, "red" if report.broken else "green"))


def _cell(finding: Finding) -> str:
    about = f"[bold]{escape(finding.about)}[/]: " if finding.about else ""
    lines = [f"{about}{escape(finding.found)}"]
    if finding.why:
        lines.append(f"[dim]why:[/] {escape(finding.why)}")
    if finding.repair:
        lines.append(f"[dim]repair:[/] [cyan]{escape(finding.repair)}[/]")
    return "\n".join(lines)
