"""Weights change while engines run: what the old ones computed is loaded by no engine that has new ones, on a
real pool."""

import contextlib
import threading
import uuid
from functools import partial

import pytest

from pd_cache.config import CacheConfig, DiskTier, LocalTier, MooncakeTier
from pd_cache.versions import Naming, WeightsVersion
from tests.support.engines import BLOCK, CHUNK, host
from tests.support.server import Engine, served
from tests.support.waiting import beside, together, wait_for

TOKENS = list(range(5 * CHUNK))
SLOTS, OTHER = TOKENS, list(range(128, 128 + 5 * CHUNK))


@pytest.fixture
def model():
    """A model of the test's own."""
    return uuid.uuid4().hex


def stored(node):
    node.compute(TOKENS, SLOTS)
    wait_for(
        lambda: node.store(TOKENS, SLOTS) >= 0 and node.lookup(TOKENS) == len(TOKENS), "a store going through"
    )


def named(node, label, state=""):
    """A command gives a label to the state of an engine's weights, by default to the present one."""
    version = node.engine.version
    version.name(Naming(label=label, ids=(state or version.state.id,)))


# --- the version of one engine ------------------------------------------------------------------------------


def test_an_engine_is_out_from_a_change_until_this_very_change_is_named():
    version = WeightsVersion(clock=lambda: 7.9)
    started = version.state
    assert (started.label, started.since) == ("", 7)
    version.reset()
    out = version.state
    assert version.name(Naming(label="late", ids=(started.id,))) is out, "what was said of the state before"
    assert version.label is None
    assert version.name(Naming(label="w1", ids=(started.id, out.id))).label == "w1"
    assert version.name(Naming(label="w2", ids=(out.id,))).label == "w1", "another command was first"


def test_a_change_that_comes_with_a_label_at_the_same_time_wins():
    for _ in range(200):
        version = WeightsVersion(None)
        late = Naming(label="late", ids=(version.state.id,))
        together(version.reset, partial(version.name, late))
        assert version.label is None


# --- on a pool ----------------------------------------------------------------------------------------------


def test_chunks_of_old_weights_are_loaded_from_no_tier(pool, tmp_path, model):
    tiers = (
        LocalTier(capacity="1MiB"),
        DiskTier(path=str(tmp_path / "cache"), capacity="1MiB"),
        MooncakeTier(),
    )
    with (
        host(pool, model=model, cache=CacheConfig(chunk_size=CHUNK, tiers=tiers)) as one,
        host(pool, model=model) as other,
    ):
        stored(one)
        assert other.lookup(TOKENS) == len(TOKENS)
        for node in (one, other):
            node.engine.reset()
            assert node.lookup(TOKENS) == node.store(TOKENS, SLOTS) == 0
            assert (
                node.engine.load(node.engine.name_chunks(TOKENS), range(10), kv_caches=node.cache).reason
                == "weights_unnamed"
            )
        for node in (one, other):
            named(node, "w1")
            assert node.lookup(TOKENS) == 0
            assert not any(node.retrieve(TOKENS, OTHER))
        one.compute(TOKENS, SLOTS)
        assert one.store(TOKENS, SLOTS) == len(TOKENS)
        assert all(other.retrieve(TOKENS, OTHER))
        assert other.holds(TOKENS, OTHER)
    with host(pool, model=model) as restarted:
        assert restarted.lookup(TOKENS) == len(TOKENS), (
            "it has the weights of its files, and finds what these computed"
        )


def test_a_store_of_what_old_weights_computed_does_not_land_among_the_new(pool, model):
    with host(pool, model=model) as one:
        before = one.engine.label
        one.compute(TOKENS, SLOTS)
        for label, reason in ((None, "weights_unnamed"), ("w1", "reset")):
            one.engine.reset(label)
            one.store(TOKENS, SLOTS, label=before)
            assert one.troubles("store")[reason] == 5
            assert one.lookup(TOKENS) == 0
        one.store(TOKENS, SLOTS, label=None)
        assert one.troubles("store")["weights_unnamed"] == 10, "what it computed while it was out"
        assert one.lookup(TOKENS) == 0
        one.engine.reset("")
        assert one.lookup(TOKENS) == 0


