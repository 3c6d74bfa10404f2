"""Pins in a real pool, and `pd-cache pin`, `prefetch` and `release`."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from launch.discovery import View
from launch.discovery.directory import file_records
from launch.masters import pool_bytes
from launch.proxy.lookups import PoolLookups, open_lookup
from launch.proxy.routing.direct import DirectRule
from pd_cache.chunks import ChunkedTokenDatabase
from pd_cache.cluster import ClusterConfig, MasterNode, NodeRecord, load_config
from tests.support.cli import cli, cli_json
from tests.support.cluster import CHUNK as SMALL
from tests.support.cluster import cluster_file, complete, metric_at, nodes_of_every_role, started
from tests.support.pages import serving
from tests.support.proxy import NAMESPACE, cluster, scenario
from tests.support.waiting import wait_for

CHUNK = NAMESPACE.chunk_size
LARGE = msgspec.structs.replace(NAMESPACE, page_bytes=8192)
"""A namespace whose chunks have 256 KiB."""


@scenario
async def test_a_pinned_prompt_survives_a_flood_that_evicts_one_of_the_same_age(make_pool):
    pool = make_pool(segment="64MiB", lease_ttl_ms=2000).start()
    config = load_config(pool.file)
    database, payload = ChunkedTokenDatabase(LARGE), bytes(LARGE.chunk_bytes)
    pinned, unpinned = [1] * 8 * CHUNK, [2] * 8 * CHUNK

    def keys(tokens):
        return database.keys(database.name_chunks(tokens))

    lookups = PoolLookups(lambda pool: open_lookup(config, "127.0.0.1", pool), timeout_s=60.0)
    async with cluster(rule=DirectRule(256), lookups=lookups) as c:
        c.proxy._pools._master = lambda view: pool.address
        c.proxy._hints._pool_bytes = lambda view: pool_bytes(config, view)
        decode = NodeRecord(name="decode-0", role="decode", address=c.decode[0].url, **LARGE.described())
        c.proxy.update(View((decode, *file_records(config))))
        assert lookups.blind == ""
        # the thread ends before its client is closed, also if the scenario is broken off
        with pool.bare_client() as client, ThreadPoolExecutor(1) as thread:
            loop = asyncio.get_running_loop()
            for key in (*keys(pinned)[:4], *keys(unpinned)):
                assert client.put(key, payload) == 0
            told = {}
            while told.get("status") != "accepted":  # the client of the pool begins to connect
                told = await c.hint("kv.retain", {"tokens": pinned, "ttl_s": 600})
                assert told["status"] == "accepted" or told["reason"] == "the pool does not answer", told
            assert (told["tokens"], told["in_pool"]) == (8 * CHUNK, 4 * CHUNK)
            for key in keys(pinned)[4:]:
                assert client.put(key, payload) == 0, "what comes later is kept, too"
            async with asyncio.timeout(60):
                while c.proxy.metrics.pinned_objects._value.get() < 8:
                    await asyncio.sleep(0.05)

            def flood(number):
                return sum(client.put(f"flood/{number}/{index}", payload) == 0 for index in range(16))

            stored = number = 0
            while stored < 3 * 256:
                stored += await loop.run_in_executor(thread, flood, number)
                number += 1
                await asyncio.sleep(0.1)  # so that it lasts for several leases
                assert number < 500, "the pool takes stores all the while"
            there = client.batch_is_exist([*keys(pinned), *keys(unpinned)])
            assert there == [1] * 8 + [0] * 8
            assert c.metric("pinned_objects") == 8
            assert (await c.hint("kv.release", {"action_id": "a"}))["released"] == 1
            number = 500
            while await asyncio.to_thread(pool.keys) & set(keys(pinned)):  # a lookup would renew their leases
                await loop.run_in_executor(thread, flood, number)
                await asyncio.sleep(0.05)
                number += 1
                assert number < 1500, "what was released goes like all others"


def test_memory_that_is_being_drained_is_no_part_of_the_pool_that_pins_share():
    segments = [{"segment_name": f"h:{n}", "te_endpoint": f"h:{n}", "size_bytes": 100 << n} for n in range(3)]
    segments[1]["status"], segments[2]["status"] = "DRAINING", "DRAINED"
    with serving(lambda path: json.dumps({"segments": segments}).encode()) as port:
        master = NodeRecord(name="m", role="master", address="h:1", metrics=f"http://127.0.0.1:{port}")
        config = ClusterConfig(nodes=(MasterNode(name="m", port=1),))
        assert pool_bytes(config, View((master,))) == 100


def test_a_prompt_is_pinned_prefetched_and_released_by_command(tmp_path):
    """The decode node loads through a cache server."""
    prompt = list(range(5 * SMALL + 1))
    with started(tmp_path, proxy={"direct_tokens": 16}, nodes=nodes_of_every_role()) as running:
        file, decode = tmp_path / "cluster.yaml", running.urls["decode-0"]
        (tmp_path / "tokens.json").write_text(json.dumps(prompt))
        tokens = ("-c", file, "--tokens", tmp_path / "tokens.json")
        told = {}
        while told.get("status") != "accepted":  # the proxy learns what it needs from the nodes
            told = cli_json("pin", *tokens, "--ttl", "60", "--id", "p", code=None)
        assert (told["tokens"], told["in_pool"], told["ttl_s"]) == (5 * SMALL, 0, 60)
        answer = complete(running.urls["proxy"], prompt)
        assert answer.status == 200
        while told["in_pool"] < 5 * SMALL:  # the last chunks are stored after the answer
            given = json.dumps(prompt)
            told = cli_json("pin", "-c", file, "--tokens", "-", "--ttl", "9e9", "--id", "p", input=given)
        assert (told["status"], told["ttl_s"], told["reason"]) == ("clipped", 3600, "max_ttl_s is 3600")
        assert cli_json("pin", "-c", file, "--text", "x" * 999, "--ttl", "9")["tokens"] == 15 * SMALL
        assert cli_json("release", "-c", file, "--request", answer.headers["X-Request-Id"])["released"] == 1
        assert cli_json("release", "-c", file, "--id", "p", code=1)["status"] == "refused"
        shown = cli("pin", *tokens, "--ttl", "60", "--id", "q").stdout
        assert shown == f"q: keeps {5 * SMALL} tokens for 60 s; the pool has {5 * SMALL} of them now\n"
        assert cli("release", *tokens).stdout == "1 released\n"
        loads = metric_at(decode, "pd_cache_reference_loads_total", outcome="hit")
        told = cli_json("prefetch", *tokens)
        assert (told["status"], told["node"]) == ("accepted", decode)
        assert (told["tokens"], told["in_pool"], told["ttl_s"]) == (5 * SMALL, 5 * SMALL, 60)
        loaded = "pd_cache_reference_loads_total"
        wait_for(lambda: metric_at(decode, loaded, outcome="hit") == loads + 1, "the node has loaded it")
        after = complete(running.urls["proxy"], prompt)
        assert after.tokens == answer.tokens
        assert after.body["pd_cache"]["prefill"] is None, "it goes to the decode node alone"
        assert after.body["pd_cache"]["report"]["streamed"] == 5 * SMALL, "and has nothing to load"
        shown = cli("prefetch", *tokens).stdout
        assert shown == f"{decode} loads 320 of 320 tokens; for 60 s, its next request goes there\n"


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        (["--ttl", "9"], 2, "exactly one of --tokens FILE, --text TEXT and --request"),
        (
            ["--ttl", "9", "--text", "x", "--tokens", "-"],
            2,
            "exactly one of --tokens FILE, --text TEXT and --request",
        ),
        (["--ttl", "9", "--tokens", "-"], 2, "expected a JSON list of token ids"),
        (["--ttl", "0", "--text", "x"], 2, "Invalid value for '--ttl'"),
        (["--text", "x"], 2, "Missing option '--ttl'"),
        (["--ttl", "9", "--text", "x"], 1, "no proxy has answered: proxy: its port is 0 in this file"),
    ],
)
def test_wrong_pins_end_with_one_line(tmp_path, arguments, code, says):
    assert says in cli("pin", "-c", cluster_file(tmp_path), *arguments, code=code, input="no list").output


def test_a_prefetch_needs_the_prompt_itself(tmp_path):
    two = ("--text", "x", "--tokens", "-"), ("--text", "x", "--request", "a")
    for given in ((), ("--request", "a"), *two):
        done = cli("prefetch", "-c", cluster_file(tmp_path), *given, code=2, input="[1]")
        assert "exactly one of --tokens FILE and --text TEXT" in done.output
    assert "--request" not in cli("prefetch", "--help").output
