"""What the engines of a soak do, and which bytes must lie in their paged buffers afterwards.

The KV of token i is one 64-bit number, which names the whole prefix up to i and the weights that computed it,
combined with a fixed number for each word of its KV. So a wrong word says which prefix it belongs to, and
tokens, words, heads, layers and blocks in a wrong place are seen. All bytes that an operation must not touch
hold a canary, which is another one for each operation.
"""

import random
import threading
import traceback
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

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

_OPERATIONS = (("store", 38), ("retrieve", 36), ("lookup", 20), ("remove", 6))
_TABLE = np.random.default_rng(20).integers(1, _MASK, (LAYERS, HEADS, WORDS), dtype=np.uint64)


class Prompt(NamedTuple):
    """The first `shared` tokens of a family, then `own` tokens that only prompts of the same `tail` have."""

    family: int
    shared: int
    tail: int = 0
    own: int = 0

    @property
    def chunks(self):
        """Whole chunks."""
        return (self.shared + self.own) // CHUNK

    def tokens(self, seed):
        head = random.Random(f"{seed}/family/{self.family}").choices(range(VOCABULARY), k=self.shared)
        return head + random.Random(f"{seed}/tail/{self.tail}").choices(range(VOCABULARY), k=self.own)


class Operation(NamedTuple):
    """One call of a lane."""

    kind: str
    """`store`, `retrieve`, `lookup` or `remove`."""
    prompt: Prompt
    first: int
    """How many chunks, from the first, the mask leaves out."""
    places: int
    """Seed for their places in the paged buffer."""
    timeout: float
    pause: float
    """Seconds before it."""


def operations(seed, lane, removes):
    """Yields the endless list of a lane. `removes`: whether its cache can remove keys; if not, it looks up
    instead."""
    rng = random.Random(f"{seed}/operations/{lane}")
    kinds, weights = zip(*_OPERATIONS, strict=True)
    while True:
        kind = rng.choices(kinds, weights)[0]
        if kind == "remove" and not removes:
            kind = "lookup"
        size = rng.random()
        chunks = rng.randint(1, 24) if size < 0.55 else rng.randint(25, 128) if size < 0.75 else rng.randint(224, LONGEST)  # fmt: skip
        own = rng.choice((0, 0, 5, CHUNK, 3 * CHUNK + 1))
        family = rng.randrange(_FAMILIES)
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


def pressed(operation, number, lane, loads):
    """Returns what a lane does in place of its operation `number` under pressure: at once, and without a
    pause.

    `loads`: it loads short prompts that all lanes use. Otherwise it moves as many objects in one call as
    possible: it stores two prompts whose second half was never stored before, then loads both; some are in
    local memory, some only in the pool.
    """
    if loads:
        prompt = Prompt(number % _FAMILIES, 16 * CHUNK)
        kind = "store" if number % 8 == 0 else "retrieve"
    else:
        kind = "retrieve" if number % 4 >= 2 else "store"
        rng, half = random.Random(f"{lane}/{number - 2 * (kind == 'retrieve')}"), LONGEST // 2 * CHUNK
        prompt = Prompt(rng.randrange(_FAMILIES), half, rng.randrange(1 << 40), half)
    timeout = (0.5, 2.0, 10.0)[operation.places % 3]
    return operation._replace(kind=kind, prompt=prompt, first=0, timeout=timeout, pause=0.0)


