"""Decides which request does what next. Runs on the model thread only, and takes no lock.

A request waits for blocks, then for its prefix from the cache (LOADING), then computes the rest of its prompt step by step (PREFILL),
then one token per tick (DECODE). Blocks for prompt and output are reserved when it leaves the queue, so no running request can run out of
them. Each tick computes one step of one prompt and one token of every decoding request.

The cache is only ever called on worker threads. A load that outlives its deadline is left behind: the request starts over on other
blocks. Its first blocks return to the pool when the call has ended, because until then the call may still write to them.
"""

from __future__ import annotations

import array
import enum
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from launch.engines.reference.cache import BlockLease, BlockPool, LoadOutcome, LoadResult, Prefix, PrefixCache
from launch.engines.reference.model import PagedModel, Sampler, StepPart
from launch.engines.reference.requests import FinishReason, Generation, GenerationError, GenerationStats, TokenEvent
from pd_cache.cluster import HandoffConfig, ReferenceEngineConfig
from pd_cache.reasons import RequestReport

_logger = logging.getLogger(__name__)

STORE_THREADS = 2
"""How many requests are stored at the same time."""


class _Phase(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"


class _LoadAttempt:
    """One attempt to load a request's prefix."""

    def __init__(self, started: float, deadline: float) -> None:
        self.started = started
        self.deadline = deadline
        self.cancelled = threading.Event()


class _Active:
    """A request between submission and end."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.prompt = array.array("i", generation.request.prompt)
        self.sampler = Sampler(generation.request.sampling)
        self.phase = _Phase.WAITING
        self.lease: BlockLease | None = None
        self.load: _LoadAttempt | None = None
        self.prefix: Prefix | None = None
        self.skip_cache = False
        self.cache_answered = False
        """Whether the load ended as it should: only then are chunks that are yet to be stored worth announcing."""
        self.loaded = 0
        """Prompt tokens that the cache put into the pages."""
        self.result = LoadResult(LoadOutcome.NOTHING, 0, reason="not_asked")
        """How its load ended."""
        self.position = 0
        """Tokens whose KV is in the pages."""
        self.produced = 0
        self.last_token = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        assert self.lease is not None
        return self.lease.blocks


class Scheduler:
    """The requests of one engine. Every method is for the model thread; `post` passes calls from other threads to it."""

    def __init__(
        self,
        model: PagedModel,
        config: ReferenceEngineConfig,
        handoff: HandoffConfig,
        cache: PrefixCache | None,
        metrics: EngineMetrics,
        *,
        load_timeout_s: float,
        post: Callable[[Callable[[], None]], None],
        on_end: Callable[[Generation], None],
    ) -> None:
        self.pool = BlockPool(config.num_blocks)
        self._model = model
        self._config = config
        self._handoff = handoff
        self._cache = cache
        self._metrics = metrics
        self._load_timeout_s = load_timeout_s
        self._post = post
        self._on_end = on_end
        self._waiting: deque[_Active] = deque()
        self._running: list[_Active] = []
        self._by_generation: dict[Generation, _Active] = {}
        self._lent_blocks = 0
        """Blocks that the pool lacks because of stores and of loads left behind."""
        self._loaders = self._storers = None
        if cache is not None:
            self._loaders = Workers("pd-cache-load", threads=config.max_running)
            self._storers = Workers("pd-cache-store", threads=STORE_THREADS, backlog=config.max_running)

    # --- what happens to it --------------------------------------------------------------------------------------

    def add(self, generation: Generation) -> None:
        """Adds a request to the queue; the caller has checked that it fits."""
        active = _Active(generation)
        self._by_generation[generation] = active
        self._waiting.append(active)

    def cancel(self, generation: Generation) -> None:
        """Stops working on a request; harmless if it has ended."""
        active = self._by_generation.get(generation)
        if active is not None:
            self._fail(active, GenerationError("aborted", "the request was cancelled"))

    def fail_all(self, kind: Literal["closed", "failed"]) -> None:
        """Ends every request."""
        message = "the engine is closing" if kind == "closed" else "the engine has failed"
        for active in list(self._by_generation.values()):
            self._fail(active, GenerationError(kind, message))

    def close(self, timeout_s: float) -> bool:
        """Waits for the cache's calls. Returns False if some had not ended after `timeout_s`. For any thread, after the last tick."""
        deadline = time.monotonic() + timeout_s
        pools = [pool for pool in (self._loaders, self._storers) if pool is not None]
        ended = [pool.close(max(0.0, deadline - time.monotonic())) for pool in pools]
        return all(ended)

    def tick(self) -> None:
        """Lets every request that can make a step make one."""
        self._expire(time.monotonic())
        self._admit()
        self._prefill()
        self._decode()
        self._metrics.queued.set(len(self._waiting))
        self._metrics.running.set(len(self._running))
        self._metrics.free_blocks.set(self.pool.free)

    @property
    def has_work(self) -> bool:
        """Whether another tick would make progress now."""
        if any(active.phase in (_Phase.PREFILL, _Phase.DECODE) for active in self._running):
            return True
        room = len(self._running) < self._config.max_running
        return room and bool(self._waiting) and self._blocks_needed(self._waiting[0]) <= self.pool.free

    def next_deadline(self) -> float | None:
        """The `time.monotonic()` at which a tick is due even if nothing happens; None if there is none."""
        deadlines = [active.generation.deadline for active in self._by_generation.values()]
        deadlines += [active.load.deadline for active in self._running if active.load is not None]
        return min(deadlines, default=None)

    # --- waiting -------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for active in [a for a in self._by_generation.values() if a.generation.deadline <= now]:
            self._fail(active, GenerationError("timeout", f"not finished in time (it was {active.phase.value})"))
        for active in [a for a in self._running if a.load is not None and a.load.deadline <= now]:
            self._leave_load(active)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.max_running:
            active = self._waiting[0]
            lease = self.pool.allocate(self._blocks_needed(active))
            if lease is None:
                return
            self._waiting.popleft()
            self._running.append(active)
            active.lease = lease
            active.phase = _Phase.PREFILL
            self._start_load(active)

    def _blocks_needed(self, active: _Active) -> int:
        tokens = len(active.prompt) + active.generation.request.max_tokens
        return -(-tokens // self._config.block_size)

    # --- loading -------------------------------------------------------------------------------------------------

    def _prefix(self, active: _Active) -> Prefix | None:
        """Returns the part of the prompt that the cache can hold. It is the same for the load and the store, so it is named once."""
        if active.prefix is None and self._cache is not None:
            salt = active.generation.request.cache_salt
            active.prefix = self._cache.prefix(active.prompt, active.blocks, salt, active.generation.request.trace)
        return active.prefix

    def _start_load(self, active: _Active) -> None:
        prefix = None if active.skip_cache else self._prefix(active)
        if prefix is None:
            return
        cache, loaders, lease = self._cache, self._loaders, active.lease
        assert cache is not None
        assert loaders is not None
        assert lease is not None
        announced = cache.whole_chunks(min(active.generation.request.announced_prefix, len(active.prompt)))
        wait_s = self._handoff.wait_ms / 1000 if announced else 0.0
        now = time.monotonic()
        load = _LoadAttempt(now, now + wait_s + self._load_timeout_s)

        def run() -> None:
            result = LoadResult(LoadOutcome.FAILED, 0)
            try:
                result = cache.load(prefix, announced, wait_s, load.cancelled)
            finally:
                lease.release()
                self._post(lambda: self._load_ended(active, load, len(lease.blocks), result))

        lease.hold()
        if not loaders.try_submit(run):
            lease.release()
            self._metrics.loads.labels("busy").inc()
            active.result = LoadResult(LoadOutcome.FAILED, 0, reason="no_staging")
            return
        active.load = load
        active.phase = _Phase.LOADING

    def _load_ended(self, active: _Active, load: _LoadAttempt, blocks: int, result: LoadResult) -> None:
        if active.load is not load:
            self._lent_blocks -= blocks
            return
        active.load = None
        active.phase = _Phase.PREFILL
        active.loaded = result.tokens
        active.result = result
        active.cache_answered = result.outcome in (LoadOutcome.HIT, LoadOutcome.NOTHING)
        # The last token is computed even if it was loaded: it has to predict the first token of the answer.
        active.position = min(result.tokens, len(active.prompt) - 1)
        self._metrics.loads.labels(result.outcome.value).inc()
        self._metrics.load_time.observe(time.monotonic() - load.started)

    def _leave_load(self, active: _Active) -> None:
        """Starts over without the cache, on blocks that the load does not write to: it takes too long."""
        assert active.load is not None
        assert active.lease is not None
        _logger.warning("a load did not end in time; its request computes the whole prompt")
        self._metrics.loads.labels("timeout").inc()
        self._metrics.load_time.observe(time.monotonic() - active.load.started)
        self._abandon(active)
        self._running.remove(active)
        active.lease.release()
        active.lease = None
        active.skip_cache = True
        active.result = LoadResult(LoadOutcome.CANCELLED, 0, reason="deadline")
        active.prefix = None  # it will have other blocks
        active.phase = _Phase.WAITING
        self._waiting.appendleft(active)

    def _abandon(self, active: _Active) -> None:
        """Lets a load that still runs end by itself; its blocks count as lent until then."""
        if active.load is not None:
            active.load.cancelled.set()
            active.load = None
            self._lent_blocks += len(active.blocks)

    # --- computing -----------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        active = next((a for a in self._running if a.phase is _Phase.PREFILL), None)
        if active is None:
            return
        step = self._config.step_tokens
        end = min((active.position // step + 1) * step, len(active.prompt))
        last = end == len(active.prompt)
        tokens = active.prompt[active.position : end].tolist()
        logits = self._compute([StepPart(tokens, active.position, active.blocks, last)])
        if logits is None:
            self._fail(active, GenerationError("failed", "computing the prompt failed"))
            return
        active.position = end
        if last:
            self._prompt_done(active)
            self._emit(active, logits[0])

    def _decode(self) -> None:
        decoding = [a for a in self._running if a.phase is _Phase.DECODE]
        if not decoding:
            return
        logits = self._compute([self._next_part(active) for active in decoding])
        if logits is not None:
            for active, row in zip(decoding, logits, strict=True):
                active.position += 1
                self._emit(active, row)
            return
        # One of them is at fault. Writing the same KV again is harmless, so each is tried by itself.
        for active in decoding:
            alone = self._compute([self._next_part(active)])
            if alone is None:
                self._fail(active, GenerationError("failed", "computing a token failed"))
            else:
                active.position += 1
                self._emit(active, alone[0])

    def _next_part(self, active: _Active) -> StepPart:
        return StepPart([active.last_token], active.position, active.blocks, True)

    def _compute(self, parts: Sequence[StepPart]) -> torch.Tensor | None:
        try:
            return self._model.step(parts)
        except Exception:  # whatever a model raises ends the requests of this step, not the engine
            _logger.exception("computing a step of %d requests failed", len(parts))
            return None

    def _prompt_done(self, active: _Active) -> None:
        prompt = len(active.prompt)
        cached = min(active.loaded, prompt - 1)
        report = self._report(active, cached)
        arrival = active.generation.request.arrival
        assert arrival is not None
        ttft = time.monotonic() - arrival
        stats = GenerationStats(
            prompt_tokens=prompt,
            cached_tokens=cached,
            computed_tokens=prompt - cached,
            prefix_tokens=self._store(active),
            ttft_ms=ttft * 1000,
            report=report,
        )
        active.generation.describe(stats)
        self._metrics.ttft.observe(ttft)
        self._metrics.prompt_length.observe(prompt)
        self._metrics.prompt_tokens.inc(prompt)
        self._metrics.cached_tokens.inc(stats.cached_tokens)
        self._metrics.computed_tokens.inc(stats.computed_tokens)

    def _report(self, active: _Active, cached: int) -> RequestReport:
        """Returns, and counts, where the prompt's KV came from. `cached` of its tokens were loaded and are not computed again."""
        result, prompt = active.result, len(active.prompt)
        if self._cache is None:
            return RequestReport.of(prompt, 1, reason="not_asked")
        report = RequestReport.of(
            prompt,
            self._cache.chunk_size,
            found=result.found,
            loaded=cached,
            tiers=result.tiers,
            reason=result.reason,
        )
        self._cache.count(report)
        return report

    def _emit(self, active: _Active, logits: torch.Tensor) -> None:
        try:
            token = active.sampler.choose(logits)
        except Exception:  # logits that are not a distribution end this request, not the engine
            _logger.exception("sampling failed")
            self._fail(active, GenerationError("failed", "the model's output cannot be sampled from"))
            return
        request = active.generation.request
        active.phase = _Phase.DECODE
        active.last_token = token
        active.produced += 1
        reason: FinishReason | None = "length" if active.produced >= request.max_tokens else None
        self._metrics.output_tokens.inc()
        if reason is not None:
            self._remove(active, reason)
        active.generation.push(TokenEvent(token, reason))
        if reason is not None:
            self._on_end(active.generation)

    # --- storing and ending --------------------------------------------------------------------------------------

    def _store(self, active: _Active) -> int:
        """Has the computed chunks of the prompt stored. Returns how long a prefix of it is or will be in the pool."""
        prefix = self._prefix(active)
        if prefix is None or prefix.length <= active.loaded:
            return active.loaded
        cache, storers, lease, loaded = self._cache, self._storers, active.lease, active.loaded
        assert cache is not None
        assert storers is not None
        assert lease is not None
        blocks = len(lease.blocks)

        def run() -> None:
            stored = False
            try:
                stored = cache.store(prefix, loaded)
            finally:
                lease.release()
                self._post(lambda: self._store_ended(blocks, stored))

        lease.hold()
        # If the pool never finishes stores, they must not take all of the engine's blocks: at most half are lent.
        fits = self._lent_blocks == 0 or self._lent_blocks + blocks <= self.pool.total // 2
        if not fits or not storers.try_submit(run):
            lease.release()
            self._metrics.stores.labels("dropped").inc()
            return loaded
        self._lent_blocks += blocks
        return prefix.length if active.cache_answered else loaded

    def _store_ended(self, blocks: int, stored: bool) -> None:
        self._lent_blocks -= blocks
        self._metrics.stores.labels("done" if stored else "failed").inc()

    def _remove(self, active: _Active, outcome: str) -> None:
        if active.phase is _Phase.WAITING:
            self._waiting.remove(active)
        else:
            self._running.remove(active)
        if active.lease is not None:
            self._abandon(active)
            active.lease.release()
            active.lease = None
        del self._by_generation[active.generation]
        self._metrics.requests.labels(outcome).inc()
        self._metrics.output_length.observe(active.produced)

    def _fail(self, active: _Active, failure: GenerationError) -> None:
        self._remove(active, failure.kind)
        active.generation.fail(failure)
        self._on_end(active.generation)


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class EngineMetrics:
    """The metrics of one engine, in a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        name = "pd_cache_reference_{}".format
        self.queued = Gauge(name("queue_length"), "Requests that wait", registry=registry)
        self.running = Gauge(name("running"), "Requests that load or compute", registry=registry)
        self.free_blocks = Gauge(name("free_blocks"), "Blocks of the paged buffer in no use", registry=registry)
        self.requests = Counter(
            name("requests"),
            "Requests by outcome: stop, length, aborted, timeout, failed, closed, rejected (queue full), invalid",
            ["outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(name("prompt_tokens"), "Prompt tokens of prompts completed", registry=registry)
        self.cached_tokens = Counter(name("cached_tokens"), "Prompt tokens loaded from the pool", registry=registry)
        self.computed_tokens = Counter(name("computed_tokens"), "Prompt tokens computed", registry=registry)
        self.output_tokens = Counter(name("output_tokens"), "Tokens generated", registry=registry)
        self.loads = Counter(
            name("loads"),
            "Loads from the cache by outcome: hit, miss, unavailable, failed, cancelled, timeout, busy",
            ["outcome"],
            registry=registry,
        )
        self.stores = Counter(
            name("stores"), "Stores into the cache by outcome: done, failed, dropped", ["outcome"], registry=registry
        )
        self.ttft = Histogram(
            name("ttft_seconds"), "From a request's arrival to its first token", buckets=_SECONDS, registry=registry
        )
        self.load_time = Histogram(
            name("load_seconds"), "What a request waited for the cache", buckets=_SECONDS, registry=registry
        )
        self.prompt_length = Histogram(name("prompt_length_tokens"), "Prompts", buckets=_TOKENS, registry=registry)
        self.output_length = Histogram(name("output_length_tokens"), "Outputs", buckets=_TOKENS, registry=registry)


class Workers:
    """Runs at most `threads` calls at a time, and lets at most `backlog` wait. One more is refused, never waited for.

    The threads are daemons: a call that never returns blocks its thread, but neither `close` nor the end of the interpreter.
    """

    def __init__(self, name: str, *, threads: int, backlog: int = 0) -> None:
        self._limit = threads + backlog
        self._lock = threading.Lock()
        self._taken = 0
        self._closed = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def try_submit(self, call: Callable[[], None]) -> bool:
        """Runs `call` on a thread. Returns False if too many calls are running and waiting already, or after `close`."""
        with self._lock:
            if self._closed or self._taken >= self._limit:
                return False
            self._taken += 1
            self._calls.put(call)
        return True

    def close(self, timeout_s: float) -> bool:
        """Accepts no more calls and waits for those under way. Returns False if some had not ended after `timeout_s`. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # a worker that died would leave every later call waiting
                _logger.exception("a cache call's wrapper failed")
            finally:
                with self._lock:
                    self._taken -= 1
