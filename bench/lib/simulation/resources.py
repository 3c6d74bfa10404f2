"""What requests share: processors, links, and threads that do one thing after the other."""

from __future__ import annotations

import heapq
import itertools
from collections import deque

from bench.lib.simulation.clock import Happening, SimulatedTime

_EPSILON = 1e-12


class SharedJob(Happening):
    """Work that is under way; it happens when the work is done."""

    __slots__ = ("begun", "finish", "version")

    def __init__(self, begun: float, work: float) -> None:
        super().__init__()
        self.begun = begun
        """The share that a job had got since the beginning when this one began."""
        self.finish = begun + work
        self.version = 0


class SharedCapacity:
    """A capacity that all jobs under way share fairly, none of them getting more than `most`: cores, or bytes a second of a link."""

    def __init__(
        self, time: SimulatedTime, capacity: float, most: float, *, crowded: float = 1.0, others: float = 0.0
    ) -> None:
        """`crowded`: how many times as long work takes if jobs use more than one `most` of the capacity at a time, as cores do that share
        caches. `others`: jobs of other programs that are always under way."""
        self.capacity = capacity
        self._time = time
        self._most = most
        self._crowded = crowded
        self._others = others
        self._given = 0.0
        """What a job that was there from the beginning would have got."""
        self._since = 0.0
        self._jobs: list[tuple[float, int, int, SharedJob]] = []
        self._count = 0
        self._numbers = itertools.count()
        self._plans = 0
        self.asked = 0.0
        """All work that was ever begun."""
        self.done = 0.0
        """Work that was done, of the jobs and, in `taken_by_others`, of other programs."""
        self.taken_by_others = 0.0

    def begin(self, work: float) -> SharedJob:
        """Begins a job of so many core seconds, or bytes."""
        self._advance()
        job = SharedJob(self._given, max(0.0, work))
        self.asked += max(0.0, work)
        self._count += 1
        self._push(job)
        self._plan()
        return job

    def progress(self, job: SharedJob) -> float:
        """Returns how much of a job is done."""
        self._advance()
        return min(self._given, job.finish) - job.begun

    def cut(self, job: SharedJob, work: float) -> None:
        """Lets a job that is under way end after `work` in all; no less than is done."""
        self._advance()
        if job.done:
            return
        before = job.finish
        job.finish = max(self._given, min(job.finish, job.begun + work))
        self.asked += job.finish - before
        job.version += 1
        self._push(job)
        self._plan()

    def let_others(self, jobs: float) -> None:
        """From now on, so many jobs of other programs are under way."""
        self._advance()
        self._others = jobs
        self._plan()

    def settle(self) -> None:
        """Brings the accounts up to the present time."""
        self._advance()

    def _rate(self) -> float:
        alone = self._count + self._others <= 1.0
        rate = min(self._most, self.capacity / (self._count + self._others))
        return rate if alone else rate / self._crowded

    def _push(self, job: SharedJob) -> None:
        heapq.heappush(self._jobs, (job.finish, next(self._numbers), job.version, job))

    def _advance(self) -> None:
        now = self._time.now
        passed = now - self._since
        self._since = now
        if passed <= 0:
            return
        if self._count:
            step = passed * self._rate()
            self._given += step
            self.done += step * self._count
        if self._others:
            each = min(self._most, self.capacity / (self._count + self._others))
            self.taken_by_others += passed * each * self._others

    def _plan(self) -> None:
        self._plans += 1
        while self._jobs and (self._jobs[0][3].done or self._jobs[0][2] != self._jobs[0][3].version):
            heapq.heappop(self._jobs)
        if not self._jobs:
            return
        plan, first = self._plans, self._jobs[0][3]
        left = max(0.0, first.finish - self._given)
        self._time.call_at(self._time.now + left / self._rate(), lambda: self._due(plan, first))

    def _due(self, plan: int, first: SharedJob) -> None:
        if plan != self._plans:
            return
        self._advance()
        self._given = max(self._given, first.finish)  # not a rounding error less
        ended = []
        while self._jobs and self._jobs[0][0] <= self._given + _EPSILON * max(1.0, self._given):
            _, _, version, job = heapq.heappop(self._jobs)
            if not job.done and version == job.version:
                ended.append(job)
        self._count -= len(ended)
        self._plan()
        for job in ended:
            job.happen()


class SerialThread:
    """A thread on a host's processors: one piece of work after the other, in the order in which they came."""

    def __init__(self, cores: SharedCapacity) -> None:
        self._cores = cores
        self._waiting: deque[tuple[float, Happening]] = deque()
        self._busy = False
        self.asked = 0.0
        """All work that ever came."""

    def run(self, work: float) -> Happening:
        """Returns what happens when a piece of work that takes `work` core seconds is done."""
        ended = Happening()
        self.asked += work
        self._waiting.append((work, ended))
        if not self._busy:
            self._next()
        return ended

    def _next(self) -> None:
        if not self._waiting:
            self._busy = False
            return
        self._busy = True
        work, ended = self._waiting.popleft()

        def over(_: object) -> None:
            ended.happen()
            self._next()

        self._cores.begin(work).then(over)


class Gate:
    """A number of places, given in the order in which they were asked for."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[Happening] = deque()

    @property
    def queued(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    @property
    def free(self) -> int:
        return self._free

    def take(self) -> Happening:
        """Returns what happens when there is a place; `give` it back."""
        got = Happening()
        if self._free:
            self._free -= 1
            got.happen()
        else:
            self._waiting.append(got)
        return got

    def give(self) -> None:
        """Gives a place back."""
        if self._waiting:
            self._waiting.popleft().happen()
        else:
            self._free += 1
