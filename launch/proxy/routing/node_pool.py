"""Decides which node to try next, when to stop, and what is to blame for a failure. Pure: the time comes from
the caller.

A policy gives each node a cost, and the pool takes the node with the lowest cost. If several nodes cost the
same, it takes the node that had no turn for the longest time. Nodes that had no turn yet are in random order,
so that several proxies do not begin with the same nodes. The costs are:

- `round_robin`: the same for all nodes;
- `least_loaded`: the work that this proxy has given the node and that is not done;
- `prefix_aware`: that work, plus the tokens of this prompt that the node would compute or load from the pool.
  It computes less if its own cache holds the beginning of the prompt. So the pool takes a node that knows the
  prompt, unless its queue makes another node quicker.

A node's KV events say what its cache holds (`events.py`). For a node without events, and for a prompt whose
tokens are unknown, the proxy guesses this from what it sent to the node (`prefixes.py`).

For prefill nodes, work is counted in prompt tokens to compute. For decode nodes, it is counted in requests,
relative to how many the node computes at a time.

A node that cannot be reached, or that is too slow, is at fault itself. A failure after the request was sent
(an error, a lost connection, an invalid answer) may be the request's own fault, and a client can send such
requests all day. So it counts against the node only if another node then answers the same request well. A
request that two nodes fail is answered with its error, and no node is blamed.

A lost connection may mean that the request brought the node down. So a request may lose at most two nodes, of
either kind. A lost node counts only if it worked before: if it had failed fewer than `BREAKER_FAILURES` other
requests since its last good answer. Otherwise a broken group of prefill nodes would stop decode nodes from
answering.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

from launch.proxy.routing.prefixes import PrefixIndex, RoutedPrompt
from pd_cache.cluster import NodeRecord

if TYPE_CHECKING:
    from launch.proxy.events import KnownCache  # which brings sockets along

Hop = Literal["prefill", "decode"]
Policy = Literal["round_robin", "least_loaded", "prefix_aware"]
Reason = Literal["unreachable", "disconnected", "timeout", "busy", "error", "garbage", "refused"]
"""How a node can fail a request: no connection; a connection that broke; too slow; 503; another error status;
an invalid answer; a status that says that it refuses this request."""

NO_PROMPT = RoutedPrompt(1)
BREAKER_FAILURES = 5
"""A node that fails this many requests in a row is skipped for a while: so many are no accident, and few
clients have met them. A node that refuses connections is skipped at once."""
_KV_TOKENS = 1_000_000
"""The assumed size of a node's own cache if the node does not report it. Both engines report it."""


class RoutedNode:
    """A node, and what a pool knows about it."""

    def __init__(self, record: NodeRecord, turn: float) -> None:
        self.record = record
        self.breaker = NodeBreaker()
        self.alive = True
        """The result of the last health check."""
        self.load = 0.0
        """The work that it has been given and has not done yet."""
        self.elsewhere = 0.0
        """The node's further requests, which other proxies or gateways sent, as far as the node reports
        them."""
        self.turn = turn
        """When it was last taken, in turns of its pool; below 0 if it never was."""
        self.suspicions = 0
        """How many of its requests have failed, for any cause, since it last answered well."""
        self.prefixes = PrefixIndex(0)
        self.loads = True
        """Whether the node loaded the tokens that it last found in the pool; it computes them if that is
        faster."""
        self.cache: KnownCache | None = None
        """The contents of its cache according to its KV events, if it has any."""

    def reached(self) -> None:
        """Notes that the node answered, perhaps with a refusal. A node can do that and still fail every good
        request."""
        if self.breaker.unreachable:
            self.breaker.succeeded()

    def checked(self, alive: bool) -> bool:
        """Notes the result of a health check. If the node was skipped because no connection could be made, a
        good check ends that.

        Returns whether the result differs from the one before.
        """
        before, self.alive = self.alive, alive
        if alive:
            self.reached()
        return alive != before