def test_while_all_threads_load_and_store_two_commands_at_once_bring_no_engine_kv_of_old_weights(pool, model):
    """Each slot of a paged buffer says with which weights it was computed. Late commands of each change come
    after the next one."""
    weights, over = 0, threading.Event()
    wrong = []
    brought = []

    def work(node, place):
        engine, blocks = node.engine, list(range(place * 4, place * 4 + 4))
        names = engine.name_chunks(TOKENS[: 2 * CHUNK])
        while not over.is_set():
            if (label := engine.label) is None:
                over.wait(0.001)
                continue
            mine = weights
            for tensor in node.cache:
                tensor[blocks] = float(mine)
            engine.store(names, blocks, kv_caches=node.cache, label=label)
            for tensor in node.cache:
                tensor[blocks] = -1.0
            label = engine.label or label
            loaded = engine.load(names, blocks, kv_caches=node.cache, label=label)
            if loaded.chunks:
                there = blocks[: loaded.chunks * CHUNK // BLOCK]
                found = {float(value) for tensor in node.cache for value in tensor[there].unique()}
                brought.append(label)
                if found != {float(numbers[label])}:
                    wrong.append(f"{label}: {found}")

    numbers = {"": 0}
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(host(pool, model=model)) for _ in range(2)]
        stack.enter_context(beside(*(partial(work, nodes[n % 2], n // 2) for n in range(8))))
        stack.callback(over.set)
        late = []
        for number in range(1, 9):
            seen = len(brought)
            wait_for(lambda seen=seen: len(brought) > seen + 20, "loads on all threads")
            for node in nodes:
                node.engine.reset()
            states = [node.engine.version.state.id for node in nodes]
            weights = number
            numbers |= {f"a{number}": number, f"b{number}": number}
            commands = [(label, state) for label in (f"a{number}", f"b{number}") for state in states]
            together(
                *(partial(named, node, label, state) for node in nodes for label, state in [*late, *commands])
            )
            late = commands
            assert {node.engine.label for node in nodes} <= {f"a{number}", f"b{number}"}
        over.set()
    assert not wrong


def test_a_load_of_what_was_found_with_earlier_weights_is_a_miss_whatever_is_there_now(pool, model):
    with host(pool, model=model) as node:
        stored(node)
        before = node.engine.label
        node.engine.reset("w1")
        stored(node)
        names, blocks = node.engine.name_chunks(TOKENS), list(range(10))
        loaded = node.engine.load(names, blocks, kv_caches=node.cache, label=before)
        assert (loaded.chunks, loaded.reason) == (0, "reset")
        assert node.engine.load(names, blocks, kv_caches=node.cache).chunks == len(names)


@pytest.fixture
def server(pool, tmp_path):
    with served(pool, tmp_path) as running:
        yield running


@pytest.fixture
def engine(server, model):
    with Engine(server.url, model) as one:
        wait_for(lambda: all(backend.available for backend in server.models.backends), "the server's pool")
        yield one


@pytest.fixture
def other(pool, model):
    with host(pool, model=model) as one:
        yield one


@pytest.mark.parametrize("label", [None, "w1"])
def test_a_change_between_two_turns_of_a_servers_load_makes_all_of_it_a_miss(
    server, engine, monkeypatch, label
):
    monkeypatch.setattr("pd_cache.server.clients.TURN_BYTES", 1)
    engine.store(TOKENS)
    assert engine.lookup(TOKENS) == len(TOKENS)
    (served_model,) = server.models
    load, turns = served_model.mover.load, []

    def load_and_reset(run):
        restored = load(run)
        turns.append(restored)
        if len(turns) == 3:
            engine.worker._cache.reset(label)
        return restored

    monkeypatch.setattr(served_model.mover, "load", load_and_reset)
    bad = engine.retrieve(TOKENS, first_block=32)
    assert bad == set(range(32, 32 + len(TOKENS) // BLOCK))


def test_a_store_that_waits_in_the_server_belongs_to_the_version_in_which_it_came(
    server, engine, other, monkeypatch
):
    (served_model,) = server.models
    store = served_model.mover.store

    def store_after_a_change(run):
        engine.scheduler.reset("w1")
        return store(run)

    monkeypatch.setattr(served_model.mover, "store", store_after_a_change)
    engine.store(TOKENS)
    assert engine.lookup(TOKENS) == 0
    assert other.lookup(TOKENS) == len(TOKENS), "it has the weights of its files"


def test_an_op_of_a_worker_with_a_label_from_before_a_change_moves_nothing(engine, other):
    labels = []
    for label in (None, "w1"):
        labels.append(engine.scheduler.label)
        engine.scheduler.reset(label)
        engine.worker.reset(label)
        for before in labels:
            engine.store(TOKENS, label=before)
            assert engine.retrieve(TOKENS, label=before) == set(range(len(TOKENS) // BLOCK))
    assert labels == ["", None]
    assert other.lookup(TOKENS) == engine.lookup(TOKENS) == 0
    engine.store(TOKENS, label="w1")
    assert engine.lookup(TOKENS) == len(TOKENS)
