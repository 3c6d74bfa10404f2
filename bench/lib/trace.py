"""Reads traces of requests, and simulates which part of their prompts a cache of whole blocks would find.

The format is that of Mooncake's FAST'25 traces: one JSON object a line, gzipped or not:

`timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`: one number for each block of
512 prompt tokens; the last block may be partial. Two requests have the same number for a block if their
prompts are equal up to the end of that block. Public traces are in https://github.com/kvcache-ai/Mooncake
under FAST25-release/traces.

A simulated cache takes in a prompt's blocks, and returns how many leading blocks it held before. It keeps as
many blocks as it has room for. The **hit rate** of a trace is the found tokens divided by all prompt tokens.
Only whole blocks have names in the pool. So tokens of a partial block, and tokens after a missing block, are
never found.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import click
import msgspec

from launch.proxy.routing.prefixes import leading

BLOCK_TOKENS = 512

_Block = Annotated[int, msgspec.Meta(ge=0)]


class TraceError(click.ClickException):
    """The file is no trace. The message names the line."""


class Request(msgspec.Struct):
    """A line of the trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """When the request comes, in milliseconds."""
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens of the prompt."""
    hash_ids: list[_Block]
    output_length: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Tokens of the answer."""

    @property
    def whole_blocks(self) -> list[int]:
        """The prompt's full blocks: a cache of whole chunks can hold no others."""
        return self.hash_ids[: self.input_length // BLOCK_TOKENS]


_decode = msgspec.json.Decoder(Request).decode


def _checked(request: Request) -> Request:
    blocks = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != blocks:
        raise ValueError(
            f"{len(request.hash_ids)} hash_ids, but an input_length of {request.input_length} "
            f"makes {blocks} blocks of {BLOCK_TOKENS} tokens"
        )
    if len(set(request.hash_ids)) < blocks:
        raise ValueError("a hash_id stands twice, but each names another prefix of the prompt")
    return request


def read_trace(file: Path) -> list[Request]:
    """Returns the requests of a trace, in the order of their times. Raises TraceError, which names the line,
    if a line does not fit."""
    requests: list[Request] = []
    for number, line in _lines(file):
        try:
            requests.append(_checked(_decode(line)))
        except ValueError as error:
            raise TraceError(f"{file}, line {number}: {error}") from None
    if not requests:
        raise TraceError(f"{file}: holds no requests")
    return sorted(requests, key=lambda request: request.timestamp)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers."""
    number = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:  # gzip raises any of these
        raise TraceError(f"{file}, after line {number}: cannot be read on: {error}") from None


# --- caches in simulation -----------------------------------------------------------------------------------


class SimulatedLru:
    """Forgets the least recently used blocks. Of a prompt, it forgets the last block first, because a block
    is useless without the blocks before it."""

    def __init__(self, capacity: int = sys.maxsize) -> None:
        """`capacity` is in blocks. By default the cache never forgets, which gives a trace's ideal."""
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.gone: list[int] = []
        """The blocks that the last use displaced."""

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def use(self, blocks: Sequence[int]) -> int:
        """Takes in a prompt. Returns how many leading blocks of it the cache held before."""
        found = leading(blocks, self._blocks)
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        excess = len(self._blocks) - self._capacity
        self.gone = [self._blocks.popitem(last=False)[0] for _ in range(excess)]
        return found


def hit_rate_of(requests: Iterable[Request], cache: SimulatedLru) -> float:
    """Returns the hit rate of the requests on a cache, which takes in all their blocks."""
    hit = total = 0
    for request in requests:
        hit += cache.use(request.whole_blocks) * BLOCK_TOKENS
        total += request.input_length
    return hit / total
