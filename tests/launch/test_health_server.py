"""`/health` and `/metrics` of store nodes and cache servers."""

import contextlib
import socket
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge

from launch.run.health_server import exposed
from launch.run.supervise import RoleError
from tests.support.cluster import fetched
from tests.support.waiting import PATIENCE_S, wait_for


@contextmanager
def server(*told):
    registry = CollectorRegistry()
    Gauge("answer", "", registry=registry).set(42)
    answers = list(told)
    with exposed("127.0.0.1", 0, registry, lambda: answers.pop(0)) as (host, port):
        yield f"http://{host}:{port}"


def test_a_node_that_starts_is_not_ready_and_one_without_its_pool_is():
    with server(None, False, True) as url:
        told = [fetched(f"{url}/health") for _ in range(3)]
    seen = [(answer.status, answer.body["status"]) for answer in told]
    assert seen == [(503, "starting"), (200, "degraded"), (200, "ok")]


def test_metrics_and_nothing_else_are_there():
    with server() as url:
        assert fetched(f"{url}/metrics?x=1").body.endswith("answer 42.0\n")
        assert fetched(f"{url}/").status == fetched(f"{url}/metrics/x").status == 404


def test_a_port_in_use_is_named():
    with server() as url, pytest.raises(RoleError, match=f"port {url.rpartition(':')[2]} of 127.0.0.1"):
        exposed("127.0.0.1", int(url.rpartition(":")[2]), CollectorRegistry(), lambda: True).__enter__()


def test_silent_connections_take_all_places_but_no_thread_more():
    """Sixteen clients say nothing. The next is turned away at once, and let in as soon as one of them
    goes."""
    with server(*[True] * 500) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with contextlib.ExitStack() as stack:
            *_, one_more = (
                stack.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(17)
            )
            one_more.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert one_more.recv(1) == b""

        def let_in():
            try:
                return fetched(f"{url}/health").status == 200
            except OSError:
                return False

        wait_for(let_in)
