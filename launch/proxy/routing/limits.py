"""Predicts when a completion's first token will come, and how much time will lie between its tokens. Refuses
a completion that would miss its limits. Pure: the time comes from the caller.

1. A node brings prompts to their first byte one after the other. The time until a prompt's first byte is a
   constant, plus a time for each token of the prompt and of the prompts in front of it. A node's answers
   correct both figures.
2. A decode node has room for a number of answers. If all decode nodes are full, the prompt waits until an
   answer ends. It is prefilled during this wait, so only the longer of the two times counts. After it, the
   decode node loads the prompt.
3. The time between a decode node's tokens is a constant, plus a time for each answer that the node generates.
   The node's reports correct both figures.
4. The proxy knows only the number of other proxies' prompts, from the nodes' reports. Each of these prompts
   counts as much as the mean of this proxy's own prompts.
5. The predicted time of the first token is multiplied by a margin, so that about one request in 50 is late.
6. With `over: best_effort`, a request that would miss a limit waits. It goes on once the work in front of it
   takes at most half of the limit. Until then, others overtake it. The waiting requests of a tenant, or of a
   client without one, go on in the order of their priorities.
7. An unknown time counts as 0. A request with no other in front of it is never refused: it would not be
   answered sooner at another time, and its answer corrects wrong figures.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

from launch.openai import ApiError
from launch.proxy.routing.node_pool import Hop, NodePool, RoutedNode
from launch.proxy.routing.prefixes import RoutedPrompt
from launch.proxy.routing.roles import NodeReport
from pd_cache.cluster import LimitsConfig

_ENOUGH = 3
"""How many measurements a prediction needs."""
_RECENT_S = 10.0
"""How old a node's report may be."""
_LATE, _STEP = 0.02, 0.1
"""The share of requests that may be late; the largest relative change by one measurement."""
_MOST_MARGIN = 2.0
"""With a higher margin, the proxy would refuse most requests for a long time after a node with many requests
has stopped."""
_WAITING_SHARE = 0.5
"""A waiting request goes on once the work in front of it takes at most this share of the limit."""
_MOST_WAITING = 100
"""How many requests may wait. Tenants and clients that have waiting requests share these places equally."""
WAIT_S = 60.0
"""How long a request may wait. Then it is refused."""
_MEAN_OF = 64
"""A mean is that of about the last 64 values."""


class Predicted(NamedTuple):
    """A completion's times in seconds; 0 if unknown."""

    first_s: float = 0.0
    """The time until its first byte."""
    alone_s: float = 0.0
    """The same if no other request were in front of it."""
    token_s: float = 0.0
    """The time between two of its tokens."""
    relief_s: float = 0.0
    """How many seconds pass until the answers that end have shortened `token_s` by one second; 0 if no answer
    runs."""


class _Time:
    """The time that work takes: a constant, plus a time for each token or request. A measurement corrects
    both by a tenth at most, so that a stall changes little."""

    def __init__(self) -> None:
        self.fixed_s = self.each_s = math.inf
        self._measured = 0

    def seconds(self, work: float) -> float:
        """Returns how long `work` tokens or requests probably take; 0 after too few measurements."""
        return self.fixed_s + self.each_s * work if self._measured >= _ENOUGH else 0.0

    def add(self, work: float, seconds: float) -> None:
        self._measured += 1
        seconds = max(seconds, 1e-6)  # no factor corrects a figure of 0
        if self._measured <= _ENOUGH:  # the first may be slow
            self.fixed_s = min(self.fixed_s, 0.25 * seconds)
            self.each_s = min(self.each_s, 0.75 * seconds / work)
            return
        expected = self.seconds(work)
        by = max(-_STEP, min(_STEP, seconds / expected - 1))
        self.fixed_s *= 1 + by * self.fixed_s / expected
        self.each_s *= 1 + by * self.each_s * work / expected


class _Queue:
    """The prompts at one node whose answers have not begun."""

    def __init__(self) -> None:
        self.time = _Time()
        self.asked: list[Asked] = []
        """This proxy's prompts, in order."""
        self.since = 0.0
        """When the node began the first prompt."""

    def work(self, now: float) -> float:
        """Returns how many tokens of these prompts the node has to process."""
        done = max(0.0, now - self.since) / self.time.each_s
        return (
            sum(asked.tokens for asked in self.asked) - min(self.asked[0].tokens, done) if self.asked else 0.0
        )


