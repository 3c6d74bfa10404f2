"""Decides whether it pays to load a prefix, from the recent times of loads and steps. Pure.

1. A cost is seconds a token, as a line over one other figure: for loads 1 / tokens, because each load takes
   some time of its own; for steps the position of the tokens. Least squares fit the line. Each measurement
   counts by its tokens, and each further one takes a fifth of the weight of those before.
2. A measurement of more than 1.5 times the expected time, or of less than 1 / 1.5 of it, is left out: it may
   be a stall. If the next is as odd, both replace everything before them.
3. Loads share the link. A load is measured by what it would have taken alone (`LinkTime`), and is expected to
   end after those that are under way. vLLM computes a prompt before it goes on with requests that were loaded
   meanwhile, so what they would wait for it counts against computing.
4. A cost is unknown until three measurements. No prefix is declined while a cost is unknown.
5. If nothing was loaded for a minute, or the last load was odd, a small part of the next declined prefix is
   loaded, so that a wrong figure is corrected; not behind other loads, which correct it, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_PROBE_S = 60.0
_MARGIN = 1.05
"""How much longer than computing a load may take, so that equals do not alternate."""
_KEPT = 0.8
_FAR, _SLACK_S = 1.5, 0.05
"""How many times as long is odd; and what a slow measurement takes beyond that, because less hurts nobody."""
_RIDGE = 0.01
_ENOUGH = 3
_STEP_TOKENS = 128
"""The fewest tokens of prompts in a step that is measured: a smaller one takes as long as its fixed part."""


class StepWork(NamedTuple):
    """What a step computes. The workers return it with the step's report."""

    began: float
    prompts: int
    """Tokens of prompts."""
    tokens: int
    """All tokens."""
    positions: float
    """The sum of their positions."""


class NotWorth(NamedTuple):
    """Why a prefix is not worth loading, in seconds."""

    load_s: float
    compute_s: float
    """With the prompts in front of it."""
    probe: bool
    """Whether to load some of it all the same."""


class _Line:
    """Seconds a token over another figure `x`."""

    def __init__(self) -> None:
        self.tried = -math.inf
        """When the last measurement began."""
        self._measured = 0
        self._sums = [0.0] * 5
        """Of the weights, and by weight of x, y, xx and xy; y is seconds a token."""
        self.odd: tuple[float, float, float] | None = None
        """The last measurement, if it was left out."""

    @property
    def known(self) -> bool:
        """Whether enough was measured."""
        return self._measured >= _ENOUGH

    def seconds(self, tokens: float, x: float) -> float:
        """Returns how long `tokens` probably take. Something has to be measured."""
        mean_x, mean_y, xx, xy = (total / self._sums[0] for total in self._sums[1:])
        slope = max(0.0, (xy - mean_x * mean_y) / (xx - mean_x**2 + _RIDGE * mean_x**2))
        base = mean_y - slope * mean_x
        if base < 0:
            base, slope = 0.0, xy / xx
        return tokens * (base + slope * x)

    def add(self, tokens: float, x: float, seconds: float) -> None:
        """Takes in a measurement."""
        expected = self.seconds(tokens, x) if self._measured else seconds
        self._measured += 1
        new = [(tokens, x, seconds)]
        if seconds > _FAR * expected + _SLACK_S or expected > _FAR * seconds:
            if self.odd is None:
                self.odd = new[0]
                return
            new.append(self.odd)
            self._sums = [0.0] * 5
        self.odd = None
        for weight, place, took in new:
            y = took / weight
            products = (1.0, place, y, place * place, place * y)
            self._sums = [_KEPT * total + weight * by for total, by in zip(self._sums, products, strict=True)]


class LinkTime:
    """The time of a link that loads share: each second is divided among those that run. So what a load gets
    of it is what it would take alone, and all loads together get as long as the link was busy."""

    def __init__(self) -> None:
        self._running = 0
        self._now = self._total = 0.0

    def passed(self, now: float, more: int) -> float:
        """Returns the time so far, in seconds. A load gets what passes while it runs. From now on, `more`
        loads run: 1, or -1 for one less."""
        self._total += (now - self._now) / max(1, self._running)
        self._now, self._running = now, self._running + more
        return self._total


