"""The proxy's policies on a trace, in simulation: hit rate of the nodes' own caches, and how long prompts queue.

The router is the proxy's own (`launch/proxy/routing.py`), with simulated time. A prefill node is modelled as a queue that computes one
prompt after the other, at a steady rate of tokens that its cache lacks; its cache keeps the blocks used last. `bench/lib/trace.py`
describes the format of traces.

    pd-cache bench routing --trace FILE --json         or  python -m bench.suites.routing --trace FILE --json
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.lib.report import Check, finish, option, output_options, progress
from bench.lib.stats import quantile
from bench.lib.trace import BLOCK_TOKENS, Request, read_trace
from launch.proxy.prefixes import PrefixIndex, RoutedPrompt
from launch.proxy.routing import NodePool, Policy, Target

_POLICIES: tuple[Policy, ...] = ("round_robin", "least_loaded", "prefix_aware")


class PolicyOutcome(NamedTuple):
    """What a policy made of the trace."""

    hit_rate: float
    queueing: list[float]
    """Seconds, one a request."""


class _Waiting(NamedTuple):
    arrived: float
    prompt: RoutedPrompt
    done: ExitStack
    """Closed to report to the router that the node has finished the request."""


class _SimulatedNode:
    def __init__(self, cache_tokens: int) -> None:
        self.cache = PrefixIndex(cache_tokens)
        self.queue: deque[_Waiting] = deque()
        self.busy: _Waiting | None = None


def simulate(requests: Iterable[Request], policy: Policy, nodes: int, cache_tokens: int, rate: float) -> PolicyOutcome:
    """Lets `nodes` nodes of `rate` tokens/s each compute the trace."""
    pool = NodePool("prefill", policy)
    pool.update(Target(str(index), kv_tokens=cache_tokens) for index in range(nodes))
    fleet = {url: _SimulatedNode(cache_tokens) for url in pool.urls()}
    ends: list[tuple[float, int, str]] = []
    queueing: list[float] = []
    hit = total = 0

    def begin(url: str, now: float) -> None:
        nonlocal hit, total
        node = fleet[url]
        node.busy = one = node.queue.popleft()
        queueing.append(now - one.arrived)
        found = node.cache.match(one.prompt)
        node.cache.add(one.prompt)
        hit += found
        total += one.prompt.tokens
        heapq.heappush(ends, (now + (one.prompt.tokens - found) / rate, len(queueing), url))

    def finish_until(now: float) -> None:
        while ends and ends[0][0] <= now:
            ended, _, url = heapq.heappop(ends)
            node = fleet[url]
            assert node.busy is not None
            node.busy.done.close()
            node.busy = None
            if node.queue:
                begin(url, ended)

    for request in requests:
        now = request.timestamp / 1000
        finish_until(now)
        prompt = RoutedPrompt(request.input_length, request.hash_ids, BLOCK_TOKENS)
        url = pool.pick(now, prompt)
        assert url is not None
        done = ExitStack()
        done.enter_context(pool.working(url, prompt))
        fleet[url].queue.append(_Waiting(now, prompt, done))
        if fleet[url].busy is None:
            begin(url, now)
    finish_until(float("inf"))
    assert not any(pool.loads().values()), "work was not given back"
    return PolicyOutcome(hit / total, queueing)


def ideal_hit_rate(requests: Iterable[Request]) -> float:
    """Returns the hit rate of one node whose cache never forgets."""
    return simulate(requests, "round_robin", 1, 1 << 60, 1e12).hit_rate


def compare(requests: list[Request], nodes: int, cache_tokens: int, rate: float) -> list[dict[str, Any]]:
    """Returns one row per policy."""
    rows = []
    for policy in _POLICIES:
        outcome = simulate(requests, policy, nodes, cache_tokens, rate)
        rows.append(
            {
                "cache_tokens": cache_tokens,
                "policy": policy,
                "hit_rate": outcome.hit_rate,
                "queueing_mean_s": statistics.fmean(outcome.queueing),
                "queueing_p50_s": quantile(outcome.queueing, 0.5),
                "queueing_p99_s": quantile(outcome.queueing, 0.99),
            }
        )
    return rows


@click.command()
@option("--trace", required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@option("--nodes", default=4, type=click.IntRange(1))
@option(
    "--cache",
    "caches",
    multiple=True,
    default=(500_000, 1_000_000, 2_000_000, 8_000_000),
    type=click.IntRange(512),
    help="Tokens that a node's own cache holds; may be given several times.",
)
@option("--rate", default=12_000.0, type=click.FloatRange(1.0), help="Tokens/s of a node.")
@output_options
def main(trace: Path, nodes: int, caches: tuple[int, ...], rate: float, **output: Any) -> None:
    """Policies on a trace, in simulation."""
    requests = read_trace(trace)
    rows: list[dict[str, Any]] = []
    with progress() as bar:
        for cache in bar.track(caches, description="caches"):
            rows += compare(requests, nodes, cache, rate)
    checks = []
    for start in range(0, len(rows), len(_POLICIES)):
        by_policy = {row["policy"]: row for row in rows[start : start + len(_POLICIES)]}
        aware, robin = by_policy["prefix_aware"], by_policy["round_robin"]
        at = f"at {aware['cache_tokens']}"
        checks += [
            Check(f"hit_rate {at}", aware["hit_rate"], robin["hit_rate"], at_least=True),
            Check(f"queueing_p99_s {at}", aware["queueing_p99_s"], robin["queueing_p99_s"], at_least=False),
        ]
    results = {"requests": len(requests), "ideal_hit_rate": ideal_hit_rate(requests), "results": rows}
    finish(results, checks, **output)


if __name__ == "__main__":
    main()
