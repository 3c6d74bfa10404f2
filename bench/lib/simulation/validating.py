"""A real cluster and its simulation beside each other: the same requests, at unit costs that were measured before and after."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
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
from bench.lib.simulation.requests_way import BusyTime, ClusterPlan, SimulatedCluster, SimulatedLoad
from bench.lib.simulation.workload import SimulatedRequest, of_arrival, of_some_users
from bench.lib.stats import quantile
from bench.lib.targets import ServerUnderLoad, own_cluster, small_engines
from bench.lib.trace import Request
from launch.proxy.prefixes import read_prompt
from pd_cache.cluster import ClusterConfig, PrefillNode, ReferenceEngineConfig

_POOL = 256 << 20
_DEADLINE_S = 300.0
_IN_FLIGHT = 512
_SHORTER = 16.0
_LEAD_S = 0.5
_IDLE_S = 2.0
_WARM_UP, _WARM_UP_RATE = 8, 8.0
_SAMPLE_S, _WINDOW_S = 0.02, 0.25
_BUSY = 0.5
"""How much of what the cluster can do the steady load asks for."""
_QUANTITIES = ("requests_per_s", "hit_tokens", "ttft_p50_ms", "ttft_p90_ms", "core_seconds")


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
    hit_tokens: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    core_seconds: float
    """Of all processes of the cluster and of what sends the requests: what the machine had to do, however busy it was otherwise."""
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
    """Cores that other programs took meanwhile, on the average."""
    late_ms: float
    """How long a thread that should run waited for a core, on the average."""

    def ratios(self) -> dict[str, float]:
        """Returns simulated / real of each quantity."""
        return {
            name: getattr(self.simulated, name) / real if (real := getattr(self.real, name)) else 1.0
            for name in _QUANTITIES
        }


def figures(outcomes: Sequence[RequestOutcome], core_seconds: float) -> LoadFigures:
    """Returns a load's figures."""
    answered = [one for one in outcomes if not one.error and one.first is not None]
    firsts = [one.first or 0.0 for one in answered]
    began = min(one.due for one in outcomes)
    seconds = max((one.due + one.last for one in answered), default=began) - began or 1e-9
    return LoadFigures(
        requests_per_s=len(answered) / seconds,
        hit_tokens=sum(one.cached or 0 for one in answered),
        ttft_p50_ms=quantile(firsts, 0.5) * 1e3,
        ttft_p90_ms=quantile(firsts, 0.9) * 1e3,
        core_seconds=core_seconds,
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

    def warm_up(self, trace: Sequence[Request], seed: int) -> None:
        """Sends a few requests, for what is slow only once."""
        self.real(self.arrivals(trace[:_WARM_UP], _WARM_UP_RATE, seed))

    def costs(self) -> UnitCosts:
        """Measures everything once."""
        steps = self._stepper.measure()
        pool = measure_pool(self._master, self._pool_pids)
        services = measure_services(self._target, self._server.pids, steps, pool, self.shape)
        return together(steps, pool, services, self.shape, self._idle())

    def _idle(self) -> float:
        """Returns how many cores the cluster takes, and this process as it watches, while no requests come."""
        roots = {"self": os.getpid()}
        before, since = core_seconds(roots)["self"], time.monotonic()
        with OtherPrograms(since):
            time.sleep(_IDLE_S)
        return (core_seconds(roots)["self"] - before) / (time.monotonic() - since)

    def arrivals(self, trace: Sequence[Request], rate: float, seed: int) -> list[Arrival]:
        """Returns the trace's requests, sixteen times shorter, at random times. Loads of different seeds share no prompt."""
        times = poisson(rate, len(trace), random.Random(seed))
        others = [
            msgspec.structs.replace(one, hash_ids=[block + (seed << 32) for block in one.hash_ids]) for one in trace
        ]
        return from_trace(others, times, _SHORTER, self._server.longest)

    def real(self, arrivals: Sequence[Arrival]) -> RealLoad:
        """Sends them."""
        start = time.monotonic() + _LEAD_S
        roots = {"self": os.getpid()}  # and all nodes, which are its children
        before = core_seconds(roots)["self"]
        with OtherPrograms(start) as others:
            load = asyncio.run(generate(self._target, arrivals, start))
        used = core_seconds(roots)["self"] - before
        return RealLoad(load.outcomes, used, others.threads(), others.cores())

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

    def compare(self, arrivals: Sequence[Arrival], costs: UnitCosts, real: RealLoad) -> tuple[LoadFigures, LoadFigures]:
        """Returns the real figures and the simulated ones.

        Beside them, other programs want cores in the simulation as they did in reality, so many times as much as explains the core seconds
        that these took in reality.
        """
        requests, idle = self.requests(arrivals), costs.machine.idle_cores

        def load(factor: float) -> SimulatedLoad:
            others = [
                BusyTime(max(0.0, since), factor * threads + idle, wake_s) for since, threads, wake_s in real.others
            ]
            return SimulatedCluster(self._plan._replace(others=others), costs).run(requests)

        def taken(factor: float) -> float:
            one = load(factor)
            return one.taken_by_others / one.seconds

        factor = root_of(taken, real.others_cores + idle, 0.0, 8.0)
        simulated = load(factor)
        ours = simulated.core_seconds + idle * simulated.seconds
        return figures(real.outcomes, real.core_seconds), figures(simulated.outcomes, ours)


class RealLoad(NamedTuple):
    """What became of a load, and what else the machine did."""

    outcomes: list[RequestOutcome]
    core_seconds: float
    others: list[BusyTime]
    others_cores: float
    """How many cores these took, on the average."""


class OtherPrograms:
    """Watches what other programs take of this machine, while its block runs: a thread reads the kernel's counters."""

    def __init__(self, start: float) -> None:
        """`start` is the `time.monotonic()` from which seconds count."""
        self._start = start
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-others", daemon=True)
        self._windows: list[_Window] = []

    def __enter__(self) -> OtherPrograms:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def threads(self) -> list[BusyTime]:
        """Returns, for each window, how many threads of other programs wanted a core, on the average: their share of all that did, if they
        got what they got in the same way as ours. And how late this one was woken."""
        return [
            BusyTime(
                window.begun, window.runnable * window.others / max(window.others + window.ours, 1e-9), window.late
            )
            for window in self._windows
        ]

    def cores(self) -> float:
        """Returns how many cores other programs took, on the average, from the start on."""
        some = [window for window in self._windows if window.begun >= 0] or self._windows
        return sum(window.others for window in some) / max(1, len(some))

    def _watch(self) -> None:
        roots = {"self": os.getpid()}  # and all nodes, which are its children
        cores = os.cpu_count() or 1
        before, since, ours = machine_seconds(), time.monotonic(), core_seconds(roots)["self"]
        runnable: list[int] = []
        late: list[float] = []
        asleep = time.monotonic()
        while not self._stop.wait(_SAMPLE_S):
            late.append(max(0.0, time.monotonic() - asleep - _SAMPLE_S))
            runnable.append(runnable_threads() - 1)
            asleep = time.monotonic()
            if time.monotonic() - since < _WINDOW_S:
                continue
            machine, now, own = machine_seconds(), time.monotonic(), core_seconds(roots)["self"]
            mine = (own - ours) / (now - since)
            others = min(cores, max(0.0, (machine - before) / (now - since) - mine))
            self._windows.append(
                _Window(since - self._start, statistics.fmean(runnable), mine, others, statistics.median(late))
            )
            before, since, ours, runnable, late = machine, now, own, [], []
            asleep = time.monotonic()


class _Window(NamedTuple):
    begun: float
    runnable: float
    ours: float
    """Cores."""
    others: float
    late: float
    """Seconds that a thread waited for a core after it should have been awake, the median."""


def runnable_threads() -> int:
    """Returns how many threads of this machine run or want a core, the caller's among them."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


def root_of(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Returns where a function that rises comes to `wanted`, within a fiftieth of it; an end if it never does."""
    if wanted <= rising(low):
        return low
    for _ in range(10):
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


def whole_conversations(trace: Sequence[Request], requests: int) -> list[Request]:
    """Returns about so many requests of a trace, of a few users who come with all that they say: prompts that share their beginnings."""
    share = requests / len(trace)
    while len(some := of_some_users(trace, share)) < requests and share < 1:
        share *= 1.2
    return some[:requests]


def validate(count: EngineCount, trace: Sequence[Request], rounds: int, seed: int, told: Callable[[str], None]) -> tuple[list[ComparedLoad], UnitCosts]:  # fmt: skip
    """Compares `rounds` bursts and as many steady loads. Costs are measured before and after each, and their mean is simulated.

    Returns the comparisons and the mean costs of all measurements.
    """
    compared, every = [], []
    with workbench(count) as bench:
        told(f"{count}: costs")
        bench.warm_up(trace, seed)
        every.append(bench.costs())
        for number in range(rounds):
            rate = 1000.0
            for load in ("burst", "steady"):
                told(f"{count}: round {number + 1}, {load}")
                arrivals = bench.arrivals(trace, rate, seed + 1)
                seed += 1
                sent = bench.real(arrivals)
                every.append(bench.costs())
                real, simulated = bench.compare(arrivals, mean_costs(every[-2:]), sent)
                late_ms = 1e3 * statistics.fmean(one.wake_s for one in sent.others) if sent.others else 0.0
                compared.append(
                    ComparedLoad(str(count), load, number + 1, rate, real, simulated, sent.others_cores, late_ms)
                )
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
