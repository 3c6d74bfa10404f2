"""An engine in simulation: continuous batching as in `launch/engines/reference`, on an accelerator of its
own.

A request waits for room, and then for its prefix from the pool. Then the engine computes its prompt step by
step, and after that a token a tick. A tick computes one step of one prompt, and a token of every request that
decodes. The blocks that a request needs are reserved when it leaves the queue. Up to `GRAIN` ticks that only
produce tokens are simulated together, until a request comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from bench.lib.simulation.clock import Happening, Process, SimulatedTime, first_of
from bench.lib.simulation.costs import UnitCosts
from bench.lib.simulation.workload import SimulatedRequest
from launch.proxy.routing.roles import NodeReport
from pd_cache.vllm.costs import Costs, LinkTime, StepWork

GRAIN = 32


class Generating:
    """A request in an engine."""

    def __init__(
        self, request: SimulatedRequest, output: int, announced: int, on_tokens: Callable[[int], None]
    ) -> None:
        """`output`: tokens to generate. `announced`: tokens that a prefill node is storing. `on_tokens` is
        called with the number of new tokens; the first token comes alone."""
        self.request, self.output, self.announced, self.on_tokens = request, output, announced, on_tokens
        self.loaded = self.stored = 0
        """The prompt tokens that were loaded; and those that were loaded, were stored or are being stored."""
        self.position = 0
        self.produced = 0
        self.at = 0.0
        """When its last token came."""
        self.first, self.ended = Happening(), Happening()
        self.storing = Happening()
        """The last store of its prompt's chunks needs the engine's blocks no longer."""
        self.storing.happen()

    @property
    def needed(self) -> int:
        """Tokens of the paged cache that are reserved for it."""
        return self.request.tokens + self.output


class SimulatedEngine:
    """The requests of one node."""

    def __init__(
        self,
        time: SimulatedTime,
        costs: UnitCosts,
        load: Callable[[Generating], Process],
        store: Callable[[Generating], Happening],
    ) -> None:
        """`load` loads the prefix of a prompt that the pool has, and sets `loaded`. `store` begins to store
        the computed tokens from `stored` to `position`. It returns a happening for the moment when the store
        no longer needs the engine's blocks."""
        self._time, self._costs, self._load_prefix, self._store = time, costs, load, store
        self._waiting: deque[Generating] = deque()
        self._prefilling: deque[Generating] = deque()
        self._decoding: list[Generating] = []
        self._loading = 0
        self._free = costs.engine.kv_tokens
        self._wake = Happening()
        self.learned, self.link = Costs(), LinkTime()
        self.asked = 0.0
        """The seconds of all steps so far."""
        self._held, self._since = 0.0, 0.0
        self._ended = self._tokens = 0
        self._token_s = 0.0
        """The seconds between each of `_tokens` and the token before it, added up."""
        time.start(self._run())

    @property
    def full(self) -> bool:
        """Whether the engine takes no more requests."""
        return len(self._waiting) >= self._costs.engine.max_queue

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding or self._loading)

    def report(self) -> NodeReport:
        """Returns a report as a node's metrics would give it."""
        running = len(self._prefilling) + len(self._decoding) + self._loading
        shape = self._costs.engine
        used = max(1 - self._free / shape.kv_tokens, running / shape.max_running)
        return NodeReport(len(self._waiting), running, used, self._ended, self._tokens, self._token_s)

    @property
    def ahead(self) -> Iterator[tuple[int, float]]:
        """Yields, for each prompt that is being computed, how many tokens are left and their mean position;
        see `Costs.not_worth`."""
        for generating in self._prefilling:
            end = generating.request.tokens
            yield end - generating.position, (generating.position + end) / 2

    def held(self, more: int = 0) -> float:
        """Reserves `more` tokens of the paged cache. Returns the sum of reserved tokens over all seconds so
        far."""
        self._held += (self._costs.engine.kv_tokens - self._free) * (self._time.now - self._since)
        self._since = self._time.now
        self._free -= more
        return self._held

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
            if self._prefilling:
                yield from self._prefill(self._prefilling[0])
            if self._decoding:
                yield from self._decode(1 if self._prefilling else GRAIN)

    def _admit(self) -> None:
        shape = self._costs.engine
        while (
            self._waiting and len(self._prefilling) + len(self._decoding) + self._loading < shape.max_running
        ):
            generating = self._waiting[0]
            # a request larger than the whole cache runs alone: no engine would have taken it
            if generating.needed > self._free and self._free < shape.kv_tokens:
                return
            self._waiting.popleft()
            self.held(generating.needed)
            self._loading += 1
            self._time.start(self._load(generating))

    def _load(self, generating: Generating) -> Process:
        yield from self._load_prefix(generating)
        self._loading -= 1
        # the last token is computed even if it was loaded
        generating.position = min(generating.loaded, generating.request.tokens - 1)
        generating.stored = generating.loaded
        self._prefilling.append(generating)
        self._wake.happen()

    def _prefill(self, generating: Generating) -> Process:
        step = self._costs.engine.step_tokens
        end = min((generating.position // step + 1) * step, generating.request.tokens)
        seconds = self._costs.prefill.step(end - generating.position, generating.position)
        self.asked += seconds
        begin, tokens = self._time.now, end - generating.position
        yield self._time.after(seconds)
        self.learned.step_ended(
            StepWork(begin, tokens, tokens, tokens * (generating.position + end) / 2), self._time.now
        )
        generating.position = end
        if (
            end == generating.request.tokens or generating.storing.done
        ):  # complete chunks go to the pool while the rest is computed
            generating.storing = self._store(generating)
            generating.stored = end
        if end < generating.request.tokens:
            return
        self._prefilling.popleft()
        generating.produced, generating.at = 1, self._time.now
        generating.first.happen()
        generating.on_tokens(1)
        if generating.produced >= generating.output:
            self._end(generating)
        else:
            self._decoding.append(generating)

    def _decode(self, most: int) -> Process:
        batch, begun = self._decoding, self._time.now
        ticks = min(most, min(generating.output - generating.produced for generating in batch))
        context = (
            sum(generating.request.tokens + generating.produced for generating in batch)
            + len(batch) * (ticks - 1) / 2
        )
        each = self._costs.decode.step(len(batch), context)
        if ticks > 1:
            self._wake = Happening()
            yield first_of(self._time.after(each * ticks), self._wake)
            ticks = min(ticks, int((self._time.now - begun) / max(each, 1e-12)) + 1)
        self.asked += each * ticks
        yield self._time.after(begun + each * ticks - self._time.now)
        self._tokens += ticks * len(batch)
        for generating in batch:
            self._token_s += self._time.now - generating.at
            generating.at = self._time.now
            generating.produced += ticks
            generating.on_tokens(ticks)
            if generating.produced >= generating.output:
                self._end(generating)
        self._decoding = [generating for generating in batch if generating.produced < generating.output]

    def _end(self, generating: Generating) -> None:
        generating.ended.happen()
        self._ended += 1

        def free(_: object) -> None:
            self.held(-generating.needed)
            self._wake.happen()

        generating.storing.then(free)
