"""Tenants: in whose name a request is, what keeps their hits apart, and what bounds them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.openai import ApiError
from launch.proxy.bodies import tenant_salt
from launch.proxy.keys import Keys, WatchedFiles
from pd_cache.cluster import ProxyConfig, TenantConfig, read_tenants
from pd_cache.errors import ConfigError
from tests.launch.proxy.test_direct import IDS, looks_up
from tests.launch.proxy.test_hints import Renewing
from tests.support.proxy import NAMESPACE, bearer, both_faces, error_of, files_of, look_twice, scenario, until
from tests.support.proxy import cluster as proxied

OF_A, OF_B, PLAIN, GATE, WATCH = (
    f"key-of-{name}-0123456789" for name in ("a", "b", "nobody", "gate", "monitor")
)
CHUNK = NAMESPACE.chunk_bytes
FILE = f"tenants: {{a: {{pins: {2 * CHUNK}, max_requests: 1}}, b: {{}}}}"


def files(folder, text=FILE):
    keys = f"ann {OF_A} a\nben {OF_B} b\npat {PLAIN}\ngate {GATE} @X-Tenant\n"
    return files_of(folder, api_keys=keys, tenants=text)


def tenants(folder, found=0):
    """A proxy with these keys and tenants, whose pool has so many tokens of each prompt."""
    return proxied(**looks_up(Renewing(found=found)), **files(folder))


def body(**fields):
    return {"model": "tiny", "prompt": IDS, "max_tokens": 5, **fields}


# --- the file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "file:.* expected"),
        ("tenant: {}", "unknown key; did you mean tenants"),
        ("tenants: {a: {pins: lots}}", r"tenants.a.pins: 'lots'"),
        ("tenants: {a/b: {}}", "1 to 63 letters"),
        ("tenants:\n  a: {quota: 1GiB}", r":2: tenants.a.quota: .*unknown key"),
        ("tenants: {a: {max_requests: 0}}", "tenants.a.max_requests: 0"),
        ("tenants: {a: {limits: {ttft_s: 0}}}", "tenants.a.limits.ttft_s: 0"),
        ("tenants: {a: {}, a: {}}", "given twice"),
        ("tenants: {}\nkeys: {ann: {ttft: 5}}", "keys.ann.ttft: .*did you mean ttft_s"),
    ],
)
def test_a_wrong_file_of_tenants_is_refused_with_the_reason(tmp_path, text, told):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_tenants(str(tmp_path / "t"))


def test_a_changed_file_is_in_force_and_a_broken_one_changes_nothing(tmp_path):
    watched = WatchedFiles()
    keys = Keys(ProxyConfig(**files(tmp_path)), watched)
    assert keys.limits("a") == TenantConfig(pins=2 * CHUNK, max_requests=1)
    for text in ("tenants: {a: {max_requests: 2}}", "tenants: {a: {pins: x}}"):
        (tmp_path / "tenants").write_text(text)
        look_twice(watched)
        assert keys.limits("a") == TenantConfig(max_requests=2)
    assert keys.limits("b") == TenantConfig(pins=0), "b is no tenant any more"


def test_tenants_need_keys():
    with pytest.raises(ValueError, match="`tenants_file` needs `api_keys_file`"):
        ProxyConfig(tenants_file="t")


# --- in whose name ------------------------------------------------------------------------------------------


A, B = (tenant_salt(None, tenant) for tenant in "ab")


@given(
    st.text() | st.text("@/\\\0x", min_size=129), st.text(max_size=3), st.sampled_from(("a", "b", 63 * "c"))
)
def test_every_tenants_salt_is_its_own_and_within_what_vllm_takes(own, other, tenant):
    salt = tenant_salt(own, tenant)
    assert re.fullmatch(r"[^@/\\\0]{1,128}", salt)
    assert salt not in (own, other, tenant_salt(own, "d"))
    assert (salt == tenant_salt(other, tenant)) == (own == other)
    with pytest.raises(ApiError):
        tenant_salt(salt, "")


@both_faces
@pytest.mark.parametrize(
    "headers, sent, got",
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
    async with tenants(tmp_path) as c:
        for asked in (body(), {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}):
            await c.ask(asked | sent, headers=headers)
        seen = [*c.prefill[0].bodies, *c.decode[0].bodies]
        assert {one.get("cache_salt") for one in seen} == {got}
        assert all("X-Tenant" not in one for one in c.decode[0].headers)


@both_faces
@pytest.mark.parametrize(
    "headers, raw, status, code",
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
    async with tenants(tmp_path) as c:
        async with c.post(data=raw, headers=headers) as response:
            assert (response.status, (await error_of(response))["code"]) == (status, code)
        assert not c.prefill[0].bodies
        assert not c.decode[0].bodies


@scenario
async def test_a_query_with_a_clients_key_is_about_its_own_tenants_prompts(tmp_path):
    client = Renewing(found=0)
    async with proxied(**looks_up(client), **files(tmp_path)) as c:
        asked = {"token_ids": IDS, "cache_salt": A}

        async def query(key):
            async with c.session.post(c.url + "/query", json=asked, headers=bearer(key)) as response:
                return response.status

        assert [await query(PLAIN), await query(OF_B)] == [400, 200]
        of_a = c.proxy._lookups._namer.name(IDS, A).names
        assert of_a not in client.asked
        asked["cache_salt"] = ""
        assert await query(OF_A) == 200
        assert client.asked[-1] == of_a


@scenario
async def test_hints_name_no_prompts_by_hashes_where_those_of_other_tenants_can_be_guessed(tmp_path):
    async with tenants(tmp_path, 256) as c:
        for key in (OF_A, PLAIN):
            told = await c.hint("kv.retain", {"block_hashes": ["00" * 32], "ttl_s": 60}, headers=bearer(key))
            assert (told["status"], told["reason"][:28]) == ("refused", "block_hashes name prompts of")
        await c.ask(body(), headers=bearer(OF_A, X_Request_Id="r1"))
        for headers in (bearer(GATE, X_Tenant="b"), bearer(OF_B)):
            told = await c.hint("kv.retain", {"request_id": "r1", "ttl_s": 60}, headers=headers)
            assert told["status"] == "refused"


# --- bounds -------------------------------------------------------------------------------------------------


@both_faces
@scenario
async def test_a_tenants_requests_and_pins_are_bounded_whoever_asks(tmp_path):
    async with tenants(tmp_path) as c:
        c.proxy._hints._pool_bytes = lambda view: 1000 * CHUNK

        async def pin(headers, action_id, first):
            return await c.hint(
                "kv.retain", {"tokens": [first, *IDS[1:]], "ttl_s": 60}, action_id, headers=headers
            )

        told = await pin(bearer(OF_A), "one", 1)
        assert (told["status"], told["tokens"]) == ("clipped", 512)
        assert told["reason"] == f"pins may take {2 * CHUNK} bytes for this tenant"
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


@both_faces
@scenario
async def test_a_tenants_requests_and_what_the_pool_had_of_them_are_counted(tmp_path):
    async with tenants(tmp_path, 256) as c:
        for _ in range(2):
            await c.ask(body(), headers=bearer(OF_A))
        await c.ask(body(prompt=[1]), headers=bearer(GATE, X_Tenant="b"))  # too short for a lookup
        await c.ask(body(), headers=bearer(PLAIN))
        assert [c.metric("tenant_requests_total", tenant=tenant) for tenant in "ab"] == [2, 1]
        assert c.metric("tenant_tokens_total", tenant="a", outcome="requested") == 2 * len(IDS)
        assert c.metric("tenant_tokens_total", tenant="a", outcome="found") == 2 * 256
