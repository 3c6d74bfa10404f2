"""A request's way through a simulated cluster: `launch/proxy/completions.py` in simulated time, with the proxy's own policies."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from bench.lib.load import RequestOutcome
from bench.lib.simulation.clock import Happening, Process, SimulatedTime, all_of, first_of
from bench.lib.simulation.computing import Generating, SimulatedEngine
from bench.lib.simulation.costs import PoolCosts, UnitCosts
from bench.lib.simulation.resources import Gate, SerialThread, SharedCapacity
from bench.lib.simulation.stored import SimulatedPool, placed
from bench.lib.simulation.workload import SimulatedRequest
from launch.engines.reference.cache import FIRST_POLL_S, LONGEST_POLL_S
from launch.engines.reference.scheduler import STORE_THREADS
from launch.proxy.admission import Admission
from launch.proxy.answers import ApiError
from launch.proxy.attempts import Attempts, Trial
from launch.proxy.budget import RetryBudget
from launch.proxy.direct import LOOKUP_THREADS, LOOKUP_TIMEOUT_S, MAX_WAITING, needs_no_prefill
from launch.proxy.routing import NodePool, Target
from pd_cache.cluster import HandoffConfig, ProxyConfig
from pd_cache.epochs import FIRST
from pd_cache.groups import LayerGroups
from pd_cache.lookup.prefix import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import ChunkedTokenDatabase, Namespace

_WAIT_S = HandoffConfig().wait_ms / 1000


class BusyTime(NamedTuple):
    """What other programs do on a machine from a time on."""

    since: float
    """Seconds from the start."""
    threads: float
    """How many of their threads want a core."""
    wake_s: float = 0.0
    """How long a thread of ours that was asleep waits until it gets a core at all."""


class ClusterPlan(NamedTuple):
    """A cluster to simulate."""

    prefill: int
    decode: int
    proxies: int = 1
    pool_chunks: int = 1 << 40
    """Room of the whole pool."""
    proxy: ProxyConfig = ProxyConfig()
    one_machine: bool = False
    """Whether everything, clients too, is on one machine, as in a validation; otherwise each node has its own."""
    others: Sequence[BusyTime] = ()
    """On the one machine."""
    grain: int = 32
    """The most tokens that are taken together: of a stream, and of an engine's ticks. 1 is exact."""
    decode_memory: bool = True
    """Whether decode nodes give memory to the pool, too."""
    seed: int = 0


class ResourceUse(msgspec.Struct):
    """What all resources of one kind were asked for while requests came."""

    name: str
    asked: float
    """Work that was asked for, as a share of what the kind can do in that time; above 1, it can never be done."""
    busiest: float
    """The same of the one that was asked for most."""


class SimulatedLoad(NamedTuple):
    """What became of the requests."""

    outcomes: list[RequestOutcome]
    uses: list[ResourceUse]
    taken_by_others: float
    """Core seconds, on the one machine."""
    seconds: float
    """Until everything had ended."""
    core_seconds: float
    """What all processes asked for, on the one machine."""
    routes: dict[str, int]
    """How many requests went which way, by the proxy's words."""


class _SimulatedMachine:
    """Processors and a link."""

    def __init__(self, time: SimulatedTime, costs: UnitCosts) -> None:
        machine = costs.machine
        self.cores = SharedCapacity(time, machine.cores, 1.0, crowded=machine.crowded)
        self.incoming = SharedCapacity(time, machine.link_bytes_per_s, machine.link_bytes_per_s)
        self.outgoing = SharedCapacity(time, machine.link_bytes_per_s, machine.link_bytes_per_s)


