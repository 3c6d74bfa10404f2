"""`/query` of a proxy before real publishers: which node has how much of a prompt, and requests that go where it is."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from launch.discovery import View
from launch.proxy.direct import DirectRule
from pd_cache.chunks import BlockHasher, describe_hashes
from pd_cache.cluster import NodeRecord
from pd_cache.events import EventEndpoints, KvEvent, RemovedEvent, StoredEvent
from tests.launch.proxy.test_direct import Lookups
from tests.support.events import EventPublisher
from tests.support.proxy import NAMESPACE, Cluster, answers, cluster, scenario, until

SPACE = msgspec.structs.replace(
    NAMESPACE, hash_mode="blocks", hash_seed=describe_hashes("sha256", "vllm-none-hash", "")
)
TOKENS = list(range(1000))
HASHES = BlockHasher(16, SPACE.hash_seed).hashes(TOKENS)


class Publishing(NamedTuple):
    """A proxy whose two prefill nodes publish events."""

    c: Cluster
    nodes: list[EventPublisher]
    pool: Lookups

    async def query(self, status: int = 200, **body: Any) -> Any:
        async with self.c.session.post(self.c.url + "/query", json={"token_ids": TOKENS, **body}) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def hits(self, **body: Any) -> dict[str, dict[str, Any]]:
        return (await self.query(**body))["default"]  # type: ignore[no-any-return]

    async def blocks(self) -> int:
        async with self.c.get("/health") as response:
            return int((await response.json())["events"]["blocks"])


@asynccontextmanager
async def publishing(folder: Path, found: int = 0, **options: Any) -> AsyncIterator[Publishing]:
    lookups = Lookups(found)
    direct = DirectRule(256, lambda pool: lookups, timeout_s=60.0)
    with ExitStack() as stack:
        async with cluster(prefill=2, direct=direct, **{"policy": "prefix_aware", **options}) as c:
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
            yield Publishing(c, made, lookups)


def gpu(blocks: int) -> list[KvEvent]:
    return [StoredEvent(list(HASHES[:blocks]), block_size=16, medium="GPU", group_idx=0)]


@scenario
async def test_query_says_in_the_conductors_words_which_node_has_how_much(tmp_path: Path) -> None:
    async with publishing(tmp_path, found=256) as p:
        p.nodes[0].publish(gpu(10))
        p.nodes[1].publish([*gpu(40), RemovedEvent([HASHES[30]], "GPU", 0)])

        async def heard() -> bool:
            return await p.blocks() == 10 + 39

        while not await heard():
            pass
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


@pytest.mark.parametrize(
    "body", ["", "[]", "{}", '{"token_ids": "x"}', '{"token_ids": [-1]}', '{"token_ids": [4294967296]}', '{"token_ids": [1], "cache_salt": 5}']
)  # fmt: skip
@scenario
async def test_what_is_no_query_is_refused(tmp_path_factory: pytest.TempPathFactory, body: str) -> None:
    async with (
        publishing(tmp_path_factory.mktemp("q")) as p,
        p.c.session.post(p.c.url + "/query", data=body.encode()) as response,
    ):
        assert response.status == 400


@scenario
async def test_a_query_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with (
        publishing(tmp_path) as p,
        p.c.session.post(p.c.url + "/query", data=io.BytesIO(b"[" + b"1," * (3 << 20))) as response,
    ):
        assert response.status == 413


@scenario
async def test_without_a_namespace_prompts_cannot_be_named_and_the_answer_says_so() -> None:
    async with cluster() as c, c.session.post(c.url + "/query", json={"token_ids": [1]}) as response:
        assert response.status == 503
        assert "cannot be named" in (await response.json())["error"]["message"]


@scenario
async def test_a_prompt_goes_to_the_node_whose_events_say_that_it_has_it(tmp_path: Path) -> None:
    async with publishing(tmp_path) as p:
        p.nodes[0].publish(gpu(3))
        p.nodes[1].publish(gpu(50))
        while await p.blocks() != 53:
            pass
        for _ in range(3):
            async with p.c.post({"prompt": TOKENS}) as response:
                assert response.status == 200
        assert [len(node.bodies) for node in p.c.prefill] == [0, 3]
        p.nodes[1].publish([RemovedEvent(list(HASHES[:50]), "GPU", 0)])
        while await p.blocks() != 3:
            pass
        async with p.c.post({"prompt": TOKENS}) as response:
            assert response.status == 200
        assert len(p.c.prefill[0].bodies) == 1, "the other has evicted it, whatever was sent there"


@scenario
async def test_a_node_that_leaves_takes_its_blocks_out_of_the_index(tmp_path: Path) -> None:
    async with publishing(tmp_path) as p:
        p.nodes[0].publish(gpu(5))
        p.nodes[1].publish(gpu(6))
        while await p.blocks() != 11:
            pass
        nodes = p.c.proxy._pools._view.nodes
        p.c.proxy.update(View(tuple(record for record in nodes if record.name != "prefill-1")))
        assert await p.blocks() == 5
        await until(lambda: len(p.c.proxy._pools.caches._subscriber.describe()) == 2, "its publisher is left")
        restarted = (msgspec.structs.replace(one, instance="anew") if one.role == "prefill" else one for one in nodes)
        p.c.proxy.update(View(tuple(restarted)))
        while await p.blocks() != 11:  # what its new instance says
            pass


@scenario
async def test_queries_whose_bodies_do_not_come_hold_up_no_other(tmp_path: Path) -> None:
    async with publishing(tmp_path) as p:
        host, _, port = p.c.url.removeprefix("http://").rpartition(":")
        head = b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n"
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        for _, writer in opened:
            writer.write(head)
            await writer.drain()
        await p.query()
        for _, writer in opened:
            writer.close()
