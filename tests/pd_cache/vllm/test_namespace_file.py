"""The middleware that has vLLM's `/health` tell the namespace; vLLM's part is played by an ASGI application of ours."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pd_cache
from pd_cache.chunks import Namespace
from pd_cache.cluster import read_about
from pd_cache.vllm.files import NAMESPACE_FILE, TellNamespace, ToldCache, read_cache, write_cache

NAMESPACE = Namespace(
    model="m", kv_dtype="bfloat16", layout="l", layers=2, block_size=16, page_bytes=64, chunk_size=32, shards=1, hash_mode="blocks"
)  # fmt: skip


class App:
    """Answers every request with `status` and `parts` as its body."""

    def __init__(self, status: int = 200, *parts: bytes) -> None:
        self.status, self.parts = status, parts or (b"",)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"x-own", b"1"), (b"content-length", b"%d" % sum(map(len, self.parts)))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for index, part in enumerate(self.parts):
            await send({"type": "http.response.body", "body": part, "more_body": index + 1 < len(self.parts)})


def ask(app: App, path: str = "/health", method: str = "GET") -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(TellNamespace(app)({"type": "http", "method": method, "path": path}, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message["body"] for message in sent[1:])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "namespace.json"
    monkeypatch.setenv(NAMESPACE_FILE, str(path))
    return path


def test_a_health_of_200_tells_the_namespace(file: Path) -> None:
    write_cache(file, ToldCache((NAMESPACE,)))
    status, headers, body = ask(App())
    assert (status, headers[b"x-own"], headers[b"content-type"]) == (200, b"1", b"application/json")
    assert int(headers[b"content-length"]) == len(body)
    assert json.loads(body) == {"version": pd_cache.__version__, **NAMESPACE.described()}


def test_the_namespaces_of_all_groups_of_layers_are_told(file: Path) -> None:
    window = msgspec.structs.replace(NAMESPACE, group="1-3", keeps="the last 256 tokens", tail=1)
    write_cache(file, ToldCache((NAMESPACE, window)))
    assert read_cache(file).namespaces == (NAMESPACE, window)
    assert read_about(ask(App())[2]).cache_namespaces == (NAMESPACE, window)


@pytest.mark.parametrize("namespaces", [(), (NAMESPACE,)])
def test_the_size_of_vllms_own_cache_is_told_with_and_without_a_namespace(
    file: Path, namespaces: tuple[Namespace, ...]
) -> None:
    write_cache(file, ToldCache(namespaces, 4096))
    assert read_cache(file) == ToldCache(namespaces, 4096)
    about = read_about(ask(App())[2])
    assert (about.kv_tokens, about.cache_namespaces) == (4096, namespaces)


@pytest.mark.parametrize("app", [App(503), App(500, b"dead"), App(200, b"its own"), App(200, b"", b"in parts")])
def test_any_other_answer_is_left_as_it_is(app: App, file: Path) -> None:
    write_cache(file, ToldCache((NAMESPACE,)))
    status, headers, body = ask(app)
    assert (status, body) == (app.status, b"".join(app.parts))
    assert int(headers[b"content-length"]) == len(body)


@pytest.mark.parametrize(("path", "method"), [("/v1/models", "GET"), ("/health", "HEAD"), ("/health/x", "GET")])
def test_any_other_request_is_left_as_it_is(path: str, method: str, file: Path) -> None:
    write_cache(file, ToldCache((NAMESPACE,)))
    assert ask(App(), path, method)[2] == b""


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b'{"format": "pdc0", "model": "m"}', b'{"format": "pdc1"}', b"[1]", b"7\n{"]
)
def test_without_a_namespace_that_can_be_read_health_is_vllms_own(content: bytes | None, file: Path) -> None:
    if content is not None:
        file.write_bytes(content)
    assert read_cache(file) == ToldCache()
    assert ask(App())[2] == b""


def test_what_was_written_is_read(file: Path) -> None:
    write_cache(file, ToldCache((NAMESPACE,)))
    assert read_cache(file) == ToldCache((NAMESPACE,))
    assert [one.name for one in file.parent.iterdir()] == [file.name]
