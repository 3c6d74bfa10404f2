"""Eviction policies and the index: which entry goes, and that pinned ones never do."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pd_cache.tiers.index import EvictingIndex, make_policy
from transfer.errors import Status

POLICIES = ("lru", "lfu", "s3fifo")


def nobody(key):
    return False


def fill(policy, keys):
    for key in keys:
        policy.added(key)


def drain(policy):
    return "".join(policy.evict(nobody) for _ in range(len(policy)))


@pytest.mark.parametrize(
    "name, used, removed, order",
    [
        ("lru", "ac", "d", "bac"),  # the least recently used first
        ("lfu", "aabbc", "", "dcab"),  # the least used first, and the oldest among equals
        ("lfu", "a" * 500 + "b" * 100, "cd", "ab"),  # which stops counting, and then goes by recency
    ],
)
def test_lru_and_lfu_evict_in_their_order(name, used, removed, order):
    policy = make_policy(name, 4)
    fill(policy, "abcd")
    for key in used:
        policy.used(key)
    for key in removed:
        policy.removed(key)
    assert drain(policy) == order


def test_s3fifo_evicts_a_new_key_before_its_turn_if_every_old_one_is_pinned():
    policy = make_policy("s3fifo", 20)  # two new keys are a small queue of the usual length
    fill(policy, "abc")
    assert [policy.evict("a".__eq__) for _ in "bc"] == ["b", "c"]


def plain_s3fifo(uses, room):
    """Yields what is held after each use, in plain lists."""
    small, main, ghosts, seen = [], [], [], Counter()
    for key in uses:
        if key in small + main:
            seen[key] = min(3, seen[key] + 1)
            yield {*small, *main}
            continue
        while len(small + main) >= room:
            if small and len(small) >= max(1, room // 10):
                oldest = small.pop(0)
                (main if seen[oldest] > 1 else ghosts).append(oldest)
                seen[oldest] = 0
                del ghosts[: max(0, len(ghosts) - (room - room // 10))]
            else:
                oldest = main.pop(0)
                if seen[oldest]:
                    seen[oldest] -= 1
                    main.append(oldest)
        (main if key in ghosts else small).append(key)
        ghosts = [ghost for ghost in ghosts if ghost != key]
        yield {*small, *main}


@pytest.mark.parametrize("room", [40, 150])
def test_s3fifo_keeps_what_a_plain_implementation_keeps(room):
    rng, held, policy = random.Random(room), set(), make_policy("s3fifo", room)
    uses = [str(int(rng.paretovariate(0.5)) % 1000) for _ in range(4000)]
    for key, kept in zip(uses, plain_s3fifo(uses, room), strict=True):
        if key in held:
            policy.used(key)
        else:
            if len(held) == room:
                held.remove(policy.evict(nobody))
            held.add(key)
            policy.added(key)
        assert held == kept


class IndexModel(RuleBasedStateMachine):
    """The index beside a dictionary of what it should hold."""

    policy = "lru"

    @initialize(capacity=st.integers(0, 6))
    def start(self, capacity):
        self.index = EvictingIndex(capacity, self.policy)
        self.model = {}
        self.pins = []
        self.reserved = []
        self.dropped = []
        self.made = 0

    def forget(self, resources):
        for resource in resources:
            (key,) = [key for key, value in self.model.items() if value == resource]
            assert all(pin.resource != resource for pin in self.pins), "a pinned entry was evicted"
            del self.model[key]
        self.dropped += resources

    @rule(key=st.sampled_from("abcdefghij"))
    def reserve(self, key):
        refusal, evicted = self.index.reserve(key)
        assert (refusal is Status.OK) == (key in self.model)
        self.forget(evicted)
        if refusal is None:
            self.reserved.append(key)
        elif refusal is Status.NO_SPACE:
            pinned = {entry.key for entry in self.pins if self.model.get(entry.key) == entry.resource}
            assert len(pinned) + len(self.reserved) >= self.index.capacity

    @precondition(lambda self: self.reserved)
    @rule(fill=st.booleans())
    def settle(self, fill):
        key = self.reserved.pop(0)
        if not fill:
            self.index.unreserve()
            return
        self.made += 1
        assert self.index.fill(key, self.made) == (key not in self.model)
        self.model.setdefault(key, self.made)

    @rule(key=st.sampled_from("abcdefghij"))
    def pin(self, key):
        pin = self.index.pin(key)
        assert (pin.resource if pin else None) == self.model.get(key)
        if pin is not None:
            self.pins.append(pin)

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 100))
    def unpin(self, which):
        entry = self.pins.pop(which % len(self.pins))
        gone = self.model.get(entry.key) != entry.resource
        assert self.index.unpin(entry) == (gone and all(other is not entry for other in self.pins))

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 100))
    def discard(self, which):
        entry = self.pins[which % len(self.pins)]
        self.index.discard(entry)
        if self.model.get(entry.key) == entry.resource:
            del self.model[entry.key]

    @rule(seed=st.integers(0, 2**32))
    def serve(self, seed):
        """Hypothesis by itself seldom fills the index while entries are pinned."""
        rng = random.Random(seed)
        for key in rng.choices("abcdefghij", k=30):
            pick = rng.random()
            if pick < 0.2:
                self.pin(key)
            elif pick < 0.4 and self.pins:
                self.unpin(rng.randrange(100))
            else:
                self.reserve(key)
                while self.reserved:
                    self.settle(fill=True)

    @rule(key=st.sampled_from("abcdefghij"))
    def remove(self, key):
        removed = self.index.remove(key)
        if isinstance(removed, int):
            assert removed == self.model.pop(key)
            assert all(pin.resource != removed for pin in self.pins), "a pinned entry was removed"
        elif removed is Status.MISSING:
            assert key not in self.model
        else:
            assert any(pin.key == key and pin.resource == self.model[key] for pin in self.pins)

    @rule()
    def clear(self):
        self.index.clear()
        self.model.clear()

    @invariant()
    def whole(self):
        if hasattr(self, "index"):
            self.index.check_integrity()
            assert self.index.contains(list("abcdefghij")) == [key in self.model for key in "abcdefghij"]
            assert len(self.index) == len(self.model)


@pytest.mark.parametrize("name", POLICIES)
def test_the_index_agrees_with_a_dictionary(name):
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("Machine", (IndexModel,), {"policy": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


def test_a_closed_index_takes_nothing_and_leaves_what_is_read_to_its_readers():
    index = EvictingIndex(4, "lru")
    for key in "ab":
        assert index.reserve(key).refusal is None
        assert index.fill(key, key.upper())
    pin = index.pin("a")
    assert pin is not None
    assert index.remove("a") is Status.BUSY
    assert index.reserve("late").refusal is None
    assert index.close() == ["B"]
    assert not index.fill("late", "LATE")
    assert index.reserve("c").refusal is Status.CLOSED
    assert index.unpin(pin), "the last reader lets go of it"
    assert len(index) == 0
