"""A second pool behind the first: what only it has is found, loaded and put into the first; whatever it does,
the first pool serves."""

import contextlib
import signal
import socket
import threading
import time
import uuid

import psutil
import pytest

from pd_cache import ObjectCache
from pd_cache.config import CacheConfig, LocalTier, MooncakeTier
from pd_cache.lookup import MooncakeLookupClient
from tests.support.backends import count
from tests.support.engines import CHUNK, FAST, host
from tests.support.pool import Pool, suspend
from tests.support.waiting import beside, wait_for
from transfer.errors import Status
from transfer.settings import ByteSize

TOKENS, SLOTS = list(range(7000, 7000 + 4 * CHUNK)), list(range(4 * CHUNK))
OTHERS = [token + 1000 for token in TOKENS]


@pytest.fixture(scope="module")
def green(tmp_path_factory):
    """The first pool, which no test breaks."""
    pool = Pool(tmp_path_factory.mktemp("green"), client_ttl_s=60)
    try:
        yield pool.start()
    finally:
        pool.end()


@pytest.fixture
def blue(make_pool):
    """The second."""
    return make_pool().start()


def both(address, *before):
    return CacheConfig(chunk_size=CHUNK, tiers=(*before, MooncakeTier(), MooncakeTier(master=address)))


def fill(pool, model, *prompts):
    """Have a node of that pool alone store prompts."""
    with host(pool, model=model) as node:
        for tokens in prompts:
            node.compute(tokens, SLOTS)
            assert node.store(tokens, SLOTS) == len(tokens)


def second(node):
    return node.engine.backend.tiers[-1].backend


@contextlib.contextmanager
def between(green, blue, model, *before, **transfer):
    with host(green, model=model, cache=both(blue.address, *before), **transfer) as node:
        second(node).wait_available(60)
        yield node


def hits(node, tier):
    return count(node.engine.metrics, "pd_cache_tier_hits_total", tier=tier)


def off(node):
    return bool(count(node.engine.metrics, "pd_cache_tier_off", tier="mooncake-1"))


@pytest.mark.parametrize(
    "before", [(), (LocalTier(capacity=ByteSize(1 << 20)),)], ids=["pools alone", "memory before"]
)
def test_what_only_the_second_pool_has_is_found_loaded_and_put_into_the_first(green, blue, before):
    model = uuid.uuid4().hex
    fill(blue, model, TOKENS)
    first, there = green.keys(), blue.keys()
    with between(green, blue, model, *before) as node:
        assert node.lookup(TOKENS) == len(TOKENS)
        assert green.keys() == first, "a lookup moves nothing"
        assert node.retrieve(TOKENS, SLOTS) == [True] * len(TOKENS)
        assert node.holds(TOKENS, SLOTS)
        wait_for(lambda: green.keys() - first == set(node.keys(TOKENS)), "all of it in the first pool")
        assert (hits(node, "mooncake"), hits(node, "mooncake-1")) == (0, 4)
        assert node.store(TOKENS, SLOTS) == 0, "it is there"
        node.compute(OTHERS, SLOTS)
        assert node.store(OTHERS, SLOTS) == len(OTHERS)
        assert blue.keys() == there, "nothing is stored in the second"
        assert not off(node)
        assert node.troubles("lookup") == node.troubles("retrieve") == node.troubles("store") == {}
    blue.end()
    with host(green, model=model) as later:
        for tokens in (TOKENS, OTHERS):
            assert later.retrieve(tokens, SLOTS) == [True] * len(tokens)
            assert later.holds(tokens, SLOTS)


def test_a_prefix_may_lie_in_both_pools_and_the_second_is_asked_only_for_what_the_first_lacks(
    green, blue, monkeypatch
):
    model = uuid.uuid4().hex
    fill(blue, model, TOKENS)
    with host(green, model=model) as node:
        node.compute(TOKENS[: 2 * CHUNK], SLOTS[: 2 * CHUNK])
        node.store(TOKENS[: 2 * CHUNK], SLOTS[: 2 * CHUNK])
    with between(green, blue, model) as node:
        engine = node.engine
        client = MooncakeLookupClient(engine.settings, engine.metadata, green.address)
        with contextlib.closing(client):
            for store in (client.store, client.second):
                store.wait_open(60)
            asked = []
            real = client.second.batch_exist
            monkeypatch.setattr(
                client.second,
                "batch_exist",
                lambda keys, **how: asked.append(list(keys)) or real(keys, **how),
            )
            assert client.lookup(TOKENS) == node.lookup(TOKENS) == len(TOKENS)
            assert asked == [node.keys(TOKENS)[2:]]
            assert node.retrieve(TOKENS, SLOTS) == [True] * len(TOKENS)
            assert (hits(node, "mooncake"), hits(node, "mooncake-1")) == (2, 2)
            wait_for(lambda: set(node.keys(TOKENS)) <= green.keys())
            asked.clear()
            assert client.lookup(TOKENS) == len(TOKENS)
            assert asked in ([], [[]])


