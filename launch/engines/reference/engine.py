"""ReferenceEngine: the engine inside one process, without HTTP."""

from __future__ import annotations

import array
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch

from launch.engines.reference.cache import PrefixCache, SurveyedPrompt
from launch.engines.reference.model import PagedModel, load_model
from launch.engines.reference.protocol import ByteTokenizer
from launch.engines.reference.requests import (
    EngineClosedError,
    Generation,
    GenerationError,
    GenerationRequest,
    QueueFullError,
)
from launch.engines.reference.scheduler import EngineMetrics, Scheduler
from pd_cache.cache import BlockCache
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import HandoffConfig, ReferenceEngineConfig
from pd_cache.layout import KVLayout
from pd_cache.tracing import UNTRACED, Tracing

_logger = logging.getLogger(__name__)

CacheFactory = Callable[[CacheMetadata, KVLayout, dict[str, torch.Tensor]], "BlockCache | None"]
"""Makes the cache for an engine with these weights, pages and tensors; None for no cache. The maker closes it."""

_LONGEST_SLEEP_S = 1.0
_JOIN_S = 2.0


class ReferenceEngine:
    """A small engine for trying out, testing and measuring pd-cache; it is not made for production.

    One thread computes, on the CPU. `submit` and everything else is for any thread.

        engine = ReferenceEngine.open(config)
        try:
            for event in engine.submit(GenerationRequest(prompt=(1, 2, 3), max_tokens=8)):
                print(event.token, event.finish_reason)
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
        """Starts serving `model`, which `load_model(config)` returned.

        `cache` is called only on this engine's own threads, and may fail or hang: a request waits for it at most `load_timeout_s` (and
        `handoff.wait_ms` if a prefix was announced), then computes its prompt. `request_timeout_s` bounds a request from submission to
        its last token. Raises ValueError if `num_blocks` cannot hold one request of `max_model_len`.
        """
        if config.num_blocks * config.block_size < config.max_model_len:
            raise ValueError(
                f"{config.num_blocks} blocks of {config.block_size} tokens cannot hold one request of max_model_len "
                f"{config.max_model_len}"
            )
        self.config = config
        self.model = model
        self.tokenizer = ByteTokenizer(model.vocab_size)
        self.metrics = EngineMetrics()
        self._request_timeout_s = request_timeout_s
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        """Bounded by the requests outstanding and the cache's calls under way, each of which posts at most twice."""
        self._outstanding: set[Generation] = set()
        self._accepting = True
        self._stopping = False
        self._failed = False
        self._cache = None if cache is None else PrefixCache(cache, model.kv.kv_caches, tracing)
        self._scheduler = Scheduler(
            model,
            config,
            handoff or HandoffConfig(),
            self._cache,
            self.metrics,
            load_timeout_s=load_timeout_s,
            post=self._post,
            on_end=self._request_ended,
        )
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
        model = load_model(config)
        kv = model.kv
        made = None if cache is None else cache(CacheMetadata.of(model.identity, kv.layout), kv.layout, kv.kv_caches)
        return cls(model, config, handoff, made, tracing=tracing)

    @property
    def healthy(self) -> bool:
        """Whether it accepts requests."""
        with self._changed:
            return self._accepting and not self._failed and self._thread.is_alive()

    @property
    def outstanding(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._outstanding)

    def submit(self, request: GenerationRequest) -> Generation:
        """Queues a request; never waits.

        Raises ValueError for a request that cannot be served: an empty prompt, token ids outside the vocabulary, `max_tokens` below 1, or
        more tokens than `max_model_len`. Raises QueueFullError if `max_queue` requests are waiting already, EngineClosedError after
        `close`.
        """
        self._check(request)
        now = time.monotonic()
        if request.arrival is None:
            request = msgspec.structs.replace(request, arrival=now)
        with self._changed:
            if not self._accepting or self._failed:
                raise EngineClosedError("the engine is closing" if not self._failed else "the engine has failed")
            if len(self._outstanding) >= self.config.max_running + self.config.max_queue:
                self.metrics.requests.labels("rejected").inc()
                raise QueueFullError(f"{self.config.max_queue} requests wait already")
            generation = Generation(request, now + self._request_timeout_s, self._cancel)
            self._outstanding.add(generation)
            self._inbox.append(lambda: self._scheduler.add(generation))
            self._changed.notify_all()
        return generation

    def survey(self, prompt: Sequence[int], salt: str | None) -> SurveyedPrompt:
        """Returns how much of a prompt the cache would find now. For any thread; waits for the lookup."""
        if self._cache is None:
            return SurveyedPrompt(0, "not_asked")
        return self._cache.survey(array.array("i", prompt), salt)

    def close(self, grace_s: float = 0.0) -> None:
        """Accepts no more requests, gives running ones `grace_s` to finish, ends the others, and stops the threads. Idempotent."""
        with self._changed:
            self._accepting = False
            self._changed.wait_for(lambda: not self._outstanding or self._failed, timeout=grace_s)
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _logger.warning("the model thread is still in a step after %.0f s; leaving it behind", _JOIN_S)
        if not self._scheduler.close(_JOIN_S):
            _logger.warning("a call of the cache is still running after %.0f s; leaving it behind", _JOIN_S)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or used, and all are free if nothing is outstanding."""
        self._scheduler.pool.check_integrity()

    @property
    def free_blocks(self) -> int:
        """How many blocks no request and no call of the cache holds."""
        return self._scheduler.pool.free

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

    def _post(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(call)
            self._changed.notify_all()

    def _cancel(self, generation: Generation) -> None:
        self._post(lambda: self._scheduler.cancel(generation))

    def _request_ended(self, generation: Generation) -> None:
        with self._changed:
            self._outstanding.discard(generation)
            self._changed.notify_all()

    def _run(self) -> None:
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        try:
            while not self._stopping:
                self._handle_inbox()
                self._scheduler.tick()
                if not self._scheduler.has_work:
                    self._sleep()
        except Exception:  # whatever broke it: waiting requests must get an error, and /health must report it
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
        deadline = self._scheduler.next_deadline()
        longest = _LONGEST_SLEEP_S if deadline is None else min(_LONGEST_SLEEP_S, deadline - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._stopping, timeout=max(0.0, longest))

    def _end_all(self) -> None:
        """Ends all requests, so that none waits for a thread that no longer computes."""
        with self._changed:
            self._accepting = False
            failed = self._failed
        try:
            self._handle_inbox()
            self._scheduler.fail_all("failed" if failed else "closed")
        except Exception:  # the requests below are ended all the same
            _logger.exception("ending the engine's requests in order failed")
        with self._changed:
            left, self._outstanding = self._outstanding, set()
            self._changed.notify_all()
        for generation in left:
            generation.fail(GenerationError("failed", "the engine has failed"))
