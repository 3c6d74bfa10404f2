"""What a check finds. The JSON of `pd-cache doctor --json` is `DoctorReport`, field by field."""

from __future__ import annotations

import enum

import msgspec


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    """It works, but worse than it could, or it may break later."""
    BROKEN = "broken"
    """Something that this machine or cluster needs does not work."""
    SKIPPED = "skipped"
    """Not checked, because it is not needed here or cannot be found out."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    check: str
    """`SUBJECT.NAME`, such as `memory.memlock`: the same from one version to the next."""
    verdict: Verdict
    found: str
    about: str = ""
    """The node, device, library or address that it is about; empty for the machine or the cluster as a whole."""
    why: str = ""
    """Why it matters; empty where all is well."""
    repair: str = ""
    """A command, or a key of the file, or where to go on; empty where there is nothing to do."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one run."""

    schema: int = 1
    """Rises when a field changes its meaning or goes; new fields and checks may come without."""
    version: str
    """The version of pd-cache."""
    host: str
    file: str | None
    broken: int
    """Findings whose verdict is `broken`."""
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
