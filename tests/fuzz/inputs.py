"""What others may write: valid seeds that were damaged, values made by the format's own grammar, and noise.

Everything is drawn from one `random.Random`, so that a seed replays a run.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from tests.fuzz.encodings import Claim, Pairs, Verbatim, to_json, to_msgpack
from tests.fuzz.target import Format, Target

_DEEP = 3000
_NUMBERS = (
    0, 1, -1, 2, 7, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**48, 2**53, 2**62, 2**63 - 1, 2**63,
    -(2**63), 2**64 - 1, 10**30, -(10**30), 10**400, 16**5000, 0.0, -0.0, 0.5, 1.0, 5e-324, 1e-320, 1e308, -1e308, 1e16,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
_TEXTS = (
    "", "a", "0", "-1", "1e999", "null", "true", "\0", "\n", "a\n", "\r\n", "\x1b[2J", "\x7f", "\u2028", "\u202e", "\ud800", "é", "😀",
    "a" * 300, "a" * 5000, "../../etc/passwd", "/", "%s%n", "{}", "*", "~", "http://[", "http://h:99999", "http://h:1/x", "ipc:///etc",
    "tcp://*:1", "file:///etc/passwd", "host:1", "[::1]:1", ":", "1:30", "010051", "0x10", "1_000", "16GiB", "-1GiB", "nan", ".inf",
)  # fmt: skip
_RAW = (b"\xff", b"\xc3\x28", b"a\xff\xfe", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80")


def draw(target: Target, rng: random.Random) -> bytes:
    """Returns one input for a target."""
    return rng.choices(_WAYS, _WEIGHTS)[0](target, rng)


def encode(target: Target, value: Any) -> bytes:
    """Returns a value in the target's own format, behind the header of one of its seeds."""
    header = target.seeds[0][: target.header]
    if target.format is Format.MSGPACK:
        return header + to_msgpack(value)
    if target.format is Format.JSON:
        return header + to_json(value)
    return header + (value if isinstance(value, bytes) else to_json(value))


def anything(rng: random.Random, depth: int = 4) -> Any:
    """Returns a value of any type, usually one that is at the edge of what a type can hold."""
    kind = rng.randrange(12 if depth else 8)
    if kind < 3:
        return rng.choice(_NUMBERS)
    if kind < 5:
        return rng.choice(_TEXTS)
    if kind == 5:
        return rng.choice((None, True, False))
    if kind == 6:
        return rng.choice(_RAW)
    if kind == 7:
        return rng.choice((Verbatim(rng.randbytes(rng.randrange(12))), _claim(rng)))
    if kind < 10:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 10:
        return {rng.choice(_TEXTS): anything(rng, depth - 1) for _ in range(rng.randrange(4))}
    return Pairs(tuple((anything(rng, 0), anything(rng, depth - 1)) for _ in range(rng.randrange(4))))


# --- ways to make an input -------------------------------------------------------------------------------------------


def _noise(target: Target, rng: random.Random) -> bytes:
    return rng.choice(target.seeds)[: target.header] + rng.randbytes(rng.randrange(rng.choice((8, 64, 1024))))


def _made(target: Target, rng: random.Random) -> bytes:
    return encode(target, anything(rng))


