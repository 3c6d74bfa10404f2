"""A proxy whose own event loop stands still, because the machine is busy: that says nothing about nodes."""

from __future__ import annotations

import asyncio
import socket
import time

import aiohttp
import pytest
from aiohttp import web

from launch.proxy import hops
from launch.proxy.patience import within
from tests.launch.proxy.test_direct import Lookups, rule
from tests.support.proxy import answers, cluster, jump, scenario, until


@scenario
async def test_a_deadline_counts_only_time_in_which_the_loop_ran() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()
    waiting = asyncio.ensure_future(within(answer, 2.0))
    for _ in range(10):
        await asyncio.sleep(0)
        jump(3)
        await asyncio.sleep(0.001)
    assert not waiting.done()
    answer.set_result("here")
    assert await waiting == "here"


@scenario
async def test_a_deadline_ends_what_does_not_come_and_passes_on_what_does() -> None:
    never = asyncio.ensure_future(asyncio.Event().wait())
    with pytest.raises(TimeoutError):
        await within(never, 0.25)
    assert never.cancelled()

    async def fails() -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        await within(fails(), 60)


@scenario
async def test_what_a_deadline_bounds_ends_with_the_task_that_waits_for_it() -> None:
    work = asyncio.ensure_future(asyncio.Event().wait())
    waiting = asyncio.ensure_future(within(work, 60))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert work.cancelled()


def stand_still_when_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection to a node is begun just before the proxy stands still for far longer than a connection may take."""
    real = hops._socket

    def slow(address: aiohttp.AddrInfoType) -> socket.socket:
        jump(10)
        return real(address)

    monkeypatch.setattr(hops, "_socket", slow)


def test_a_proxy_that_stood_still_does_not_take_its_nodes_for_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_still_when_connecting(monkeypatch)

    @scenario
    async def asked() -> None:
        async with cluster(1, 1, connect_timeout_s=2) as c:
            async with c.post() as response:
                assert response.status == 200
            assert len(c.prefill[0].bodies) == 1
            for hop in ("prefill", "decode"):
                assert c.metric("hop_failures_total", hop=hop, reason="unreachable") == 0
                assert all(c.proxy._node_pools.pools[hop].health(time.monotonic()).values())  # type: ignore[index]

    asked()


def test_a_proxy_that_stood_still_does_not_take_its_nodes_for_unwell(caplog: pytest.LogCaptureFixture) -> None:
    @scenario
    async def checked() -> None:
        times = 0

        async def late(request: web.Request) -> web.StreamResponse:
            nonlocal times
            times += 1
            jump(10)
            await asyncio.sleep(0)
            return await answers(200, {})(request)

        async with cluster(1, 1, health_interval_s=0.02, health_timeout_s=2) as c:
            c.decode[0].health = late
            await until(lambda: times >= 3, "three checks")

    checked()
    assert not [line for line in caplog.messages if "not well" in line]


@scenario
async def test_a_proxy_that_stood_still_goes_on_asking_for_tokens() -> None:
    async def late(request: web.Request) -> web.StreamResponse:
        jump(10)
        await asyncio.sleep(0)
        return await answers(200, {"tokens": [1] * 1000})(request)

    client = Lookups(1000)
    async with cluster(direct=rule(client, timeout_s=2)) as c:
        c.decode[0].tokenize = late
        for _ in range(4):
            async with c.post({"prompt": "x" * 5000}) as response:
                assert response.status == 200
        assert c.metric("handoffs_total", result="in_pool") == 4


def test_a_connection_that_nobody_waits_for_any_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes away in the very turn of the loop in which the connection to the node is there."""
    made: list[asyncio.Transport] = []

    async def comes_as_the_caller_leaves(
        connector: aiohttp.TCPConnector, request: aiohttp.ClientRequest, traces: object, timeout: object
    ) -> object:
        protocol = await real(connector, request, traces, timeout)  # type: ignore[arg-type]
        assert protocol.transport is not None
        made.append(protocol.transport)  # type: ignore[arg-type]
        asking.cancel()
        return protocol

    real = aiohttp.TCPConnector._create_connection
    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", comes_as_the_caller_leaves)
    asking: asyncio.Task[object]

    @scenario
    async def left() -> None:
        nonlocal asking
        async with cluster(0, 1) as c:
            session = c.proxy._nodes.session
            assert session is not None
            asking = asyncio.ensure_future(hops.send(session, "GET", c.decode[0].url + "/health", {}, None))
            await asyncio.wait({asking})
            assert asking.cancelled()
            assert [transport.is_closing() for transport in made] == [True]

    left()
