"""Policies of a pool in simulation: against the best of all choices, and against plain implementations."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lib.policies import Oracle, compare
from bench.lib.trace import BLOCK_TOKENS, Request, measure

# --- the oracle ---------------------------------------------------------------------------------------------


def found_in(held, blocks):
    return next((place for place, block in enumerate(blocks) if block not in held), len(blocks))


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=7), st.integers(1, 4))
def test_the_oracle_finds_as_much_as_the_best_of_all_choices(ways, room):
    """Prompts are ways from the root of a tree that has two branches at every place."""
    requests = [
        Request(
            0,
            len(way) * BLOCK_TOKENS,
            [int("".join(map(str, map(int, (1, *way[:end])))), 2) for end in range(1, len(way) + 1)],
        )
        for way in ways
    ]
    best = {frozenset(): 0}
    for request in requests:
        after = Counter()
        for held, hits in best.items():
            there = held | {*request.hash_ids}
            for kept in itertools.combinations(there, min(room, len(there))):
                after[frozenset(kept)] = max(after[frozenset(kept)], hits + found_in(held, request.hash_ids))
        best = after
    tokens = sum(request.input_length for request in requests)
    found = measure(requests, Oracle(room, requests)).hit_rate * tokens
    assert found == pytest.approx(max(best.values()) * BLOCK_TOKENS)


# --- plain implementations ----------------------------------------------------------------------------------
#
# Each yields what is held after each prompt, in plain lists: first what goes next.


def plain_lru(prompts, room, batch=0):
    held = []
    for blocks in prompts:
        held = [block for block in held if block not in blocks] + blocks[::-1]
        if len(held) > room:
            held = held[len(held) - room + batch :]
        yield held


def plain_s3fifo(prompts, room):
    small, main, ghosts, uses = [], [], [], Counter()
    for blocks in prompts:
        for block in blocks[::-1]:
            if block in small + main:
                uses[block] = min(3, uses[block] + 1)
                continue
            while len(small + main) >= room:
                if small and len(small) >= max(1, room // 10):
                    oldest = small.pop(0)
                    (main if uses[oldest] > 1 else ghosts).append(oldest)
                    uses[oldest] = 0
                    del ghosts[: max(0, len(ghosts) - (room - room // 10))]
                else:
                    oldest = main.pop(0)
                    if uses[oldest]:
                        uses[oldest] -= 1
                        main.append(oldest)
            (main if block in ghosts else small).append(block)
            ghosts = [ghost for ghost in ghosts if ghost != block]
        yield small + main


PLAIN = {
    "lru": plain_lru,
    "mooncake": lambda prompts, room: plain_lru(prompts, room, batch=room // 10),
    "s3fifo": plain_s3fifo,
}


@pytest.mark.parametrize("room", [40, 150])
def test_every_policy_finds_and_writes_what_a_plain_implementation_does(room):
    rng, said, requests = random.Random(room), {}, []
    for number in range(200):  # talks that go on or end, behind one system prompt
        talk = rng.randrange(number // 8, number // 8 + 5)
        blocks = said.setdefault(talk, [0, 1, 2])
        blocks += [1000 * (talk + 1) + len(blocks) + more for more in range(rng.choice((1, 4, 20)))]
        requests.append(Request(number, len(blocks) * BLOCK_TOKENS + 100, list(blocks)))
    rows = {row.pop("policy"): row for row in compare(requests, room)}
    prompts = [request.hash_ids[: request.input_length // BLOCK_TOKENS] for request in requests]
    tokens = sum(request.input_length for request in requests)
    assert rows.keys() == PLAIN.keys() | {"oracle"}
    for policy, plain in PLAIN.items():
        before, unread, found, written, read = [], set(), 0, 0, 0
        for blocks, held in zip(prompts, plain(prompts, room), strict=True):
            hits = blocks[: found_in(before, blocks)]
            found += len(hits)
            read += len(unread & {*hits})
            new = [block for block in blocks if block in held and block not in before]
            written += len(new)
            unread, before = (unread - {*hits}) | {*new}, list(held)
        expected = {"hit_rate": found * BLOCK_TOKENS / tokens, "written": written, "read": read}
        assert rows[policy] == {"capacity_chunks": room, **expected}, policy
        assert rows[policy]["hit_rate"] <= rows["oracle"]["hit_rate"]
