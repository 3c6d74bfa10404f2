"""Clocks: whether this machine's is kept in step, and how far the nodes' are from it.

Nothing in pd-cache compares the clocks of two machines: leases and deadlines are counted by whoever grants them. What suffers is
reading logs and metrics of several machines side by side, and certificates, which a clock that is far off holds for expired.
"""

from __future__ import annotations

import ctypes
import email.utils
import http.client
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from launch.doctor.finding import Finding, ok, skipped, warning

_TIME_ERROR = 5
"""adjtimex's answer where nothing keeps the kernel's clock in step."""
_TIMEX_BYTES = 256
"""More than a `struct timex` has on any platform."""
_NOTICEABLE_S = 2.0
"""The header that tells a node's time has whole seconds."""
_TIMEOUT_S = 2.0
_AT_A_TIME = 16
_WHY = "logs and metrics of several machines cannot be read side by side, and certificates may count as expired; leases do not suffer"
_REPAIR = "chronyc tracking   # or timedatectl set-ntp true"


def clock_finding(answer: int | None = None) -> Finding:
    """Whether the kernel's clock is kept in step. `answer`: of adjtimex, asked if None."""
    check = "clock.synchronized"
    told = _adjtimex() if answer is None else answer
    if told is None or told < 0:
        return skipped(check, "the kernel does not tell")
    if told == _TIME_ERROR:
        return warning(check, "nothing keeps this machine's clock in step", why=_WHY, repair=_REPAIR)
    return ok(check, "the kernel's clock is kept in step")


def skew_findings(nodes: Mapping[str, str]) -> Iterator[Finding]:
    """Compare with the clocks of `nodes`, URLs by name that answer HTTP; whoever does not answer is left out."""
    with ThreadPoolExecutor(_AT_A_TIME, "pd-cache-doctor") as threads:
        for name, offset in zip(nodes, threads.map(offset_of, nodes.values()), strict=True):
            if offset is not None:
                yield skew_finding(name, offset)


def skew_finding(name: str, offset: float) -> Finding:
    """Judge a clock that is `offset` seconds ahead of ours."""
    check = "clock.skew"
    if abs(offset) <= _NOTICEABLE_S:
        return ok(check, f"within {_NOTICEABLE_S:g} s of ours", name)
    found = f"{abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} ours"
    return warning(check, found, name, why=_WHY, repair=f"on both machines: {_REPAIR}")


def offset_of(url: str) -> float | None:
    """Seconds that the clock of whoever answers is ahead, by the Date of the answer; None where it does not tell."""
    try:
        parts = urllib.parse.urlsplit(url)
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            # nothing is sent, and nothing but a clock is read
            anybody = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=_TIMEOUT_S, context=anybody
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        try:
            before = time.time()
            connection.request("GET", "/health")
            header = connection.getresponse().getheader("Date")
            after = time.time()
        finally:
            connection.close()
        return offset(header, before, after)
    except (OSError, http.client.HTTPException, ValueError):
        return None


def offset(header: str | None, before: float, after: float) -> float | None:
    """By how much a Date lies outside of `before` and `after`, between which it was made; it was cut to whole seconds."""
    if header is None:
        return None
    told = email.utils.parsedate_to_datetime(header).timestamp()
    if told > after:
        return told - after
    return min(0.0, told + 1 - before)


def _adjtimex() -> int | None:
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    return int(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))  # all zeros: it only reads
