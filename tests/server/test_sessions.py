"""Pins: counted, and never left behind. The backend here only counts."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pd_cache.server.lookups import FoundChunks, Sessions
from tests.support.waiting import Clock

MODELS = ["first", "second"]
NAMES = [bytes([index]) * 16 for index in range(4)]


class CountingTier:
    """Pins the keys that it has; `have` is what a local tier would hold."""

    def __init__(self, have):
        self.have = set(have)
        self.pins = Counter()

    def pin(self, keys):
        found = [key for key in keys if key in self.have]
        self.pins.update(found)
        return found

    def unpin(self, keys):
        self.pins.subtract(keys)
        assert min(self.pins.values(), default=0) >= 0, "unpinned more often than pinned"


def shards(names, ranks):
    return [[f"{rank}/{name.hex()}" for name in names] for rank in range(ranks)]


class SessionsModel(RuleBasedStateMachine):
    """Whatever clients do, a key is pinned exactly as often as sessions hold it."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.sessions = Sessions(self.clock, most_keys=30)
        have = [key for keys in shards(NAMES, 2) for key in keys]
        self.tier = CountingTier(have[::2])

    @rule(client=st.sampled_from("xy"), name=st.sampled_from("abc"), count=st.integers(1, 4))
    def look_up(self, client, name, count):
        names = NAMES[:count]
        found = [
            FoundChunks(model, self.tier, names[at:], shards(names[at:], 2))
            for at, model in enumerate(MODELS)
        ]
        self.sessions.open(client, name, found, 10)

    @rule(
        name=st.sampled_from("abc"),
        model=st.sampled_from(MODELS),
        rank=st.integers(0, 1),
        count=st.integers(1, 4),
    )
    def load(self, name, model, rank, count):
        self.sessions.loaded(name, model, rank, NAMES[MODELS.index(model) : count])

    @rule(client=st.sampled_from("xy"), name=st.sampled_from("abc"))
    def end(self, client, name):
        self.sessions.end(client, name)

    @rule(client=st.sampled_from("xy"))
    def die(self, client):
        self.sessions.end_client(client)

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds):
        self.clock.now += seconds
        self.sessions.expire()

    @invariant()
    def pins_are_what_sessions_hold(self):
        sessions = self.sessions._sessions.values()
        held = Counter(
            key
            for session in sessions
            for pins in session.pins.values()
            for key in (*pins.pinned, *pins.leased)
        )
        pinned = Counter({key: count for key, count in held.items() if key in self.tier.have})
        assert +self.tier.pins == pinned
        leased = {key for _, keys in self.sessions.leases() for key in keys}
        assert leased == set(held) - self.tier.have
        assert self.sessions._keys == sum(session.size for session in sessions) <= 30


TestSessionsModel = SessionsModel.TestCase
TestSessionsModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_sessions_end_at_their_deadline_with_their_backend_and_the_oldest_when_keys_are_too_many():
    clock, tiers = Clock(), [CountingTier(shards(NAMES, 1)[0]) for _ in range(2)]
    sessions = Sessions(clock, most_keys=10)

    def look_up(name, tier=tiers[0], ranks=1):
        sessions.open("x", name, [FoundChunks("model", tier, NAMES, shards(NAMES, ranks))], 10)
        return [name for _, name in sessions._sessions]

    assert [look_up("a"), look_up("b"), look_up("c", tiers[1])] == [["a"], ["a", "b"], ["b", "c"]]
    sessions.end_backend(tiers[1])
    assert not +tiers[1].pins
    clock.now = 9.9
    assert sessions.expire() == 0
    clock.now = 10.0
    assert sessions.expire() == 1
    assert not +tiers[0].pins
    assert look_up("large", ranks=4) == [], "one that is too large by itself is not kept at all"


def test_a_load_releases_the_session_of_its_request_that_holds_its_chunks():
    sessions, tier = Sessions(Clock()), CountingTier([])
    for client, names in (("x", NAMES[:1]), ("y", NAMES), ("z", NAMES[:2])):
        sessions.open(client, "a", [FoundChunks("model", tier, names, shards(names, 1))], 10)
    sessions.loaded("a", "model", 0, NAMES[:3])
    assert [client for client, _ in sessions._sessions] == ["x", "z"]