class Asked:
    """A prompt at a node whose answer has not begun."""

    def __init__(self, queue: _Queue, tokens: float, work: float, now: float, *, learns: bool) -> None:
        """`work`: how many tokens the node has to process until it answers."""
        self._queue, self.tokens, self._work, self._now, self._learns = queue, tokens, work, now, learns
        if not queue.asked:
            queue.since = now
        queue.asked.append(self)

    def answered(self, now: float) -> None:
        """Notes the first token, unless the prompt has left the queue."""
        if self in self._queue.asked:
            self.end()
            self._queue.since = now
            if self._learns:
                self._queue.time.add(self._work, now - self._now)

    def end(self) -> None:
        """Takes the prompt out of the queue."""
        if self in self._queue.asked:
            if self is self._queue.asked[0]:
                self._queue.since = math.inf  # it is unknown when the node begins the next prompt
            self._queue.asked.remove(self)


class Waiting(NamedTuple):
    """A place among the waiting requests."""

    priority: int
    number: int
    holder: str
    """The tenant or the client that has the place."""


class _Reported(NamedTuple):
    step: _Time
    """The node's seconds between tokens, by its number of running requests."""
    report: NodeReport = NodeReport(0.0, 0.0, 0.0, 0.0)
    at: float = 0.0
    others: float = -math.inf
    """How many requests the node had that are not this proxy's; -inf without a recent report."""


