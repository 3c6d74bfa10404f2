"""A completion's way through a simulated cluster, in simulated time, with the proxy's own policies."""

from __future__ import annotations

import functools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from bench.lib.simulation.clock import Happening, Process, SimulatedTime, Station, first_of, wait_for_all
from bench.lib.simulation.costs import PoolCosts, UnitCosts
from bench.lib.simulation.engine import GRAIN, Generating, SimulatedEngine
from bench.lib.simulation.workload import Arrival, CopiedTrace, SimulatedRequest, names_of, of_arrival
from launch.openai import ApiError
from launch.proxy.keys import Admission, Client
from launch.proxy.lookups import LOOKUP_TIMEOUT_S, MAX_WAITING
from launch.proxy.nodes import HEALTH_INTERVAL_S
from launch.proxy.routing.direct import DirectRule
from launch.proxy.routing.limits import Limits, Predicted
from launch.proxy.routing.node_pool import Attempts, Hop, NodePool, RetryBudget, Trial
from launch.proxy.routing.prefixes import NamedPrompt, RoutedPrompt, leading
from launch.proxy.routing.roles import Roles
from pd_cache.cluster import (
    Capacity,
    HandoffConfig,
    LimitsConfig,
    MasterNode,
    NodeRecord,
    ProxyConfig,
    TenantConfig,
)
from pd_cache.handoff import next_pause
from pd_cache.vllm.costs import HANDOFF_MARGIN, MARGIN

_WAIT_S = HandoffConfig().wait_ms / 1000
_MASTER = MasterNode(name="master")


class ClusterPlan(NamedTuple):
    """A cluster to simulate."""

    prefill: int
    decode: int
    proxies: int = 1
    pool_chunks: int = 1 << 40
    """Room of the whole pool, in chunks."""
    proxy: ProxyConfig = ProxyConfig()
    both: int = 0
    """Nodes of the role `both`: the proxies decide from the nodes' reports which of them prefill."""


class RequestOutcome(msgspec.Struct):
    """The outcome of a request. Times are in seconds after it was due."""

    due: float
    prompt_tokens: int
    first: float | None = None
    """When its first token came; None if none came."""
    last: float = 0.0
    tokens: int = 0
    """Tokens that were generated."""
    cached: int | None = None
    """Prompt tokens that no node had to compute."""
    error: str = ""
    """The kind of error; empty if it was answered to the end."""


class SimulatedPool:
    """Chunks by name, each with the number of the node that holds it.

    It evicts as Mooncake's master does: when little room is left, it removes a share of all chunks, those
    used longest ago.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is in chunks."""
        self._most = max(1, int(capacity * _MASTER.eviction_high_watermark))
        self._batch = max(1, int(capacity * _MASTER.eviction_ratio))
        self._owner: OrderedDict[bytes, int] = OrderedDict()

    def leading(self, names: Sequence[bytes]) -> int:
        """Returns how many leading names are there. A lookup counts as a use."""
        for name in names:
            if name in self._owner:
                self._owner.move_to_end(name)
        return leading(names, self._owner)

    def owners(self, names: Sequence[bytes]) -> list[int]:
        """Returns the owners of the names before the first missing name."""
        return [self._owner[name] for name in names[: leading(names, self._owner)]]

    def missing(self, names: Sequence[bytes]) -> list[bytes]:
        """Returns the missing names, in order, each once."""
        return [name for name in dict.fromkeys(names) if name not in self._owner]

    def put(self, name: bytes, owner: int) -> None:
        """Keeps a chunk, unless it is there."""
        if name in self._owner:
            return
        self._owner[name] = owner
        if len(self._owner) > self._most:
            for _ in range(min(self._batch, len(self._owner))):
                self._owner.popitem(last=False)


