"""Decides which answers were late. Pure.

An answer has its deadline plus a fixed allowance. Time that the machine or the run itself took from the caller does not count: the time
for which its process was stopped on purpose, the time for which its thread waited in the kernel's run queue, and the time for which this
program's own ticker was late, which shows that the whole machine stood still.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALLOWANCE_S = 2.0
"""Seconds allowed to every answer for scheduling on a busy machine."""
TICK_S = 0.02
_LATE_TICK_S = 0.1
"""A tick that is later than this shows that the machine stood still."""


class Span(NamedTuple):
    """A time from `begin` to `end`, in seconds since 1970."""

    begin: float
    end: float

    def overlap(self, other: Span) -> float:
        """Returns how many seconds both have in common."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


class Ticker:
    """Notes how late the ticks of a program are that wants one every `TICK_S`."""

    def __init__(self) -> None:
        self.late: list[Span] = []
        self.latest = 0.0
        self._last: float | None = None

    def tick(self, now: float) -> None:
        """To be called as often as the program can."""
        if self._last is not None:
            behind = now - self._last - TICK_S
            self.latest = max(self.latest, behind)
            if behind > _LATE_TICK_S:
                self.late.append(Span(self._last, now))
        self._last = now

    @property
    def total(self) -> float:
        return sum(span.end - span.begin for span in self.late)


def seconds_late(
    answer: Span, bound: float, *, starved: float = 0.0, stops: Sequence[Span] = (), ticks: Iterable[Span] = ()
) -> float:
    """Returns by how much an answer missed its deadline, `bound` seconds after the request; 0 if it did not.

    `starved`: seconds for which the kernel let the caller wait for a processor. `stops`: when its process was stopped.
    """
    took = answer.end - answer.begin
    excused = starved + sum(answer.overlap(span) for span in (*stops, *ticks))
    late = took - bound - ALLOWANCE_S - excused
    return max(0.0, late)
