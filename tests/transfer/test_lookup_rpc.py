"""LookupRpc, against a real master and against masters that speak otherwise."""

import contextlib
import itertools
import socket
import socketserver
import struct
import threading
import time
from contextlib import contextmanager
from functools import partial

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.pool import suspend
from tests.support.waiting import beside, together, wait_for
from tests.transfer.test_store import fresh, opened, put
from transfer.deadlines import end_in
from transfer.errors import Status
from transfer.lookup_rpc import LookupRpc, lookup_rpc, why_silent

PATIENCE = 60.0


def later():
    return time.monotonic() + PATIENCE


def status_of_key(store, seconds=PATIENCE):
    """The answer of a store that does not hold the key."""
    (status,) = store.batched_contains(["k"], end_in(seconds))
    return status


def asks_directly(store):
    """Whether the store has a connection that it may use now; if not, it has been given a reason to make
    one."""
    return status_of_key(store) is Status.MISSING and bool(store._lookup_rpc._idle)


# --- a real master ------------------------------------------------------------------------------------------


def test_it_answers_as_mooncakes_client_does_or_leaves_keys_that_it_cannot_spell_to_it(pool):
    with opened(pool) as (store, staging), contextlib.closing(lookup_rpc(pool.address)) as rpc:
        rpc.connect()
        there = [*fresh(3), *(f"test/{'long' * length}/{fresh(1)[0]}" for length in (30, 60, 900))]
        assert put(store, staging, there) == [Status.OK] * 6
        absent = [*fresh(2), "", "x" * 127, "x" * 128, "x" * 255, "x" * 256, "x" * 4096]

        @settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(st.lists(st.sampled_from(there + absent), min_size=1, max_size=12), st.integers(1, 60))
        def same(keys, times):
            assert list(rpc.ask(keys * times, later()) or b"") == store._client.batch_is_exist(keys * times)

        same()
        assert rpc.ask(there[:1] * 65535, later()) == b"\x01" * 65535
        for keys in (["é"], ["x" * 4097], ["\udcff"], there[:1] * 65536):
            assert rpc.ask(keys, later()) is None
        assert rpc.ask(absent[:1], later()) == b"\x00", "and the connection is as before"


def test_a_store_asks_the_master_itself_once_it_has_asked_through_the_client_over_a_few_connections(
    pool, monkeypatch
):
    with opened(pool, slots=16) as (store, staging):
        keys = fresh(3)
        put(store, staging, keys[:2])
        expected = [Status.OK, Status.OK, Status.MISSING]
        wrong = []

        def work():
            for _ in range(200):
                if (found := store.batched_contains(keys, end_in(PATIENCE))) != expected:
                    wrong.append(found)
                if len(store._lookup_rpc._connections) > 4:
                    wrong.append("too many connections")

        together(*[work] * 16)
        assert wrong == []
        wait_for(lambda: asks_directly(store), "the connection being made")
        store._breaker.well_until = float("inf")  # for however long the next line takes
        monkeypatch.setattr(store._control, "submit", None)
        assert store.batched_contains(keys, end_in(60)) == expected


def test_a_stopped_master_costs_the_deadline_counts_as_down_and_is_found_back_as_is_one_that_is_started_anew(
    make_pool,
):
    pool = make_pool().start()
    with opened(pool, breaker={"failures": 2, "probe_interval_ms": 100}, timeouts={"exist_ms": 300}) as (
        store,
        staging,
    ):
        wait_for(lambda: asks_directly(store), "the connection being made")
        (master,) = psutil.Process(pool.nodes["master"].process.pid).children()
        suspend(master)
        wait_for(lambda: status_of_key(store, 0.3) is Status.TIMEOUT, "a time-out")
        wait_for(lambda: status_of_key(store, 0.3) is Status.POOL_DOWN, "the breaker")
        master.resume()
        wait_for(lambda: status_of_key(store) is Status.MISSING, "the pool being found back")
        wait_for(lambda: asks_directly(store), "the connection being made")
        pool.kill("master")
        assert store._lookup_rpc.ask(["k"], later()) is None
        assert not store._lookup_rpc._connections
        for _ in range(2):
            start = time.monotonic()
            assert status_of_key(store, 0.3) in (Status.TIMEOUT, Status.POOL_DOWN)
            assert time.monotonic() - start < 30, (
                "a bound, not a measurement: Mooncake itself waits for a minute"
            )
        assert not store.available
        pool.start("master")
        wait_for(lambda: asks_directly(store), "a new connection")
        wait_for(lambda: put(store, staging, fresh(1)) == [Status.OK], "the store node being mounted again")


