"""What is full first as a cluster grows to 1,000 nodes? `full_from_nodes`, and times to first token, in simulation; there is no peer.

Requests of a trace come at a rate that grows with the cluster. The policies are the proxy's own modules. Unit costs are assumed; a file
may give others.

    pd-cache bench scale --trace FILE
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

from bench.lib.arrivals import Part
from bench.lib.report import Table, at_least, finish, option, output_options, progress
from bench.lib.simulation.cluster import ClusterPlan, SimulatedCluster
from bench.lib.simulation.costs import UnitCosts, read_costs
from bench.lib.simulation.workload import CopiedTrace, names_of, of_arrival, of_some_users
from bench.lib.stats import quantile
from bench.lib.trace import Request, read_trace

_NODES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_MEMORY = 32 << 30
"""Bytes that each node gives to the pool."""
_REQUESTS_PER_NODE, _LEAST_REQUESTS = 8, 300
_WARM = 1000
"""How many requests of each copy of the trace the pool has seen before; less of a short trace, and of a share of a trace's users."""
_DEPTH = 300
_LIMITED_WARM, _LIMITED_S, _LIMITED_TOKENS = 3000, 600.0, 3_000_000
"""With --within: requests that passed before; how long others come, at each rate as long, since a queue may grow to the limit until they
end; tokens that each node gives to the pool, as in FAST'25."""
_BUSY = 0.6
"""The share of the time for which engines are busy at the usual rate."""
_TRIAL_NODES = 4
_TRIAL_BUSY = 0.2
_TRIAL_REQUESTS = 100


