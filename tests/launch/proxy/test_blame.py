"""Whose fault a failure is: one client's poison takes out no node, and a broken node is left alone."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from launch.proxy.routing import Attempts, NodePool, Reason, RetryBudget, Target, Trial
from tests.support.proxy import InOrder, answers, cluster, decodes, says, scenario

BOOM = {"error": {"message": "boom", "type": "server_error", "param": None, "code": None}}
SUSPICIOUS: tuple[Reason, ...] = ("error", "garbage", "disconnected")


def pool_of(*urls: str, failures: int = 5) -> NodePool:
    pool = NodePool("decode", breaker_failures=failures, rng=InOrder())
    pool.update(Target(url) for url in urls)
    return pool


def trial(retries: int = 1000) -> Trial:
    return Trial(RetryBudget(retries))


def request_of(pool: NodePool, fails: dict[str, Reason], now: float = 0.0, budget: RetryBudget | None = None) -> str:
    """The node that answered a request that some nodes fail; empty if none did."""
    attempts = Attempts(pool, Trial(budget or RetryBudget(1000)))
    while (node := attempts.next(now)) is not None:
        if node in fails:
            attempts.failed(node, fails[node], now)
        else:
            attempts.answered(node, now, well=True)
            return node
    return ""


# --- one request -----------------------------------------------------------------------------------------------------


def test_refusals_do_not_make_up_for_failures() -> None:
    pool = pool_of("a", "b", failures=2)
    assert request_of(pool, {"a": "error"}) == "b"
    refused = Attempts(pool, trial())
    assert refused.next(0.0) == "a"
    refused.answered("a", 0.0, well=False)
    assert request_of(pool, {}) == "b"
    assert request_of(pool, {"a": "error"}) == "b"
    assert pool.health(0.0) == {"a": False, "b": True}


def test_prefill_nodes_that_drop_every_request_do_not_stop_decode_nodes_from_answering() -> None:
    prefill, decode = pool_of("p", "q"), pool_of("d")
    for _ in range(6):  # five in a row are believed to be the requests' fault
        one = trial()
        before = Attempts(prefill, one)
        while (node := before.next(0.0)) is not None:
            before.failed(node, "disconnected", 0.0)
    assert Attempts(decode, one).next(0.0) == "d"


# --- many requests ---------------------------------------------------------------------------------------------------


def test_two_broken_nodes_of_three_are_found_out() -> None:
    pool, broken = pool_of("a", "b", "c"), {"a": "error", "b": "error"}
    answered = [request_of(pool, broken) for _ in range(40)]  # type: ignore[arg-type]
    assert answered.count("") <= 1, "the second try goes to a node that is known to answer"
    assert pool.health(0.0) == {"a": False, "b": False, "c": True}


@given(st.lists(st.booleans(), max_size=200), st.integers(2, 5), st.sampled_from(SUSPICIOUS))
def test_no_mixture_of_poison_and_good_requests_takes_a_node_out(
    poisons: list[bool], nodes: int, reason: Reason
) -> None:
    urls = [str(n) for n in range(nodes)]
    pool = pool_of(*urls, failures=1)
    for now, poison in enumerate(poisons):
        answered = request_of(pool, dict.fromkeys(urls, reason) if poison else {}, float(now))
        assert bool(answered) is not poison
        assert all(pool.health(float(now)).values())


@given(st.lists(st.booleans(), min_size=60, max_size=200), st.integers(2, 5), st.integers(0, 4))
def test_a_broken_node_is_found_out_whatever_poison_there_is(poisons: list[bool], nodes: int, broken: int) -> None:
    urls = [str(n) for n in range(nodes)]
    pool, bad = pool_of(*urls, failures=1), urls[broken % nodes]
    for poison in poisons:
        request_of(pool, dict.fromkeys(urls if poison else [bad], "error"))
    good = poisons.count(False)
    assert all(up for url, up in pool.health(0.0).items() if url != bad)
    assert not pool.health(0.0)[bad] or good < 2 * nodes or good < len(poisons) // 2


# --- the budget ------------------------------------------------------------------------------------------------------


def test_retries_are_a_fraction_of_requests_and_a_few_a_second() -> None:
    budget, made = RetryBudget(10, fraction=0.25, per_second=1.0), 0
    for _ in range(100):
        budget.asked(0.0)
        if budget.allows(0.0):
            budget.take(0.0)
            made += 1
    assert made == 10 + 24, "what was saved up, and of each four requests one"
    assert not budget.allows(0.2)
    assert budget.allows(1.0)
    assert [budget.allows(100.0) and budget.take(100.0) is None for _ in range(12)].count(True) == 10


def test_without_a_retry_left_a_request_ends_with_its_first_failure_and_no_one_is_blamed() -> None:
    pool, budget = pool_of("a", "b", failures=1), RetryBudget(0)
    attempts = Attempts(pool, Trial(budget))
    assert attempts.next(0.0) == "a"
    attempts.failed("a", "error", 0.0)
    assert attempts.next(0.0) is None
    assert attempts.out_of_budget
    assert not attempts.blamed
    assert pool.health(0.0) == {"a": True, "b": True}


@pytest.mark.parametrize("reason", ["unreachable", "busy"])
def test_what_no_node_has_begun_to_work_on_needs_no_retry_from_the_budget(reason: Reason) -> None:
    assert request_of(pool_of("a", "b"), {"a": reason}, budget=RetryBudget(0)) == "b"


# --- with nodes ------------------------------------------------------------------------------------------------------


async def fails_poison(request: web.Request) -> web.StreamResponse:
    if (await request.json())["prompt"] == "poison":
        return web.json_response(BOOM, status=500)
    return await decodes(request)


@scenario
async def test_one_clients_poison_costs_no_other_client_an_answer() -> None:
    async with cluster(2, 2) as c:
        for node in c.decode:
            node.default = fails_poison
        for number in range(60):
            poison = number % 10 != 0
            async with c.post({"prompt": "poison" if poison else "good"}) as response:
                assert response.status == (500 if poison else 200)
                if poison:
                    assert await response.json() == BOOM
        async with c.get("/health") as response:
            assert all((await response.json())["decode"].values())


@pytest.mark.usefixtures("long_skips")
@scenario
async def test_a_truly_broken_decode_node_is_left_alone() -> None:
    async with cluster(0, 3, breaker_failures=3) as c:
        c.decode[1].default = answers(500, BOOM)
        for _ in range(30):
            async with c.post() as response:
                assert response.status == 200
        assert len(c.decode[1].bodies) == 3


@pytest.mark.usefixtures("long_skips")
@scenario
async def test_lists_of_models_neither_hide_a_broken_node_nor_count_against_one() -> None:
    async def only_lists(request: web.Request) -> web.StreamResponse:
        return await (decodes if request.method == "GET" else answers(500, BOOM))(request)

    async with cluster(0, 2, breaker_failures=2) as c:
        c.decode[0].default = only_lists
        for _ in range(8):
            async with c.get("/v1/models") as response:
                assert response.status == 200
            async with c.post() as response:
                assert response.status == 200
        assert sum(path == "/v1/completions" for path in c.decode[0].paths) == 2
    async with cluster(0, 2, breaker_failures=1) as c:
        for node in c.decode:
            node.default = lambda request: (answers(500) if request.method == "GET" else decodes)(request)
        async with c.get("/v1/models") as response:
            assert response.status == 500
        async with c.post() as response:
            assert response.status == 200


@scenario
async def test_an_error_whose_body_never_ends_does_not_hold_up_the_next_node() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    async with cluster(0, 2) as c:
        c.decode[0].default = endless
        async with c.post() as response:
            assert response.status == 200


@scenario
async def test_a_burst_of_failures_is_retried_as_far_as_the_budget_goes() -> None:
    async with cluster(0, 2) as c:
        c.decode[0].default = c.decode[1].default = says(b"", 500)
        c.proxy.requests.retries._left = 1.0
        c.proxy.requests.retries._per_second = 0.0
        for _ in range(4):
            async with c.post() as response:
                assert response.status == 500
        assert len(c.decode[0].bodies + c.decode[1].bodies) == 5
        assert c.metric("retries_refused_total") == 3
