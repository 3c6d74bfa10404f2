"""Names of chunks and their keys: what must agree does, and what must differ does. Vectors lie in
tests/golden."""

import array
import ctypes
import hashlib
import struct
from collections import UserList

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_cache.chunks import (
    BlockHasher,
    CacheMetadata,
    ChunkNamer,
    Namespace,
    UnknownHashesError,
    check_names,
    describe_hashes,
    fold_names,
    root,
    token_bytes,
)
from pd_cache.config import CacheConfig
from tests.support.names import NAMESPACE, database
from tests.support.waiting import together

token_lists = st.lists(st.integers(min_value=0, max_value=2**31 - 1), max_size=40)


# --- tokens -------------------------------------------------------------------------------------------------


@given(token_lists, token_lists)
def test_two_prompts_share_exactly_the_chunks_of_their_common_prefix(one, two):
    hashes = [database().name_chunks(tokens) for tokens in (one, two)]
    common = next((at for at, pair in enumerate(zip(one, two, strict=False)) if len(set(pair)) > 1), None)
    common = min(len(one), len(two)) if common is None else common
    assert sum(a == b for a, b in zip(*hashes, strict=False)) == common // 8
    assert len(hashes[0]) == len(one) // 8


int32s = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 127), max_size=40)


class OtherSequence(UserList[int]):
    """A sequence that is neither a list nor a buffer, as the tokens of vLLM's requests are."""


@given(int32s, st.data())
def test_every_form_of_the_same_tokens_has_the_same_names(tokens, data):
    low, high = min(tokens, default=0), max(tokens, default=0)
    numpy_type = data.draw(st.sampled_from([one for one in "bBhHiIlL" if fits(one, low, high)]))
    order = data.draw(st.sampled_from("<>"))
    values = np.array(tokens, dtype=np.dtype(numpy_type).newbyteorder(order))
    tensor = torch.from_numpy(np.array(tokens, dtype=numpy_type))
    forms = [
        tuple(tokens),
        OtherSequence(tokens),
        array.array("i", tokens),
        array.array("q", tokens),
        memoryview(array.array("i", tokens)),
        memoryview(array.array("q", tokens)),
        memoryview((ctypes.c_int32 * len(tokens))(*tokens)),
        values,
        np.stack([values, values], axis=1)[:, 0],
        np.concatenate([values, values])[len(tokens) :],
        tensor,
        torch.stack([tensor, tensor], dim=1)[:, 0],
        [np.int64(token) for token in tokens],
    ]
    if low >= 0 and high < 256:
        forms.append(bytes(tokens))
    expected = struct.pack(f"<{len(tokens)}i", *tokens)
    names = database().name_chunks(tokens)
    for form in [tokens, *forms]:
        assert token_bytes(form) == expected
        assert database().name_chunks(form) == names


def fits(numpy_type, low, high):
    return bool(np.iinfo(numpy_type).min <= low and high <= np.iinfo(numpy_type).max)


FLOATS, PLANE = np.array([1.0]), np.array([[1, 2]], dtype=np.int32)


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([1.5], "integers that fit an int32"),
        ("text", "integers that fit an int32"),
        ([2**31], "integers that fit an int32"),
        (7, "integers that fit an int32"),
        (array.array("q", [2**31]), "integers that fit an int32"),
        (array.array("d", [1.0]), "integers that fit an int32"),
        (memoryview(FLOATS), "integers that fit an int32"),
        (FLOATS, r"1-D and integers, got \(1,\) float64"),
        (PLANE, r"1-D and integers, got \(1, 2\) int32"),
        (np.array([1], dtype=object), r"1-D and integers, got \(1,\) object"),
        (np.array([0, 2**31]), "values from 0 to 2147483648"),
        (np.array([-(2**31) - 1, 0]), "values from -2147483649 to 0"),
        (torch.tensor([1.0]), r"1-D and integers, got \(1,\) torch.float32"),
        (torch.tensor([[1]]), r"1-D and integers, got \(1, 1\) int64"),
        (torch.tensor([2**63], dtype=torch.uint64), "values from 9223372036854775808"),
        (torch.tensor([True]), r"1-D and integers, got \(1,\) bool"),
    ],
)
def test_what_cannot_be_token_ids_is_refused_with_what_was_expected(tokens, message):
    with pytest.raises(ValueError, match=f"tokens must.*{message}"):
        token_bytes(tokens)


def test_extra_keys_keep_requests_apart_and_are_unambiguous():
    variants = [(), ("a",), ("b",), ("a", "b"), ("ab",), ("a", ""), (b"a",), (1,), ("1",), (-1,)]
    assert len({database().name_chunks(range(8), None, extra)[0] for extra in variants}) == len(variants)
    for wrong in ([1.5], "salt", b"salt"):  # the last two are not taken letter by letter
        with pytest.raises(ValueError, match="extra_keys"):
            root(wrong)


CHUNK = 512
RUN = 8 * CHUNK
"""What a namer remembers together, in tokens."""


def prompt(runs, tail=0):
    return [token for run in runs for token in [run] * RUN] + [7] * tail


# prompts of few kinds of runs, so that they begin alike
prompts = st.lists(
    st.tuples(
        st.lists(st.integers(min_value=0, max_value=2), max_size=4),
        st.integers(min_value=0, max_value=2 * CHUNK + 1),
        st.sampled_from([(), ("salt", "a"), ("salt", "b")]),
    ),
    max_size=6,
)