class Limits:
    """A proxy's measurements of its nodes, and its waiting requests."""

    def __init__(self, pools: Mapping[Hop, NodePool]) -> None:
        self._pools = pools
        self._queues: WeakKeyDictionary[RoutedNode, _Queue] = WeakKeyDictionary()
        self._reported: dict[str, _Reported] = {}
        self._prompt = 0.0
        """The mean number of tokens that a prefill node computes of a prompt."""
        self._answer_s = 0.0
        """The mean time from an answer's first byte to its end."""
        self._margin = 1.0
        self.waiting: list[Waiting] = []
        """The places of the waiting requests, in order."""
        self._numbers = itertools.count()

    # --- what it learns from ------------------------------------------------------------------------------

    def look(self, now: float, url: str, report: NodeReport) -> None:
        """Learns from a node's report, which has just come: this proxy's requests are counted now."""
        step = _Time()
        if (known := self._reported.get(url)) is not None:
            step = known.step
            tokens, seconds = report.tokens - known.report.tokens, report.token_s - known.report.token_s
            if tokens > 0 and seconds > 0:
                step.add(max(1.0, (known.report.running + report.running) / 2), seconds / tokens)
        others = report.queued + report.running - self._own(url)
        self._reported[url] = _Reported(step, report, now, others)

    def forget(self, now: float) -> None:
        """Forgets reports that are too old."""
        self._reported = {url: known for url, known in self._reported.items() if now <= known.at + _RECENT_S}

    @contextmanager
    def asking(self, hop: Hop, url: str, tokens: float, now: float) -> Iterator[Asked]:
        """Counts a prompt in the node's queue until it is answered or the block ends."""
        if hop == "prefill":
            self._prompt += (tokens - self._prompt) / (_MEAN_OF if self._prompt else 1)
        queue = self._queue(hop, url)
        work = tokens + self._work(hop, url, now)
        asked = Asked(queue, tokens, work, now, learns=hop == "prefill" or not self._room_s(now))
        try:
            yield asked
        finally:
            asked.end()

    def ended(self, seconds: float) -> None:
        """Notes the time from an answer's first byte to its end."""
        self._answer_s += (seconds - self._answer_s) / (_MEAN_OF if self._answer_s else 1)

    def measured(self, predicted: Predicted, first_s: float) -> float | None:
        """Notes how long a request's first byte took. Returns the prediction's error as a share of that time;
        None if there was no prediction."""
        if not predicted.first_s or first_s <= 0:
            return None
        late = first_s > predicted.first_s * self._margin
        self._margin = min(_MOST_MARGIN, max(1.0, self._margin + _STEP * (late - _LATE)))
        return abs(predicted.first_s / first_s - 1)

    # --- what it answers ------------------------------------------------------------------------------------

    def predict(self, prefill: str | None, prompt: RoutedPrompt, now: float, spent: float = 0.0) -> Predicted:
        """Returns the times of a completion that arrived `spent` seconds ago. `prefill` is the node that
        would compute the prompt; None if a decode node would."""
        pools, computed, alone = self._pools, 0.0, 0.0
        if prefill is not None:
            computed, alone = self._seconds("prefill", prefill, pools["prefill"].work(prefill, prompt), now)
        decode = pools["decode"].usable(now)
        loaded, loaded_alone = min(
            (self._seconds("decode", url, prompt.tokens, now) for url in decode), default=(0.0, 0.0)
        )
        first, alone = max(computed, self._room_s(now)) + loaded, alone + loaded_alone
        if first:
            first, alone = first + spent, alone + spent
        steps = []
        for url in decode:
            running, step = min(self._places(url)), self._known(url).step
            relief_s = self._answer_s / running / step.each_s if running else 0.0
            steps.append((step.seconds(running + 1), relief_s))
        return Predicted(first, alone, *min(steps, default=()))

    @contextmanager
    def place(self, priority: int, holder: str, over: ApiError) -> Iterator[Waiting]:
        """Holds a place among the waiting requests while the block runs. Raises `over` if the holder has its
        share of the places. Nobody waits for another holder's requests."""
        holders = [holder, *(place.holder for place in self.waiting)]
        if (holders.count(holder) - 1) * len(set(holders)) >= _MOST_WAITING:
            raise over
        insort(self.waiting, place := Waiting(priority, next(self._numbers), holder))
        try:
            yield place
        finally:
            self.waiting.remove(place)

    def missed(self, predicted: Predicted, limits: LimitsConfig, *, waiting: bool = False) -> ApiError | None:
        """Returns the error 429 for a request that would miss a limit. With `waiting`, returns it until the
        request may go on (see 6). `retry_after` is the time until the request would be admitted."""
        queue, token = predicted.first_s - predicted.alone_s, predicted.token_s
        first = queue / _WAITING_SHARE if waiting else predicted.first_s
        if limits.ttft_s is not None and self._margin * first > limits.ttft_s and queue > 0:
            what = f"The first token would come after {self._margin * first:.3g} s; at most {limits.ttft_s:.3g} s are allowed"
            return _over("ttft_s", what, min(first - limits.ttft_s / self._margin, queue))
        if limits.token_s is not None and token > limits.token_s and predicted.relief_s:
            what = f"A token would take {token:.3g} s; at most {limits.token_s:.3g} s are allowed"
            return _over("token_s", what, (token - limits.token_s) * predicted.relief_s)
        return None

    def _queue(self, hop: Hop, url: str) -> _Queue:
        return self._queues.setdefault(self._pools[hop].node(url), _Queue())

    def _work(self, hop: Hop, url: str, now: float) -> float:
        """Returns how many tokens the node has to process before a new prompt."""
        others = max(0.0, self._known(url).others) * self._prompt if hop == "prefill" else 0.0
        return others + self._queue(hop, url).work(now)

    def _seconds(self, hop: Hop, url: str, tokens: float, now: float) -> tuple[float, float]:
        """Returns how long a prompt's first byte takes at a node, and how long with no other in front."""
        time = self._queue(hop, url).time
        return time.seconds(tokens + self._work(hop, url, now)), time.seconds(tokens)

    def _known(self, url: str) -> _Reported:
        return self._reported.get(url) or _Reported(_Time())

    def _own(self, url: str) -> int:
        """Returns how many requests of this proxy the node has."""
        return round(self._pools["decode"].node(url).load) + len(self._queue("prefill", url).asked)

    def _places(self, url: str) -> tuple[float, float]:
        """Returns how many answers a node has room for, and how many requests it has. Without a recent
        report, these are infinity and 0."""
        known = self._known(url)
        report = known.report
        has = max(0.0, known.others + self._own(url))
        return report.running / report.used if report.running and report.used > 0 else math.inf, has

    def _room_s(self, now: float) -> float:
        """Returns how long it takes until a decode node has room for one more request."""
        decode = self._pools["decode"].usable(now)
        nodes = {url: self._places(url) for pool in self._pools.values() for url in pool.usable(now)}
        places = sum(nodes[url][0] for url in decode)
        if not decode or places == math.inf:
            return 0.0
        return max(0.0, sum(has for _, has in nodes.values()) + 1 - places) * self._answer_s / places


def _over(limit: str, what: str, seconds: float) -> ApiError:
    wait = max(1, math.ceil(min(seconds, 3600.0)))
    return ApiError(429, f"{what} (`{limit}`)", code=f"over_{limit}", retry_after=wait)
