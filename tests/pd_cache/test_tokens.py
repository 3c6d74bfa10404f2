"""Chunk keys: what must agree does, and what must differ does."""

from __future__ import annotations

import array
import hashlib
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase, Namespace, check_names, fold_names, token_bytes
from pd_cache.config import CacheConfig

BASE = {
    "model": "m@1",
    "kv_dtype": "bfloat16",
    "layout": "heads_first.2x4x32",
    "layers": 2,
    "block_size": 4,
    "page_bytes": 256,
    "chunk_size": 8,
    "shards": 1,
    "hash_mode": "tokens",
}
token_lists = st.lists(st.integers(min_value=0, max_value=2**31 - 1), max_size=40)


def database(**changes: object) -> ChunkedTokenDatabase:
    return ChunkedTokenDatabase(Namespace(**{**BASE, **changes}))  # type: ignore[arg-type]


def test_the_hash_is_the_documented_chain() -> None:
    tokens = list(range(20))
    previous = database().root()
    expected = []
    for start in (0, 8):
        previous = hashlib.blake2b(previous + struct.pack("<8i", *tokens[start : start + 8]), digest_size=16).digest()
        expected.append(previous)
    assert database().hash_tokens(tokens) == expected


def test_keys_are_short_readable_and_name_namespace_shard_and_hash() -> None:
    db = database(shards=2)
    (name,) = db.hash_tokens(range(8))
    fingerprint = db.namespace.fingerprint()
    assert db.keys([name], (1,)) == [f"pdc1/{fingerprint}/1/{name.hex()}"]
    assert db.all_shard_keys([name]) == db.keys([name], (0,)) + db.keys([name], (1,))
    assert db.manifest_key == f"pdc1/{fingerprint}/manifest"
    assert all(key.isascii() and len(key) < 80 for key in db.all_shard_keys([name]))


@given(token_lists, token_lists)
def test_two_prompts_share_exactly_the_chunks_of_their_common_prefix(one: list[int], two: list[int]) -> None:
    hashes = [database().hash_tokens(tokens) for tokens in (one, two)]
    common = 0
    while common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    shared = sum(a == b for a, b in zip(*hashes, strict=False))
    assert shared == common // 8
    assert len(hashes[0]) == len(one) // 8


@given(token_lists)
def test_lists_tuples_arrays_and_tensors_of_the_same_tokens_have_the_same_bytes(tokens: list[int]) -> None:
    expected = struct.pack(f"<{len(tokens)}i", *tokens)
    for form in (tokens, tuple(tokens), array.array("i", tokens), torch.tensor(tokens, dtype=torch.int64)):
        assert token_bytes(form) == expected
    strided = torch.tensor([[token, 0] for token in tokens], dtype=torch.int64).view(-1, 2)[:, 0]
    assert token_bytes(strided) == expected
    part = torch.tensor([5, *tokens], dtype=torch.int32)[1:]
    assert token_bytes(part) == expected
    small = [token % 128 for token in tokens]
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64):
        assert token_bytes(torch.tensor(small, dtype=dtype)) == token_bytes(small)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.5],
        ["a"],
        [2**31],
        torch.tensor([1.0]),
        torch.tensor([[1]]),
        torch.tensor([2**31]),
        torch.tensor([2**32 + 5]),
        torch.tensor([2**31], dtype=torch.uint32),
        torch.tensor([2**32 + 5], dtype=torch.uint64),
        torch.tensor([2**63], dtype=torch.uint64),
        torch.tensor([True]),
        None,
    ],
)
def test_tokens_that_are_no_int32_are_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match="token"):
        token_bytes(tokens)  # type: ignore[arg-type]


