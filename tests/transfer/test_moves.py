"""Reads and writes in steps, and what is done when Mooncake may have given one up: on a client that answers
as told."""

import threading
import time

import pytest

from tests.support.waiting import beside, wait_for
from transfer.direct_reads import DirectReads
from transfer.errors import Status, status_of
from transfer.health import CircuitBreaker
from transfer.moves import LATE, Batch, Moves, Watch, keys_per_step
from transfer.settings import BreakerSettings, Timeouts, TransferSettings, stall_seconds
from transfer.staging import Quota, StagingPool

FAILED = -800
EXISTS = -705


class Descriptor:
    """A replica in a peer's memory, as Mooncake describes one."""

    def __init__(self, peer):
        self.transport_endpoint, self.buffer_address, self.size = peer, 0, 4096
        self.buffer_descriptor = self

    def is_memory_replica(self):
        return True

    def get_memory_descriptor(self):
        return self


class Client:
    """A client whose objects lie at peers, some of which are dead; it notes what it was asked to move."""

    def __init__(self):
        self.peer_of = {}
        """Where each object is read from."""
        self.dead = set()
        self.begun_by_others = set()
        self.full = set()
        self.gets = []
        self.revoked = []
        self.located = 0

    def batch_get_into(self, keys, addresses, sizes):
        self.gets.append(keys)
        return [
            FAILED if self.peer_of[key] in self.dead else size for key, size in zip(keys, sizes, strict=True)
        ]

    def batch_get_replica_desc(self, keys):
        self.located += 1
        return {key: [Descriptor(self.peer_of[key])] for key in keys}

    def batch_is_exist(self, keys):
        return [int(key in self.peer_of) for key in keys]

    def batch_put_session_start(self, keys, sizes, config):
        taken = self.begun_by_others | self.peer_of.keys()
        return [-200 if key in self.full else EXISTS if key in taken else 0 for key in keys]

    def batch_put_from_multi_buffer_ranges(self, keys, addresses, sizes, offsets):
        return [FAILED if "dead" in key else sum(some) for key, some in zip(keys, sizes, strict=True)]

    def batch_put_session_end(self, keys):
        self.peer_of.update(dict.fromkeys(keys, "a"))
        return [0] * len(keys)

    def batch_put_session_revoke(self, keys):
        self.revoked += keys
        self.full.clear()
        return [0] * len(keys)

    def register_buffer(self, address, size):
        return 0


class Hours(Watch):
    """A watch after which Mooncake may have given up everything."""

    def passed(self):
        return True


@pytest.fixture
def staging():
    staging = StagingPool(64 * 4096, 4096, prefaulted=False)
    yield staging
    staging.check_integrity()
    staging.close()


@pytest.fixture
def slots(staging):
    return [slot for _ in range(64) if (slot := staging.lease(0.0)) is not None]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Those of Mooncake's that another store of this process has set, or the user."""
    monkeypatch.delenv("MC_TCP_PROGRESS_TIMEOUT_SEC", raising=False)
    monkeypatch.delenv("MC_TCP_LANES_PER_PEER", raising=False)


def moves_of(client, given=None, memory=(), **how):
    given = given or settings()
    return Moves(client, given, CircuitBreaker("a pool", given), memory, **how)


def whole(keys, slots):
    """The keys' whole objects, in the first of the slots."""
    slots = slots[: len(keys)]
    return Batch(keys, slots, [slot.size for slot in slots])


def put(moves, slots, *keys, end=None):
    """Puts 100 bytes under each key, from the first of the slots."""
    batch = Batch(list(keys), slots[: len(keys)], [100] * len(keys))
    return [status_of(code) for code in moves.put(batch, None, end or soon())]


def soon():
    return time.monotonic() + 60


def settings(**timeouts):
    return TransferSettings(timeouts=Timeouts(**timeouts))


