"""How fast an engine loads and computes, and whether a load within a step would save time. Pure but for the clock.

A load before the step that needs it costs its whole time; a load within that step only what computing does not cover. But within a step,
all of the step's requests wait for each layer. So it is worth it if the engine has nothing else to do, and if both take long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

_WORTH = 0.1
"""The share of the time to the first token that has to be saved."""
_FEWEST = 32
"""Steps and loads of fewer tokens say nothing about longer ones."""
_NEW = 0.5
"""The weight of the latest measurement."""


class Pace:
    """What one engine has measured. Called on the scheduler's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._load: float | None = None
        self._compute: float | None = None
        self._began: tuple[float, int] | None = None
        self._most = 0
        """The most tokens that a step had."""
        self._computing: frozenset[str] = frozenset()

    def begin_step(self, scheduled: Mapping[str, int], *, waits: bool) -> None:
        """Notes a step's tokens, by request. `waits`: whether it waits for loads, so that it does not say how fast the engine computes."""
        tokens = sum(scheduled.values())
        self._computing = frozenset(scheduled)
        self._most = max(tokens, self._most)
        self._began = None if waits or tokens < _FEWEST else (self._clock(), tokens)

    def end_step(self) -> None:
        """Notes that the last step is over."""
        began, self._began = self._began, None
        if began is not None:
            self._compute = _mixed(self._compute, (self._clock() - began[0]) / began[1])

    def note_load(self, tokens: int, seconds: float) -> None:
        """Notes how long a load took that brought all of its tokens."""
        if tokens >= _FEWEST and seconds > 0:
            self._load = _mixed(self._load, seconds / tokens)

    def forget(self, request_id: str) -> None:
        """Notes that a request computes no more."""
        self._computing -= {request_id}

    def alone(self, request_id: str) -> bool:
        """Returns whether no other request computed in the last step."""
        return self._computing <= {request_id}

    def gains(self, load: int, compute: int) -> bool:
        """Returns whether it is worth it to load so many tokens while so many others are computed. False before both were measured."""
        if self._load is None or self._compute is None:
            return False
        loading, computing = load * self._load, compute * self._compute
        saved = min(loading, min(compute, self._most) * self._compute)
        return saved >= _WORTH * (loading + computing)


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else _NEW * now + (1 - _NEW) * before
