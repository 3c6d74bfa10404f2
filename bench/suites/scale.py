"""What a cluster of 1 to 1,000 nodes does, in simulation, and what is full first.

Requests of a trace come at a rate that grows with the cluster. The policies are the proxy's own modules; unit costs are assumed, or given in
a file.

    pd-cache bench scale --trace FILE --html scale.html
    pd-cache bench scale --trace FILE --costs mine.yaml        costs of other machines: those that the file gives
    pd-cache bench scale --trace FILE --within 30 0.1 --nodes 16      what is answered within limits, with and without hits in the pool
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from bench.lib.about import about
from bench.lib.arrivals import Part
from bench.lib.report import LinePlot, Report, Table, at_least, finish, option, progress, report_options
from bench.lib.simulation.cluster import ClusterPlan, SimulatedCluster
from bench.lib.simulation.costs import UnitCosts, read_costs
from bench.lib.simulation.workload import CopiedTrace, names_of, of_arrival, of_some_users
from bench.lib.stats import quantile
from bench.lib.trace import Request, read_trace

_NODES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_SHOWN = 1.25
"""Where a plot of shares ends: what is full is full."""
_MEMORY = 32 << 30
"""Bytes that each node gives to the pool."""
_REQUESTS_PER_NODE, _LEAST_REQUESTS = 8, 300
_WARM = 1000
"""How many requests of each copy of the trace the pool has seen before; less of a short trace, and of a share of a trace's users."""
_DEPTH = 300
_LIMITED_WARM, _LIMITED_REQUESTS, _LIMITED_TOKENS = 3000, 2000, 3_000_000
"""With --within: requests that passed before, and that come; tokens that each node gives to the pool, as in FAST'25."""
_TRIAL_NODES = 4
_TRIAL_BUSY = 0.2
_TRIAL_REQUESTS = 100


class GrowthStep(msgspec.Struct):
    """What a number of nodes does."""

    nodes: int
    prefill: int
    decode: int
    requests: int
    rate: float
    """Requests a second that came."""
    answered_per_s: float
    """While requests came, and until the last one of these was answered."""
    refused: int
    """Requests that were answered with an error."""
    hit_rate: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    asked: dict[str, float]
    """What each kind of resource was asked for, as a share of what it can do: of the master and the proxies, of all of a kind; 1 is full."""


class Limit(msgspec.Struct):
    """When a resource is full."""

    resource: str
    nodes: float | None
    """From how many nodes on, between those that were simulated; None if it never is."""
    rate_per_node: float
    """Requests a second and node at which it would be full in the largest cluster that does not ask too much of anything."""


