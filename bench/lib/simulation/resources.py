"""What requests share: processors, links, and threads that do one thing after the other."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Hashable

from bench.lib.simulation.clock import Happening, SimulatedTime

_EPSILON = 1e-12


class SharedJob(Happening):
    """Work that is under way; it happens when the work is done."""

    __slots__ = ("begun", "finish", "group", "version")

    def __init__(self, group: _Sharers, work: float) -> None:
        super().__init__()
        self.group = group
        self.begun = group.given
        """The share that each job of its group had got when this one began, since the beginning."""
        self.finish = self.begun + work
        self.version = 0


class _Sharers:
    """Jobs that share what their group gets."""

    __slots__ = ("count", "given", "jobs", "rate")

    def __init__(self) -> None:
        self.given = 0.0
        """What a job that was there from the beginning would have got."""
        self.rate = 0.0
        """What each job gets a second, now."""
        self.count = 0
        self.jobs: list[tuple[float, int, int, SharedJob]] = []

    def next(self) -> SharedJob | None:
        """Returns the job that ends next."""
        while self.jobs and (self.jobs[0][3].done or self.jobs[0][2] != self.jobs[0][3].version):
            heapq.heappop(self.jobs)
        return self.jobs[0][3] if self.jobs else None


class SharedCapacity:
    """A capacity that all groups of jobs under way share fairly, and within a group all jobs: cores, or bytes a second of a link.

    No job gets more than `most`. A group is a process: where sessions are scheduled fairly, as Linux does (autogroup), many threads of one
    process do not take more from other processes than one does.
    """

    def __init__(
        self, time: SimulatedTime, capacity: float, most: float, *, crowded: float = 1.0, others: float = 0.0
    ) -> None:
        """`crowded`: how many times as long work takes if jobs use more than one `most` of the capacity at a time, as cores do that share
        caches. `others`: jobs of other programs, each a group of its own, that are always under way."""
        self.capacity = capacity
        self._time = time
        self._most = most
        self._crowded = crowded
        self._others = others
        self._others_rate = 0.0
        self.wake_s = 0.0
        """How long a thread that was asleep waits until it gets a core at all."""
        self._since = 0.0
        self._groups: dict[Hashable, _Sharers] = {}
        self._numbers = itertools.count()
        self._plans = 0
        self.asked = 0.0
        """All work that was ever begun."""
        self.done = 0.0
        self.taken_by_others = 0.0

    def begin(self, work: float, group: Hashable = None) -> SharedJob:
        """Begins a job of so many core seconds, or bytes."""
        self._advance()
        sharers = self._groups.get(group)
        if sharers is None:
            sharers = self._groups[group] = _Sharers()
        job = SharedJob(sharers, max(0.0, work))
        self.asked += max(0.0, work)
        sharers.count += 1
        self._push(job)
        self._plan()
        return job

    def progress(self, job: SharedJob) -> float:
        """Returns how much of a job is done."""
        self._advance()
        return min(job.group.given, job.finish) - job.begun

    def cut(self, job: SharedJob, work: float) -> None:
        """Lets a job that is under way end after `work` in all; no less than is done."""
        self._advance()
        if job.done:
            return
        before = job.finish
        job.finish = max(job.group.given, min(job.finish, job.begun + work))
        self.asked += job.finish - before
        job.version += 1
        self._push(job)
        self._plan()

    def let_others(self, jobs: float, wake_s: float = 0.0) -> None:
        """From now on, so many jobs of other programs are under way, and threads that were asleep wait for so long."""
        self._advance()
        self.wake_s = wake_s
        self._others = jobs
        self._plan()

    def wake(self) -> Happening:
        """Returns what happens when a thread that was asleep has a core."""
        if self.wake_s:
            return self._time.after(self.wake_s)
        awake = Happening()
        awake.happen()
        return awake

    def settle(self) -> None:
        """Brings the accounts up to the present time."""
        self._advance()

    def _push(self, job: SharedJob) -> None:
        heapq.heappush(job.group.jobs, (job.finish, next(self._numbers), job.version, job))

    def _advance(self) -> None:
        passed = self._time.now - self._since
        self._since = self._time.now
        if passed <= 0:
            return
        for group in self._groups.values():
            if group.count:
                step = passed * group.rate
                group.given += step
                self.done += step * group.count
        self.taken_by_others += passed * self._others_rate

    def _share(self, active: list[_Sharers]) -> None:
        """Gives every group the same, but none more than its jobs can take; what that leaves goes to those that can take more."""
        left, parts, taken = self.capacity, len(active) + self._others, False
        for group in sorted(active, key=lambda one: one.count):
            if group.count > 1 and not taken:
                taken, left, parts = True, left - self._take(left, parts), parts - self._others
            got = min(group.count * self._most, left / parts)
            group.rate = got / group.count
            left -= got
            parts -= 1
        if not taken:
            self._take(left, parts)
        if sum(group.count for group in active) + self._others > 1.0:
            for group in active:
                group.rate /= self._crowded

    def _take(self, left: float, parts: float) -> float:
        """Gives other programs their part, and returns it."""
        self._others_rate = self._others * min(self._most, left / parts) if self._others else 0.0
        return self._others_rate

    def _plan(self) -> None:
        self._plans += 1
        active = [group for group in self._groups.values() if group.count]
        self._share(active)
        first: SharedJob | None = None
        soonest = math.inf
        for group in active:
            job = group.next()
            assert job is not None, "a group counts jobs that it does not have"
            due = max(0.0, job.finish - group.given) / group.rate
            if due < soonest:
                soonest, first = due, job
        if first is not None:
            self._time.call_at(self._time.now + soonest, functools.partial(self._due, self._plans, first))

    def _due(self, plan: int, first: SharedJob) -> None:
        if plan != self._plans:
            return
        self._advance()
        group = first.group
        group.given = max(group.given, first.finish)  # not a rounding error less
        ended = []
        while (job := group.next()) is not None and job.finish <= group.given + _EPSILON * max(1.0, group.given):
            heapq.heappop(group.jobs)
            group.count -= 1
            ended.append(job)
        self._plan()
        for job in ended:
            job.happen()


class SerialThread:
    """A thread on a host's processors: one piece of work after the other, in the order in which they came."""

    def __init__(self, cores: SharedCapacity, group: Hashable = None) -> None:
        """`group`: the process that it belongs to."""
        self._cores = cores
        self._group = group
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
            self._busy = True
            self._cores.wake().then(lambda _: self._next())
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

        self._cores.begin(work, self._group).then(over)


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