def test_what_the_client_answers_decides_whether_the_pool_is_down_although_the_short_cut_reaches_it(pool):
    with opened(pool, breaker={"failures": 2, "probe_interval_ms": 3_600_000}) as (store, _):
        wait_for(lambda: asks_directly(store), "the connection being made")
        codes = [1, 0, -900, -901]

        class Cut:
            def __getattr__(self, name):
                return getattr(client, name)

            def batch_is_exist(self, keys):
                return codes

        client, store._client = store._client, Cut()
        try:
            store._breaker.well_until = time.monotonic()
            found = store.batched_contains(["a", "b", "c", "d"], end_in(60))
            assert found == [Status.OK, Status.MISSING, Status.POOL_DOWN, Status.POOL_DOWN], (
                "an outage is no miss"
            )
            codes = [-900]
            for _ in range(2):
                assert store.available
                store._breaker.well_until = time.monotonic()
                assert status_of_key(store) is Status.POOL_DOWN
            assert not store.available
        finally:
            store._client = client


def test_a_time_out_of_the_short_cut_is_left_to_the_client_to_judge_unless_the_caller_was_impatient(
    pool, monkeypatch
):
    with opened(pool, timeouts={"exist_ms": 1000}, breaker={"failures": 1}) as (store, _):
        wait_for(lambda: asks_directly(store), "the connection being made")

        def too_late(*_):
            raise TimeoutError

        monkeypatch.setattr(store._lookup_rpc, "ask", too_late)
        store._breaker.well_until = float("inf")
        assert status_of_key(store, 0.1) is Status.TIMEOUT
        assert store._breaker.well_until == float("inf")
        assert status_of_key(store) is Status.TIMEOUT
        assert store.available
        assert status_of_key(store) is Status.MISSING, "of the client"


# --- masters that speak otherwise ---------------------------------------------------------------------------

HEAD = struct.Struct("<4B3I")
TYPES = bytes.fromhex("5d8c5f2a 04 84870b0100")


def answer(number, body, *, error=0, length=None):
    return HEAD.pack(21, 0, error, 0, number, len(body) if length is None else length, 0) + body


def verdicts(*keys):
    return TYPES + bytes([len(keys)]) + b"".join(b"\x01" + bytes([key]) for key in keys)


def there(number):
    """The script of a master that has the key."""
    return [answer(number, verdicts(1))]


class Master(socketserver.ThreadingTCPServer):
    """Answers the first request of each connection with no keys, as a connection's trial has it, and further
    ones by `script`."""

    def __init__(self, script, trial):
        super().__init__(("127.0.0.1", 0), Connection)
        self.script, self.trial = script, trial or (lambda number: answer(number, verdicts()))
        self.accepted = 0

    def verify_request(self, *_):
        self.accepted += 1
        return True


class Connection(socketserver.BaseRequestHandler):
    """Ends with its client's, or where the script has an empty part."""

    def handle(self):
        with contextlib.suppress(OSError):
            for request in itertools.count():
                head = self.request.recv(20, socket.MSG_WAITALL)
                if len(head) < 20:
                    return
                number, _, length, _ = struct.unpack("<4I", head[4:])
                self.request.recv(length, socket.MSG_WAITALL)
                for part in [self.server.trial(number)] if request == 0 else self.server.script(number):
                    if not part:
                        return
                    self.request.sendall(part)


@contextmanager
def asking(script, *, trial=None, clock=time.monotonic):
    """A client with a connection to a master that speaks so, and this master."""
    with Master(script, trial) as master, beside(partial(master.serve_forever, 0.01)):
        rpc = LookupRpc("127.0.0.1", master.server_address[1], clock=clock)
        try:
            rpc.connect()
            yield rpc, master
        finally:
            rpc.close()
            master.shutdown()


def test_why_no_master_answers_is_known_before_mooncakes_client_is_asked(pool):
    assert why_silent(pool.address, PATIENCE) is None
    assert why_silent("etcd://10.0.0.1:2379", 0.1) is None, "elected: not asked"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert why_silent(address, 0.1) == "no connection: timed out"

        def answer():
            for _ in range(2):  # the first connection has been given up
                with server.accept()[0] as connection, contextlib.suppress(OSError):
                    connection.sendall(b"HTTP/1.1 400 Bad Request")

        with beside(answer):
            assert (
                why_silent(address, PATIENCE)
                == "the process there is not a master: its answer begins with b'HT'"
            )
    assert why_silent(address, PATIENCE) == "no connection: Connection refused"


