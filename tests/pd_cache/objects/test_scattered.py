"""Values that lie in several places of the caller's memory."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

import pytest

from pd_cache.objects.cache import ObjectCache
from pd_cache.objects.values import Scattered
from tests.support.pool import Pool
from transfer.errors import Status

PART = 1000
LENGTHS = ([1], [0, 5, 0], [PART], [PART - 1, 1, 1], [400, 900, 3, 2500, 0, 7], [300] * 12)


@pytest.fixture(scope="module")
def cache(pool: Pool) -> Iterator[ObjectCache]:
    with ObjectCache.open(pool.settings(), uuid.uuid4().hex, part_bytes=PART) as cache:
        cache.wait_available(60)
        yield cache


def pieces(lengths: list[int], seed: int = 0) -> list[bytearray]:
    chance = random.Random(seed)
    return [bytearray(chance.randbytes(length)) for length in lengths]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_scattered_value_is_its_pieces_one_after_another_whatever_the_parts_are(
    cache: ObjectCache, lengths: list[int]
) -> None:
    given, name = pieces(lengths), uuid.uuid4().hex
    whole = b"".join(given)
    assert cache.put(name, Scattered([memoryview(piece) for piece in given])) is Status.OK
    assert cache.get(name) == whole
    for other in LENGTHS:
        memory = [bytearray(length) for length in other]
        target = Scattered([memoryview(piece) for piece in memory])
        reasons = cache.read_into([name], [target])
        fits = sum(other) == len(whole)
        assert reasons == ["" if fits else "other_size"]
        assert b"".join(memory) == (whole if fits else bytes(sum(other)))


def test_a_part_of_a_scattered_value_is_cut_at_its_pieces() -> None:
    value = Scattered([memoryview(b"abc"), memoryview(b""), memoryview(b"defg")])
    assert len(value) == 7
    assert [bytes(piece) for piece in value.part(slice(1, 6))] == [b"bc", b"def"]
    assert list(value.part(slice(3, 3))) == []


def test_memory_that_cannot_be_written_is_refused(cache: ObjectCache) -> None:
    with pytest.raises(ValueError, match="writable"):
        cache.read_into(["name"], [Scattered([memoryview(bytearray(2)), memoryview(b"no")])])
