"""Predicts when a completion's first token will come, and how much time will lie between its tokens. Refuses
a completion that would miss its limits. Pure: the time comes from the caller.

1. A node brings prompts to their first byte one after the other. So the time is a fixed one, and one for each
   token of the prompt and of the prompts in front of it. Each node's answers correct its two figures.
2. A decode node has room for some answers. A prompt behind these waits until enough have ended. It is
   computed meanwhile, so the later of the two counts. Then the decode node loads it.
3. The time between a decode node's tokens is a fixed one, and one for each answer that it generates. Its
   reports correct these figures.
4. Of other proxies' prompts only the number is known, as nodes report it. They count as the mean of this
   proxy's.
5. Predictions are multiplied by a margin, so that about one request of 50 is late.
6. A request that may wait instead goes on once what is in front of it takes half of its limit at most. Until
   then, others overtake it. Those that wait go in the order of their priorities.
7. What is not known counts as nothing. A request with no other in front of it is never refused: it would not
   be answered sooner at another time, and its answer corrects wrong figures.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from launch.openai import ApiError
from launch.proxy.prefixes import RoutedPrompt
from launch.proxy.roles import NodeReport
from launch.proxy.routing import Hop, NodePool
from pd_cache.cluster import LimitsConfig

_ENOUGH = 3
"""How many measurements make a prediction."""
_RECENT_S = 10.0
"""How old a node's report may be."""
_LATE, _STEP = 0.02, 0.1
"""The share of requests that may be late; and how much one measurement changes."""
_MOST_MARGIN = 2.0
"""So that a node that stops with many requests does not have most others refused for long."""
_WAITING_SHARE, _MOST_WAITING = 0.5, 100
"""See 6; and how many requests may wait."""
WAIT_S = 60.0
"""How long a request waits until it is refused."""
_MEAN_OF = 16
"""Means are those of the last ones, about so many."""


class Predicted(NamedTuple):
    """A completion's times in seconds; 0 for what is not known."""

    first_s: float = 0.0
    """Until its first byte."""
    alone_s: float = 0.0
    """The same if no other request were in front of it."""
    token_s: float = 0.0
    """Between two tokens."""
    less_s: float = 0.0
    """How much less that is when an answer of the node has ended."""
    ends_s: float = 0.0
    """How long it takes until one has; 0 if it has none, or that is not known."""


class _Time:
    """The time that work takes: a fixed one, and one for each token or request. A measurement corrects both
    by a tenth at most, so that a stall changes little."""

    def __init__(self) -> None:
        self.fixed_s = self.each_s = math.inf
        self._measured = 0

    def seconds(self, work: float) -> float:
        """Returns how long it probably takes; 0 if too little was measured."""
        return self.fixed_s + self.each_s * work if self._measured >= _ENOUGH else 0.0

    def add(self, work: float, seconds: float) -> None:
        self._measured += 1
        seconds = max(seconds, 1e-6)  # from 0, nothing could correct the figures
        if self._measured <= _ENOUGH:  # the first ones may be slow
            self.fixed_s = min(self.fixed_s, 0.25 * seconds)
            self.each_s = min(self.each_s, 0.75 * seconds / work)
            return
        expected = self.seconds(work)
        by = max(-_STEP, min(_STEP, seconds / expected - 1))
        self.fixed_s *= 1 + by * self.fixed_s / expected
        self.each_s *= 1 + by * self.each_s * work / expected


class _Queue:
    """The prompts that one node has and has sent no byte for."""

    def __init__(self) -> None:
        self.time = _Time()
        self.asked: list[Asked] = []
        """Those of this proxy, in order."""
        self.others = 0.0
        """How many there were of other proxies when the node reported last."""
        self.mean = 0.0
        """The mean tokens of a prompt."""
        self.since = 0.0
        """Since when the node computes the first one."""

    def work(self, tokens: float, now: float) -> float:
        """Returns the tokens that the node has to bring to their first byte until it has done these."""
        work = tokens + self.others * self.mean + sum(asked.tokens for asked in self.asked)
        done = (now - self.since) / self.time.each_s
        return work - min(self.asked[0].tokens, done) if self.asked else work


