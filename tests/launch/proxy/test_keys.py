"""Keys of clients and of those who watch, and files of them that change."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from launch.proxy.bodies import ApiError
from launch.proxy.keys import Keys, WatchedFiles, read_keys
from pd_cache.cluster import ProxyConfig
from pd_cache.errors import ConfigError
from tests.support.proxy import answers, cluster, scenario, until

KEY = "sk-0123456789abcdef"


def keys_file(folder: Path, text: str) -> str:
    (folder / "keys").write_text(text)
    return str(folder / "keys")


def test_a_key_names_its_client(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"# clients\n\nalice {KEY}\nbob   {KEY}x  # the other\n")
    keys = Keys(ProxyConfig(api_keys_file=file), WatchedFiles())
    assert keys.client(f"Bearer {KEY}") == "alice"
    assert keys.client(f"bearer {KEY}x") == "bob"
    for wrong in (None, "", KEY, f"Basic {KEY}", f"Bearer {KEY}y", "Bearer", "Bearer \udce4"):
        with pytest.raises(ApiError) as refused:
            keys.client(wrong)
        assert refused.value.status == 401
        assert KEY not in refused.value.message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no keys"),
        ("alice\n", ":1: expected `NAME KEY`"),
        ("alice short\n", ":1: expected `NAME KEY`"),
        (f"al/ice {KEY}\n", ":1: expected `NAME KEY`"),
        (f"alice {KEY}\nalice {KEY}x\n", ":2: the name alice"),
        (f"alice {KEY}\nbob {KEY}\n", ":2: the name bob or its key is already on another line"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_told_by_line_and_without_keys(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        read_keys(keys_file(tmp_path, text))
    assert KEY not in str(error.value)


def test_keys_that_change_are_in_force_at_the_next_look(tmp_path: Path) -> None:
    file, files = tmp_path / "keys", WatchedFiles()
    keys = Keys(ProxyConfig(api_keys_file=keys_file(tmp_path, f"alice {KEY}")), files)
    file.write_text(f"bob {KEY}-of-bob")
    files.look()
    assert keys.client(f"Bearer {KEY}-of-bob") == "bob"
    with pytest.raises(ApiError, match="valid API key"):
        keys.client(f"Bearer {KEY}")


@pytest.mark.parametrize("content", ["alice", "", None])
def test_a_file_of_keys_that_becomes_unusable_leaves_the_old_ones_in_force_and_is_logged_once(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file, files = tmp_path / "keys", WatchedFiles()
    keys = Keys(ProxyConfig(api_keys_file=keys_file(tmp_path, f"alice {KEY}")), files)
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    files.look()
    files.look()
    assert keys.client(f"Bearer {KEY}") == "alice"
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "the previous contents stay in force" in line.getMessage()
    file.write_text(f"bob {KEY}-of-bob")
    files.look()
    assert keys.client(f"Bearer {KEY}-of-bob") == "bob"


def test_a_file_that_could_not_be_read_for_a_moment_is_read_later_though_it_looks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, files = tmp_path / "keys", WatchedFiles()
    keys = Keys(ProxyConfig(api_keys_file=keys_file(tmp_path, f"alice {KEY}")), files)
    file.write_text(f"bob {KEY}-of-bob")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", _denied)
        patch.setattr(Path, "read_bytes", _denied)
        patch.setattr("builtins.open", _denied)
        files.look()
    assert keys.client(f"Bearer {KEY}") == "alice"
    files.look()
    assert keys.client(f"Bearer {KEY}-of-bob") == "bob"


def _denied(*_: object, **__: object) -> NoReturn:
    raise PermissionError(13, "Permission denied")


def test_secrets_that_are_swapped_by_a_link_are_read_again(tmp_path: Path) -> None:
    for name, key in (("one", KEY), ("two", f"{KEY}-2")):
        (tmp_path / name).write_text(f"alice {key}")
    link, files = tmp_path / "keys", WatchedFiles()
    link.symlink_to("one")
    keys = Keys(ProxyConfig(api_keys_file=str(link)), files)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(link)
    files.look()
    assert keys.client(f"Bearer {KEY}-2") == "alice"


@scenario
async def test_a_running_proxy_notices_new_keys(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"alice {KEY}")
    async with cluster(api_keys_file=file) as c:
        new = {"Authorization": f"Bearer {KEY}-2"}
        async with c.post(headers=new) as response:
            assert response.status == 401
        keys_file(tmp_path, f"alice {KEY}-2")
        keys = c.proxy._keys
        await until(lambda: keys.may_watch(f"Bearer {KEY}-2"), "the new key is known", 10)
        async with c.post(headers=new) as response:
            assert response.status == 200


@scenario
async def test_a_node_key_that_changes_is_sent_from_then_on(tmp_path: Path) -> None:
    node_key = tmp_path / "node-key"
    node_key.write_text("first\n")
    files = {"api_keys_file": keys_file(tmp_path, f"alice {KEY}"), "node_key_file": str(node_key)}
    async with cluster(0, 1, **files) as c:
        c.decode[0].default = answers(200, {})
        node_key.write_text("of-the-second\n")
        c.proxy._files.look()
        async with c.post(headers={"Authorization": f"Bearer {KEY}"}) as response:
            assert response.status == 200
        assert c.decode[0].headers[0]["Authorization"] == "Bearer of-the-second"


def test_a_file_edited_in_place_with_equal_size_and_times_is_read_again(tmp_path: Path) -> None:
    file, files = tmp_path / "keys", WatchedFiles()
    keys = Keys(ProxyConfig(api_keys_file=keys_file(tmp_path, f"alice {KEY}")), files)
    before = file.stat()
    file.write_text(f"alice {KEY[:-1]}X")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    files.look()
    assert keys.client(f"Bearer {KEY[:-1]}X") == "alice"


@scenario
async def test_a_file_whose_reading_hangs_holds_up_neither_other_files_nor_the_end(tmp_path: Path) -> None:
    hangs, file = threading.Event(), keys_file(tmp_path, f"alice {KEY}")
    (tmp_path / "node-key").write_text("first")
    files = WatchedFiles()
    first = [True]

    def load() -> None:
        if not first:
            hangs.wait(60)
        first.clear()

    files.add("a file", [str(tmp_path / "node-key")], load)
    keys = Keys(ProxyConfig(api_keys_file=file), files)
    stop = files.follow()
    try:
        (tmp_path / "node-key").write_text("second")
        keys_file(tmp_path, f"alice {KEY}-2")
        await until(lambda: keys.may_watch(f"Bearer {KEY}-2"), "the other file was read")
    finally:
        stop.set()
        hangs.set()
