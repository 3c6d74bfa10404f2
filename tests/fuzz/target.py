"""What a parser promises, as something that can be tried: it ends well, or with the error that it documents."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")


class Format(enum.Enum):
    """What a target's seeds are made of, which decides how they are changed."""

    JSON = "json"
    MSGPACK = "msgpack"
    BYTES = "bytes"


Parse = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """One parser of what others wrote."""

    name: str
    open: Callable[[], AbstractContextManager[Parse]]
    """Gives the function that tries one input. An AssertionError of it is a value that breaks its own promises."""
    refusals: tuple[type[Exception], ...]
    """What the parser documents that it raises."""
    seeds: tuple[bytes, ...]
    """Valid inputs."""
    format: Format
    header: int = 0
    """Bytes of each seed before what is in `format`."""
    alone: bool = True
    """Whether an input fails by itself; False where those before it count, too."""

    def kept(self) -> list[Path]:
        """Files with inputs that failed once, or are worth being tried each time."""
        return sorted((CORPUS / self.name).glob("*"))

    def keep(self, data: bytes) -> Path:
        """Write an input down, so that every later run tries it."""
        folder = CORPUS / self.name
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / hashlib.sha256(data).hexdigest()[:16]
        file.write_bytes(data)
        return file


class Failure(Exception):
    """An input that a parser did not survive."""

    def __init__(self, target: Target, data: bytes, error: BaseException) -> None:
        shown = f"{data[:200]!r}{f' … {len(data)} bytes' if len(data) > 200 else ''}"
        super().__init__(
            f"{target.name}: {type(error).__name__}: {str(error)[:300]}\nby {shown}\nas hex: {data[:2000].hex()}"
        )
        self.target = target
        self.data = data
        self.error = error


def accepts(target: Target, parse: Parse, data: bytes) -> bool:
    """Try one input: True if it was accepted, False if it was refused as documented. Raises Failure otherwise."""
    try:
        parse(data)
    except target.refusals:
        return False
    except (Exception, RecursionError, MemoryError) as error:
        raise Failure(target, data, error) from error
    return True


def reduced(target: Target, parse: Parse, failure: Failure) -> Failure:
    """Returns the failure of an input that leaving out parts made shorter, for some seconds, with an error of the same type."""
    until = time.process_time() + 3
    size = max(1, len(failure.data) // 2) if target.alone else 0
    while size:
        start = 0
        while start < len(failure.data) and time.process_time() < until:
            shorter = failure.data[:start] + failure.data[start + size :]
            try:
                accepts(target, parse, shorter)
            except Failure as smaller:
                if type(smaller.error) is type(failure.error):
                    failure = smaller
                    continue
            start += size
        size //= 2
    return failure


def pure(parse: Parse) -> Callable[[], AbstractContextManager[Parse]]:
    """For a parser that needs nothing around it."""

    @contextmanager
    def opened() -> Iterator[Parse]:
        yield parse

    return opened