class NodePool:
    """The nodes of one kind, and the policy by which one is taken."""

    def __init__(
        self,
        hop: Hop,
        policy: Policy = "round_robin",
        *,
        rng: Random | None = None,
    ) -> None:
        """`rng` orders nodes that were never taken."""
        self._hop = hop
        self._rng = rng or Random()
        self._policy = policy
        self.load_cost = 0.0
        """The cost of a token that is loaded from the pool; a computed token costs 1."""
        self._learns = hop == "prefill" and policy == "prefix_aware"
        self.nodes: dict[str, RoutedNode] = {}
        """The nodes, by their URLs."""
        self._turns = 0
        self.resting: Collection[str] = ()
        """Nodes that do other work now (`roles.py`). They are taken only if there are no others."""

    def update(self, records: Iterable[NodeRecord]) -> None:
        """Uses these nodes from now on. Keeps what is known about a node, unless the node was restarted.
        A node may report its cache's size later."""
        nodes = {}
        for record in records:
            node = self.nodes.get(record.address)
            if node is None or node.record.instance != record.instance:
                node = RoutedNode(record, self._rng.random() - 1)
            node.record = record
            node.prefixes.capacity_tokens = record.capacity.kv_tokens or _KV_TOKENS
            nodes[record.address] = node
        self.nodes = nodes

    def know(self, caches: Mapping[str, KnownCache]) -> None:
        """Uses the events of these nodes from now on, and guesses what the other nodes' caches hold."""
        for url, node in self.nodes.items():
            node.cache = caches.get(url)

    def node(self, url: str) -> RoutedNode:
        """Returns the node; if it has left since it was picked, a stand-in that counts for no pool."""
        return self.nodes.get(url) or RoutedNode(NodeRecord(name=url, role=self._hop, address=url), 0.0)

    def health(self, now: float) -> dict[str, bool]:
        """Returns, for each node, whether it would be tried at `now`."""
        return {url: node.alive and node.breaker.allows(now) for url, node in self.nodes.items()}

    def usable(self, now: float) -> list[str]:
        """Returns the nodes that `pick` chooses from."""
        return [node.record.address for node in self._candidates(now, ())]

    def work(self, url: str, prompt: RoutedPrompt) -> float:
        """Returns how many tokens of the prompt the node would compute, at least 1."""
        return max(1.0, self._prefix_work(self.node(url), prompt))

    def pick(
        self,
        now: float,
        prompt: RoutedPrompt = NO_PROMPT,
        tried: Collection[str] = (),
        *,
        proven_first: bool = False,
    ) -> str | None:
        """Returns the `cheapest` node, and counts this as its turn."""
        url = self.cheapest(now, prompt, tried, proven_first=proven_first)
        if url is not None:
            self.take(url)
        return url

    def cheapest(
        self,
        now: float,
        prompt: RoutedPrompt = NO_PROMPT,
        tried: Collection[str] = (),
        *,
        proven_first: bool = False,
    ) -> str | None:
        """Returns the cheapest node that is not skipped and is not in `tried`; None if there is none.

        `proven_first`: prefer nodes that have failed fewer requests since their last good answer, and only
        then cheaper ones. The answer of a proven node shows whether the request or the node that failed it is
        at fault.
        """
        candidates = self._candidates(now, tried)
        if not candidates:
            return None
        return min(
            candidates,
            key=lambda node: (node.suspicions if proven_first else 0, self._cost(node, prompt), node.turn),
        ).record.address

    def take(self, url: str) -> None:
        """Notes that the node has its turn."""
        self._turns += 1
        self.node(url).turn = self._turns

    def out_of_turn(self, now: float, tried: Collection[str] = (), *, renders: bool = False) -> str | None:
        """Returns any node that is not skipped and is not in `tried`; with `renders`, any such node that
        renders chats. Returns None if there is none.

        Changes no state, so use it for requests other than completions.
        """
        candidates = [node for node in self._candidates(now, tried) if node.record.renders or not renders]
        return candidates[int(self._rng.random() * len(candidates))].record.address if candidates else None

    def _candidates(self, now: float, tried: Collection[str]) -> list[RoutedNode]:
        allowed = [node for url, node in self.nodes.items() if url not in tried and node.breaker.allows(now)]
        # if no check succeeds, the checks are more likely at fault than every node
        found = [node for node in allowed if node.alive] or allowed
        return [node for node in found if node.record.address not in self.resting] or found

    @contextmanager
    def working(self, url: str, prompt: RoutedPrompt = NO_PROMPT) -> Iterator[float]:
        """Counts a request as the node's while the block runs. Yields its work."""
        node = self.node(url)
        work = 1.0 if self._hop == "decode" else self.work(url, prompt)
        if self._learns:
            node.prefixes.add(prompt)
        node.load += work
        try:
            with nullcontext() if node.cache is None else node.cache.computing(prompt.named):
                yield work
        finally:
            node.load -= work

    def _cost(self, node: RoutedNode, prompt: RoutedPrompt) -> float:
        if self._policy == "round_robin":
            return 0.0
        if self._hop == "decode":
            return (node.load + node.elsewhere) / max(1, node.record.capacity.max_running)
        return node.load + (self._prefix_work(node, prompt) if self._learns else 0.0)

    def _prefix_work(self, node: RoutedNode, prompt: RoutedPrompt) -> float:
        """Returns how many tokens of the prompt a node would compute, plus the cost of the tokens that it
        would load."""
        named = prompt.named
        if named is None:
            return prompt.tokens - node.prefixes.match(prompt)
        if node.cache is not None and node.cache.knows(named):
            own: float = node.cache.tokens(named)
        else:
            own = node.prefixes.match(prompt)
        loaded = max(0.0, (named.pool_tokens or 0) - own) if node.loads else 0.0
        return named.tokens - own - loaded * (1 - self.load_cost)


