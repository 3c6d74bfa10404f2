"""A real cluster and its simulation beside each other: the same requests, at unit costs that were measured before and after."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgspec

from bench.lib.arrivals import Arrival, from_trace, poisson, prompt_ids
from bench.lib.load import Destination, RequestOutcome, generate
from bench.lib.pool import watched_pool
from bench.lib.simulation.costs import EngineShape, UnitCosts
from bench.lib.simulation.measuring import (
    Stepper,
    core_seconds,
    machine_seconds,
    mean_costs,
    measure_pool,
    measure_services,
    together,
)
from bench.lib.simulation.requests_way import ClusterPlan, SimulatedCluster, SimulatedLoad
from bench.lib.simulation.workload import SimulatedRequest, of_arrival
from bench.lib.stats import quantile
from bench.lib.targets import ServerUnderLoad, own_cluster, small_engines
from bench.lib.trace import Request
from launch.proxy.prefixes import read_prompt
from pd_cache.cluster import ClusterConfig, PrefillNode, ReferenceEngineConfig

_POOL = 256 << 20
_DEADLINE_S = 300.0
_IN_FLIGHT = 512
_SHORTER = 16.0
_BUSY = 0.5
"""How much of what the cluster can do the steady load asks for."""
_QUANTITIES = ("requests_per_s", "output_tokens_per_s", "hit_tokens", "ttft_p50_ms", "ttft_p90_ms")


class EngineCount(NamedTuple):
    """How many engines a cluster has, beside a master and a proxy."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}x{self.decode}"

    @property
    def processes(self) -> int:
        return self.prefill + self.decode + 2


class LoadFigures(msgspec.Struct):
    """What a load comes to, real or simulated."""

    requests_per_s: float
    output_tokens_per_s: float
    hit_tokens: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    failed: int


class ComparedLoad(msgspec.Struct):
    """A real load and its simulation."""

    cluster: str
    load: str
    """`burst`: all at once, so that the cluster is full. `steady`: at half the rate that it can do."""
    round: int
    rate: float
    """Requests a second, on the average."""
    real: LoadFigures
    simulated: LoadFigures
    others: float
    """Threads of other programs that always wanted a core meanwhile."""

    def ratios(self) -> dict[str, float]:
        """Returns simulated / real of each quantity."""
        return {
            name: getattr(self.simulated, name) / real if (real := getattr(self.real, name)) else 1.0
            for name in _QUANTITIES
        }


def figures(outcomes: Sequence[RequestOutcome]) -> LoadFigures:
    """Returns a load's figures."""
    answered = [one for one in outcomes if not one.error and one.first is not None]
    firsts = [one.first or 0.0 for one in answered]
    began = min(one.due for one in outcomes)
    seconds = max((one.due + one.last for one in answered), default=began) - began or 1e-9
    return LoadFigures(
        requests_per_s=len(answered) / seconds,
        output_tokens_per_s=sum(one.tokens for one in answered) / seconds,
        hit_tokens=sum(one.cached or 0 for one in answered),
        ttft_p50_ms=quantile(firsts, 0.5) * 1e3,
        ttft_p90_ms=quantile(firsts, 0.9) * 1e3,
        failed=len(outcomes) - len(answered),
    )


