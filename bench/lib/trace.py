"""Traces of requests, and what a cache of whole blocks would find of their prompts, in simulation. Pure.

The format is that of Mooncake's FAST'25 traces: one JSON object a line, gzipped or not:

`timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`: one number for each block of
512 prompt tokens; the last block may be partial. Two requests have equal numbers up to the block's end up to
which their prompts are equal. Public traces are in https://github.com/kvcache-ai/Mooncake under
FAST25-release/traces. The format of `aiperf synthesize agentic-code` is read, too. There a line has a
`session_id`, what the call adds to its session, and the ms after the previous answer.

A cache takes in a prompt's blocks, and returns how many of them, from the first, it held before. It keeps as
many blocks as it has room for. The **hit rate** of a trace is the found tokens divided by all prompt tokens.
Only whole blocks have names in the pool, so the tokens of a partial block, and those behind a hole, are only
in the denominator.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Generic, NamedTuple, Protocol, TypeVar

import click
import msgspec

from launch.proxy.prefixes import leading

BLOCK_TOKENS = 512

_LONGEST_LINE = 16 << 20
_SESSIONS_MS, _ANSWER_MS = 3_600_000.0, 1000 / 60
"""AIPerf's sessions begin one after the other within the first of these times, and a token of an answer takes
the second: so its own report assumes."""
_Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class TraceError(click.ClickException):
    """A file that is no trace. The message names the line."""


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


class _Call(msgspec.Struct):
    """A line of AIPerf's. Its `hash_ids` count only where the session begins: blocks of what is added are not
    those of the prompt."""

    session_id: str
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[_Block]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    delay: Annotated[float, msgspec.Meta(ge=0)] = 0.0


_decode, _decode_call = msgspec.json.Decoder(Request).decode, msgspec.json.Decoder(_Call).decode


def read_request(line: bytes) -> Request:
    """Returns the request of one line. Raises ValueError for a line that holds none."""
    try:
        request = _decode(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no request of a trace: {error}") from None
    return _checked(request)


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
    """Returns the requests of a trace, in the order of their times. TraceError names the line
    that does not fit."""
    requests: list[Request] = []
    sessions: dict[str, list[Request]] = {}
    fresh = count(1 << 61)
    for number, line in _lines(file):
        try:
            requests.append(
                _read_call(line, sessions, fresh) if b'"session_id"' in line else read_request(line)
            )
        except ValueError as error:
            raise TraceError(f"{file}, line {number}: {error}") from None
    if not requests:
        raise TraceError(f"{file}: holds no requests")
    for number, session in enumerate(sessions.values()):
        for request in session:
            request.timestamp += _SESSIONS_MS * number / len(sessions)
    return sorted(requests, key=lambda request: request.timestamp)


def _read_call(line: bytes, sessions: dict[str, list[Request]], fresh: Iterator[int]) -> Request:
    """Adds a call to its session, whose prompt is all that was said in it before. Its time is that since the
    session began."""
    try:
        call = _decode_call(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no call of a session: {error}") from None
    session = sessions.setdefault(call.session_id, [])
    now, tokens, blocks = 0.0, call.input_length, call.hash_ids
    if session:
        before = session[-1]
        now = before.timestamp + before.output_length * _ANSWER_MS + call.delay
        tokens += before.input_length + before.output_length
        blocks = before.whole_blocks
        blocks = [*blocks, *islice(fresh, -(-tokens // BLOCK_TOKENS) - len(blocks))]
    session.append(_checked(Request(now, tokens, blocks, call.output_length)))
    return session[-1]


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


# --- caches in simulation -----------------------------------------------------------------------------------

B = TypeVar("B", bound=Hashable)


class SimulatedLru(Generic[B]):
    """Forgets the least recently used blocks; of one prompt, the last block first, because it is useless
    without those before."""

    def __init__(self, capacity: int = sys.maxsize, batch: int = 0) -> None:
        """`capacity` in blocks; by default it never forgets, which is a trace's ideal. `batch`: how many more
        than it must it forgets at once."""
        self._capacity, self._batch = capacity, batch
        self._blocks: OrderedDict[B, None] = OrderedDict()
        self.gone: list[B] = []
        """What the last use displaced."""

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def find(self, blocks: Sequence[B]) -> int:
        """Returns how many blocks of a prompt, from the first, it holds. That counts as a use of these."""
        found = leading(blocks, self._blocks)
        for block in reversed(blocks[:found]):
            self._blocks.move_to_end(block)
        return found

    def use(self, blocks: Sequence[B]) -> int:
        """Takes in a prompt. Returns how many of its blocks, from the first, it held before."""
        found = leading(blocks, self._blocks)
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        excess = len(self._blocks) - self._capacity
        self.gone = [self._blocks.popitem(last=False)[0] for _ in range(excess + self._batch * (excess > 0))]
        return found


class Cache(Protocol):
    def __contains__(self, block: object, /) -> bool: ...

    def use(self, blocks: Sequence[int], /) -> object: ...


class Outcome(NamedTuple):
    """What a cache, empty at first, makes of a trace."""

    hit_rate: float
    """From 0 to 1."""
    written: int
    """Blocks that it took in, and still held when their request had ended."""
    read: int
    """How many of these were found before it forgot them."""


def measure(
    requests: Iterable[Request],
    cache: Cache,
    admits: Callable[[Sequence[int], int], Sequence[int]] | None = None,
) -> Outcome:
    """Shows the requests to a cache. `admits` returns the blocks of a prompt that are stored if they are not
    there, and gets how many were found; without it, all are."""
    hit = total = written = read = 0
    unread = set[int]()
    for request in requests:
        blocks = request.whole_blocks
        found = leading(blocks, cache)
        stored = {*(admits(blocks, found) if admits else blocks)}
        missing = [block for block in blocks if block not in cache]
        cache.use([block for block in blocks if block in cache or block in stored])
        hit, total = hit + found * BLOCK_TOKENS, total + request.input_length
        read += len(unread.intersection(blocks[:found]))
        unread.difference_update(blocks[:found])
        new = [block for block in missing if block in cache]
        written += len(new)
        unread.update(new)
    return Outcome(hit / total, written, read)
