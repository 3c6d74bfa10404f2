"""Reads and writes in steps, and what is done when Mooncake may have given one up: on a client that answers as told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.support.waiting import wait_for
from transfer.bulk import LATE, Bulk, Watch, keys_per_step
from transfer.environment import stall_seconds
from transfer.errors import Status, status_of
from transfer.settings import Timeouts, TransferSettings
from transfer.staging import Slot, StagingPool

FAILED = -800
EXISTS = -705


class Replica:
    """A replica in a peer's memory, as Mooncake describes one."""

    def __init__(self, peer: str) -> None:
        self.transport_endpoint = peer
        self.buffer_descriptor = self

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> Replica:
        return self


class Client:
    """A client whose objects lie at peers, some of which are dead; it notes what it was asked to move."""

    def __init__(self) -> None:
        self.peer_of: dict[str, str] = {}
        """Where each object is read from."""
        self.further_copies: dict[str, list[str]] = {}
        self.dead: set[str] = set()
        self.begun_by_others: set[str] = set()
        self.full: set[str] = set()
        self.gets: list[list[str]] = []
        self.revoked: list[str] = []
        self.located = 0

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.gets.append(keys)
        return [FAILED if self.peer_of[key] in self.dead else size for key, size in zip(keys, sizes, strict=True)]

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        self.located += 1
        return {key: [Replica(peer) for peer in (self.peer_of[key], *self.further_copies.get(key, ()))] for key in keys}

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.peer_of) for key in keys]

    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: Any) -> list[int]:
        taken = self.begun_by_others | self.peer_of.keys()
        return [-200 if key in self.full else EXISTS if key in taken else 0 for key in keys]

    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]:
        return [FAILED if "dead" in key else sum(some) for key, some in zip(keys, sizes, strict=True)]

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        self.peer_of.update(dict.fromkeys(keys, "a"))
        return [0] * len(keys)

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        self.revoked += keys
        self.full.clear()
        return [0] * len(keys)

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], config: Any) -> list[int]:
        raise AssertionError("this client has sessions")


class Hours(Watch):
    """A watch after which Mooncake may have given up everything."""

    def may_have_given_up(self) -> bool:
        return True


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    staging = StagingPool(64 * 4096, 4096, prefaulted=False)
    leased = [slot for _ in range(64) if (slot := staging.try_lease()) is not None]
    yield leased
    for slot in leased:
        slot.release()
    staging.close()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Mooncake's that another store of this process has set, or the user."""
    monkeypatch.delenv("MC_TCP_PROGRESS_TIMEOUT_SEC", raising=False)
    monkeypatch.delenv("MC_TCP_LANES_PER_PEER", raising=False)


def soon() -> float:
    return time.monotonic() + 60


def settings(**timeouts: int) -> TransferSettings:
    return TransferSettings(timeouts=Timeouts(**timeouts))


@pytest.mark.parametrize("milliseconds", [1, 1000, 3000, 10_000, 60_000, 3_600_000])
def test_a_step_ends_long_before_mooncake_gives_up_whatever_the_deadlines_are(milliseconds: int) -> None:
    given = settings(get_ms=milliseconds, put_ms=milliseconds)
    rounds = keys_per_step(given) / 4
    assert rounds >= 1
    assert rounds * (stall_seconds(given) + 0.6) < 30


def test_a_users_own_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_LANES_PER_PEER", "2")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "120")
    assert keys_per_step(settings()) == 2


def test_the_watch_suspects_a_long_wait_on_either_clock_and_a_wall_clock_that_was_set() -> None:
    now = {"monotonic": 0.0, "wall": 1000.0}

    def after(monotonic: float, wall: float) -> bool:
        now.update(monotonic=0.0, wall=1000.0)
        watch = Watch(60, lambda: now["monotonic"], lambda: now["wall"])
        now.update(monotonic=monotonic, wall=1000.0 + wall)
        return watch.may_have_given_up()

    assert not after(10, 10)
    assert not after(30, 30.5)
    assert after(55, 55)
    assert after(1, 62), "set forward: Mooncake asks this clock"
    assert after(1, -3600), "set back: it may have been forward in between"


def test_the_slots_of_a_step_that_may_have_been_given_up_are_forfeited_and_no_others(slots: list[Slot]) -> None:
    client = Client()
    keys = [f"k{index}" for index in range(12)]
    client.peer_of = {key: "dead" if index in (1, 9) else "well" for index, key in enumerate(keys)}
    client.dead = {"dead"}
    forfeited: list[Slot] = []
    bulk = Bulk(client, settings(), forfeited.extend, Hours)
    codes = bulk.get(keys, slots[:12], soon())
    assert [index for index, code in enumerate(codes) if code < 0] == [1, 9]
    assert forfeited == slots[:8], "the second step did not ask the silent peer, and so ended well"


def test_a_read_that_failed_at_once_forfeits_nothing(slots: list[Slot]) -> None:
    client = Client()
    client.peer_of, client.dead = {"k": "p"}, {"p"}
    forfeited: list[Slot] = []
    assert Bulk(client, settings(), forfeited.extend).get(["k"], slots[:1], soon()) == [FAILED]
    assert not forfeited


def test_no_step_begins_after_the_deadline(slots: list[Slot]) -> None:
    client = Client()
    keys = [f"k{index}" for index in range(20)]
    client.peer_of = dict.fromkeys(keys, "p")
    codes = Bulk(client, settings(), lambda _: None).get(keys, slots[:20], time.monotonic() - 1)
    assert client.gets == [keys[:8]]
    assert codes == [4096] * 8 + [LATE] * 12
    assert status_of(LATE) is Status.TIMEOUT


