"""What do roles that follow the load bring? Compares every split of six nodes with `proxy.roles: {auto:
true}` at four proxies, in simulation.

The figure is requests a second within limits: the first token comes within 30 s, the others within 0.1 s on
average. A load comes at the highest rate at which any split keeps 95 % of the requests within these limits.
The loads are two traces, and a *day* with long prompts in the two hours before noon and long answers in the
two hours after it. An hour lasts 300 s. The minute before the first hour is not counted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

from bench.lib.report import Check, Rows, at_least, at_most
from bench.lib.simulation.cluster import ClusterPlan, SimulatedCluster
from bench.lib.simulation.costs import DecodeCosts, EngineShape, PrefillCosts, ServiceCosts, UnitCosts
from bench.lib.simulation.workload import Arrival, CopiedTrace, Part
from bench.lib.stats import quantile
from bench.lib.trace import Request
from pd_cache.cluster import LimitsConfig, ProxyConfig

LARGE = UnitCosts(
    engine=EngineShape(max_running=64),
    prefill=PrefillCosts(step_s=0.01, token_s=2.5e-4),
    decode=DecodeCosts(step_s=0.025, sequence_s=1e-4),
    proxy=ServiceCosts(request_s=2e-3, token_s=7e-7, event_s=2.5e-4, hop_s=1.5e-3, node_s=8e-7),
)
"""The costs of a model that is a few times slower than the default, and of proxies on slow cores."""
_NODES, _PROXIES = 6, 4
FIRST_S, TOKEN_S, _KEPT = 30.0, 0.1, 0.95
_NIGHT_S, _HOUR_S = 60.0, 300.0
_WARM, _DEPTH = 1000, 2000
NO_LIMITS = LimitsConfig()
_STEP = 1.06
"""The ratio of two rates that are tried one after the other."""
_LOADS = (0.8, 1.0, 1.5, 2.0, 3.0)
"""The loads of `compare_limits`, as shares of what the best split can do."""


class Load(NamedTuple):
    """A source of requests, at any rate."""

    arrivals: Callable[[float], list[Arrival]]
    hours: range
    """The hours that are counted."""
    rate: float
    """The first rate that is tried."""
    copied: CopiedTrace | None = None
    """The trace whose first prompts are in the pool when the load begins."""


class Kept(NamedTuple):
    """The result of a load."""

    per_s: list[float]
    """Requests a second within the limits, by hour."""
    share: float
    """The share of all requests that kept the limits."""
    error: float
    """The median error of the predicted times to first tokens, as a share of the measured times."""


def run(
    load: Load,
    rate: float,
    split: int | None,
    costs: UnitCosts,
    limits: LimitsConfig = NO_LIMITS,
    proxies: int = _PROXIES,
) -> Kept:
    """Simulates a load. `split`: how many nodes prefill; None if the proxies decide."""
    prefill, both = (0, _NODES) if split is None else (split, 0)
    plan = ClusterPlan(prefill, _NODES - prefill - both, proxies, proxy=ProxyConfig(limits=limits), both=both)
    cluster = SimulatedCluster(plan, costs)
    arrivals = load.arrivals(rate)
    if load.copied is not None:
        cluster.remember(load.copied, len(arrivals))
    outcomes, _ = cluster.run(arrivals)
    kept, counted = dict.fromkeys(load.hours, 0), 0
    for outcome in outcomes:
        if (hour := int((outcome.due - _NIGHT_S) // _HOUR_S)) in kept:
            counted += 1
            first, rest = outcome.first or 0.0, max(1, outcome.tokens - 1)
            in_time = first <= FIRST_S and outcome.last - first <= TOKEN_S * rest
            kept[hour] += in_time and not outcome.error
    per_s = [count / _HOUR_S for count in kept.values()]
    return Kept(per_s, sum(kept.values()) / max(1, counted), quantile(cluster.errors or [0.0], 0.5))


def best_split(load: Load, costs: UnitCosts) -> tuple[float, int, Kept]:
    """Returns the highest rate at which any split keeps the limits, that split, and the result of the
    load."""
    found: tuple[float, int, Kept] | None = None
    rate, splits, step = load.rate, list(range(1, _NODES)), _STEP
    while True:
        kept = {split: run(load, rate, split, costs) for split in splits}
        if well := [split for split in splits if kept[split].share >= _KEPT]:
            best = max(well, key=lambda split: kept[split].share)
            found = rate, best, kept[best]
            splits = well  # a split that fails would also fail at a higher rate
        elif found is None:
            step = 1 / _STEP
        if found is not None and (not well or step < 1):
            return found
        rate *= step


def compare_roles(
    trace: Sequence[Request], agents: Sequence[Request], costs: UnitCosts
) -> tuple[Rows, list[Check]]:
    """Returns a row for each load and hour, and the targets. A row has the number of prefill nodes in the
    best split, and the requests a second within the limits with that split and with `auto`."""
    noon = 2
    loads = {
        "conversation": of_trace(trace, 1.5),
        "agents": of_trace(agents, 1.2),
        "morning": Load(partial(requests_of, 0), range(noon), 2.4),
        "evening": Load(partial(requests_of, 1), range(noon, 2 * noon), 4.2),
    }
    best = {name: best_split(load, costs) for name, load in loads.items()}

    def day(share: float) -> list[Arrival]:
        return [
            arrival
            for name in ("morning", "evening")
            for arrival in loads[name].arrivals(best[name][0] * share)
        ]

    loads["day"] = Load(day, range(2 * noon), 0.6)
    best["day"] = best_split(loads["day"], costs)
    auto = {name: run(loads[name], best[name][0], None, costs).per_s for name in ("conversation", "agents")}
    auto["day"] = run(loads["day"], 1.0, None, costs).per_s
    auto |= {"morning": auto["day"][:noon], "evening": auto["day"][noon:]}
    rows: Rows = []
    checks: list[Check] = []
    for name, (rate, split, kept) in best.items():
        hours = list(zip(loads[name].hours, kept.per_s, auto[name], strict=True))
        for hour, fixed, own in hours:
            rows.append(
                {"load": name, "hour": hour, "rate": rate, "prefill": split, "split": fixed, "auto": own}
            )
            if name != "day":
                checks.append(at_least(f"auto / split, {name} {hour}", own / fixed, 0.97))
        if name == "day":
            checks.append(at_least("auto / split, day", sum(auto[name]) / sum(kept.per_s), 1.25))
    return rows, checks


def compare_limits(trace: Sequence[Request], costs: UnitCosts) -> tuple[Rows, list[Check]]:
    """What are limits worth? Returns rows and targets. Each load, relative to what the best split can do, and
    each number of proxies has a row: requests a second within the limits, with `proxy.limits` and without,
    and the median error of predictions. The targets are for one proxy, because each of four proxies knows the
    others' requests only from the nodes' reports."""
    load = of_trace(trace, 1.5)
    rate, split, _ = best_split(load, costs)
    limits = LimitsConfig(ttft_s=FIRST_S, token_s=TOKEN_S)
    rows: Rows = []
    for proxies, times in itertools.product((1, _PROXIES), _LOADS):
        without, kept = (run(load, rate * times, split, costs, each, proxies) for each in (NO_LIMITS, limits))
        row = {"proxies": proxies, "load": times, "rate": rate * times, "prefill": split}
        row |= {"without": fmean(without.per_s), "limits": fmean(kept.per_s), "error": kept.error}
        rows.append(row)
    known = rows[: len(_LOADS)]
    peak = max(row["limits"] for row in known)
    checks = [at_least("of the peak, at three times the load", known[-1]["limits"] / peak, 0.95)]
    checks += [at_most(f"median error at {row['load']:g} times", row["error"], 0.2) for row in known]
    return rows, checks


def of_trace(trace: Sequence[Request], rate: float) -> Load:
    copied, hours = CopiedTrace(trace, _WARM, _DEPTH), range(2)
    seconds = _NIGHT_S + len(hours) * _HOUR_S
    return Load(lambda rate: copied.arrivals(round(rate * seconds), rate), hours, rate, copied)


def requests_of(half: int, rate: float) -> list[Arrival]:
    """Returns the requests before noon, or those after it."""
    rng, arrivals = random.Random(half), list[Arrival]()
    noon = _NIGHT_S + 2 * _HOUR_S
    now, end = (0.0, noon) if half == 0 else (noon, noon + 2 * _HOUR_S)
    prompt, answer = ((8000, 60), (600, 2000))[half]
    while (now := now + rng.expovariate(rate)) < end:
        tokens, output = (max(1, round(mean * rng.lognormvariate(-0.125, 0.5))) for mean in (prompt, answer))
        arrivals.append(Arrival(now, (Part(rng.getrandbits(60), tokens),), output))
    return arrivals