class Workbench:
    """A real cluster, and what measures it."""

    def __init__(self, server: ServerUnderLoad, config: ClusterConfig, count: EngineCount, stack: ExitStack) -> None:
        assert isinstance(config.engine, ReferenceEngineConfig)
        self.count = count
        self._server = server
        self._engine = config.engine
        self._stepper = Stepper(config.engine)
        self._master, self._pool_pids = stack.enter_context(watched_pool(_POOL))
        self._pool_pids["owner"] = self._pool_pids.pop("store")
        self._target = Destination(
            server.url, server.model, server.vocabulary, _DEADLINE_S, _IN_FLIGHT, hands_over=True
        )
        layout = self._stepper.layout
        tokens = config.cache.chunk_tokens
        self.shape = EngineShape(
            chunk_tokens=tokens,
            kv_bytes_per_token=layout.chunk_bytes(tokens) // tokens,
            kv_tokens=config.engine.num_blocks * config.engine.block_size,
            step_tokens=config.engine.step_tokens,
            max_running=config.engine.max_running,
            max_queue=config.engine.max_queue,
        )
        memory = sum(int(node.segment_size or 0) for node in config.nodes if isinstance(node, PrefillNode))
        self._plan = ClusterPlan(
            count.prefill,
            count.decode,
            pool_chunks=memory // (tokens * self.shape.kv_bytes_per_token),
            proxy=config.proxy,
            one_machine=True,
            grain=1,
            decode_memory=False,
        )

    def costs(self) -> UnitCosts:
        """Measures everything once."""
        steps = self._stepper.measure()
        pool = measure_pool(self._master, self._pool_pids)
        services = measure_services(self._target, self._server.pids, steps, pool, self.shape)
        return together(steps, pool, services, self.shape)

    def arrivals(self, trace: Sequence[Request], rate: float, seed: int) -> list[Arrival]:
        """Returns the trace's requests, sixteen times shorter, at random times. Loads of different seeds share no prompt."""
        times = poisson(rate, len(trace), random.Random(seed))
        others = [
            msgspec.structs.replace(one, hash_ids=[block + (seed << 32) for block in one.hash_ids]) for one in trace
        ]
        return from_trace(others, times, _SHORTER, self._server.longest)

    def real(self, arrivals: Sequence[Arrival]) -> tuple[list[RequestOutcome], float, float]:
        """Sends them. Returns the outcomes, the core seconds of all other programs, and how long it took."""
        roots = {"self": os.getpid()}  # and all nodes, which are its children
        before, ours = machine_seconds(), core_seconds(roots)
        start = time.monotonic()
        load = asyncio.run(generate(self._target, arrivals, start + 0.5))
        seconds = time.monotonic() - start
        others = machine_seconds() - before - (core_seconds(roots)["self"] - ours["self"])
        return load.outcomes, max(0.0, others), seconds

    def requests(self, arrivals: Sequence[Arrival]) -> list[SimulatedRequest]:
        """Returns the same requests for the simulation, with what the proxy makes of their text."""
        return [
            of_arrival(
                one,
                self.shape.chunk_tokens,
                read_prompt(msgspec.json.encode(prompt_ids(one.prompt, self._server.vocabulary))),
            )
            for one in arrivals
        ]

    def simulated(self, requests: Sequence[SimulatedRequest], costs: UnitCosts, others: float) -> SimulatedLoad:
        """Returns what the simulation makes of the requests beside `others` threads of other programs."""
        return SimulatedCluster(self._plan._replace(others=others), costs).run(requests)

    def compare(self, arrivals: Sequence[Arrival], costs: UnitCosts, outcomes: Sequence[RequestOutcome], others_a_second: float) -> tuple[LoadFigures, LoadFigures, float]:  # fmt: skip
        """Returns the real figures and the simulated ones, and how many threads of other programs explain the core seconds that those
        took."""
        requests = self.requests(arrivals)

        def taken(threads: float) -> float:
            load = self.simulated(requests, costs, threads)
            return load.taken_by_others / load.seconds

        threads = root_of(taken, others_a_second, 0.0, 64.0)
        return figures(outcomes), figures(self.simulated(requests, costs, threads).outcomes), threads


def root_of(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Returns where a function that rises comes to `wanted`, within a fiftieth of it; an end if it never does."""
    if wanted <= rising(low):
        return low
    for _ in range(12):
        middle = (low + high) / 2 if low else high / 4
        value = rising(middle)
        if abs(value - wanted) <= 0.02 * wanted:
            return middle
        low, high = (middle, high) if value < wanted else (low, middle)
        if high < 1e-3:
            break
    return (low + high) / 2


@contextmanager
def workbench(count: EngineCount) -> Iterator[Workbench]:
    """Yields a running cluster of so many engines of the reference kind."""
    config = small_engines(count.prefill, count.decode)
    with ExitStack() as stack:
        server = stack.enter_context(own_cluster(None, config))
        yield Workbench(server, config, count, stack)


def validate(count: EngineCount, trace: Sequence[Request], rounds: int, seed: int, told: Callable[[str], None]) -> tuple[list[ComparedLoad], UnitCosts]:  # fmt: skip
    """Compares `rounds` bursts and as many steady loads. Costs are measured before and after each, and their mean is simulated.

    Returns the comparisons and the mean costs of all measurements.
    """
    compared, every = [], []
    with workbench(count) as bench:
        told(f"{count}: costs")
        bench.costs()  # a first time, for what is slow only once
        every.append(bench.costs())
        for number in range(rounds):
            rate = 1000.0
            for load in ("burst", "steady"):
                told(f"{count}: round {number + 1}, {load}")
                arrivals = bench.arrivals(trace, rate, seed + 1)
                seed += 1
                outcomes, others, seconds = bench.real(arrivals)
                every.append(bench.costs())
                costs = mean_costs(every[-2:])
                real, simulated, threads = bench.compare(arrivals, costs, outcomes, others / seconds)
                compared.append(ComparedLoad(str(count), load, number + 1, rate, real, simulated, threads))
                rate = _BUSY * real.requests_per_s
    return compared, mean_costs(every)


def spread(compared: Sequence[ComparedLoad]) -> list[tuple[str, str, str, float, float, float]]:
    """Returns cluster, load, quantity, and of simulated / real the median over the rounds, the least and the most."""
    rows = []
    for cluster, load in dict.fromkeys((one.cluster, one.load) for one in compared):
        some = [one.ratios() for one in compared if (one.cluster, one.load) == (cluster, load)]
        for name in _QUANTITIES:
            ratios = [ratio[name] for ratio in some]
            rows.append((cluster, load, name, statistics.median(ratios), min(ratios), max(ratios)))
    return rows