def test_extra_keys_keep_requests_apart_and_are_unambiguous() -> None:
    tokens = list(range(8))
    variants = [(), ("a",), ("b",), ("a", "b"), ("ab",), ("a", ""), (b"a",), (1,), ("1",), (-1,)]
    names = [database().hash_tokens(tokens, extra)[0] for extra in variants]
    assert len(set(names)) == len(variants)
    with pytest.raises(ValueError, match="extra_keys"):
        database().root([1.5])  # type: ignore[list-item]
    for one in ("salt", b"salt"):
        with pytest.raises(ValueError, match="a sequence of keys"):
            database().root(one)  # type: ignore[arg-type]  # not taken letter by letter


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m@2"},
        {"kv_dtype": "float16"},
        {"layout": "mla.1x4x32"},
        {"layers": 3},
        {"page_bytes": 512},
        {"block_size": 8},
        {"chunk_size": 16},
        {"shards": 2},
        {"hash_mode": "blocks"},
        {"hash_seed": "sha256:0"},
    ],
)
def test_nodes_that_differ_in_anything_never_share_a_key(change: dict[str, object]) -> None:
    assert database(**change).namespace.fingerprint() != database().namespace.fingerprint()


def test_the_manifest_says_the_namespace_in_words() -> None:
    text = database().namespace.manifest().decode()
    assert '"chunk_size":8' in text
    assert '"model":"m@1"' in text


def test_a_manifest_of_names_by_another_hash_is_not_read() -> None:
    manifest = database().namespace.manifest()
    assert Namespace.read(manifest) == database().namespace
    for other in (manifest.replace(b"blake2b", b"sha256"), manifest.replace(b',"token_hash":"blake2b"', b"")):
        with pytest.raises(ValueError, match="another hash than blake2b"):
            Namespace.read(other)


def test_hash_mode_takes_the_hash_of_each_chunks_last_block() -> None:
    db = database(hash_mode="blocks")
    blocks = [hashlib.sha256(bytes([index])).digest() for index in range(5)]
    assert db.name_chunks(None, blocks) == [blocks[1][:16], blocks[3][:16]]
    with pytest.raises(ValueError, match="not by tokens"):
        db.hash_tokens(range(8))
    with pytest.raises(ValueError, match="not by blocks"):
        database().stride_hashes(blocks)
    with pytest.raises(ValueError, match="at least 8"):
        db.stride_hashes([b"short", b"short"])


def test_a_prompt_is_given_once() -> None:
    with pytest.raises(ValueError, match="extra_keys go with tokens only"):
        database(hash_mode="blocks").name_chunks(None, [b"x" * 16] * 2, ("salt",))
    for arguments in ((None, None), ([1], [b"x"])):
        with pytest.raises(ValueError, match="exactly one"):
            database().name_chunks(*arguments)


def test_a_chunk_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of block_size 4"):
        database(chunk_size=10)


def test_nothing_depends_on_the_hash_seed_of_the_interpreter() -> None:
    program = (
        "from tests.pd_cache.test_tokens import database\n"
        "print(database().keys(database().hash_tokens(range(16), ('salt', 'x'))))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert "pdc1/" in printed.pop()


def test_metadata_and_cache_settings_make_the_namespace() -> None:
    metadata = CacheMetadata(
        model="m", kv_dtype="float32", page_format="x", layers=1, block_size=4, page_bytes=8, world_size=2, rank=1
    )
    namespace = metadata.namespace(CacheConfig(chunk_size=8))
    assert (namespace.shards, namespace.chunk_size, namespace.block_size) == (2, 8, 4)
    with pytest.raises(ValueError, match="rank 2"):
        CacheMetadata(
            model="m", kv_dtype="float32", page_format="x", layers=1, block_size=4, page_bytes=8, world_size=2, rank=2
        )


@pytest.mark.parametrize("shards", [1, 4])
def test_metadata_within_a_namespace_gives_that_namespace(shards: int) -> None:
    space = database(shards=shards).namespace
    assert CacheMetadata.within(space).namespace(CacheConfig(chunk_size=space.chunk_size)) == space


@given(names=st.lists(st.binary(min_size=8, max_size=16), max_size=5), identity=st.binary(min_size=1, max_size=64))
def test_a_folded_name_is_a_name_that_says_which_identity_it_is_of(names: list[bytes], identity: bytes) -> None:
    folded = fold_names(names, identity)
    check_names(folded)
    assert len(set(folded)) == len(set(names))
    assert not set(folded) & set(fold_names(names, identity[:-1] + bytes([identity[-1] ^ 1])))
