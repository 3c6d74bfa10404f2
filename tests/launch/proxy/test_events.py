"""The index of blocks, `/query`, and requests that go where events say that their prompt is."""

import asyncio
import io
import threading
from contextlib import ExitStack, asynccontextmanager, closing
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.discovery import View
from launch.proxy.events import KnownCache, read_query
from launch.proxy.lookups import PoolLookups
from launch.proxy.routing.direct import DirectRule
from launch.proxy.routing.node_pool import NodePool
from launch.proxy.routing.prefixes import NamedPrompt, PromptNamer, RoutedPrompt
from pd_cache.chunks import BlockHasher, describe_hashes
from pd_cache.cluster import NodeRecord
from pd_cache.events import (
    ClearedEvent,
    EventBatch,
    EventEndpoints,
    Forget,
    RemovedEvent,
    StoredEvent,
)
from tests.launch.proxy.test_direct import Lookups
from tests.support.events import EventPublisher
from tests.support.proxy import NAMESPACE, Cluster, answers, cluster, record, scenario, until

FINGERPRINT = "f" * 16
SPACE = msgspec.structs.replace(
    NAMESPACE, hash_mode="blocks", hash_seed=describe_hashes("sha256", "vllm-none-hash", "")
)
TOKENS = list(range(1000))
HASHES = BlockHasher(16, SPACE.hash_seed).hashes(TOKENS)


def prompt(blocks, pool_tokens=0):
    return NamedPrompt(FINGERPRINT, 16 * len(blocks) + 5, blocks, 16, 64, pool_tokens)


def cache(*events):
    made = KnownCache(lambda: 1000)
    made.fingerprint = FINGERPRINT
    made.ranks[0].apply([EventBatch(1.0, list(events))])
    return made


# --- the index ----------------------------------------------------------------------------------------------

hashes = st.lists(st.integers(0, 15))
media = st.sampled_from([None, "GPU", "CPU", "STORAGE"])
events = st.one_of(
    st.builds(lambda hashes, medium: StoredEvent(hashes, medium=medium), hashes, media),
    st.builds(RemovedEvent, hashes, media),
    st.just(ClearedEvent()),
    st.just(Forget.ALL),
)


@given(st.lists(events, max_size=30), st.lists(st.integers(0, 15), unique=True))
def test_after_any_events_a_cache_knows_what_they_say(happened, blocks):
    known, model = KnownCache(lambda: 1000), {"GPU": set(), "CPU": set()}
    known.fingerprint = FINGERPRINT
    for event in happened:
        known.ranks[0].apply([event if isinstance(event, Forget) else EventBatch(1.0, [event])])
        if isinstance(event, StoredEvent | RemovedEvent):
            medium = event.medium or "GPU"
            if medium in model:
                change = (
                    model[medium].update
                    if isinstance(event, StoredEvent)
                    else model[medium].difference_update
                )
                change(event.block_hashes)
        else:
            model = {"GPU": set(), "CPU": set()}
        assert known.knows(prompt([1])) == (event is not Forget.ALL), "if not, the proxy guesses"
    there = 0
    while there < len(blocks) and any(blocks[there] in one for one in model.values()):
        there += 1
    assert known.tokens(prompt(blocks)) == 16 * there
    assert len(known) == sum(map(len, model.values()))


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=12), st.integers(0, 20))
def test_no_history_takes_more_than_the_room_that_all_share(stored, most):
    caches = []
    caches += [KnownCache(lambda: most - sum(map(len, caches))) for _ in range(3)]
    for number, hashes in enumerate(stored):
        caches[number % 3].ranks[0].apply([EventBatch(1.0, [StoredEvent(hashes)])])
        assert sum(map(len, caches)) <= most


def test_hashes_of_either_form_and_prompts_meet():
    named = PromptNamer(SPACE).name(TOKENS[:100], None)
    assert len(named.blocks) == 6
    for hashes in (HASHES[:4], [int.from_bytes(one, "big") & (1 << 64) - 1 for one in HASHES[:4]]):
        assert cache(StoredEvent(list(hashes), medium="GPU")).tokens(named) == 64