def test_objects_of_a_silent_peer_fail_at_once_and_those_of_others_are_read(slots: list[Slot]) -> None:
    client = Client()
    client.peer_of, client.dead = {"a0": "a", "a1": "a", "b0": "b"}, {"a"}
    given = msgspec.structs.replace(
        settings(), breaker=msgspec.structs.replace(settings().breaker, probe_interval_ms=3_600_000)
    )
    bulk = Bulk(client, given, lambda _: None)
    assert bulk.get(["a0", "b0"], slots[:2], soon()) == [FAILED, 4096]
    assert bulk.get(["a1", "b0"], slots[:2], soon()) == [FAILED, 4096]
    assert client.gets == [["a0", "b0"], ["b0"]]


def test_of_several_copies_only_the_peer_that_was_read_from_is_blamed_or_cleared(slots: list[Slot]) -> None:
    client = Client()
    client.peer_of = {"a0": "a", "b0": "b", "b1": "b"}
    client.further_copies = {"a0": ["b"], "b0": ["a"]}
    client.dead = {"a"}
    bulk = Bulk(client, settings(), lambda _: None)
    assert bulk.get(["a0"], slots[:1], soon()) == [FAILED]
    now = time.monotonic()
    assert bulk.peers.may_ask("b", now), "it has a copy that nobody read"
    assert bulk.get(["b0", "b1"], slots[:2], soon()) == [4096] * 2
    assert bulk.peers.any_silent, "nor did the healthy peer's delivery clear the other"
    assert not bulk.peers.may_ask("a", now)
    assert bulk.get(["a0"], slots[:1], soon()) == [FAILED]
    assert client.gets == [["a0"], ["b0", "b1"]], "Mooncake would read the same copy again"


def test_what_a_process_reads_from_its_own_segment_says_nothing_about_peers(slots: list[Slot]) -> None:
    client = Client()
    client.peer_of = {"mine": "me", "a0": "a"}
    client.further_copies = {"mine": ["a"]}
    client.dead = {"a"}
    bulk = Bulk(client, settings(), lambda _: None)
    bulk.own_peer = "me"
    assert bulk.get(["a0"], slots[:1], soon()) == [FAILED]
    client.peer_of["mine"], client.further_copies["mine"] = "a", ["me"]
    client.dead = set()
    assert bulk.get(["mine"], slots[:1], soon()) == [4096], "whichever copy the master names first"
    assert bulk.peers.any_silent


def test_a_peer_that_hangs_is_suspected_while_the_read_is_still_under_way(slots: list[Slot]) -> None:
    client = Client()
    client.peer_of = {"a": "hangs", "b": "well"}
    release = threading.Event()
    hangs = client.batch_get_into
    client.batch_get_into = lambda *call: (release.wait(60), hangs(*call))[1]  # type: ignore[method-assign, assignment]
    bulk = Bulk(client, settings(get_ms=1, put_ms=1), lambda _: None)
    bulk._stall_s = 0
    reader = threading.Thread(target=bulk.get, args=(["a"], slots[:1], soon()))
    reader.start()
    wait_for(lambda: bulk._reading)
    bulk.suspect_slow_peers()
    assert not bulk.peers.may_ask("hangs", time.monotonic())
    assert bulk.peers.may_ask("well", time.monotonic())
    release.set()
    reader.join(60)
    assert not bulk.peers.any_silent, "it delivered"


def test_where_objects_lie_is_not_asked_while_all_peers_deliver(slots: list[Slot]) -> None:
    client = Client()
    client.peer_of = {"k": "p"}
    Bulk(client, settings(), lambda _: None).get(["k"], slots[:1], soon())
    assert client.located == 0


def test_a_put_says_ok_only_for_what_the_pool_holds(slots: list[Slot]) -> None:
    client = Client()
    client.peer_of = {"there": "p"}
    client.begun_by_others = {"begun"}
    keys = ["new", "there", "begun", "dead"]
    codes = Bulk(client, settings(), lambda _: None).put(keys, slots[:4], [100] * 4, None, soon())
    assert [status_of(code) for code in codes] == [Status.OK, Status.OK, Status.BUSY, Status.TRANSFER_FAILED]
    assert client.revoked == ["dead"]


def test_a_session_that_could_not_be_revoked_is_revoked_before_the_next_put_of_its_key(slots: list[Slot]) -> None:
    client = Client()
    bulk = Bulk(client, settings(), lambda _: None)
    revoke, refused = client.batch_put_session_revoke, [-900]

    def unheard(keys: list[str]) -> list[int]:
        revoke(keys)
        return refused

    client.batch_put_session_revoke = unheard  # type: ignore[method-assign]
    bulk.put(["dead", "well"], slots[:2], [100] * 2, None, soon())
    assert client.revoked == ["dead"]
    refused[:] = [0]
    bulk.put(["dead"], slots[:1], [100], None, soon())
    assert client.revoked == ["dead"] * 3, "before it is begun, and because it failed again"
    bulk.put(["well"], slots[:1], [100], None, soon())
    assert client.revoked == ["dead"] * 3


def test_a_put_that_found_no_room_is_tried_once_more(slots: list[Slot]) -> None:
    client = Client()
    client.full = {"x"}
    refused = Bulk(client, settings(), lambda _: None).put(["x"], slots[:1], [100], None, soon())
    assert [status_of(code) for code in refused] == [Status.NO_SPACE]
    client.batch_put_session_start = lambda keys, sizes, config: answers.pop(0)  # type: ignore[method-assign]
    answers = [[-200], [0]]
    assert Bulk(client, settings(), lambda _: None).put(["y"], slots[:1], [100], None, soon()) == [0]
