"""Traces of requests, in the format of Mooncake's FAST'25 traces: one JSON object a line, gzipped or not.

`timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`: one number for each block of 512 prompt tokens, the last
one maybe not full, equal in two requests where their prompts are equal up to that block's end. Public ones are in
https://github.com/kvcache-ai/Mooncake under FAST25-release/traces.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import click
import msgspec

BLOCK_TOKENS = 512

_LONGEST_LINE = 16 << 20
_Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class TraceError(click.ClickException):
    """A file that is no trace; says in which line."""


class Request(msgspec.Struct):
    """A line of the trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds."""
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens of the prompt."""
    hash_ids: list[_Block]
    output_length: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Tokens of the answer."""

    @property
    def whole_blocks(self) -> list[int]:
        """The blocks that are full: what a cache of whole chunks can hold of this prompt."""
        return self.hash_ids[: self.input_length // BLOCK_TOKENS]


_decode = msgspec.json.Decoder(Request).decode


def read_request(line: bytes) -> Request:
    """Returns the request of one line. Raises ValueError for a line that holds none."""
    try:
        request = _decode(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no request of a trace: {error}") from None
    blocks = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != blocks:
        raise ValueError(
            f"{len(request.hash_ids)} hash_ids, but an input_length of {request.input_length} "
            f"makes {blocks} blocks of {BLOCK_TOKENS} tokens"
        )
    if len(set(request.hash_ids)) < blocks:
        raise ValueError("a hash_id stands twice, but each names another prefix of the prompt")
    return request


def read_trace(file: Path, limit: int | None = None) -> list[Request]:
    """Returns the first `limit` requests of a trace, in the order of their times. TraceError names the line that does not fit."""
    requests: list[Request] = []
    for number, line in _lines(file):
        if len(requests) == limit:
            break
        try:
            requests.append(read_request(line))
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
            while line := stream.readline(_LONGEST_LINE):
                number += 1
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:  # gzip's own are among them
        raise TraceError(f"{file}, after line {number}: cannot be read on: {error}") from None


def deal(requests: Sequence[Request], shares: int) -> list[list[int]]:
    """Indices of the requests, dealt to `shares` clients that work at the same time without missing each other's chunks.

    Requests that have more than their first block in common go to the same client, in order; each conversation to the client
    with the least to do so far. What all conversations begin with, such as a system prompt of one block, is shared.
    """
    dealt: list[list[int]] = [[] for _ in range(shares)]
    tokens = [0] * shares
    client_of: dict[int, int] = {}
    for index, request in enumerate(requests):
        begins = request.hash_ids[:2][-1]
        client = client_of.setdefault(begins, tokens.index(min(tokens)))
        dealt[client].append(index)
        tokens[client] += request.input_length
    return dealt