def test_a_node_whose_hashes_cover_tokens_behind_a_block_is_guessed_and_not_taken_for_empty():
    known = cache(
        StoredEvent([1, 2], lookahead_token_ids=[[7], [8]]), StoredEvent([3], lookahead_token_ids=[[9]])
    )
    assert (len(known), known.ranks[0].unnameable, known.knows(prompt([1, 2]))) == (0, True, False)


def test_what_is_under_way_counts_until_it_is_answered():
    known, asked = cache(StoredEvent([1, 2])), prompt([1, 2, 3, 4, 5])
    with known.computing(prompt([1, 2, 3])):
        with known.computing(prompt([1, 2, 3, 4])):
            assert known.tokens(asked) == 64
        assert known.tokens(asked) == 48
    assert known.tokens(asked) == 32


def test_layers_with_a_window_say_nothing_of_prefixes():
    known = cache(
        StoredEvent([1, 2, 3], group_idx=0, kv_cache_spec_kind="full_attention"),
        StoredEvent([1, 2, 3, 4], group_idx=1, kv_cache_spec_kind="sliding_window"),
        RemovedEvent([1], group_idx=1),
    )
    assert known.tokens(prompt([1, 2, 3, 4])) == 48


# --- cost ---------------------------------------------------------------------------------------------------


def routed(*blocks, pool_tokens=0):
    return RoutedPrompt(16 * len(blocks) + 5, [], 64, prompt(list(blocks), pool_tokens))


def pool(**caches):
    made = NodePool("prefill", "prefix_aware")
    made.update(record(url) for url in ("a", "b"))
    made.know(caches)
    return made


@pytest.mark.parametrize(
    "a, b, load_cost, asked, taken",
    [
        ([1], [1, 2, 3], 0.0, routed(1, 2, 3, 4), {"b"}),
        ([1, 2], [9], 0.0, routed(5, 6), {"a", "b"}),
        ([1, 2, 3], [], 0.0, routed(1, 2, 3, 4, pool_tokens=48), {"a", "b"}),  # the pool holds as much
        ([1, 2, 3], [], 0.5, routed(1, 2, 3, 4, pool_tokens=48), {"a"}),  # but to load it is not free
    ],
)
def test_the_node_with_the_fewest_tokens_to_compute_is_taken(a, b, load_cost, asked, taken):
    nodes = pool(a=cache(StoredEvent(a)), b=cache(StoredEvent(b)))
    nodes.load_cost = load_cost
    assert {nodes.pick(0.0, asked) for _ in range(4)} == taken


def test_what_the_pool_holds_is_no_reason_to_take_a_node_that_would_compute_it():
    nodes, asked = pool(a=cache(StoredEvent([1])), b=cache()), routed(1, 2, 3, 4, pool_tokens=48)
    nodes.node("a").loads = False
    assert {nodes.pick(0.0, asked) for _ in range(4)} == {"b"}
    nodes.node("b").loads = False
    assert {nodes.pick(0.0, asked) for _ in range(4)} == {"a"}, "its own cache has some"
    nodes.node("b").loads = True
    assert {nodes.pick(0.0, asked) for _ in range(4)} == {"b"}


def test_a_queue_that_is_longer_than_the_difference_sends_the_prompt_elsewhere():
    nodes = pool(a=cache(StoredEvent([1, 2, 3])), b=cache())
    with nodes.working("a", routed(*range(100, 110))):
        assert nodes.pick(0.0, routed(1, 2, 3, 4)) == "b"


def test_a_node_that_has_evicted_the_prompt_is_not_taken_for_it():
    nodes = pool(a=cache(), b=cache())
    first, second = str(nodes.pick(0.0, routed(9))), str(nodes.pick(0.0, routed(9)))
    with nodes.working(second, routed(1, 2, 3)):
        pass
    assert nodes.pick(0.0, routed(1, 2, 3)) == first, (
        "events do not say that the second kept it, and the first is next"
    )


