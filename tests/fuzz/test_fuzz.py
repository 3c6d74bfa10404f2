"""No parser of what others wrote does anything but end well or raise the error that it documents.

`make fuzz` tries more inputs of the same kind. An input that failed once is a file in `corpus/`, and is tried
each time.
"""

import copy
import json
import math
import os
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, Format

pytestmark = pytest.mark.slow(seconds=30)

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""For each target; with 0 two hundred, and the same ones each time, so that nobody's build fails by
chance."""
CORPUS = Path(__file__).with_name("corpus")

BOMBS = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "deep arrays": b"\x91" * 100_000,
    "deep maps": b"\x81\xa1a" * 50_000,
    "an array that claims 4 billion items": b"\xdd\xff\xff\xff\xff",
    "a map that claims 4 billion items": b"\xdf\xff\xff\xff\xff",
    "a text that claims 4 GiB": b"\xdb\xff\xff\xff\xff",
    "bytes that claim 4 GiB": b"\xc6\xff\xff\xff\xff",
    "claims inside of claims": b"\xdd\xff\xff\xff\xff" * 1000,
    "a number of 100,000 digits": b"9" * 100_000,
    "a number with a huge exponent": b"1e999999999",
}

# --- inputs: values of the target's format, seeds whose tree or bytes are changed, and noise ----------------

_NUMBERS = (
    st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63, 1e308, -math.inf, math.nan])
)
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    [
        "0", "-1", "null", "\0", "a\n", "\x1b[2J", "\u2028", "\u202e", "a" * 5000, "../../etc/passwd", "http://[", "http://h:99999", "ipc:///etc",
        "tcp://*:1", "host:1", "[::1]:1", "16GiB", "nan",
    ]
)  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXTS, inner, max_size=5),
    max_leaves=10,
)
_ODD = {
    Format.JSON: [b"[" * 3000, b'{"a":' * 3000, b"1e999", b"NaN", b"9" * 5000, b'"\\ud800"', b'"\xff"', b'{"a":1,"a":2}'],
    Format.MSGPACK: [b"\x91" * 3000, b"\x81\xa1a" * 3000, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xa1\xff", b"\x82\xa1a\1\xa1a\2"],
    Format.BYTES: [b"\xff" * 8, b"\xed\xa0\x80", b"9" * 5000],
}  # fmt: skip
"""Values that no honest program writes."""
_PIECES = st.binary(max_size=8) | st.sampled_from([piece for pieces in _ODD.values() for piece in pieces])
"""What is put into an input's bytes."""


def _written(target, tree):
    encode = msgspec.msgpack.encode if target.format is Format.MSGPACK else msgspec.json.encode
    return target.seeds[0][: target.header] + encode(tree)


def _places(tree):
    """The way to each value inside of a tree."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [way for key in keys for way in [(key,), *((key, *rest) for rest in _places(tree[key]))]]


@st.composite
def _restructured(draw, target):
    """A seed of which some values are others, are gone, or stand twice: its syntax is right, its schema is
    not."""
    seed = draw(st.sampled_from(target.seeds))[target.header :]
    tree = msgspec.msgpack.decode(seed) if target.format is Format.MSGPACK else json.loads(seed)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(tree)
        if not places:
            return _written(target, draw(_VALUES))
        *way, key = draw(st.sampled_from(places))
        parent = tree
        for step in way:
            parent = parent[step]
        change = draw(st.sampled_from(["replace", "replace", "remove", "nest", "repeat", "near"]))
        old = parent[key]
        if change == "remove":
            del parent[key]
        elif change == "repeat" and isinstance(parent, list):
            parent[key:key] = [copy.deepcopy(old) for _ in range(draw(st.sampled_from([1, 40])))]
        elif change == "nest":
            parent[key] = draw(st.sampled_from([[old], {"a": old}, [old, old]]))
        elif change == "near" and isinstance(old, int | float):
            parent[key] = draw(st.sampled_from([old + 1, -old, str(old)]))
        elif change == "near" and isinstance(old, str | bytes):
            parent[key] = draw(st.sampled_from([old * 100, old[:-1], old + old[:1]]))
        else:
            parent[key] = draw(_VALUES | st.sampled_from(_ODD[target.format]).map(msgspec.Raw))
    return _written(target, tree)


@st.composite
def _damaged(draw, target):
    """A seed of which some bytes are others, are gone, or stand twice."""
    data = bytearray(draw(st.sampled_from(target.seeds)))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
        start = draw(st.integers(0, len(data)))
        size = draw(st.sampled_from([1, 1, 1, 0, 2, 4, 8, 64]))
        part = bytes(data[start : start + size])
        as_long = st.binary(min_size=len(part), max_size=len(part))
        data[start : start + size] = draw(
            as_long | as_long | _PIECES | st.sampled_from([b"", part * 2, bytes(data)])
        )
    return bytes(data)


def inputs_of(target):
    """Whatever others may write in place of what the target reads."""
    noise = st.binary(max_size=200).map(lambda data: target.seeds[0][: target.header] + data)
    if target.format is Format.BYTES:
        return _damaged(target) | noise
    return (
        _restructured(target) | _damaged(target) | _VALUES.map(lambda value: _written(target, value)) | noise
    )


# --- tests --------------------------------------------------------------------------------------------------

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@each_target
def test_every_seed_is_accepted_and_what_failed_once_does_not_fail_again(target):
    assert all(target.accepts(seed) for seed in target.seeds)
    for file in sorted((CORPUS / target.name).glob("*")):
        target.accepts(file.read_bytes())


@each_target
def test_a_small_input_never_takes_much_memory(target):
    for bomb in BOMBS.values():
        data = target.seeds[0][: target.header] + bomb
        tracemalloc.start()
        try:
            target.accepts(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < (4 << 20) + 64 * len(data)


@each_target
def test_whatever_others_write_ends_well_or_as_documented(target):
    # how long an example takes says nothing where other programs run, too
    @settings(
        max_examples=EXAMPLES or 200, derandomize=not EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )  # fmt: skip
    @given(inputs_of(target))
    def try_some(data):
        target.accepts(data)

    try_some()
