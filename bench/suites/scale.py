"""What is full first as a cluster grows to 1,000 nodes? Reports `full_from_nodes` and times to first token,
in simulation; there is no peer.

Requests of a trace come at a rate that grows with the cluster. The policies are the proxy's own modules. Unit
costs are assumed; a file may give others.

    pd-cache bench scale --trace FILE
    pd-cache bench scale --trace FILE --costs mine.yaml      with those costs that the file gives
    pd-cache bench scale --trace FILE --gateway envoy        with Envoy and a picker in place of the proxy
    pd-cache bench scale --trace FILE --roles                every split of six nodes against proxy.roles.auto
    pd-cache bench scale --trace FILE --limits               more load than six nodes can do, with limits
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from bench.lib.report import Rows, file_type, finish, option, output_options, tracked
from bench.lib.simulation.cluster import ClusterPlan, SimulatedCluster
from bench.lib.simulation.costs import UnitCosts, read_costs
from bench.lib.simulation.roles import LARGE, compare_limits, compare_roles
from bench.lib.simulation.workload import CopiedTrace, of_some_users
from bench.lib.stats import quantile
from bench.lib.trace import Request, read_trace
from bench.suites.routing import agent_trace
from pd_cache.cluster import ProxyConfig

_NODES = (1, 10, 20, 50, 100, 200, 300, 500, 1000)
_MEMORY = 32 << 30
"""Bytes that each node gives to the pool."""
_REQUESTS_PER_NODE, _LEAST_REQUESTS = 8, 300
_WARM = 1000
"""How many requests of each copy of the trace are in the pool before the load; fewer if the trace is short,
or if only a share of its users is simulated."""
_DEPTH = 300
_BUSY = 0.6
"""The use of engines at the usual rate: of a prefill node's time, or of the room in a decode node's paged
cache."""
_TRIAL_NODES = 4
_TRIAL_BUSY = 0.2
_TRIAL_REQUESTS = 100


def grow(
    trace: Sequence[Request],
    costs: UnitCosts,
    plan: ClusterPlan,
    nodes: int,
    rate_per_node: float,
    requests: int = 0,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Simulates a cluster like `plan`, of this number of nodes, under `rate_per_node` requests a second for
    each of them; `requests` in all, or as many a node as usual.

    Returns the cluster's figures (`refused` counts requests that were answered with an error), and the work
    of each kind of resource, as a share of what it can do; 1 is full. All proxies together are one resource.
    """
    prefill, rate = nodes // 2, rate_per_node * nodes
    count = requests or max(_LEAST_REQUESTS, _REQUESTS_PER_NODE * nodes)
    # as many users a node in a small cluster as in a large one: a share of the trace's, or several copies of
    # the trace
    share = min(1.0, _REQUESTS_PER_NODE * nodes / _DEPTH)
    users = of_some_users(trace, share) or trace
    copied = CopiedTrace(users, round(_WARM * share), min(_DEPTH, count))
    room = max(1, nodes * _MEMORY // costs.chunk_bytes)
    plan = plan._replace(prefill=prefill, decode=nodes - prefill, pool_chunks=room)
    cluster = SimulatedCluster(plan, costs)
    cluster.remember(copied, count)
    outcomes, asked = cluster.run(copied.arrivals(count, rate))
    answered = [outcome for outcome in outcomes if not outcome.error]
    firsts = [outcome.first or 0.0 for outcome in answered]
    row = {
        "nodes": nodes,
        "requests": len(outcomes),
        "rate": rate,
        "refused": len(outcomes) - len(answered),
        "hit_rate": sum(outcome.cached or 0 for outcome in answered)
        / max(1, sum(outcome.prompt_tokens for outcome in answered)),
        "ttft_p50_ms": quantile(firsts, 0.5) * 1e3,
        "ttft_p99_ms": quantile(firsts, 0.99) * 1e3,
    }
    return row, asked


def usual_rate(trace: Sequence[Request], costs: UnitCosts, plan: ClusterPlan) -> float:
    """Returns the requests a second for each node at which the busier kind of engines has the use `_BUSY`."""
    guess = 1.0
    for _ in range(12):
        _, asked = grow(trace, costs, plan, _TRIAL_NODES, guess, _TRIAL_REQUESTS)
        most = max(asked["prefill"], asked["decode"])
        if 0.5 * _TRIAL_BUSY <= most <= 1.5 * _TRIAL_BUSY:
            return guess * _BUSY / most
        guess *= min(10.0, max(0.1, _TRIAL_BUSY / max(most, 1e-6)))
    return guess


def full_from(asked: Mapping[int, dict[str, float]]) -> Rows:
    """Returns, for each resource, the number of nodes at which it is full, interpolated between the simulated
    numbers; None if it never is. The resource that is full first comes first. `asked`: the use of each
    resource at each number of nodes."""
    kinds = next(iter(asked.values()))
    full = {kind: full_at([(nodes, shares[kind]) for nodes, shares in asked.items()]) for kind in kinds}
    return [
        {"resource": kind, "full_from_nodes": full[kind]}
        for kind in sorted(full, key=lambda resource: full[resource] or math.inf)
    ]


def full_at(shares: Sequence[tuple[int, float]]) -> float | None:
    """Returns the number of nodes at which a share reaches 1, by linear interpolation; None if it never
    does."""
    steps = pairwise((shares[0], *shares))
    full = (
        low + (high - low) * (1 - below) / max(1e-9, above - below)
        for (low, below), (high, above) in steps
        if above >= 1
    )
    return next(full, None)


@click.command()
@option("--trace", required=True, type=file_type, help="A trace in the format of bench/lib/trace.py.")
@option("--nodes", "counts", multiple=True, type=click.IntRange(1, 100_000), help="Prefill nodes, and as many decode nodes or one more; may be given several times. By default nine numbers from 1 to 1000.")  # fmt: skip
@option("--gateway", type=click.Choice(["envoy"]), help="As with `proxy.gateway`, answers pass through Envoy, and only requests pass through Python.")  # fmt: skip
@option("--costs", "file", type=file_type, help="A YAML file with unit costs; costs that it leaves out keep their defaults.")  # fmt: skip
@option("--roles", is_flag=True, help="Instead, compare fixed roles of six nodes with roles that follow the load, on the trace, on agents, and on a day that turns at noon.")  # fmt: skip
@option("--limits", is_flag=True, help="Instead, compare requests a second within limits with proxy.limits and without, at up to three times the load that six nodes can do.")  # fmt: skip
@output_options
def main(
    trace: Path,
    counts: tuple[int, ...],
    gateway: Literal["envoy"] | None,
    file: Path | None,
    roles: bool,
    limits: bool,
    **output: Any,
) -> None:
    """A cluster of 1 to 1,000 nodes, in simulation."""
    requests = read_trace(trace)
    if roles or limits:
        if counts or gateway or roles == limits:
            what = "--roles and --limits have nodes of their own: give one of the two, without --nodes and --gateway"
            raise click.UsageError(what)
        costs = LARGE if file is None else read_costs(file)
        rows, checks = (
            compare_limits(requests, costs) if limits else compare_roles(requests, agent_trace(400), costs)
        )
        finish({"results": rows}, checks, **output)
        return
    costs = UnitCosts() if file is None else read_costs(file)
    plan = ClusterPlan(0, 0, proxy=ProxyConfig(gateway=gateway))
    per_node = usual_rate(requests, costs, plan)
    sizes = tracked(sorted(set(counts or _NODES)), "nodes")
    steps = [grow(requests, costs, plan, nodes, per_node) for nodes in sizes]
    found = full_from({row["nodes"]: asked for row, asked in steps})
    results = {
        "rate_per_node": per_node,
        "limits": found,
        "results": [row for row, _ in steps],
        "asked": [{"nodes": row["nodes"], **asked} for row, asked in steps],
        "costs": msgspec.to_builtins(costs),
    }
    finish(results, [], **output)
