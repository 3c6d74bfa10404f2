"""Conditional disaggregation: which prompts go past the prefill nodes."""

import re
import threading

import msgspec
import pytest
from aiohttp import web

from launch.discovery import View
from launch.proxy.lookups import Pool, PoolLookups
from launch.proxy.nodes import NodePools
from launch.proxy.routing.direct import DirectRule
from pd_cache.chunks import (
    BlockHasher,
    ChunkedTokenDatabase,
    ChunkNamer,
    MediaItem,
    describe_hashes,
    salt_keys,
    stride_hashes,
)
from pd_cache.cluster import About, NodeRecord, ProxyConfig
from pd_cache.lookup import LookupClient
from pd_cache.reasons import Found
from pd_cache.versions import Weights
from tests.support.proxy import (
    NAMESPACE,
    answers,
    both_faces,
    cluster,
    hangs,
    says,
    scenario,
    spelled,
    until,
    view,
)


class Lookups(LookupClient):
    """Answers `found`, after `gate` was opened."""

    def __init__(self, found):
        super().__init__(ChunkedTokenDatabase(NAMESPACE))
        self.found = found
        self.reason = "missing"
        self.gate = threading.Event()
        self.gate.set()
        self.asked = []
        self.closed = False
        self.label = ""

    @property
    def available(self):
        return True

    def find(self, names, lookup_id=None, *, chunks_at_hand=0):
        self.asked.append(names)
        self.gate.wait(60)
        chunks = self.found // NAMESPACE.chunk_size
        return Found(chunks, chunks, "none" if chunks >= len(names) else self.reason)

    def reset(self, version=None):
        self.label = version

    def close(self):
        self.closed = True


POOL = Pool((NAMESPACE,), "127.0.0.1:1")
IDS = [7] * 1000
TEXT = "x" * 5000
CHAT = [{"role": "user", "content": TEXT}]
PICTURE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}


def looks_up(client, tokens=256, pool=POOL, **options):
    """The arguments of a proxy that looks prompts up with this client."""

    def opens(pool):
        if client is None:
            raise OSError("no Mooncake here")
        return client

    lookups = PoolLookups(opens if tokens else None, **{"timeout_s": 60.0, **options})
    lookups.use(pool)
    lookups.use = lambda pool: None  # the nodes of these tests keep no cache
    return {"rule": DirectRule(tokens), "lookups": lookups}


async def tokenizes(request):
    if isinstance((await request.json()).get("prompt"), list):
        return await answers(400)(request)
    return web.json_response({"count": 1000, "max_model_len": 8192, "tokens": IDS})


@both_faces
@pytest.mark.parametrize(
    "body, found, went, looked_up",
    [
        ('{"prompt": SHORT}', 0, "short", False),
        ('{"prompt": FEW}', 0, "short", False),
        ('{"prompt": CHUNK}', 0, "handed_over", True),
        ('{"prompt": IDS, "cache_salt": "tenant"}', 1024, "in_pool", True),
        ('{"prompt": IDS}', 1000, "in_pool", True),
        ('{"prompt": IDS}', 744, "handed_over", True),
        ('{"prompt": IDS, "model": "base"}', 1024, "in_pool", True),
        ('{"prompt": IDS, "model": "adapter"}', 1024, "handed_over", False),  # has KV of other names
        ('{"prompt": TEXT}', 1024, "in_pool", True),
        ('{"messages": CHAT}', 1024, "in_pool", True),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}', 1024, "in_pool", True),
        ('{"messages": CHAT, "reasoning_effort": null}', 1024, "in_pool", True),
        # their tokens are not all that they are
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}, PICTURE]}]}', 1024, "handed_over", False),
        ('{"messages": CHAT, "documents": [{"text": "x"}]}', 1024, "handed_over", False),
        ('{"messages": CHAT, "reasoning_effort": "high"}', 1024, "handed_over", False),
        # a template shows tools, so they are a part of the prompt
        ('{"messages": [{"role": "user", "content": "Hi"}], "tools": [{"description": TEXT}]}', 0, "handed_over", True),
        # vLLM computes what it is to score, whatever it has of it
        ('{"prompt": IDS, "prompt_logprobs": 0}', 0, "scored", True),
        ('{"prompt": IDS, "echo": true, "logprobs": 0}', 0, "scored", True),
        ('{"messages": CHAT, "echo": true}', 0, "scored", True),
        ('{"prompt": IDS, "prompt_logprobs": null, "echo": true, "logprobs": null}', 0, "handed_over", True),
        ('{"prompt": IDS, "echo": false, "logprobs": 5}', 0, "handed_over", True),
        # what is no prompt is left to the nodes
        ('{"prompt": MIXED}', 1024, "handed_over", None),
    ],
)  # fmt: skip
@scenario
async def test_a_prompt_of_which_little_is_left_to_compute_goes_to_the_decode_node_alone(
    body, found, went, looked_up
):
    shorts = {"SHORT": [1] * 255, "FEW": "x" * 1000, "CHUNK": [1] * 256}
    body = spelled(body, IDS=IDS, MIXED=[*IDS, "x"], TEXT=TEXT, CHAT=CHAT, PICTURE=PICTURE, **shorts)
    client = Lookups(found)
    async with cluster(**looks_up(client, pool=POOL._replace(model="base"))) as c:
        c.decode[0].tokenize = tokenizes
        await c.ask(body)
        assert c.metric("handoffs_total", result=went) == 1
        assert len(c.prefill[0].bodies) == (went == "handed_over")
        assert ("kv_transfer_params" in c.decode[0].bodies[0]) == (went == "handed_over")
    if looked_up is not None:
        ids = body["prompt"] if isinstance(body.get("prompt"), list) else IDS
        assert (
            client.asked
            == [ChunkNamer(256).name_chunks(ids, None, salt_keys(body.get("cache_salt")))] * looked_up
        )
    assert client.closed