@pytest.mark.parametrize(
    "spoken",
    {
        "an error": lambda number: answer(number, b"no such function", error=3),
        "another protocol": lambda number: b"HTTP/1.1 400 Bad Request\r\n\r\n",
        "the answer to another request": lambda number: answer(number + 1, verdicts(1, 0)),
        "another type": lambda number: answer(number, b"\0" + verdicts(1, 0)[1:]),
        "other types": lambda number: answer(number, verdicts(1, 0).replace(b"\x0b", b"\x0c")),
        "sizes of eight bytes": lambda number: answer(number, verdicts(1, 0).replace(b"\x04", b"\x1c")),
        "fewer keys": lambda number: answer(number, verdicts(1)),
        "more keys": lambda number: answer(number, verdicts(1, 0, 1)),
        "no body": lambda number: answer(number, b""),
        "4 GiB": lambda number: answer(number, verdicts(1, 0), length=2**32 - 1),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("at", ["trial", "request"])
def test_a_master_that_speaks_otherwise_is_left_to_mooncakes_client_for_a_minute(spoken, at):
    script, now = spoken[1], 100.0
    trial = script if at == "trial" else None
    with asking(lambda number: [script(number)], trial=trial, clock=lambda: now) as (rpc, master):
        assert rpc.ask(["a", "b"], now + PATIENCE) is None
        assert not rpc._connections
        now += 59
        assert not rpc.wants_connection
        rpc.connect()
        assert master.accepted == 1
        now += 2
        assert rpc.wants_connection


@pytest.mark.parametrize(
    "master, protocol", [("etcd://127.0.0.1:2379", "tcp"), ("nowhere", "tcp"), ("127.0.0.1:50051", "rdma")]
)
def test_an_elected_master_and_one_that_speaks_rdma_are_left_to_mooncakes_client(
    monkeypatch, master, protocol
):
    monkeypatch.setenv("MC_RPC_PROTOCOL", protocol)
    assert lookup_rpc(master) is None


@pytest.mark.parametrize(
    "parts, kept",
    [
        (lambda number: [answer(number, TYPES + b"\x02\x01\x01\x00" + struct.pack("<i", -900))], True),
        (lambda number: [answer(number, TYPES + b"\x02\x01\x01\x01\x07")], True),
        (lambda number: [answer(number, verdicts(1, 0) + b"\x01\x01")], True),
        (lambda number: [b""], False),
        (lambda number: [b"\x15\x00", b""], False),
    ],
    ids=[
        "an error for one key",
        "neither yes nor no",
        "a key too many",
        "the end",
        "the end within an answer",
    ],
)
def test_an_answer_without_a_verdict_on_each_key_says_nothing(parts, kept):
    with asking(parts) as (rpc, _):
        assert not rpc.wants_connection
        assert rpc.ask(["a", "b"], later()) is None
        assert rpc.wants_connection != kept, "a connection that ended is made anew, at once"


def test_bytes_that_keep_coming_do_not_put_off_the_deadline():
    now, given_up = 100.0, threading.Event()

    def drip(number):
        nonlocal now
        whole = answer(number, verdicts(1))
        for byte in whole[:-1]:
            now += 1
            yield bytes([byte])
        given_up.wait(2)  # a busy machine may deliver all of them at once
        yield whole[-1:]

    with asking(drip, clock=lambda: now) as (rpc, _):
        with pytest.raises(TimeoutError):
            rpc.ask(["a"], now + 3)
        given_up.set()


def test_a_deadline_that_has_passed_costs_no_connection_and_one_that_never_comes_is_fine():
    with asking(there) as (rpc, master):
        with pytest.raises(TimeoutError):
            rpc.ask(["a"], time.monotonic())
        assert rpc.ask(["a"], float("inf")) == b"\x01"
        assert master.accepted == 1


def test_an_answer_that_does_not_come_is_a_time_out_and_its_connection_is_never_used_again():
    with asking(lambda number: []) as (rpc, _):
        with pytest.raises(TimeoutError):
            rpc.ask(["a"], time.monotonic() + 0.05)
        assert not rpc._connections
        assert rpc.ask(["a"], later()) is None


def test_a_connection_that_was_idle_for_long_is_closed_instead_of_used():
    now = 100.0
    with asking(there, clock=lambda: now) as (rpc, _):
        now += 29
        assert rpc.ask(["a"], now + PATIENCE) == b"\x01"
        now += 31
        assert rpc.ask(["a"], now + PATIENCE) is None
        assert rpc.wants_connection
        rpc.connect()
        assert rpc.ask(["a"], now + PATIENCE) == b"\x01"


def test_a_closed_one_closes_also_the_connection_that_was_in_use():
    def close_and_answer(number):
        rpc.close()
        yield answer(number, verdicts(1))

    with asking(close_and_answer) as (rpc, _):
        (taken,) = rpc._connections
        assert rpc.ask(["a"], later()) == b"\x01"
        assert taken.fileno() == -1
        assert rpc.ask(["a"], later()) is None
        assert not rpc.wants_connection
