"""Keys of clients and of those who watch, the proxy's certificate, and files of them that change."""

import asyncio
import contextlib
import os
import socket
import ssl
import threading
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import aiohttp
import pytest

from launch.openai import ApiError
from launch.proxy import keys as keys_module
from launch.proxy.app import Proxy
from launch.proxy.keys import Keys, ServerTls, WatchedFiles, read_keys, read_node_key
from pd_cache.cluster import ProxyConfig, ServerTlsConfig
from pd_cache.errors import ConfigError
from tests.support.proxy import (
    Node,
    bearer,
    both_faces,
    cluster,
    decode_at,
    decodes,
    files_of,
    look_twice,
    proxy_process,
    scenario,
    view,
)
from tests.support.waiting import PATIENCE_S, wait_for

KEY = "sk-0123456789abcdef"


class KeysFile:
    """A file of clients' keys, and those in force."""

    def __init__(self, folder, text=f"alice {KEY}"):
        self.path, self.files = folder / "keys", WatchedFiles()
        self.path.write_text(text)
        self.keys = Keys(ProxyConfig(api_keys_file=str(self.path)), self.files)

    def client(self, key):
        return self.keys.client(f"Bearer {key}").name


@pytest.fixture
def keys(tmp_path):
    return KeysFile(tmp_path)


def test_a_key_names_its_client(tmp_path):
    keys = KeysFile(tmp_path, f"# clients\n\nalice {KEY}\nbob   {KEY}x  # the other\n").keys
    assert keys.client(f"Bearer {KEY}").name == "alice"
    assert keys.client(f"bearer {KEY}x") == ("bob", "")
    for wrong in (None, "", KEY, f"Basic {KEY}", f"Bearer {KEY}y", "Bearer", "Bearer \udce4"):
        with pytest.raises(ApiError) as refused:
            keys.client(wrong)
        assert refused.value.status == 401
        assert KEY not in refused.value.message


