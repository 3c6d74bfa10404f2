"""Which policy finds most in the nodes' own caches? Reports `hit_rate` and queueing times, in comparison with
round robin and an oracle, in simulation.

The router is the proxy's own (`launch/proxy/routing/`), with simulated time. A simulated prefill node
computes one prompt after the other, at a steady rate of tokens that its cache lacks; its cache is an LRU.
`bench/lib/trace.py` describes the format of traces, `agent_trace` the synthetic one.

- `round_robin`, `least_loaded`: the proxy's policies of these names.
- `guess`: `prefix_aware` without events, if nodes do not report how large their caches are. The proxy then
  assumes a million tokens.
- `guess_of_size`: the same, if nodes report the size.
- `events`: `prefix_aware` with the nodes' KV events, which arrive 0.1 s after the prompt was computed.
- `oracle`: the same cost, but the router looks into every cache and queue at the moment of its choice.

    pd-cache bench routing [--trace FILE] --json
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, get_args

import click

from bench.lib.report import (
    Check,
    Rows,
    at_least,
    at_most,
    file_type,
    finish,
    option,
    output_options,
    tracked,
)
from bench.lib.simulation.clock import Happening, Process, SimulatedTime
from bench.lib.stats import quantile
from bench.lib.trace import BLOCK_TOKENS, Request, SimulatedLru, hit_rate_of, read_trace
from launch.proxy.events import KnownCache
from launch.proxy.routing.node_pool import NodePool, Policy
from launch.proxy.routing.prefixes import NamedPrompt, RoutedPrompt
from pd_cache.cluster import Capacity, NodeRecord
from pd_cache.events import EventBatch, KvEvent, RemovedEvent, StoredEvent

Router = Literal["round_robin", "least_loaded", "guess", "guess_of_size", "events", "oracle"]
_SPACE = "0" * 16
_AGENTS, _NODES, _RATE = 400, 4, 12_000.0
"""Sessions of the synthetic trace; prefill nodes; tokens/s of a node."""
_CACHES = (500_000, 1_000_000, 2_000_000, 8_000_000)
"""Tokens that a node's own cache holds."""
_LAG_S = 0.1
"""The time until an event reaches the router."""

_SYSTEM_TOKENS = 22 * BLOCK_TOKENS
_TASK_TOKENS = 1_014
_TURNS_MEDIAN, _TURNS_P90 = 30, 57
_GROWTH_MEAN, _GROWTH_SIGMA = 2_242, 1.0
_ANSWER_TOKENS = 522
_PAUSE_S = (5.2, 81.4)
_LONGEST = 200_000
"""The longest context of an agent, in tokens; the 99th percentile of the published contexts is about
181,000."""
_P90 = 1.2816
"""The 90th percentile of the normal distribution."""


# --- nodes and a router -------------------------------------------------------------------------------------


class PolicyOutcome(NamedTuple):
    """The outcome of a trace under a policy."""

    hit_rate: float
    queueing: list[float]
    """The queueing time of each request, in seconds."""


