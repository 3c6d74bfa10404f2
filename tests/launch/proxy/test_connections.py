"""Clients' connections: their number, and deadlines for heads, for idling and for reading what was sent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from launch.descriptors import descriptors_for
from launch.proxy import Proxy
from launch.proxy.capacity import fitted
from launch.proxy.connections import Connection, Connections, Why
from launch.proxy.listener import Listener
from launch.proxy.tls import ServerTls
from launch.proxy.watched_files import WatchedFiles
from pd_cache.cluster import ProxyConfig, ServerTlsConfig
from pd_cache.errors import ConfigError
from tests.support.etcd import make_certificates
from tests.support.proxy import Node, begin, decodes, scenario, until, view

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n"
BODY = b'{"prompt": "x"}'


class Table(Connections):
    """Remembers why it closed what."""

    def __init__(self, limit: int = 3) -> None:
        self.closed_as: list[tuple[str, Why]] = []
        self.whys: list[Why] = []
        super().__init__(limit, header_s=10, idle_s=75, write_s=30, on_close=self.whys.append)

    def open(self, name: str, now: float = 0.0) -> Connection | None:
        if not self.has_room(now):
            return None
        connection = self.opened(lambda: self.closed_as.append((name, self.whys[-1])), now)
        self.carries(connection, name)
        return connection

    def serve(self, name: str, now: float = 0.0) -> None:
        self.began(name, now)
        self.arrived(name)


# --- the table -------------------------------------------------------------------------------------------------------


def test_a_head_has_ten_seconds_from_the_connection_or_from_its_first_byte() -> None:
    table = Table()
    table.open("new")
    kept = table.open("kept")
    assert kept is not None
    table.serve("kept")
    table.ended("kept", 20.0)
    table.close_overdue(10.0)
    assert table.closed_as == []
    table.close_overdue(10.1)
    assert table.closed_as == [("new", Why.NO_HEAD)]
    table.received(kept, 60.0)
    table.received(kept, 69.0)  # another byte gives no more time
    table.close_overdue(70.1)
    assert table.closed_as[1:] == [("kept", Why.NO_HEAD)]
    assert len(table) == 0


def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    table = Table()
    table.open("idle")
    table.open("busy")
    for name in ("idle", "busy"):
        table.serve(name)
    table.ended("idle", 0.0)
    table.close_overdue(1000.0)
    assert table.closed_as == [("idle", Why.IDLE)]


def test_a_client_that_does_not_read_is_cut_off() -> None:
    table = Table()
    table.open("reads not")
    table.serve("reads not")
    table.writing("reads not", 0.0)
    table.wrote("reads not")
    table.writing("reads not", 50.0)
    table.close_overdue(80.0)
    assert table.closed_as == []
    table.close_overdue(80.1)
    assert table.closed_as == [("reads not", Why.UNREAD)]


def test_of_too_many_connections_the_one_that_owes_a_request_for_longest_goes() -> None:
    table = Table(3)
    table.open("busy")
    table.serve("busy")
    table.open("slow body", 1.0)
    table.began("slow body", 1.1)
    table.open("slow head", 1.2)
    assert table.open("new", 3.9) is None, "each client has a while"
    assert table.open("new", 4.0) is not None
    assert table.closed_as == [("slow body", Why.TOO_MANY)]
    assert table.open("another", 4.2) is not None
    assert table.closed_as[1:] == [("slow head", Why.TOO_MANY)]
    for name in ("new", "another"):
        table.serve(name)
    assert table.open("one too many", 99.0) is None, "those that are served are not cut off"
    table.ended("new", 99.0)
    assert table.open("one too many", 102.0) is not None


@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["open", "began", "arrived", "ended", "closed", "received"])))
)
def test_there_are_never_more_connections_than_allowed_and_none_is_forgotten(events: list[tuple[int, str]]) -> None:
    table, there = Table(3), {}
    for now, (number, what) in enumerate(events):
        name = str(number)
        if what == "open" and name not in there:
            connection = table.open(name, float(now))
            if connection is not None:
                there[name] = connection
        elif what == "arrived":
            table.arrived(name)
        elif what in ("began", "ended"):
            getattr(table, what)(name, float(now))
        elif name in there:
            table.closed(there.pop(name)) if what == "closed" else table.received(there[name], float(now))
        for gone, _ in table.closed_as:
            there.pop(gone, None)
        table.closed_as.clear()
        assert len(table) == len(there) <= 3
    table.whys.append(Why.IDLE)
    table.close_all()
    assert len(table) == 0


# --- how many fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("descriptors", "requests"), [(1 << 20, 1024), (4352, 1024), (1024, 192), (256, 48), (64, 12)])
def test_requests_fit_under_the_limit_of_open_files(descriptors: int, requests: int) -> None:
    config, connections = fitted(ProxyConfig(), descriptors)
    assert config.max_requests == requests
    assert connections >= 2 * requests
    assert connections + 2 * requests < descriptors


def test_fewer_requests_than_wanted_are_logged_with_what_they_need(caplog: pytest.LogCaptureFixture) -> None:
    fitted(ProxyConfig(), descriptors_for(1024))
    assert not caplog.messages
    fitted(ProxyConfig(), 1024)
    (line,) = caplog.messages
    assert "at most 192 requests" in line
    assert "need 4352" in line


# --- with sockets ----------------------------------------------------------------------------------------------------


class Running:
    def __init__(self, proxy: Proxy, url: str, node: Node, files: WatchedFiles) -> None:
        self.proxy, self.url, self.node, self.files = proxy, url, node, files
        self.address = ("127.0.0.1", int(url.rpartition(":")[2]))

    def closed(self, why: Why) -> float:
        name = "pd_cache_proxy_connections_closed_total"
        return self.proxy.metrics.registry.get_sample_value(name, {"why": why.value}) or 0.0

    async def connect(self, *data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.writelines(data)
        return reader, writer


@asynccontextmanager
async def listening(limit: int = 100, **config: Any) -> AsyncIterator[Running]:
    node = Node(decodes)
    await node.start()
    settings = ProxyConfig(**{"health_interval_s": 3600, "drain_s": 0.2, **config})
    connections = Connections(
        limit, header_s=settings.header_timeout_s, idle_s=settings.idle_timeout_s, write_s=settings.write_timeout_s
    )
    files = WatchedFiles()
    tls = None if settings.tls is None else ServerTls(settings.tls, files).current
    proxy = Proxy(settings, files=files, connections=connections)
    listener = Listener(proxy.app, connections, tls, settings.header_timeout_s)
    try:
        await listener.setup()
        proxy.update(view((), [node.url]))
        yield Running(proxy, await listener.start("127.0.0.1", 0), node, files)
    finally:
        await listener.close()
        await node.stop()
        assert len(connections) == 0


@scenario
async def test_a_head_that_comes_byte_by_byte_is_cut_off() -> None:
    async with listening(header_timeout_s=0.1) as c:
        reader, writer = await c.connect(b"POST /v1/comp")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        assert c.closed(Why.NO_HEAD) == 1
        writer.close()


@scenario
async def test_a_connection_is_kept_for_the_next_request_and_closed_when_none_comes() -> None:
    async with listening(idle_timeout_s=0.1) as c:
        reader, writer = await c.connect(HEAD, BODY, HEAD, BODY)
        answers = await asyncio.wait_for(reader.read(), 10)
        assert answers.count(b"HTTP/1.1 200 OK") == 2
        assert c.closed(Why.IDLE) == 1
        writer.close()


@scenario
async def test_a_client_that_does_not_read_is_cut_off_long_before_its_deadline() -> None:
    async def floods(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    async with listening(write_timeout_s=0.2, request_timeout_s=300) as c:
        c.node.default = floods
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, c.address)
            await asyncio.get_running_loop().sock_sendall(client, HEAD + BODY)
            await until(lambda: c.closed(Why.UNREAD) == 1, "cut off", 10)
            await until(lambda: not c.proxy.deliveries.running, "the request ended")


@scenario
async def test_more_connections_than_allowed_cost_those_that_wait_and_no_request() -> None:
    async with listening(8) as c, aiohttp.ClientSession() as session:
        waiting = [await c.connect(HEAD[:20]) for _ in range(4)] + [await c.connect(HEAD) for _ in range(8)]
        async with session.post(f"{c.url}/v1/completions", data=BODY) as response:
            assert response.status == 200
        assert c.closed(Why.TOO_MANY) >= 5
        assert len(c.proxy.connections) <= 8
        for _, writer in waiting:
            writer.close()


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def tls_of(certificates: dict[str, tuple[str, str]], folder: Path, name: str = "server") -> ServerTlsConfig:
    """The pair of that name, in files that a test may overwrite."""
    files = [folder / "cert.pem", folder / "key.pem"]
    for file, source in zip(files, certificates[name], strict=True):
        file.write_text(Path(source).read_text())
    return ServerTlsConfig(cert_file=str(files[0]), key_file=str(files[1]))


def test_requests_and_streams_go_over_tls(certificates: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    trusting = ssl.create_default_context(cafile=certificates["ca"][0])

    @scenario
    async def asked() -> None:
        async with (
            listening(tls=tls_of(certificates, tmp_path)) as c,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session,
        ):
            assert c.url.startswith("https://")
            for stream, expected in ((False, b"hello"), (True, b"[DONE]")):
                body = {"prompt": "x", "stream": stream}
                async with session.post(f"{c.url}/v1/completions", json=body) as response:
                    assert response.status == 200
                    assert expected in await response.read()

    asked()


def test_a_handshake_that_does_not_come_has_a_deadline_and_counts_as_a_connection(
    certificates: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    @scenario
    async def asked() -> None:
        async with listening(tls=tls_of(certificates, tmp_path), header_timeout_s=0.3) as c:
            reader, writer = await c.connect(b"\x16\x03")
            await until(lambda: len(c.proxy.connections) == 1, "it counts")
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
            plain, writer = await c.connect(HEAD, BODY)
            answer = b""
            with contextlib.suppress(ConnectionError):  # what is no TLS gets an alert or a reset
                answer = await asyncio.wait_for(plain.read(), 10)
            assert b"HTTP" not in answer
            writer.close()
            await until(lambda: len(c.proxy.connections) == 0, "both are gone")

    asked()


def test_a_new_certificate_is_shown_to_the_next_client_and_a_bad_one_changes_nothing(
    certificates: dict[str, tuple[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shown(address: tuple[str, int]) -> str:
        return ssl.get_server_certificate(address, timeout=5)

    def pem(name: str) -> str:
        return Path(certificates[name][0]).read_text().strip()

    @scenario
    async def asked() -> None:
        settings = tls_of(certificates, tmp_path)
        async with listening(tls=settings) as c:
            assert (await asyncio.to_thread(shown, c.address)).strip() in pem("server")
            Path(settings.cert_file).write_text(Path(certificates["client"][0]).read_text())
            c.files.look()  # the certificate of one, the key of the other
            assert "is not the key of" in caplog.text
            assert (await asyncio.to_thread(shown, c.address)).strip() in pem("server")
            Path(settings.key_file).write_text(Path(certificates["client"][1]).read_text())
            c.files.look()
            assert (await asyncio.to_thread(shown, c.address)).strip() in pem("client")

    asked()


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("missing", "server", r"tls\.cert_file: .*missing: cannot be read: No such file"),
        ("server", "missing", r"tls\.key_file: .*missing: cannot be read: No such file"),
        ("key", "server", r"tls\.cert_file: .*: holds no certificate in PEM format"),
        ("server", "cert", r"tls\.key_file: .*: holds no private key in PEM format"),
        ("server", "client", r"is not the key of the first certificate"),
        ("server", "encrypted", r"tls\.key_file: .*: the key needs a pass phrase"),
        ("broken", "server", r"proxy\.tls: .* cannot be used"),
    ],
)
def test_files_that_are_no_certificate_and_key_are_told_by_name(
    certificates: dict[str, tuple[str, str]], tmp_path: Path, cert: str, key: str, message: str
) -> None:
    certs = {name: pair[0] for name, pair in certificates.items()}
    keys = {name: pair[1] for name, pair in certificates.items()}
    (tmp_path / "encrypted").write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    others = {name: str(tmp_path / name) for name in ("missing", "encrypted", "broken")}
    certs |= {**others, "key": keys["server"]}
    keys |= {**others, "cert": certs["server"]}
    with pytest.raises(ConfigError, match=message):
        ServerTls(ServerTlsConfig(cert_file=certs[cert], key_file=keys[key]), WatchedFiles())


@pytest.mark.parametrize(("descriptors", "most"), [(64, 3), (100_000, 32)])
def test_browsers_that_follow_the_page_leave_most_connections_to_clients(descriptors: int, most: int) -> None:
    config, room = fitted(ProxyConfig(), descriptors)
    assert config.ui_followers == most
    assert most <= room / 8
