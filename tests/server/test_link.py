"""The two ends of a link: requests and answers over ZMQ, descriptors and the end of a client over a Unix socket."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cache.errors import RefusedError
from pd_cache.metrics import CacheMetrics
from pd_cache.server.link import ClientLink, Incoming, ServerLink
from pd_cache.server.protocol import Answer, Done, EndSession, Lookup, RefusalError, StatusQuery, Unregister
from tests.support.waiting import wait_for

LATE_S = 60.0
Handle = Callable[[Incoming], Answer | None]


class End:
    """A server's end whose handler each test chooses."""

    def __init__(self, folder: Path) -> None:
        self.handle: Handle = lambda incoming: Done()
        self.gone: list[bytes] = []
        self.closed = False
        self.path = folder / "fds"
        self.link = ServerLink(
            f"ipc://{folder}/s",
            lambda incoming: self.handle(incoming),
            CacheMetrics(),
            "server",
            path=self.path,
            gone=self.gone.append,
        )
        self.link.start()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.link.stop(10)
            self.link.close()


@pytest.fixture
def end(tmp_path: Path) -> Iterator[End]:
    one = End(tmp_path)
    try:
        yield one
    finally:
        one.close()


@contextlib.contextmanager
def connected(end: End, name: str = "", *, attached: bool = True) -> Iterator[ClientLink]:
    client = ClientLink(end.link.url, None, name or uuid.uuid4().hex, lambda: None)
    try:
        wait_for(lambda: client.watch(0.1), what="the connection")
        assert client.request(StatusQuery(), LATE_S).outcome() == Done()
        assert not attached or client.attach(str(end.path))
        yield client
    finally:
        client.close()


@pytest.fixture
def client(end: End) -> Iterator[ClientLink]:
    with connected(end) as one:
        yield one


def pipes() -> int:
    """Pipes that this process, and the server in it, has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:")
    return found


def test_descriptors_come_with_their_request_and_are_closed_when_its_handler_returns(
    end: End, client: ClientLink
) -> None:
    received: list[bytes] = []

    def handle(incoming: Incoming) -> Answer:
        received.extend(os.read(descriptor, 10) for descriptor in incoming.descriptors or ())
        if len(received) > 2:
            raise ValueError("after the second request")
        return Done()

    end.handle = handle
    before = pipes()
    for outcome in (Done(), Done(), "failed"):
        read, write = os.pipe()
        os.write(write, b"hello")
        os.close(write)
        assert client.request(Unregister(), LATE_S, [read]).outcome() == outcome
        os.close(read)
    assert received == [b"hello"] * 3
    wait_for(lambda: pipes() == before, what="the server's duplicates being closed")


def test_a_client_is_gone_once_when_its_unix_socket_ends(end: End) -> None:
    with connected(end, "a" * 32), connected(end, "b" * 32, attached=False):
        wait_for(lambda: end.link.is_attached(b"a" * 32))
        assert not end.link.is_attached(b"b" * 32)
        assert not end.gone
    wait_for(lambda: end.gone == [b"a" * 32])
    assert not end.link.is_attached(b"a" * 32)


def test_a_client_that_attaches_again_is_not_gone(end: End, client: ClientLink) -> None:
    with connected(end, "a" * 32) as one:
        wait_for(lambda: end.link.is_attached(b"a" * 32))
        before = end.link._attached[b"a" * 32]
        with connected(end, "a" * 32) as other:
            wait_for(lambda: end.link._attached[b"a" * 32] is not before)
            one.detach()
            assert other.request(Unregister(), LATE_S, ()).outcome() == Done()
            assert not end.gone
    wait_for(lambda: end.gone == [b"a" * 32])


def test_the_end_of_the_server_wakes_the_thread_that_watches(end: End, client: ClientLink) -> None:
    end.close()
    wait_for(lambda: client.watch(LATE_S) is False, what="the server's end being seen")


def test_without_a_unix_socket_a_request_with_descriptors_is_refused_at_once(end: End) -> None:
    with connected(end, attached=False) as client:
        assert not client.attach(str(end.path.with_name("nobody")))
        with pytest.raises(RefusedError, match="share a host"):
            client.request(Unregister(), LATE_S, ()).result()


def test_a_handler_that_takes_long_for_one_clients_memory_holds_up_that_client_only(end: End) -> None:
    go_on = threading.Event()

    def handle(incoming: Incoming) -> Answer:
        assert incoming.descriptors is None or incoming.client != b"a" * 32 or go_on.wait(60)
        return Done()

    end.handle = handle
    with connected(end, "a" * 32) as slow, connected(end) as other:
        held_up = slow.request(Unregister(), LATE_S, ())
        assert other.request(Unregister(), LATE_S, ()).outcome() == Done()
        assert slow.request(StatusQuery(), LATE_S).outcome() == Done()
        assert not held_up.query()
        go_on.set()
        assert held_up.outcome() == Done()


def test_errors_of_a_handler_are_answers_and_the_next_request_is_served(end: End, client: ClientLink) -> None:
    def handle(incoming: Incoming) -> Answer:
        if isinstance(incoming.request, Lookup):
            raise RefusalError("busy", "later")
        if isinstance(incoming.request, Unregister):
            raise KeyError("odd")
        return Done()

    end.handle = handle
    assert client.request(Lookup("", b""), LATE_S).outcome() == "busy"
    assert client.request(Unregister(), LATE_S).outcome() == "failed"
    assert client.request(StatusQuery(), LATE_S).outcome() == Done()


def test_an_answer_that_is_late_is_dropped(end: End, client: ClientLink) -> None:
    kept: list[Incoming] = []

    def handle(incoming: Incoming) -> Answer | None:
        kept.append(incoming)
        return None if len(kept) == 1 else Done()

    end.handle = handle
    late = client.request(StatusQuery(), 0.05)
    assert late.outcome() == "timeout"
    end.link.answer(kept[0], Done())
    assert client.request(StatusQuery(), LATE_S).outcome() == Done()
    assert late.outcome() == "timeout"


def test_many_threads_get_their_own_answers(end: End, client: ClientLink) -> None:
    end.handle = lambda incoming: Done() if isinstance(incoming.request, StatusQuery) else None
    outcomes: list[object] = []

    def ask() -> None:
        for _ in range(200):
            client.notify(EndSession("nothing"))
            outcomes.append(client.request(StatusQuery(), LATE_S).outcome())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [Done()] * 1600


def test_after_close_requests_fail_at_once_and_close_may_be_called_again(client: ClientLink) -> None:
    client.close()
    client.close()
    client.nudge()
    assert client.request(StatusQuery(), LATE_S).outcome() == "server_lost"
    assert not client.notify(EndSession("x"))
