"""What one engine asks of a cache server never keeps another one waiting, and is let go of with it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.suites.soak import engine_abuse
from bench.suites.soak.engine_abuse import StrangePeer, sealed
from pd_cache.client.connection import ServerConnection
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.epochs import PROCESS_EPOCHS
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.server import answerer, cache_server, moves
from pd_cache.server.cache_server import CacheServer
from pd_cache.server.served_models import ServedModels, memory_size
from pd_cache.wire import channel
from pd_cache.wire.channel import RefusedError
from pd_cache.wire.messages import MAX_FRAME, Done, Hello, Lookup, RefusalError, Refused, StatusQuery, Welcome, encode
from tests.support.engines import BLOCK, CHUNK
from tests.support.kv import make_cache
from tests.support.pool import ROOT, Pool, free_port
from tests.support.server import Engine, served, store_surely
from tests.support.waiting import PATIENCE_S, wait_for

TOKENS = list(range(6 * CHUNK))


@pytest.fixture
def server(pool: Pool, tmp_path: Path) -> Iterator[CacheServer]:
    with served(pool, tmp_path) as one:
        yield one


def lent_files() -> int:
    """Descriptors that this process, and the server in it, has of memory that strangers lend."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "memfd:abuse" in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


# --- registrations and lifelines -------------------------------------------------------------------------------------


def test_registrations_without_descriptors_keep_no_thread(server: CacheServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(cache_server, "_DESCRIPTORS_S", 600.0)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(StrangePeer(server.url)) for _ in range(20)]
        for one in strangers:
            assert isinstance(one.hello(lifeline=True), Welcome)
            one.say(engine_abuse.registration(uuid.uuid4().hex, 4096, CHUNK))
        wait_for(lambda: sum(one.pending is not None for one in server._clients.values()) == 20)
        with Engine(server.url) as engine:
            store_surely(engine, TOKENS)
        assert not any(one.hear(0) for one in strangers), "they still wait"