@pytest.mark.parametrize("known", [True, False])
def test_a_node_without_events_is_guessed_beside_one_with_events(known):
    named = prompt([1, 2, 3, 4, 5, 6, 7])
    text = RoutedPrompt(named.tokens, [b"x", b"y"], 64, named if known else None)
    nodes = pool(a=cache(StoredEvent([1, 2])))
    with nodes.working("b", text):
        pass
    assert nodes.pick(0.0, text) == "b", "it was sent there, and `a` has less of it"


# --- /query, before real publishers -------------------------------------------------------------------------


class Publishing(NamedTuple):
    """A proxy whose two prefill nodes publish events."""

    c: Cluster
    nodes: list
    pool: Lookups

    async def query(self, status=200, **body):
        async with self.c.session.post(self.c.url + "/query", json={"token_ids": TOKENS, **body}) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def hits(self, **body):
        return (await self.query(**body))["default"]

    async def knows(self, blocks):
        """Waits until the proxy knows so many blocks."""
        known = -1
        while known != blocks:
            known = int((await self.c.told("/health"))["events"]["blocks"])


@asynccontextmanager
async def publishing(folder, found=0):
    client = Lookups(found)
    direct = {"rule": DirectRule(256), "lookups": PoolLookups(lambda pool: client, timeout_s=60.0)}
    with ExitStack() as stack:
        async with cluster(prefill=2, **direct, policy="prefix_aware") as c:
            c.proxy._pools._master = lambda view: "127.0.0.1:1"
            ends = [EventEndpoints(f"ipc://{folder}/{n}", f"ipc://{folder}/{n}.replay") for n in range(2)]
            made = [stack.enter_context(closing(EventPublisher(one))) for one in ends]
            fields = SPACE.described()
            records = [
                NodeRecord(name=f"prefill-{n}", role="prefill", address=node.url, events=ends[n].stream, replays=ends[n].replay, **fields)
                for n, node in enumerate(c.prefill)
            ]  # fmt: skip
            records += [NodeRecord(name="decode-0", role="decode", address=c.decode[0].url, **fields)]
            records += [NodeRecord(name="master", role="master", address="127.0.0.1:1")]
            for node in (*c.prefill, *c.decode):
                node.health = answers(200, fields)
            c.proxy.update(View(tuple(records)))
            yield Publishing(c, made, client)


def gpu(blocks):
    return [StoredEvent(list(HASHES[:blocks]), block_size=16, medium="GPU", group_idx=0)]


@scenario
async def test_query_says_in_the_conductors_words_which_node_has_how_much(tmp_path):
    async with publishing(tmp_path, found=256) as p:
        p.nodes[0].publish(gpu(10))
        p.nodes[1].publish([*gpu(40), RemovedEvent([HASHES[30]], "GPU", 0)])
        await p.knows(10 + 39)
        assert await p.hits(model="tiny", block_size=16) == {
            "prefill-0": {"longest_matched": 256, "GPU": 160, "CPU": 256, "DISK": 0, "DP": {"0": 256}},
            "prefill-1": {"longest_matched": 480, "GPU": 480, "CPU": 256, "DISK": 0, "DP": {"0": 480}},
        }
        assert list(await p.hits(instance_id="prefill-1")) == ["prefill-1"]
        p.pool.found = 0
        assert (await p.hits())["prefill-0"]["CPU"] == 0, "the pool is asked each time"
        assert (await p.hits(cache_salt="tenant"))["prefill-1"]["longest_matched"] == 0
        assert await p.hits(lora_name="adapter") == {}
        assert await p.query(tenant_id="another") == {}
        assert (await p.query(status=400, block_size=7))["error"]["param"] == "block_size"
        assert (await p.hits(token_ids=[]))["prefill-0"]["longest_matched"] == 0


