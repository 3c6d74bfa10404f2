"""Requests to send, and when: at random times or as in a trace, with prompts that share their beginnings."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bench.lib.trace import BLOCK_TOKENS, Request, SimulatedLru

_SPECIAL = 8
"""Token ids below this are left out of prompts: models end, begin and pad with them."""


class Part(NamedTuple):
    """Tokens that follow from a seed: equal seeds, equal tokens."""

    seed: int
    tokens: int


class Arrival(NamedTuple):
    """One request to come."""

    due: float
    """Seconds from the start of the load."""
    prompt: tuple[Part, ...]
    output: int
    """Tokens to generate."""

    @property
    def prompt_tokens(self) -> int:
        return sum(part.tokens for part in self.prompt)


def poisson(rate: float, count: int) -> list[float]:
    """`count` times of arrival, in seconds, `rate` a second on the average, each independent of the others;
    the same ones each time."""
    rng, now, times = random.Random(0), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def synthetic(
    times: Iterable[float], tokens: int, shared: float, prefixes: int, output: int
) -> list[Arrival]:
    """Returns prompts of `tokens` tokens. The first `shared` part (0 to 1) is one of `prefixes` prefixes; the
    rest is unique."""
    rng = random.Random(0)
    head = round(tokens * shared)
    arrivals = []
    for index, due in enumerate(times):
        own = Part(_seed("own", index), tokens - head)
        common = Part(_seed("shared", rng.randrange(prefixes)), head)
        arrivals.append(Arrival(due, tuple(part for part in (common, own) if part.tokens), output))
    return arrivals


def from_trace(
    requests: Sequence[Request], times: Iterable[float], scale: float, longest: int
) -> list[Arrival]:
    """Returns the requests of a trace with prompts and outputs `scale` times shorter, and none longer than
    `longest` in all.

    Equal blocks make equal tokens. A prompt that is too long keeps its beginning.
    """
    arrivals = []
    for request, due in zip(requests, times, strict=True):
        output = min(max(1, round(request.output_length / scale)), max(1, longest // 2))
        room, parts = longest - output, []
        for index, block in enumerate(request.hash_ids):
            of_block = min(BLOCK_TOKENS, request.input_length - index * BLOCK_TOKENS)
            part = Part(_seed("block", block), min(room, max(1, round(of_block / scale))))
            if not part.tokens:
                break
            room -= part.tokens
            parts.append(part)
        arrivals.append(Arrival(due, tuple(parts), output))
    return arrivals


def ideal_hit_rate(arrivals: Iterable[Arrival]) -> float:
    """Returns what a pool that never forgets, and has everything immediately, would find: tokens of whole
    parts that came before."""
    pool, found, total = SimulatedLru[Part](), 0, 0
    for arrival in arrivals:
        found += sum(part.tokens for part in arrival.prompt[: pool.use(arrival.prompt)])
        total += arrival.prompt_tokens
    return found / total


def prompt_ids(parts: Iterable[Part], vocabulary: int) -> list[int]:
    """Returns the token ids of a prompt."""
    return [
        token
        for part in parts
        for token in np.random.default_rng(part.seed).integers(_SPECIAL, vocabulary, part.tokens).tolist()
    ]


def _seed(*parts: object) -> int:
    return random.Random(repr(parts)).getrandbits(64)
