"""What the engines of a soak do, and which bytes must lie in their paged buffers afterwards.

The KV of token i is one 64-bit number, which names the whole prefix up to i and the weights that computed it,
combined with a fixed number for each word of its KV. So a wrong word says which prefix it belongs to, and
tokens, words, heads, layers and blocks in a wrong place are seen. All bytes that an operation must not touch
hold a canary, which is another one for each operation.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from pd_cache.cache import CacheEngine, PromptCache
from pd_cache.server.client import RemoteCache
from transfer.deadlines import end_in

CHUNK = 16
"""Tokens per chunk, and tokens per block."""
LONGEST = 256
"""Chunks of the longest prompt: so many objects in one call that a stalled call lasts longer than Mooncake's
60 s."""
VOCABULARY = 512
LAYERS, HEADS, WORDS = 2, 2, 128
"""KV of a token: `WORDS` 64-bit words for each head of each layer; 4 KiB in all."""
BLOCKS = LONGEST + 24
"""Blocks of a paged buffer: room for the longest prompt, and some that stay untouched."""
TOKEN_BYTES = LAYERS * HEADS * WORDS * 8
_FAMILIES = 12
_MASK = (1 << 64) - 1

OperationKind = Literal["store", "retrieve", "lookup", "unknown", "remove"]
_OPERATIONS: tuple[tuple[OperationKind, float], ...] = (("store", 38), ("retrieve", 36), ("lookup", 16), ("unknown", 4), ("remove", 6))  # fmt: skip
Words = np.ndarray[Any, np.dtype[np.uint64]]
Slots = np.ndarray[Any, np.dtype[np.int64]]
_TABLE: Words = np.random.default_rng(20).integers(1, _MASK, (LAYERS, HEADS, WORDS), dtype=np.uint64)


class Prompt(NamedTuple):
    """The first `shared` tokens of a family, then `own` tokens that only prompts of the same `tail` have."""

    family: int
    shared: int
    tail: int = 0
    own: int = 0

    @property
    def chunks(self) -> int:
        """Whole chunks."""
        return (self.shared + self.own) // CHUNK

    def tokens(self, seed: int) -> list[int]:
        head = random.Random(f"{seed}/family/{self.family}").choices(range(VOCABULARY), k=self.shared)
        return head + random.Random(f"{seed}/tail/{self.tail}").choices(range(VOCABULARY), k=self.own)


class Operation(NamedTuple):
    """One call of a lane. `unknown` is a lookup of a prompt that no lane stores."""

    kind: OperationKind
    prompt: Prompt
    first: int
    """How many chunks, from the first, the mask leaves out."""
    places: int
    """Seed for their places in the paged buffer."""
    timeout: float
    pause: float
    """Seconds before it."""


def operations(seed: int, lane: str, removes: bool) -> Iterator[Operation]:
    """Yields the endless list of a lane. `removes`: whether its cache can remove keys; if not, it looks up
    instead."""
    rng = random.Random(f"{seed}/operations/{lane}")
    kinds, weights = zip(*_OPERATIONS, strict=True)
    while True:
        kind: OperationKind = rng.choices(kinds, weights)[0]
        if kind == "remove" and not removes:
            kind = "lookup"
        size = rng.random()
        chunks = rng.randint(1, 24) if size < 0.55 else rng.randint(25, 128) if size < 0.75 else rng.randint(224, LONGEST)  # fmt: skip
        own = rng.choice((0, 0, 5, CHUNK, 3 * CHUNK + 1))
        family = rng.randrange(_FAMILIES) if kind != "unknown" else _FAMILIES + rng.randrange(1 << 30)
        prompt = Prompt(family, max(1, chunks * CHUNK - own), rng.randrange(64) if own else 0, own)
        moves = kind in ("store", "retrieve")
        yield Operation(
            kind=kind,
            prompt=prompt,
            first=rng.randrange(max(1, prompt.chunks)) if rng.random() < 0.2 else 0,
            places=rng.randrange(1 << 30),
            timeout=rng.choice((1.0, 3.0, 10.0, 10.0) if moves else (0.3, 1.0, 2.0)),
            pause=min(1.0, rng.expovariate(8.0)),
        )


def pressed(operation: Operation, number: int, lane: str, loads: bool) -> Operation:
    """Returns what a lane does in place of its operation `number` under pressure: at once, and without a
    pause.

    `loads`: it loads short prompts that all lanes use. Otherwise it moves as many objects in one call as
    possible: it stores two prompts whose second half was never stored before, then loads both; some are in
    local memory, some only in the pool.
    """
    if loads:
        prompt = Prompt(number % _FAMILIES, 16 * CHUNK)
        kind: OperationKind = "store" if number % 8 == 0 else "retrieve"
    else:
        kind = "retrieve" if number % 4 >= 2 else "store"
        rng, half = random.Random(f"{lane}/{number - 2 * (kind == 'retrieve')}"), LONGEST // 2 * CHUNK
        prompt = Prompt(rng.randrange(_FAMILIES), half, rng.randrange(1 << 40), half)
    timeout = (0.5, 2.0, 10.0)[operation.places % 3]
    return operation._replace(kind=kind, prompt=prompt, first=0, timeout=timeout, pause=0.0)


def prefixes(tokens: Sequence[int], weights: int = 0) -> Words:
    """Returns a number for each token, which names the prefix that ends with it under the weights of this
    number; uint64 [n]."""
    value, found = 0x9E3779B97F4A7C15 * (weights + 1) & _MASK, []
    for token in tokens:
        value = ((value ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
        value ^= value >> 29
        found.append(value)
    return np.array(found, dtype=np.uint64)


def kv_of(names: Words) -> Words:
    """Returns the KV of tokens with these prefixes; uint64 [n, layers, heads, words]."""
    return np.bitwise_xor(names[:, None, None, None], _TABLE[None])


def places(seed: int, count: int) -> Slots:
    """Returns `count` different slots: whole blocks anywhere in the buffer; int64 [count]."""
    rng = random.Random(seed)
    blocks = np.array(rng.sample(range(BLOCKS), -(-count // CHUNK)), dtype=np.int64)
    return (blocks[:, None] * CHUNK + np.arange(CHUNK)).reshape(-1)[:count]


class PagedBuffer:
    """A paged buffer like an engine's, with an oracle."""

    _known: ClassVar[dict[int, str]] = {}
    """Prefixes that the process has used, by their numbers, for the report on a wrong word."""

    def __init__(self) -> None:
        self.whole = torch.zeros((LAYERS, BLOCKS, HEADS, CHUNK, WORDS), dtype=torch.int64)
        layers = self.whole.view(torch.bfloat16).unbind()
        self.tensors = {f"layers.{index}": layer for index, layer in enumerate(layers)}

    @property
    def words(self) -> Words:
        """The same memory. A cache server's client may have moved it, so it is looked up each time."""
        view: Words = self.whole.numpy().view(np.uint64)
        return view

    def know(self, names: Words, what: str) -> None:
        """Notes whose prefixes these are."""
        if len(self._known) > 400_000:
            self._known.clear()
        for index, name in enumerate(names[CHUNK - 1 :: CHUNK].tolist(), start=1):
            self._known[name] = f"{what} up to token {index * CHUNK}"

    def put(self, slots: Slots, names: Words) -> None:
        """Writes the KV of tokens, as an engine does when it computes them."""
        self.words[:, slots // CHUNK, :, slots % CHUNK, :] = kv_of(names)

    def recognise(self, slots: Slots, under: Callable[[int], Words], newest: int) -> tuple[Words, int]:
        """Returns the names that the tokens in `slots`, whole chunks, must have, and the earliest weights
        that computed any of them.

        Each chunk may have been computed with any weights from 0 to `newest`; `under` returns the names of
        all these tokens under given weights. A chunk that no weights explain gets its names under `newest`,
        so that `compare` finds it wrong.
        """
        first = slots[::CHUNK]
        got = self.words[0, first // CHUNK, 0, first % CHUNK, 0] ^ _TABLE[0, 0, 0]
        names, earliest = under(newest).copy(), newest
        unexplained = got != names[::CHUNK]
        for weights in range(newest - 1, -1, -1):
            if not unexplained.any():
                break
            older = under(weights)
            found = unexplained & (got == older[::CHUNK])
            if found.any():
                tokens = np.repeat(found, CHUNK)
                names[tokens], earliest = older[tokens], weights
                unexplained &= ~found
        return names, earliest

    def compare(self, slots: Slots, names: Words, may_differ: Slots, canary: int) -> tuple[int, list[str]]:
        """Returns how many slots are wrong, and a sentence about each of the first.

        `slots` must hold the KV of `names`, `may_differ` anything, all others the canary. Afterwards all hold
        the canary.
        """
        words = self.words
        got, expected = words[:, slots // CHUNK, :, slots % CHUNK, :], kv_of(names)
        bad = np.flatnonzero((got != expected).any(axis=(1, 2, 3)))
        found = [
            f"token {index} in {self._said(int(slots[index]), expected[index], got[index])}"
            for index in bad[:4]
        ]
        for done in (slots, may_differ):
            words[:, done // CHUNK, :, done % CHUNK, :] = canary
        strange = np.flatnonzero((words != canary).any(axis=(0, 2, 4)).reshape(-1))
        for slot in strange[:4]:
            there = words[:, slot // CHUNK, :, slot % CHUNK, :]
            found.append(f"untouched {self._said(int(slot), np.full_like(there, canary), there)}")
        return len(bad) + len(strange), found

    def _said(self, slot: int, expected: Words, got: Words) -> str:
        place = np.unravel_index(int(np.flatnonzero((expected != got).reshape(-1))[0]), got.shape)
        owner = self._known.get(int(got[place]) ^ int(_TABLE[place]), "no known prompt")
        return f"slot {slot}: expected {int(expected[place]):016x}, found {int(got[place]):016x} of {owner}"


class LaneCache:
    """A lane's view of an engine's cache: the process's own engine, or the lane's connection to the cache
    server.

    All tensors are on the CPU; timeouts are in seconds.
    """

    def __init__(self, cache: CacheEngine | RemoteCache, buffer: PagedBuffer) -> None:
        self.cache, self._kv, self._prompts = cache, buffer.tensors, PromptCache(cache)
        self.removes = isinstance(cache, CacheEngine)

    def version(self) -> str | None:
        """Returns the label of the weights for stores; None while they have none."""
        return self.cache.label

    def lookup(self, tokens: list[int], timeout: float) -> int:
        return self._prompts.lookup(tokens, session=_session(), timeout=timeout)

    def retrieve(
        self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, timeout: float
    ) -> torch.Tensor:
        return self._prompts.retrieve(
            tokens, mask, kv_caches=self._kv, slot_mapping=slots, session=_session(), timeout=timeout
        )

    def store(
        self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, label: str, timeout: float
    ) -> int:
        return self._prompts.store(
            tokens, mask, kv_caches=self._kv, slot_mapping=slots, label=label, timeout=timeout
        )

    def remove(self, tokens: list[int], timeout: float) -> None:
        assert isinstance(self.cache, CacheEngine)
        database = self.cache.database
        self.cache.backend.batched_remove(database.keys(database.name_chunks(tokens)), end=end_in(timeout))


def _session() -> str:
    return threading.current_thread().name


@dataclass
class Performed:
    """The outcome of an operation."""

    hit: int = 0
    """Tokens found, loaded or newly stored."""
    compared: int = 0
    """Bytes of the paged buffer that were compared."""
    weights: int = 0
    """The earliest weights that computed any loaded token."""
    wrong: int = 0
    """Slots."""
    first: list[str] = field(default_factory=list)
    complaint: str = ""
    """An answer that cannot be right, or the exception that was raised."""
    raised: bool = False


def perform(cache: LaneCache, buffer: PagedBuffer, operation: Operation, seed: int, canary: int, weights: Callable[[], int], mark: Callable[[], None]) -> Performed:  # fmt: skip
    """Prepares the buffer, calls the cache between two calls of `mark`, and compares the whole buffer.

    `weights` returns the number of the weights that the engine computes with.
    """
    # the version first: weights change before it does, so that KV is never older than the version that its
    # store bears
    label = cache.version()
    kind = operation.kind if operation.kind != "store" or label is not None else "lookup"
    tokens, first, done = operation.prompt.tokens(seed), operation.first * CHUNK, Performed()
    names, end = prefixes(tokens, weights()), len(tokens) // CHUNK * CHUNK
    buffer.know(names, str(operation.prompt))
    slots = places(operation.places, len(tokens))
    mapping, mask = torch.from_numpy(slots.copy()), torch.arange(len(tokens)) >= first
    buffer.words.fill(canary)
    if kind == "store":
        buffer.put(slots, names)
    answer = torch.zeros(len(tokens), dtype=torch.bool)
    mark()
    try:
        if kind == "store":
            done.hit = cache.store(tokens, mask, mapping, label or "", operation.timeout)
        elif kind == "retrieve":
            answer = cache.retrieve(tokens, mask, mapping, operation.timeout)
            done.hit = int(answer.sum())
        elif kind == "remove":
            cache.remove(tokens, operation.timeout)
        else:
            done.hit = cache.lookup(tokens, operation.timeout)
    except Exception:  # noqa: BLE001 - no exception of any kind may be raised into an engine
        done.complaint, done.raised = traceback.format_exc(), True
        mark()
        return done
    mark()
    loaded = may_differ = slots[:0]
    expected = names[:0]
    if kind == "store":
        loaded, expected = slots, names  # a store reads the buffer, and leaves it as it is
    elif kind == "retrieve":
        # wanted slots that were not loaded may have been overwritten
        loaded, may_differ, expected = slots[first : first + done.hit], slots[first + done.hit : end], names[first : first + done.hit]  # fmt: skip
    if done.hit % CHUNK or not 0 <= done.hit <= end - (first if kind in ("store", "retrieve") else 0):
        done.complaint = f"{kind} answered {done.hit} of {end - first} tokens"
    elif kind == "retrieve" and not bool(answer[first : first + done.hit].all()):
        done.complaint = f"retrieve answered {done.hit} tokens that are no run from {first} on"
    elif kind == "unknown" and done.hit:
        done.complaint = f"lookup found {done.hit} tokens of a prompt that no lane stores"
    elif kind == "retrieve" and done.hit:
        # the other engine may have its next weights before this one hears of them
        part = slice(first, first + done.hit)
        expected, done.weights = buffer.recognise(
            loaded, lambda number: prefixes(tokens, number)[part], weights() + 1
        )
    done.wrong, done.first = buffer.compare(loaded, expected, may_differ, canary)
    done.compared = buffer.words.nbytes - len(may_differ) * TOKEN_BYTES
    return done