@given(prompts, st.sampled_from([1, 2 * RUN * 4, 1 << 24]))
def test_a_prompt_has_the_same_names_whatever_was_named_before(asked, most_bytes):
    namer = ChunkNamer(CHUNK, most_bytes=most_bytes)
    for runs, tail, salt in asked:
        names = namer.name_chunks(prompt(runs, tail), None, salt)
        assert names == ChunkNamer(CHUNK).name_chunks(prompt(runs, tail), None, salt)
        names[:] = [b"changed by the caller"] * len(names)


def test_a_run_that_only_ends_like_another_is_not_taken_for_it():
    namer, end = ChunkNamer(CHUNK), [3] * 8
    one, other = prompt([1])[:-8] + end, prompt([2])[:-8] + end
    first, second = namer.name_chunks(one), namer.name_chunks(other)
    assert not set(first) & set(second)
    assert namer.name_chunks(one) == first


def test_many_threads_name_prompts_with_one_namer():
    namer, wrong = ChunkNamer(CHUNK), []
    asked = [prompt([first, second], 5) for first in range(6) for second in range(6)]
    expected = [ChunkNamer(CHUNK).name_chunks(tokens) for tokens in asked]

    def name_all():
        wrong.extend(
            tokens
            for tokens, names in zip(asked, expected, strict=True)
            if namer.name_chunks(tokens) != names
        )

    together(*[name_all] * 4)
    assert not wrong


# --- keys and namespaces ------------------------------------------------------------------------------------


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
def test_nodes_that_differ_in_anything_never_share_a_key(change):
    assert database(**change).namespace.fingerprint() != NAMESPACE.fingerprint()


def test_a_manifest_of_names_by_another_hash_is_not_read():
    manifest = NAMESPACE.manifest()
    assert Namespace.read(manifest) == NAMESPACE
    for other in (manifest.replace(b"blake2b", b"sha256"), manifest.replace(b',"token_hash":"blake2b"', b"")):
        with pytest.raises(ValueError, match="another hash than blake2b"):
            Namespace.read(other)


def test_metadata_and_cache_settings_make_the_namespace():
    told = {
        "model": "m",
        "kv_dtype": "float32",
        "page_format": "x",
        "layers": 1,
        "block_size": 4,
        "page_bytes": 8,
    }
    namespace = CacheMetadata(**told, world_size=2, rank=1).namespace(CacheConfig(chunk_size=8))
    assert (namespace.shards, namespace.chunk_size, namespace.block_size) == (2, 8, 4)
    with pytest.raises(ValueError, match="rank 2"):
        CacheMetadata(**told, world_size=2, rank=2)
    with pytest.raises(ValueError, match="multiple of block_size 4"):
        database(chunk_size=10)


# --- block hashes -------------------------------------------------------------------------------------------


def test_hash_mode_takes_the_hash_of_each_chunks_last_block():
    db = database(hash_mode="blocks")
    blocks = [hashlib.sha256(bytes([index])).digest() for index in range(5)]
    assert db.name_chunks(None, blocks) == [blocks[1][:16], blocks[3][:16]]
    for call, message in (
        (lambda: db.name_chunks(range(8)), "not by tokens"),
        (lambda: database().name_chunks(None, blocks), "not by blocks"),
        (lambda: db.name_chunks(None, [b"short", b"short"]), "at least 8"),
        (lambda: db.name_chunks(None, blocks, ("salt",)), "extra_keys only with tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@given(
    names=st.lists(st.binary(min_size=8, max_size=16), max_size=5),
    identity=st.binary(min_size=1, max_size=64),
)
def test_a_folded_name_is_a_name_that_says_which_identity_it_is_of(names, identity):
    folded = fold_names(names, identity)
    check_names(folded)
    assert len(set(folded)) == len(set(names))
    assert not set(folded) & set(fold_names(names, identity[:-1] + bytes([identity[-1] ^ 1])))


DEFAULT = describe_hashes("sha256", "vllm-none-hash", "")
"""Of vLLM, whose own hashes these are compared with in tests/vllm/test_units.py."""


def test_block_hashes_depend_on_salt_seed_and_the_size_that_the_namespace_describes(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    tokens = [1, 2, 3, 4]
    plain = BlockHasher(2, DEFAULT).hashes(tokens)
    assert not set(plain) & set(BlockHasher(2, DEFAULT).hashes(tokens, "tenant"))
    assert BlockHasher(2, DEFAULT).hashes(tokens, "") == plain
    assert BlockHasher(4, describe_hashes("sha256", "vllm-none-hash", "", 2)).hashes(tokens) == plain
    other = describe_hashes("sha256", "7", "of the file")
    with pytest.raises(UnknownHashesError, match="set PYTHONHASHSEED to vLLM's value"):
        BlockHasher(2, other)
    seeded = BlockHasher(2, other, {"8", "7"}).hashes(tokens)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert BlockHasher(2, other).hashes(tokens) == seeded != plain


@pytest.mark.parametrize("described", [describe_hashes("xxhash", "vllm-none-hash", ""), "", "nonsense"])
def test_other_algorithms_are_refused(described):
    with pytest.raises(UnknownHashesError, match="knows only vLLM's sha256"):
        BlockHasher(2, described)
