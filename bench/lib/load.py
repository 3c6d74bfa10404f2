"""An open-loop load on a completions API: requests begin when they are due, however slow the server is.

A request's times count from when it was **due**, not from when it was sent: a generator that falls behind
shows up as latency, instead of hiding it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from bench.lib.arrivals import Arrival, prompt_ids
from bench.lib.stats import quantile
from launch.http import trusting

ANY_LENGTH = 1 << 30
_HEADERS = {"Content-Type": "application/json"}


class RequestOutcome(msgspec.Struct, kw_only=True):
    """The outcome of a request. Times are in seconds after it was due."""

    due: float
    prompt_tokens: int
    sent: float = 0.0
    first: float | None = None
    """When its first token came; None if none came."""
    last: float = 0.0
    tokens: int = 0
    """Generated."""
    cached: int | None = None
    """Prompt tokens that no node had to compute, if the answer says so."""
    error: str = ""
    """The kind of error; empty if it was answered to the end."""


# --- sending ------------------------------------------------------------------------------------------------


class Destination(NamedTuple):
    """The server under load."""

    url: str
    model: str
    vocabulary: int
    """Prompts are made of token ids below it."""
    longest: int = ANY_LENGTH
    """The most tokens of a prompt and its answer."""
    deadline_s: float = 60.0
    """In seconds, for each request: from when it is due to its last byte."""
    salted: str = ""
    """If not empty, each request gets a `cache_salt` of its own that begins with it, so that nothing is
    reused."""
    key: str = ""
    """API key, where the server asks for one."""
    certificate: str = ""
    """A certificate of the server's own to trust, in PEM format; empty for the machine's authorities."""
    hands_over: bool = False
    """Whether one node may compute a prompt and another answer it. What the second one then finds in its
    cache is no reuse, so only reports of our own nodes count, which name both."""


async def generate(
    target: Destination, arrivals: Sequence[Arrival], start: float, done: Callable[[], None] = lambda: None
) -> list[RequestOutcome]:
    """Sends every request when it is due, `start` being the `time.monotonic()` of due time 0. `done` is
    called after each.

    Ends when the last one has been answered, or has reached its deadline.
    """
    outcomes = []
    headers = {**_HEADERS, **({"Authorization": f"Bearer {target.key}"} if target.key else {})}
    connector = aiohttp.TCPConnector(
        limit=0, ssl=trusting(target.certificate) if target.certificate else True
    )
    timeout = aiohttp.ClientTimeout(total=None)  # each request has its own
    session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)

    async def send(outcome: RequestOutcome, body: bytes) -> None:
        await _ask(session, target, body, start, outcome)
        done()

    async with session, asyncio.TaskGroup() as requests:
        for index, arrival in enumerate(arrivals):
            outcome = RequestOutcome(due=arrival.due, prompt_tokens=arrival.prompt_tokens)
            outcomes.append(outcome)
            body = _body(target, arrival, index)  # before it is due
            await asyncio.sleep(start + arrival.due - time.monotonic())
            requests.create_task(send(outcome, body))
    return outcomes


def _body(target: Destination, arrival: Arrival, index: int) -> bytes:
    fields: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt_ids(arrival.prompt, target.vocabulary),
        "max_tokens": arrival.output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if target.salted:
        fields["cache_salt"] = f"{target.salted}-{arrival.due}-{index}"
    return msgspec.json.encode(fields)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _NodeWork(msgspec.Struct):
    cached_tokens: int


class _Extension(msgspec.Struct):
    self: _NodeWork
    prefill: _NodeWork | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    pd_cache: _Extension | None = None
    error: Any = None

    def cached(self, hands_over: bool) -> int | None:
        """Prompt tokens from the pool: at the prefill node, if there was one, because the decode node also
        finds what the prefill node has just computed."""
        if self.pd_cache is not None:
            return (self.pd_cache.prefill or self.pd_cache.self).cached_tokens
        if not hands_over and self.usage is not None and self.usage.prompt_tokens_details is not None:
            return self.usage.prompt_tokens_details.cached_tokens
        return None


_decode = msgspec.json.Decoder(_Event).decode


async def _ask(
    session: aiohttp.ClientSession, target: Destination, body: bytes, start: float, outcome: RequestOutcome
) -> None:
    """One request; fills its outcome in, and never raises for what the server does."""

    def since_due() -> float:
        return time.monotonic() - start - outcome.due

    outcome.sent = since_due()
    left = target.deadline_s - outcome.sent
    if left <= 0:  # which aiohttp would take for no limit at all
        outcome.error = "deadline"
        return
    try:
        limit = aiohttp.ClientTimeout(total=left)
        async with session.post(f"{target.url}/v1/completions", data=body, timeout=limit) as answer:
            if answer.status != 200:
                outcome.error = f"http {answer.status}"
                return
            outcome.error = "stream cut off"
            async for line in answer.content:
                now, content = since_due(), line.removeprefix(b"data:").strip()
                if content == b"[DONE]":
                    outcome.error = "" if outcome.tokens else "no tokens"
                    return
                if not line.startswith(b"data:"):
                    continue
                event = _decode(content)
                if event.error is not None:
                    outcome.error = "error in the stream"
                    return
                new = sum(
                    bool(choice.text) if choice.token_ids is None else len(choice.token_ids)
                    for choice in event.choices
                )
                if new:
                    outcome.first = now if outcome.first is None else outcome.first
                    outcome.last = now
                    outcome.tokens += new
                if event.usage is not None and event.usage.completion_tokens:
                    outcome.tokens = event.usage.completion_tokens
                cached = event.cached(target.hands_over)
                outcome.cached = outcome.cached if cached is None else cached
    except TimeoutError:
        outcome.error = "deadline"
    except (aiohttp.ClientConnectorError, ConnectionError):
        outcome.error = "no connection"
    except (aiohttp.ClientError, ValueError, msgspec.MsgspecError) as error:
        outcome.error = f"broken answer: {type(error).__name__}"


# --- what it comes to ---------------------------------------------------------------------------------------


def summarize(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """Figures of a load: latencies of what was answered to the end, rates over the time from the first to the
    last; None without any."""
    answered = [outcome for outcome in outcomes if not outcome.error and outcome.first is not None]
    began = min(outcome.due for outcome in outcomes)
    seconds = max((outcome.due + outcome.last for outcome in answered), default=began) - began
    firsts = [outcome.first for outcome in answered if outcome.first is not None]
    known = [outcome for outcome in answered if outcome.cached is not None]
    hits, tokens = (
        sum(getattr(outcome, what) or 0 for outcome in known) for what in ("cached", "prompt_tokens")
    )
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "errors": dict(sorted(Counter(outcome.error for outcome in outcomes if outcome.error).items())),
        "seconds": seconds,
        "requests_per_s": len(answered) / seconds if seconds else 0.0,
        "output_tokens_per_s": sum(outcome.tokens for outcome in answered) / seconds if seconds else 0.0,
        "ttft_p50_ms": 1e3 * quantile(firsts, 0.5) if firsts else None,
        "ttft_p99_ms": 1e3 * quantile(firsts, 0.99) if firsts else None,
        "sent_late_p99_ms": 1e3 * quantile([outcome.sent for outcome in outcomes], 0.99),
        "hit_rate": hits / tokens if known else None,
    }
