"""TLS from clients to the proxy: by aiohttp, with a certificate that is read again when it changes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from launch.proxy import Proxy
from launch.proxy.keys import ServerTls, WatchedFiles
from pd_cache.cluster import ProxyConfig, ServerTlsConfig
from pd_cache.errors import ConfigError
from tests.support.etcd import make_certificates
from tests.support.proxy import Node, decodes, scenario, view

Certificates = dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def listening(certificates: Certificates, folder: Path) -> AsyncIterator[tuple[str, WatchedFiles]]:
    """The URL of a proxy with the server's certificate, in the files `cert.pem` and `key.pem` of a folder."""
    give(certificates, folder, "server")
    settings = ServerTlsConfig(cert_file=str(folder / "cert.pem"), key_file=str(folder / "key.pem"))
    node, files = Node(decodes), WatchedFiles()
    await node.start()
    proxy = Proxy(ProxyConfig(health_interval_s=3600, drain_s=0.2, tls=settings), files=files)
    await proxy.setup()
    try:
        proxy.update(view((), [node.url]))
        yield await proxy.listen("127.0.0.1", 0, ServerTls(settings, files).context), files
    finally:
        await proxy.close()
        await node.stop()


def give(certificates: Certificates, folder: Path, name: str, *, key: bool = True) -> None:
    """Writes the certificate of that name into the folder, and its key."""
    for file, source in zip(("cert.pem", "key.pem")[: 2 if key else 1], certificates[name], strict=False):
        (folder / file).write_text(Path(source).read_text())


async def shown(url: str) -> str:
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    return (await asyncio.to_thread(ssl.get_server_certificate, address, timeout=5)).strip()


def test_requests_and_streams_go_over_tls(certificates: Certificates, tmp_path: Path) -> None:
    trusting = ssl.create_default_context(cafile=certificates["ca"][0])

    @scenario
    async def asked() -> None:
        async with (
            listening(certificates, tmp_path) as (url, _),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session,
        ):
            assert url.startswith("https://127.0.0.1:")
            for stream, expected in ((False, b"hello"), (True, b"[DONE]")):
                body = {"prompt": "x", "stream": stream}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    assert response.status == 200
                    assert expected in await response.read()

    asked()


def test_a_new_certificate_is_shown_to_the_next_client_and_a_bad_one_changes_nothing(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pems = {name: Path(pair[0]).read_text().strip() for name, pair in certificates.items()}

    @scenario
    async def asked() -> None:
        async with listening(certificates, tmp_path) as (url, files):
            assert await shown(url) in pems["server"]
            give(certificates, tmp_path, "client", key=False)
            files.look()  # the certificate of one, the key of the other
            assert "key values mismatch" in caplog.text
            assert await shown(url) in pems["server"]
            give(certificates, tmp_path, "client")
            files.look()
            assert await shown(url) in pems["client"]

    asked()


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("missing", "server", "No such file or directory: .*missing"),
        ("server", "missing", "No such file or directory: .*missing"),
        ("server", "client", "key values mismatch"),
        ("server", "encrypted", "a pass phrase"),
        ("broken", "server", "cert_file must be a certificate"),
    ],
)
def test_files_that_are_no_certificate_and_key_are_refused(
    certificates: Certificates, tmp_path: Path, cert: str, key: str, message: str
) -> None:
    encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n"
    (tmp_path / "encrypted").write_text(encrypted)
    (tmp_path / "broken").write_text("nonsense")
    own = {name: (str(tmp_path / name),) * 2 for name in ("missing", "encrypted", "broken")}
    cert_file, key_file = (certificates | own)[cert][0], (certificates | own)[key][1]
    with pytest.raises(ConfigError, match=f"proxy.tls: .*{message}"):
        ServerTls(ServerTlsConfig(cert_file=cert_file, key_file=key_file), WatchedFiles())
