"""Decides whether it pays to load a prefix, from the recent times of loads and steps. Pure.

1. A cost is in seconds a token, and is a linear function of one variable, fitted by least squares. For loads
   the variable is 1 / tokens, because each load also takes a fixed time. For steps it is the position of the
   tokens. A measurement's weight is its number of tokens; each later measurement takes a fifth of the weight
   away.
2. A measurement of more than 1.5 times the expected time, or of less than 1 / 1.5 of it, is left out: it may
   be a stall. If the next is as odd, both replace everything before them.
3. Loads share the link. A load's measurement is the time that it would have taken alone (`LinkTime`). A new
   load is expected to end after the loads under way. If the prompt is computed instead, the loads of other
   requests may end meanwhile. These requests must wait for the computation; their wait is part of its cost.
4. A cost is unknown until three measurements. No prefix is declined while a cost is unknown.
5. A declined load is not measured, so a wrong figure could stay. Therefore a small part of a declined prefix
   is loaded, as a *probe*, if no load began for a minute, or if the last measurement was odd (rule 2). There
   are no probes while loads are under way, because these are measured.
6. A hand-off is a prompt that a prefill node has computed and stored. Its load may take longer than that of
   another prompt (`HANDOFF_MARGIN`). The loads of a stream are never declined, because no client waits for
   them. If a load of a stream is under way when the request after the stream comes, the request waits for it,
   unless the same load would be declined as a hand-off.
7. The engine reports which hand-offs it would decline, so that no prefill node computes them. While a figure
   has to be corrected, it reports that it would decline none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_PROBE_S = 60.0
MARGIN, HANDOFF_MARGIN = 1.05, 2.0
"""A load may take this many times as long as computing. It may take a little longer, so that the decision
does not alternate between equals. A hand-off may take twice as long, because a decode node that computes
prompts delays its answers."""
_KEPT = 0.8
_FAR, _SLACK_S = 1.5, 0.05
"""A measurement is odd if it is more than `_FAR` times the expected time plus `_SLACK_S`, or less than 1 /
`_FAR` of the expected time. `_SLACK_S` is allowed because a delay of this length does no harm."""
_RIDGE = 0.01
_ENOUGH = 3
_LENGTHS = [1 << bits for bits in range(8, 18)]
_STEP_TOKENS = 128
"""The fewest tokens of prompts in a step that is measured: a smaller one takes as long as its fixed part."""


class StepWork(NamedTuple):
    """What a step computes. The workers return it with the step's report."""

    began: float
    prompts: int
    """How many of the step's tokens belong to prompts."""
    tokens: int
    """How many tokens the step computes."""
    positions: float
    """The sum of the positions of all tokens."""


class NotWorth(NamedTuple):
    """Why a prefix is not worth loading, in seconds."""

    load_s: float
    compute_s: float
    """The time to compute the prefix, and the prompts that are computed before it."""
    probe: bool
    """Whether to load a small part all the same."""


class _Line:
    """Seconds a token over another figure `x`."""

    def __init__(self) -> None:
        self.tried = -math.inf
        """When the last measurement began."""
        self._measured = 0
        self._sums = [0.0] * 5
        """The sum of the weights, and the weighted sums of x, y, xx and xy; y is seconds a token."""
        self.odd: tuple[float, float, float] | None = None
        """The last measurement, if it was left out."""

    @property
    def known(self) -> bool:
        """Whether enough was measured."""
        return self._measured >= _ENOUGH

    def due(self, now: float) -> bool:
        """Returns whether a measurement should confirm or correct the figure."""
        return self.odd is not None or now >= self.tried + _PROBE_S

    def seconds(self, tokens: float, x: float) -> float:
        """Returns how long `tokens` probably take. Needs at least one measurement."""
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
    """The time of a link that loads share. The loads that run get equal parts of each second. So a load gets
    as much time as it would take alone, and all loads together get the time for which the link was busy."""

    def __init__(self) -> None:
        self._running = 0
        self._now = self._total = 0.0

    def passed(self, now: float, more: int) -> float:
        """Returns the link's time so far, in seconds. A load's own time is the link's time at its end minus
        the link's time at its start. `more` is 1 if a load starts now, and -1 if a load ends."""
        self._total += (now - self._now) / max(1, self._running)
        self._now, self._running = now, self._running + more
        return self._total


class _Load(NamedTuple):
    began: float
    line: _Line
    tokens: int
    """The tokens that come from the farthest tier."""

    @property
    def expected(self) -> float:
        """How long the load probably takes alone; 0 if that is unknown."""
        return self.line.seconds(self.tokens, 1 / self.tokens) if self.line.known else 0.0


class Costs:
    """The costs of an engine. *Tokens by tier* are the tokens in this host's memory, on its disk, and in the
    pool. The tokens from the farthest tier decide how long a load takes."""

    def __init__(self) -> None:
        self._loading: dict[str, _Load] = {}
        self._loaded_until = 0.0
        """Until this time, the link served loads that have ended. Since then it serves the loads under
        way."""
        self._of_loads = [_Line() for _ in range(3)]
        self._of_steps = _Line()
        self._reported = 0.0
        """When the last step ended."""
        self.declines = 0
        """The most tokens of a hand-off that is not worth loading, by the last `set_declines`. Other threads
        read it."""

    def not_worth(
        self,
        tokens: Sequence[int],
        position: int,
        earlier: Iterable[tuple[int, float]],
        now: float,
        margin: float = MARGIN,
    ) -> NotWorth | None:
        """Returns why a prefix is not worth loading; None if it is, or if that is unknown.

        `tokens`, by tier, would be loaded behind `position` other tokens of the prompt. `earlier` describes
        each prompt that vLLM would compute first: its number of tokens, and their mean position.
        """
        load = self._load(tokens, now)
        if not load.line.known or not self._of_steps.known:
            return None
        computed = sum(tokens)
        own_s = self._of_steps.seconds(computed, position + computed / 2)
        compute_s = own_s + sum(self._of_steps.seconds(some, mean) for some, mean in earlier)
        end_s, delays_s = self._busy_since(now) - now, 0.0
        for other in self._loading.values():
            end_s += other.expected
            delays_s += min(own_s, max(0.0, compute_s - max(0.0, end_s)))
        load_s = load.expected + max(0.0, end_s)
        probe = load.line.due(now) and not self._loading
        return NotWorth(load_s, compute_s, probe) if load_s > margin * compute_s + delays_s else None

    def set_declines(self, earlier: Sequence[tuple[int, float]], now: float) -> None:
        """Decides which hand-offs are not worth loading even alone. `earlier` is as for `not_worth`."""
        loads, steps, declined = self._of_loads[2], self._of_steps, [0]
        if loads.known and steps.known and not loads.due(now):
            earlier_s = sum(steps.seconds(some, mean) for some, mean in earlier)
            declined += (
                some
                for some in _LENGTHS
                if loads.seconds(some, 1 / some)
                > HANDOFF_MARGIN * (earlier_s + steps.seconds(some, some / 2))
            )
        self.declines = max(declined)

    def load_began(self, request_id: str, tokens: Sequence[int], now: float) -> None:
        """Notes that a load of `tokens`, by tier, has begun. A call of `load_ended` has to follow."""
        load = self._loading[request_id] = self._load(tokens, now)
        load.line.tried = now

    def load_ended(
        self, request_id: str, seconds: float | None, *, whole: bool = True
    ) -> tuple[int, float] | None:
        """Notes the end of a load, which took `seconds` of `LinkTime` (None if that is unknown). A load that
        is not `whole` brought only a part, so all of it would have taken longer. Returns its tokens and
        seconds; None if it is not measured."""
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