def prefixes(tokens, weights=0):
    """Returns a number for each token, which names the prefix that ends with it under the weights of this
    number; uint64 [n]."""
    value, found = 0x9E3779B97F4A7C15 * (weights + 1) & _MASK, []
    for token in tokens:
        value = ((value ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
        value ^= value >> 29
        found.append(value)
    return np.array(found, dtype=np.uint64)


def kv_of(names):
    """Returns the KV of tokens with these prefixes; uint64 [n, layers, heads, words]."""
    return np.bitwise_xor(names[:, None, None, None], _TABLE[None])


def places(seed, count):
    """Returns `count` different slots: whole blocks anywhere in the buffer; int64 [count]."""
    rng = random.Random(seed)
    blocks = np.array(rng.sample(range(BLOCKS), -(-count // CHUNK)), dtype=np.int64)
    return (blocks[:, None] * CHUNK + np.arange(CHUNK)).reshape(-1)[:count]


class PagedBuffer:
    """A paged buffer like an engine's, with an oracle."""

    _known = {}  # noqa: RUF012
    """Prefixes that the process has used, by their numbers, for the report on a wrong word."""

    def __init__(self):
        self.whole = torch.zeros((LAYERS, BLOCKS, HEADS, CHUNK, WORDS), dtype=torch.int64)
        layers = self.whole.view(torch.bfloat16).unbind()
        self.tensors = {f"layers.{index}": layer for index, layer in enumerate(layers)}

    @property
    def words(self):
        """The same memory. A cache server's client may have moved it, so it is looked up each time."""
        return self.whole.numpy().view(np.uint64)

    def know(self, names, what):
        """Notes whose prefixes these are."""
        if len(self._known) > 400_000:
            self._known.clear()
        for index, name in enumerate(names[CHUNK - 1 :: CHUNK].tolist(), start=1):
            self._known[name] = f"{what} up to token {index * CHUNK}"

    def put(self, slots, names):
        """Writes the KV of tokens, as an engine does when it computes them."""
        self.words[:, slots // CHUNK, :, slots % CHUNK, :] = kv_of(names)

    def recognise(self, slots, under, newest):
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

    def compare(self, slots, names, may_differ, canary):
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

    def _said(self, slot, expected, got):
        place = np.unravel_index(int(np.flatnonzero((expected != got).reshape(-1))[0]), got.shape)
        owner = self._known.get(int(got[place]) ^ int(_TABLE[place]), "no known prompt")
        return f"slot {slot}: expected {int(expected[place]):016x}, found {int(got[place]):016x} of {owner}"


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
    first: list = field(default_factory=list)
    complaint: str = ""
    """An answer that cannot be right, or the exception that was raised."""
    raised: bool = False


def perform(cache, buffer, operation, seed, canary, weights, mark):
    """Prepares the buffer, calls the cache between two calls of `mark`, and compares the whole buffer.

    `weights` returns the number of the weights that the engine computes with.
    """
    # the version first: weights change before it does, so that KV is never older than the version that its
    # store bears
    label = cache.cache.label
    kind = operation.kind if operation.kind != "store" or label is not None else "lookup"
    tokens, first, done = operation.prompt.tokens(seed), operation.first * CHUNK, Performed()
    names, end = prefixes(tokens, weights()), len(tokens) // CHUNK * CHUNK
    buffer.know(names, str(operation.prompt))
    slots = places(operation.places, len(tokens))
    mask = torch.arange(len(tokens)) >= first
    pages = {"kv_caches": buffer.tensors, "slot_mapping": torch.from_numpy(slots.copy())}
    limits = {"session": threading.current_thread().name, "timeout": operation.timeout}
    buffer.words.fill(canary)
    if kind == "store":
        buffer.put(slots, names)
    answer = torch.zeros(len(tokens), dtype=torch.bool)
    mark()
    try:
        if kind == "store":
            done.hit = cache.store(tokens, mask, **pages, label=label, timeout=operation.timeout)
        elif kind == "retrieve":
            answer = cache.retrieve(tokens, mask, **pages, **limits)
            done.hit = int(answer.sum())
        elif kind == "remove":
            keys = cache.cache.database.keys(cache.cache.name_chunks(tokens))
            cache.cache.backend.batched_remove(keys, end=end_in(operation.timeout))
        else:
            done.hit = cache.lookup(tokens, **limits)
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
    elif kind == "retrieve" and done.hit:
        # the other engine may have its next weights before this one hears of them
        part = slice(first, first + done.hit)
        expected, done.weights = buffer.recognise(
            loaded, lambda number: prefixes(tokens, number)[part], weights() + 1
        )
    done.wrong, done.first = buffer.compare(loaded, expected, may_differ, canary)
    done.compared = buffer.words.nbytes - len(may_differ) * TOKEN_BYTES
    return done