def _stop_master(blue):
    node = blue.nodes["master"]
    for process in (psutil.Process(node.process.pid), *psutil.Process(node.process.pid).children()):
        suspend(process)


OUTAGES = {
    "master killed": lambda blue: blue.kill("master"),
    "all killed": lambda blue: blue.end(),
    "master stopped": _stop_master,
    "store killed": lambda blue: blue.kill("store-0"),
    "store stopped": lambda blue: blue.nodes["store-0"].send(signal.SIGSTOP),
    "master started anew": lambda blue: (blue.stop("master"), blue.start("master")),
}


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("outage", OUTAGES)
def test_the_first_pool_serves_whatever_becomes_of_the_second(green, blue, outage):
    model = uuid.uuid4().hex
    fill(blue, model, OTHERS)
    fill(green, model, TOKENS)
    with between(green, blue, model, **FAST) as node:
        assert node.lookup(OTHERS) == len(OTHERS)
        OUTAGES[outage](blue)
        begun = time.monotonic()
        for _ in range(12):
            found = node.lookup(OTHERS)
            assert found in (0, len(OTHERS))
            # a load of what has gone, or cannot be had, is a miss
            mask = node.retrieve(OTHERS, SLOTS, timeout=10)
            assert node.holds(OTHERS[: sum(mask)], SLOTS[: sum(mask)])
            assert node.lookup(TOKENS) == len(TOKENS)
            assert node.retrieve(TOKENS, SLOTS) == [True] * len(TOKENS)
        assert node.holds(TOKENS, SLOTS)
        fresh = [token + 2000 for token in TOKENS]
        node.compute(fresh, SLOTS)
        assert node.store(fresh, SLOTS) == len(fresh)
        assert time.monotonic() - begun < 100, "each outage is noticed once, not by each of twelve calls"
        assert node.engine.backend.available
        if "master" in outage and "anew" not in outage:
            assert off(node)
            assert node.lookup(OTHERS) == 0
        assert node.troubles("lookup") == {}, "the cache itself is well"
        assert set(node.troubles("retrieve")) <= {"missing", "deadline"}


def test_a_second_pool_that_comes_late_is_found(green, make_pool):
    model, blue = uuid.uuid4().hex, make_pool()
    with host(green, model=model, cache=both(blue.address), **FAST) as node:
        assert off(node)
        assert node.lookup(TOKENS) == 0
        assert node.troubles("lookup") == {}
        blue.start()
        wait_for(lambda: not off(node))
        fill(blue, model, TOKENS)
        assert node.lookup(TOKENS) == len(TOKENS)


def test_what_is_no_master_holds_nothing_up(green):
    """Something takes the connection and never answers: Mooncake's client would hold the whole process, again
    and again."""
    model = uuid.uuid4().hex
    fill(green, model, TOKENS)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        with host(green, model=model, cache=both(address), **FAST) as node:
            pauses, ended = [0.0], threading.Event()

            def tick():
                last = time.thread_time(), time.monotonic()
                while not ended.wait(0.01):
                    now = time.thread_time(), time.monotonic()
                    pauses.append(now[1] - last[1])
                    last = now

            with beside(tick):
                end = time.monotonic() + 5
                while time.monotonic() < end:
                    assert node.lookup(TOKENS) == len(TOKENS)
                    assert node.retrieve(TOKENS, SLOTS) == [True] * len(TOKENS)
                    time.sleep(0.02)
                ended.set()
            assert off(node)
            assert sum(pause > 1 for pause in pauses) < 2, "not once a second"


def test_in_both_pools_an_engine_finds_what_its_version_of_the_weights_computed(green, blue):
    model = uuid.uuid4().hex
    with host(blue, model=model) as old:
        old.engine.reset("w2")
        old.compute(TOKENS, SLOTS)
        assert old.store(TOKENS, SLOTS) == len(TOKENS)
        with between(green, blue, model) as node:
            assert old.lookup(TOKENS) == len(TOKENS)
            assert node.lookup(TOKENS) == 0
            node.engine.reset("w2")
            assert node.lookup(TOKENS) == len(TOKENS)
            assert node.retrieve(TOKENS, SLOTS) == [True] * len(TOKENS)
            assert node.holds(TOKENS, SLOTS)


def test_a_value_that_is_removed_does_not_come_back_from_the_second_pool(green, blue):
    before = green.keys()
    with ObjectCache.open(blue.settings(), "values", part_bytes=4096) as old:
        old.wait_available(60)
        assert old.put("name", b"old") is Status.OK
    with ObjectCache.open(green.settings(both(blue.address)), "values", part_bytes=4096) as cache:
        cache.wait_available(60)
        cache.backend.tiers[-1].backend.wait_available(60)
        assert cache.get("name") == b"old"
        wait_for(lambda: green.keys() - before, "it is in the first pool, too")
        assert cache.remove("name") is Status.OK
        assert cache.get("name") is None
        assert (green.keys(), blue.keys()) == (before, set())
