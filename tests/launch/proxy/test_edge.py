"""What the proxy itself answers: requests that cannot be served, ids, models, health, metrics, chat, keys."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

import pd_cache
from launch.discovery import View
from launch.proxy import Proxy
from launch.proxy import completions as completions_module
from launch.proxy import requests as requests_module
from pd_cache.cluster import ProxyConfig
from pd_cache.errors import ConfigError
from tests.support.proxy import (
    PARAMS,
    cluster,
    decodes,
    disconnects,
    error_of,
    hangs,
    scenario,
    until,
    view,
)

# --- requests that cannot be served ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"prompt": "x", "max_tokens": -1}', b"\xff\xfe", b'{"prompt": null}']
)
@scenario
async def test_a_bad_body_is_a_400_and_reaches_no_node(body: bytes) -> None:
    async with cluster() as c:
        async with c.post(data=body) as response:
            assert response.status == 400
            assert (await error_of(response))["type"] == "invalid_request_error"
        assert c.prefill[0].bodies == c.decode[0].bodies == []


@scenario
async def test_a_body_that_breaks_its_encoding_is_a_400() -> None:
    async with cluster() as c, c.post(data=b"this is not gzip", headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 400
        await error_of(response)


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
async def test_unknown_paths_and_methods_are_told_in_the_same_shape() -> None:
    async with cluster() as c:
        async with c.get("/v1/nothing") as response:
            assert response.status == 404
            assert (await error_of(response))["type"] == "invalid_request_error"
        async with c.get("/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            await error_of(response)


@scenario
async def test_a_fault_of_the_proxy_is_a_500_without_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: bytes) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(completions_module, "Completion", broken)
    async with cluster() as c, c.post() as response:
        assert response.status == 500
        error = await error_of(response)
        assert error["code"] == "internal_error"
        assert "secret" not in error["message"]


@scenario
async def test_more_requests_than_allowed_are_refused() -> None:
    async with cluster(0, 1, max_requests=2) as c:
        go = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            await go.wait()
            return await decodes(request)

        c.decode[0].default = waits
        asking = [asyncio.ensure_future(c.post().__aenter__()) for _ in range(2)]
        await until(lambda: len(c.decode[0].bodies) == 2, "two in flight")
        async with c.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await error_of(response))["code"] == "overloaded"
        go.set()
        for response in await asyncio.gather(*asking):
            assert response.status == 200
            response.close()
        async with c.post() as response:
            assert response.status == 200


# --- ids, models, health, metrics ------------------------------------------------------------------------------------


@scenario
async def test_a_request_id_goes_to_both_hops_and_back() -> None:
    async with cluster() as c:
        async with c.post(headers={"X-Request-Id": "abc-123.x:y_Z"}) as response:
            assert response.headers.getall("X-Request-Id") == ["abc-123.x:y_Z"]
        assert c.prefill[0].headers[0]["X-Request-Id"] == c.decode[0].headers[0]["X-Request-Id"] == "abc-123.x:y_Z"


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
async def test_health_names_the_nodes() -> None:
    async with cluster() as c, c.get("/health") as response:
        assert response.status == 200
        assert await response.json() == {
            "status": "ok",
            "version": pd_cache.__version__,
            "prefill": {c.prefill[0].url: True},
            "decode": {c.decode[0].url: True},
            "discovery_stale_s": 0.0,
            "lookups": "off: direct_tokens is 0",
            "differences": {},
        }


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


@scenario
async def test_a_proxy_that_knows_no_nodes_refuses_until_it_does() -> None:
    async with cluster(1, 1) as c:
        c.proxy.update(View(()))
        async with c.post() as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        c.proxy.update(view([c.prefill[0].url], [c.decode[0].url]))
        async with c.post() as response:
            assert response.status == 200


# --- chat ------------------------------------------------------------------------------------------------------------


@scenario
async def test_a_chat_takes_the_same_way() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 9}
    async with cluster() as c:
        async with c.session.post(c.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
        assert c.prefill[0].paths == c.decode[0].paths == ["/v1/chat/completions"]
        assert c.prefill[0].bodies[0]["max_tokens"] == c.prefill[0].bodies[0]["max_completion_tokens"] == 1
        assert c.decode[0].bodies == [{**body, "kv_transfer_params": PARAMS}]
        async with c.session.post(c.url + "/v1/chat/completions", json={"prompt": "x"}) as response:
            assert response.status == 400
            assert (await error_of(response))["param"] == "messages"


# --- keys ------------------------------------------------------------------------------------------------------------


@scenario
async def test_with_keys_a_client_needs_one_and_nodes_do_not_get_it(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sk-0123456789abcdef\n")
    key = {"Authorization": "Bearer sk-0123456789abcdef"}
    async with cluster(api_keys_file=str(tmp_path / "keys"), max_requests_per_key=1) as c:
        for headers in ({}, {"Authorization": "Bearer sk-0123456789abcdeX"}):
            async with c.post(headers=headers) as response:
                assert response.status == 401
                assert (await error_of(response))["code"] == "invalid_api_key"
        async with c.get("/v1/models") as response:
            assert response.status == 401
        async with c.get("/health") as response:
            assert response.status == 200
        async with c.post(headers=key) as response:
            assert response.status == 200
        assert "Authorization" not in c.prefill[0].headers[0]
        assert "Authorization" not in c.decode[0].headers[0]
        c.decode[0].default = hangs
        asking = asyncio.ensure_future(c.post(headers=key).__aenter__())
        await until(lambda: len(c.decode[0].bodies) == 2, "one is under way")
        async with c.post(headers=key) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await error_of(response))["code"] == "rate_limit_exceeded"
        asking.cancel()
        await asyncio.wait({asking})


@scenario
async def test_nodes_with_a_key_of_their_own_get_that_in_place_of_the_clients(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice sk-0123456789abcdef\n")
    (tmp_path / "node-key").write_text("of-the-nodes\n")
    async with cluster(node_key_file=str(tmp_path / "node-key"), api_keys_file=str(tmp_path / "keys")) as c:
        async with c.post(headers={"Authorization": "Bearer sk-0123456789abcdef"}) as response:
            assert response.status == 200
        for node in (*c.prefill, *c.decode):
            assert node.headers[0]["Authorization"] == "Bearer of-the-nodes"


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