class Asked:
    """A prompt that a node has and has sent no byte for."""

    def __init__(self, queue: _Queue, tokens: float, now: float, *, learns: bool) -> None:
        self._queue, self.tokens, self._now, self._learns = queue, tokens, now, learns
        self._work = queue.work(tokens, now)
        if not queue.asked:
            queue.since = now
        queue.asked.append(self)
        queue.mean += (tokens - queue.mean) / (_MEAN_OF if queue.mean else 1)

    def answered(self, now: float) -> None:
        """Notes the first byte."""
        self._queue.since = now
        if self._learns:
            self._queue.time.add(self._work, now - self._now)
        self.end()

    def end(self) -> None:
        if self in self._queue.asked:
            self._queue.asked.remove(self)


class _Reported(NamedTuple):
    report: NodeReport
    at: float
    own: int
    """How many requests it had of this proxy."""


class Limits:
    """What one proxy has learned about its nodes."""

    def __init__(self, pools: Mapping[Hop, NodePool]) -> None:
        self._pools = pools
        self._queues: dict[tuple[Hop, str], _Queue] = {}
        self._steps: dict[str, _Time] = {}
        """Seconds between tokens, over running requests, by node."""
        self._reported: dict[str, _Reported] = {}
        self._answer_s = 0.0
        """How long an answer takes from its first byte on."""
        self._margin = 1.0
        self.waiting: list[tuple[int, int]] = []
        """The priorities and numbers of the requests that wait, in order."""
        self._numbers = itertools.count()

    # --- what it learns from ------------------------------------------------------------------------------

    def look(self, now: float, reports: Mapping[str, NodeReport]) -> None:
        """`reports`: those of the nodes that report now."""
        recent = {url: known for url, known in self._reported.items() if now <= known.at + _RECENT_S}
        self._steps = {url: step for url, step in self._steps.items() if url in recent}
        urls = {(hop, url) for hop, pool in self._pools.items() for url in pool.urls()}
        self._queues = {key: queue for key, queue in self._queues.items() if key in urls or queue.asked}
        for url, report in reports.items():
            own = self._own(url)
            if (queue := self._queues.get(("prefill", url))) is not None:
                queue.others = max(0.0, report.queued + report.running - own)
            if (known := recent.get(url)) is not None:
                tokens, seconds = report.tokens - known.report.tokens, report.token_s - known.report.token_s
                if tokens > 0 and seconds > 0:
                    running = (known.report.running + report.running) / 2
                    self._steps.setdefault(url, _Time()).add(max(1.0, running), seconds / tokens)
            recent[url] = _Reported(report, now, own)
        self._reported = recent

    @contextmanager
    def asking(self, hop: Hop, url: str, tokens: float, now: float) -> Iterator[Asked]:
        """Counts a prompt as the node's while the block runs, or until it is answered."""
        queue = self._queues.setdefault((hop, url), _Queue())
        asked = Asked(queue, tokens, now, learns=hop == "prefill" or not self._room_s(now))
        try:
            yield asked
        finally:
            asked.end()

    def ended(self, seconds: float) -> None:
        """Notes how long an answer took from its first byte on."""
        self._answer_s += (seconds - self._answer_s) / (_MEAN_OF if self._answer_s else 1)

    def measured(self, predicted: Predicted, first_s: float) -> float | None:
        """Notes when the first byte came. Returns the prediction's error, as a share of that; None if nothing
        was predicted."""
        if not predicted.first_s or first_s <= 0:
            return None
        late = first_s > predicted.first_s * self._margin
        self._margin = min(_MOST_MARGIN, max(1.0, self._margin + _STEP * (late - _LATE)))
        return abs(predicted.first_s / first_s - 1)

    # --- what it says ---------------------------------------------------------------------------------------

    def predict(self, prefill: str | None, prompt: RoutedPrompt, now: float, spent: float = 0.0) -> Predicted:
        """Returns the times of a completion that arrived `spent` seconds ago. `prefill` is the node that
        would compute the prompt; None if a decode node would."""
        pools, computed, alone = self._pools, 0.0, 0.0
        if prefill is not None:
            work = pools["prefill"].work(prefill, prompt)
            queue = self._queues.get(("prefill", prefill), _Queue())
            computed, alone = queue.time.seconds(queue.work(work, now)), queue.time.seconds(work)
        tokens = prompt.tokens if prompt.named is None else prompt.named.tokens
        decode = pools["decode"].usable(now)
        queues = [self._queues.get(("decode", url), _Queue()) for url in decode]
        loaded, loaded_alone = min(
            ((queue.time.seconds(queue.work(tokens, now)), queue.time.seconds(tokens)) for queue in queues),
            default=(0.0, 0.0),
        )
        first, alone = max(computed, self._room_s(now)) + loaded, alone + loaded_alone
        if first:
            first, alone = first + spent, alone + spent
        steps = [(0.0, 0.0, 0.0)] * (not decode)
        for url in decode:
            running, step = min(self._places(url)), self._steps.get(url, _Time())
            steps.append(
                (step.seconds(running + 1), step.each_s, self._answer_s / running if running else 0.0)
            )
        return Predicted(first, alone, *min(steps))

    @contextmanager
    def place(self, priority: int, over: ApiError) -> Iterator[tuple[int, int]]:
        """Has a request wait while the block runs. Raises `over` if too many wait."""
        if len(self.waiting) >= _MOST_WAITING:
            raise over
        insort(self.waiting, place := (priority, next(self._numbers)))
        try:
            yield place
        finally:
            self.waiting.remove(place)

    def check(self, predicted: Predicted, limits: LimitsConfig, *, waiting: bool = False) -> None:
        """Raises ApiError 429 if a request would miss a limit, or goes on to wait. It should come again when
        it would not."""
        queue, token = predicted.first_s - predicted.alone_s, predicted.token_s
        first = self._margin * (queue / _WAITING_SHARE if waiting else predicted.first_s)
        if limits.ttft_s is not None and first > limits.ttft_s and queue > 0:
            what = f"The first token would come in {first:.3g} s, and may take {limits.ttft_s:.3g} s"
            raise _over("ttft_s", what, min(first - limits.ttft_s, queue))
        if limits.token_s is not None and token > limits.token_s and predicted.ends_s:
            what = f"A token would take {token:.3g} s, and may take {limits.token_s:.3g} s"
            ends = (token - limits.token_s) / predicted.less_s
            raise _over("token_s", what, ends * predicted.ends_s)

    def _own(self, url: str) -> int:
        prefill = self._queues.get(("prefill", url))
        return round(self._pools["decode"].load(url)) + (len(prefill.asked) if prefill else 0)

    def _places(self, url: str) -> tuple[float, float]:
        """Returns for how many answers a node has room, and how many requests it has; infinitely many and
        none if it has not reported lately."""
        if (known := self._reported.get(url)) is None:
            return math.inf, 0.0
        report = known.report
        has = max(0.0, report.queued + report.running + self._own(url) - known.own)
        used = 1.0 if report.queued else report.used
        return report.running / used if report.running and used > 0 else math.inf, has

    def _room_s(self, now: float) -> float:
        """Returns how long it takes until a decode node has room for one more request."""
        if not self._reported:
            return 0.0
        decode = self._pools["decode"].usable(now)
        nodes = {url: self._places(url) for pool in self._pools.values() for url in pool.usable(now)}
        places = sum(nodes[url][0] for url in decode)
        if not decode or places == math.inf:
            return 0.0
        return max(0.0, sum(has for _, has in nodes.values()) + 1 - places) * self._answer_s / places


def _over(limit: str, what: str, seconds: float) -> ApiError:
    wait = max(1, math.ceil(min(seconds, 3600.0)))
    return ApiError(429, f"{what} (`{limit}`)", code=f"over_{limit}", retry_after=wait)