@both_faces
@scenario
async def test_a_prompt_that_its_decode_node_would_not_load_goes_there_alone_while_the_node_says_so():
    async with cluster(1, 2) as c:

        async def went(tokens, *declines):
            """Which hops got the prompt, while the first decode node's engines say so."""
            engines = [Weights(id="0" * 16, since=0, declines=length) for length in declines]
            c.proxy._pools.note_about(c.decode[0].url, About(weights=tuple(engines)))
            before = [len(node.bodies) for node in (*c.prefill, *c.decode)]
            for _ in c.decode:  # they take turns
                await c.ask({"prompt": [1] * tokens})
            counts = [len(node.bodies) for node in (*c.prefill, *c.decode)]
            return [now - then for now, then in zip(counts, before, strict=True)]

        assert await went(100) == [2, 1, 1]
        assert await went(100, 100) == [1, 1, 1]
        assert "kv_transfer_params" not in c.decode[0].bodies[-1]
        (hop,) = (await c.told(f"/requests/{c.decode[0].headers[-1]['X-Request-Id']}"))["hops"]
        assert (hop["node"], hop["direct"]) == (c.decode[0].url, "not_worth")
        assert await went(101, 100) == [2, 1, 1]
        assert await went(100, 100, 0) == [2, 1, 1], "one of its engines would load it"
        assert c.metric("handoffs_total", result="not_worth") == 1


@both_faces
@scenario
async def test_a_prompt_without_tokens_gets_its_nodes_answer():
    async with cluster(**looks_up(Lookups(0))) as c:
        await c.ask({"prompt": [], "stream": True, "kv_hints": {}})


NAMES = "ab" * 32, "cd" * 32
RENDERED = {
    "token_ids": IDS,
    "features": {
        "mm_hashes": {"image": [NAMES[0], NAMES[0]], "audio": [NAMES[1]]},
        "mm_placeholders": {
            "image": [{"offset": 300, "length": 8}, {"offset": 700, "length": 8}],
            "audio": [{"offset": 500, "length": 30}],
        },
    },
}
MEDIA = [MediaItem(NAMES[0], 300, 8), MediaItem(NAMES[1], 500, 30), MediaItem(NAMES[0], 700, 8)]
PICTURES = [{"role": "user", "content": [PICTURE, {**PICTURE, "uuid": "mine"}, "How many ships are there?"]}]


@both_faces
@pytest.mark.parametrize("mode", ["tokens", "blocks"])
@scenario
async def test_a_chat_with_media_is_looked_up_by_what_a_decode_node_renders(mode):
    client, rendered = Lookups(1024), []

    async def renders(request):
        rendered.append(await request.json())
        answer = {**RENDERED, "token_ids": IDS[:200], "features": None} if len(rendered) == 2 else RENDERED
        return web.json_response(answer)

    space = msgspec.structs.replace(
        NAMESPACE, hash_mode=mode, hash_seed=describe_hashes("sha256", "vllm-none-hash", "")
    )
    async with cluster(1, 2, **looks_up(client, pool=Pool((space,), "127.0.0.1:1"))) as c:
        c.decode[1].render = renders
        (prefill,), decode = ([node.url for node in nodes] for nodes in (c.prefill, c.decode))
        assert (await c.told("/health"))["media_lookups"] == "off: no decode node renders chats"
        records = view([prefill], decode).nodes
        c.proxy.update(View((*records[:2], msgspec.structs.replace(records[2], renders=True))))
        assert (await c.told("/health"))["media_lookups"] == "on"
        for more in ({"cache_salt": "tenant", "n": 2}, {"reasoning_effort": "high"}):
            await c.ask({"messages": PICTURES, **more})
        assert [c.metric("handoffs_total", result=why) for why in ("in_pool", "short")] == [1, 1]
    bare = [{"role": "user", "content": [PICTURE, PICTURE, "How many ships are there?"]}]
    assert [(body["messages"], body["mm_payload"], "n" in body) for body in rendered] == [
        (bare, "none", False)
    ] * 2
    if mode == "tokens":
        assert client.asked == [
            ChunkedTokenDatabase(space).name_media_chunks(IDS, salt_keys("tenant"), MEDIA)
        ]
    else:
        hashes = BlockHasher(16, space.hash_seed).hashes(IDS, "tenant", MEDIA)
        assert client.asked == [stride_hashes(hashes, 16)]


