"""The two ends of a link: requests and answers over ZMQ, descriptors and the end of a client over a Unix
socket."""

import contextlib
import os
import threading
import uuid
from functools import partial

import pytest

from pd_cache.errors import ServerRefusedError
from pd_cache.metrics import CacheMetrics
from pd_cache.server.link import ClientLink, ServerLink
from pd_cache.server.protocol import (
    MAX_FRAME,
    Done,
    EndSession,
    Lookup,
    Refused,
    Unregister,
)
from tests.support.leaks import open_files
from tests.support.waiting import together, wait_for

LATE_S = 60.0
NAME = b"a" * 32


def outcome(client, future):
    """Returns the answer, or the word that says why there is none."""
    client.wait(future)
    return future.answer if isinstance(future.answer, Done) else future.answer.reason


class End:
    """A server's end whose handler each test chooses."""

    def __init__(self, folder):
        self.handle = lambda incoming: Done()
        self.gone = []
        self.closed = False
        url = f"ipc://{folder}/s"
        self.link = ServerLink(url, lambda incoming: self.handle(incoming), self.gone.append, CacheMetrics())
        self.link.start()

    def close(self):
        if not self.closed:
            self.closed = True
            self.link.stop(10)
            self.link.close()

    @contextlib.contextmanager
    def connected(self, name=b"", *, attached=True):
        own = name.decode() or uuid.uuid4().hex
        with contextlib.closing(ClientLink(self.link.url, None, own, lambda: None)) as client:
            assert not attached or client.attach()
            wait_for(
                lambda: outcome(client, client.request(EndSession("x"), LATE_S)) == Done(), "ZMQ's connection"
            )
            yield client


@pytest.fixture
def end(tmp_path):
    with contextlib.closing(End(tmp_path)) as one:
        yield one


@pytest.fixture
def client(end):
    with end.connected() as one:
        yield one


def test_descriptors_come_with_their_request_and_are_closed_when_its_handler_returns(end, client):
    received = []

    def handle(incoming):
        received.extend(os.read(descriptor, 10) for descriptor in incoming.descriptors or ())
        if len(received) > 2:
            raise ValueError("after the second request")
        return Done()

    end.handle = handle
    before = open_files("pipe:")
    for expected in (Done(), Done(), "failed"):
        read, write = os.pipe()
        os.write(write, b"hello")
        os.close(write)
        assert outcome(client, client.request(Unregister(), LATE_S, [read])) == expected
        os.close(read)
    assert received == [b"hello"] * 3
    wait_for(lambda: open_files("pipe:") == before, "the server's duplicates being closed")


def test_a_client_is_gone_once_when_its_last_unix_socket_ends(end):
    with end.connected(NAME) as one, end.connected(b"b" * 32, attached=False):
        wait_for(lambda: NAME in end.link._attached)
        assert b"b" * 32 not in end.link._attached
        before = end.link._attached[NAME]
        with end.connected(NAME) as other:
            wait_for(lambda: end.link._attached[NAME] is not before)
            one.detach()
            wait_for(lambda: len(end.link._connections) == 1)
            assert outcome(other, other.request(Unregister(), LATE_S, ())) == Done()
            assert not end.gone, "it has attached again"
    wait_for(lambda: end.gone == [NAME])
    assert not end.link._attached


def test_the_end_of_the_unix_socket_alone_is_the_end_of_the_server(end):
    with end.connected(NAME) as client:
        wait_for(lambda: NAME in end.link._attached)
        assert client.watch(0.0)
        end.link._attached[NAME].shutdown(2)
        wait_for(lambda: not client.watch(LATE_S), "the server's end being seen")


def test_without_a_unix_socket_a_request_with_descriptors_fails_at_once(end):
    with end.connected(attached=False) as client:
        assert outcome(client, client.request(Unregister(), LATE_S, ())) == "server_lost"
        end.close()
        assert not client.attach()


def test_a_handler_that_takes_long_for_one_clients_memory_holds_up_that_client_only(end):
    go_on = threading.Event()

    def handle(incoming):
        assert incoming.descriptors is None or incoming.client != NAME or go_on.wait(60)
        return Done()

    end.handle = handle
    with end.connected(NAME) as slow, end.connected() as other:
        held_up = slow.request(Unregister(), LATE_S, ())
        assert outcome(other, other.request(Unregister(), LATE_S, ())) == Done()
        assert outcome(slow, slow.request(EndSession("x"), LATE_S)) == Done()
        assert not slow.look(held_up)
        go_on.set()
        assert outcome(slow, held_up) == Done()


def test_an_answer_that_is_late_is_dropped(end, client):
    kept = []

    def handle(incoming):
        kept.append(incoming)
        return None if len(kept) == 1 else Done()

    end.handle = handle
    late = client.request(EndSession("x"), 0.05)
    assert outcome(client, late) == "timeout"
    end.link.answer(kept[0].client, kept[0].number, Done())
    assert outcome(client, client.request(EndSession("x"), LATE_S)) == Done()
    assert outcome(client, late) == "timeout"


def test_what_is_not_sent_is_refused_at_once(end, client):
    with pytest.raises(ServerRefusedError, match="at most"):
        client.request(Lookup("x" * MAX_FRAME, ()), LATE_S).result()
    end.handle = lambda incoming: None
    futures = [client.request(EndSession("x"), LATE_S) for _ in range(3)]
    client.fail_all("the server is gone")
    assert {outcome(client, one) for one in futures} == {"server_lost"}
    client.close()
    client.close()
    client.nudge()
    assert outcome(client, client.request(EndSession("x"), LATE_S)) == "server_lost"
    client.notify(EndSession("x"))


def test_many_threads_get_their_own_answers(end, client):
    def handle(incoming):
        if isinstance(incoming.request, Lookup):
            return Refused("invalid", incoming.request.session)
        return None

    end.handle = handle
    outcomes = []

    def ask(thread):
        for number in range(200):
            client.notify(EndSession("nothing"))
            future = client.request(Lookup(f"{thread} {number}", ()), LATE_S)
            client.wait(future)
            with pytest.raises(ServerRefusedError) as refused:
                future.result()
            outcomes.append(str(refused.value) == f"{thread} {number}")

    together(*(partial(ask, str(index)) for index in range(8)))
    assert outcomes == [True] * 1600
    assert not client._futures, "what was answered is forgotten"
