"""The proxy's record of the last hour's requests. Pure.

Everything is bounded: for each minute of an hour, where prompts were found, and some slow requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from launch.proxy.trips import Trip
from pd_cache.reasons import RequestReport

MINUTES = 60
SLOWEST = 12
"""How many slow requests are kept of each minute, and shown of the hour."""
_MINUTE_S = 60.0
_SOURCES = ("engine", "memory", "disk", "pool", "computed")


def prompt_sources(report: RequestReport) -> dict[str, float]:
    """Returns how many tokens of a prompt came from each source. Loaded tokens are split in proportion to the
    tokens that were read from each tier. More tokens may be read than loaded, because the last token of a
    prompt is always computed, even if its chunk was read."""
    read = report.memory + report.disk + report.pool
    scale = report.loaded / read if read else 0.0
    return {
        "engine": report.at_hand,
        "memory": report.memory * scale,
        "disk": report.disk * scale,
        "pool": report.pool * scale if read else report.loaded,
        "computed": report.computed,
    }


class EndedRequest(NamedTuple):
    request_id: str
    seconds: float
    first_byte_s: float | None
    """How long the client waited for the first byte; None if there was none."""
    status: int
    """The status that the client got; 499 if the client went away before that; the error's status if the
    answer was cut."""
    trip: Trip
    streamed: bool = False
    """Whether its first byte was that of its first token."""
    prefill_s: float | None = None
    """How long its prefill hop took; None without one."""
    at: float = 0.0
    """When it ended; `RecentRequests` sets it."""

    @property
    def waited(self) -> float:
        """Requests are compared by these seconds: until the first byte, because a long answer is not slow."""
        return self.seconds if self.first_byte_s is None else self.first_byte_s


class Minute(msgspec.Struct):
    number: int
    """The minute, counted from the clock's zero."""
    requests: int = 0
    untold: int = 0
    """How many answers came without a report, as streams from vLLM do."""
    failed: Counter[int] = msgspec.field(default_factory=Counter)
    """How many requests ended with a status of 400 or more, by status."""
    first_token: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=200))
    """Seconds to the first token of its last streams."""
    pace: list[float] = msgspec.field(default_factory=lambda: [0.0] * 4)
    """Four sums: tokens and seconds of prompts with loaded tokens, then tokens and seconds of all others."""
    sources: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(_SOURCES, 0.0))
    slow: list[EndedRequest] = []


class RecentRequests:
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds that never go back."""
        self._clock = clock
        self._minutes: deque[Minute] = deque(maxlen=MINUTES)

    def note(self, ended: EndedRequest) -> None:
        """Takes in a request that has ended. Its prompt counts at the first node that worked on it."""
        now = self._clock()
        number = int(now // _MINUTE_S)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(Minute(number))
        minute = self._minutes[-1]
        minute.requests += 1
        if ended.status >= 400:
            minute.failed[ended.status] += 1
        first_token_s = ended.first_byte_s if ended.streamed and ended.status < 400 else None
        if first_token_s is not None:
            minute.first_token.append(first_token_s)
        if (report := next((hop.report for hop in ended.trip.hops), None)) is not None:
            for source, tokens in prompt_sources(report).items():
                minute.sources[source] += tokens
            took_s = first_token_s if ended.prefill_s is None else ended.prefill_s
            if took_s is not None and report.reason != "too_short":
                minute.pace[0 if report.loaded else 2] += report.loaded + report.computed
                minute.pace[1 if report.loaded else 3] += took_s
        elif ended.status < 400:
            minute.untold += 1
        minute.slow.append(ended._replace(at=now))
        if len(minute.slow) > SLOWEST:
            minute.slow.remove(min(minute.slow, key=lambda ended: ended.waited))

    def minutes(self) -> list[Minute | None]:
        """Returns the last hour, the present minute last. None stands for a minute without requests."""
        last = int(self._clock() // _MINUTE_S)
        known = {minute.number: minute for minute in self._minutes}
        return [known.get(number) for number in range(last - MINUTES + 1, last + 1)]

    def saved_s(self) -> float | None:
        """Returns how much longer the last hour's prompts with hits would have taken at the pace of prompts
        without hits; None if one of the kinds is missing."""
        known = [minute for minute in self.minutes() if minute is not None]
        hit_tokens, hit_s, tokens, seconds = (
            sum(minute.pace[index] for minute in known) for index in range(4)
        )
        return hit_tokens * seconds / tokens - hit_s if tokens and hit_tokens else None

    def slowest(self, client: str | None = None) -> list[EndedRequest]:
        """Returns the requests of the last hour that waited longest for their first byte; with `client`, only
        the requests of that client."""
        slow = [ended for minute in self.minutes() if minute is not None for ended in minute.slow]
        return sorted(
            (ended for ended in slow if client in (None, ended.trip.client)), key=lambda ended: -ended.waited
        )[:SLOWEST]

    def rate(self) -> float:
        """Returns how many requests ended a second, over the present minute and the last."""
        ended = sum(minute.requests for minute in self.minutes()[-2:] if minute is not None)
        return ended / (_MINUTE_S + self._clock() % _MINUTE_S)


def first_token_within(minutes: Iterable[Minute | None], part: float) -> float | None:
    """Returns the seconds within which `part` of the minutes' streams had their first token; None without
    streams."""
    times = sorted(time for minute in minutes if minute is not None for time in minute.first_token)
    return times[min(len(times) - 1, int(part * len(times)))] if times else None
