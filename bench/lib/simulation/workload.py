"""Requests to the simulated cluster, with the names of their chunks: as many copies of a trace as the cluster
needs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.lib.trace import BLOCK_TOKENS, Request
from launch.proxy.routing.prefixes import RoutedPrompt

_COMMON = 0.1
_ODD = 2654435761
"""Multiplying by this spreads numbers over 32 bits."""
_TEXT_BLOCK_BYTES = 2048
_JSON_BYTES_A_TOKEN = 6.8
"""The average length of a random token id below 128k and a comma."""


class Part(NamedTuple):
    """Tokens that a seed determines: equal seeds give equal tokens."""

    seed: int
    tokens: int


class Arrival(NamedTuple):
    """A request of a trace, and when it comes."""

    due: float
    """Seconds from the start of the load."""
    prompt: tuple[Part, ...]
    output: int
    """Tokens to generate."""


class SimulatedRequest(NamedTuple):
    """A request to come."""

    due: float
    """When the request comes, in seconds from the start."""
    tokens: int
    """Tokens of the prompt."""
    output: int
    """Tokens to generate, at least 1."""
    names: Sequence[bytes]
    """The names of its whole chunks."""
    routed: RoutedPrompt
    """The prompt as the proxy knows it."""


def of_arrival(arrival: Arrival, chunk_tokens: int) -> SimulatedRequest:
    """Returns an arrival with the names that its chunks have in this run."""
    tokens = sum(part.tokens for part in arrival.prompt)
    block_tokens = round(_TEXT_BLOCK_BYTES / _JSON_BYTES_A_TOKEN)
    routed = RoutedPrompt(tokens, names_of(arrival.prompt, block_tokens), block_tokens)
    return SimulatedRequest(
        arrival.due, tokens, max(1, arrival.output), names_of(arrival.prompt, chunk_tokens), routed
    )


def names_of(prompt: Iterable[Part], size: int) -> list[bytes]:
    """Returns a name for each whole piece of `size` tokens; equal where prompts are equal up to the piece's
    end."""
    names: list[bytes] = []
    before, room, inside = 0, size, []
    for part in prompt:
        start = 0
        while part.tokens - start >= room:
            inside.append((part.seed, start, start + room))
            before = hash((before, *inside))
            names.append(before.to_bytes(8, "little", signed=True))
            start += room
            room, inside = size, []
        if start < part.tokens:
            inside.append((part.seed, start, part.tokens))
            room -= part.tokens - start
    return names


def of_some_users(trace: Sequence[Request], share: float) -> list[Request]:
    """Returns the requests of a share (0 to 1) of a trace's users. Requests that share more than their first
    block belong to the same user."""
    return [request for request in trace if request.hash_ids[:2][-1] * _ODD % (1 << 32) < share * (1 << 32)]


class CopiedTrace:
    """A trace, copied as many times as a cluster needs. Each copy stands for other users, so it has blocks of
    its own. All copies share the system prompts: the first blocks with which at least a tenth of all requests
    begin."""

    def __init__(self, trace: Sequence[Request], warm: int, depth: int) -> None:
        """The first `warm` requests have passed already; the next `depth`, or as many as there are, come. If
        the trace is too short for both, all its requests come, and none has passed."""
        if warm + depth > len(trace):
            warm = max(0, min(warm, len(trace) - depth))
        self.passed, self._coming = trace[:warm], trace[warm : warm + depth]
        first = Counter(request.hash_ids[0] for request in trace)
        self._common = {block for block, times in first.items() if times >= _COMMON * len(trace)}

    def copies(self, count: int) -> int:
        """Returns how many copies `count` requests need."""
        return -(-count // len(self._coming))

    def arrivals(self, count: int, rate: float) -> list[Arrival]:
        """Returns `count` requests at `rate` a second, at random times (Poisson), from the copies in turn.
        Each call returns the same times. All copies advance equally far, so the share of a prompt that its
        user has sent before does not depend on the number of copies."""
        copies, arrivals = self.copies(count), []
        rng, now = random.Random(0), 0.0
        for number in range(count):
            now += rng.expovariate(rate)
            index, copy = divmod(number, copies)
            request = self._coming[index]
            arrivals.append(Arrival(now, self.parts(request, copy), max(1, request.output_length)))
        return arrivals

    def parts(self, request: Request, copy: int) -> tuple[Part, ...]:
        """Returns the prompt of a copy's request."""
        parts = []
        for place, block in enumerate(request.hash_ids):
            tokens = min(BLOCK_TOKENS, request.input_length - place * BLOCK_TOKENS)
            shared = place == 0 and block in self._common
            parts.append(Part(hash((block, -1 if shared else copy)), tokens))
        return tuple(parts)
