"""An engine in simulation: continuous batching as in `launch/engines/reference/scheduler.py`.

Requests wait for room, then for their prefix from the pool, then compute their prompt step by step, then one token a tick. A tick computes
one step of one prompt and a token of every request that decodes. What a request needs of the paged cache is reserved when it leaves the
queue. Ticks in which nothing but tokens happen are taken together, up to `grain` of them, and cut off when a request comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

from bench.lib.simulation.clock import Happening, Process, SimulatedTime, first_of
from bench.lib.simulation.costs import UnitCosts
from bench.lib.simulation.resources import SharedCapacity
from bench.lib.simulation.workload import SimulatedRequest


class Generating:
    """A request in an engine."""

    def __init__(self, request: SimulatedRequest, output: int, on_tokens: Callable[[int], None]) -> None:
        """`output`: tokens to generate. `on_tokens` is called with the number of tokens that have come, the first one alone."""
        self.request = request
        self.output = output
        self.on_tokens = on_tokens
        self.announced = 0
        self.loaded = 0
        """Prompt tokens that were loaded."""
        self.first = Happening()
        """Its first token."""
        self.ended = Happening()
        self.stored = Happening()
        """The engine's blocks are free of the store of its prompt."""
        self.position = 0
        self.produced = 0

    @property
    def needed(self) -> int:
        """Tokens of the paged cache that are reserved for it."""
        return self.request.tokens + self.output


class Loading(Protocol):
    """What an engine needs of its node."""

    def load(self, generating: Generating) -> Process:
        """Loads what the pool has of the prompt, and sets `loaded`."""

    def store(self, generating: Generating) -> Happening:
        """Begins to store what was computed; happens when the engine's blocks are free of it."""


class SimulatedEngine:
    """The requests of one node."""

    def __init__(
        self,
        time: SimulatedTime,
        cores: SharedCapacity,
        costs: UnitCosts,
        node: Loading,
        grain: int,
        group: Hashable = None,
    ) -> None:
        """`cores`: of the machine that computes, in the process `group`. `grain`: the most ticks taken together."""
        self._time = time
        self._cores = cores
        self._costs = costs
        self._node = node
        self._grain = grain
        self._group = group
        self._waiting: deque[Generating] = deque()
        self._prefilling: deque[Generating] = deque()
        self._decoding: list[Generating] = []
        self._loading = 0
        self._free = costs.engine.kv_tokens
        self._wake = Happening()
        self.prefill_asked = 0.0
        """Core seconds of prefill steps, and of decode steps."""
        self.decode_asked = 0.0
        self.computed = 0
        """Prompt tokens."""
        time.start(self._run())

    @property
    def full(self) -> bool:
        """Whether it takes no more requests."""
        return len(self._waiting) >= self._costs.engine.max_queue

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding or self._loading)

    def submit(self, generating: Generating) -> None:
        """Queues a request; the caller has seen that there is room in the queue."""
        self._waiting.append(generating)
        self._wake.happen()

    def _run(self) -> Process:
        while True:
            self._admit()
            if not self._prefilling and not self._decoding:
                self._wake = Happening()
                yield self._wake
                yield self._cores.wake()
                continue
            computing = self._prefilling[0] if self._prefilling else None
            tokens = 0
            if computing is not None:
                tokens = self._step_of(computing)
                seconds = self._costs.prefill.step(tokens, computing.position)
                self.prefill_asked += seconds
                self.computed += tokens
                yield self._cores.begin(seconds, self._group)
                computing.position += tokens
                if computing.position >= computing.request.tokens:
                    self._prefilling.popleft()
                    self._prompt_done(computing)
            if self._decoding:
                yield from self._decode(1 if self._prefilling else self._grain)

    def _admit(self) -> None:
        most = self._costs.engine.max_running
        while self._waiting and len(self._prefilling) + len(self._decoding) + self._loading < most:
            generating = self._waiting[0]
            # a request larger than the whole cache runs alone: no engine would have taken it
            if generating.needed > self._free and self._free < self._costs.engine.kv_tokens:
                return
            self._waiting.popleft()
            self._free -= generating.needed
            self._loading += 1
            self._time.start(self._load(generating))

    def _load(self, generating: Generating) -> Process:
        yield from self._node.load(generating)
        self._loading -= 1
        # the last token is computed even if it was loaded
        generating.position = min(generating.loaded, generating.request.tokens - 1)
        self._prefilling.append(generating)
        self._wake.happen()

    def _step_of(self, generating: Generating) -> int:
        step = self._costs.engine.step_tokens
        end = min((generating.position // step + 1) * step, generating.request.tokens)
        return end - generating.position

    def _prompt_done(self, generating: Generating) -> None:
        generating.stored = self._node.store(generating)
        generating.produced = 1
        generating.first.happen()
        generating.on_tokens(1)
        if generating.produced >= generating.output:
            self._end(generating)
        else:
            self._decoding.append(generating)

    def _end(self, generating: Generating) -> None:
        generating.ended.happen()

        def free(_: object) -> None:
            self._free += generating.needed
            self._wake.happen()

        generating.stored.then(free)

    def _decode(self, most: int) -> Process:
        batch = self._decoding
        ticks = min(most, min(one.output - one.produced for one in batch))
        context = sum(one.request.tokens + one.produced for one in batch) + len(batch) * (ticks - 1) / 2
        each = self._costs.decode.step(len(batch), context)
        job = self._cores.begin(each * ticks, self._group)
        if ticks > 1:
            self._wake = Happening()
            yield first_of(job, self._wake)
            if not job.done:
                ticks = min(ticks, int(self._cores.progress(job) / max(each, 1e-12)) + 1)
                self._cores.cut(job, ticks * each)
        yield job
        self.decode_asked += each * ticks
        going_on = []
        for one in batch:
            one.produced += ticks
            one.on_tokens(ticks)
            if one.produced >= one.output:
                self._end(one)
            else:
                going_on.append(one)
        self._decoding = going_on
