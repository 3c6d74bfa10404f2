"""Discrete events: simulated time, processes that wait in it, and stations at which work queues. A process is
a generator. It yields the events for which it waits."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import Any

Process = Generator["Happening", Any, Any]
"""Yields each happening for which it waits, and gets its value back."""


class Happening:
    """Something that happens once, at a time that may not be known yet."""

    __slots__ = ("_then", "done", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self._then: list[Callable[[Any], None]] = []

    def happen(self, value: Any = None) -> None:
        """Resumes everything that waits for it. Only the first call counts."""
        if self.done:
            return
        self.done, self.value = True, value
        then, self._then = self._then, []
        for call in then:
            call(value)

    def then(self, call: Callable[[Any], None]) -> None:
        """Calls `call` with the value when it happens, or now if it has happened."""
        if self.done:
            call(self.value)
        else:
            self._then.append(call)


class SimulatedTime:
    """The simulated time, in seconds, and the calls that are due."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def call_at(self, when: float, call: Callable[[], object]) -> None:
        """Calls `call` at that time. Calls for the same time keep their order."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def after(self, seconds: float) -> Happening:
        """Returns a happening that happens in `seconds` seconds."""
        happening = Happening()
        self.call_at(self.now + seconds, happening.happen)
        return happening

    def start(self, process: Process) -> Happening:
        """Runs a process up to its first wait. Returns a happening for the process's end, whose value is what
        the process returns."""
        ended = Happening()

        def go_on(value: Any) -> None:
            try:
                awaited = process.send(value)
                while awaited.done:
                    awaited = process.send(awaited.value)
            except StopIteration as stop:
                ended.happen(stop.value)
            else:
                awaited.then(go_on)

        go_on(None)
        return ended

    def run(self) -> None:
        """Runs until nothing is due any more."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


class Station:
    """A thread, the cores of a machine, or a link: servers that take work from one queue, in order."""

    def __init__(self, time: SimulatedTime, servers: int = 1) -> None:
        self._time, self._free = time, [0.0] * servers
        """When each server is free, as a heap."""
        self.asked = 0.0
        """The seconds of all work so far."""

    def run(self, seconds: float) -> Happening:
        """Queues work that occupies a server for `seconds` seconds. Returns a happening for its end."""
        self.asked += seconds
        ended, end = Happening(), max(self._time.now, self._free[0]) + seconds
        heapq.heapreplace(self._free, end)
        self._time.call_at(end, ended.happen)
        return ended


def first_of(*happenings: Happening) -> Happening:
    """Returns a happening that happens with the first of `happenings`."""
    either = Happening()
    for happening in happenings:
        happening.then(either.happen)
    return either


def wait_for_all(happenings: list[Happening]) -> Process:
    for happening in happenings:  # noqa: UP028 - a list takes no values that are sent back
        yield happening
