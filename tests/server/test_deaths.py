"""Engines and servers are killed, stopped and started again, in the middle of things."""

import contextlib
import gc
import os
import signal
import sys
import threading
import uuid
from functools import partial
from pathlib import Path

import pytest

from pd_cache.server.connection import ServerConnection
from pd_cache.server.protocol import Done, EngineIdentity, Hello, Welcome
from tests.server.test_link import End
from tests.support.engines import CHUNK, troubles
from tests.support.kv import make_cache, same_tensors
from tests.support.leaks import open_files
from tests.support.pool import Process
from tests.support.server import Engine, ServerProcess, pinned_keys, running_at, served, store_surely
from tests.support.waiting import beside, wait_for

TOKENS = list(range(4 * CHUNK))

VICTIM = """
import sys, time
from tests.support.server import Engine
engine = Engine(sys.argv[1], sys.argv[2])
tokens = list(range(int(sys.argv[3])))
found = engine.lookup(tokens, "pinned")
for index in range(20):
    engine.compute(tokens)
    engine.worker.submit_store_request(f"store-{index}", engine.op(tokens))
print("ready", found, flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def victim(url, model):
    """An engine in a process of its own: registered, with a session, and with stores under way."""
    with Process("victim", [sys.executable, "-c", VICTIM, url, model, str(len(TOKENS))]) as process:
        process.said.wait()
        assert process.lines == [f"ready {len(TOKENS)}"], process.errors
        yield process


def shared_maps():
    """Mappings of engines' tensors in this process."""
    return sum("/dev/shm/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())


def shared_files():
    """Open files of shared memory, fences included: Mooncake's connections come and go as they like."""
    return open_files("/memfd:pd-cache") + open_files("/dev/shm/torch_")


@pytest.fixture
def server(pool, tmp_path):
    with served(pool, tmp_path) as one:
        yield one


def test_kill_9_of_an_engine_frees_sessions_pins_mappings_and_shared_memory(server):
    model, names = uuid.uuid4().hex, set(os.listdir("/dev/shm"))
    with Engine(server.url, model) as other:
        store_surely(other, TOKENS)
        maps, files = shared_maps(), shared_files()
        with victim(server.url, model) as process:
            wait_for(
                lambda: sum(client.worker is not None for client in server._clients.copy().values()) == 2
            )
            assert pinned_keys(server) == 4
            assert shared_maps() > maps
            process.send(signal.SIGKILL)
            wait_for(lambda: len(server._clients) == 2 and not pinned_keys(server), "it being forgotten")
            wait_for(
                lambda: shared_maps() == maps and not (server._lookups.in_flight or server._copies.in_flight),
                "its memory being unmapped",
            )
        wait_for(lambda: shared_files() <= files, "its files being closed")
        assert not [name for name in set(os.listdir("/dev/shm")) - names if str(process.process.pid) in name]
        assert other.retrieve(TOKENS, 20) == set()
        assert other.holds(TOKENS, 20)


def test_an_engine_that_says_goodbye_takes_everything_with_it(server):
    with Engine(server.url) as one:
        store_surely(one, TOKENS)
    wait_for(lambda: not server._clients)
    gc.collect()
    files, maps = shared_files(), shared_maps()
    for _ in range(5):
        with Engine(server.url, one.model) as again:
            assert again.lookup(TOKENS) == 4 * CHUNK
    del again  # its tensors are a file of this process's, too
    gc.collect()
    wait_for(lambda: not server._clients and not pinned_keys(server))
    wait_for(lambda: shared_files() <= files, "every file being closed")
    assert shared_maps() <= maps


def test_kill_9_of_the_server_fails_what_is_outstanding_and_all_comes_back_after_a_restart(pool, tmp_path):
    server = ServerProcess(pool, tmp_path)
    try:
        with Engine(server.address) as engine:
            store_surely(engine, TOKENS)
            server.send(signal.SIGSTOP)  # so that these are outstanding when it dies
            engine.scheduler.maybe_submit_lookup_request("lost", token_ids=TOKENS)
            engine.worker.submit_retrieve_request("lost", engine.op(TOKENS, 20))
            engine.worker.submit_store_request("lost", engine.op(TOKENS))
            assert engine.scheduler.check_lookup_result("lost") is None
            os.kill(server.process.pid, signal.SIGKILL)
            # by the connection's end, long before the deadlines of these
            wait_for(lambda: engine.scheduler.check_lookup_result("lost") == 0)
            engine.finish_retrieve("lost")
            engine.finish_store("lost")
            assert engine.worker.get_block_ids_with_load_errors() == set(range(20, 28))
            assert troubles(engine.worker.metrics, "store")["server_lost"]
            assert engine.lookup(TOKENS) == 0, "what is asked meanwhile is a miss, at once"
            assert set(troubles(engine.scheduler.metrics, "lookup")) == {"server_lost"}
            server.kill()
            server = ServerProcess(pool, tmp_path)
            wait_for(lambda: engine.lookup(TOKENS) == 4 * CHUNK, "hits after the restart")
            wait_for(lambda: engine.worker.available, "the worker knowing that it is registered")
            assert engine.retrieve(TOKENS, 30) == set()
            assert engine.holds(TOKENS, 30)
    finally:
        server.kill()


def test_a_server_that_is_stopped_is_given_up_and_never_touches_the_blocks_again(pool, tmp_path):
    with ServerProcess(pool, tmp_path) as server, Engine(server.address, move_timeout_s=1.0) as engine:
        store_surely(engine, TOKENS)
        for round_ in range(2):
            server.send(signal.SIGSTOP)
            for index in range(4):
                engine.worker.submit_retrieve_request(f"{round_}-{index}", engine.op(TOKENS, 20 + 8 * index))
            done = set()
            wait_for(
                lambda done=done: done.update(engine.worker.get_finished(set())[1] or ()) or len(done) == 4
            )
            assert engine.worker.get_block_ids_with_load_errors() == set(range(20, 52))
            before = [tensor.clone() for tensor in engine.cache]
            server.send(signal.SIGCONT)
            wait_for(lambda: engine.worker.available and running_at(server.metrics) == 0)
            assert same_tensors([one[20:52] for one in engine.cache], [one[20:52] for one in before])
        wait_for(lambda: engine.lookup(TOKENS) == 4 * CHUNK)
        # a load that a busy machine does not do within its second is given up, too
        wait_for(lambda: engine.retrieve(TOKENS, 20) == set(), "a load")
        assert engine.holds(TOKENS, 20)


def test_a_server_closes_while_engines_use_it_and_leaves_nothing_behind(pool, tmp_path):
    # those of tests before this one that nothing has collected yet
    stop, before = threading.Event(), shared_maps()
    with served(pool, tmp_path) as server, Engine(server.url) as engine:
        store_surely(engine, TOKENS)

        def use():
            while not stop.is_set():
                engine.lookup(TOKENS)
                engine.retrieve(TOKENS, 20)

        with beside(use):
            try:
                wait_for(
                    lambda: server.metrics.registry.get_sample_value(
                        "pd_cache_bytes_total", {"op": "retrieve"}
                    )
                )
                server.close()
                assert not any("torch_" in str(one) for one in tmp_path.iterdir())
            finally:
                stop.set()
    own = 1  # the engine's, which is of this process, too
    wait_for(lambda: shared_maps() <= before + own, "the mappings being gone")
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".sock", ".fds"))]


def test_a_server_that_dies_while_it_maps_memory_is_noticed_at_once(tmp_path):
    maps = threading.Event()
    answers = [None, Done()]

    def handle(incoming):
        if isinstance(incoming.request, Hello):
            return Welcome(CHUNK, "tokens", "", False, False)
        maps.set()
        return answers[0]

    identity = EngineIdentity(model="m", block_size=CHUNK, chunk_size=CHUNK)
    with contextlib.ExitStack() as stack:

        def listen():
            end = stack.enter_context(contextlib.closing(End(tmp_path)))
            end.handle = handle
            return end

        server = listen()
        connection = ServerConnection(server.link.url, None, "worker", identity)
        engine = stack.enter_context(contextlib.closing(connection))
        engine.wait_ready(60)
        stack.enter_context(beside(partial(engine.register, make_cache())))
        assert maps.wait(60)
        server.close()
        del answers[0]
        listen()
        wait_for(lambda: engine.ready, "the tensors being registered with the server that took its place")