@pytest.mark.parametrize("milliseconds", [1, 1000, 3000, 10_000, 60_000, 3_600_000])
def test_a_step_ends_long_before_mooncake_gives_up_whatever_the_deadlines_and_variables_are(
    milliseconds, monkeypatch
):
    given = settings(get_ms=milliseconds, put_ms=milliseconds)
    rounds = keys_per_step(given) / 4
    assert rounds >= 1
    assert rounds * (stall_seconds(given) + 0.6) < 30
    monkeypatch.setenv("MC_TCP_LANES_PER_PEER", "2")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "120")
    assert keys_per_step(given) == 2


def test_the_watch_suspects_a_long_wait_on_either_clock_and_a_wall_clock_that_was_set():
    now = {"monotonic": 0.0, "wall": 1000.0}

    def after(monotonic, wall):
        now.update(monotonic=0.0, wall=1000.0)
        watch = Watch(48, lambda: now["monotonic"], lambda: now["wall"])
        now.update(monotonic=monotonic, wall=1000.0 + wall)
        return watch.passed()

    assert not after(10, 10)
    assert not after(30, 30.5)
    assert after(55, 55)
    assert after(1, 62), "set forward: Mooncake asks this clock"
    assert after(1, -3600), "set back: it may have been forward in between"


def test_the_slots_of_a_step_that_may_have_been_given_up_are_forfeited_and_no_others(staging, slots):
    client = Client()
    keys = [f"k{index}" for index in range(12)]
    client.peer_of = {key: "dead" if index in (1, 9) else "well" for index, key in enumerate(keys)}
    client.dead = {"dead"}
    moves = moves_of(client, memory=[staging], watch=Hours)
    codes = moves.get(whole(keys, slots), soon())
    assert [index for index, code in enumerate(codes) if code < 0] == [1, 9]
    assert staging.forfeited_bytes == 8 * 4096, (
        "the second step did not ask the silent peer, and so ended well"
    )
    put(moves, slots[12:], "dead put", "well put")
    assert staging.forfeited_bytes == 10 * 4096, "a put that failed may go on, too"
    lost = {slot.address for slot in [*slots[:8], *slots[12:14]]}
    while slots:
        slots.pop().release()
    slots += [slot for _ in range(64) if (slot := staging.lease(0.0)) is not None]
    assert len(slots) == 64, "other memory has taken its place"
    assert not lost & {slot.address for slot in slots}


def test_no_step_begins_after_the_deadline(slots):
    client = Client()
    keys = [f"k{index}" for index in range(20)]
    moves, passed = moves_of(client), time.monotonic() - 1
    assert put(moves, slots, *keys, end=passed) == [Status.OK] * 8 + [Status.TIMEOUT] * 12
    assert set(client.peer_of) == set(keys[:8])
    client.peer_of = dict.fromkeys(keys, "p")
    assert moves.get(whole(keys, slots), passed) == [4096] * 8 + [LATE] * 12
    assert client.gets == [keys[:8]]
    assert client.located == 0, "while all peers deliver, it does not matter where objects lie"


def test_objects_of_a_silent_peer_fail_at_once_and_those_of_others_are_read(staging, slots):
    client = Client()
    client.peer_of, client.dead = {"a0": "a", "a1": "a", "b0": "b"}, {"a"}
    given = TransferSettings(breaker=BreakerSettings(probe_interval_ms=3_600_000))
    moves = moves_of(client, given, [staging])
    assert moves.get(whole(["a0", "b0"], slots), soon()) == [FAILED, 4096]
    assert moves.get(whole(["a1", "b0"], slots), soon()) == [FAILED, 4096]
    assert client.gets == [["a0", "b0"], ["b0"]]
    assert not staging.forfeited_bytes, "it failed at once"


