"""Epochs, over a pool whose trouble is replayed: it is away, it loses objects, and nodes are away while resets happen."""

from __future__ import annotations

import math
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cache.deadline import Deadline
from pd_cache.epochs import FIRST, FRESH_S, LATE_S, Epochs
from pd_cache.groups import LayerGroups
from pd_cache.lookup.prefix import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import ChunkedTokenDatabase
from tests.support.proxy import NAMESPACE
from transfer.errors import Status

WINDOW = 8
"""A small one, so that a node can be away for many of them."""


class Objects:
    """A pool's small objects: as Mooncake keeps them, a put of a key that is there changes nothing."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.away = False
        self.questions = 0

    def batch_exist(self, keys: list[str], *, timeout: float) -> list[Status]:
        self.questions += 1
        if self.away:
            return [Status.POOL_DOWN] * len(keys)
        return [Status.OK if key in self.values else Status.MISSING for key in keys]

    def put_small(self, key: str, value: bytes, *, timeout: float) -> Status:
        if self.away:
            return Status.POOL_DOWN
        self.values.setdefault(key, value)
        return Status.OK

    def get_small(self, key: str, *, timeout: float) -> bytes | None:
        return None if self.away else self.values.get(key)

    def remove(self, keys: list[str], *, timeout: float, force: bool = False) -> list[Status]:
        assert force, "nodes look these keys up all the time, so they are leased"
        for key in keys:
            self.values.pop(key, None)
        return [Status.OK] * len(keys)

    def remove_matching(self, pattern: str, *, timeout: float) -> int:
        found = [key for key in self.values if re.search(pattern, key)]
        for key in found:
            del self.values[key]
        return len(found)


class Cluster:
    """Nodes of one model on one pool, with one clock."""

    def __init__(self, nodes: int) -> None:
        self.now = 100.0
        self.pool = Objects()
        self.nodes = [self.join() for _ in range(nodes)]

    def join(self) -> Epochs:
        return Epochs(self.pool, "a model", clock=lambda: self.now)

    def later(self, seconds: float = 2 * FRESH_S) -> None:
        self.now += seconds


def test_a_model_that_was_never_reset_has_its_first_epoch_on_all_nodes_and_leaves_nothing_in_the_pool() -> None:
    cluster = Cluster(3)
    assert [node.current() for node in cluster.nodes] == [FIRST] * 3
    assert not cluster.pool.values


def test_a_reset_on_one_node_is_everybodys_new_epoch_and_no_other_models() -> None:
    cluster = Cluster(3)
    other = Epochs(cluster.pool, "another model", clock=lambda: cluster.now)
    begun = cluster.nodes[0].begin()
    assert begun
    cluster.later()
    assert [node.current() for node in cluster.nodes] == [begun] * 3
    assert other.current() == FIRST
    again = cluster.nodes[1].begin()
    assert again not in (None, begun)
    cluster.later()
    assert [node.current() for node in cluster.nodes] == [again] * 3


def test_an_answer_is_relied_on_for_as_long_as_it_is_fresh_and_then_asked_for_again() -> None:
    cluster = Cluster(1)
    (node,) = cluster.nodes
    node.current()
    asked = cluster.pool.questions
    cluster.later(FRESH_S / 2)
    assert node.current() == FIRST
    assert cluster.pool.questions == asked
    cluster.later(FRESH_S)
    assert node.current() == FIRST
    assert cluster.pool.questions == asked + 1


def test_a_reset_that_two_nodes_ask_for_at_once_is_one_new_epoch_for_both() -> None:
    cluster = Cluster(2)
    one, other = cluster.nodes
    put = cluster.pool.put_small

    def put_late(key: str, value: bytes, *, timeout: float) -> Status:
        cluster.pool.put_small = put  # type: ignore[method-assign]
        assert other.begin(), "between what the first node asked and what it puts"
        return put(key, value, timeout=timeout)

    cluster.pool.put_small = put_late  # type: ignore[method-assign]
    begun = one.begin()
    assert begun == one.current() == other.current() != FIRST


@pytest.mark.parametrize("resets", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW + 3, 150 * WINDOW])
def test_a_node_that_was_away_for_any_number_of_resets_learns_of_the_last_one(
    resets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_cache.epochs._WINDOW", WINDOW)
    cluster = Cluster(1)
    (node,) = cluster.nodes
    away, since_the_first = cluster.join(), cluster.join()
    assert away.current() == FIRST
    node.begin()
    assert since_the_first.current() == node.last
    for _ in range(resets):
        assert node.begin()
    cluster.later()
    assert away.current() == since_the_first.current() == cluster.join().current() == node.last
    kept = len(cluster.pool.values)
    assert kept <= 2 + WINDOW + resets // WINDOW, "old signs are removed"


def test_while_the_pool_is_away_the_epoch_is_unknown_once_the_last_answer_is_old() -> None:
    cluster = Cluster(2)
    node, other = cluster.nodes
    assert node.current() == FIRST
    cluster.pool.away = True
    assert node.current() == FIRST, "it was confirmed just now"
    cluster.later()
    assert node.current() is None
    assert other.current() is None
    assert node.begin() is None
    cluster.pool.away = False
    assert node.current() == FIRST, "a reset that the pool did not take has not begun"


def test_a_node_that_asks_all_the_time_asks_the_pool_as_often_as_others() -> None:
    cluster = Cluster(2)
    busy, other = cluster.nodes
    busy.current()
    begun = other.begin()
    for _ in range(5):
        cluster.later(0.4 * FRESH_S)
        label = busy.current()
    assert label == begun


def test_an_answer_that_comes_late_says_nothing() -> None:
    cluster = Cluster(1)
    (node,) = cluster.nodes
    exist, slow = cluster.pool.batch_exist, [LATE_S]

    def late(keys: list[str], *, timeout: float) -> list[Status]:
        answers = exist(keys, timeout=timeout)
        cluster.later(slow[0])
        return answers

    cluster.pool.batch_exist = late  # type: ignore[method-assign]
    assert node.current() is None
    check = node.check()
    slow[0] = 0.0
    answers = cluster.pool.batch_exist(check.keys, timeout=1)
    cluster.later(LATE_S)
    asked = cluster.pool.questions
    assert node.confirm(check, answers) == FIRST
    assert cluster.pool.questions == asked + 1, "it asks again"


def test_what_a_process_has_learned_meanwhile_outweighs_an_earlier_answer() -> None:
    cluster = Cluster(1)
    (node,) = cluster.nodes
    check = node.check()
    answers = cluster.pool.batch_exist(check.keys, timeout=1)
    begun = node.begin()
    assert node.confirm(check, answers) == begun


def test_an_epoch_that_another_process_of_the_engine_knows_is_asked_for_at_once() -> None:
    cluster = Cluster(2)
    scheduler, worker = cluster.nodes
    assert worker.current() == FIRST
    begun = scheduler.begin()
    assert worker.current() == FIRST, "for a moment longer"
    assert worker.current(begun) == begun


def test_callers_in_a_hurry_wait_no_longer_than_they_have_while_one_thread_finds_out_the_epoch() -> None:
    """The root lies in a store node that is silent, and a sign was lost with another one."""
    cluster = Cluster(2)
    node, other = cluster.nodes
    begun = node.begin()
    assert other.current() == begun
    root = min(cluster.pool.values, key=len)
    cluster.pool.values = {root: cluster.pool.values[root]}
    cluster.later()
    silent, asked = threading.Event(), []

    def get_small(key: str, *, timeout: float) -> bytes | None:
        asked.append(key)
        assert silent.wait(60)
        return cluster.pool.values.get(key)

    cluster.pool.get_small = get_small  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(4) as lanes:  # ends although nobody has read the root
            assert list(lanes.map(lambda _: other.current(timeout=Deadline(0.05)), range(8))) == [None] * 8
        assert asked == [root], "all have waited for the same answer"
    finally:
        silent.set()
    assert other.current() not in (begun, FIRST, None), "what was begun for them went on"


def test_a_caller_that_waited_learns_the_epoch_also_if_another_asks_again_meanwhile() -> None:
    """As a load of the epoch before does at its end."""
    cluster = Cluster(2)
    node, other = cluster.nodes
    ended = node.begin()
    assert other.current() == ended
    begun = node.begin()
    cluster.later()
    settle = other._settle

    def settle_and_ask_again(label: str, asked: float) -> str:
        settled = settle(label, asked)
        other._known = other._known._replace(asked=-math.inf)  # what `current(ended)` does first
        return settled

    other._settle = settle_and_ask_again  # type: ignore[method-assign]
    assert other.current() == begun


def test_a_reset_that_others_have_made_and_followed_meanwhile_is_not_taken_for_a_later_one() -> None:
    cluster = Cluster(2)
    slow, other = cluster.nodes
    slow.begin()
    cluster.later()
    put, made = cluster.pool.put_small, []

    def put_late(key: str, value: bytes, *, timeout: float) -> Status:
        cluster.pool.put_small = put  # type: ignore[method-assign]
        made.extend([other.begin(), other.begin()])
        cluster.later(LATE_S / 2)
        return put(key, value, timeout=timeout)

    cluster.pool.put_small = put_late  # type: ignore[method-assign]
    assert slow.begin() == made[0], "the one that another node had begun meanwhile"
    cluster.later(FRESH_S)
    assert slow.current() == made[1]


def test_a_process_that_can_start_no_thread_takes_the_epoch_for_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(2)
    node, other = cluster.nodes
    assert other.current() == FIRST
    begun = node.begin()
    cluster.later()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert other.current() is None
    assert other.current() == begun


def test_a_lookup_asks_again_in_a_new_epoch_within_what_is_left_of_its_time() -> None:
    cluster = Cluster(2)
    node, other = cluster.nodes
    assert other.current() == FIRST
    begun = node.begin()
    cluster.later()
    times: list[float] = []

    def exists(keys: list[str], left: float | None) -> list[Status]:
        assert left is not None
        times.append(left)
        return cluster.pool.batch_exist(keys, timeout=left)

    lookup = PrefixLookup(LayerGroups([ChunkedTokenDatabase(NAMESPACE)]), CacheMetrics())
    found = lookup.find([bytes(16)], 0, exists, other, timeout=60)
    assert (found.chunks, found.epoch) == (0, begun)
    first, second = times
    assert second < first <= 60


def test_when_a_pool_has_lost_its_epochs_the_first_node_that_misses_them_begins_a_new_one_for_all() -> None:
    cluster = Cluster(3)
    node, other, away = cluster.nodes
    node.begin()
    assert away.current() == node.last
    before = [node.begin() for _ in range(3)]
    cluster.pool.values.clear()
    cluster.later()
    assert node.current() not in (*before, None, FIRST)
    assert node.last == other.current() == away.current() == cluster.join().current()


def test_a_reset_after_a_loss_is_followed_by_nodes_that_knew_an_earlier_run() -> None:
    cluster = Cluster(2)
    node, other = cluster.nodes
    node.begin()
    assert other.current() == node.last
    cluster.pool.values.clear()
    begun = cluster.join().begin()
    cluster.later()
    assert node.current() == other.current() == begun


def test_a_run_of_which_only_a_later_sign_is_left_gives_way_to_a_reset() -> None:
    cluster = Cluster(1)
    (node,) = cluster.nodes
    node.begin()
    latest = node.begin()
    for key in [key for key in cluster.pool.values if not key.endswith(f"/{latest}")]:
        del cluster.pool.values[key]  # with the store node that had them
    begun = cluster.join().begin()
    cluster.later()
    assert node.current() == begun


def test_a_node_that_was_away_finds_the_last_epoch_also_where_the_sign_of_the_next_one_was_lost() -> None:
    cluster = Cluster(2)
    node, away = cluster.nodes
    node.begin()
    assert away.current() == node.last
    lost = node.begin()
    begun = node.begin()
    (key,) = (key for key in cluster.pool.values if key.endswith(f"/{lost}"))
    del cluster.pool.values[key]
    cluster.later(60)
    assert away.current() == begun


def test_a_run_without_signs_makes_way_for_a_new_one_when_none_has_come_for_a_while() -> None:
    cluster = Cluster(2)
    cluster.nodes[0].begin()
    root = min(cluster.pool.values, key=len)
    cluster.pool.values = {root: cluster.pool.values[root]}
    new, reset = cluster.join(), cluster.join()
    assert new.current() is None, "there were epochs, and it is not known which"
    cluster.later(2 * LATE_S)
    assert new.current() is None
    cluster.later(10)
    begun = new.current()
    assert begun not in (None, FIRST)
    assert reset.current() == begun
    cluster.pool.values = {root: cluster.pool.values[root]}
    assert cluster.join().begin() not in (None, begun), "a reset does not wait"


@pytest.mark.parametrize("foreign", [b"", b"zzzzzzzz", b"0" * 9, b"\xff" * 8])
def test_a_root_that_is_not_ours_leaves_the_epoch_unknown(foreign: bytes) -> None:
    cluster = Cluster(1)
    cluster.nodes[0].begin()
    root = min(cluster.pool.values, key=len)
    cluster.pool.values[root] = foreign
    assert cluster.join().current() is None


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_happens_no_node_takes_an_earlier_epoch_for_the_current_one(seed: int) -> None:
    """Resets, nodes that join, an absent pool, and lost objects. Of a loss, nodes that know an epoch learn before others join."""
    rng = random.Random(seed)
    cluster = Cluster(3)
    ended: set[str] = set()
    current, since = FIRST, cluster.now

    def seen(label: str | None) -> None:
        nonlocal current, since
        if label in ended:
            assert cluster.now - since < FRESH_S, f"{label!r} is over, {current!r} has begun"
        elif label is not None and label != current:
            ended.add(current)
            current, since = label, cluster.now

    for _ in range(60):
        step = rng.random()
        cluster.later(rng.choice([0.0, 0.1, FRESH_S, 1.0]))
        if step < 0.15:
            seen(rng.choice(cluster.nodes).begin())
        elif step < 0.25:
            cluster.nodes[rng.randrange(1, 3)] = cluster.join()
        elif step < 0.35:
            cluster.pool.away = not cluster.pool.away
        elif step < 0.40 and not cluster.pool.away:
            cluster.later()
            for node in cluster.nodes:
                seen(node.current())
            for key in rng.sample(sorted(cluster.pool.values), len(cluster.pool.values) // 2):
                del cluster.pool.values[key]
            cluster.later()
            seen(cluster.nodes[0].current())
        else:
            seen(rng.choice(cluster.nodes).current())
