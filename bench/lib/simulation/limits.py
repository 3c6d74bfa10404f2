"""What are limits worth? Requests a second within limits at 0.8 to 3 times what a cluster can do, with
`proxy.limits` and without, in simulation.

The nodes, the limits and the load are those of `roles.py`, with the split that keeps the limits at the
highest rate: what the cluster can do. One proxy knows all requests. Each of four knows of the others' only
what nodes report, so the targets are for one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bench.lib.report import Check, at_least, at_most
from bench.lib.simulation.costs import UnitCosts
from bench.lib.simulation.roles import FIRST_S, NO_LIMITS, TOKEN_S, best_split, of_trace, run
from bench.lib.trace import Request
from pd_cache.cluster import LimitsConfig

_LOADS, _PROXIES = (0.8, 1.0, 1.5, 2.0, 3.0), (1, 4)


def compare_limits(trace: Sequence[Request], costs: UnitCosts) -> tuple[list[dict[str, Any]], list[Check]]:
    """Returns a row for each load and number of proxies, with requests a second within the limits and the
    median error of predictions, and the targets."""
    load = of_trace(trace, 1.5)
    rate, split, _ = best_split(load, costs)
    limits = LimitsConfig(ttft_s=FIRST_S, token_s=TOKEN_S)
    rows: list[dict[str, Any]] = []
    for proxies, times in itertools.product(_PROXIES, _LOADS):
        without, kept = (run(load, rate * times, split, costs, each, proxies) for each in (NO_LIMITS, limits))
        row = {"proxies": proxies, "load": times, "rate": rate * times, "prefill": split}
        row |= {"without": fmean(without.per_s), "limits": fmean(kept.per_s), "error": kept.error}
        rows.append(row)
    known = rows[: len(_LOADS)]
    peak = max(row["limits"] for row in known)
    checks = [at_least("of the peak, at three times the load", known[-1]["limits"] / peak, 0.95)]
    checks += [at_most(f"median error at {row['load']:g} times", row["error"], 0.2) for row in known]
    return rows, checks
