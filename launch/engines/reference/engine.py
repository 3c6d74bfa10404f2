"""The engine inside one process, without HTTP: `ReferenceEngine`, whose model thread decides which request
does what next.

A request waits for blocks, then for its prefix from the cache (LOADING), then computes the rest of its prompt
step by step (PREFILL), then one token per tick (DECODE). Blocks for prompt and output are reserved when it
leaves the queue, so no running request can run out of them. Each tick computes one step of one prompt and one
token of every decoding request.

The cache is only ever called on worker threads. A load that outlives its deadline is left behind: the request
starts over on other blocks. Its first blocks return to the pool when the call has ended, because until then
the call may still write to them.

A *stream* is a request that only loads its prompt's chunks as they appear in the pool. The request with the
same prompt that comes later takes over its blocks and its load.
"""

from __future__ import annotations

import array
import enum
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from launch.engines.reference.model import PagedModel, StepPart
from launch.engines.reference.prefix_cache import BlockPool, LoadAttempt, LoadResult, Prefix, PrefixCache
from launch.engines.reference.requests import (
    Generation,
    GenerationError,
    GenerationRequest,
    GenerationStats,
    TokenEvent,
)
from pd_cache.cache import BlockCache
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import HandoffConfig, ReferenceEngineConfig
from pd_cache.layout import KVLayout
from pd_cache.reasons import RequestReport
from pd_cache.tracing import UNTRACED, Tracing
from transfer.calls import CallThreads
from transfer.deadlines import left

_logger = logging.getLogger(__name__)

CacheFactory = Callable[[CacheMetadata, KVLayout, dict[str, torch.Tensor]], "BlockCache | None"]
"""Returns the cache for an engine with these weights, pages and tensors; None for no cache. The engine does
not close it."""

STORE_THREADS = 2
"""How many requests are stored at the same time."""
_LONGEST_SLEEP_S = 1.0
_JOIN_S = 2.0