@scenario
async def test_queries_are_read_one_at_a_time_and_not_on_the_event_loop(tmp_path):
    reading, most, loop = 0, 0, threading.current_thread()

    def read(body):
        nonlocal reading, most
        assert threading.current_thread() is not loop
        reading += 1
        most = max(most, reading)
        query = read_query(body)
        reading -= 1
        return query

    async with publishing(tmp_path) as p:
        with patch("launch.proxy.events.read_query", read):
            await asyncio.gather(*(p.hits() for _ in range(4)))
    assert most == 1


@scenario
async def test_every_data_parallel_rank_is_followed_and_one_that_is_gone_takes_no_others_blocks_along(
    tmp_path,
):
    async with publishing(tmp_path) as p:
        ends = EventEndpoints(f"ipc://{tmp_path}/0_dp1", f"ipc://{tmp_path}/0.replay_dp1")
        nodes = p.c.proxy._pools._view.nodes
        two = (
            msgspec.structs.replace(one, ranks=(ends,)) if one.name == "prefill-0" else one for one in nodes
        )
        p.c.proxy.update(View(tuple(two)))
        p.nodes[0].publish(gpu(10))
        with closing(EventPublisher(ends)) as second:
            second.publish(gpu(40))
            await p.knows(10 + 40)
            found = {"longest_matched": 640, "GPU": 640, "CPU": 0, "DISK": 0, "DP": {"0": 160, "1": 640}}
            assert (await p.hits())["prefill-0"] == found
            p.nodes[0].publish([ClearedEvent()])
            await p.knows(40)
        await p.knows(0)
        p.nodes[0].publish(gpu(3))
        await p.knows(3)
        assert (await p.hits())["prefill-0"]["DP"] == {"0": 48, "1": 0}


@scenario
async def test_what_is_no_query_is_refused_and_bodies_that_do_not_come_hold_up_no_other(tmp_path):
    async with publishing(tmp_path) as p:
        host, _, port = p.c.url.removeprefix("http://").rpartition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        for _, writer in opened:
            writer.write(b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n")
            await writer.drain()
        bodies = {
            400: (b"", b"[]", b"{}", b'{"token_ids": "x"}', b'{"token_ids": [-1]}', b'{"token_ids": [4294967296]}', b'{"token_ids": [1], "cache_salt": 5}'),
            413: (b"[" + b"1," * (3 << 20),),
            200: (b'{"token_ids": [1]}',),
        }  # fmt: skip
        for status, refused in bodies.items():
            for body in refused:
                async with p.c.session.post(p.c.url + "/query", data=io.BytesIO(body)) as response:
                    assert response.status == status, body[:50]
        for _, writer in opened:
            writer.close()


@scenario
async def test_a_prompt_goes_where_events_say_that_it_is_until_its_node_has_evicted_it_or_is_gone(tmp_path):
    async with publishing(tmp_path) as p:

        async def asked():
            await p.c.ask({"prompt": TOKENS})
            return [len(node.bodies) for node in p.c.prefill]

        p.nodes[0].publish(gpu(3))
        p.nodes[1].publish(gpu(50))
        await p.knows(53)
        for number in range(1, 4):
            assert await asked() == [0, number]
        p.nodes[1].publish([RemovedEvent(list(HASHES[:50]), "GPU", 0)])
        await p.knows(3)
        assert await asked() == [1, 3], "the other has evicted it, whatever was sent there"
        p.nodes[1].publish(gpu(6))
        await p.knows(9)
        nodes = p.c.proxy._pools._view.nodes
        p.c.proxy.update(View(tuple(record for record in nodes if record.name != "prefill-0")))
        await p.knows(6)
        await until(lambda: len(p.c.proxy._pools.caches._subscriber.describe()) == 1, "its publisher is left")
        restarted = (
            msgspec.structs.replace(one, instance="anew") if one.role == "prefill" else one for one in nodes
        )
        p.c.proxy.update(View(tuple(restarted)))
        await p.knows(9)  # what the new instances say
