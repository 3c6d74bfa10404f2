"""What the proxy keeps of the last hour's requests. Pure.

Everything is bounded: for each minute of an hour, where prompts were found; for each ten minutes, some slow requests; for the last minute,
which decode node took over from which prefill node, for so many pairs of nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from launch.proxy.metrics import Trip
from pd_cache.reasons import RequestReport

MINUTES = 60
SLOWEST = 12
"""How many slow requests are kept of each ten minutes, and shown of the hour."""
_MINUTE_S = 60.0
_SLOW_SPAN_S = 600.0
_SPAN_S = 5.0
_SPANS = 12
_MOST_PAIRS = 1024


class PromptSources(NamedTuple):
    """Where the tokens of one prompt came from, in tokens. Their sum is the prompt."""

    engine: float
    memory: float
    disk: float
    pool: float
    computed: float


def prompt_sources(report: RequestReport) -> PromptSources:
    """Returns where the tokens of a prompt came from. Loaded ones are split in proportion to what was read from each tier. That can be more
    than what was loaded, because the last token of a prompt is always computed, even if its chunk was read."""
    read = report.memory + report.disk + report.pool
    scale = report.loaded / read if read else 0.0
    pool = report.pool * scale if read else float(report.loaded)
    return PromptSources(report.at_hand, report.memory * scale, report.disk * scale, pool, report.computed)


class PromptMinute(msgspec.Struct):
    """The prompts of one minute."""

    number: int
    """Minutes since the clock's zero."""
    requests: int = 0
    untold: int = 0
    """How many of them came back without a report, such as streams of vLLM."""
    engine: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    pool: float = 0.0
    computed: float = 0.0

    def add(self, report: RequestReport | None) -> None:
        self.requests += 1
        if report is None:
            self.untold += 1
            return
        for source, tokens in prompt_sources(report)._asdict().items():
            setattr(self, source, getattr(self, source) + tokens)


class SlowRequest(msgspec.Struct, frozen=True):
    """A request that took long."""

    request_id: str
    at: float
    """When it ended, by the caller's clock."""
    seconds: float
    first_byte_s: float | None
    """How long the client waited for the first byte; None if there was none."""
    status: int
    """What the client was sent; 499 if it went away before."""
    trip: Trip

    @property
    def waited(self) -> float:
        """The seconds by which requests are compared: those to the first byte, because a long answer is not slow."""
        return self.seconds if self.first_byte_s is None else self.first_byte_s


class Flow(msgspec.Struct):
    """What one decode node took over from one prefill node."""

    requests: int = 0
    tokens: float = 0.0
    """Tokens whose KV the decode node loaded from the pool. What its own memory and disk had came from no other node."""

    def add(self, requests: int, tokens: float) -> None:
        self.requests += requests
        self.tokens += tokens


class _FewSeconds(msgspec.Struct):
    """A few seconds."""

    number: int
    requests: int = 0
    flows: dict[tuple[str, str], Flow] = {}


class RecentRequests:
    """The requests of the last hour."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds that never go back."""
        self._clock = clock
        self._minutes: deque[PromptMinute] = deque(maxlen=MINUTES)
        self._slow: deque[tuple[int, list[SlowRequest]]] = deque(maxlen=int(MINUTES * _MINUTE_S / _SLOW_SPAN_S) + 1)
        self._last: deque[_FewSeconds] = deque(maxlen=_SPANS)

    def note(self, request_id: str, seconds: float, first_byte_s: float | None, status: int, trip: Trip) -> None:
        """Takes in a request that has ended. Its prompt counts at the first node that worked on it."""
        now = self._clock()
        number = int(now // _MINUTE_S)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(PromptMinute(number))
        self._minutes[-1].add(next((hop.report for hop in trip.hops), None))
        self._note_slow(SlowRequest(request_id, now, seconds, first_byte_s, status, trip), now)
        span = self._span(now)
        span.requests += 1
        nodes = {hop.hop: hop for hop in trip.hops}
        if "prefill" in nodes and "decode" in nodes:
            report = nodes["decode"].report
            pair = nodes["prefill"].node, nodes["decode"].node
            if pair in span.flows or len(span.flows) < _MOST_PAIRS:
                span.flows.setdefault(pair, Flow()).add(1, 0.0 if report is None else prompt_sources(report).pool)

    def minutes(self) -> list[PromptMinute | None]:
        """Returns the last hour, the present minute last. None stands for a minute without requests."""
        last = int(self._clock() // _MINUTE_S)
        known = {minute.number: minute for minute in self._minutes}
        return [known.get(number) for number in range(last - MINUTES + 1, last + 1)]

    def slowest(self, client: str | None = None) -> list[SlowRequest]:
        """Returns the requests of the last hour that waited longest for their first byte. `client`: only that client's."""
        oldest = self._clock() - MINUTES * _MINUTE_S
        found = [
            one
            for _, kept in self._slow
            for one in kept
            if one.at >= oldest and (client is None or one.trip.client == client)
        ]
        return sorted(found, key=lambda one: -one.waited)[:SLOWEST]

    def flows(self) -> dict[tuple[str, str], Flow]:
        """Returns the flows of the last minute, by the URLs of prefill and decode node."""
        found: dict[tuple[str, str], Flow] = {}
        for span in self._last_minute():
            for pair, flow in span.flows.items():
                found.setdefault(pair, Flow()).add(flow.requests, flow.tokens)
        return found

    def requests_s(self) -> float:
        """Returns how many requests ended a second, over the last minute."""
        return sum(span.requests for span in self._last_minute()) / (_SPANS * _SPAN_S)

    def _last_minute(self) -> list[_FewSeconds]:
        oldest = int(self._clock() // _SPAN_S) - _SPANS
        return [span for span in self._last if span.number > oldest]

    def _span(self, now: float) -> _FewSeconds:
        number = int(now // _SPAN_S)
        if not self._last or self._last[-1].number != number:
            self._last.append(_FewSeconds(number))
        return self._last[-1]

    def _note_slow(self, request: SlowRequest, now: float) -> None:
        number = int(now // _SLOW_SPAN_S)
        if not self._slow or self._slow[-1][0] != number:
            self._slow.append((number, []))
        kept = self._slow[-1][1]
        kept.append(request)
        if len(kept) > SLOWEST:
            kept.remove(min(kept, key=lambda one: one.waited))
