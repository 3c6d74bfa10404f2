"""Store, retrieve and lookup against a model that is a plain dictionary, over real Mooncake."""

from __future__ import annotations

import random
import uuid
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.engines import BLOCK, BLOCKS, CHUNK, Host, host, random_slots
from tests.support.kv import holds_token
from tests.support.pool import Pool
from tests.support.waiting import wait_for
from transfer.errors import Status

# few tokens and few lengths, so that prompts share prefixes all the time
prompts = st.lists(st.integers(0, 1), max_size=5 * CHUNK + 3) | st.integers(0, 5 * CHUNK).map(lambda n: [0] * n)
nodes = st.integers(0, 1)
salts = st.sampled_from([(), ("salt", "a")])


class SharedCache(RuleBasedStateMachine):
    """Two nodes, one pool; `stored` is what the pool must hold: (salt, prefix up to a chunk's end)."""

    hosts: list[Host]

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.run = uuid.uuid4().hex
        """Part of every salt: the pool outlives a run, its keys do not meet the next one's."""
        self.stored: set[tuple[Any, tuple[int, ...]]] = set()

    def chunks(self, salt: Any, tokens: list[int]) -> list[tuple[Any, tuple[int, ...]]]:
        return [(salt, tuple(tokens[:end])) for end in range(CHUNK, len(tokens) + 1, CHUNK)]

    def prefix(self, salt: Any, tokens: list[int], start: int = 0) -> int:
        """End of the contiguous run of stored chunks from chunk `start` on, in tokens."""
        end = start
        for chunk in self.chunks(salt, tokens)[start:]:
            if chunk not in self.stored:
                break
            end += 1
        return end * CHUNK

    @rule(node=nodes, tokens=prompts, salt=salts, skip=st.integers(0, 2), whole=st.booleans())
    def store(self, node: int, tokens: list[int], salt: Any, skip: int, whole: bool) -> None:
        skip = min(skip, len(tokens) // CHUNK)
        slots = random_slots(self.rng, len(tokens), whole)
        self.hosts[node].compute(tokens, slots)
        mask = [False] * (skip * CHUNK) + [True] * (len(tokens) - skip * CHUNK)
        fresh = set(self.chunks(salt, tokens)[skip:]) - self.stored
        stored = self.hosts[node].store(tokens, slots, mask=mask, extra_keys=(self.run, *salt))
        assert stored == len(fresh) * CHUNK
        self.stored |= fresh

    @rule(node=nodes, tokens=prompts, salt=salts, at_hand=st.integers(0, 20))
    def lookup(self, node: int, tokens: list[int], salt: Any, at_hand: int) -> None:
        start = min(at_hand // CHUNK, len(tokens) // CHUNK)
        found = self.hosts[node].lookup(tokens, extra_keys=(self.run, *salt), at_hand=at_hand)
        assert found == self.prefix(salt, tokens, start)

    @rule(node=nodes, tokens=prompts, salt=salts, skip=st.integers(0, 2), whole=st.booleans())
    def retrieve(self, node: int, tokens: list[int], salt: Any, skip: int, whole: bool) -> None:
        at = self.hosts[node]
        skip = min(skip, len(tokens) // CHUNK)
        slots = random_slots(self.rng, len(tokens), whole)
        before = [tensor.clone().view(torch.int16) for tensor in at.cache]
        mask = [False] * (skip * CHUNK) + [True] * (len(tokens) - skip * CHUNK)
        result = at.retrieve(tokens, slots, mask=mask, extra_keys=(self.run, *salt))

        end = self.prefix(salt, tokens, skip)
        assert result == [skip * CHUNK <= index < end for index in range(len(tokens))]
        for index in range(skip * CHUNK, end):
            assert holds_token(at.cache, at.layout, tokens[: index + 1], slots[index])
        wanted = set(slots[skip * CHUNK :])
        for slot in set(range(BLOCKS * BLOCK)) - wanted:
            block, offset = divmod(slot, BLOCK)
            for tensor, old in zip(at.cache, before, strict=True):
                assert torch.equal(tensor.view(torch.int16)[block, :, offset], old[block, :, offset])

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def lose_a_chunk(self, data: st.DataObject) -> None:
        salt, prefix = data.draw(st.sampled_from(sorted(self.stored, key=repr)))
        database = self.hosts[0].engine.database
        key = database.keys(database.hash_tokens(prefix, (self.run, *salt))[-1:])
        assert self.hosts[0].engine.backend.store.remove(key, timeout=60, force=True) == [Status.OK]  # type: ignore[attr-defined]
        self.stored.discard((salt, prefix))

    @invariant()
    def no_staging_memory_is_kept(self) -> None:
        for one in self.hosts:
            staging = one.engine.backend.staging  # type: ignore[attr-defined]
            staging.check_integrity()
            wait_for(lambda staging=staging: staging.in_use == 0, what="reads ahead that nobody waits for to end")  # type: ignore[misc]


def test_the_engine_agrees_with_a_dictionary(pool: Pool) -> None:
    model = uuid.uuid4().hex
    with host(pool, model=model, staging_size="64KiB") as one, host(pool, model=model, segment_size=16 << 20) as two:
        machine = type("Machine", (SharedCache,), {"hosts": [one, two]})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
