"""Bodies of requests while they arrive: their deadline, the memory of all of them, and that they hold no place."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterable

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from launch.proxy.bodies import Body, BodyBudget
from pd_cache.cluster import ProxyConfig
from tests.support.proxy import EVENTS, Cluster, begin, cluster, error_of, hangs, scenario, until
from transfer.settings import ByteSize

MIB = 1 << 20


def test_of_bodies_that_do_not_fit_the_largest_that_still_arrives_gives_way() -> None:
    budget, given_up = BodyBudget(100), []
    with budget.held() as done, budget.held() as large, budget.held() as small:
        for name, body, size in (("done", done, 50), ("large", large, 30), ("small", small, 20)):
            body.give_up = lambda name=name: given_up.append(name)  # type: ignore[misc]
            assert budget.grow(body, size)
        done.complete = True
        assert budget.grow(small, 1)
        assert (given_up, budget.used) == (["large"], 71)
        assert not budget.grow(large, 1)
        assert not budget.grow(small, 60), "it would be the largest itself"
    assert budget.used == 0


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60), st.sampled_from(["grow", "end", "release"])), max_size=50)
)
def test_bodies_never_take_more_than_the_budget_and_give_all_of_it_back(events: list[tuple[int, int, str]]) -> None:
    budget = BodyBudget(100)
    open_bodies: dict[int, tuple[object, Body]] = {}
    for who, count, what in events:
        if who not in open_bodies:
            holding = budget.held()
            open_bodies[who] = (holding, holding.__enter__())
        holding, body = open_bodies[who]
        if what == "grow" and not body.complete:
            budget.grow(body, count)
        elif what == "release":
            body.complete = True
            budget.release(body)
        elif what == "end":
            holding.__exit__(None, None, None)  # type: ignore[attr-defined]
            del open_bodies[who]
        assert budget.used == sum(body.size for _, body in open_bodies.values()) <= 100
    for holding, _ in open_bodies.values():
        holding.__exit__(None, None, None)  # type: ignore[attr-defined]
    assert budget.used == 0


def large(mib: int) -> io.BytesIO:
    return io.BytesIO(json.dumps({"prompt": "x" * mib * MIB, "stream": True}).encode())


def slowly(parts: Iterable[bytes], go: asyncio.Event) -> AsyncIterator[bytes]:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        await go.wait()
        yield b'{"prompt": "x"}'

    return body()


async def sending(c: Cluster, go: asyncio.Event, *parts: bytes) -> asyncio.Task[int]:
    async def status() -> int:
        async with c.post(data=slowly(parts, go)) as response:
            return int(response.status)

    return asyncio.create_task(status())


@scenario
async def test_bodies_that_are_not_there_yet_hold_no_place() -> None:
    async with cluster(0, 1, max_requests=2) as c:
        go = asyncio.Event()
        slow = [await sending(c, go, b" ") for _ in range(6)]
        await until(lambda: c.proxy._bodies.used == 6, "all are being read")
        async with c.post() as response:
            assert response.status == 200
        go.set()
        assert set(await asyncio.gather(*slow)) <= {200, 503}


@scenario
async def test_a_body_that_comes_too_slowly_is_a_408_long_before_the_requests_deadline() -> None:
    async with cluster(0, 1, body_timeout_s=0.2, request_timeout_s=300) as c:
        async with c.post(data=slowly([b" "], asyncio.Event())) as response:
            assert response.status == 408
            assert (await error_of(response))["code"] == "timeout"
        assert c.decode[0].bodies == []
        assert c.proxy._bodies.used == 0


@scenario
async def test_unfinished_bodies_give_way_to_a_request_that_is_there() -> None:
    async with cluster(0, 1, body_memory=ByteSize(16 * MIB)) as c:
        go = asyncio.Event()
        slow = [await sending(c, go, *[b" " * MIB] * 5) for _ in range(3)]
        await until(lambda: c.proxy._bodies.used == 15 * MIB, "three bodies of 5 MiB are being read")
        async with c.post(data=large(2)) as response:
            assert response.status == 200
        go.set()
        assert sorted(await asyncio.gather(*slow)) == [200, 200, 503]
        assert c.proxy._bodies.used == 0


@scenario
async def test_bodies_that_wait_for_nodes_fill_the_memory_and_the_next_may_come_back() -> None:
    async with cluster(0, 1, body_memory=ByteSize(16 * MIB)) as c:
        c.decode[0].default = hangs
        asking = [asyncio.ensure_future(c.post(data=large(7)).__aenter__()) for _ in range(2)]
        await until(lambda: len(c.decode[0].bodies) == 2, "the node has them")
        async with c.post(data=large(7)) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await error_of(response))["code"] == "overloaded"
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await until(lambda: c.proxy._bodies.used == 0, "their memory was given back")


@scenario
async def test_a_stream_holds_no_memory_for_its_body() -> None:
    async with cluster(0, 1) as c:
        go = asyncio.Event()

        async def holds_after_first(request: web.Request) -> web.StreamResponse:
            response = await begin(request, EVENTS[0])
            await go.wait()
            return response

        c.decode[0].default = holds_after_first
        async with c.post(data=large(1)) as response:
            await response.content.readany()
            assert c.proxy._bodies.used == 0
            go.set()


def test_the_memory_for_bodies_must_hold_the_largest_one() -> None:
    with pytest.raises(ValueError, match="at least the largest body, 16MiB"):
        ProxyConfig(body_memory=ByteSize(16 * MIB - 1))