class _Node:
    """A prefill or decode node: its HTTP server, its engine, its client of the pool, and its link. An
    accelerator computes beside its cores."""

    def __init__(self, cluster: SimulatedCluster, number: int) -> None:
        self.number, self._cluster = number, cluster
        time, costs = cluster.time, cluster.costs
        self.cores, self.serving = Station(time, costs.machine.cores), Station(time)
        self.incoming, self.outgoing = Station(time), Station(time)
        self.engine = SimulatedEngine(time, costs, self.load, self.store)

    def take(
        self, request: SimulatedRequest, output: int, announced: int, on_tokens: Callable[[int], None]
    ) -> Process:
        """Accepts a request. Returns its `Generating` in the engine, or None if the queue is full."""
        costs = self._cluster.costs.node
        yield self.serving.run(costs.request_s + costs.token_s * request.tokens)
        if self.engine.full:
            return None
        generating = Generating(request, output, announced, on_tokens)
        self.engine.submit(generating)
        return generating

    def load(self, generating: Generating) -> Process:
        """Looks up once, or until the announced prefix is there, if it pays to load it. Then loads it."""
        learned, cluster, names = self.engine.learned, self._cluster, generating.request.names
        size, time = cluster.costs.engine.chunk_tokens, cluster.time
        deadline, pause = time.now + _WAIT_S, next_pause()
        awaited = generating.announced // size
        found = (yield from cluster.look_up(self.cores, names)) if names else 0
        if most := max(found, awaited):
            margin = HANDOFF_MARGIN if awaited else MARGIN
            verdict = learned.not_worth((0, 0, most * size), 0, self.engine.ahead, time.now, margin)
            if verdict is not None:
                found, awaited = min(found, verdict.probe), 0
        while found < awaited and time.now < deadline:
            yield time.after(min(pause, deadline - time.now))
            pause = next_pause(pause)
            found = yield from cluster.look_up(self.cores, names)
        if found:
            begun = self.engine.link.passed(time.now, 1)
            learned.load_began(name := str(id(generating)), (0, 0, found * size), time.now)
            generating.loaded = size * (yield from cluster.load(self, names[:found]))
            learned.load_ended(name, self.engine.link.passed(time.now, -1) - begun)

    def store(self, generating: Generating) -> Happening:
        size = self._cluster.costs.engine.chunk_tokens
        names = generating.request.names[generating.stored // size : generating.position // size]
        return self._cluster.time.start(self._cluster.store(self, names))


class _Proxy:
    """One proxy: its event loop, and its policies. With a gateway, Envoy passes on the answers, on all cores
    of the proxy's machine."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        plan, shape = cluster.plan, cluster.costs.engine
        self.cores = Station(cluster.time, cluster.costs.machine.cores)
        self.loop = Station(cluster.time)
        self.gateway = plan.proxy.gateway is not None
        self.costs = cluster.costs.picker if self.gateway else cluster.costs.proxy
        self.looking = self.most_admitted = 0
        self.admission = Admission(plan.proxy.max_requests, None, lambda tenant: TenantConfig())
        self.budget = RetryBudget(max(100, plan.proxy.max_requests))
        hops: tuple[Hop, ...] = ("prefill", "decode")
        self.pools = {hop: NodePool(hop, plan.proxy.policy, rng=cluster.first_turns) for hop in hops}
        capacity = Capacity(kv_tokens=shape.kv_tokens, max_running=shape.max_running)
        for hop, pool in self.pools.items():
            pool.update(
                NodeRecord(name=url, role=role, address=url, capacity=capacity)
                for url, role in cluster.roles.items()
                if role in (hop, "both")
            )
        self.roles, self.limits = Roles(plan.proxy.roles), Limits(self.pools)

    def look(self, cluster: SimulatedCluster) -> None:
        reports = {url: node.engine.report() for url, node in cluster.by_url.items()}
        for url, report in reports.items():
            self.limits.look(cluster.time.now, url, report)
        if cluster.plan.both:
            self.roles.look(cluster.time.now, cluster.roles, (), reports)
            for hop, pool in self.pools.items():
                pool.resting = self.roles.resting(cluster.time.now, hop)


class SimulatedCluster:
    """Prefill nodes, decode nodes, proxies, a master and the pool. Runs one load."""

    def __init__(self, plan: ClusterPlan, costs: UnitCosts) -> None:
        self.plan, self.costs, self.time = plan, costs, SimulatedTime()
        self.pool = SimulatedPool(plan.pool_chunks)
        self.master = Station(self.time, costs.machine.cores)
        self.roles: dict[str, str] = {}
        """The role of each node, by its URL."""
        counts = (("prefill", plan.prefill), ("decode", plan.decode), ("both", plan.both))
        for role, count in counts:
            self.roles |= {f"{role}-{len(self.roles) + number}": role for number in range(count)}
        self.by_url = {url: _Node(self, number) for number, url in enumerate(self.roles)}
        self._every = list(self.by_url.values())
        self.nodes = {hop: [self.by_url[url] for url, role in self.roles.items() if role in (hop, "both")] for hop in ("prefill", "decode")}  # fmt: skip
        self.first_turns = random.Random(0)
        """Decides at which node each proxy begins."""
        self.proxies = [_Proxy(self) for _ in range(plan.proxies)]
        self._rng = random.Random(0)
        self.limited = plan.proxy.limits != LimitsConfig()
        self.errors: list[float] = []
        """The errors of predictions, as shares of the measured times."""

    def remember(self, trace: CopiedTrace, count: int) -> None:
        """Puts the chunks of the prompts before a load of `count` requests into the pool."""
        for request in trace.passed:
            for copy in range(trace.copies(count)):
                for name in self.pool.missing(
                    names_of(trace.parts(request, copy), self.costs.engine.chunk_tokens)
                ):
                    self.pool.put(name, self._rng.randrange(len(self._every)))

    def run(self, arrivals: Sequence[Arrival]) -> tuple[list[RequestOutcome], dict[str, float]]:
        """Sends every request when it is due. Returns the outcome of each request, and the use of each kind
        of resource: the work of all requests, as a share of the work that the resource can do until the last
        request comes. A share above 1 means that the resource cannot keep up."""
        outcomes = []
        for index, arrival in enumerate(arrivals):
            request = of_arrival(arrival, self.costs.engine.chunk_tokens)
            outcome = RequestOutcome(due=request.due, prompt_tokens=request.tokens, error="never ended")
            outcomes.append(outcome)
            way = self._serve(self.proxies[index % len(self.proxies)], request, outcome)
            self.time.call_at(request.due, functools.partial(self.time.start, way))
        last_due = arrivals[-1].due
        for number, proxy in enumerate(self.proxies if self.plan.both or self.limited else ()):
            # each proxy looks at moments of its own
            offset = number / len(self.proxies) * HEALTH_INTERVAL_S
            self.time.start(self._look(proxy, offset, last_due))
        self.time.run()
        assert all(node.engine.idle for node in self._every), "an engine has work left"
        pools = [pool for proxy in self.proxies for pool in proxy.pools.values()]
        assert not any(node.load for pool in pools for node in pool.nodes.values()), "a proxy has work left"
        return outcomes, self._uses(max(last_due, 1e-9))

    def _look(self, proxy: _Proxy, offset: float, until: float) -> Process:
        """Makes a proxy decide about roles: before the load, and whenever it asks nodes for their health."""
        proxy.look(self)
        yield self.time.after(offset)
        while self.time.now < until:
            yield self.time.after(HEALTH_INTERVAL_S)
            proxy.look(self)

    # --- a request ------------------------------------------------------------------------------------------

    def _serve(self, proxy: _Proxy, request: SimulatedRequest, outcome: RequestOutcome) -> Process:
        costs = proxy.costs
        if proxy.gateway:
            envoy = self.costs.envoy
            yield proxy.cores.run(envoy.request_s + envoy.token_s * request.tokens)
        yield proxy.loop.run(costs.request_s + costs.token_s * request.tokens)
        try:
            with proxy.admission.admitted(Client()):
                proxy.most_admitted = max(proxy.most_admitted, proxy.admission.running())
                trial, announced = Trial(proxy.budget), 0
                proxy.budget.asked(self.time.now)
                why, found = yield from self._needs_no_prefill(proxy, request)
                prefills = not why and bool(self.nodes["prefill"])
                prompt, predicted = request.routed, Predicted()
                if self.limited:
                    prompt = prompt._replace(named=NamedPrompt("", request.tokens, pool_tokens=found))
                    now = self.time.now
                    first = proxy.pools["prefill"].cheapest(now, prompt) if prefills else None
                    predicted = proxy.limits.predict(first, prompt, now, now - request.due)
                    if over := proxy.limits.missed(predicted, self.plan.proxy.limits):
                        raise over
                if prefills:
                    announced, outcome.cached = yield from self._prefill(proxy, prompt, request, trial)
                yield from self._decode(proxy, request, trial, announced, outcome, predicted)
        except ApiError as error:
            outcome.error = f"http {error.status}"

    def _needs_no_prefill(self, proxy: _Proxy, request: SimulatedRequest) -> Process:
        size, tokens = self.costs.engine.chunk_tokens, self.plan.proxy.direct_tokens
        direct = DirectRule(size if tokens is None else tokens)
        why = direct.why(request.tokens)
        if why or tokens == 0 or proxy.looking >= MAX_WAITING:
            return why, 0
        proxy.looking += 1
        looking = self.time.start(self.look_up(proxy.cores, request.names))
        looking.then(lambda found: setattr(proxy, "looking", proxy.looking - 1))
        yield first_of(looking, self.time.after(LOOKUP_TIMEOUT_S))
        found = looking.value * size if looking.done else 0
        return direct.why(request.tokens, found), found

    def _prefill(
        self, proxy: _Proxy, prompt: RoutedPrompt, request: SimulatedRequest, trial: Trial
    ) -> Process:
        """Returns how long a prefix a prefill node has announced, and how much of it that node had loaded."""
        pool = proxy.pools["prefill"]
        attempts = Attempts(pool, trial, prompt)
        while (url := attempts.next(self.time.now)) is not None:
            yield proxy.loop.run(proxy.costs.node_s * len(self.nodes["prefill"]))
            node = self.by_url[url]
            with (
                pool.working(url, prompt) as work,
                proxy.limits.asking("prefill", url, work, self.time.now) as asked,
            ):
                generating = yield from node.take(request, 1, 0, lambda tokens: None)
                if generating is None:
                    attempts.failed(url, "busy", self.time.now)
                    continue
                yield generating.first
                yield node.serving.run(self.costs.node.event_s)
                asked.answered(self.time.now)
            attempts.answered(url, self.time.now, well=True)
            yield proxy.loop.run(proxy.costs.hop_s)
            return len(request.names) * self.costs.engine.chunk_tokens, generating.loaded
        return 0, None

    def _decode(
        self,
        proxy: _Proxy,
        request: SimulatedRequest,
        trial: Trial,
        announced: int,
        outcome: RequestOutcome,
        predicted: Predicted,
    ) -> Process:
        pool = proxy.pools["decode"]
        attempts = Attempts(pool, trial)
        while (url := attempts.next(self.time.now)) is not None:
            yield proxy.loop.run(proxy.costs.node_s * len(self.nodes["decode"]))
            node = self.by_url[url]
            with ExitStack() as known:
                known.enter_context(pool.working(url))
                asked = known.enter_context(proxy.limits.asking("decode", url, request.tokens, self.time.now))
                arrived: list[Happening] = []

                def on_tokens(tokens: int, node: _Node = node, arrived: list[Happening] = arrived) -> None:
                    for start in range(0, tokens, GRAIN):
                        count = min(GRAIN, tokens - start)
                        arrived.append(self.time.start(self._pass_on(proxy, node, outcome, count)))

                generating = yield from node.take(request, request.output, announced, on_tokens)
                if generating is None:
                    attempts.failed(url, "busy", self.time.now)
                    continue
                yield generating.first
                attempts.answered(url, self.time.now, well=True)
                asked.answered(first := self.time.now)
                if proxy.gateway:
                    known.close()  # a picker does not see the rest of an answer
                error = proxy.limits.measured(predicted, first - request.due)
                self.errors += [error] if error is not None else []
                yield generating.ended
                proxy.limits.ended(self.time.now - first)
                yield from wait_for_all(arrived)
            if outcome.cached is None:
                outcome.cached = min(generating.loaded, request.tokens - 1)
            outcome.error = ""
            return
        outcome.error = "http 503"

    def _pass_on(self, proxy: _Proxy, node: _Node, outcome: RequestOutcome, tokens: int) -> Process:
        yield node.serving.run(self.costs.node.event_s * tokens)
        if proxy.gateway:
            yield proxy.cores.run(self.costs.envoy.event_s * tokens)
        else:
            yield proxy.loop.run(proxy.costs.event_s * tokens)
        outcome.last = self.time.now - outcome.due
        outcome.tokens += tokens
        if outcome.first is None:
            outcome.first = outcome.last

    # --- the pool -------------------------------------------------------------------------------------------

    def look_up(self, cores: Station, names: Sequence[bytes]) -> Process:
        """Returns how many leading chunks of a prompt the pool holds."""
        costs = self.costs.lookup
        yield cores.run(costs.call_s + costs.object_s * len(names))
        yield self.master.run(costs.master_s + costs.master_object_s * len(names))
        return self.pool.leading(names)

    def store(self, node: _Node, names: Sequence[bytes]) -> Process:
        """Puts chunks that are not there yet into the node's own memory."""
        names = self.pool.missing(names)
        yield from self._move(node, [node.number] * len(names), self.costs.store)
        for name in names:
            self.pool.put(name, node.number)

    def load(self, node: _Node, names: Sequence[bytes]) -> Process:
        """Returns how many leading chunks were loaded."""
        owners = self.pool.owners(names)
        yield from self._move(node, [owner for owner in owners if owner == node.number], self.costs.load_own)
        yield from self._move(node, [owner for owner in owners if owner != node.number], self.costs.load)
        return len(owners)

    def _move(self, node: _Node, owners: Sequence[int], costs: PoolCosts) -> Process:
        """Moves a chunk from, or to, the memory of each of `owners`, at the same time."""
        count, size = len(owners), self.costs.chunk_bytes
        if not count:
            return
        yield self.master.run(costs.master_s + costs.master_object_s * count)
        under_way = [node.cores.run(costs.call_s + count * (costs.object_s + costs.byte_s * size))]
        for owner in sorted(set(owners)):
            pieces, there = owners.count(owner), self._every[owner]
            under_way.append(there.cores.run(pieces * costs.owner_byte_s * size))
            if there is not node:
                seconds = pieces * size / self.costs.machine.link_bytes_per_s
                under_way += [there.outgoing.run(seconds), node.incoming.run(seconds)]
        yield from wait_for_all(under_way)

    # --- what was used --------------------------------------------------------------------------------------

    def _uses(self, seconds: float) -> dict[str, float]:
        cores = seconds * self.costs.machine.cores
        return {
            "master": self.master.asked / cores,
            "proxy": _mean([proxy.loop.asked for proxy in self.proxies]) / seconds,
            "proxy's cores": _mean([proxy.cores.asked for proxy in self.proxies]) / cores,
            "proxy's places": _mean([proxy.most_admitted for proxy in self.proxies])
            / self.plan.proxy.max_requests,
            "prefill": _mean([node.engine.asked for node in self.nodes["prefill"]]) / seconds,
            # a step takes nearly as long for many requests as for one, so decode nodes run out of room, not
            # of time
            "decode": _mean(
                [node.engine.held() / self.costs.engine.kv_tokens for node in self.nodes["decode"]]
            )
            / seconds,
            # the link of the node that holds the first chunk of all prompts
            "busiest link": max(max(node.outgoing.asked, node.incoming.asked) for node in self._every)
            / seconds,
        }


def _mean(asked: Sequence[float]) -> float:
    return math.fsum(asked) / len(asked) if asked else 0.0