def _damaged(target: Target, rng: random.Random) -> bytes:
    data = bytearray(rng.choice(target.seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        rng.choice(_DAMAGES)(data, target, rng)
    return bytes(data)


def _restructured(target: Target, rng: random.Random) -> bytes:
    """A seed whose tree was changed in some places: the syntax is right, the schema is not."""
    seed = rng.choice(target.seeds)
    tree = _tree(target.format, seed[target.header :])
    if tree is None:
        return _damaged(target, rng)
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = _changed(tree, rng)
    made = to_msgpack(tree) if target.format is Format.MSGPACK else to_json(tree)
    return seed[: target.header] + made


_WAYS: tuple[Callable[[Target, random.Random], bytes], ...] = (_restructured, _damaged, _made, _noise)
_WEIGHTS = (45, 40, 10, 5)


# --- damage to bytes -------------------------------------------------------------------------------------------------


def _flip(data: bytearray, target: Target, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(data: bytearray, target: Target, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice(
            (0, 10, 34, 44, 91, 93, 123, 125, 128, 192, 193, 255, rng.randrange(256))
        )


def _cut(data: bytearray, target: Target, rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _remove(data: bytearray, target: Target, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.choice((1, 2, 4, 16))]


def _insert(data: bytearray, target: Target, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    inserted = rng.choice((*_RAW, b"\0", b"\n", b"[" * _DEEP, b"{" * 5, b"9" * 5000, b"\x91" * _DEEP, rng.randbytes(4)))
    data[start:start] = inserted


def _repeat(data: bytearray, target: Target, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    part = data[start : start + rng.choice((1, 8, 64))]
    data[start:start] = part * rng.choice((1, 2, 50))


def _splice(data: bytearray, target: Target, rng: random.Random) -> None:
    other = rng.choice(target.seeds)
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other) + 1) :]


def _length(data: bytearray, target: Target, rng: random.Random) -> None:
    """A field of 2, 4 or 8 bytes becomes a number that a length may not be."""
    layout = rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
    size = struct.calcsize(layout)
    if len(data) >= size:
        start = rng.randrange(len(data) - size + 1)
        top = (1 << 8 * size) - 1
        struct.pack_into(
            layout, data, start, rng.choice((0, 1, 0x7FFF, top, top >> 1, top - 1, len(data), len(data) + 1)) & top
        )


_DAMAGES = (_flip, _flip, _overwrite, _overwrite, _cut, _remove, _insert, _repeat, _splice, _length)


# --- changes to trees ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _tree(kind: Format, raw: bytes) -> Any:
    """The value that a seed holds; None where its format has no trees."""
    if kind is Format.JSON:
        return json.loads(raw)
    if kind is Format.MSGPACK:
        return msgspec.msgpack.decode(raw)
    return None


def _changed(tree: Any, rng: random.Random) -> Any:
    places = list(_places(tree))
    if not places:
        return anything(rng)
    parent, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind < 3:
        parent[key] = anything(rng, 2)
    elif kind == 3:
        parent[key] = _near(parent[key], rng)
    elif kind == 4:
        del parent[key]
    elif kind == 5:
        other, place = rng.choice(places)
        parent[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None
    elif kind == 6 and isinstance(parent, list):
        parent[key:key] = [copy.deepcopy(parent[key])] * rng.choice((1, 2, 40))
    elif kind == 6:
        parent[rng.choice((*_TEXTS, key + "x"))] = parent.pop(key)
    else:
        parent[key] = _nested(parent[key], rng)
    return tree


def _places(tree: Any) -> Any:
    """Each container of a tree with a key of it."""
    keys: Any = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _near(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return rng.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 2,
                value * 2**32,
                float(value) if abs(value) < 2**60 else 0,
                f"{value:x}" if isinstance(value, int) else str(value),
            )
        )
    if isinstance(value, str):
        return rng.choice(
            (
                value + "\n",
                value + "\0",
                " " + value,
                value.upper(),
                value * 100,
                value.encode(errors="replace") + b"\xff",
                value + "\ud800",
                [value],
            )
        )
    if isinstance(value, bytes):
        return rng.choice((value + b"\0", value[:-1], value * 100, value.decode("latin1")))
    return [value]


def _nested(value: Any, rng: random.Random) -> Any:
    if rng.randrange(4):
        return rng.choice(([value], {"a": value}, [value, value]))
    return Verbatim(rng.choice((b"[", b"\x91", b'{"a":', b"\x81\xa1a")) * _DEEP)


def _claim(rng: random.Random) -> Claim:
    kind = rng.choice(("array", "map", "text", "bytes", "ext"))
    return Claim(kind, rng.choice((1, 1000, 65536, 2**24, 2**31, 2**32 - 1)), rng.randbytes(rng.randrange(6)))