def grow(
    trace: Sequence[Request], costs: UnitCosts, proxies: int, nodes: int, rate_per_node: float, requests: int = 0
) -> tuple[dict[str, Any], dict[str, float]]:
    """Simulates one cluster under `rate_per_node` requests a second for each of its nodes; `requests` in all, or as many a node as usual.

    Returns its figures: `answered_per_s` while requests came, and until the last one of these was answered; `refused` those answered with an
    error. And what each kind of resource was asked for, as a share of what it can do: of the master and the proxies, of all of a kind; 1 is
    full.
    """
    prefill, rate = nodes // 2, rate_per_node * nodes
    count = requests or max(_LEAST_REQUESTS, _REQUESTS_PER_NODE * nodes)
    # as many users a node in a small cluster as in a large one: a share of the trace's, or several copies of the trace
    share = min(1.0, _REQUESTS_PER_NODE * nodes / _DEPTH)
    users = of_some_users(trace, share) or trace
    copied, size = CopiedTrace(users, round(_WARM * share), min(_DEPTH, count)), costs.engine.chunk_tokens
    arrivals = copied.arrivals(count, rate)
    plan = ClusterPlan(prefill, nodes - prefill, proxies, max(1, nodes * _MEMORY // costs.chunk_bytes))
    cluster = SimulatedCluster(plan, costs)
    for request in copied.passed:
        for copy in range(copied.copies(count)):
            cluster.remember(names_of(copied.parts(request, copy), size))
    outcomes, asked = cluster.run([of_arrival(arrival, size) for arrival in arrivals])
    answered = [outcome for outcome in outcomes if not outcome.error]
    firsts = [outcome.first or 0.0 for outcome in answered]
    seconds = max([outcome.due + outcome.last for outcome in answered] + [arrivals[-1].due])
    row = {
        "nodes": nodes,
        "prefill": prefill,
        "decode": nodes - prefill,
        "requests": len(outcomes),
        "rate": rate,
        "answered_per_s": len(answered) / seconds,
        "refused": len(outcomes) - len(answered),
        "hit_rate": sum(outcome.cached or 0 for outcome in answered)
        / max(1, sum(outcome.prompt_tokens for outcome in answered)),
        "ttft_p50_ms": quantile(firsts, 0.5) * 1e3,
        "ttft_p99_ms": quantile(firsts, 0.99) * 1e3,
    }
    return row, asked


def within(
    trace: Sequence[Request], costs: UnitCosts, plan: ClusterPlan, rate: float, limits: tuple[float, float], reuse: bool
) -> float:
    """Returns the share of requests, at `rate` a second, that have their first token within `limits[0]` seconds, and the others within
    `limits[1]` each on the average. Without `reuse` every prompt is new; it is handed over through the pool as ever."""
    count = min(len(trace), max(_LEAST_REQUESTS, round(rate * _LIMITED_S)))
    copied, size = CopiedTrace(trace, _LIMITED_WARM, count), costs.engine.chunk_tokens
    arrivals = copied.arrivals(count, rate)
    cluster = SimulatedCluster(plan, costs)
    for request in copied.passed if reuse else ():
        cluster.remember(names_of(copied.parts(request, 0), size))
    if not reuse:
        for number, arrival in enumerate(arrivals):
            prompt = tuple(Part(hash((part.seed, number)), part.tokens) for part in arrival.prompt)
            arrivals[number] = arrival._replace(prompt=prompt)
    outcomes, _ = cluster.run([of_arrival(arrival, size) for arrival in arrivals])
    firsts = [math.inf if outcome.error or outcome.first is None else outcome.first for outcome in outcomes]
    met = [
        first <= limits[0] and outcome.last - first <= limits[1] * (outcome.tokens - 1)
        for first, outcome in zip(firsts, outcomes, strict=True)
    ]
    return sum(met) / len(met)


def capacity(
    trace: Sequence[Request], costs: UnitCosts, proxies: int, nodes: int, limits: tuple[float, float], reuse: bool
) -> tuple[float, int]:
    """Returns the most requests a second of which nine in ten are `within` limits, to a thirty-second, and the prefill nodes of the best
    split: from half of the nodes, more and then fewer as long as that betters the rate. Raises UsageError if no rate is too high."""
    best, split = 0.0, 0
    for begin, step in ((nodes // 2, max(1, nodes // 16)), (nodes // 2 - 1, -max(1, nodes // 16))):
        for prefill in range(max(1, begin), nodes if step > 0 else 0, step):
            plan = ClusterPlan(prefill, nodes - prefill, proxies, nodes * _LIMITED_TOKENS // costs.engine.chunk_tokens)
            low, high, rate = best, math.inf, best * 33 / 32 or nodes / 8
            while low < 31 / 32 * high and rate > nodes / 1000:
                enough = within(trace, costs, plan, rate, limits, reuse) >= 0.9
                low, high = (rate, high) if enough else (low, rate)
                if low > 1000 * len(trace):
                    raise click.UsageError(
                        f"--within: all {len(trace)} requests of the trace meet the limits at any rate"
                    )
                rate = low * (9 / 8 if best else 2) if high == math.inf else (low + high) / 2
            if low <= best:
                break
            best, split = low, prefill
    return best, split


def usual_rate(trace: Sequence[Request], costs: UnitCosts, proxies: int) -> float:
    """Returns the requests a second and node that keep engines `_BUSY` of the time, those of the kind that has more to do."""
    guess = 1.0
    for _ in range(12):
        _, asked = grow(trace, costs, proxies, _TRIAL_NODES, guess, _TRIAL_REQUESTS)
        most = max(asked["prefill"], asked["decode"])
        if 0.5 * _TRIAL_BUSY <= most <= 1.5 * _TRIAL_BUSY:
            return guess * _BUSY / most
        guess *= min(10.0, max(0.1, _TRIAL_BUSY / max(most, 1e-6)))
    return guess


def limits(asked: Mapping[int, dict[str, float]]) -> list[dict[str, Any]]:
    """Returns for each resource at how many nodes, between those that were simulated, it is full (None if it never is); the first to be full
    first. `asked`: what each number of nodes was asked for."""
    kinds = next(iter(asked.values()))
    full = {kind: full_at([(nodes, shares[kind]) for nodes, shares in asked.items()]) for kind in kinds}
    return [
        {"resource": kind, "full_from_nodes": full[kind]}
        for kind in sorted(full, key=lambda resource: full[resource] or math.inf)
    ]


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
@option("--costs", "file", type=click.Path(path_type=Path), help="YAML: unit costs of your machines; others are as by default.")  # fmt: skip
@option("--within", "times", nargs=2, type=click.FloatRange(0, min_open=True), help="Seconds to the first token, and to each other: at what rate do nine in ten requests meet both, with and without hits?")  # fmt: skip
@output_options
def main(
    trace: Path,
    counts: tuple[int, ...],
    proxies: int,
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
            rows.append(row | {"gain": gain})
        checks = [at_least(f"gain, {row['nodes']} nodes", row["gain"], 0.0) for row in rows if row["gain"] is not None]
        finish({"results": rows}, checks, **output)
        return
    per_node = usual_rate(requests, costs, proxies)
    with progress() as bar:
        sizes = bar.track(sorted(set(counts or _NODES)), description="nodes")
        steps = [grow(requests, costs, proxies, nodes, per_node) for nodes in sizes]
    found = limits({row["nodes"]: asked for row, asked in steps})
    results = {
        "rate_per_node": per_node,
        "costs": msgspec.to_builtins(costs),
        "results": [{**row, "asked": asked} for row, asked in steps],
        "limits": found,
    }
    tables = [
        Table.of("What is full first", found),
        Table.of("As the cluster grows", [row for row, _ in steps]),
        Table.of("Asked for, of what each can do", [{"nodes": row["nodes"], **asked} for row, asked in steps]),
    ]
    finish(results, [], tables=tables, **output)
