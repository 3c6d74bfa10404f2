"""Decodes JSON and msgpack that other processes wrote. No other module does.

msgspec reports bad bytes in three ways: MsgspecError for a wrong syntax or schema, UnicodeDecodeError for
text that is not UTF-8, and RecursionError for deep nesting. If a caller catches only some of them, one bad
record stops it. Here all of them become `UndecodableError`, a ValueError whose message fits on one line of a
log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
_LONGEST = 300


_prepared: set[Any] = set()
_preparing = threading.Lock()


class UndecodableError(ValueError):
    """The bytes do not have the expected form. The message says why."""


@overload
def decode_json(raw: Buffer | str, kind: type[T], *, strict: bool = ...) -> T: ...


@overload
def decode_json(raw: Buffer | str, kind: Any, *, strict: bool = ...) -> Any: ...


def decode_json(raw: Buffer | str, kind: Any, *, strict: bool = True) -> Any:
    """Returns the value of type `kind` that the JSON text holds. If not `strict`, `"5"` and `5.0` count as
    integers, too, as in pydantic.

    Raises UndecodableError for anything else.
    """
    try:
        return msgspec.json.decode(raw, type=prepared(kind), strict=strict)
    except (ValueError, RecursionError) as error:
        raise _undecodable(error) from None


def msgpack_decoder(kind: Any) -> Callable[[Buffer], Any]:
    """Returns a function that decodes msgpack to a value of type `kind` and raises UndecodableError for any
    other bytes."""
    decode = msgspec.msgpack.Decoder(prepared(kind)).decode

    def read(raw: Buffer) -> Any:
        try:
            return decode(raw)
        except (ValueError, RecursionError) as error:
            raise _undecodable(error) from None

    return read


def prepared(kind: T) -> T:
    """Returns `kind` once any thread may decode or convert to it.

    msgspec examines a type at its first use. If two threads do that at the same time, the process crashes
    (seen with 0.22).
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
    return kind


def _undecodable(error: Exception) -> UndecodableError:
    if isinstance(error, UnicodeDecodeError):
        return UndecodableError("a text in it is not valid UTF-8")
    if isinstance(error, RecursionError):
        return UndecodableError("it is nested too deeply")
    return UndecodableError(one_line(str(error)))


def one_line(text: str) -> str:
    """Returns text from outside in a form that a log or a terminal can show: control characters are escaped,
    and long text is cut off."""
    shown = (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:_LONGEST])
    )
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