@pytest.mark.parametrize(
    "read, text, told",
    [
        (read_keys, None, "cannot be read"),
        (read_keys, "", "holds no keys"),
        (read_keys, "alice\n", ":1: expected `NAME KEY`"),
        (read_keys, "alice short\n", ":1: expected `NAME KEY`"),
        (read_keys, f"al/ice {KEY}\n", ":1: expected `NAME KEY`"),
        (read_keys, f"alice {KEY} a/b\n", ":1: expected `NAME KEY`.* a client's tenant may follow"),
        (read_keys, f"alice {KEY} a b\n", ":1: expected `NAME KEY`"),
        (
            lambda file: read_keys(file, "monitor_keys_file"),
            f"alice {KEY} a\n",
            "monitor_keys_file.*:1: expected `NAME KEY`",
        ),
        (read_keys, f"alice {KEY}\nalice {KEY}x\n", ":2: the name alice"),
        (read_keys, f"alice {KEY}\nbob {KEY}\n", ":2: the name bob or its key is already on another line"),
        (read_node_key, None, "cannot be read"),
        (read_node_key, "", "one key"),
        (read_node_key, "one two", "one key"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_told_by_line_and_without_keys(tmp_path, read, text, told):
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        read(str(file))
    assert KEY not in str(error.value)


def test_a_proxy_that_lets_everybody_in_is_given_no_key_of_the_nodes():
    with pytest.raises(ValueError, match="every client could use the nodes' key"):
        ProxyConfig(node_key_file="key")


# --- files that change --------------------------------------------------------------------------------------


def rewrite(file, text):
    file.write_text(text)


def rewrite_with_equal_size_and_times(file, text):
    before = file.stat()
    assert len(text) == before.st_size
    file.write_text(text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap_a_link(file, text):
    """As secrets are mounted."""
    (file.parent / "two").write_text(text)
    (file.parent / "next").symlink_to("two")
    (file.parent / "next").rename(file)


@pytest.mark.parametrize("change", [rewrite, rewrite_with_equal_size_and_times, swap_a_link])
def test_keys_that_change_are_in_force_when_two_looks_agree(keys, change):
    change(keys.path, f"alice {KEY[:-1]}X")
    look_twice(keys.files)
    assert keys.client(f"{KEY[:-1]}X") == "alice"
    with pytest.raises(ApiError, match="valid API key"):
        keys.client(KEY)


def test_a_file_that_is_looked_at_while_it_is_written_is_loaded_only_when_it_is_whole(keys):
    for text in (f"bob {KEY}", f"bob {KEY}-of-bob"):
        keys.path.write_text(text)
        keys.files.look()
        assert keys.client(KEY) == "alice"
    keys.files.look()
    assert keys.client(f"{KEY}-of-bob") == "bob"


def test_a_file_whose_reading_hangs_is_logged_and_the_others_are_read_again(
    keys, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(keys_module, "_LOOK_S", 0.01)
    os.mkfifo(hung := tmp_path / "hung")
    with patch.object(keys_module, "_digests", return_value=[b"before"]):
        keys.files.add("proxy.hung", [str(hung)], lambda: None)
    keys.path.write_text(f"bob {KEY}-of-bob")
    stop = keys.files.follow()
    try:
        wait_for(lambda: "reading proxy.hung hangs; the previous contents" in caplog.text, "it is logged")
        wait_for(lambda: keys.keys.may_watch(f"Bearer {KEY}-of-bob"), "the other is read")
    finally:
        stop.set()

        def ended():
            with contextlib.suppress(
                OSError
            ):  # nobody reads it now; a look may have begun just before the stop
                os.close(os.open(hung, os.O_WRONLY | os.O_NONBLOCK))
            return not any(thread.name == "proxy-files" for thread in threading.enumerate())

        wait_for(ended, "all looks have ended")


@pytest.mark.parametrize("content", ["alice", "", None])
def test_a_file_of_keys_that_becomes_unusable_leaves_the_old_ones_in_force_and_is_logged_once(
    keys, content, caplog
):
    if content is None:
        keys.path.unlink()
    else:
        keys.path.write_text(content)
    for _ in range(2):
        look_twice(keys.files)
    assert keys.client(KEY) == "alice"
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "the previous contents stay in force" in line.getMessage()
    keys.path.write_text(f"bob {KEY}-of-bob")
    with patch.object(Path, "read_text", side_effect=OSError("too many open files")):
        look_twice(keys.files)
    keys.files.look()
    assert keys.client(f"{KEY}-of-bob") == "bob"


@both_faces
@scenario
async def test_a_running_proxy_notices_new_keys_and_sends_nodes_theirs(tmp_path):
    async with cluster(0, 1, **files_of(tmp_path, api_keys=f"alice {KEY}", node_key="first\n")) as c:
        headers = bearer(f"{KEY}-2")
        await c.ask(headers=headers, status=401)
        files_of(tmp_path, api_keys=f"alice {KEY}-2", node_key="of-the-second\n")
        status, sent = 401, ""
        while (status, sent) != (200, "Bearer of-the-second"):
            async with c.post(headers=headers) as response:
                status = response.status
            sent = c.decode[0].headers[-1]["Authorization"] if c.decode[0].headers else ""
            await asyncio.sleep(0.05)


def test_a_file_that_hangs_when_it_is_looked_at_does_not_keep_the_proxy_from_ending(tmp_path):
    (keys := tmp_path / "keys").write_text(f"alice {KEY}")
    held = []

    def looks():
        with suppress(OSError):  # until it opens the file
            held.append(os.open(keys, os.O_WRONLY | os.O_NONBLOCK))
        return bool(held)

    with proxy_process(tmp_path, decode_at("http://127.0.0.1:9"), api_keys_file=str(keys)) as (_, process):
        keys.unlink()
        os.mkfifo(keys)
        wait_for(looks, "it looking at the file")
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        os.close(held[0])


# --- the certificate ----------------------------------------------------------------------------------------


@asynccontextmanager
async def listening(certificates, folder):
    """The URL of a proxy with the server's certificate, in the files `cert.pem` and `key.pem` of a folder."""
    give(certificates, folder, "server")
    settings = ServerTlsConfig(cert_file=str(folder / "cert.pem"), key_file=str(folder / "key.pem"))
    files = WatchedFiles()
    proxy = Proxy(ProxyConfig(drain_s=0.2, tls=settings), files=files)
    async with Node(decodes) as node:
        await proxy.setup()
        try:
            proxy.update(view((), [node.url]))
            yield await proxy.listen("127.0.0.1", 0, ServerTls(settings, files).context), files
        finally:
            await proxy.close()


def give(certificates, folder, name, *, key=True):
    """Writes the certificate of that name into the folder, and its key."""
    for file, source in zip(("cert.pem", "key.pem")[: 2 if key else 1], certificates[name], strict=False):
        (folder / file).write_text(Path(source).read_text())


@scenario
async def test_requests_go_over_tls_and_a_new_certificate_is_shown_to_the_next_client_but_no_bad_one(
    certificates, tmp_path, caplog
):
    pems = {name: Path(pair[0]).read_text().strip() for name, pair in certificates.items()}

    async def shown(url):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        return (await asyncio.to_thread(ssl.get_server_certificate, address, timeout=60)).strip()

    trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=certificates["ca"][0]))
    async with (
        listening(certificates, tmp_path) as (url, files),
        aiohttp.ClientSession(connector=trusting) as session,
    ):
        for stream, expected in ((False, b"hello"), (True, b"[DONE]")):
            async with session.post(
                f"{url}/v1/completions", json={"prompt": "x", "stream": stream}
            ) as response:
                assert response.status == 200
                assert expected in await response.read()
        assert await shown(url) in pems["server"]
        give(certificates, tmp_path, "client", key=False)
        look_twice(files)  # the certificate of one, the key of the other
        assert "key values mismatch" in caplog.text
        assert await shown(url) in pems["server"]
        give(certificates, tmp_path, "client")
        look_twice(files)
        assert await shown(url) in pems["client"]


def test_connections_that_never_begin_their_handshake_take_little_memory(certificates, tmp_path):
    give(certificates, tmp_path, "server")
    tls = {"cert_file": str(tmp_path / "cert.pem"), "key_file": str(tmp_path / "key.pem")}
    with (
        proxy_process(tmp_path, decode_at("http://127.0.0.1:9"), tls=tls) as (url, process),
        ExitStack() as stack,
    ):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))

        def memory_kib():
            ssl.get_server_certificate(address, timeout=60)  # so that those before it have been accepted
            return int(Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1].split()[0])

        before = memory_kib()
        for _ in range(512):
            stack.enter_context(socket.create_connection(address))
        assert memory_kib() - before < 512 * 150


@pytest.mark.parametrize(
    "cert, key, message",
    [
        ("missing", "server", "No such file or directory: .*missing"),
        ("server", "missing", "No such file or directory: .*missing"),
        ("server", "client", "key values mismatch"),
        ("server", "encrypted", "a pass phrase"),
        ("broken", "server", "cert_file must be a certificate"),
    ],
)
def test_files_that_are_no_certificate_and_key_are_refused(certificates, tmp_path, cert, key, message):
    encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n"
    (tmp_path / "encrypted").write_text(encrypted)
    (tmp_path / "broken").write_text("nonsense")
    own = {name: (str(tmp_path / name),) * 2 for name in ("missing", "encrypted", "broken")}
    cert_file, key_file = (certificates | own)[cert][0], (certificates | own)[key][1]
    with pytest.raises(ConfigError, match=f"proxy.tls: .*{message}"):
        ServerTls(ServerTlsConfig(cert_file=cert_file, key_file=key_file), WatchedFiles())