def grow(
    trace: Sequence[Request], costs: UnitCosts, proxies: int, nodes: int, rate_per_node: float, requests: int = 0
) -> GrowthStep:
    """Simulates one cluster under `rate_per_node` requests a second for each of its nodes; `requests` in all, or as many a node as usual."""
    prefill = nodes // 2
    rate = rate_per_node * nodes
    count = requests or max(_LEAST_REQUESTS, _REQUESTS_PER_NODE * nodes)
    # as many users a node in a small cluster as in a large one: a share of the trace's, or several copies of the trace
    share = min(1.0, _REQUESTS_PER_NODE * nodes / _DEPTH)
    users = of_some_users(trace, share) or trace
    copied = CopiedTrace(users, round(_WARM * share), min(_DEPTH, count))
    arrivals = copied.arrivals(count, rate)
    cluster = SimulatedCluster(
        ClusterPlan(
            prefill,
            nodes - prefill,
            proxies,
            pool_chunks=max(1, nodes * _MEMORY // costs.chunk_bytes),
        ),
        costs,
    )
    for request in copied.passed:
        for copy in range(copied.copies(count)):
            cluster.remember(names_of(copied.parts(request, copy), costs.engine.chunk_tokens))
    outcomes, uses = cluster.run([of_arrival(one, costs.engine.chunk_tokens) for one in arrivals])
    answered = [one for one in outcomes if not one.error]
    firsts = [one.first or 0.0 for one in answered]
    seconds = max([one.due + one.last for one in answered] + [arrivals[-1].due])
    return GrowthStep(
        nodes=nodes,
        prefill=prefill,
        decode=nodes - prefill,
        requests=len(outcomes),
        rate=rate,
        answered_per_s=len(answered) / seconds,
        refused=len(outcomes) - len(answered),
        hit_rate=sum(one.cached or 0 for one in answered) / max(1, sum(one.prompt_tokens for one in answered)),
        ttft_p50_ms=quantile(firsts, 0.5) * 1e3,
        ttft_p99_ms=quantile(firsts, 0.99) * 1e3,
        asked=uses,
    )


def within(
    trace: Sequence[Request], costs: UnitCosts, plan: ClusterPlan, rate: float, limits: tuple[float, float], reuse: bool
) -> float:
    """Returns the share of requests, at `rate` a second, that have their first token within `limits[0]` seconds, and the others within
    `limits[1]` each on the average. Without `reuse` every prompt is new; it is handed over through the pool as ever."""
    copied, size = CopiedTrace(trace, _LIMITED_WARM, _LIMITED_REQUESTS), costs.engine.chunk_tokens
    arrivals = copied.arrivals(min(_LIMITED_REQUESTS, len(trace)), rate)
    cluster = SimulatedCluster(plan, costs)
    for request in copied.passed if reuse else ():
        cluster.remember(names_of(copied.parts(request, 0), size))
    if not reuse:
        for number, one in enumerate(arrivals):
            prompt = tuple(Part(hash((part.seed, number)), part.tokens) for part in one.prompt)
            arrivals[number] = one._replace(prompt=prompt)
    outcomes, _ = cluster.run([of_arrival(one, size) for one in arrivals])
    firsts = [math.inf if one.error or one.first is None else one.first for one in outcomes]
    met = [
        first <= limits[0] and one.last - first <= limits[1] * (one.tokens - 1)
        for first, one in zip(firsts, outcomes, strict=True)
    ]
    return sum(met) / len(met)


def capacity(
    trace: Sequence[Request], costs: UnitCosts, proxies: int, nodes: int, limits: tuple[float, float], reuse: bool
) -> tuple[float, int]:
    """Returns the most requests a second of which nine in ten are `within` limits, to a sixteenth, and the prefill nodes of the best split."""
    best, split = 0.0, 0
    for prefill in sorted({max(1, round(nodes * share)) for share in (0.25, 0.375, 0.5, 0.625)}):
        plan = ClusterPlan(prefill, nodes - prefill, proxies, nodes * _LIMITED_TOKENS // costs.engine.chunk_tokens)
        most = 1000.0 * nodes
        low, high, rate = 0.0, most, best or nodes / 8
        while low < 15 / 16 * high and high > max(best, nodes / 1000):
            enough = within(trace, costs, plan, rate, limits, reuse) >= 0.9
            low, high = (rate, high) if enough else (low, rate)
            rate = 2 * low if high == most else (low + high) / 2
        if low > best:
            best, split = low, prefill
    return best, split


def usual_rate(trace: Sequence[Request], costs: UnitCosts, proxies: int, busy: float) -> float:
    """Returns the requests a second and node that keep engines `busy` (0 to 1) of the time, those of the kind that has more to do."""
    guess = 1.0
    for _ in range(12):
        step = grow(trace, costs, proxies, _TRIAL_NODES, guess, _TRIAL_REQUESTS)
        most = max(step.asked["prefill"], step.asked["decode"])
        if 0.5 * _TRIAL_BUSY <= most <= 1.5 * _TRIAL_BUSY:
            return guess * busy / most
        guess *= min(10.0, max(0.1, _TRIAL_BUSY / max(most, 1e-6)))
    return guess


def limits(steps: Sequence[GrowthStep]) -> list[Limit]:
    """Returns when each resource is full, the first one first; those that never are, behind, by how much they were asked."""
    healthy = [step for step in steps if max(step.asked.values()) < 1.0] or steps[:1]
    largest = healthy[-1]
    found = []
    for name in steps[0].asked:
        shares = [(step.nodes, step.asked[name]) for step in steps]
        rate = largest.rate / largest.nodes / max(largest.asked[name], 1e-12)
        found.append(Limit(name, full_at(shares), rate))
    return sorted(found, key=lambda one: (one.nodes or math.inf, one.rate_per_node))


def full_at(shares: Sequence[tuple[int, float]]) -> float | None:
    """Returns at how many nodes a share comes to 1, by a straight line between the numbers of nodes around; None if it never does."""
    before: tuple[int, float] | None = None
    for nodes, share in shares:
        if share >= 1.0:
            if before is None or share == before[1]:
                return float(nodes)
            return before[0] + (nodes - before[0]) * (1.0 - before[1]) / (share - before[1])
        before = (nodes, share)
    return None


@click.command()
@option("--trace", required=True, type=click.Path(path_type=Path), help="In the format of bench/lib/trace.py.")
@option("--nodes", "counts", multiple=True, type=click.IntRange(1, 100_000), help="Prefill nodes, and as many decode nodes or one more; may be given several times. By default ten numbers from 1 to 1000.")  # fmt: skip
@option("--proxies", default=1, type=click.IntRange(1, 10_000))
@option("--rate", type=click.FloatRange(0, min_open=True), help="Requests a second and node; by default what keeps engines busy --busy of the time.")  # fmt: skip
@option("--busy", default=0.6, type=click.FloatRange(0, 1, min_open=True))
@option("--costs", "file", type=click.Path(path_type=Path), help="YAML: unit costs of your machines; others are as by default.")  # fmt: skip
@option("--within", "times", nargs=2, type=click.FloatRange(0, min_open=True), help="Seconds to the first token, and to each other: at what rate do nine in ten requests meet both, with and without hits?")  # fmt: skip
@report_options
def main(
    trace: Path,
    counts: tuple[int, ...],
    proxies: int,
    rate: float | None,
    busy: float,
    file: Path | None,
    times: tuple[float, float] | None,
    **output: Any,
) -> None:
    """A cluster of 1 to 1,000 nodes, in simulation."""
    requests = read_trace(trace)
    costs = UnitCosts() if file is None else read_costs(file)
    if times is not None:
        rows = []
        for nodes in sorted(set(counts or (16,))):
            row: dict[str, Any] = {"nodes": nodes, "ttft_s": times[0], "token_s": times[1]}
            for name, reuse in (("rate", True), ("rate_without", False)):
                row[name], row[f"{name}_prefill"] = capacity(requests, costs, proxies, nodes, times, reuse)
            gain = row["rate"] / row["rate_without"] - 1 if row["rate_without"] else None
            rows.append(row | {"gain": gain, "published": "0.59 to 4.98"})
        checks = [at_least(f"gain, {row['nodes']} nodes", row["gain"], 0.0) for row in rows if row["gain"] is not None]
        report = Report("Within limits, in simulation", "", [Table.of("Requests a second", rows)], about())
        finish({"results": rows}, checks, report=report, **output)
        return
    per_node = rate or usual_rate(requests, costs, proxies, busy)
    with progress() as bar:
        steps = []
        for nodes in bar.track(sorted(set(counts or _NODES)), description="nodes"):
            steps.append(grow(requests, costs, proxies, nodes, per_node))
    found = limits(steps)
    results = {
        "rate_per_node": per_node,
        "costs": msgspec.to_builtins(costs),
        "results": [msgspec.to_builtins(step) for step in steps],
        "limits": [msgspec.to_builtins(one) for one in found],
    }
    report = report_of(steps, found, per_node, about())
    finish(results, [], report=report, **output)


def report_of(steps: Sequence[GrowthStep], found: Sequence[Limit], rate: float, facts: Mapping[str, str]) -> Report:
    """Returns what is full first, the tables, and the plots."""
    names = list(steps[0].asked)
    rows = [{name: value for name, value in msgspec.structs.asdict(step).items() if name != "asked"} for step in steps]
    parts: list[Table | LinePlot] = [
        Table(
            "What is full first",
            ["resource", "full from, nodes", "full at, requests/s a node"],
            [[one.resource, _nodes(one, steps), one.rate_per_node] for one in found],
            "The second column: as the cluster grows at the same rate a node. The third: the rate a node that the largest cluster in which "
            "nothing is full could do, if only this resource limited it.",
        ),
        Table.of(
            "As the cluster grows",
            rows,
            "answered_per_s counts to the last answer, so it stays below the rate for a load that is short.",
        ),
        Table.of(
            "What each resource is asked for, as a share of what it can do",
            [{"nodes": step.nodes, **step.asked} for step in steps],
            "The mean of all of a kind. 1 is full: what is asked beyond that waits, and everything behind it is asked for less.",
        ),
    ]  # fmt: skip
    if len(steps) > 1:
        shares = {name: [(float(step.nodes), step.asked[name]) for step in steps] for name in names}
        times = {
            "median": [(float(step.nodes), step.ttft_p50_ms) for step in steps],
            "99th percentile": [(float(step.nodes), step.ttft_p99_ms) for step in steps],
        }
        parts += [
            LinePlot("How full each resource is", "nodes", "share asked for; 1 is full", shares, "Lines end at the top where more is asked for than can ever be done.", y_most=_SHOWN),
            LinePlot("Time to first token", "nodes", "milliseconds", times),
        ]  # fmt: skip
    return Report(
        "A cluster as it grows, in simulation",
        f"{_first(found, steps)} Requests of a trace come at {rate:.3g} a second and node.",
        parts,
        facts,
    )


def _first(found: Sequence[Limit], steps: Sequence[GrowthStep]) -> str:
    first = found[0]
    if first.nodes is None:
        return f"Nothing is full up to {steps[-1].nodes} nodes; {first.resource} comes nearest."
    return f"The first to be full: {first.resource}, from {_nodes(first, steps)} nodes on."


def _nodes(limit: Limit, steps: Sequence[GrowthStep]) -> str:
    if limit.nodes is None:
        return f"not up to {steps[-1].nodes}"
    return f"{limit.nodes:.0f}" if limit.nodes > steps[0].nodes else f"{steps[0].nodes} or fewer"


if __name__ == "__main__":
    main()
