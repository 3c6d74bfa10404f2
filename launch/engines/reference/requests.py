"""A request to the engine, the error if it ends early, and the iterator over its tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Literal

import msgspec

from pd_cache.errors import PdCacheError
from pd_cache.reasons import RequestReport


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue, with the likeliest tokens."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int = 16
    cache_salt: str | None = None
    """Keeps this request's chunks apart from those of other salts."""
    announced_prefix: int = 0
    """Tokens of the prompt that a prefill node has announced to be in the pool, or on their way there: worth
    waiting for."""
    streams: bool = False
    """Only load the prompt's chunks as they appear in the pool, for a later request with the same prompt."""
    trace: Mapping[str, str] | None = None
    """The trace context that the request's spans belong to."""
    arrival: float = msgspec.field(default_factory=time.monotonic)
    """`time.monotonic()` when the request reached this node."""


class GenerationStats(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's prompt was processed."""

    prefix_tokens: int
    """Prompt tokens, in whole chunks, that the pool holds or is about to receive."""
    ttft_ms: float
    """The time from the request's arrival to its first token."""
    report: RequestReport
    """The source of the prompt's KV, and the reason why not more of it came from the cache."""


class TokenEvent(msgspec.Struct, frozen=True):
    """One token of the answer."""

    token: int
    last: bool


class GenerationError(PdCacheError):
    """A request that was not accepted (`queue_full`, `closing`), or that ended without all of its tokens."""

    def __init__(
        self, kind: Literal["queue_full", "closing", "timeout", "aborted", "closed", "failed"], message: str
    ) -> None:
        super().__init__(message)
        self.kind = kind


class Generation:
    """A request's tokens as they come. Iterate once, with `for` or `async for`. To leave early, call
    `cancel()`.

    Iterating raises GenerationError if the request ends early; its `kind` says why. Memory is bounded by the
    request's `max_tokens`.
    """

    def __init__(
        self, request: GenerationRequest, deadline: float, on_cancel: Callable[[Generation], None]
    ) -> None:
        self.request = request
        self.deadline = deadline
        """The `time.monotonic()` at which the engine gives up the request."""
        self.stats: GenerationStats | None = None
        """Known from the first token on. Set by the engine."""
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._wake: Callable[[], object] = self._changed.notify_all
        """Wakes the consumer. Called with the lock."""
        self._events: deque[TokenEvent] = deque()
        self._failure: GenerationError | None = None
        self._ended = False

    def cancel(self) -> None:
        """Stops the engine's work on the request. For any thread; harmless after the end."""
        if not self._ended:
            self._on_cancel(self)

    def __iter__(self) -> Iterator[TokenEvent]:
        last = False
        while not last:
            with self._changed:
                self._changed.wait_for(self._has_news)
                event = self._take()
            last = event.last
            yield event

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(news.set)
            except RuntimeError:
                pass  # the consumer's loop is closed: nothing waits any more

        with self._changed:
            self._wake = wake
        last = False
        while not last:
            with self._changed:
                event = self._take() if self._has_news() else None
                news.clear()
            if event is not None:
                last = event.last
                yield event
                continue
            await news.wait()

    def _has_news(self) -> bool:
        return bool(self._events) or self._ended

    def _take(self) -> TokenEvent:
        """Returns the next event, or raises the failure if that comes next. Call with the lock."""
        if self._events:
            return self._events.popleft()
        assert self._failure is not None, "a request ended without a last token and without a reason"
        raise self._failure

    # --- the engine's side ----------------------------------------------------------------------------------

    def push(self, event: TokenEvent) -> None:
        """Adds the next token. Called by the engine."""
        with self._changed:
            self._events.append(event)
            self._ended = event.last
            self._wake()

    def fail(self, failure: GenerationError) -> None:
        """Ends the request here, unless it has ended already. Called by the engine."""
        with self._changed:
            if not self._ended:
                self._failure = failure
                self._ended = True
                self._wake()
