"""The oracle of a soak: whatever is wrong in a paged buffer is found, and said where."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from bench.suites.soak.driver import Cache, perform
from bench.suites.soak.oracle import (
    BLOCK,
    BLOCKS,
    HEADS,
    LAYERS,
    TOKEN_BYTES,
    WORDS,
    PagedBuffer,
    kv_of,
    places,
    prefixes,
)
from bench.suites.soak.plan import CHUNK, Operation, OperationKind, PlannedPrompt, operations, tokens_of
from pd_cache.layout import KVLayout, PageKind

CANARY = 0x0123_4567_89AB_CDEF
_NONE = np.zeros(0, np.int64)


@pytest.fixture(scope="module")
def buffer() -> PagedBuffer:
    return PagedBuffer()


def _loaded(buffer: PagedBuffer, count: int = 40, scattered: bool = False) -> tuple[Any, Any]:
    """Slots that hold what they must, in a buffer of canaries."""
    slots = places(random.Random(1), count, scattered)
    names = prefixes(range(count))
    buffer.fill(CANARY)
    buffer.put(slots, names)
    return slots, names


def test_the_buffer_is_one_that_engines_have(buffer: PagedBuffer) -> None:
    layout = KVLayout.from_tensors(buffer.tensors)
    assert (layout.kind, layout.layers, layout.blocks, layout.block_size) == (
        PageKind.HEADS_FIRST,
        LAYERS,
        BLOCKS,
        BLOCK,
    )
    assert layout.token_bytes == TOKEN_BYTES == LAYERS * HEADS * WORDS * 8


def test_kv_depends_on_every_token_before() -> None:
    one, other = prefixes([1, 2, 3, 4]), prefixes([9, 2, 3, 4])
    assert not set(one.tolist()) & set(other.tolist())
    words = kv_of(one).reshape(-1)
    assert len(set(words.tolist())) == len(words), "no two words are the same, wherever they are"


def test_kv_depends_on_the_weights_whatever_the_tokens_are() -> None:
    old = {int(prefixes([token])[0]) for token in range(1000)}
    assert not old & {int(prefixes([token], weights)[0]) for token in range(1000) for weights in (1, 2, 3)}


@pytest.mark.parametrize("scattered", [False, True])
def test_what_is_right_is_found_right_and_the_canary_is_back(buffer: PagedBuffer, scattered: bool) -> None:
    slots, names = _loaded(buffer, scattered=scattered)
    assert buffer.compare(slots, names, _NONE, CANARY) == (0, [])
    assert bool((buffer.words == CANARY).all())


def test_a_single_wrong_byte_is_found(buffer: PagedBuffer) -> None:
    slots, names = _loaded(buffer)
    memory = buffer.words.view(np.uint8)
    memory[1, slots[17] // BLOCK, 1, slots[17] % BLOCK, 801] ^= 0x10
    count, (first,) = buffer.compare(slots, names, _NONE, CANARY)
    assert (count, first.slot, first.token) == (1, int(slots[17]), 17)
    assert first.expected != first.got


def test_a_byte_outside_of_the_slots_of_an_operation_is_found(buffer: PagedBuffer) -> None:
    slots, names = _loaded(buffer)
    other = next(slot for slot in range(BLOCKS * BLOCK) if slot not in set(slots.tolist()))
    buffer.words[0, other // BLOCK, 0, other % BLOCK, 3] += np.uint64(1)
    count, (first,) = buffer.compare(slots, names, _NONE, CANARY)
    assert (count, first.slot, first.token) == (1, other, -1)


def test_another_prompts_kv_is_found_and_named(buffer: PagedBuffer) -> None:
    slots, names = _loaded(buffer)
    foreign = prefixes(range(1000, 1000 + CHUNK))
    buffer.know(foreign, "the other prompt")
    buffer.put(slots[CHUNK : 2 * CHUNK], foreign)
    count, found = buffer.compare(slots, names, _NONE, CANARY)
    assert count == CHUNK
    assert [one.token for one in found] == list(range(CHUNK, CHUNK + len(found)))
    buffer.put(slots[:CHUNK], foreign)
    buffer.words[:, slots[0] // BLOCK, :, slots[0] % BLOCK, :] = kv_of(foreign)[-1]
    _, found = buffer.compare(slots[:1], names[:1], _NONE, CANARY)
    assert found[0].belongs_to == f"the other prompt up to token {CHUNK}"


def test_each_chunk_may_be_of_earlier_weights_and_the_earliest_are_told(buffer: PagedBuffer) -> None:
    slots, tokens = places(random.Random(1), 3 * CHUNK, True), range(3 * CHUNK)
    buffer.fill(CANARY)
    for chunk, weights in enumerate((2, 0, 1)):
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        buffer.put(slots[part], prefixes(tokens, weights)[part])
    names, earliest = buffer.recognise(slots, lambda weights: prefixes(tokens, weights), 2)
    assert earliest == 0
    buffer.words[1, slots[5] // BLOCK, 1, slots[5] % BLOCK, 3] ^= np.uint64(1)
    assert buffer.compare(slots, names, _NONE, CANARY)[0] == 1


def test_a_chunk_that_no_weights_explain_is_wrong(buffer: PagedBuffer) -> None:
    slots, tokens = places(random.Random(1), 2 * CHUNK, False), range(2 * CHUNK)
    buffer.fill(CANARY)
    buffer.put(slots, prefixes(tokens, 3))
    names, earliest = buffer.recognise(slots, lambda weights: prefixes(tokens, weights), 2)
    assert (earliest, buffer.compare(slots, names, _NONE, CANARY)[0]) == (2, 2 * CHUNK)


def test_slots_that_may_differ_are_not_compared(buffer: PagedBuffer) -> None:
    slots, names = _loaded(buffer)
    buffer.put(slots[32:], prefixes(range(500, 508)))
    assert buffer.compare(slots[:32], names[:32], slots[32:], CANARY) == (0, [])


class _Dictionary:
    """A cache that is right, but for what a test makes of it."""

    removes = True

    def __init__(self, buffer: PagedBuffer) -> None:
        self.buffer, self.chunks = buffer, {}  # type: ignore[var-annotated]
        self.after: Any = lambda slots: None

    def bound(self, kind: OperationKind, chunks: int, timeout: float) -> float:
        return timeout

    def lookup(self, tokens: list[int], timeout: float) -> int:
        names = prefixes(tokens)[CHUNK - 1 :: CHUNK].tolist()
        return next((index for index, name in enumerate(names) if name not in self.chunks), len(names)) * CHUNK

    def retrieve(self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, timeout: float) -> torch.Tensor:
        answer, found, names = torch.zeros(len(tokens), dtype=torch.bool), slots.numpy(), prefixes(tokens)
        for start in range(len(tokens) - int(mask.sum()), len(tokens) // CHUNK * CHUNK, CHUNK):
            kv = self.chunks.get(int(names[start + CHUNK - 1]))
            if kv is None:
                break
            place = found[start : start + CHUNK]
            self.buffer.words[:, place // BLOCK, :, place % BLOCK, :] = kv
            answer[start : start + CHUNK] = True
        self.after(found)
        return answer

    def epoch(self) -> str | None:
        return ""

    def reset(self) -> bool:
        return True

    def store(self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, epoch: str, timeout: float) -> int:
        found, names, stored = slots.numpy(), prefixes(tokens), 0
        for start in range(len(tokens) - int(mask.sum()), len(tokens) // CHUNK * CHUNK, CHUNK):
            place = found[start : start + CHUNK]
            stored += CHUNK * (int(names[start + CHUNK - 1]) not in self.chunks)
            kv = self.buffer.words[:, place // BLOCK, :, place % BLOCK, :].copy()
            self.chunks.setdefault(int(names[start + CHUNK - 1]), kv)
        self.after(found)
        return stored

    def remove(self, tokens: list[int], timeout: float) -> None:
        for name in prefixes(tokens)[CHUNK - 1 :: CHUNK].tolist():
            self.chunks.pop(name, None)


def _do(cache: Cache, buffer: PagedBuffer, kind: OperationKind, prompt: PlannedPrompt, first: int = 0) -> Any:
    operation = Operation(0, kind, prompt, first, False, 3, 1.0, 0.0)
    return perform(cache, buffer, operation, 1, CANARY)(lambda: None)


def test_a_cache_that_is_right_passes_a_hundred_operations(buffer: PagedBuffer) -> None:
    cache = _Dictionary(buffer)
    loaded = 0
    for operation in islice(operations(4, "engine-a/0"), 100):
        done = perform(cache, buffer, operation, 4, CANARY)(lambda: None)
        assert (done.wrong, done.complaint) == (0, ""), operation
        loaded += done.tokens
    assert loaded


def test_kv_of_weights_that_another_engine_has_before_this_one_is_right(buffer: PagedBuffer) -> None:
    cache, operation = (
        _Dictionary(buffer),
        Operation(0, "store", PlannedPrompt(0, 4 * CHUNK, 0, 0), 0, False, 3, 1.0, 0.0),
    )
    perform(cache, buffer, operation, 1, CANARY, lambda: 2)(lambda: None)
    done = perform(cache, buffer, operation._replace(kind="retrieve"), 1, CANARY, lambda: 1)(lambda: None)
    assert (done.hit, done.wrong, done.weights) == (4 * CHUNK, 0, 2)


def test_a_wrong_byte_planted_in_a_cache_is_caught_when_it_is_loaded(buffer: PagedBuffer) -> None:
    cache, prompt = _Dictionary(buffer), PlannedPrompt(0, 5 * CHUNK, 0, 0)
    assert _do(cache, buffer, "store", prompt).hit == 5 * CHUNK
    name = int(prefixes(tokens_of(1, prompt))[3 * CHUNK - 1])
    cache.chunks[name].view(np.uint8)[4, 1, 1, 77] ^= 0x01
    done = _do(cache, buffer, "retrieve", prompt)
    assert (done.hit, done.wrong) == (5 * CHUNK, 1)
    assert done.first[0].token == 2 * CHUNK + 4


def test_a_cache_that_writes_where_it_should_not_is_caught(buffer: PagedBuffer) -> None:
    cache, prompt = _Dictionary(buffer), PlannedPrompt(0, 4 * CHUNK, 0, 0)
    _do(cache, buffer, "store", prompt)

    def write_beside(slots: Any) -> None:
        free = next(slot for slot in range(BLOCKS * BLOCK) if slot not in set(slots.tolist()))
        buffer.words[1, free // BLOCK, 0, free % BLOCK, 9] = np.uint64(0)

    cache.after = write_beside
    assert _do(cache, buffer, "retrieve", prompt).wrong == 1
    cache.after = lambda slots: buffer.put(slots[:1], prefixes([77]))
    assert _do(cache, buffer, "retrieve", prompt, first=2).wrong == 1, "a slot that the mask leaves out"
    assert _do(cache, buffer, "store", prompt).wrong == 1, "a store that changes what it reads"


def test_answers_that_cannot_be_right_and_exceptions_are_complaints(buffer: PagedBuffer) -> None:
    cache, prompt = _Dictionary(buffer), PlannedPrompt(0, 4 * CHUNK, 0, 0)
    cache.lookup = lambda tokens, timeout: CHUNK  # type: ignore[method-assign]
    assert "nobody stored" in _do(cache, buffer, "unknown", prompt).complaint
    cache.lookup = lambda tokens, timeout: 3  # type: ignore[method-assign]
    assert "lookup answered 3" in _do(cache, buffer, "lookup", prompt).complaint

    def fail(tokens: list[int], timeout: float) -> int:
        raise OSError("the disk is on fire")

    cache.lookup = fail  # type: ignore[method-assign]
    done = _do(cache, buffer, "lookup", prompt)
    assert done.raised
    assert "the disk is on fire" in done.complaint