class _Phase(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"


class _Active:
    """A request between submission and end."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.prompt = array.array("i", generation.request.prompt)
        self.phase = _Phase.WAITING
        self.blocks: tuple[int, ...] = ()
        """The blocks that it owns from the moment when it leaves the queue."""
        self.load: LoadAttempt | None = None
        self.prefix: Prefix | None = None
        self.skip_cache = False
        self.streamed = 0
        """Tokens that a stream had loaded when this request took it over."""
        self.stored = 0
        """Prompt tokens, in whole chunks, that are in the pool or in a store under way."""
        self.storing = False
        self.result = LoadResult("nothing", reason="not_asked")
        """How its load ended, and how many prompt tokens the cache put into the pages."""
        self.position = 0
        """Tokens whose KV is in the pages."""
        self.produced = 0
        self.last_token = 0
        self.emitted = 0.0
        """When the last token was generated."""


class ReferenceEngine:
    """A small engine for trying out, testing and measuring pd-cache; it is not made for production.

    One thread computes, on the CPU. `submit` and everything else is for any thread.

        engine = ReferenceEngine.open(config)
        try:
            for event in engine.submit(GenerationRequest(prompt=(1, 2, 3), max_tokens=8)):
                print(event.token)
        finally:
            engine.close()
    """

    def __init__(
        self,
        model: PagedModel,
        config: ReferenceEngineConfig,
        handoff: HandoffConfig | None = None,
        cache: BlockCache | None = None,
        *,
        request_timeout_s: float = 300.0,
        load_timeout_s: float = 10.0,
        tracing: Tracing = UNTRACED,
    ) -> None:
        """Starts serving `model`, which is `PagedModel(config)`.

        `cache` is called only on this engine's own threads, and may fail or hang. A request waits for it at
        most `load_timeout_s` (and `handoff.wait_ms` if a prefix was announced). Then it computes its prompt.
        `request_timeout_s` bounds a request from submission to its last token.
        """
        self.config = config
        self.model = model
        self.metrics = EngineMetrics()
        self._request_timeout_s = request_timeout_s
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        """Calls for the model thread. Each outstanding request and each running call of the cache posts at
        most two, so their number is bounded."""
        self._outstanding: set[Generation] = set()
        self._accepting = True
        self._stopping = False
        self._failed = False
        self._cache = None if cache is None else PrefixCache(cache, model.kv.kv_caches, tracing)
        self._handoff = handoff or HandoffConfig()
        self._load_timeout_s = load_timeout_s
        self.pool = BlockPool(config.num_blocks)
        self.metrics.blocks.set(config.num_blocks)
        self.lent_blocks = 0
        """Blocks that only calls of the cache hold: stores, and loads left behind."""
        self._waiting: deque[_Active] = deque()
        self._running: list[_Active] = []
        self._streams: list[_Active] = []
        """The streams that are not cancelled yet. A stream holds blocks until a request takes them over, or
        needs the room."""
        loads, stores = (config.max_running, STORE_THREADS) if cache is not None else (0, 0)
        self._most_streams = loads // 2
        self._loaders = CallThreads("pd-cache-load", loads, limit=loads)
        self._streamers = CallThreads("pd-cache-stream", self._most_streams, limit=self._most_streams)
        self._storers = CallThreads("pd-cache-store", stores, limit=stores + config.max_running)
        self._thread = threading.Thread(target=self._run, name="pd-cache-model", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        config: ReferenceEngineConfig,
        handoff: HandoffConfig | None = None,
        cache: CacheFactory | None = None,
        tracing: Tracing = UNTRACED,
    ) -> ReferenceEngine:
        """Makes the model of `config` and the cache for it, and starts."""
        model = PagedModel(config)
        kv = model.kv
        made = (
            None
            if cache is None
            else cache(CacheMetadata.of(model.identity, kv.layout), kv.layout, kv.kv_caches)
        )
        return cls(model, config, handoff, made, tracing=tracing)

    @property
    def healthy(self) -> bool:
        """Whether it accepts requests."""
        with self._changed:
            return self._accepting and not self._failed and self._thread.is_alive()

    def submit(self, request: GenerationRequest) -> Generation:
        """Queues a request; never waits.

        Raises ValueError for a request that cannot be served: an empty prompt, token ids outside the
        vocabulary, `max_tokens` below 1, or more tokens than `max_model_len`. Raises GenerationError
        `queue_full` if `max_queue` requests are waiting already, and `closing` after `close`.
        """
        self._check(request)
        now = time.monotonic()
        with self._changed:
            if not self._accepting or self._failed:
                why = "the engine has failed" if self._failed else "the engine is closing"
                raise GenerationError("closing", why)
            if len(self._outstanding) >= self.config.max_running + self.config.max_queue:
                self.metrics.requests.labels("rejected").inc()
                raise GenerationError("queue_full", f"{self.config.max_queue} requests wait already")
            generation = Generation(
                request,
                now + self._request_timeout_s,
                lambda expired: self._post(lambda: self._cancel(expired)),
            )
            self._outstanding.add(generation)
            queue = self._begin_stream if request.streams else self._waiting.append
            self._inbox.append(lambda: queue(_Active(generation)))
            self._changed.notify_all()
        return generation

    def close(self, grace_s: float = 0.0) -> None:
        """Accepts no more requests, gives running ones `grace_s` to finish, ends the others, and stops the
        threads. Idempotent."""
        with self._changed:
            self._accepting = False
            self._changed.wait_for(lambda: not self._outstanding or self._failed, timeout=grace_s)
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _logger.warning("the model thread is still in a step after %.0f s; leaving it behind", _JOIN_S)
        end = time.monotonic() + _JOIN_S
        ended = [threads.close(left(end)) for threads in (self._loaders, self._streamers, self._storers)]
        if not all(ended):
            _logger.warning("a call of the cache is still running after %.0f s; leaving it behind", _JOIN_S)

    def _post(self, call: Callable[[], None]) -> None:
        """Makes the model thread call `call`."""
        with self._changed:
            self._inbox.append(call)
            self._changed.notify_all()

    def _request_ended(self, generation: Generation) -> None:
        with self._changed:
            self._outstanding.discard(generation)
            self._changed.notify_all()

    def _check(self, request: GenerationRequest) -> None:
        prompt, longest = len(request.prompt), self.config.max_model_len
        if not prompt:
            raise ValueError("the prompt is empty; at least one token is needed")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
        if prompt + request.max_tokens > longest:
            raise ValueError(
                f"the prompt has {prompt} tokens and max_tokens is {request.max_tokens}, together more than this model's "
                f"max_model_len {longest}"
            )
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= self.model.vocab_size:
            outside = low if low < 0 else high
            raise ValueError(f"token ids must lie in [0, {self.model.vocab_size}), got {outside}")

    # --- the model thread: it takes no lock for what only it touches ----------------------------------------

    def _run(self) -> None:
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        try:
            while not self._stopping:
                self._handle_inbox()
                self._tick()
                self._sleep()
        except Exception:  # for any failure: waiting requests must get an error, and /health must report it
            _logger.exception("the engine has failed")
            with self._changed:
                self._failed = True
        finally:
            self._end_all()

    def _handle_inbox(self) -> None:
        while True:
            with self._changed:
                if not self._inbox:
                    return
                call = self._inbox.popleft()
            call()

    def _sleep(self) -> None:
        """Waits for news or for the next deadline, unless another tick would make progress now."""
        if any(active.phase in (_Phase.PREFILL, _Phase.DECODE) for active in self._running):
            return
        room = len(self._running) < self.config.max_running
        if room and self._waiting and self._blocks_needed(self._waiting[0]) <= self.pool.free:
            return
        deadlines = [active.generation.deadline for active in self._active()]
        deadlines += [active.load.deadline for active in self._running if active.load is not None]
        until = min((deadline - time.monotonic() for deadline in deadlines), default=_LONGEST_SLEEP_S)
        with self._changed:
            longest = max(0.0, min(until, _LONGEST_SLEEP_S))
            self._changed.wait_for(lambda: self._inbox or self._stopping, timeout=longest)

    def _end_all(self) -> None:
        """Ends all requests, so that none waits for a thread that no longer computes."""
        with self._changed:
            self._accepting = False
            failed = self._failed
        self._handle_inbox()
        message = "the engine has failed" if failed else "the engine is closing"
        for active in self._active():
            self._fail(active, GenerationError("failed" if failed else "closed", message))

    def _active(self) -> list[_Active]:
        """Returns all requests that have not ended."""
        return [*self._waiting, *self._running, *self._streams]

    def _cancel(self, generation: Generation) -> None:
        for active in self._active():
            if active.generation is generation:
                self._fail(active, GenerationError("aborted", "the request was cancelled"))

    def _tick(self) -> None:
        """Lets every request that can make a step make one."""
        self._expire(time.monotonic())
        self._admit()
        self._prefill()
        self._decode()
        metrics = self.metrics
        metrics.queued.set(len(self._waiting))
        metrics.running.set(len(self._running))
        metrics.free_blocks.set(self.pool.free)

    # --- waiting --------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for active in [a for a in self._active() if a.generation.deadline <= now]:
            self._fail(
                active, GenerationError("timeout", f"not finished in time (it was {active.phase.value})")
            )
        for active in [a for a in self._running if a.load is not None and a.load.deadline <= now]:
            self._leave_load(active)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_running:
            active = self._waiting[0]
            stream = self._stream_of(active)
            taken = () if stream is None else stream.blocks
            blocks = self.pool.allocate(max(0, self._blocks_needed(active) - len(taken)))
            if blocks is None:
                # no other event gives blocks back: the request that ends a stream may wait behind this one
                holding = [other for other in self._streams if other.blocks and other is not stream]
                if self._running or not holding:
                    return
                self._give_back(holding[-1])
                continue
            self._waiting.popleft()
            self._running.append(active)
            active.blocks = taken + blocks
            active.phase = _Phase.PREFILL
            if stream is None:
                self._start_load(active)
            else:
                self._take_over(active, stream)

    def _blocks_needed(self, active: _Active) -> int:
        tokens = len(active.prompt) + active.generation.request.max_tokens
        return -(-tokens // self.config.block_size)

    # --- loading --------------------------------------------------------------------------------------------

    def _begin_stream(self, active: _Active) -> None:
        """Begins to load a stream's prompt. Ends the stream at once if there is no room, because requests
        with an answer need the blocks."""
        self._streams.append(active)
        needed, streaming = self._blocks_needed(active), [stream for stream in self._streams if stream.blocks]
        held = needed + sum(len(stream.blocks) for stream in streaming)
        if (
            len(streaming) < self._most_streams
            and held <= self.pool.total // 4
            and needed <= self.pool.free // 2
        ):
            active.blocks = self.pool.allocate(needed) or ()
            active.phase = _Phase.PREFILL
            self._start_load(active)
        if active.load is None:
            self._fail(
                active, GenerationError("aborted", "there is no room for a stream, or nothing to load")
            )

    def _stream_of(self, active: _Active) -> _Active | None:
        """Returns the stream of the request's prompt, if there is one."""
        request = active.generation.request
        if active.skip_cache:
            return None
        for stream in self._streams:
            # if the stream's load broke off, the request looks the prompt up itself
            loaded = (
                stream.prefix is not None
                and stream.prefix.current
                and stream.result.tokens == stream.prefix.length
            )
            of_use = stream.blocks and (stream.load is not None or loaded)
            if (
                of_use
                and stream.prompt == active.prompt
                and stream.generation.request.cache_salt == request.cache_salt
            ):
                return stream
        return None

    def _take_over(self, active: _Active, stream: _Active) -> None:
        """Gives a stream's blocks and load to the request."""
        active.prefix, active.load, load = stream.prefix, stream.load, stream.load
        stream.blocks, stream.load = (), None
        active.streamed = stream.result.tokens if load is None else load.loaded
        if load is None:
            self._use(active, stream.result)
            return
        assert self._cache is not None
        load.awaited = self._awaited(self._cache, active)
        load.deadline = load.awaited[1] + self._load_timeout_s
        active.phase = _Phase.LOADING

    def _awaited(self, cache: PrefixCache, active: _Active) -> tuple[int, float]:
        """Returns how many tokens of the prompt a prefill node has announced, and how long to wait for
        them."""
        announced = cache.whole_chunks(min(active.generation.request.announced_prefix, len(active.prompt)))
        return announced, time.monotonic() + (self._handoff.wait_ms / 1000 if announced else 0.0)

    def _start_load(self, active: _Active) -> None:
        cache, request, blocks = self._cache, active.generation.request, active.blocks
        if cache is None:
            return
        # the same for the load and the store, so it is named once
        prefix = active.prefix = cache.prefix(request, active.prompt, blocks)
        if prefix is None or active.skip_cache:
            return
        announced, until = self._awaited(cache, active)
        if request.streams:
            announced, until = prefix.length, active.generation.deadline
        load = LoadAttempt(blocks, announced, until, until + self._load_timeout_s)

        def run() -> None:
            result = LoadResult("failed")
            try:
                result = cache.load(prefix, load)
            finally:
                self.pool.release(blocks)
                self._post(lambda: self._load_ended(load, result))

        self.pool.hold(blocks)
        if (self._streamers if request.streams else self._loaders).submit(run, math.inf) is None:
            self.pool.release(blocks)
            self.metrics.loads.labels("busy").inc()
            active.result = LoadResult("failed", reason="no_staging")
            return
        active.load = load
        active.phase = _Phase.LOADING

    def _load_ended(self, load: LoadAttempt, result: LoadResult) -> None:
        active = next((active for active in self._active() if active.load is load), None)
        if active is None:
            self.lent_blocks -= len(load.blocks)
            return
        active.load = None
        self.metrics.loads.labels(result.outcome).inc()
        self._use(active, result)

    def _use(self, active: _Active, result: LoadResult) -> None:
        """Makes the request compute the rest of its prompt. A stream keeps what it has loaded."""
        active.phase = _Phase.PREFILL
        active.result = result
        active.stored = result.tokens
        # The last token is computed even if it was loaded: it has to predict the first token of the answer.
        active.position = min(result.tokens, len(active.prompt) - 1)

    def _leave_load(self, active: _Active) -> None:
        """Starts over without the cache and on other blocks: the load took too long, and may still write to
        the old blocks."""
        assert active.load is not None
        _logger.warning("a load did not end in time; its request computes the whole prompt")
        self.metrics.loads.labels("timeout").inc()
        self._running.remove(active)
        self._give_back(active)
        active.skip_cache = True
        active.result = LoadResult("cancelled", reason="deadline")
        active.phase = _Phase.WAITING
        self._waiting.appendleft(active)

    def _give_back(self, active: _Active) -> None:
        """Gives back the request's blocks. If a load still runs, the blocks count as lent until it has
        ended."""
        if active.load is not None:
            active.load.cancelled.set()
            self.lent_blocks += len(active.load.blocks)
            active.load = None
        self.pool.release(active.blocks)
        active.blocks = ()

    # --- computing ------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        active = next((a for a in self._running if a.phase is _Phase.PREFILL), None)
        if active is None:
            return
        step = self.config.step_tokens
        end = min((active.position // step + 1) * step, len(active.prompt))
        last = end == len(active.prompt)
        tokens = active.prompt[active.position : end].tolist()
        logits = self._compute([active], [StepPart(tokens, active.position, active.blocks, last)])
        if logits is None:
            return
        active.position = end
        if last:
            self._prompt_done(active)
            self._emit(active, logits[0])
        elif not active.storing:  # complete chunks go to the pool while the rest is computed
            self._store(active, end)

    def _decode(self) -> None:
        decoding = [a for a in self._running if a.phase is _Phase.DECODE]
        if not decoding:
            return
        logits = self._compute(
            decoding, [StepPart([a.last_token], a.position, a.blocks, True) for a in decoding]
        )
        if logits is not None:
            for active, row in zip(decoding, logits, strict=True):
                active.position += 1
                self._emit(active, row)

    def _compute(self, computed: Sequence[_Active], parts: Sequence[StepPart]) -> torch.Tensor | None:
        """Returns the logits of a step, or None after ending its requests, if it failed."""
        try:
            return self.model.step(parts)
        except Exception:  # an error of the model ends the requests of this step, not the engine
            _logger.exception("computing a step of %d requests failed", len(parts))
        for active in computed:
            self._fail(active, GenerationError("failed", "computing a step failed"))
        return None

    def _prompt_done(self, active: _Active) -> None:
        metrics, result, prompt = self.metrics, active.result, len(active.prompt)
        if not self._store(active, prompt):
            metrics.stores.labels("dropped").inc()
        # chunks that are yet to be stored are worth announcing only if the load ended as it should
        announced = active.stored if result.outcome in ("hit", "nothing") else result.tokens
        cached = min(result.tokens, prompt - 1)
        if self._cache is None:
            report = RequestReport.of(prompt, 1, reason="not_asked")
        else:
            report = RequestReport.of(
                prompt,
                self._cache.chunk_size,
                found=result.found,
                loaded=cached,
                tiers=result.tiers,
                reason=result.reason,
                streamed=active.streamed,
            )
            self._cache.count(report)
        ttft = time.monotonic() - active.generation.request.arrival
        active.generation.stats = GenerationStats(prefix_tokens=announced, ttft_ms=ttft * 1000, report=report)
        metrics.ttft.observe(ttft)

    def _emit(self, active: _Active, logits: torch.Tensor) -> None:
        active.phase = _Phase.DECODE
        active.last_token = int(logits.argmax())
        now, before, active.emitted = time.monotonic(), active.emitted, time.monotonic()
        if active.produced:
            self.metrics.token_s.observe(now - before)
        active.produced += 1
        last = active.produced >= active.generation.request.max_tokens
        if last:
            self._remove(active, "length")
        active.generation.push(TokenEvent(active.last_token, last))
        if last:
            self._request_ended(active.generation)

    # --- storing and ending ---------------------------------------------------------------------------------

    def _store(self, active: _Active, end: int) -> bool:
        """Begins to store the prompt's whole chunks before token `end` that are not stored yet. Returns False
        if there is no room for that."""
        cache, prefix, start = self._cache, active.prefix, active.stored
        end = 0 if cache is None else cache.whole_chunks(end)
        if cache is None or prefix is None or end <= start:
            return True
        blocks = prefix.blocks(start // cache.chunk_size, end // cache.chunk_size)

        def run() -> None:
            stored = False
            try:
                stored = cache.store(prefix, start, end)
            finally:
                self.pool.release(blocks)
                self._post(lambda: self._store_ended(active, len(blocks), stored))

        self.pool.hold(blocks)
        # If the pool never finishes stores, they must not take all of the engine's blocks: at most half are
        # lent.
        fits = self.lent_blocks == 0 or self.lent_blocks + len(blocks) <= self.pool.total // 2
        if not fits or self._storers.submit(run, math.inf) is None:
            self.pool.release(blocks)
            return False
        self.lent_blocks += len(blocks)
        active.stored, active.storing = end, True
        return True

    def _store_ended(self, active: _Active, blocks: int, stored: bool) -> None:
        self.lent_blocks -= blocks
        active.storing = False
        self.metrics.stores.labels("done" if stored else "failed").inc()

    def _remove(self, active: _Active, outcome: str) -> None:
        if active.generation.request.streams:
            self._streams.remove(active)
        elif active.phase is _Phase.WAITING:
            self._waiting.remove(active)
        else:
            self._running.remove(active)
        self._give_back(active)
        self.metrics.requests.labels(outcome).inc()

    def _fail(self, active: _Active, failure: GenerationError) -> None:
        self._remove(active, failure.kind)
        active.generation.fail(failure)
        self._request_ended(active.generation)


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class EngineMetrics:
    """The metrics of one engine, in a registry of its own."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        name = "pd_cache_reference_{}".format
        requests = (
            "Requests by outcome: length, aborted, timeout, failed, closed, rejected (queue full), invalid"
        )
        loads = "Loads from the cache by outcome: hit, nothing, unavailable, failed, cancelled, timeout, busy"
        stores = "Stores into the cache by outcome: done, failed, dropped"
        first = "Time from a request's arrival to its first token"
        self.queued = Gauge(name("queue_length"), "Requests that wait", registry=own)
        self.running = Gauge(name("running"), "Requests that load or compute", registry=own)
        self.free_blocks = Gauge(name("free_blocks"), "Free blocks of the paged buffer", registry=own)
        self.blocks = Gauge(name("blocks"), "Blocks of the paged buffer", registry=own)
        self.requests = Counter(name("requests"), requests, ["outcome"], registry=own)
        self.loads = Counter(name("loads"), loads, ["outcome"], registry=own)
        self.stores = Counter(name("stores"), stores, ["outcome"], registry=own)
        self.ttft = Histogram(name("ttft_seconds"), first, buckets=_SECONDS, registry=own)
        self.token_s = Histogram(
            name("token_seconds"), "Time between two tokens of an answer", buckets=_SECONDS, registry=own
        )
