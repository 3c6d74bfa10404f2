"""Bodies of requests while they arrive: their deadline, the memory of all of them, and that they hold no place."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from launch.proxy.bodies import Body, BodyBudget
from pd_cache.cluster import ProxyConfig
from tests.support.proxy import EVENTS, Cluster, begin, cluster, decodes, error_of, hangs, scenario, until
from transfer.settings import ByteSize

MIB = 1 << 20


class Bodies:
    """Bodies in a budget, as requests of several clients would hold them."""

    def __init__(self, limit: int) -> None:
        self.budget = BodyBudget(limit)
        self._stack = contextlib.ExitStack()
        self.given_up: list[Body] = []

    def __enter__(self) -> Bodies:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        assert (self.budget.used, self.budget._large, self.budget._by_client) == (0, 0, {})

    def body(self, client: str, size: int = 0, *, complete: bool = False) -> Body:
        """A new body, of which so many bytes have come, if they were taken."""
        body = self._stack.enter_context(self.budget.opened(client))
        body.give_up = lambda: self.given_up.append(body)
        self.budget.grow(body, size)
        body.complete = complete
        return body

    def fill(self, client: str, size: int) -> int:
        """Bytes that one client can hold in complete bodies of this size."""
        bodies = 0
        while self.body(client, size, complete=True).size:
            bodies += 1
        return bodies * size


def test_what_a_request_could_do_without_leaves_twice_as_much_and_takes_nothing_from_bodies() -> None:
    with Bodies(300) as bodies:
        arriving, first = bodies.body("a", 50), bodies.body("a", 20, complete=True)
        assert bodies.budget.extend(first, 30)
        assert not bodies.budget.extend(first, 1), "a client that is alone keeps to a third"
        assert (bodies.budget.used, first.size, bodies.given_up) == (100, 50, [])
        assert bodies.body("a", 50, complete=True).size, "bodies may take half"
        bodies.budget.release(arriving)
        other = bodies.body("b", 10, complete=True)
        assert not bodies.budget.extend(other, 41), "all clients leave half of the whole"
        assert bodies.budget.extend(other, 40)
        bodies.budget.release(first)
        assert not bodies.budget.extend(other, 300 << 10), "not even if that makes it a large one"
        assert (bodies.budget.used, bodies.budget._large) == (100, 0)


def test_of_one_clients_bodies_the_largest_that_still_arrives_gives_way() -> None:
    with Bodies(100) as bodies:
        bodies.body("a", 20, complete=True)
        large, small, other = bodies.body("a", 18), bodies.body("a", 5), bodies.body("b", 8)
        assert bodies.budget.grow(small, 7)
        assert (bodies.given_up, bodies.budget.used) == ([large], 40)
        assert not bodies.budget.grow(large, 1)
        assert not bodies.budget.grow(small, 40), "it is the largest itself now"
        assert (other.size, bodies.given_up) == (8, [large])


def test_a_client_with_less_takes_the_room_of_one_with_more() -> None:
    with Bodies(100) as bodies:
        much = [bodies.body("a", 10) for _ in range(5)]
        little = bodies.body("b", 25)
        assert bodies.given_up == [], "it takes half of what was free"
        assert bodies.budget.grow(little, 8)
        assert (len(bodies.given_up), bodies.budget.used) == (2, 30 + 33)
        assert set(bodies.given_up) < set(much)
        assert not bodies.budget.grow(little, 3), "now it is the one with more"


@pytest.mark.parametrize(("size", "room"), [(256 << 10, 512 * MIB), (MIB, 384 * MIB)])
def test_a_client_leaves_as_much_as_it_takes_of_the_room_for_bodies_of_a_size(size: int, room: int) -> None:
    with Bodies(512 * MIB) as bodies:
        assert [bodies.fill(client, size) for client in "abc"] == [room // 2, room // 4, room // 8]
    with Bodies(512 * MIB) as bodies:  # clients that take turns
        for client in "abc" * (room // 4 // size):
            assert bodies.body(client, size).size
        assert bodies.given_up == []


def test_small_bodies_find_room_however_many_clients_hold_large_ones() -> None:
    with Bodies(512 * MIB) as bodies:
        clients = [str(number) for number in range(64)]
        held_by_large = sum(bodies.fill(client, 16 * MIB) + bodies.fill(client, MIB) for client in clients)
        assert 350 * MIB < held_by_large <= 384 * MIB
        for client in [*clients, "polite"]:
            assert bodies.body(client, 256 << 10, complete=True).size, client


def test_bodies_that_grow_large_no_longer_take_the_room_of_small_ones() -> None:
    with Bodies(64 * MIB) as bodies:
        bodies.fill("a", 256 << 10)
        small = bodies.budget.used
        growing = [bodies.body(str(number), 256 << 10) for number in range(60)]
        for body in growing:
            bodies.budget.grow(body, MIB)
        assert bodies.budget.used - small <= 48 * MIB
        assert bodies.body("polite", 256 << 10, complete=True).size


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 600 << 10),
            st.sampled_from(["grow", "complete", "extend", "release", "end"]),
        ),
        max_size=60,
    )
)
def test_bodies_never_take_more_than_the_budget_and_give_all_of_it_back(events: list[tuple[int, int, str]]) -> None:
    limit = MIB
    budget = BodyBudget(limit)
    open_bodies: dict[int, tuple[contextlib.ExitStack, Body]] = {}
    for who, count, what in events:
        if who not in open_bodies:
            stack = contextlib.ExitStack()
            open_bodies[who] = (stack, stack.enter_context(budget.opened("ab"[who % 2])))
        stack, body = open_bodies[who]
        if what == "grow" and not body.complete:
            budget.grow(body, count)
        elif what == "extend":
            size, used = body.size, budget.used
            fits = budget.extend(body, count)
            assert (body.size, budget.used) == ((size + count, used + count) if fits else (size, used))
        elif what == "end":
            stack.close()
            del open_bodies[who]
        elif what != "grow":
            body.complete = True
            if what == "release":
                budget.release(body)
        bodies = [body for _, body in open_bodies.values()]
        assert budget.used == sum(body.size for body in bodies) <= limit
        assert budget._large == sum(body.size for body in bodies if body.large) <= limit * 3 // 4
        assert budget._by_client == {
            (body.client, body.large): sum(
                other.size for other in bodies if (other.client, other.large) == (body.client, body.large)
            )
            for body in bodies
            if body.size
        }
    for stack, _ in open_bodies.values():
        stack.close()
    assert (budget.used, budget._large, budget._by_client) == (0, 0, {})


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
    async with cluster(0, 1, body_memory=ByteSize(48 * MIB)) as c:
        go = asyncio.Event()
        slow = [await sending(c, go, *[b" " * MIB] * 5) for _ in range(3)]
        await until(lambda: c.proxy._bodies.used == 15 * MIB, "three bodies of 5 MiB are being read")
        async with c.post(data=large(4)) as response:
            assert response.status == 200
        go.set()
        assert sorted(await asyncio.gather(*slow)) == [200, 200, 503]
        assert c.proxy._bodies.used == 0


@scenario
async def test_bodies_that_wait_for_nodes_fill_the_memory_and_the_next_may_come_back() -> None:
    async with cluster(0, 1, body_memory=ByteSize(48 * MIB)) as c:
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


@pytest.mark.parametrize("known_by", ["key", "address"])
def test_a_client_whose_bodies_wait_for_nodes_costs_no_other_client_an_answer(known_by: str, tmp_path: Path) -> None:
    keys = {name: name * 4 for name in ("greedy", "polite")}
    (tmp_path / "keys").write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
    settings = {"api_keys_file": str(tmp_path / "keys")} if known_by == "key" else {}

    async def hangs_if_greedy(request: web.Request) -> web.StreamResponse:
        return await (hangs if (await request.json())["prompt"][:1] == "x" else decodes)(request)

    def body(letter: str, mib: int) -> io.BytesIO:
        return io.BytesIO(json.dumps({"prompt": letter * mib * MIB}).encode())

    @scenario
    async def asked() -> None:
        async with contextlib.AsyncExitStack() as stack:
            c = await stack.enter_async_context(cluster(0, 1, body_memory=ByteSize(48 * MIB), **settings))
            c.decode[0].default = hangs_if_greedy
            address = "127.0.0.1" if known_by == "key" else "127.0.0.2"
            session = await stack.enter_async_context(
                aiohttp.ClientSession(c.url, connector=aiohttp.TCPConnector(local_addr=(address, 0)))
            )

            async def greedy(letter: str, mib: int) -> int:
                headers = {"Authorization": f"Bearer {keys['greedy']}"}
                async with session.post("/v1/completions", data=body(letter, mib), headers=headers) as response:
                    return response.status

            asking = [asyncio.create_task(greedy("x", 5)) for _ in range(16)]
            try:
                await until(lambda: sum(task.done() for task in asking) == 13, "it may hold three of them")
                assert {task.result() for task in asking if task.done()} == {503}
                for mib in (0, 5, 10):
                    headers = {"Authorization": f"Bearer {keys['polite']}"}
                    async with c.post(data=body("y", mib), headers=headers) as response:
                        assert response.status == 200
                assert await greedy("y", 0) == 200, "its own small requests go on, too"
                assert await greedy("y", 5) == 503
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.wait(asking)
            await until(lambda: c.proxy._bodies.used == 0, "their memory was given back")

    asked()


def test_the_memory_for_bodies_must_leave_a_lone_client_room_for_the_largest_one() -> None:
    with pytest.raises(ValueError, match="at least 48MiB, three times the largest body"):
        ProxyConfig(body_memory=ByteSize(48 * MIB - 1))
