"""`pd-cache drain` on real pools: what moves, what is found and loaded meanwhile, and what is refused. With
elected masters: `test_elected_masters`."""

import json
import threading
import time

import psutil
import pytest

from launch.masters import begin_drain, drain_job, keys_in, segments_at
from launch.operate import drain as drained_by
from launch.operate.drain import drain
from launch.run.supervise import StopFlag
from launch.watch.asker import cluster_status
from pd_cache.cluster import load_config
from pd_cache.errors import PdCacheError
from tests.support.cli import cli, run_program
from tests.support.engines import host
from tests.support.pool import Pool, suspend
from tests.support.waiting import wait_for
from transfer.store import load_mooncake

pytestmark = pytest.mark.slow(seconds=100)

SLOTS = list(range(40))
PROMPTS = [[100 * number + token for token in SLOTS] for number in range(16)]
OBJECTS = 5 * len(PROMPTS)


def segment(pool, store):
    return next(one for one in segments_at(pool.metrics) if one.segment_name == pool.segment(store))


def loads(node, prompt):
    """Whether the whole prompt is found and loaded; AssertionError for a wrong byte."""
    node.compute([-1 - token for token in SLOTS], SLOTS)
    if node.lookup(prompt) != 40 or not all(node.retrieve(prompt, SLOTS)):
        return False
    assert node.holds(prompt, SLOTS)
    return True


def put(pool, store, count, size):
    config = load_mooncake().ReplicateConfig()
    config.preferred_segment = pool.segment(store)
    with pool.bare_client() as client:
        assert [client.put(f"{store}/{number}", bytes(size), config) for number in range(count)] == [
            0
        ] * count


def half_full(make_pool, objects=100, **options):
    """A pool of two stores, of which the first holds so many objects."""
    pool = make_pool(**options).start("master", "store-0", "store-1")
    put(pool, 0, objects, 4096)
    return pool


def drained(pool, told=lambda _: None, *, stop=None, timeout_s=600.0):
    return drain(load_config(pool.file), "store-0", timeout_s=timeout_s, report=told, stop=stop or StopFlag())


def test_nothing_is_lost_while_prompts_are_looked_up_loaded_and_stored_and_then_the_node_may_go_and_come_back(
    make_pool,
):
    pool = make_pool(lease_ttl_ms=5_000).start()
    with host(pool, model="drained") as node, host(pool, model="drained") as busy:
        for prompt in PROMPTS:
            node.compute(prompt, SLOTS)
            wait_for(
                lambda prompt=prompt: node.store(prompt, SLOTS) + node.lookup(prompt) >= 40, "it is stored"
            )
        pool.start("store-1")
        assert segment(pool, 0).allocator_used_bytes > 0
        stop, hits = threading.Event(), []

        def work():
            new = 0
            while not stop.wait(0.1):
                hits.extend(loads(busy, prompt) for prompt in PROMPTS[:8])  # always leased
                new += 1
                prompt = [10_000 + 100 * new + token for token in SLOTS]
                busy.compute(prompt, SLOTS)
                busy.store(prompt, SLOTS)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            # in a process of its own: a client of Mooncake's that closes holds up all threads for a second
            done = run_program("drain", "store-0", "--json", "-c", pool.file)
        finally:
            stop.set()
            worker.join()
        found = json.loads(done.stdout)
        assert (found["outcome"], found["failed"], found["left"]) == ("drained", 0, 0)
        assert found["moved"] > OBJECTS  # the namespace's manifest, too
        assert "objects moved" in done.stderr
        assert len(hits) > 8
        assert all(hits)
        assert segment(pool, 0).status == "DRAINED"
        states = {row.name: row.memory for row in cluster_status(load_config(pool.file)).nodes if row.memory}
        assert states == {"store-0": "drained"}
        for command, shown in (["status"], "not asked, drained"), (["top", "--once"], "drain"):
            page = cli(*command, "-c", pool.file, code=None, env={"COLUMNS": "200"}).stdout
            assert shown in next(line for line in page.splitlines() if line.startswith("store-0"))
        again = cli("drain", "store-0", "-c", pool.file).stdout
        assert again.startswith("store-0 is drained (it was before). Stop it now: ")
        pool.stop("store-0")
        assert all(loads(node, prompt) for prompt in PROMPTS)
        pool.start("store-0")
        assert segment(pool, 0).status == "OK"


@pytest.mark.parametrize("how", ["a signal", "the deadline"])
def test_a_drain_that_is_stopped_is_canceled_and_the_node_takes_objects_again(how, make_pool):
    pool = half_full(make_pool, 200, lease_ttl_ms=5_000)
    stop = StopFlag()

    def told(state):
        if state.moved and how == "a signal":
            stop.set()
        elif state.moved:
            state.seconds = 3601

    found = drained(pool, told, stop=stop, timeout_s=3600.0)
    assert (found.outcome, found.moved + found.left) == ("canceled", 200)
    assert 0 < found.moved < 200
    assert segment(pool, 0).status == "OK"
    with pool.bare_client() as client:
        assert all(client.get(f"0/{number}") == bytes(4096) for number in range(200))