def test_descriptors_may_come_after_the_registration(server: CacheServer) -> None:
    token = uuid.uuid4().hex
    with StrangePeer(server.url) as one:
        one.hello(lifeline=True)
        one.say(engine_abuse.registration(token, engine_abuse.LENT, CHUNK))
        wait_for(lambda: any(client.pending for client in server._clients.values()))
        descriptors = [sealed(engine_abuse.FENCE_BYTES), sealed(engine_abuse.LENT)]
        one.lend(token, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        assert one.hear() == Done()


def test_a_token_that_is_sent_again_and_again_keeps_one_set_of_descriptors(server: CacheServer) -> None:
    token = uuid.uuid4().hex
    with StrangePeer(server.url) as one:
        one.hello(lifeline=True)
        descriptor = sealed(4096)
        for _ in range(60):
            one.lend(token, [descriptor] * 100)
        os.close(descriptor)
        wait_for(lambda: lent_files() == 100, 10, "all but one set being closed")
    wait_for(lambda: not lent_files(), 10, "the last set being closed with its client")


def test_a_descriptor_that_takes_long_to_close_holds_nobody_up(server: CacheServer) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\x58\x02\0\0")  # ten minutes
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            client.send(bytes(1 << 20))
    with peer, StrangePeer(server.url) as one:
        one.hello(lifeline=True)
        token, fence = uuid.uuid4().hex, sealed(engine_abuse.FENCE_BYTES)
        one.lend(token, [fence, client.fileno()])
        os.close(client.detach())  # now the server's is the last one, and to close it takes ten minutes
        os.close(fence)
        answer = one.ask(engine_abuse.registration(token, 1 << 20, CHUNK))
        assert isinstance(answer, Refused)
        assert "expected sealed memory of memfd_create" in answer.message
        with Engine(server.url) as engine:
            store_surely(engine, TOKENS)


def test_clients_without_a_lifeline_give_their_place_to_newcomers(server: CacheServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(cache_server, "_MAX_CLIENTS", 8)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(StrangePeer(server.url)) for _ in range(8)]
        for one in strangers:
            assert isinstance(one.hello("observer"), Welcome)
        with Engine(server.url) as engine:
            store_surely(engine, TOKENS)
            for one in strangers:
                one.hello("observer")
            assert engine.lookup("still there", TOKENS) == len(TOKENS)
            assert len(server._clients) == 8
    assert isinstance(strangers[0].welcome, Welcome)


def test_where_every_client_has_a_lifeline_one_more_is_refused(server: CacheServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(cache_server, "_MAX_CLIENTS", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(StrangePeer(server.url)).hello(lifeline=True)
        wait_for(lambda: all(server._lifeline.has(one.hello.client) for one in server._clients.values()))
        answer = stack.enter_context(StrangePeer(server.url)).hello(block_size=CHUNK)
        assert isinstance(answer, Refused)
        assert answer.reason == "busy"


def test_a_client_has_one_name(server: CacheServer) -> None:
    with StrangePeer(server.url) as one:
        answer = one.ask(Hello(uuid.uuid4().hex, "observer", "abuse"))
        assert isinstance(answer, Refused)
        assert "name must be the same" in answer.message


# --- lookups, stores and retrieves -----------------------------------------------------------------------------------


def test_a_lookup_in_many_steps_finds_what_one_step_finds(server: CacheServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(answerer, "STEP_KEYS", 2)
    with Engine(server.url) as engine:
        store_surely(engine, TOKENS)
        before = [server.metrics.registry.get_sample_value("pd_cache_tokens_total", tags) or 0 for tags in COUNTED]
        assert engine.lookup("all", TOKENS) == 6 * CHUNK
        assert server.sessions.pinned == 6
        assert engine.lookup("part", [*TOKENS[: 3 * CHUNK], *[9] * 6 * CHUNK]) == 3 * CHUNK
        after = [server.metrics.registry.get_sample_value("pd_cache_tokens_total", tags) or 0 for tags in COUNTED]
        assert [new - old for new, old in zip(after, before, strict=True)] == [15 * CHUNK, 9 * CHUNK]


COUNTED = [{"op": "lookup", "outcome": "requested"}, {"op": "lookup", "outcome": "hit"}]


def test_what_one_lookup_asks_for_is_bounded(server: CacheServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(answerer, "MOST_KEYS", 4)
    with Engine(server.url) as engine:
        engine.store("a", TOKENS)
        wait_for(lambda: engine.lookup(uuid.uuid4().hex, TOKENS) == 4 * CHUNK or engine.store("a", TOKENS), 30)


def test_more_ranks_than_there_are_heads_anywhere_are_refused(server: CacheServer) -> None:
    with StrangePeer(server.url) as one:
        with pytest.raises(ValueError, match="more than 1024 shards"):
            Hello(one.name, "worker", "abuse", "abuse", 1024, 0, CHUNK, shards_per_rank=2)
        frame = encode(1, Hello(one.name, "worker", "abuse", "abuse", 1024, 0, CHUNK))
        most, more = msgspec.msgpack.encode(1024), msgspec.msgpack.encode(4096)
        assert frame.count(most) == 1
        one.send([frame.replace(most, more)])  # as no client of ours can say it
        answer = one.hear()
    assert isinstance(answer, Refused)
    assert answer.reason == "malformed"
    assert "1024" in answer.message


def test_a_store_and_a_retrieve_in_many_turns_move_what_one_turn_moves(server: CacheServer, monkeypatch: Any) -> None:
    with Engine(server.url) as engine:
        store_surely(engine, TOKENS[:CHUNK])
        monkeypatch.setattr(moves, "TURN_BYTES", 1)
        store_surely(engine, TOKENS)
        assert engine.lookup("a", TOKENS) == 6 * CHUNK
        assert engine.retrieve("a", TOKENS, 20) == set()
        assert engine.holds(TOKENS, 20)
        wait_for(lambda: not server.sessions.pinned, 5, "the session ending with the retrieve")
        model = next(iter(server.models))
        keys = model.database.keys(model.database.hash_tokens(TOKENS))
        model.mover.backend.store.remove([keys[3]], timeout=5, force=True)  # type: ignore[attr-defined]
        assert engine.retrieve("b", TOKENS, 20) == set(range(20 + 6, 20 + 12)), (
            "it ends at the first chunk that is gone"
        )
        wait_for(lambda: not server._queue.in_flight, what="the last turn ending after its answer")


def test_a_request_that_no_server_reads_is_refused_before_it_is_sent(server: CacheServer) -> None:
    client = ServerConnection(server.url, None, "observer")
    try:
        with pytest.raises(RefusedError, match="at most"):
            client.ask(Lookup("x" * MAX_FRAME, b""), 5)
        client.ask(StatusQuery(), 5)
        assert client.lost == 0
    finally:
        client.close()


# --- backends --------------------------------------------------------------------------------------------------------


class FakeBackend:
    available = True
    epochs = PROCESS_EPOCHS

    def __init__(self, settings: NodeSettings, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.segment_size = settings.segment_size
        self.closed = False

    def batched_contains(self, keys: Any, timeout: Any = None) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def models(pool: Pool) -> ServedModels:
    settings = pool.settings(CacheConfig(chunk_size=CHUNK), segment_size=16 << 20)
    return ServedModels(settings, CacheMetrics(), FakeBackend)  # type: ignore[arg-type]


def come(models: ServedModels, heads: int, client: str) -> Any:
    """An engine registers whose chunks are as large as it has heads."""
    hello = Hello(uuid.uuid4().hex, "worker", "x", f"model of {heads}", 1, 0, BLOCK)
    return models.serve(models.group(hello), KVLayout.from_tensors(make_cache(heads=heads, block_size=BLOCK)), client)


def test_the_backend_of_engines_that_have_left_makes_room_for_another_size(models: ServedModels) -> None:
    first = come(models, 1, "a")
    others = [come(models, heads, "b") for heads in (2, 3, 4)]
    with pytest.raises(RefusalError, match="would be size number 5"):
        come(models, 5, "c")
    others[1].workers.discard("b")
    assert not others[1].mover.backend.closed, "an engine that comes back finds its chunks"
    come(models, 5, "c")
    assert [one.mover.backend.closed for one in (first, *others)] == [False, False, True, False]
    assert models.get(others[1].group) is None
    assert others[1].mover.closed
    assert come(models, 3 - 1, "d") is others[0], "those that are there go on"
    with pytest.raises(RefusalError, match="would be size number 5"):
        come(models, 3, "b")


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_groups_of_layers_of_similar_size_share_memory_whatever_the_order_in_which_they_come(
    sizes: list[int], rng: random.Random
) -> None:
    shuffled = rng.sample(sizes, len(sizes))
    slots = {size: memory_size(size, sizes) for size in sizes}
    assert slots == {size: memory_size(size, shuffled) for size in sizes}
    assert all(size <= slot <= 2 * size for size, slot in slots.items())
    assert all(slots[slot] == slot for slot in slots.values()), "a slot is as large as the largest payload in it"
    assert memory_size(max(sizes), ()) == max(sizes), "engines with one group share no memory of another size"


def test_the_backend_with_the_segment_goes_last_and_the_next_one_has_it(models: ServedModels) -> None:
    everyone = [come(models, heads, "a") for heads in (1, 2, 3, 4)]
    assert [bool(one.mover.backend.segment_size) for one in everyone] == [True, False, False, False]
    for one in everyone:
        one.workers.clear()
    come(models, 5, "b")
    assert [one.mover.backend.closed for one in everyone] == [False, True, False, False]
    for heads in (6, 7):
        come(models, heads, "b")
    assert not everyone[0].mover.backend.closed
    last = come(models, 8, "b")
    assert everyone[0].mover.backend.closed
    assert last.mover.backend.segment_size


def test_the_memory_of_a_size_that_no_engine_has_any_more_is_let_go_of_after_a_while(models: ServedModels) -> None:
    with_segment, idle, used = (come(models, heads, "a") for heads in (1, 2, 3))
    for one in (with_segment, idle):
        one.workers.clear()
    models.release_idle(600, now=1000.0)
    models.release_idle(600, now=1599.9)
    assert not idle.mover.backend.closed, "an engine that comes back finds its chunks"
    models.release_idle(600, now=1600.0)
    assert [one.mover.backend.closed for one in (with_segment, idle, used)] == [False, True, False]
    assert models.get(idle.group) is None
    assert come(models, 2, "b").mover.backend is not idle.mover.backend


def test_the_size_that_was_used_last_keeps_its_memory_while_there_is_no_engine_at_all(models: ServedModels) -> None:
    everyone = [come(models, heads, "a") for heads in (1, 2, 3)]
    for one in everyone:
        one.workers.clear()
    for now in (0.0, 700.0):
        models.release_idle(600, now)
    assert [one.mover.backend.closed for one in everyone] == [False, True, False]


def test_the_time_without_engines_begins_anew_when_one_comes_back(models: ServedModels) -> None:
    _, idle, _ = (come(models, heads, "a") for heads in (1, 2, 3))
    idle.workers.clear()
    models.release_idle(600, now=1000.0)
    come(models, 2, "b")
    models.release_idle(600, now=1700.0)
    idle.workers.clear()
    come(models, 3, "b")
    models.release_idle(600, now=1800.0)
    assert not idle.mover.backend.closed
    models.release_idle(600, now=2400.0)
    assert idle.mover.backend.closed


def test_the_time_without_engines_begins_anew_also_where_one_came_and_left_unseen(models: ServedModels) -> None:
    _, idle, _ = (come(models, heads, "a") for heads in (1, 2, 3))
    idle.workers.clear()
    models.release_idle(600, now=1000.0)
    come(models, 2, "b").workers.clear()
    come(models, 3, "b")
    models.release_idle(600, now=1601.0)
    assert not idle.mover.backend.closed


def test_others_register_while_a_backend_is_closed_that_nobody_uses(models: ServedModels) -> None:
    _, idle, _ = (come(models, heads, "a") for heads in (1, 2, 3))
    idle.workers.clear()
    came: list[Any] = []
    idle.mover.backend.close = lambda: came.append(come(models, 3, "b"))
    models.release_idle(600, now=1000.0)
    models.release_idle(600, now=1600.0)
    assert came


def test_groups_whose_engines_have_left_are_not_remembered_without_end(models: ServedModels) -> None:
    for index in range(100):
        hello = Hello(uuid.uuid4().hex, "worker", "x", f"model {index}", 1, 0, BLOCK)
        layout = KVLayout.from_tensors(make_cache(heads=1, block_size=BLOCK))
        models.serve(models.group(hello), layout, "a").workers.clear()
    assert len(list(models)) <= 65


# --- connections -----------------------------------------------------------------------------------------------------

FEW_FILES = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
from pd_cache.wire.channel import ServerChannel
from pd_cache.wire.messages import Refused
server = ServerChannel(sys.argv[1])
print("ready", flush=True)
while True:
    for incoming in server.receive(1, lambda reason: None):
        server.answer(incoming, Refused("here", ""))
"""


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_server_without_descriptors_for_more_connections_keeps_new_ones_out_and_serves_those_that_it_has(
    kind: str, tmp_path: Path
) -> None:
    path, port = tmp_path / "cache.sock", free_port()
    url, family, address = {
        "ipc": (f"ipc://{path}", socket.AF_UNIX, str(path)),
        "tcp": (f"tcp://127.0.0.1:{port}", socket.AF_INET, ("127.0.0.1", port)),
    }[kind]
    process = subprocess.Popen([sys.executable, "-c", FEW_FILES, url], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout, contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout.readline() == "ready\n"
        known = stack.enter_context(StrangePeer(url))
        connections = [stack.enter_context(socket.socket(family)) for _ in range(400)]

        def kept_out(connection: socket.socket) -> bool:
            connection.settimeout(
                0.5 if kind == "tcp" else None
            )  # the server's kernel does not answer, or refuses at once
            try:
                connection.connect(address)
            except OSError:
                return True
            return False

        took = 0
        while not kept_out(connections[took]):
            took += 1
            assert took < 400, "it took more connections than it has descriptors"
            # its known client neither waits nor has to connect again
            assert known.ask(StatusQuery(), PATIENCE_S) == Refused("here", "")
        assert known.ask(StatusQuery(), PATIENCE_S) == Refused("here", "")
        assert took > 100, "it has descriptors for more than that"
        for connection in connections:
            connection.close()

        def served_again() -> bool:
            with StrangePeer(url) as newcomer:
                return newcomer.ask(StatusQuery(), 2) == Refused("here", "")

        wait_for(served_again, what="the server lets clients in again")
        assert known.ask(StatusQuery(), PATIENCE_S) == Refused("here", "")
        assert process.poll() is None


def test_a_server_that_ends_while_it_keeps_newcomers_out_leaves_its_path_as_any_other_does(tmp_path: Path) -> None:
    server = channel.ServerChannel(f"ipc://{tmp_path}/c.sock")
    try:
        server._last_descriptor = 0
        with StrangePeer(server.url):
            wait_for(lambda: not (tmp_path / "c.sock").exists(), what="newcomers are kept out")
    finally:
        server.close()
    assert [path.name for path in tmp_path.iterdir()] == ["c.sock"], "the owner of the address removes it"


def test_a_flood_of_bad_frames_does_not_put_a_channel_to_sleep(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(channel, "_ROUND_BYTES", 10)
    server = channel.ServerChannel(f"ipc://{tmp_path}/c.sock")
    bad: list[str] = []
    try:
        with StrangePeer(server.url) as one:
            for _ in range(50):
                one.send([b"no message"])
            one.say(StatusQuery())
            found: list[Any] = []
            wait_for(lambda: found.extend(server.receive(30, bad.append)) or found, 20)  # type: ignore[func-returns-value]
    finally:
        server.close()
    assert len(bad) == 50