def test_a_step_without_objects_of_a_silent_peer_does_not_use_up_the_peers_trial(slots):
    client = Client()
    moves = moves_of(client)
    keys = [*(f"well-{index}" for index in range(8)), "back"]
    client.peer_of = {key: key.split("-")[0] for key in keys}
    moves.direct = DirectReads()
    moves.peers.failed("back", time.monotonic() - 10)
    assert moves.get(whole(keys, slots), soon()) == [4096] * 9
    assert client.located == 1, "one question for all steps"


def test_a_peer_that_hangs_is_suspected_while_the_read_is_still_under_way(slots):
    client = Client()
    client.peer_of = {"a": "hangs", "b": "well"}
    release = threading.Event()
    hangs = client.batch_get_into
    client.batch_get_into = lambda *call: (release.wait(60), hangs(*call))[1]
    moves = moves_of(client, settings(get_ms=1, put_ms=1))
    moves._stall_s = 0
    with beside(lambda: moves.get(whole(["a"], slots), soon())):
        wait_for(lambda: moves._reading)
        moves.suspect_slow_peers()
        assert not moves.peers.may_ask("hangs", time.monotonic())
        assert moves.peers.may_ask("well", time.monotonic())
        release.set()
    assert not moves.peers.any_silent(time.monotonic()), "it delivered"


def test_a_put_says_ok_only_for_what_the_pool_holds(slots):
    client = Client()
    client.peer_of = {"there": "p"}
    client.begun_by_others = {"begun"}
    found = put(moves_of(client), slots, "new", "there", "begun", "dead")
    assert found == [Status.OK, Status.OK, Status.BUSY, Status.TRANSFER_FAILED]
    assert client.revoked == ["dead"]
    client.batch_is_exist = lambda keys: [-900] * len(keys)
    found = put(moves_of(client), slots, "there")
    assert found == [Status.BUSY], "the master does not say whether it is there"


def test_a_session_that_could_not_be_revoked_is_revoked_before_the_next_put_of_its_key(slots):
    client = Client()
    moves = moves_of(client)
    revoke, refused = client.batch_put_session_revoke, [-900]

    def unheard(keys):
        revoke(keys)
        return refused

    client.batch_put_session_revoke = unheard
    put(moves, slots, "dead", "well")
    assert client.revoked == ["dead"]
    refused[:] = [0]
    put(moves, slots, "dead")
    assert client.revoked == ["dead"] * 3, "before it is begun, and because it failed again"
    put(moves, slots, "well")
    assert client.revoked == ["dead"] * 3


def test_a_put_that_found_no_room_is_tried_once_more(slots):
    client = Client()
    client.full = {"x"}
    assert put(moves_of(client), slots, "x") == [Status.NO_SPACE]
    answers = [[-200], [0]]
    client.batch_put_session_start = lambda keys, sizes, config: answers.pop(0)
    assert put(moves_of(client), slots, "y") == [Status.OK]


def test_a_peer_that_delivers_one_object_of_a_read_is_not_blamed_for_another(slots):
    client = Client()
    client.peer_of = {"a0": "a", "a1": "a"}
    client.batch_get_into = lambda keys, addresses, sizes: [FAILED, *sizes[1:]]
    moves = moves_of(client)
    assert moves.get(whole(["a0", "a1"], slots), soon()) == [FAILED, 4096]
    assert not moves.peers.any_silent(time.monotonic())


def test_reads_that_the_master_does_not_answer_open_the_breaker(slots):
    client, given = Client(), settings()
    client.batch_get_into = lambda keys, addresses, sizes: [-900] * len(keys)
    breaker = CircuitBreaker("a pool", given)
    moves = Moves(client, given, breaker, [])
    for _ in range(given.breaker.failures):
        assert not breaker.down
        moves.get(whole(["a"], slots), soon())
    assert breaker.down


def test_after_a_put_its_slots_wait_for_no_peer_although_another_tier_holds_them(staging):
    quota = Quota(1)
    batch = Batch(["k"], [staging.lease(soon(), quota)], [100])
    batch.retain()
    batch.settle_and_release()
    assert staging.lease(time.monotonic() + 0.1, quota) is not None
