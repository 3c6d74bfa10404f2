"""Latencies of many clients in one: counts in bins that are one percent wide, so that they add up and say every quantile."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

_SHORTEST_S = 1e-7
_WIDTH = math.log(1.01)


class Latencies(msgspec.Struct):
    """Seconds, from 0.1 µs on; what is shorter counts as that."""

    bins: dict[int, int] = {}
    """How many lay in each bin."""

    def add(self, seconds: float) -> None:
        number = int(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) / _WIDTH)
        self.bins[number] = self.bins.get(number, 0) + 1

    @property
    def count(self) -> int:
        return sum(self.bins.values())

    def quantile(self, part: float) -> float:
        """Seconds below which `part`, from 0 to 1, of all lie, right to one percent. ValueError without any."""
        if not self.bins:
            raise ValueError("no latencies")
        left = part * self.count
        for number in sorted(self.bins):
            left -= self.bins[number]
            if left <= 0:
                break
        return _SHORTEST_S * math.exp((number + 0.5) * _WIDTH)

    @classmethod
    def of(cls, parts: Iterable[Latencies]) -> Latencies:
        """All of them together."""
        total: dict[int, int] = {}
        for part in parts:
            for number, count in part.bins.items():
                total[number] = total.get(number, 0) + count
        return cls(total)
