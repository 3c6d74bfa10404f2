"""vLLM's block hashes without vLLM. Beside vLLM itself: tests/vllm/test_units.py."""

from __future__ import annotations

import pytest

from pd_cache.chunks import BlockHasher, UnknownHashesError, describe_hashes

DEFAULT = describe_hashes("sha256", "vllm-none-hash", "")


@pytest.fixture(autouse=True)
def no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def test_hashes_are_those_that_vllm_was_seen_to_make() -> None:
    first, second = BlockHasher(4, DEFAULT).hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], "s")
    assert second.hex() == "b511f314cfa82d6320d0875b0d800c1f63e80115fed17b73abebc98b2eb2e599"
    assert first != second


def test_a_salt_changes_every_hash_and_an_empty_one_none() -> None:
    hasher = BlockHasher(2, DEFAULT)
    plain, salted = hasher.hashes([1, 2, 3, 4]), hasher.hashes([1, 2, 3, 4], "tenant")
    assert not set(plain) & set(salted)
    assert hasher.hashes([1, 2, 3, 4], "") == plain


def test_hashes_of_less_than_a_block_are_those_that_the_namespace_describes() -> None:
    described = describe_hashes("sha256", "vllm-none-hash", "", 2)
    assert BlockHasher(4, described).hashes([1, 2, 3, 4]) == BlockHasher(2, DEFAULT).hashes([1, 2, 3, 4])


def test_another_seed_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    described = describe_hashes("sha256", "7", "of the file")
    with pytest.raises(UnknownHashesError, match="set PYTHONHASHSEED to what it is there"):
        BlockHasher(2, described)
    assert BlockHasher(2, described, {"8", "7"}).hashes([1, 2]) != BlockHasher(2, DEFAULT, {"7"}).hashes([1, 2])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert BlockHasher(2, described).hashes([1, 2]) != BlockHasher(2, DEFAULT).hashes([1, 2])


@pytest.mark.parametrize("described", [describe_hashes("xxhash", "vllm-none-hash", ""), "", "nonsense"])
def test_other_algorithms_are_refused(described: str) -> None:
    with pytest.raises(UnknownHashesError, match="only vLLM's sha256 is known here"):
        BlockHasher(2, described)
