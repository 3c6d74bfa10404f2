"""Tenants: in whose name a request is, what keeps their hits apart, and what is removed of whom. In a real pool: tests/launch/test_tenants.py."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.discovery import View
from launch.openai import ApiError
from launch.proxy import tenants as proxy_tenants
from launch.proxy.bodies import tenant_salt
from launch.proxy.direct import MAX_WAITING
from launch.proxy.keys import WatchedFiles
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.prefixes import NamedPrompt
from launch.proxy.tenants import Ledger, Tenants
from pd_cache.cluster import NodeRecord, ProxyConfig, read_tenants
from pd_cache.errors import ConfigError
from tests.launch.proxy.test_direct import IDS, rule
from tests.launch.proxy.test_hints import Renewing
from tests.support.proxy import NAMESPACE, bearer, error_of, files_of, look_twice, scenario, until
from tests.support.proxy import cluster as proxied
from transfer.errors import Status

OF_A, OF_B, PLAIN, GATE, WATCH = (f"key-of-{name}-0123456789" for name in ("a", "b", "nobody", "gate", "monitor"))
CHUNK = NAMESPACE.chunk_bytes
FILE = f"tenants: {{a: {{quota: {4 * CHUNK}, pins: {2 * CHUNK}, max_requests: 1}}, b: {{}}}}"


def files(folder: Path, text: str = FILE) -> dict[str, str]:
    keys = f"ann {OF_A} a\nben {OF_B} b\npat {PLAIN}\ngate {GATE} @X-Tenant\n"
    return files_of(folder, api_keys=keys, tenants=text)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": IDS, "max_tokens": 5, **fields}


# --- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "file:.* expected"),
        ("tenant: {}", "unknown key; did you mean tenants"),
        ("tenants: {a: {quota: lots}}", r"tenants.a.quota: 'lots'"),
        ("tenants: {a/b: {}}", "1 to 63 letters"),
        ("tenants:\n  a: {quotas: 1GiB}", r":2: tenants.a.quotas: .*unknown key; did you mean quota"),
        ("tenants: {a: {max_requests: 0}}", "tenants.a.max_requests: 0"),
        ("tenants: {a: {quota: 1GiB, pins: 2GiB}}", "`pins` must not be more than `quota`"),
        ("tenants: {a: {}, a: {}}", "given twice"),
    ],
)
def test_a_wrong_file_of_tenants_is_refused_with_the_reason(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_tenants(str(tmp_path / "t"))


def test_a_changed_file_is_in_force_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    watched = WatchedFiles()
    with closing(rule(Renewing())) as direct:
        tenants = Tenants(ProxyConfig(**files(tmp_path)), watched, direct, ProxyMetrics())
        assert (tenants.chunks("a", "quota"), tenants.config("a").max_requests) == (4, 1)
        assert tenants.chunks("b", "quota") is None
        for text in (f"tenants: {{a: {{quota: {8 * CHUNK}}}}}", "tenants: {a: {quota: x}}"):
            (tmp_path / "tenants").write_text(text)
            look_twice(watched)
            assert (tenants.chunks("a", "quota"), tenants.config("a").max_requests) == (8, None)
        proxies = [NodeRecord(name=f"p{n}", role="proxy", address=f"http://127.0.0.1:{n + 1}") for n in range(2)]
        tenants.update(View(tuple(proxies)))
        assert tenants.chunks("a", "quota") == 4, "each of two proxies has half"
        assert tenants.chunks("a", "pins") == 4, "what is pinned cannot be removed for the quota"


@pytest.mark.parametrize("config", [{"direct_tokens": 0, "api_keys_file": "k"}, {}])
def test_tenants_need_keys_and_lookups(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`tenants_file` needs `api_keys_file`"):
        ProxyConfig(tenants_file="t", **config)


# --- what goes first ---------------------------------------------------------------------------------------------------


def test_a_ledger_gives_up_what_was_not_used_for_longest_a_prompts_end_first() -> None:
    ledger = Ledger()
    ledger.use([b"a1", b"a2", b"a3"], 0.0)
    ledger.use([b"b1"], 1.0)
    ledger.use([b"a1", b"a2"], 2.0)
    assert list(ledger.oldest(9)) == [(b"a3", 0.0), (b"b1", 1.0), (b"a2", 2.0), (b"a1", 2.0)]
    assert [name for name, _ in ledger.oldest(1, {b"a3"})] == [b"b1"], "what is pinned stays"
    assert list(ledger.oldest(-1)) == []
    ledger.use([b"b1"], 3.5)
    told = [Status.OK, Status.OK, Status.BUSY, Status.POOL_DOWN]
    assert ledger.settle([b"a3", b"b1", b"a2", b"a1"], told, 3.0, 4.0) == 2
    leased = [(b"a1", 2.0), (b"b1", 3.5), (b"a2", 2.0)]
    assert list(ledger.oldest(9)) == leased, "what was used meanwhile, or is leased, stays"
    assert ledger.settle([b"a1"], [Status.MISSING], 5.0, 7.0) == 0
    assert len(ledger) == 3, "it may still be on its way into the pool"
    ledger.settle([b"a1"], [Status.MISSING], 8.0, 8.0)
    assert len(ledger) == 2, "it is not in the pool"
    ledger.settle([b"b1"], [], 63.0, 63.0)
    assert len(ledger) == 2, "no pool is known"


def test_what_requests_under_way_need_stays_as_long_as_one_of_them_needs_it() -> None:
    ledger = Ledger()
    ledger.use([b"a", b"b"], 0.0)
    times = iter((30.0, 40.0))
    first, second = (ledger.hold(names, lambda: next(times)) for names in ([b"a", b"b"], [b"a"]))
    assert list(ledger.oldest(9)) == []
    first()
    assert list(ledger.oldest(9)) == [(b"b", 30.0)], "a node may have leased it until then"
    second()
    assert list(ledger.oldest(9)) == [(b"b", 30.0), (b"a", 40.0)]


def test_what_was_removed_is_removed_again_when_a_late_store_may_have_brought_it_back() -> None:
    ledger = Ledger()
    ledger.use([b"a", b"b"], 0.0)
    ledger.settle([b"a", b"b"], [Status.OK, Status.OK], 1.0, 1.0)
    ledger.use([b"a"], 2.0)
    assert (len(ledger), ledger.again(1.0), ledger.again(9.0), ledger.again(9.0)) == (1, [], [b"b"], [])


def test_what_is_counted_of_all_tenants_together_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_tenants, "_MOST_CHUNKS", 10)
    with closing(rule(Renewing())) as direct:
        file = "tenants: {a: {quota: 1GiB}, b: {quota: 1GiB}}"
        watched = WatchedFiles()
        tenants = Tenants(ProxyConfig(**files(tmp_path, file)), watched, direct, ProxyMetrics())

        def note(tenant: str, *numbers: int) -> None:
            names = [f"{tenant}{number}".encode() for number in numbers]
            unknown = NamedPrompt("", 0, pool_tokens=None, names=names)  # as while the pool is away
            tenants.note(tenant, unknown, ExitStack())

        note("b", 1, 2, 3)
        for number in range(100):
            note("a", number, 1000)
        assert {name: len(ledger) for name, ledger in tenants._ledgers.items()} == {"a": 7, "b": 3}
        assert next(iter(tenants._ledgers["a"]._used)) == b"a94", "those that were not used for longest are forgotten"
        (tmp_path / "tenants").write_text("tenants: {b: {quota: 1GiB}}")
        look_twice(watched)
        asyncio.run(tenants.remove())
        assert list(tenants._ledgers) == ["b"], "and those of whom the file does not name any more"


@scenario
async def test_a_tenant_over_its_quota_loses_its_own_chunks_and_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.proxy.app.LOOK_S", 3600.0)
    client = Renewing(found=256)
    text = FILE.replace(", max_requests: 1", "")
    async with proxied(direct=rule(client), **files(tmp_path, text)) as c:
        await c.ask(body(), headers=bearer(OF_B))
        names = [c.proxy._direct._namer.name([n, *IDS[1:]], tenant_salt(None, "a")).names for n in range(4)]  # type: ignore[union-attr]
        async with c.stuck_at(c.decode[0], body(prompt=[0, *IDS[1:]]), headers=bearer(OF_A)):
            for first in range(1, 3):  # with that one, 9 chunks, of which 4 may stay
                await c.ask(body(prompt=[first, *IDS[1:]]), headers=bearer(OF_A))
            await c.proxy._tenants.remove(lambda tenant: names[2] if tenant == "a" else ())
        assert [*chain(*client.removed)] == [*reversed(names[1])], "neither what is to be loaded nor what is pinned"
        assert client.forced == 3, "it is leased by its request"
        await until(lambda: not c.proxy.requests.running, "the client has gone")
        c.proxy._tenants._clock = lambda: time.monotonic() + 20
        await c.proxy._tenants.remove()
        assert [*chain(*client.removed)][3:] == [*reversed(names[0][1:])]
        assert client.forced == 3, "the leases of its own requests are over: another proxy's requests hold these"
        c.proxy._tenants._clock = lambda: time.monotonic() + 90
        await c.proxy._tenants.remove()
        removed = [*chain(*client.removed)]
        assert removed[5:] == removed[:5], "a late store may have brought them back"
        c.proxy._tenants.show()
        assert c.metric("tenant_evicted_chunks_total", tenant="a") == 10
        assert c.metric("tenant_bytes", tenant="a") == c.metric("tenant_quota_bytes", tenant="a") == 4 * CHUNK
        assert c.metric("tenant_tokens_total", tenant="a", outcome="requested") == 3 * len(IDS)
        assert c.metric("tenant_tokens_total", tenant="a", outcome="found") == 3 * 256
        assert c.metric("tenant_requests_total", tenant="b", counted="yes") == 1
        assert c.proxy._ui.state(None)["tenants"][0]["bytes"] == 4 * CHUNK
        assert c.proxy._ui.state("ann")["tenants"] == []
        await c.ask(body(prompt="x" * 9000), headers=bearer(OF_A))  # no node tokenizes
        assert c.metric("tenant_requests_total", tenant="a", counted="no") == 1


@scenario
async def test_as_many_prompts_of_a_tenant_count_as_come_at_a_time(tmp_path: Path) -> None:
    client = Renewing(found=0)
    client.gate.clear()
    text = "tenants: {a: {quota: 1GiB}}"
    async with proxied(direct=rule(client), **files(tmp_path, text)) as c:
        asked = [body(prompt=[first, *IDS[1:]]) for first in range(MAX_WAITING + 8)]
        asking = [asyncio.ensure_future(c.post(one, headers=bearer(OF_A)).__aenter__()) for one in asked]
        await until(lambda: c.proxy.requests._judging == len(asked), "all are looked up")
        await c.ask(body(), headers=bearer(PLAIN))  # without a lookup
        client.gate.set()
        for one in asking:
            (await one).close()
        assert c.metric("tenant_requests_total", tenant="a", counted="yes") == len(asked)
        assert len(c.proxy._tenants._ledgers["a"]) == 3 * len(asked)


# --- in whose name -----------------------------------------------------------------------------------------------------


A, B = (tenant_salt(None, tenant) for tenant in "ab")


@given(st.text() | st.text("@/\\\0x", min_size=129), st.text(max_size=3), st.sampled_from(("a", "b", 63 * "c")))
def test_every_tenants_salt_is_its_own_and_within_what_vllm_takes(own: str, other: str, tenant: str) -> None:
    salt = tenant_salt(own, tenant)
    assert salt is not None
    assert re.fullmatch(r"[^@/\\\0]{1,128}", salt)
    assert salt not in (own, other, tenant_salt(own, "d"))
    assert (salt == tenant_salt(other, tenant)) == (own == other)
    with pytest.raises(ApiError):
        tenant_salt(salt, "")


@pytest.mark.parametrize(
    ("headers", "sent", "got"),
    [
        (bearer(OF_A), {}, A),
        (bearer(OF_A), {"cache_salt": ""}, A),
        (bearer(OF_A), {"cache_salt": "x"}, tenant_salt("x", "a")),
        (bearer(OF_A), {"cache_salt": B}, tenant_salt(B, "a")),
        (bearer(OF_A, X_Tenant="b"), {}, A),  # only a gateway may say
        (bearer(GATE, X_Tenant="b"), {"cache_salt": None}, B),
        (bearer(PLAIN), {"cache_salt": "x"}, "x"),
        (bearer(PLAIN), {}, None),
    ],
)
@scenario
async def test_nodes_get_a_salt_that_is_the_tenants(tmp_path, headers, sent, got):
    async with proxied(direct=rule(Renewing(found=0)), **files(tmp_path)) as c:
        for asked in (body(), {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}):
            await c.ask(asked | sent, headers=headers)
        seen = [*c.prefill[0].bodies, *c.decode[0].bodies]
        assert {one.get("cache_salt") for one in seen} == {got}
        assert all("X-Tenant" not in one for one in c.decode[0].headers)


@pytest.mark.parametrize(
    ("headers", "raw", "status", "code"),
    [
        (bearer(PLAIN), b'{"prompt": [1], "cache_salt": "pd-cache-tenant-a"}', 400, "invalid_value"),
        (bearer(PLAIN), b'{"prompt": [1], "cache\\u005fsalt": "pd-cache\\u002dtenant-a"}', 400, "invalid_value"),
        (bearer(PLAIN), b'{"prompt": [1], "cache_salt": "x", "cache_salt": "pd-cache-tenant-a"}', 400, "invalid_value"),
        (bearer(OF_A), b'{"prompt": [1], "cache_salt": 7}', 400, "invalid_value"),
        (bearer(PLAIN), b'{"prompt": [1], "cache_salt": 7}', 400, "invalid_value"),
        (bearer(GATE), b'{"prompt": [1]}', 400, "bad_tenant"),
        (bearer(GATE, X_Tenant="a/b"), b'{"prompt": [1]}', 400, "bad_tenant"),
        ([*bearer(GATE).items(), ("X-Tenant", "a"), ("X-Tenant", "b")], b'{"prompt": [1]}', 400, "bad_tenant"),
        (bearer(GATE, X_Tenant="c"), b'{"prompt": [1]}', 403, "unknown_tenant"),
    ],
)  # fmt: skip
@scenario
async def test_who_is_no_tenant_or_pretends_to_be_one_is_refused(tmp_path, headers, raw, status, code):
    async with proxied(direct=rule(Renewing(found=0)), **files(tmp_path)) as c:
        async with c.post(data=raw, headers=headers) as response:
            assert (response.status, (await error_of(response))["code"]) == (status, code)
        assert not c.prefill[0].bodies
        assert not c.decode[0].bodies


@scenario
async def test_a_query_with_a_clients_key_is_about_its_own_tenants_prompts(tmp_path: Path) -> None:
    client = Renewing(found=0)
    async with proxied(direct=rule(client), **files(tmp_path)) as c:
        asked = {"token_ids": IDS, "cache_salt": A}

        async def query(key: str) -> int:
            async with c.session.post(c.url + "/query", json=asked, headers=bearer(key)) as response:
                return response.status

        assert [await query(PLAIN), await query(OF_B)] == [400, 200]
        of_a = c.proxy._direct._namer.name(IDS, A).names  # type: ignore[union-attr]
        assert of_a not in client.asked
        asked["cache_salt"] = ""
        assert await query(OF_A) == 200
        assert client.asked[-1] == of_a


@scenario
async def test_hints_name_no_prompts_by_hashes_where_those_of_other_tenants_can_be_guessed(tmp_path: Path) -> None:
    async with proxied(direct=rule(Renewing(found=256)), **files(tmp_path)) as c:
        for key in (OF_A, PLAIN):
            told = await c.hint("kv.retain", {"block_hashes": ["00" * 32], "ttl_s": 60}, headers=bearer(key))
            assert (told["status"], told["reason"][:28]) == ("refused", "block_hashes name prompts of")
        await c.ask(body(), headers=bearer(OF_A, X_Request_Id="r1"))
        for headers in (bearer(GATE, X_Tenant="b"), bearer(OF_B)):
            told = await c.hint("kv.retain", {"request_id": "r1", "ttl_s": 60}, headers=headers)
            assert told["status"] == "refused"


# --- bounds ------------------------------------------------------------------------------------------------------------


@scenario
async def test_a_tenants_requests_and_pins_are_bounded_whoever_asks(tmp_path: Path) -> None:
    async with proxied(direct=rule(Renewing(found=0)), **files(tmp_path)) as c:
        c.proxy._hints._pool_bytes = lambda view: 1000 * CHUNK

        async def pin(headers: dict[str, str], action_id: str, first: int) -> dict[str, Any]:
            return await c.hint("kv.retain", {"tokens": [first, *IDS[1:]], "ttl_s": 60}, action_id, headers=headers)

        told = await pin(bearer(OF_A), "one", 1)
        assert (told["status"], told["tokens"]) == ("clipped", 512)
        assert told["reason"] == f"all pins may take {2 * CHUNK} bytes of this tenant"
        assert (await pin(bearer(GATE, X_Tenant="a"), "two", 2))["status"] == "refused"
        assert (await pin(bearer(OF_A), "one", 3))["tokens"] == 512, "in place of the first"
        assert (await pin(bearer(OF_B), "one", 1))["status"] == "accepted"
        assert len(c.proxy._hints.pins) == 2
        (tmp_path / "tenants").write_text(FILE.replace(f"pins: {2 * CHUNK}", f"pins: {CHUNK}"))
        look_twice(c.proxy._files)
        await c.proxy._hints.renew()
        assert len(c.proxy._hints.pins) == 1, "a's has ended: it may pin less now"
        assert (await pin(bearer(OF_A), "one", 3))["tokens"] == 256
        (tmp_path / "tenants").write_text("tenants: {b: {}}")
        look_twice(c.proxy._files)
        await c.proxy._hints.renew()
        assert len(c.proxy._hints.pins) == 1, "a is no tenant any more"
        (tmp_path / "tenants").write_text(FILE)
        look_twice(c.proxy._files)

        busy = c.stuck_at(c.prefill[0], body(), headers=bearer(OF_A))
        async with busy, c.post(body(), headers=bearer(GATE, X_Tenant="a")) as response:
            error = await error_of(response)
            assert (response.status, error["message"][:27]) == (429, "1 requests of this tenant a")
        await until(lambda: not c.proxy.requests.running, "the client has gone")
        await c.ask(body(), headers=bearer(GATE, X_Tenant="a"))
