"""Times functions in turn, and computes quantiles."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bench.lib.report import tracked

Steps = dict[str, Callable[[], object]]
"""The steps, by name. All are timed but those whose names begin with `_`, which only prepare others."""


def quantile(values: Sequence[float], part: float) -> float:
    """Returns the smallest value that at least `part` (0 to 1) of the values do not exceed; nan without
    values."""
    # a little less than the product, because 0.07 * 100 is 7.000000000000001
    return float(np.quantile(values, part * (1 - 1e-12), method="inverted_cdf")) if len(values) else math.nan


def timed(function: Callable[[], object]) -> float:
    """Returns the seconds that the call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turn(rounds: int, steps: Steps) -> dict[str, list[float]]:
    """Runs the steps in turn, `rounds` times, after a round that does not count. Returns the seconds of each
    timed step."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in tracked(range(rounds + 1), "rounds"):
        for name, step in steps.items():
            seconds[name].append(timed(step))
    return {name: values[1:] for name, values in seconds.items() if not name.startswith("_")}


def gbps(nbytes: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns `NAME_gbps` for each step, from the median of its seconds. A GB is 10^9 bytes."""
    return {f"{name}_gbps": nbytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
