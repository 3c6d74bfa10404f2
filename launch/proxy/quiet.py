"""Limits how many similar lines are logged. Pure: the time comes from the caller."""

from __future__ import annotations

from collections.abc import Hashable

_MOST_KINDS = 1024


class Quiet:
    """Passes a few lines of each kind per period, and counts the rest."""

    def __init__(self, lines: int = 10, seconds: float = 10.0) -> None:
        """Passes at most `lines` of each kind in `seconds`."""
        self._lines = lines
        self._seconds = seconds
        self._kinds: dict[Hashable, tuple[float, int, int]] = {}
        """For each kind, when its present period began, the lines since then, and how many of those were left out."""

    def says(self, kind: Hashable, now: float) -> int | None:
        """Returns how many lines of the kind were left out since the last one that passed, or None if this one is left out, too."""
        began, said, left_out = self._kinds.get(kind, (now, 0, 0))
        if now - began >= self._seconds:
            began, said = now, 0
        if said >= self._lines:
            self._kinds[kind] = (began, said, left_out + 1)
            return None
        if kind not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (began, said + 1, 0)
        return left_out