class _SimulatedEngineNode:
    """A prefill or decode node: its HTTP server, its engine, and its client of the pool."""

    def __init__(self, cluster: SimulatedCluster, number: int, machine: _SimulatedMachine) -> None:
        self.number = number
        self.machine = machine
        self._cluster = cluster
        self.serving = SerialThread(machine.cores, number)
        self._storers = Gate(STORE_THREADS)
        # a machine of its own computes on an accelerator, and its processors do the rest
        computing = machine.cores if cluster.plan.one_machine else SharedCapacity(cluster.time, 1.0, 1.0)
        self.engine = SimulatedEngine(cluster.time, computing, cluster.costs, self, cluster.plan.grain, number)

    def take(self, request: SimulatedRequest, output: int, announced: int, on_tokens: Callable[[int], None]) -> Process:
        """Accepts a request. Returns what its engine makes of it, or None if the queue is full."""
        costs = self._cluster.costs.node
        yield self.serving.run(costs.request_s + costs.token_s * request.tokens)
        if self.engine.full:
            return None
        generating = Generating(request, output, on_tokens)
        generating.announced = announced
        self.engine.submit(generating)
        return generating

    def load(self, generating: Generating) -> Process:
        """As `PrefixCache.load`: one lookup, or as many as it takes until what was announced is there, and then a load."""
        cluster, names = self._cluster, generating.request.names
        size, time = cluster.costs.engine.chunk_tokens, cluster.time
        if not names:
            return
        deadline = time.now + (_WAIT_S if generating.announced else 0.0)
        pause = FIRST_POLL_S
        while True:
            found = yield from cluster.look_up(self.machine, self.number, names)
            if found * size >= generating.announced or time.now >= deadline:
                break
            yield time.after(min(pause, deadline - time.now))
            pause = min(2 * pause, LONGEST_POLL_S)
        if found:
            generating.loaded = size * (yield from cluster.load(self, names[:found]))

    def store(self, generating: Generating) -> Happening:
        size = self._cluster.costs.engine.chunk_tokens
        names = generating.request.names[generating.loaded // size :]
        if not names:
            nothing = Happening()
            nothing.happen()
            return nothing
        return self._cluster.time.start(self._store(names))

    def announced(self, generating: Generating) -> int:
        """Tokens of the prompt that a decode node may wait for."""
        return len(generating.request.names) * self._cluster.costs.engine.chunk_tokens

    def _store(self, names: Sequence[bytes]) -> Process:
        yield self._storers.take()
        try:
            yield from self._cluster.store(self, names)
        finally:
            self._storers.give()


class _SimulatedProxy:
    """One proxy: its event loop, and its policies."""

    def __init__(self, cluster: SimulatedCluster, machine: _SimulatedMachine) -> None:
        plan = cluster.plan
        self.machine = machine
        self.loop = SerialThread(machine.cores, self)
        self.lookups = Gate(LOOKUP_THREADS)
        self.looking = 0
        self.most_admitted = 0
        self.admission = Admission(plan.proxy.max_requests, None)
        self.budget = RetryBudget(max(100, plan.proxy.max_requests))
        shape = cluster.costs.engine
        self.pools = {
            hop: NodePool(
                hop,
                plan.proxy.policy,
                breaker_failures=plan.proxy.breaker_failures,
                cache_tokens=plan.proxy.node_cache_tokens,
                rng=cluster.first_turns,
            )
            for hop in ("prefill", "decode")
        }
        for hop, pool in self.pools.items():
            pool.update(Target(f"{hop}-{node.number}", kv_tokens=shape.kv_tokens, max_running=shape.max_running) for node in cluster.nodes[hop])  # fmt: skip


class SimulatedCluster:
    """Prefill nodes, decode nodes, proxies, a master and the pool. Runs one load."""

    def __init__(self, plan: ClusterPlan, costs: UnitCosts) -> None:
        self.plan = plan
        self.costs = costs
        self.time = SimulatedTime()
        self.pool = SimulatedPool(plan.pool_chunks)
        self._master = _SimulatedMachine(self.time, costs)

        def machine() -> _SimulatedMachine:
            return self._master if plan.one_machine else _SimulatedMachine(self.time, costs)

        count = plan.prefill + plan.decode
        every = [_SimulatedEngineNode(self, number, machine()) for number in range(count)]
        self.nodes = {"prefill": every[: plan.prefill], "decode": every[plan.prefill :]}
        self._by_number = every
        self._clients = SerialThread(machine().cores, "clients") if plan.one_machine else None
        self.first_turns = random.Random(plan.seed)
        """Says at which nodes proxies begin."""
        self._proxies = [_SimulatedProxy(self, machine()) for _ in range(plan.proxies)]
        self._by_url = {f"{hop}-{node.number}": node for hop, nodes in self.nodes.items() for node in nodes}
        self._giving = range(count if plan.decode_memory else plan.prefill)
        self._place = placed(self._giving, plan.seed)
        space = Namespace(
            model="simulated",
            kv_dtype="",
            layout="",
            layers=1,
            block_size=1,
            page_bytes=1,
            chunk_size=costs.engine.chunk_tokens,
            shards=1,
            hash_mode="tokens",
        )
        self._lookup = PrefixLookup(LayerGroups([ChunkedTokenDatabase(space)]), CacheMetrics())
        self._rng = random.Random(plan.seed)
        self._routes: dict[str, int] = {}
        self._ended = 0.0
        self._taken_by_others = 0.0

    def remember(self, names: Sequence[bytes]) -> None:
        """Puts a prompt's chunks into the pool that passed before the load begins."""
        for name in self.pool.missing(names):
            self.pool.put(name, self._place(self._giving[self._rng.randrange(len(self._giving))]))

    def run(self, requests: Sequence[SimulatedRequest]) -> SimulatedLoad:
        """Sends every request when it is due, and returns when the last one has ended."""
        outcomes = []
        for index, request in enumerate(requests):
            outcome = RequestOutcome(due=request.due, prompt_tokens=request.tokens, error="never ended")
            outcomes.append(outcome)
            way = self._serve(self._proxies[index % len(self._proxies)], request, outcome)
            self.time.call_at(request.due, functools.partial(self.time.start, way))
        for since, threads, wake_s in self.plan.others:
            self.time.call_at(since, functools.partial(self._master.cores.let_others, threads, wake_s))
        last_due = requests[-1].due
        uses: list[ResourceUse] = []
        self.time.call_at(last_due, lambda: uses.extend(self._uses(max(last_due, 1e-9))))
        self.time.run()
        assert all(node.engine.idle for node in self._by_number), "an engine has work left"
        assert not any(
            load for proxy in self._proxies for pool in proxy.pools.values() for load in pool.loads().values()
        )
        return SimulatedLoad(outcomes, uses, self._taken_by_others, self._ended, self._master.cores.asked, self._routes)

    # --- a request ---------------------------------------------------------------------------------------------------

    def _serve(self, proxy: _SimulatedProxy, request: SimulatedRequest, outcome: RequestOutcome) -> Process:
        yield from self._take(proxy, request, outcome)
        self._master.cores.settle()
        self._ended, self._taken_by_others = self.time.now, self._master.cores.taken_by_others

    def _take(self, proxy: _SimulatedProxy, request: SimulatedRequest, outcome: RequestOutcome) -> Process:
        costs = self.costs
        if self._clients is not None:
            yield self._clients.run(costs.client.request_s + costs.client.token_s * request.tokens)
        yield proxy.loop.run(costs.proxy.request_s + costs.proxy.token_s * request.tokens)
        with ExitStack() as admitted:
            try:
                admitted.enter_context(proxy.admission.admitted(""))
            except ApiError as error:
                outcome.error = f"http {error.status}"
                return
            proxy.most_admitted = max(proxy.most_admitted, proxy.admission.running())
            trial = Trial(proxy.budget)
            proxy.budget.asked(self.time.now)
            announced = 0
            why = yield from self._needs_no_prefill(proxy, request)
            if why is None and self.nodes["prefill"]:
                announced, outcome.cached = yield from self._prefill(proxy, request, trial)
            route = why or ("prefill" if self.nodes["prefill"] else "no_prefill_nodes")
            self._routes[route] = self._routes.get(route, 0) + 1
            yield from self._decode(proxy, request, trial, announced, outcome)

    def _needs_no_prefill(self, proxy: _SimulatedProxy, request: SimulatedRequest) -> Process:
        direct = self.plan.proxy.direct_tokens
        least = self.costs.engine.chunk_tokens if direct is None else direct
        why = needs_no_prefill(request.tokens, 0, least)
        if why is not None or not least or proxy.looking >= MAX_WAITING:
            return why
        proxy.looking += 1
        looking = self.time.start(self._look(proxy, request))
        looking.then(lambda found: setattr(proxy, "looking", proxy.looking - 1))
        yield first_of(looking, self.time.after(LOOKUP_TIMEOUT_S))
        if not looking.done:
            return None
        return needs_no_prefill(request.tokens, looking.value * self.costs.engine.chunk_tokens, least)

    def _look(self, proxy: _SimulatedProxy, request: SimulatedRequest) -> Process:
        yield proxy.lookups.take()
        try:
            return (yield from self.look_up(proxy.machine, proxy, request.names))
        finally:
            proxy.lookups.give()

    def _prefill(self, proxy: _SimulatedProxy, request: SimulatedRequest, trial: Trial) -> Process:
        """Returns how long a prefix a prefill node has announced, and how much of it that node had loaded."""
        pool = proxy.pools["prefill"]
        attempts = Attempts(pool, trial, request.routed)
        while (url := attempts.next(self.time.now)) is not None:
            yield proxy.loop.run(self.costs.proxy.node_s * len(self.nodes["prefill"]))
            node = self._by_url[url]
            with pool.working(url, request.routed):
                generating = yield from node.take(request, 1, 0, lambda tokens: None)
                if generating is None:
                    attempts.failed(url, "busy", self.time.now)
                    continue
                yield generating.first
                yield node.serving.run(self.costs.node.event_s)
            attempts.answered(url, self.time.now, well=True)
            yield proxy.loop.run(self.costs.proxy.hop_s)
            return node.announced(generating), generating.loaded
        return 0, None

    def _decode(
        self, proxy: _SimulatedProxy, request: SimulatedRequest, trial: Trial, announced: int, outcome: RequestOutcome
    ) -> Process:
        pool = proxy.pools["decode"]
        attempts = Attempts(pool, trial)
        while (url := attempts.next(self.time.now)) is not None:
            yield proxy.loop.run(self.costs.proxy.node_s * len(self.nodes["decode"]))
            node = self._by_url[url]
            with pool.working(url):
                arrived: list[Happening] = []
                streamed = self._stream_to_client(proxy, node, outcome, arrived)
                generating = yield from node.take(request, request.output, announced, streamed)
                if generating is None:
                    attempts.failed(url, "busy", self.time.now)
                    continue
                yield generating.first
                attempts.answered(url, self.time.now, well=True)
                yield generating.ended
                yield all_of(arrived)
            if outcome.cached is None:
                outcome.cached = min(generating.loaded, request.tokens - 1)
            outcome.error = ""
            return
        outcome.error = "http 503"

    def _stream_to_client(
        self, proxy: _SimulatedProxy, node: _SimulatedEngineNode, outcome: RequestOutcome, arrived: list[Happening]
    ) -> Callable[[int], None]:
        costs, grain = self.costs, self.plan.grain

        def pass_on(tokens: int) -> Process:
            yield node.serving.run(costs.node.event_s * tokens)
            yield proxy.loop.run(costs.proxy.event_s * tokens)
            if self._clients is not None:
                yield self._clients.run(costs.client.event_s * tokens)
            outcome.last = self.time.now - outcome.due
            outcome.tokens += tokens
            if outcome.first is None:
                outcome.first = outcome.last

        def on_tokens(tokens: int) -> None:
            for _ in range(tokens // grain):
                arrived.append(self.time.start(pass_on(grain)))
            if tokens % grain:
                arrived.append(self.time.start(pass_on(tokens % grain)))

        return on_tokens

    # --- the pool ----------------------------------------------------------------------------------------------------

    def look_up(self, machine: _SimulatedMachine, process: Hashable, names: Sequence[bytes]) -> Process:
        """Returns how many chunks of a prompt, from the first, the pool holds. `process` asks, on `machine`."""
        costs = self.costs.lookup
        yield machine.cores.wake()
        yield machine.cores.begin(costs.call_s + costs.object_s * len(names), process)
        yield self._master.cores.wake()
        yield self._master.cores.begin(costs.master_s + costs.master_object_s * len(names), "master")
        yield machine.cores.wake()
        return self._lookup.judge(names, 0, self.pool.exists(names), FIRST).chunks

    def store(self, node: _SimulatedEngineNode, names: Sequence[bytes]) -> Process:
        """Puts chunks that are not there yet into the pool."""
        names = self.pool.missing(names)
        owners = [self._place(node.number) for _ in names]
        yield from self._move(node, owners, self.costs.store, outwards=True)
        for name, owner in zip(names, owners, strict=True):
            self.pool.put(name, owner)

    def load(self, node: _SimulatedEngineNode, names: Sequence[bytes]) -> Process:
        """Returns how many chunks, from the first, were loaded."""
        owners: list[int] = []
        for name in names:
            owner = self.pool.owner(name)
            if owner is None:  # evicted since it was looked up
                break
            owners.append(owner)
        own = [owner for owner in owners if owner == node.number]
        others = [owner for owner in owners if owner != node.number]
        yield from self._move(node, own, self.costs.load_own, outwards=False)
        yield from self._move(node, others, self.costs.load, outwards=False)
        return len(owners)

    def _move(self, node: _SimulatedEngineNode, owners: Sequence[int], costs: PoolCosts, *, outwards: bool) -> Process:
        """Moves a chunk from or to the memory of each of `owners`, at the same time."""
        count, size = len(owners), self.costs.chunk_bytes
        if not count:
            return
        yield self._master.cores.wake()
        yield self._master.cores.begin(costs.master_s + costs.master_object_s * count, "master")
        yield node.machine.cores.wake()
        seconds = costs.call_s + count * (costs.object_s + costs.byte_s * size)
        under_way: list[Happening] = [node.machine.cores.begin(seconds, node.number)]
        for owner in sorted(set(owners)):
            pieces = owners.count(owner)
            there = self._by_number[owner].machine
            under_way.append(there.cores.begin(pieces * (costs.owner_object_s + costs.owner_byte_s * size), owner))
            if there is not node.machine:
                source, target = (node.machine, there) if outwards else (there, node.machine)
                under_way += [source.outgoing.begin(pieces * size), target.incoming.begin(pieces * size)]
        yield all_of(under_way)

    # --- what was used -----------------------------------------------------------------------------------------------

    def _uses(self, seconds: float) -> list[ResourceUse]:
        every = self._by_number
        machines = [node.machine for node in every]
        links = [max(machine.outgoing.asked, machine.incoming.asked) for machine in machines]
        decoded = [node.engine.decode_asked + node.engine.prefill_asked for node in self.nodes["decode"]]
        return [
            _use("master", [self._master.cores.asked], self._master.cores.capacity * seconds),
            _use("proxy", [proxy.loop.asked for proxy in self._proxies], seconds),
            _use("proxy's places", [proxy.most_admitted for proxy in self._proxies], self.plan.proxy.max_requests),
            _use("prefill", [node.engine.prefill_asked for node in self.nodes["prefill"]], seconds),
            _use("decode", decoded, seconds),
            _use("links", links, machines[0].outgoing.capacity * seconds),
            _use("nodes' cores", [machine.cores.asked for machine in machines], machines[0].cores.capacity * seconds),
        ]


def _use(name: str, asked: Sequence[float], capacity: float) -> ResourceUse:
    if not asked:
        return ResourceUse(name, 0.0, 0.0)
    return ResourceUse(name, math.fsum(asked) / len(asked) / capacity, max(asked) / capacity)
