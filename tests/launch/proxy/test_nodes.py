"""Which nodes are asked: by policy, by health; and the end of the proxy itself."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import time

import aiohttp
import pytest

from launch.discovery import View
from launch.http import BadStatus, fetch
from launch.proxy import nodes
from pd_cache.cluster import LimitsConfig
from tests.support.proxy import (
    EVENTS,
    STREAMED,
    Node,
    answers,
    begin,
    both_faces,
    cluster,
    decode_at,
    decodes,
    disconnects,
    error_of,
    hangs,
    jump,
    proxy_process,
    says,
    scenario,
    streams_then,
    until,
    view,
)


def pauses(go):
    """Streams one event, and another one when told to."""

    async def behaviour(request):
        response = await begin(request, EVENTS[0])
        await go.wait()
        await response.write(EVENTS[1])
        return response

    return behaviour


@both_faces
@scenario
async def test_prompts_with_a_common_beginning_go_to_one_prefill_node():
    async with cluster(3, 1, policy="prefix_aware") as c:
        for _ in range(4):
            for conversation in range(3):
                await c.ask({"prompt": [conversation + 1000] * 3000})
        for node in c.prefill:
            assert len({body["prompt"][0] for body in node.bodies}) == 1
            assert len(node.bodies) == 4
        long = {"prompt": [c.prefill[0].bodies[0]["prompt"][0]] * 3010}
        async with c.stuck_at(c.prefill[0], long), c.get("/metrics") as response:
            page = await response.text()
        (load,) = re.findall(rf'node_load{{hop="prefill",node="{c.prefill[0].url}"}} (\S+)', page)
        assert 0 < float(load) < 3010, "its node knows the beginning"


# --- the list of models -------------------------------------------------------------------------------------


@scenario
async def test_models_are_those_of_a_decode_node_and_another_is_asked_if_one_fails():
    async with cluster(0, 2) as c:
        entry = {"id": "a", "max_model_len": 9}
        c.decode[0].default, c.decode[1].default = (
            disconnects,
            answers(200, {"object": "list", "data": [entry]}),
        )
        async with c.get("/v1/models") as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            assert (await response.json())["data"] == [entry]
        for default, status in ((answers(401), 401), (says(b"{}"), 503)):
            for node in c.decode:
                node.default = default
            async with c.get("/v1/models") as response:
                assert response.status == status


# --- health -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [answers(503), hangs], ids=["fails", "hangs"])
@scenario
async def test_a_node_that_is_not_well_gets_no_requests_until_it_is_again(check, monkeypatch):
    # long enough for the nodes that are well, on a busy machine, too
    monkeypatch.setattr(nodes, "HEALTH_TIMEOUT_S", 1.0 if check is hangs else 60.0)
    async with cluster(2, 1, health_interval_s=0.02) as c:
        (sick, well), (only,) = c.prefill, c.decode

        async def healthy(hop, node):
            return (await c.told("/health"))[hop][node.url]

        sick.health = only.health = check
        while await healthy("prefill", sick) or await healthy("decode", only):
            pass
        for _ in range(3):
            await c.ask()  # with no other decode node, the checks are not believed
        assert (len(sick.bodies), len(well.bodies)) == (0, 3)
        sick.health = answers(404)  # it knows no such path, but it answers
        while not await healthy("prefill", sick):
            pass


@scenario
async def test_a_node_that_is_slow_to_report_delays_no_checks_of_others(monkeypatch):
    monkeypatch.setattr(nodes, "HEALTH_TIMEOUT_S", 200.0)
    asked, go = asyncio.Event(), asyncio.Event()

    async def health(request):
        asked.set()
        await go.wait()
        return await answers(200)(request)

    async with cluster(0, 2, health_interval_s=200, limits=LimitsConfig(ttft_s=1.0)) as c:
        slow, other = c.decode
        slow.health, slow.default = health, hangs
        jump(200)
        await asked.wait()
        await until(lambda: other.paths == ["/metrics"], "the first check of the other node")
        jump(110)  # health and metrics have one deadline …
        go.set()
        await until(lambda: slow.paths == ["/metrics"], "the slow node is asked for its load")
        jump(90)  # … and the next check is due then
        await until(lambda: other.paths == ["/metrics"] * 2, "the second check of the other node")


@scenario
async def test_a_check_that_fails_unexpectedly_is_not_the_last(monkeypatch):
    looks = []

    def look(*given):
        looks.append(given)
        raise ZeroDivisionError

    monkeypatch.setattr(nodes.NodePools, "look", look)
    async with cluster(health_interval_s=0.01):
        await until(lambda: len(looks) > 2, "further checks")


def test_a_proxy_that_is_ready_has_asked_its_nodes(tmp_path):
    with (
        proxy_process(tmp_path, decode_at("http://127.0.0.1:9")) as (url, _),
        pytest.raises(BadStatus) as found,
    ):
        fetch(f"{url}/health", 60.0)
    assert found.value.status == 503


@scenario
async def test_clients_beyond_the_file_descriptors_of_a_proxy_are_let_go_and_it_serves_the_next_ones(
    tmp_path,
):
    async with Node(decodes) as node, aiohttp.ClientSession() as session:
        with proxy_process(tmp_path, decode_at(node.url), direct_tokens=0) as (url, process):
            limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            few = len(os.listdir(f"/proc/{process.pid}/fd")) + 5
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (few, limits[1]))
            clients = [
                await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])) for _ in range(20)
            ]
            assert await clients[-1][0].read() == b""
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
            async with session.post(url + "/v1/completions", json={"prompt": "x"}) as response:
                assert response.status == 200
            for _, writer in clients:
                writer.close()
                await writer.wait_closed()


@scenario
async def test_a_node_that_leaves_ends_nothing_that_it_has_begun_and_a_stale_view_is_told():
    async with cluster(1, 2) as c:
        go = asyncio.Event()
        c.decode[0].default = pauses(go)
        async with c.post(STREAMED) as response:
            await response.content.readexactly(len(EVENTS[0]))
            left = view([c.prefill[0].url], [c.decode[1].url])
            c.proxy.update(View(left.nodes, stale_since=time.monotonic() - 60))
            await c.ask()
            go.set()
            assert await response.read() == EVENTS[1]
        async with c.get("/metrics") as page:
            assert c.decode[0].url not in await page.text()
        assert (await c.told("/health"))["discovery_stale_s"] >= 60


# --- shutdown -----------------------------------------------------------------------------------------------


@scenario
async def test_a_shutdown_lets_requests_end_refuses_new_ones_and_tells_those_that_do_not_end():
    async with cluster(0, 3, drain_s=0.5) as c:
        go = asyncio.Event()
        c.decode[0].default, c.decode[1].default, c.decode[2].default = (
            pauses(go),
            streams_then(EVENTS[:1], hangs),
            hangs,
        )
        stream = STREAMED
        async with c.post(stream) as ending, c.post(stream) as stuck:
            for response in (ending, stuck):
                assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
            waiting = asyncio.ensure_future(c.post().__aenter__())
            await until(lambda: len(c.decode[2].bodies) == 1, "all are in flight")
            draining = asyncio.ensure_future(c.proxy.requests.drain())
            await asyncio.sleep(0)
            async with c.post() as refused, c.get("/health") as health:
                assert (refused.status, health.status) == (503, 503)
                assert "shutting down" in (await error_of(refused))["message"]
            go.set()
            assert await ending.read() == EVENTS[1]
            assert json.loads((await stuck.read())[6:])["error"]["code"] == "overloaded"
            async with await waiting as response:
                assert response.status == 503
        await draining


@pytest.mark.parametrize("gateway", [None, "envoy"])
@scenario
async def test_a_proxy_that_is_told_to_stop_takes_no_connections_and_ends_what_it_began(gateway, tmp_path):
    go = asyncio.Event()
    more = {"direct_tokens": 0, "gateway": gateway}
    async with Node(pauses(go)) as node, aiohttp.ClientSession() as session:
        with proxy_process(tmp_path, decode_at(node.url), **more) as (url, process):
            async with session.post(url + "/v1/completions", json=STREAMED) as response:
                await response.content.readexactly(len(EVENTS[0]))
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(ConnectionError):
                    while True:
                        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                        writer.close()
                        await asyncio.sleep(0.01)
                go.set()
                assert await response.read() == EVENTS[1]
            assert await asyncio.to_thread(process.wait, 60) == 0
