"""No parser of what others wrote does anything but end well or raise the error that it documents.

`make fuzz` tries more, and of the same kind; an input that failed is kept in `corpus/` and tried here each time.
"""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.encodings import Claim, Pairs, Verbatim
from tests.fuzz.inputs import draw, encode
from tests.fuzz.target import Target, accepts
from tests.fuzz.targets import TARGETS

EXAMPLES, DRAWN = 100, 99
"""10,000 inputs for each target: each example is a value of Hypothesis's own, and as many drawn ones."""

_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=40)
    | st.sampled_from([2**63, 2**64, 10**400]) | st.builds(Verbatim, st.binary(max_size=8))
    | st.builds(Claim, st.sampled_from(["array", "map", "text", "bytes", "ext"]), st.integers(0, 2**32 - 1))
)  # fmt: skip


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5) | st.builds(
        Pairs, st.lists(st.tuples(st.text() | st.binary(max_size=8), inner), max_size=5).map(tuple)
    )  # fmt: skip


VALUES = st.recursive(_SCALARS, _containers, max_leaves=15)

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

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@each_target
def test_every_seed_is_accepted(target: Target) -> None:
    with target.open() as parse:
        for seed in target.seeds:
            if target.name not in _READ_TO_THE_END:
                assert accepts(target, parse, seed)


_READ_TO_THE_END = ("bench-stream",)
"""Whose connection ends after the seed, which is refused."""


@each_target
def test_what_failed_once_does_not_fail_again(target: Target) -> None:
    with target.open() as parse:
        for file in target.kept():
            accepts(target, parse, file.read_bytes())


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@each_target
def test_a_small_input_never_takes_much_memory(target: Target, bomb: bytes) -> None:
    data = target.seeds[0][: target.header] + bomb
    with target.open() as parse:
        accepts(target, parse, target.seeds[0])  # what is made once is made
        tracemalloc.start()
        try:
            accepts(target, parse, data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < (4 << 20) + 64 * len(data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_target
def test_whatever_others_write_ends_well_or_as_documented(target: Target) -> None:
    with target.open() as parse:
        # the same inputs each time: what is new is for `make fuzz`, whose finds are nobody else's failed build
        @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(VALUES, st.integers(0, 2**64 - 1))
        def try_some(value: Any, seed: int) -> None:
            accepts(target, parse, encode(target, value))
            rng = random.Random(seed)
            for _ in range(DRAWN):
                accepts(target, parse, draw(target, rng))

        try_some()