@pytest.fixture(scope="module")
def two_stores(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("two"), segment="32MiB", client_ttl_s=60)
    try:
        yield pool.start("master", "store-0", "store-1")
    finally:
        pool.end()


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["store-7"], 2, "expected a node that gives memory to the pool (store-0, store-1), got store-7: no node of that name"),
        (["master"], 2, "(store-0, store-1), got master: that master node gives no memory to the pool"),
        ([""], 2, "got : no node of that name"),
        (["store-0", "--timeout", "0"], 2, "0.0 is not in the range 1.0<=x<=604800.0"),
        (["store-0", "--timeout", "soon"], 2, "'soon' is not a valid float"),
        ([], 2, "Missing argument 'NODE'"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_and_changes_nothing(arguments, code, said, two_stores):
    done = cli("drain", *arguments, "-c", two_stores.file, code=code)
    assert done.stdout == ""
    assert said in done.stderr
    assert {one.status for one in segments_at(two_stores.metrics)} == {"OK"}


def test_a_node_cannot_be_drained_into_too_little_room_nor_into_nothing_and_a_second_drain_helps_the_first(
    two_stores,
):
    def refused(node="store-0"):
        done = cli("drain", node, "-c", two_stores.file, code=1)
        assert done.stdout == ""
        return done.stderr

    put(two_stores, 0, 20, 1 << 20)
    put(two_stores, 1, 16, 1 << 20)
    assert "store-0 holds 20.0 MiB, and the others have room for 12.0 MiB: add a node first" in refused()
    with two_stores.bare_client() as client:
        # leased, so the job does not end by itself
        client.batch_is_exist([f"0/{number}" for number in range(20)])
        job = begin_drain(two_stores.metrics, [two_stores.segment(0)], 4)
        assert begin_drain(two_stores.metrics, [two_stores.segment(0)], 4) is None
        assert refused("store-1").startswith("pd-cache: store-1 has the only memory that takes objects")
        state = drain_job(two_stores.metrics, job)
        assert (state.ended, state.succeeded_units) == (False, 0)
        client.batch_remove([f"1/{number}" for number in range(16)], True)
        helped = cli("drain", "store-0", "-c", two_stores.file).stdout
        assert "store-0 is drained (20 objects moved" in helped
    two_stores.stop("store-0")
    assert "the master knows no segment of store-0: does store-0 run?" in refused()
    two_stores.kill("master")
    metrics = two_stores.metrics.removeprefix("http://")
    assert f"no master that leads has answered (master: down: {metrics}: Connection refused)" in refused()


def test_a_second_drain_that_is_stopped_leaves_the_first_alone(make_pool):
    pool = half_full(make_pool, 40, lease_ttl_ms=5_000)
    assert begin_drain(pool.metrics, [pool.segment(0)], 4) is not None
    stop = StopFlag()
    stop.set()
    assert drained(pool, stop=stop).outcome == "goes on"
    wait_for(lambda: segment(pool, 0).status == "DRAINED", "the first drain's end")


def test_leased_objects_are_listed_once_and_moved(make_pool, monkeypatch):
    """A list of a million keys takes longer than their moves."""
    pool = half_full(make_pool, 70, lease_ttl_ms=60_000)
    lists = []

    def listed(*arguments):
        lists.append(keys_in(*arguments))
        return lists[-1]

    monkeypatch.setattr(drained_by, "keys_in", listed)
    odd = ["a,b", "x" * 5000]  # of another program, and not leased
    with pool.bare_client() as client:
        config = load_mooncake().ReplicateConfig()
        config.preferred_segment = pool.segment(0)
        assert [client.put(key, b"odd", config) for key in odd] == [0, 0]
        leased = [f"0/{number}" for number in range(70)]
        assert client.batch_is_exist(leased) == [1] * len(leased)
        found = drained(pool)
        assert (found.outcome, found.moved) == ("drained", 72)
        assert len(lists) == 1
        pool.stop("store-0")
        assert [client.get(key) for key in odd] == [b"odd"] * 2


@pytest.mark.parametrize(
    "goes, said",
    [
        ("store-0", "store-0 has stopped or was restarted: objects that had not moved yet are"),
        ("store-1", r"no other node takes objects any more: \d+ objects are still on store-0"),
        ("master", "the master no longer knows the job, because it was restarted; moved objects"),
    ],
    ids=["the node", "its last target", "the master, for a moment"],
)
def test_a_drain_ends_at_once_when_one_of_its_parts_goes_and_the_node_takes_objects_again(
    goes, said, make_pool
):
    pool = half_full(make_pool, client_ttl_s=60 if goes == "master" else 2)

    def told(state):
        if state.moved and goes in pool.nodes:
            (pool.kill if goes == "store-0" else pool.stop)(goes)
            if goes == "master":
                pool.start("master")

    with pytest.raises(PdCacheError, match=said):
        drained(pool, told)
    if goes == "store-1":
        assert segment(pool, 0).status == "OK"


@pytest.mark.parametrize(
    "signaled, said",
    [
        (True, r"the master did not answer: .* no whole answer within 1 s"),
        (False, "the master has not answered for 1 s"),
    ],
)
def test_a_drain_is_not_canceled_by_a_master_that_stands_still_and_says_so_soon(
    signaled, said, make_pool, monkeypatch
):
    pool = half_full(make_pool, client_ttl_s=60)
    for limit in ("_CALL_S", "_CANCEL_S"):
        monkeypatch.setattr(drained_by, limit, 1.0)
    stop = StopFlag()
    (master,) = psutil.Process(pool.nodes["master"].process.pid).children()

    def told(state):
        suspend(master)
        if signaled:
            stop.set()

    begin = time.monotonic()
    try:
        with pytest.raises(PdCacheError, match=f"{said}.*; moved objects stay moved"):
            drained(pool, told, stop=stop)
    finally:
        master.resume()
    assert time.monotonic() - begin < 60, "another list of its keys has minutes"
