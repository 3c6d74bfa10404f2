"""A cluster as it grows, in simulation: what each number of nodes does, and which resource is full first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from bench.lib.simulation.costs import UnitCosts
from bench.lib.simulation.requests_way import ClusterPlan, SimulatedCluster
from bench.lib.simulation.workload import CopiedTrace, names_of, of_arrival, of_some_users
from bench.lib.stats import quantile
from bench.lib.trace import Request
from pd_cache.cluster import ProxyConfig

_LEAST_REQUESTS = 300
_DEPTH = 300
_TRIAL_NODES = 4
_TRIAL_BUSY = 0.2
_TRIAL_REQUESTS = 100


class GrowthPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster grows."""

    prefill_share: float = 0.5
    """Of all nodes; at least one decodes."""
    proxies: int = 1
    node_memory: int = 32 << 30
    """Bytes that each node gives to the pool."""
    requests_per_node: int = 8
    warm: int = 1000
    """How many requests of each copy of the trace the pool has seen before; less of a short trace, and of a share of a trace's users."""
    proxy: ProxyConfig = ProxyConfig()
    seed: int = 0

    def prefill(self, nodes: int) -> int:
        """Returns how many of so many nodes prefill."""
        return min(nodes - 1, max(1, round(nodes * self.prefill_share))) if nodes > 1 else 0


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
    busiest: dict[str, float]
    """The same of the one of its kind that was asked for most."""


class Limit(msgspec.Struct):
    """When a resource is full."""

    resource: str
    nodes: float | None
    """From how many nodes on, between those that were simulated; None if it never is."""
    rate_per_node: float
    """Requests a second and node at which it would be full in the largest cluster that does not ask too much of anything."""


def grow(
    trace: Sequence[Request], costs: UnitCosts, plan: GrowthPlan, nodes: int, rate_per_node: float, requests: int = 0
) -> GrowthStep:
    """Simulates one cluster under `rate_per_node` requests a second for each of its nodes; `requests` in all, or what the plan says."""
    prefill = plan.prefill(nodes)
    rate = rate_per_node * nodes
    count = requests or max(_LEAST_REQUESTS, plan.requests_per_node * nodes)
    # as many users a node in a small cluster as in a large one: a share of the trace's, or several copies of the trace
    share = min(1.0, plan.requests_per_node * nodes / _DEPTH)
    users = of_some_users(trace, share) or trace
    copied = CopiedTrace(users, round(plan.warm * share), min(_DEPTH, count))
    arrivals = copied.arrivals(count, rate, plan.seed)
    cluster = SimulatedCluster(
        ClusterPlan(
            prefill,
            nodes - prefill,
            plan.proxies,
            pool_chunks=max(1, nodes * plan.node_memory // costs.chunk_bytes),
            proxy=plan.proxy,
            seed=plan.seed,
        ),
        costs,
    )
    for request in copied.passed:
        for copy in range(copied.copies(count)):
            cluster.remember(names_of(copied.parts(request, copy), costs.engine.chunk_tokens))
    load = cluster.run([of_arrival(one, costs.engine.chunk_tokens) for one in arrivals])
    answered = [one for one in load.outcomes if not one.error]
    firsts = [one.first or 0.0 for one in answered]
    seconds = max([one.due + one.last for one in answered] + [arrivals[-1].due])
    return GrowthStep(
        nodes=nodes,
        prefill=prefill,
        decode=nodes - prefill,
        requests=len(load.outcomes),
        rate=rate,
        answered_per_s=len(answered) / seconds,
        refused=len(load.outcomes) - len(answered),
        hit_rate=sum(one.cached or 0 for one in answered) / max(1, sum(one.prompt_tokens for one in answered)),
        ttft_p50_ms=quantile(firsts, 0.5) * 1e3,
        ttft_p99_ms=quantile(firsts, 0.99) * 1e3,
        asked={use.name: use.asked for use in load.uses},
        busiest={use.name: use.busiest for use in load.uses},
    )


def usual_rate(trace: Sequence[Request], costs: UnitCosts, plan: GrowthPlan, busy: float) -> float:
    """Returns the requests a second and node that keep engines `busy` (0 to 1) of the time, those of the kind that has more to do."""
    guess = 1.0
    for _ in range(12):
        step = grow(trace, costs, plan, _TRIAL_NODES, guess, _TRIAL_REQUESTS)
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
