"""Clocks: whether this machine's is kept in step, and how far the nodes' are from it.

Nothing in pd-cache compares the clocks of two machines: each lease or deadline is timed by the process that grants it. What suffers is
reading logs and metrics of several machines side by side, and certificates, which look expired to a clock that is far off.
"""

from __future__ import annotations

import ctypes
import email.utils
import ssl
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from launch.access import Access
from launch.asking import ask
from launch.doctor.finding import Finding, ok, skipped, warning

_TIME_ERROR = 5
"""adjtimex's answer if nothing keeps the kernel's clock in step."""
_TIMEX_BYTES = 256
"""Bytes; more than a `struct timex` has on any platform."""
_NOTICEABLE_S = 2.0
"""The header with a node's time has whole seconds."""
_TIMEOUT_S = 2.0
_AT_A_TIME = 16
_WHY = "logs and metrics of several machines cannot be read side by side, and certificates may count as expired; leases do not suffer"
_REPAIR = "chronyc tracking   # or timedatectl set-ntp true"


def clock_finding(answer: int | None = None) -> Finding:
    """Returns whether the kernel's clock is kept in step. `answer`: of adjtimex, which is called if this is None."""
    check = "clock.synchronized"
    told = _adjtimex() if answer is None else answer
    if told is None or told < 0:
        return skipped(check, "the kernel does not tell")
    if told == _TIME_ERROR:
        return warning(check, "nothing keeps this machine's clock in step", why=_WHY, repair=_REPAIR)
    return ok(check, "the kernel's clock is kept in step")


def skew_findings(nodes: Mapping[str, str]) -> Iterator[Finding]:
    """Compares with the clocks of `nodes`, a mapping from name to URL. Nodes that do not answer are left out."""
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
    """Returns how many seconds the answering machine's clock is ahead, by the Date of the answer; None if there is none."""
    try:
        before = time.time()
        # whatever its certificate: nothing is sent, and nothing but a clock is read
        answer = ask(f"{url}/health", _TIMEOUT_S, Access(context=ssl._create_unverified_context()))
        return offset(answer.headers["Date"], before, time.time())
    except (OSError, ValueError):
        return None


def offset(header: str | None, before: float, after: float) -> float | None:
    """Returns by how much a Date, cut to whole seconds, lies outside `before` and `after`, between which it was made."""
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
    return int(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))  # all zeros: this only reads
