"""What the proxy itself answers: requests that cannot be served, ids, models, health, metrics, chat, keys."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from launch.proxy import Proxy
from launch.proxy import requests as requests_module
from pd_cache.cluster import ProxyConfig
from pd_cache.errors import ConfigError
from tests.support.proxy import (
    cluster,
    disconnects,
    error_of,
    scenario,
    view,
)

# --- requests that cannot be served ----------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [True, False])
@scenario
async def test_a_body_that_is_too_large_is_a_413(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "MAX_BODY", 100_000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 10_000

    async with cluster() as c, c.post(data=b" " * 200_000 if announced else chunks()) as response:
        assert response.status == 413
        assert (await error_of(response))["code"] == "request_too_large"


@scenario
async def test_a_fault_of_the_proxy_is_a_500_without_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: bytes) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(requests_module, "Completion", broken)
    async with cluster() as c, c.post() as response:
        assert response.status == 500
        error = await error_of(response)
        assert error["code"] == "internal_error"
        assert "secret" not in error["message"]


# --- ids, models, health, metrics ------------------------------------------------------------------------------------


def test_the_log_of_the_proxy_tells_each_request_by_its_id(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sk-0123456789abcdef\n")
    caplog.set_level("INFO", logger="launch.proxy")

    @scenario
    async def asked() -> None:
        async with cluster(1, 2, api_keys_file=str(tmp_path / "keys")) as c:
            c.prefill[0].default = disconnects
            key = {"Authorization": "Bearer sk-0123456789abcdef"}
            async with c.post(headers={"X-Request-Id": "it-is-me", **key}) as response:
                assert response.status == 200
            async with c.post(headers={"X-Request-Id": "nobody"}) as response:
                assert response.status == 401
            url = c.prefill[0].url
        (failed,) = [line for line in caplog.messages if line.startswith(f"request it-is-me: prefill node {url}: ")]
        assert "disconnected" in failed
        (ended,) = [line for line in caplog.messages if line.startswith("request it-is-me: 200 in ")]
        assert re.search(rf"client=alice prefill={url} decode=http://", ended)
        assert any(line.startswith("request nobody: 401 in ") for line in caplog.messages)
        assert "sk-0123456789abcdef" not in caplog.text

    asked()


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "é", 'a"b'])
@scenario
async def test_a_request_id_that_is_missing_or_strange_is_replaced(given: str) -> None:
    async with cluster() as c:
        async with c.post(headers={"X-Request-Id": given} if given else {}) as response:
            made = response.headers["X-Request-Id"]
            assert re.fullmatch("[0-9a-f]{32}", made)
        assert c.prefill[0].headers[0]["X-Request-Id"] == made
        async with c.get("/nowhere") as response:
            assert re.fullmatch("[0-9a-f]{32}", response.headers["X-Request-Id"])


@scenario
async def test_the_models_are_those_of_a_decode_node_that_works() -> None:
    async with cluster(1, 2) as c:
        c.decode[0].default = disconnects
        async with c.get("/v1/models") as response:
            assert response.status == 200
            assert (await response.json())["data"] == [{"id": "tiny"}]
        assert c.prefill[0].bodies == []


@scenario
async def test_metrics_are_served_from_a_registry_of_the_proxys_own() -> None:
    async with cluster() as one, cluster() as other:
        async with one.post() as response:
            await response.read()
        for c, requests in ((one, 1.0), (other, 0.0)):
            async with c.get("/metrics") as response:
                text = await response.text()
                assert response.content_type == "text/plain"
            assert ('pd_cache_proxy_requests_total{status="200"} 1.0' in text) == bool(requests)
            assert f'pd_cache_proxy_node_up{{hop="decode",node="{c.decode[0].url}"}} 1.0' in text
            assert f"pd_cache_proxy_first_byte_seconds_count {requests}" in text


# --- chat ------------------------------------------------------------------------------------------------------------


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("", "one key"), ("one two", "one key")])
def test_a_file_that_holds_no_node_key_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sk-0123456789abcdef\n")
    if content is not None:
        (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match=message):
        Proxy(ProxyConfig(node_key_file=str(tmp_path / "key"), api_keys_file=str(tmp_path / "keys")))


def test_a_proxy_that_lets_everybody_in_is_given_no_key_of_the_nodes() -> None:
    with pytest.raises(ValueError, match="every client could use the nodes' key"):
        ProxyConfig(node_key_file="key")


# --- what clients do wrong -------------------------------------------------------------------------------------------


def test_requests_that_cannot_be_read_are_one_line_in_the_log_without_a_byte_of_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = b"Bearer sk-0123456789abcdef"

    @scenario
    async def asked() -> None:
        proxy = Proxy(ProxyConfig())
        await proxy.setup()
        try:
            port = int((await proxy.listen("127.0.0.1", 0)).rpartition(":")[2])
            for _ in range(50):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST / HTTP/1.1\r\nAuthorization: " + secret + b"\r\nno header\r\n\r\n{prompt}")
                assert (await reader.read()).startswith(b"HTTP/1.0 400 Bad Request\r\n")
                writer.close()
        finally:
            await proxy.close()

    asked()
    text = "\n".join(f"{record.getMessage()} {record.exc_text or ''} {record.exc_info}" for record in caplog.records)
    assert secret.decode() not in text
    assert "prompt" not in text
    assert len(caplog.records) == 1


@scenario
async def test_a_record_that_leads_back_to_the_proxy_is_asked_once_told_and_left_out() -> None:
    proxy = Proxy(ProxyConfig(health_interval_s=0.02, policy="round_robin"))
    await proxy.setup()
    try:
        url = await proxy.listen("127.0.0.1", 0)
        proxy.update(view([], [url]))
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as response:
                assert (response.status, (await error_of(response))["code"]) == (508, "loop_detected")
            asked = proxy.metrics.registry.get_sample_value("pd_cache_proxy_requests_total", {"status": "508"})
            assert asked == 1
            health: dict[str, dict[str, bool]] = {"decode": {url: True}}
            while health["decode"][url]:
                async with session.get(f"{url}/health") as response:
                    health = await response.json()
    finally:
        await proxy.close()


@scenario
async def test_clients_that_use_the_same_request_id_each_see_their_own(tmp_path: Path) -> None:
    keys = {name: f"sk-{name}-0123456789abcdef" for name in ("alice", "bob")}
    (tmp_path / "keys").write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
    async with cluster(api_keys_file=str(tmp_path / "keys")) as c:
        headers = {name: {"Authorization": f"Bearer {key}", "X-Request-Id": "same"} for name, key in keys.items()}
        for name in keys:
            async with c.post(headers=headers[name]) as response:
                assert response.status == 200
        for name in keys:
            async with c.session.get(f"{c.url}/requests/same", headers=headers[name]) as response:
                assert (await response.json())["client"] == name
