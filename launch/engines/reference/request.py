"""What a caller asks of the engine, and what the engine reports about the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from launch.engines.reference.sampling import SamplingParams
from pd_cache.reports import RequestReport

FinishReason = Literal["stop", "length"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int = 16
    sampling: SamplingParams = SamplingParams()
    ignore_eos: bool = False
    """Whether to go on to `max_tokens` even if the model ends its text."""
    cache_salt: str | None = None
    """Keeps this request's chunks apart from those of other salts."""
    announced_prefix: int = 0
    """Tokens of the prompt that a prefill node has announced to be in the pool, or on their way there: worth waiting for."""
    trace: Mapping[str, str] | None = None
    """The trace context under which the request's spans are."""
    arrival: float | None = None
    """`time.monotonic()` when the request reached this node; None means when it is submitted."""


class GenerationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's prompt came from. `cached_tokens + computed_tokens == prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was loaded from the pool."""
    computed_tokens: int
    prefix_tokens: int
    """Prompt tokens, in whole chunks, that the pool holds or is about to receive."""
    ttft_ms: float
    """From arrival to the first token."""
    report: RequestReport
    """Where the prompt's KV came from, and why not more of it came from the cache."""


class TokenEvent(msgspec.Struct, frozen=True):
    """One token of the answer."""

    token: int
    finish_reason: FinishReason | None
    """Set on the last token: the model's end of text, or `max_tokens` reached."""