_FIRST_SKIP_S, _LAST_SKIP_S = 1.0, 10.0


class NodeBreaker:
    """Skips a node for 1, 2, 4 … 10 s, then lets through one request a second until one is answered."""

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0
        self._skip_until = 0.0
        self._on_trial = False
        self.unreachable = False
        """Whether the breaker is open because no connection could be made."""

    def allows(self, now: float) -> bool:
        return now >= self._skip_until

    def sent(self, now: float) -> None:
        """Notes that a request is sent. If the breaker is open, the node is on trial, and the next request
        may follow a second later."""
        if self._opened:
            self._on_trial = True
            self._skip_until = now + _FIRST_SKIP_S

    def succeeded(self) -> None:
        self._failures = self._opened = 0
        self._skip_until = 0.0
        self._on_trial = self.unreachable = False

    def failed(self, reason: Reason, now: float) -> None:
        """Notes a failure. A node that cannot be reached is skipped at once, others after several failures in
        a row."""
        self._failures += 1
        if reason != "unreachable" and self._failures < BREAKER_FAILURES:
            return
        if now < self._skip_until and not self._on_trial:
            return  # requests that fail together count once
        self._on_trial = False
        self.unreachable = reason == "unreachable"
        self._opened += 1
        self._skip_until = now + min(_LAST_SKIP_S, _FIRST_SKIP_S * 2.0 ** min(self._opened - 1, 8))


_A_REQUEST, _A_SECOND = 0.2, 10.0


class RetryBudget:
    """A token bucket for the retries of all requests. Each arriving request adds a fraction of a retry, and
    each second adds a few retries.

    If every request fails, nodes get only that fraction more requests, not twice as many. A full bucket lasts
    for as many requests as a node can have when it dies.
    """

    def __init__(self, burst: int) -> None:
        """`burst`: the most retries that the bucket holds. It starts full."""
        self._burst = self._left = float(burst)
        self._filled_at = math.inf

    def asked(self, now: float) -> None:
        self._fill(now, _A_REQUEST)

    def allows(self, now: float) -> bool:
        self._fill(now)
        return self._left >= 1.0

    def take(self, now: float) -> None:
        """Notes a retry that `allows` has permitted."""
        self._fill(now, -1.0)

    def _fill(self, now: float, more: float = 0.0) -> None:
        passed = max(0.0, now - self._filled_at)
        self._filled_at = now
        self._left = min(self._burst, self._left + passed * _A_SECOND + more)


_MOST = 2
"""How many nodes may fail a request after it was sent to them."""


@dataclass
class Trial:
    """The effects of one request so far on nodes of all kinds."""

    budget: RetryBudget
    lost: int = 0
    """How many nodes lost their connection while they had the request. A node counts only if it had failed
    fewer than `BREAKER_FAILURES` other requests since its last good answer."""


@dataclass
class Attempts:
    """One request's way through a pool: each node at most once."""

    pool: NodePool
    trial: Trial
    prompt: RoutedPrompt = NO_PROMPT
    first: str | None = None
    """The node to try first, if it is not skipped."""
    tried: Collection[str] = ()
    """Nodes that are not tried any more."""
    _suspects: list[tuple[RoutedNode, Reason]] = field(default_factory=list)
    _failures: int = 0

    @property
    def blamed(self) -> bool:
        """Whether the failures are the request's own fault."""
        return self._failures >= _MOST or self.trial.lost >= _MOST

    def next(self, now: float) -> str | None:
        """Returns the node to try now; None if none is left, or if no further try is allowed."""
        if self.blamed:
            return None
        budget, again = self.trial.budget, self._failures > 0
        if again and not budget.allows(now):
            return None
        node, self.first = self.first, None
        if node is None or node in self.tried or not self.pool.health(now).get(node, False):
            node = self.pool.pick(now, self.prompt, self.tried, proven_first=again)
        if node is not None:
            self.pool.node(node).breaker.sent(now)
            self.tried = {*self.tried, node}
            if again:
                budget.take(now)
        return node

    def failed(self, url: str, reason: Reason, now: float) -> None:
        node = self.pool.node(url)
        if reason in ("unreachable", "timeout"):
            node.breaker.failed(reason, now)
            self._failures += reason == "timeout"
        elif reason != "busy":
            node.suspicions += 1
            self._suspects.append((node, reason))
            self._failures += 1
            self.trial.lost += reason == "disconnected" and node.suspicions <= BREAKER_FAILURES

    def answered(self, url: str, now: float, *, well: bool) -> None:
        """Notes that the node that `next` returned answered: `well`, or with a refusal, which proves nothing
        about earlier nodes."""
        node = self.pool.node(url)
        if not well:
            node.reached()
            return
        node.suspicions = 0
        node.breaker.succeeded()
        for suspect, reason in self._suspects:
            suspect.breaker.failed(reason, now)
        self._suspects.clear()