class _SimulatedNode:
    def __init__(self, cache_tokens: int) -> None:
        self.cache = SimulatedLru(cache_tokens // BLOCK_TOKENS)
        self.last = Happening()
        """Happens when the node's last prompt is computed."""
        self.last.happen()

    def take_in(self, blocks: Sequence[int]) -> tuple[int, list[KvEvent]]:
        """Takes a prompt into the cache. Returns how many of its blocks were there, and the cache's
        events."""
        came, events = [block for block in blocks if block not in self.cache], list[KvEvent]()
        found = self.cache.use(blocks)
        if came:
            events.append(StoredEvent([*came], block_size=BLOCK_TOKENS, medium="GPU"))
        if self.cache.gone:
            events.append(RemovedEvent([*self.cache.gone], "GPU"))
        return found, events


def simulate(
    requests: Iterable[Request], router: Router, nodes: int, cache_tokens: int, rate: float = _RATE
) -> PolicyOutcome:
    """Lets `nodes` nodes of `rate` tokens/s each compute the trace."""
    policy: Policy = router if router in ("round_robin", "least_loaded") else "prefix_aware"
    pool = NodePool("prefill", policy, rng=Random(0))
    size = 0 if router == "guess" else cache_tokens
    capacity = Capacity(kv_tokens=size)
    pool.update(
        NodeRecord(name=url, role="prefill", address=url, capacity=capacity) for url in map(str, range(nodes))
    )
    fleet = {url: _SimulatedNode(cache_tokens) for url in pool.nodes}
    known: dict[str, KnownCache] = {}
    if router in ("events", "oracle"):
        for url, node in fleet.items():
            known[url] = cache = KnownCache(lambda: sys.maxsize)
            cache.fingerprint = _SPACE
            cache.ranks[0].apply([EventBatch(0.0, [])])
            if router == "oracle":  # the router looks into the cache itself
                cache.ranks[0]._sets["GPU"] = node.cache  # type: ignore[assignment]
        pool.know(known)
    time, queueing = SimulatedTime(), list[float]()
    hit = total = 0

    def compute(url: str, request: Request, prompt: RoutedPrompt) -> Process:
        nonlocal hit, total
        arrived, node = time.now, fleet[url]
        with pool.working(url, prompt):
            yield node.last
            queueing.append(time.now - arrived)
            there, events = node.take_in(request.whole_blocks)
            found = there * BLOCK_TOKENS
            hit, total = hit + found, total + request.input_length
            yield time.after((request.input_length - found) / rate)
            if router == "events":
                apply = partial(known[url].ranks[0].apply, [EventBatch(time.now, events)])
                time.call_at(time.now + _LAG_S, apply)

    def arrive() -> Process:
        for request in requests:
            yield time.after(request.timestamp / 1000 - time.now)
            named = NamedPrompt(_SPACE, request.input_length, request.whole_blocks, BLOCK_TOKENS)
            prompt = RoutedPrompt(request.input_length, request.whole_blocks, BLOCK_TOKENS, named)
            url = pool.pick(time.now, prompt)
            assert url is not None
            fleet[url].last = time.start(compute(url, request, prompt))

    time.start(arrive())
    time.run()
    assert not any(node.load for node in pool.nodes.values()), "work was not given back"
    return PolicyOutcome(hit / total, queueing)


def compare(
    workload: str,
    requests: list[Request],
    routers: Iterable[Router],
    nodes: int,
    cache_tokens: int,
    rate: float = _RATE,
) -> tuple[Rows, list[Check]]:
    """Returns a row for each router, and targets."""
    rows: dict[Router, dict[str, Any]] = {}
    ideal = hit_rate_of(requests, SimulatedLru())
    for router in routers:
        hit_rate, queueing = simulate(requests, router, nodes, cache_tokens, rate)
        rows[router] = {
            "policy": router,
            "workload": workload,
            "requests": len(requests),
            "ideal": ideal,
            "nodes": nodes,
            "cache_tokens": cache_tokens,
            "hit_rate": hit_rate,
            "queueing_mean_s": statistics.fmean(queueing),
            "queueing_p99_s": quantile(queueing, 0.99),
        }
    checks = []
    if rows.keys() >= {"events", "oracle", "round_robin"}:
        events, oracle, robin = (rows[router] for router in ("events", "oracle", "round_robin"))
        at = f"{workload}, {nodes} nodes, {cache_tokens} tokens"
        share = events["hit_rate"] / max(1e-9, oracle["hit_rate"])
        checks += [
            at_least(f"hits of the oracle's, {at}", share, 0.95),
            at_least(f"hit_rate, {at}", events["hit_rate"], robin["hit_rate"]),
            at_most(f"queueing_p99_s, {at}", events["queueing_p99_s"], robin["queueing_p99_s"]),
        ]
    return [*rows.values()], checks


# --- traces -------------------------------------------------------------------------------------------------


def agent_trace(sessions: int) -> list[Request]:
    """Returns the requests of `sessions` agents, in the order of their times. The sessions begin within an
    hour.

    A synthetic trace of coding agents: many turns, one system prompt for all, and a tool's result in each
    turn. The numbers are those of 610 sessions of Codex with GPT-5.4 on SWE-bench Pro, as their publisher
    gives them (https://huggingface.co/datasets/Inferact/codex_swebenchpro_traces, "Per-Trial Statistics", and
    figure 1 of vLLM's article of 2026-05-06, "Serving Agentic Workloads at Scale with vLLM x Mooncake"):

    - calls of a session: 30 in the median, 57 at the 90th percentile, 33 in the mean;
    - context at the first call: 12,278 tokens in the median and 13,744 at the 99th percentile. That it varies
      so little says that most of it is the same in all sessions. How much is not published; we take 11,264
      tokens, and a task of 1,014;
    - growth per call: 2,242 tokens in the mean (the answer and the tool's result), which makes 80,488 tokens
      at the last call in the median;
    - an answer: 17,239 / 33 = 522 tokens in the mean;
    - time from one call to the next: 5.2 to 81.4 s, here evenly on a logarithmic scale.

    Turns and growth are log-normal. Sessions begin at random, evenly over the trace.
    """
    rng, fresh = Random(0), count(_SYSTEM_TOKENS // BLOCK_TOKENS)
    system = list(range(_SYSTEM_TOKENS // BLOCK_TOKENS))
    sigma = math.log(_TURNS_P90 / _TURNS_MEDIAN) / _P90
    requests: list[Request] = []
    for _ in range(sessions):
        now, tokens = rng.uniform(0, 3600), _SYSTEM_TOKENS + _TASK_TOKENS
        blocks = list(system)
        for _ in range(max(1, round(rng.lognormvariate(math.log(_TURNS_MEDIAN), sigma)))):
            while len(blocks) < tokens // BLOCK_TOKENS:
                blocks.append(next(fresh))
            rest = [next(fresh)] if tokens % BLOCK_TOKENS else []  # a new block when it is full
            requests.append(Request(now * 1000, tokens, [*blocks, *rest], _ANSWER_TOKENS))
            growth = rng.lognormvariate(math.log(_GROWTH_MEAN) - _GROWTH_SIGMA**2 / 2, _GROWTH_SIGMA)
            tokens += _ANSWER_TOKENS // 2 + round(max(0.0, growth - _ANSWER_TOKENS // 2))
            if tokens > _LONGEST:
                break
            now += math.exp(rng.uniform(*map(math.log, _PAUSE_S)))
    return sorted(requests, key=lambda request: request.timestamp)


@click.command()
@option("--trace", type=file_type, help="A trace to route besides the synthetic trace.")
@output_options
def main(trace: Path | None, **output: Any) -> None:
    """Policies on traces, in simulation."""
    workloads = {"agents": agent_trace(_AGENTS)}
    if trace is not None:
        workloads[trace.name.split(".")[0].split("_")[0]] = read_trace(trace)
    rows: Rows = []
    checks: list[Check] = []
    for cache in tracked(_CACHES, "caches"):
        for name, requests in workloads.items():
            more_rows, more_checks = compare(name, requests, get_args(Router), _NODES, cache)
            rows += more_rows
            checks += more_checks
    finish({"results": rows}, checks, **output)