@pytest.mark.parametrize(
    "answer",
    [
        answers(403),
        says(b"{}"),
        answers(200, {**RENDERED, "features": {**RENDERED["features"], "mm_placeholders": {}}}),
        answers(200, {**RENDERED, "features": {"mm_hashes": {"image": ["renderer0-mm-1-image-0"]}, "mm_placeholders": {}}}),
        answers(200, {**RENDERED, "token_ids": IDS[:10]}),
        answers(200, {**RENDERED, "features": {"mm_hashes": {"image": NAMES}, "mm_placeholders": {"image": [{"offset": 9, "length": 2}, {"offset": 10, "length": 1}]}}}),
    ],
    ids=["403", "garbage", "no places", "names of no content", "places behind its end", "places that overlap"],
)  # fmt: skip
@scenario
async def test_a_chat_with_media_that_no_node_renders_well_goes_the_usual_way(answer):
    client = Lookups(1024)
    async with cluster(**looks_up(client), renders=True) as c:
        c.decode[0].render = answer
        await c.ask({"messages": [*CHAT, *PICTURES]})
        assert len(c.prefill[0].bodies) == 1
    assert client.asked == []


@pytest.mark.parametrize("step", [None, 4], ids=["a hash a block", "a hash for less than a block"])
@scenario
async def test_chunks_that_vllm_names_are_looked_up_by_its_block_hashes(step):
    client, hashes = Lookups(1024), describe_hashes("sha256", "vllm-none-hash", "", step)
    space = msgspec.structs.replace(NAMESPACE, hash_mode="blocks", hash_seed=hashes)
    async with cluster(**looks_up(client, pool=Pool((space,), "127.0.0.1:1"))) as c:
        await c.ask({"prompt": IDS, "cache_salt": "tenant"})
        assert c.prefill[0].bodies == []
    step = step or space.block_size
    assert client.asked == [
        stride_hashes(BlockHasher(step, hashes).hashes(IDS, "tenant"), space.chunk_size // step)
    ]


XXHASH = msgspec.structs.replace(NAMESPACE, hash_mode="blocks", hash_seed=describe_hashes("xxhash", "7", ""))


@pytest.mark.parametrize(
    "direct, why",
    [
        (
            lambda client: looks_up(client, pool=Pool((XXHASH,), "127.0.0.1:1")),
            "off: .*names its blocks by xxhash",
        ),
        (lambda client: looks_up(None), "off: no Mooncake here"),
        (lambda client: looks_up(client, 0), "off: direct_tokens is 0"),
        (
            lambda client: {"lookups": PoolLookups(lambda pool: client)},
            "off: no decode node reports its namespace",
        ),
    ],
)
@scenario
async def test_where_prompts_cannot_be_looked_up_all_are_prefilled_and_health_says_why(direct, why):
    client = Lookups(1024)
    async with cluster(**direct(client)) as c:
        await c.ask({"prompt": IDS})
        assert len(c.prefill[0].bodies) == 1
        assert re.match(why, (await c.told("/health"))["lookups"])
    assert client.asked == []


@scenario
async def test_lookups_begin_when_a_namespace_and_a_master_are_known_and_end_with_them():
    lookups = PoolLookups(lambda pool: Lookups(0))
    async with cluster(lookups=lookups, health_interval_s=0.02) as c:
        c.decode[0].health = answers(200, NAMESPACE.described())
        await until(lambda: lookups.blind == "no master of the pool is known", "the namespace is known")
        lookups.use(POOL)
        assert (await c.told("/health"))["lookups"] == "on"
        c.decode[0].health = answers(200, {})
        await until(lambda: lookups.blind == "no decode node reports its namespace", "it was started anew")


@scenario
async def test_a_lookup_of_more_objects_than_any_model_has_is_not_made():
    client = Lookups(1000)
    space = msgspec.structs.replace(NAMESPACE, block_size=1, chunk_size=1, shards=256)
    async with cluster(**looks_up(client, pool=Pool((space,) * 2, "127.0.0.1:1"))) as c:
        for tokens in (512, 513):
            await c.ask({"prompt": [1] * tokens})
            assert len(client.asked) == 1


@both_faces
@scenario
async def test_a_lookup_that_hangs_costs_its_deadline_and_nothing_more():
    client = Lookups(1024)
    client.gate.clear()
    async with cluster(**looks_up(client, timeout_s=0.1)) as c:
        await c.ask({"prompt": IDS})
        assert len(c.prefill[0].bodies) == 1
        client.gate.set()


@pytest.mark.parametrize("failure", [answers(404), says(b"{}"), hangs], ids=["404", "garbage", "hangs"])
@scenario
async def test_a_text_whose_tokens_no_node_tells_goes_the_usual_way(failure):
    asked, times = [], 2

    async def fails(request):
        asked.append(await request.json())
        return await failure(request)

    async with cluster(1, 2, **looks_up(Lookups(1024), timeout_s=0.1 if failure is hangs else 60.0)) as c:
        c.decode[0].tokenize = c.decode[1].tokenize = fails
        for _ in range(times):
            await c.ask({"prompt": TEXT, "max_tokens": 5})
        assert len(c.prefill[0].bodies) == times
        assert asked == [{"prompt": TEXT}] * times
        assert abs(len(c.decode[0].bodies) - len(c.decode[1].bodies)) <= 1, (
            "asking for tokens takes nobody's turn"
        )


@pytest.mark.parametrize("status", [400, 404, 500])
@scenario
async def test_a_text_that_cannot_be_tokenized_does_not_end_lookups_for_others(status):
    async def tokenizes_no_poison(request):
        poison = "poison" in (await request.json())["prompt"]
        return await (answers(status) if poison else tokenizes)(request)

    async with cluster(**looks_up(Lookups(1024))) as c:
        c.decode[0].tokenize = tokenizes_no_poison
        for prompt in ("poison" * 1000, TEXT):
            await c.ask({"prompt": prompt})
        assert len(c.prefill[0].bodies) == 1, "the good one was looked up and went past"


class Opened(list):
    """The clients that were opened, and the pools that it watches."""

    def __init__(self):
        self.lookups = PoolLookups(lambda pool: self.append((pool, Lookups(0))) or self[-1][1])
        self.pools = NodePools(ProxyConfig(), self.lookups, lambda view: "127.0.0.1:1")

    def update(self, *records):
        self.pools.update(View(records))


@pytest.fixture
def opened():
    found = Opened()
    yield found
    found.lookups.close()
    assert all(client.closed for _, client in found)


def keeps(port, space=NAMESPACE):
    """A decode node."""
    return NodeRecord(name=f"{port}", role="decode", address=f"http://127.0.0.1:{port}", **space.described())


def test_a_pool_that_comes_back_is_asked_by_the_client_that_was_there(opened):
    for known in (POOL, "no decode node reports its namespace", POOL):
        opened.lookups.use(known)
    ((_, client),) = opened
    assert not client.closed
    opened.lookups.use(POOL._replace(master="127.0.0.1:2"))
    assert client.closed
    assert len(opened) == 2


def test_a_master_whose_record_is_gone_for_a_while_is_asked_by_the_client_that_was_there(opened):
    decode = keeps(2)
    master = NodeRecord(name="m", role="master", address="127.0.0.1:1", lease_ttl_ms=6000)
    for others in ([master], [], [master], [msgspec.structs.replace(master, address="127.0.0.1:3")]):
        opened.update(decode, *others)
    assert len(opened) == 1


def test_prompts_are_looked_up_in_the_version_that_most_decode_nodes_say_by_the_same_client(opened):
    nodes = [keeps(port) for port in (2, 3, 4)]
    opened.update(*nodes)
    seen = []
    for node, label in zip([*nodes, *nodes], ["w1", "w1", None, None, None, "w2"], strict=True):
        opened.pools.note_about(node.address, About(weights=(Weights(id="0" * 16, label=label, since=0),)))
        seen.append(opened[-1][1].label)
    assert seen == ["", "w1", "w1", None, None, None]
    assert len(opened) == 1


def test_nodes_of_two_versions_that_come_and_go_change_the_pool_once(opened):
    old, new = NAMESPACE, msgspec.structs.replace(NAMESPACE, model="tiny@2")
    nodes = [keeps(2, new), keeps(3, old), keeps(4, new)]
    for records in (nodes[1:2], nodes, nodes[1:], nodes, (), nodes, nodes[::2], nodes, nodes[1:], nodes):
        opened.update(*records)
    assert [pool.namespaces for pool, _ in opened] == [(old,), (new,)]
