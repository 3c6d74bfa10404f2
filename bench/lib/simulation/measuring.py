"""Measures unit costs on this machine: core seconds of the processes of a real cluster, and of an engine's steps.

Core seconds, not time: what else the machine does makes things late, but hardly costs our processes more of them. Each figure is a
difference between loads that differ in one thing, divided by how often; see `docs/benchmarking.md`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from bench.lib.arrivals import Arrival, Part
from bench.lib.load import Destination, generate
from bench.lib.shrunken import ShrunkenCache
from bench.lib.simulation.costs import (
    DecodeCosts,
    EngineShape,
    MachineCosts,
    PoolCosts,
    PrefillCosts,
    ServiceCosts,
    UnitCosts,
)
from bench.lib.trace import BLOCK_TOKENS
from launch.engines.reference.model import PagedModel, StepPart, load_model
from launch.proxy.prefixes import RoutedPrompt
from launch.proxy.routing import NodePool, Target
from pd_cache.blocks import Slots
from pd_cache.cluster import ReferenceEngineConfig
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.engine import CacheEngine, CacheEngineBuilder
from pd_cache.tokens import CacheMetadata
from transfer.settings import ByteSize, TransferSettings

_OPEN_S = 30.0
_DEADLINE_S = 120.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
REPEATS = 9
"""How often each of an engine's steps is timed."""
LEAST_S = 0.25
"""Core seconds for each figure of the pool."""
_SMALL, _LARGE = 8 << 10, 512 << 10
_FEW, _MANY = 2, 32


# --- core seconds ----------------------------------------------------------------------------------------------------


