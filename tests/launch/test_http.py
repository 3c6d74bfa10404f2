"""Asking a node for its report: bounded however it answers, and asked of that node alone."""

import socketserver
import threading
from contextlib import contextmanager, suppress

import pytest

from launch.http import Access, BadStatus, fetch, fetch_lines
from tests.support.waiting import beside


@contextmanager
def answering(serve):
    """A server on loopback; its URL, and the heads of the requests that came."""
    heads = []
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            with suppress(OSError):
                heads.append(self.request.recv(65536))
                serve(self.request, over)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server, beside(server.serve_forever):
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", heads
        finally:
            over.set()
            server.shutdown()


def broken_off(data):
    def serve(connection, over):
        connection.sendall(data)
        over.wait()

    return serve


def drop_by_drop(data):
    def serve(connection, over):
        for index in range(len(data)):
            if over.wait(0.02):
                return
            connection.sendall(data[index : index + 1])

    return serve


def whole(data):
    return lambda connection, _: connection.sendall(data)


def all_lines(url, timeout):
    return list(fetch_lines(url, timeout))


@pytest.mark.parametrize(
    "ask, serve, error, why",
    [
        (fetch, broken_off(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"), TimeoutError, "no whole answer within 0.3 s"),
        (fetch, broken_off(b"HTTP/1.1 200 OK\r\nX: "), TimeoutError, "no whole answer"),
        (fetch, drop_by_drop(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000), TimeoutError, "no whole answer within 0.3 s"),
        (fetch, whole(b"SSH-2.0-x\r\n"), ValueError, "does not speak HTTP"),
        (fetch, whole(b""), ConnectionResetError, "closed the connection without an answer"),
        (fetch, whole(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"), ConnectionResetError, "6 bytes early"),
        (fetch, whole(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nabc"), ConnectionResetError, "bytes early"),
        (fetch, whole(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc"), ConnectionResetError, "answer ended early"),
        (all_lines, broken_off(b"HTTP/1.1 200 OK\r\n\r\na\nb"), TimeoutError, "no whole answer"),
        (all_lines, whole(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\na\nb\r\n"), ConnectionResetError, "answer ended early"),
        (all_lines, whole(b"HTTP/1.1 503 Not Now\r\nContent-Length: 0\r\n\r\n"), BadStatus, "503"),
    ],
    ids=["half a body", "half of the headers", "a body drop by drop", "no HTTP", "nothing", "not all of it", "an absurd length", "half a chunk", "half a list", "a list without its last chunk", "a list refused"],
)  # fmt: skip
def test_an_answer_has_a_deadline_and_must_be_http_and_a_list_a_good_status(ask, serve, error, why):
    with answering(serve) as (url, _), pytest.raises(error, match=why):
        ask(f"{url}/health", 0.3 if error is TimeoutError else 60)


def test_a_key_goes_to_the_node_and_not_to_a_proxy_of_the_environment(monkeypatch):
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    with answering(whole(body)) as (proxy, of_proxy), answering(whole(body)) as (node, of_node):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("no_proxy", "")
        assert fetch(f"{node}/metrics?a=1", 60, Access("secret")) == b"ok"
    assert not of_proxy
    assert of_node[0].startswith(b"GET /metrics?a=1 HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in of_node[0]


def test_a_redirect_is_not_followed():
    with answering(whole(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as (elsewhere, of_elsewhere):
        moved = f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}/\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(whole(moved)) as (node, _), pytest.raises(BadStatus) as raised:
            fetch(node, 60, Access("secret"))
    assert raised.value.status == 302
    assert not of_elsewhere


def test_lines_come_as_they_arrive_and_a_list_that_ends_early_is_no_list():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
    with answering(whole(head + b"a\nbc\n\nd\r\n")) as (url, _):
        assert list(fetch_lines(url, 60)) == [b"a", b"bc", b"", b"d\r"]
    with answering(whole(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (1 << 17) + b"\na")) as (url, _):
        assert [len(line) for line in fetch_lines(url, 60)] == [1 << 17, 1], "another program's key"
    with answering(whole(head + b"a\nbc\n")) as (url, _):
        lines = fetch_lines(url, 60)
        assert [next(lines), next(lines)] == [b"a", b"bc"]
        with pytest.raises(ConnectionResetError, match="4 bytes early"):
            next(lines)