class _Load(NamedTuple):
    began: float
    line: _Line
    tokens: int
    """Those from the farthest tier."""

    @property
    def expected(self) -> float:
        """How long it probably takes alone; 0 for unknown."""
        return self.line.seconds(self.tokens, 1 / self.tokens) if self.line.known else 0.0


class Costs:
    """The costs of one engine. Tokens by tier are those in this host's memory, on its disk, and in the pool:
    what comes from the farthest of them decides how long a load takes."""

    def __init__(self) -> None:
        self._loading: dict[str, _Load] = {}
        self._loaded_until = 0.0
        """Until when the link was busy with loads that have ended, and since when with those under way."""
        self._of_loads = [_Line() for _ in range(3)]
        self._of_steps = _Line()
        self._reported = 0.0
        """When the last step ended."""

    def judge(
        self, tokens: Sequence[int], position: int, ahead: Iterable[tuple[int, float]], now: float
    ) -> NotWorth | None:
        """Returns why a prefix is not worth loading; None if it is, or if that is unknown.

        `tokens` by tier would be loaded behind `position` others. `ahead`: how many tokens are computed
        before these can be, and their mean position, for each prompt.
        """
        load = self._load(tokens, now)
        if not load.line.known or not self._of_steps.known:
            return None
        computed = sum(tokens)
        own_s = self._of_steps.seconds(computed, position + computed / 2)
        compute_s = own_s + sum(self._of_steps.seconds(some, mean) for some, mean in ahead)
        end_s, delays_s = self._busy_since(now) - now, 0.0
        for other in self._loading.values():
            end_s += other.expected
            delays_s += min(own_s, max(0.0, compute_s - max(0.0, end_s)))
        load_s = load.expected + max(0.0, end_s)
        due = load.line.odd is not None or now >= load.line.tried + _PROBE_S
        probe = due and not self._loading
        return NotWorth(load_s, compute_s, probe) if load_s > _MARGIN * compute_s + delays_s else None

    def load_began(self, request_id: str, tokens: Sequence[int], now: float) -> None:
        """Notes that a load of these tokens by tier has begun. `load_ended` has to follow."""
        load = self._loading[request_id] = self._load(tokens, now)
        load.line.tried = now

    def load_ended(
        self, request_id: str, seconds: float | None, *, whole: bool = True
    ) -> tuple[int, float] | None:
        """Notes the end of a load, which took `seconds` of `LinkTime`; None if that is unknown. If it is not
        `whole`, it would have taken longer. Returns its tokens and seconds, if they count."""
        since = self._busy_since(0.0)
        load = self._loading.pop(request_id, None)
        if load is None or seconds is None:
            return None
        self._loaded_until = since + seconds
        if not whole and seconds <= load.expected:
            return None
        load.line.add(load.tokens, 1 / load.tokens, seconds)
        return load.tokens, seconds

    def step_ended(self, work: StepWork, now: float) -> tuple[int, float] | None:
        """Notes the end of a step. Returns its tokens and seconds; None if it is not measured."""
        seconds, self._reported = now - max(work.began, self._reported), now
        if work.prompts < _STEP_TOKENS:
            return None
        self._of_steps.add(work.tokens, work.positions / work.tokens, seconds)
        return work.tokens, seconds

    def _load(self, tokens: Sequence[int], now: float) -> _Load:
        tier = max(tier for tier, some in enumerate(tokens) if some)
        return _Load(now, self._of_loads[tier], tokens[tier])

    def _busy_since(self, now: float) -> float:
        """Returns since when the link was busy with the loads under way; `now` if there are none."""
        return max(self._loaded_until, next(iter(self._loading.values())).began) if self._loading else now
