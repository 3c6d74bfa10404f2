"""Conditional disaggregation: which prompts go past the prefill nodes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from aiohttp import web

from launch.proxy.direct import DirectRule, Pool
from pd_cache.chunks import BlockHasher, ChunkedTokenDatabase, ChunkNamer, describe_hashes, salt_keys, stride_hashes
from pd_cache.lookup import LookupClient
from pd_cache.reasons import Found, MissReason
from tests.support.proxy import (
    NAMESPACE,
    Behaviour,
    answers,
    cluster,
    hangs,
    says,
    scenario,
    until,
)


class Lookups(LookupClient):
    """Answers `found`, after `gate` was opened."""

    def __init__(self, found: int) -> None:
        super().__init__(ChunkedTokenDatabase(NAMESPACE))
        self.found = found
        self.reason: MissReason = "missing"
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[list[bytes]] = []
        self.closed = False

    @property
    def available(self) -> bool:
        return True

    def survey(self, names: Any, lookup_id: str | None = None, *, at_hand: int = 0) -> Found:
        self.asked.append(names)
        self.gate.wait(60)
        chunks = self.found // NAMESPACE.chunk_size
        return Found(chunks, chunks, "none" if chunks >= len(names) else self.reason)

    def reset(self) -> str | None:
        raise AssertionError("a proxy resets nothing")

    def close(self) -> None:
        self.closed = True


POOL = Pool((NAMESPACE,), "127.0.0.1:1")


def rule(client: LookupClient | None, tokens: int = 256, pool: Pool = POOL, **options: float) -> DirectRule:
    def opens(pool: Pool) -> LookupClient:
        if client is None:
            raise OSError("no Mooncake here")
        return client

    direct = DirectRule(tokens, opens, **{"timeout_s": 60.0, **options})
    direct.use(pool)
    direct.use = lambda pool: None  # type: ignore[method-assign]  # the nodes of these tests keep no cache
    return direct


@scenario
async def test_a_short_prompt_goes_to_the_decode_node_directly_without_a_lookup() -> None:
    client = Lookups(0)
    async with cluster(direct=rule(client)) as c:
        for prompt, there in (([1] * 255, 0), ("x" * 1000, 0), ([1] * 256, 1), ("x" * 1100, 2)):
            async with c.post({"prompt": prompt}) as response:
                assert response.status == 200
            assert len(c.prefill[0].bodies) == there
        assert "kv_transfer_params" not in c.decode[0].bodies[0]
        assert c.metric("handoffs_total", result="short") == 2
    assert client.asked == [ChunkNamer(256).hash_tokens([1] * 256)], (
        "one lookup, and none where no node tells a text's tokens"
    )
    assert client.closed


@pytest.mark.parametrize(("found", "directly"), [(1024, True), (1000, True), (744, False), (0, False)])
@scenario
async def test_a_prompt_whose_prefix_is_in_the_pool_goes_to_the_decode_node_directly(
    found: int, directly: bool
) -> None:
    client = Lookups(found)
    async with cluster(direct=rule(client)) as c:
        async with c.post({"prompt": [7] * 1000, "cache_salt": "tenant"}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == (0 if directly else 1)
        assert c.metric("handoffs_total", result="in_pool") == int(directly)
    assert client.asked == [ChunkNamer(256).hash_tokens([7] * 1000, salt_keys("tenant"))]


@pytest.mark.parametrize("step", [None, 4], ids=["a hash a block", "a hash for less than a block"])
@scenario
async def test_chunks_that_vllm_names_are_looked_up_by_its_block_hashes(step: int | None) -> None:
    client, hashes = Lookups(1024), describe_hashes("sha256", "vllm-none-hash", "", step)
    space = msgspec.structs.replace(NAMESPACE, hash_mode="blocks", hash_seed=hashes)
    async with cluster(direct=rule(client, pool=Pool((space,), "127.0.0.1:1"))) as c:
        async with c.post({"prompt": [7] * 1000, "cache_salt": "tenant"}) as response:
            assert response.status == 200
        assert c.prefill[0].bodies == []
    step = step or space.block_size
    named = BlockHasher(step, hashes).hashes([7] * 1000, "tenant")
    assert client.asked == [stride_hashes(named, space.chunk_size // step)]


@scenario
async def test_block_hashes_that_only_the_engine_can_compute_are_told_and_not_looked_up() -> None:
    client, hashes = Lookups(1024), describe_hashes("xxhash", "7", "")
    space = msgspec.structs.replace(NAMESPACE, hash_mode="blocks", hash_seed=hashes)
    async with cluster(direct=rule(client, pool=Pool((space,), "127.0.0.1:1"))) as c:
        async with c.post({"prompt": [7] * 1000}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1
        async with c.get("/health") as response:
            assert "names its blocks by xxhash" in (await response.json())["lookups"]
    assert client.asked == []


@scenario
async def test_a_lookup_of_more_objects_than_any_model_has_is_not_made() -> None:
    client = Lookups(1000)
    space = msgspec.structs.replace(NAMESPACE, block_size=1, chunk_size=1, shards=256)
    async with cluster(direct=rule(client, pool=Pool((space,) * 2, "127.0.0.1:1"))) as c:
        for tokens, looked_up in ((512, 1), (513, 1)):
            async with c.post({"prompt": [1] * tokens}) as response:
                assert response.status == 200
            assert len(client.asked) == looked_up


@scenario
async def test_a_prompt_for_another_model_say_an_adapter_is_not_looked_up_under_the_names_of_the_pools() -> None:
    client = Lookups(1024)
    async with cluster(direct=rule(client, pool=Pool((NAMESPACE,), "127.0.0.1:1", "base"))) as c:
        for body in ({"model": "adapter"}, {"model": "base"}, {}):
            async with c.post({"prompt": [7] * 1000, **body}) as response:
                assert response.status == 200
        assert [body.get("model") for body in c.prefill[0].bodies] == ["adapter"]
    assert len(client.asked) == 2


@scenario
async def test_a_lookup_that_hangs_or_cannot_be_made_costs_its_deadline_and_nothing_more() -> None:
    client = Lookups(1024)
    client.gate.clear()
    async with cluster(direct=rule(client, timeout_s=0.1)) as c:
        async with c.post({"prompt": [7] * 1000}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1
        client.gate.set()
    async with cluster(direct=rule(None)) as c:
        async with c.post({"prompt": [7] * 1000}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1
        async with c.get("/health") as response:
            assert (await response.json())["lookups"] == "off: no Mooncake here"


@scenario
async def test_the_tokens_of_a_text_are_asked_of_a_node() -> None:
    client, asked = Lookups(1024), []

    async def tokenizes(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return web.json_response({"count": 1000, "max_model_len": 8192, "tokens": [7] * 1000})

    async with cluster(1, 2, direct=rule(client)) as c:
        c.decode[0].tokenize = tokenizes
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}
        for path, body in (("completions", {"prompt": "x" * 5000}), ("chat/completions", chat)):
            async with c.session.post(f"{c.url}/v1/{path}", json={**body, "max_tokens": 5}) as response:
                assert response.status == 200
        assert asked == [{"prompt": "x" * 5000}, chat]
        assert c.prefill[0].bodies == []
        assert [len(node.bodies) for node in c.decode] == [1, 1], "asking for tokens takes nobody's turn"


@pytest.mark.parametrize(
    ("failure", "times"),
    [(answers(404), 1), (says(b"{}"), 1), (hangs, 3)],
    ids=["404", "garbage", "hangs"],
)
@scenario
async def test_a_node_that_does_not_tell_a_texts_tokens_is_not_asked_for_ever(failure: Behaviour, times: int) -> None:
    asked = []

    async def fails(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        return await failure(request)

    async with cluster(direct=rule(Lookups(1024), timeout_s=0.1 if failure is hangs else 60.0)) as c:
        c.decode[0].tokenize = fails
        for _ in range(times + 1):
            async with c.post({"prompt": "x" * 5000}) as response:
                assert response.status == 200
        assert len(c.prefill[0].bodies) == times + 1
        assert len(asked) == times


@pytest.mark.parametrize("status", [400, 422, 500])
@scenario
async def test_a_text_that_cannot_be_tokenized_does_not_end_lookups_for_others(status: int) -> None:
    async def tokenizes(request: web.Request) -> web.StreamResponse:
        poison = "poison" in (await request.json())["prompt"]
        return await (answers(status) if poison else answers(200, {"tokens": [7] * 1000}))(request)

    async with cluster(direct=rule(Lookups(1024))) as c:
        c.decode[0].tokenize = tokenizes
        for prompt in ("poison" * 1000, "x" * 5000):
            async with c.post({"prompt": prompt}) as response:
                assert response.status == 200
        assert len(c.prefill[0].bodies) == 1, "the good one was looked up and went past"


PICTURE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 5000}]}]}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 5000}, PICTURE]}]}, 0),
        ({"messages": [{"role": "user", "content": {"x" * 5000: 1}}]}, 0),
        ({"documents": [{"text": "x"}]}, 0),
        ({"reasoning_effort": "high"}, 0),
        ({"reasoning_effort": None}, 1),
    ],
)
@scenario
async def test_a_chat_that_is_more_than_its_text_is_not_looked_up_nor_its_pictures_fetched(
    more: dict[str, Any], asked: int
) -> None:
    client, chat = Lookups(1024), {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}
    async with cluster(direct=rule(client)) as c:
        c.decode[0].tokenize = answers(200, {"tokens": [7] * 1000})
        async with c.session.post(f"{c.url}/v1/chat/completions", json={**chat, **more}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1 - asked
    assert len(client.asked) == asked


@scenario
async def test_a_client_that_goes_away_says_nothing_about_the_node_that_was_asked_for_tokens() -> None:
    asked = []

    async def slow(request: web.Request) -> web.StreamResponse:
        asked.append(1)
        if len(asked) == 1:
            return await hangs(request)
        return web.json_response({"tokens": [7] * 1000})

    async with cluster(direct=rule(Lookups(1024), timeout_s=10)) as c:
        c.decode[0].tokenize = slow
        going = asyncio.ensure_future(c.post({"prompt": "x" * 5000}).__aenter__())
        await until(lambda: asked, "a node is asked")
        going.cancel()
        await asyncio.wait({going})
        await until(lambda: not c.proxy.requests.running, "the proxy let go")
        async with c.post({"prompt": "x" * 5000}) as response:
            assert response.status == 200
        assert (len(asked), c.prefill[0].bodies) == (2, [])


@scenario
async def test_health_says_why_no_prompt_is_looked_up() -> None:
    told = []
    direct = DirectRule(256, lambda pool: Lookups(0))
    async with cluster(direct=direct, health_interval_s=0.02) as c:

        async def lookups() -> str:
            async with c.get("/health") as response:
                return str((await response.json())["lookups"])

        told.append(await lookups())
        c.decode[0].health = answers(200, NAMESPACE.described())
        await until(lambda: direct.blind == "no master of the pool is known", "the namespace is known")
        told.append(await lookups())
        direct.use(Pool((NAMESPACE,), "127.0.0.1:1"))
        told.append(await lookups())
        c.decode[0].health = answers(200, {})
        await until(lambda: direct.blind == "no decode node reports its namespace", "it was started anew")
    assert told == [
        "off: no decode node reports its namespace",
        "off: no master of the pool is known",
        "on",
    ]
    async with cluster() as c, c.get("/health") as response:
        assert (await response.json())["lookups"] == "off: direct_tokens is 0"


@scenario
async def test_a_salt_or_prompt_that_is_none_is_left_to_the_nodes() -> None:
    async with cluster(direct=rule(Lookups(1024))) as c:
        for body in ({"prompt": [7] * 1000, "cache_salt": 7}, {"prompt": [7] * 999 + ["x"]}):
            async with c.post(body) as response:
                assert response.status == 200
        assert len(c.prefill[0].bodies) == 2


@scenario
async def test_with_direct_tokens_0_every_prompt_is_prefilled() -> None:
    client = Lookups(1024)
    async with cluster(direct=rule(client, 0)) as c:
        async with c.post({"prompt": [7]}) as response:
            assert response.status == 200
        assert len(c.prefill[0].bodies) == 1
    assert client.asked == []
