"""JSON and msgpack as no honest program writes them: duplicate keys, texts that are not UTF-8, lengths that lie, numbers of any size."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verbatim:
    """Bytes that stand in the encoded value as they are."""

    raw: bytes


@dataclass(frozen=True)
class Pairs:
    """An object whose keys may recur and may be anything."""

    pairs: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True)
class Claim:
    """In msgpack an array, a map, a text or bytes that claims to have `length` items, followed by `rest`."""

    kind: str
    length: int
    rest: bytes = b""


def to_json(value: Any) -> bytes:
    """Returns `value` as JSON, as far as JSON can hold it. Does not recurse deeper than the value nests."""
    if isinstance(value, Verbatim):
        return value.raw
    if isinstance(value, Claim):
        return b"[" * min(value.length, 5000)
    if isinstance(value, Pairs):
        return b"{" + b",".join(_json_key(key) + b":" + to_json(one) for key, one in value.pairs) + b"}"
    if isinstance(value, dict):
        return b"{" + b",".join(_json_key(key) + b":" + to_json(one) for key, one in value.items()) + b"}"
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join(map(to_json, value)) + b"]"
    if isinstance(value, bytes):
        return b'"' + value.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 64:
        return _digits(value)
    return json.dumps(value).encode()


def _json_key(key: Any) -> bytes:
    return to_json(key) if isinstance(key, (str, bytes, Verbatim)) else b'"' + to_json(key) + b'"'


def _digits(value: int) -> bytes:
    """Python itself refuses to write more than 4300 digits."""
    return (b"-" if value < 0 else b"") + (f"{abs(value):x}".translate(_DECIMAL)).encode()


_DECIMAL = str.maketrans("abcdef", "123456")


def to_msgpack(value: Any) -> bytes:
    """Returns `value` as msgpack; numbers of more than 64 bits are cut."""
    if isinstance(value, Verbatim):
        return value.raw
    if isinstance(value, Claim):
        first = {"array": 0xDD, "map": 0xDF, "text": 0xDB, "bytes": 0xC6, "ext": 0xC9}[value.kind]
        return bytes([first]) + struct.pack(">I", value.length) + value.rest
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return _msgpack_int(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return _sized(len(text), 0xA0, 32, 0xDA) + text
    if isinstance(value, bytes):
        return b"\xc5" + struct.pack(">H", len(value) & 0xFFFF) + value[:0xFFFF]
    if isinstance(value, (list, tuple)):
        return _sized(len(value), 0x90, 16, 0xDC) + b"".join(map(to_msgpack, value))
    pairs: Sequence[tuple[Any, Any]] = value.pairs if isinstance(value, Pairs) else tuple(value.items())
    return _sized(len(pairs), 0x80, 16, 0xDE) + b"".join(to_msgpack(key) + to_msgpack(one) for key, one in pairs)


def _sized(count: int, small: int, below: int, large: int) -> bytes:
    return bytes([small | count]) if count < below else bytes([large]) + struct.pack(">H", count & 0xFFFF)


def _msgpack_int(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes([value])
    if value >= 0:
        return b"\xcf" + struct.pack(">Q", value & (1 << 64) - 1)
    return b"\xd3" + struct.pack(">q", max(value, -(1 << 63)))
