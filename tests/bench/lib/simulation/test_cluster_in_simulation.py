"""A simulated cluster: every request ends once, one node agrees with arithmetic, and more of anything does what it must."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from bench.lib.arrivals import Arrival, Part, poisson, synthetic
from bench.lib.simulation.costs import (
    DecodeCosts,
    EngineShape,
    PoolCosts,
    PrefillCosts,
    ServiceCosts,
    UnitCosts,
)
from bench.lib.simulation.growing import GrowthPlan, full_at, grow, limits
from bench.lib.simulation.requests_way import BusyTime, ClusterPlan, SimulatedCluster, SimulatedLoad
from bench.lib.simulation.stored import SimulatedPool
from bench.lib.simulation.workload import CopiedTrace, names_of, of_arrival, of_some_users
from pd_cache.cluster import ProxyConfig
from tests.support.traces import conversations
from transfer.errors import Status

COSTS = UnitCosts(
    engine=EngineShape(chunk_tokens=32, kv_bytes_per_token=4096, kv_tokens=100_000, step_tokens=256, max_running=8),
    prefill=PrefillCosts(step_s=0.005, token_s=1e-4),
    decode=DecodeCosts(step_s=0.005, sequence_s=0.001),
    proxy=ServiceCosts(request_s=0.001, event_s=1e-4, hop_s=0.001),
    node=ServiceCosts(request_s=0.002, event_s=1e-4),
    lookup=PoolCosts(call_s=1e-4, object_s=1e-6, master_s=5e-5, master_object_s=1e-6),
    store=PoolCosts(call_s=1e-3, object_s=1e-4, byte_s=1e-9, master_s=1e-4, master_object_s=1e-5),
    load=PoolCosts(call_s=1e-3, object_s=1e-4, byte_s=1e-9, owner_byte_s=1e-10),
    load_own=PoolCosts(call_s=1e-3, object_s=1e-4, byte_s=1e-9),
)


def changed(section: str, **values: Any) -> UnitCosts:
    return msgspec.structs.replace(COSTS, **{section: msgspec.structs.replace(getattr(COSTS, section), **values)})


def run(
    arrivals: list[Arrival], prefill: int = 1, decode: int = 1, costs: UnitCosts = COSTS, **plan: Any
) -> SimulatedLoad:
    requests = [of_arrival(one, costs.engine.chunk_tokens) for one in arrivals]
    return SimulatedCluster(ClusterPlan(prefill, decode, **plan), costs).run(requests)


def arrivals(count: int, rate: float, tokens: int = 640, shared: float = 0.5, output: int = 12) -> list[Arrival]:
    return synthetic(poisson(rate, count, random.Random(5)), tokens, shared, 4, output, 1)


def ttft(load: SimulatedLoad) -> float:
    firsts = sorted(one.first or 0.0 for one in load.outcomes)
    return firsts[len(firsts) // 2]


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 1), (3, 2)])
@pytest.mark.parametrize("rate", [2.0, 200.0])
def test_every_request_ends_once_with_all_of_its_tokens(
    one_machine: bool, prefill: int, decode: int, rate: float
) -> None:
    load = run(
        arrivals(80, rate),
        prefill,
        decode,
        one_machine=one_machine,
        others=[BusyTime(0.0, 0.5, 0.002)] if one_machine else [],
    )
    assert len(load.outcomes) == 80
    for one in load.outcomes:
        assert one.error == ""
        assert one.tokens == 12
        assert one.first is not None
        assert 0 < one.first <= one.last
        assert 0 <= (one.cached or 0) < one.prompt_tokens
    assert sum(load.routes.values()) == 80


def test_a_request_alone_takes_the_sum_of_its_costs() -> None:
    costs = changed("engine", chunk_tokens=1024)  # no whole chunk: nothing is looked up or stored
    lone = Arrival(0.0, (Part(1, 600),), 5)
    (one,) = run([lone], costs=costs, grain=1).outcomes
    # short for `direct_tokens`, so it goes to the decode node: proxy, node, three steps, and five tokens on their way
    proxy, node = costs.proxy, costs.node
    first = proxy.request_s + node.request_s + 3 * 0.005 + 600 * 1e-4
    first += node.event_s + proxy.event_s
    assert one.first == pytest.approx(first)
    # the first decode step is in the tick of the first token
    assert one.last == pytest.approx(first + 4 * 0.006)


def test_a_prompt_that_comes_again_is_loaded_and_not_computed() -> None:
    prompt = (Part(1, 640),)
    load = run([Arrival(0.0, prompt, 2), Arrival(5.0, prompt, 2)])
    first, again = load.outcomes
    assert (first.cached, again.cached) == (0, 639)  # the last token is computed
    assert load.routes == {"prefill": 1, "in_pool": 1}
    assert (again.first or 0) < (first.first or 0) / 2


def test_one_node_that_only_computes_does_as_many_requests_as_its_steps_allow() -> None:
    costs = changed("engine", chunk_tokens=1 << 20)
    load = run(arrivals(200, 1000.0, tokens=256, shared=0.0, output=1), 0, 1, costs)
    each = 0.005 + 256 * 1e-4
    assert load.seconds == pytest.approx(200 * each, rel=0.02)


def test_grains_of_tokens_change_when_tokens_come_but_not_how_many_nor_the_work() -> None:
    exact, coarse = (run(arrivals(60, 4.0, output=100), grain=grain) for grain in (1, 32))
    assert sum(one.tokens for one in exact.outcomes) == sum(one.tokens for one in coarse.outcomes) == 6000
    assert ttft(coarse) == pytest.approx(ttft(exact), rel=0.1)
    assert coarse.seconds == pytest.approx(exact.seconds, rel=0.1)


def test_more_prefill_nodes_and_cheaper_steps_make_a_busy_cluster_quicker() -> None:
    load = arrivals(150, 40.0, shared=0.0)
    one, two, four = (run(load, nodes, 2) for nodes in (1, 2, 4))
    assert ttft(one) > ttft(two) > ttft(four)
    quick = run(load, 1, 2, changed("prefill", token_s=2e-5))
    assert ttft(quick) < ttft(one)


def test_other_programs_make_one_machine_slower_and_take_what_they_are_given() -> None:
    load = arrivals(60, 10.0)
    alone, beside = (run(load, one_machine=True, others=[BusyTime(0.0, others)]) for others in (0.0, 3.0))
    assert ttft(beside) > ttft(alone)
    assert alone.taken_by_others == 0
    assert 0 < beside.taken_by_others < 2 * beside.seconds


def test_a_pool_that_is_too_small_finds_less_and_a_larger_one_never_less() -> None:
    requests = [
        Arrival(index * 1.0, tuple(Part(block, 32) for block in one.hash_ids), 2)
        for index, one in enumerate(conversations(6, 5))
    ]
    hits = [sum(one.cached or 0 for one in run(requests, pool_chunks=room).outcomes) for room in (8, 40, 10_000)]
    assert hits[0] < hits[1] < hits[2]


def test_what_the_proxy_does_not_admit_is_refused_and_all_else_is_answered() -> None:
    load = run(arrivals(100, 1000.0), proxy=ProxyConfig(max_requests=10))
    refused = [one for one in load.outcomes if one.error]
    assert {one.error for one in refused} == {"http 503"}
    assert 0 < len(refused) < 100


def test_slow_links_are_what_is_full() -> None:
    load = run(arrivals(60, 20.0, shared=0.0), costs=changed("machine", link_bytes_per_s=1e6))
    asked = {use.name: use.asked for use in load.uses}
    assert max(asked, key=lambda name: asked[name]) == "links"


# --- the pool and the load -------------------------------------------------------------------------------------------


def test_the_pool_evicts_what_was_used_longest_ago_when_its_watermark_is_passed() -> None:
    pool = SimulatedPool(10, watermark=0.9, ratio=0.2)
    names = [bytes([number]) for number in range(10)]
    for name in names[:9]:
        pool.put(name, 0)
    assert pool.exists(names[:1]) == [Status.OK]  # a use
    pool.put(names[9], 0)
    assert pool.evicted == 2
    assert pool.exists(names[:4]) == [Status.OK, Status.MISSING, Status.MISSING, Status.OK]


def test_chunks_of_equal_beginnings_have_equal_names_and_no_others() -> None:
    common, own, other = Part(1, 48), Part(2, 80), Part(3, 80)
    one, two = names_of((common, own), 32), names_of((common, other), 32)
    assert len(one) == len(two) == 4
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])
    assert names_of((Part(1, 48),), 32) == one[:1]


def test_copies_of_a_trace_share_system_prompts_only_and_keep_their_depth() -> None:
    trace = conversations(2, 3)
    for request in trace:
        request.hash_ids[0] = 7
    copied = CopiedTrace(trace, 100, 6)
    assert copied.passed == []
    load = copied.arrivals(18, 10.0)
    assert len(load) == 18
    assert [one.due for one in load] == sorted(one.due for one in load)
    first_three = load[:3]  # the same request of three users
    assert len({one.prompt[0] for one in first_three}) == 1
    assert len({one.prompt[1] for one in first_three}) == 3


def test_some_users_of_a_trace_come_with_all_that_they_say() -> None:
    trace = conversations(400, 3)
    some = of_some_users(trace, 0.25)
    assert 0.15 < len(some) / len(trace) < 0.35
    users = {request.hash_ids[1] for request in some}
    assert [request for request in trace if request.hash_ids[1] in users] == some
    assert of_some_users(trace, 1.0) == trace


def test_what_has_passed_before_is_in_the_pool() -> None:
    trace = conversations(50, 3)  # the last 50 requests repeat what the first 100 said
    cold, warm = (
        grow(trace[skip:], COSTS, GrowthPlan(warm=100, requests_per_node=300), 2, 0.5, 50).hit_rate for skip in (100, 0)
    )
    assert cold == 0
    assert warm == pytest.approx(6 / 9, abs=0.01)


# --- growing ---------------------------------------------------------------------------------------------------------


def test_what_all_share_is_full_first_and_what_each_node_has_is_not() -> None:
    costs = changed("proxy", request_s=0.02)
    plan = GrowthPlan(proxy=ProxyConfig(max_requests=100_000))
    steps = [grow(conversations(20, 3), costs, plan, nodes, 1.0) for nodes in (2, 10, 100)]
    for step in steps:
        assert step.refused == 0
        assert step.prefill + step.decode == step.nodes
    proxies = [step.asked["proxy"] for step in steps]
    assert proxies == sorted(proxies)
    first = limits(steps)[0]
    assert first.resource == "proxy"
    assert first.nodes is not None
    assert 10 < first.nodes < 60  # a core does 1 / 0.0232 requests a second, and half of them come from each two nodes
    assert max(step.asked["prefill"] for step in steps) < 1


def test_where_a_share_comes_to_one() -> None:
    assert full_at([(1, 0.2), (10, 0.5), (20, 1.5)]) == 15
    assert full_at([(1, 0.2), (10, 0.5)]) is None
    assert full_at([(4, 3.0), (10, 5.0)]) == 4