def core_seconds(roots: Mapping[str, int], *, exact: bool = False) -> dict[str, float]:
    """Returns the core seconds that each process, by name, and its descendants have used so far.

    They are counted in hundredths. `exact` counts nanoseconds, which takes longer, and leaves threads out that have ended.
    """
    parent: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parent[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = (int(fields[11]) + int(fields[12])) * _TICK_S
    names = {pid: name for name, pid in roots.items()}
    total = dict.fromkeys(roots, 0.0)
    for pid, seconds in used.items():
        above: int | None = pid
        while above and above not in names:
            above = parent.get(above)
        if above:
            total[names[above]] += _of_threads(pid) if exact else seconds
    return total


def _of_threads(pid: int) -> float:
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(file.read_text().split()[0])
        except OSError:
            continue  # the thread has ended
    return total * 1e-9


def machine_seconds() -> float:
    """Returns the core seconds that all processes of this machine have used so far."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = (int(field) for field in fields[:8])
    return (user + nice + system + interrupts + soft + stolen) * _TICK_S


def nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Returns the factors, none of them negative, with which the columns of `rows` come nearest to `values`, relatively."""
    weights = 1 / np.maximum(np.abs(np.array(values, dtype=float)), 1e-9)
    matrix, wanted = np.array(rows, dtype=float) * weights[:, None], np.array(values, dtype=float) * weights
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(np.sum(wanted**2))
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            scale = np.maximum(np.abs(matrix[:, chosen]).max(axis=0), 1e-300)
            factors = np.linalg.lstsq(matrix[:, chosen] / scale, wanted, rcond=None)[0] / scale
            error = float(np.sum((matrix[:, chosen] @ factors - wanted) ** 2))
            if (factors >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(columns), error
                best[list(chosen)] = factors
    return [float(factor) for factor in best]


# --- an engine's steps -----------------------------------------------------------------------------------------------


class StepCosts(NamedTuple):
    """What an engine's steps cost."""

    prefill: PrefillCosts
    decode: DecodeCosts
    crowded: float


class Stepper:
    """A model of the reference engine in this process, to time its steps."""

    def __init__(self, config: ReferenceEngineConfig) -> None:
        self._config = config
        torch.set_num_threads(1)
        self._model: PagedModel = load_model(config)
        self.layout = self._model.kv.layout

    def measure(self) -> StepCosts:
        """Returns the median costs of steps of several sizes."""
        step = self._config.step_tokens
        prefill = [(step, 0), (step, 4 * step), (step // 4, 0), (step // 8, 4 * step), (16, step)]
        decode = [(1, 2 * step), (4, 2 * step), (8, 2 * step), (1, 6 * step), (8, 6 * step)]
        first = [self._prefill(*one) for one in prefill]
        factors = nonnegative([(1.0, n, n * (p + n / 2)) for n, p in prefill], first)
        tokens = [self._decode(*one) for one in decode]
        per_token = nonnegative([(1.0, b, b * context) for b, context in decode], tokens)
        return StepCosts(
            PrefillCosts(step_s=factors[0], token_s=factors[1], context_s=factors[2]),
            DecodeCosts(step_s=per_token[0], sequence_s=per_token[1], context_s=per_token[2]),
            self._crowded(),
        )

    def _prefill(self, tokens: int, position: int) -> float:
        blocks = range((position + tokens) // self._config.block_size + 1)
        return self._median([StepPart([7] * tokens, position, list(blocks), True)])

    def _decode(self, batch: int, context: int) -> float:
        each = context // self._config.block_size + 1
        return self._median([StepPart([7], context, range(i * each, (i + 1) * each), True) for i in range(batch)])

    def _median(self, parts: Sequence[StepPart]) -> float:
        times = []
        for _ in range(REPEATS):
            start = time.thread_time()
            self._model.step(parts)
            times.append(time.thread_time() - start)
        return float(np.median(times))

    def _crowded(self) -> float:
        """Returns how many times as long a step takes while another thread computes, too."""
        step = self._config.step_tokens
        other, stop = load_model(self._config), threading.Event()
        parts = [StepPart([7] * step, 0, list(range(step // self._config.block_size + 1)), True)]

        def compute() -> None:
            while not stop.is_set():
                other.step(parts)

        ratios = []
        for _ in range(REPEATS // 2 + 1):
            alone = self._prefill(step, 0)
            stop.clear()
            thread = threading.Thread(target=compute)
            thread.start()
            try:
                ratios.append(self._prefill(step, 0) / alone)
            finally:
                stop.set()
                thread.join()
        return max(1.0, float(np.median(ratios)))


# --- the pool --------------------------------------------------------------------------------------------------------


class PoolFigures(NamedTuple):
    """What the pool's calls cost."""

    lookup: PoolCosts
    store: PoolCosts
    load: PoolCosts
    load_own: PoolCosts


class _Cost(NamedTuple):
    """Core seconds of one call."""

    caller: float
    master: float
    owner: float


@contextmanager
def _client(master: str, chunk_bytes: int, segment: int) -> Iterator[tuple[CacheEngine, ShrunkenCache]]:
    cache = ShrunkenCache(_MANY, chunk_bytes)
    settings = NodeSettings(
        master=master,
        cache=CacheConfig(chunk_size=BLOCK_TOKENS, hash_mode="blocks"),
        transfer=TransferSettings(staging_size=ByteSize(64 << 20)),
        segment_size=segment,
    )
    instance = f"scale-{uuid.uuid4().hex}"
    metadata = CacheMetadata.of(f"scale-{uuid.uuid4().hex}", cache.layout)
    engine = CacheEngineBuilder.get_or_create(instance, settings, metadata, cache.layout)
    try:
        engine.wait_available(_OPEN_S)
        yield engine, cache
    finally:
        CacheEngineBuilder.destroy(instance)


def measure_pool(master: str, pids: Mapping[str, int]) -> PoolFigures:
    """Measures lookups by number of keys, stores and loads by size and number. `pids` names the processes `master` and `owner`, the only
    one with memory in the pool."""
    found: dict[str, list[tuple[int, int, _Cost]]] = {"lookup": [], "store": [], "load": [], "load_own": []}
    for size in (_SMALL, _LARGE):
        with _client(master, size, 0) as (engine, cache):
            _moves(engine, cache, size, pids, {"load": found["load"]})
            if size == _SMALL:
                for keys in (1, _MANY, 8 * _MANY):
                    names = _names(keys)
                    found["lookup"].append((keys, 0, _per_call(lambda n=names: engine.lookup(n), pids)))  # type: ignore[misc]
        with _client(master, size, 96 << 20) as (engine, cache):
            _moves(engine, cache, size, pids, {"load_own": found["load_own"], "store": found["store"]})
    return PoolFigures(*(_fit(found[name], sized=name != "lookup") for name in PoolFigures._fields))


def _moves(
    engine: CacheEngine,
    cache: ShrunkenCache,
    size: int,
    pids: Mapping[str, int],
    into: Mapping[str, list[tuple[int, int, _Cost]]],
) -> None:
    blocks = list(range(_MANY))
    source, target = cache.fill(blocks), cache.target(_MANY)
    for count in (_FEW, _MANY):
        slots, into_slots = Slots(source[: count * BLOCK_TOKENS]), Slots(target[: count * BLOCK_TOKENS])
        if "store" in into:
            cost = _per_call(lambda: engine.store(_names(count), slots, kv_caches=cache.tensors), pids)  # noqa: B023
            into["store"].append((count, size, cost))
        names = _names(count)
        engine.store(names, slots, kv_caches=cache.tensors)
        for name, costs in into.items():
            if name != "store":
                loads = _per_call(lambda: engine.retrieve(names, into_slots, kv_caches=cache.tensors), pids)  # noqa: B023
                costs.append((count, size, loads))


def _names(count: int) -> list[bytes]:
    return [uuid.uuid4().bytes for _ in range(count)]


def _per_call(call: Callable[[], object], pids: Mapping[str, int]) -> _Cost:
    call()
    before, own, calls = core_seconds(pids, exact=True), time.process_time(), 0
    until = time.monotonic() + 4 * LEAST_S
    while calls < 8 or (time.process_time() - own < LEAST_S and time.monotonic() < until):
        call()
        calls += 1
    used, after = time.process_time() - own, core_seconds(pids, exact=True)
    return _Cost(used / calls, (after["master"] - before["master"]) / calls, (after["owner"] - before["owner"]) / calls)


def _fit(measured: Sequence[tuple[int, int, _Cost]], *, sized: bool) -> PoolCosts:
    rows = [(1.0, float(count), float(count * size)) for count, size, _ in measured]
    if not sized:
        rows = [row[:2] for row in rows]  # type: ignore[misc]
    caller = nonnegative(rows, [cost.caller for *_, cost in measured])
    master = nonnegative([row[:2] for row in rows], [cost.master for *_, cost in measured])
    owner = nonnegative([row[1:] for row in rows], [cost.owner for *_, cost in measured]) if sized else [0.0, 0.0]
    return PoolCosts(
        call_s=caller[0],
        object_s=caller[1],
        byte_s=caller[2] if sized else 0.0,
        master_s=master[0],
        master_object_s=master[1],
        owner_object_s=owner[0],
        owner_byte_s=owner[1],
    )


# --- proxy, nodes and client -----------------------------------------------------------------------------------------


class ServiceFigures(NamedTuple):
    """What requests cost apart from computing."""

    proxy: ServiceCosts
    node: ServiceCosts
    client: ServiceCosts
    prefill: PrefillCosts
    """Of the steps in a node."""


class _ServiceProbe(NamedTuple):
    """A load whose core seconds are counted."""

    requests: int
    tokens: int
    output: int


_SHORT, _LONG, _WORDY = _ServiceProbe(24, 16, 1), _ServiceProbe(12, 1024, 1), _ServiceProbe(6, 16, 96)
_MIDDLE = _ServiceProbe(16, 128, 1)


def measure_services(
    target: Destination, pids: Mapping[str, int], steps: StepCosts, pool: PoolFigures, shape: EngineShape
) -> ServiceFigures:
    """Sends loads to a cluster's proxy. `pids` has the processes `proxy`, and one or more `prefill…` and `decode…`."""
    roots = {**pids, "client": os.getpid()}
    used = {probe: _probe(target, probe, roots) for probe in (_SHORT, _WORDY, _MIDDLE, _LONG)}

    def between(who: str, more: _ServiceProbe, less: _ServiceProbe) -> float:
        return max(0.0, used[more][who] - used[less][who])

    words = _WORDY.output - _SHORT.output
    tokens = _LONG.tokens - _MIDDLE.tokens
    keys = _MIDDLE.tokens // shape.chunk_tokens
    asking = pool.lookup.call_s + pool.lookup.object_s * keys
    services = {}
    for who in ("proxy", "client"):
        token_s = between(who, _LONG, _MIDDLE) / tokens
        event_s = between(who, _WORDY, _SHORT) / words
        hop_s = between(who, _MIDDLE, _SHORT) - asking - token_s * (_MIDDLE.tokens - _SHORT.tokens)
        services[who] = ServiceCosts(
            request_s=max(0.0, used[_SHORT][who] - event_s),
            token_s=token_s,
            event_s=event_s,
            hop_s=max(0.0, hop_s) if who == "proxy" else 0.0,
            node_s=_choosing() if who == "proxy" else 0.0,
        )
    loading = (tokens // shape.chunk_tokens) * (
        pool.lookup.object_s + pool.load.object_s + pool.load.byte_s * shape.chunk_tokens * shape.kv_bytes_per_token
    )
    storing = (tokens // shape.chunk_tokens) * (
        pool.lookup.object_s + pool.store.object_s + pool.store.byte_s * shape.chunk_tokens * shape.kv_bytes_per_token
    )
    token_s = max(0.0, between("decode", _LONG, _MIDDLE) - loading) / tokens
    # what prompts cost in a node, where other threads and processes use the caches, and not by themselves
    computing = between("prefill", _LONG, _MIDDLE) - storing - token_s * tokens
    slower = computing / (prompt_seconds(steps.prefill, _LONG, shape) - prompt_seconds(steps.prefill, _MIDDLE, shape))
    context = _SHORT.tokens + words / 2
    each = steps.decode.step(1, context)
    event_s = max(0.0, between("decode", _WORDY, _SHORT) / words - each)
    request_s = used[_SHORT]["decode"] - prompt_seconds(steps.prefill, _SHORT, shape) - event_s
    node = ServiceCosts(request_s=max(0.0, request_s), token_s=token_s, event_s=event_s)
    prefill = steps.prefill.times(max(1.0, slower))
    return ServiceFigures(services["proxy"], node, services["client"], prefill)


def prompt_seconds(costs: PrefillCosts, probe: _ServiceProbe, shape: EngineShape) -> float:
    """Returns what computing a prompt costs, step by step."""
    total, position = 0.0, 0
    while position < probe.tokens:
        tokens = min(shape.step_tokens, probe.tokens - position)
        total += costs.step(tokens, position)
        position += tokens
    return total


def _probe(target: Destination, probe: _ServiceProbe, roots: Mapping[str, int]) -> dict[str, float]:
    """Returns the core seconds of a request, by process; of all nodes of a kind together. Sends one request after the other."""
    before = core_seconds(roots, exact=True)
    for _ in range(probe.requests):
        arrival = Arrival(0.0, (Part(random.getrandbits(62), probe.tokens),), probe.output)
        load = asyncio.run(generate(target, [arrival], time.monotonic()))
        if wrong := load.outcomes[0].error:
            raise RuntimeError(f"a request of a measurement failed: {wrong}")
    after = core_seconds(roots, exact=True)
    total: dict[str, float] = {}
    for name in roots:
        kind = next((kind for kind in ("prefill", "decode") if name.startswith(kind)), name)
        total[kind] = total.get(kind, 0.0) + (after[name] - before[name]) / probe.requests
    return total


def _choosing(nodes: int = 256) -> float:
    """Returns what one node more to choose from costs the proxy."""
    pool = NodePool("prefill", "prefix_aware")
    pool.update(Target(f"http://node-{number}:1") for number in range(nodes))
    prompt = RoutedPrompt(8192, [number.to_bytes(8, "big") for number in range(16)], 512)
    times = []
    for _ in range(50):
        start = time.thread_time()
        pool.pick(0.0, prompt)
        times.append(time.thread_time() - start)
    return float(np.median(times)) / nodes


def together(
    steps: StepCosts, pool: PoolFigures, services: ServiceFigures, shape: EngineShape, idle_cores: float
) -> UnitCosts:
    """Returns everything that was measured."""
    return UnitCosts(
        machine=MachineCosts(cores=float(len(os.sched_getaffinity(0))), crowded=steps.crowded, idle_cores=idle_cores),
        engine=shape,
        decode=steps.decode,
        **services._asdict(),
        **pool._asdict(),
    )


def mean_costs(several: Sequence[UnitCosts]) -> UnitCosts:
    """Returns the mean of each cost, of several measurements."""
    trees = [msgspec.to_builtins(one) for one in several]
    mean = {
        section: {
            key: type(value)(sum(tree[section][key] for tree in trees) / len(trees)) for key, value in costs.items()
        }
        for section, costs in trees[0].items()
    }
    return msgspec.convert(mean, UnitCosts)
