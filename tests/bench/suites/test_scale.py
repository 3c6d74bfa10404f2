"""`bench scale`: a cluster in simulation, on loads small enough to know the answer."""

from functools import partial
from random import Random
from unittest.mock import patch

import msgspec
import pytest

from bench.lib.simulation import roles
from bench.lib.simulation.clock import SimulatedTime, Station
from bench.lib.simulation.cluster import ClusterPlan, SimulatedCluster, SimulatedPool
from bench.lib.simulation.costs import (  # fmt: skip
    DecodeCosts,
    EngineShape,
    PoolCosts,
    PrefillCosts,
    ServiceCosts,
    UnitCosts,
    read_costs,
)
from bench.lib.simulation.workload import Arrival, Part
from bench.suites.scale import full_at
from pd_cache.cluster import LimitsConfig, ProxyConfig
from pd_cache.errors import ConfigError
from tests.support.cli import cli, cli_json
from tests.support.traces import conversations, write_trace

_FREE, _NO_POOL = ServiceCosts(), PoolCosts()
_COSTS = UnitCosts(
    engine=EngineShape(chunk_tokens=100),
    prefill=PrefillCosts(step_s=0.0, token_s=1e-3),
    decode=DecodeCosts(step_s=0.1, sequence_s=0.0, context_s=0.0),
    proxy=_FREE, node=_FREE, lookup=_NO_POOL, store=_NO_POOL, load=_NO_POOL, load_own=_NO_POOL,
)  # fmt: skip
"""A token of a prompt takes a millisecond, a token of an answer a tenth of a second, nothing else any
time."""


def _request(due, seed, output=1):
    return Arrival(due, (Part(seed, 1000),), output)


def test_a_station_takes_work_in_order_as_many_at_a_time_as_it_has_servers():
    time = SimulatedTime()
    station, ends = Station(time, 2), []
    for seconds in (3.0, 1.0, 1.0):
        done = station.run(seconds)
        done.then(lambda _: ends.append(time.now))
    time.run()
    assert (ends, station.asked) == ([1.0, 2.0, 3.0], 5.0)


def test_the_pool_forgets_what_was_used_longest_ago():
    pool = SimulatedPool(20)
    names = [bytes([number]) for number in range(19)]
    for name in names[:18]:
        pool.put(name, 1)
    assert pool.leading(names[:2]) == 2
    pool.put(names[18], 2)
    assert (pool.leading(names[:4]), pool.owners([names[18]])) == (2, [2])
    assert pool.missing(names) == names[2:4]


def test_times_to_first_token_are_those_of_computing_queueing_and_loading():
    cluster = SimulatedCluster(ClusterPlan(0, 1, proxy=ProxyConfig(direct_tokens=0)), _COSTS)
    requests = [_request(0.0, 1), _request(0.5, 2), _request(10.0, 1), _request(20.0, 3, output=11)]
    outcomes, uses = cluster.run(requests)
    assert [one.first for one in outcomes] == pytest.approx([1.0, 1.5, 0.001, 1.0])
    assert [one.cached for one in outcomes] == [0, 0, 999, 0]
    assert (outcomes[3].tokens, outcomes[3].last) == (11, pytest.approx(2.0))
    held = 1001 * (1.0 + 1.0 + 0.001) + 1011 * 2.0  # the second one waits for the step of the first
    assert uses["decode"] == pytest.approx(held / 20 / _COSTS.engine.kv_tokens)


def test_an_engine_that_has_learned_that_loads_take_longer_than_computing_computes():
    costs = msgspec.structs.replace(_COSTS, load_own=PoolCosts(call_s=5.0))
    cluster = SimulatedCluster(ClusterPlan(0, 1, proxy=ProxyConfig(direct_tokens=0)), costs)
    outcomes, _ = cluster.run([_request(10.0 * number, 1 + number % 3) for number in range(8)])
    assert [one.first for one in outcomes] == pytest.approx([1.0] * 3 + [5.001] * 3 + [1.0] * 2)
    assert [one.cached for one in outcomes] == [0] * 3 + [999] * 3 + [0] * 2


def test_a_prefill_node_computes_and_a_decode_node_loads():
    cluster = SimulatedCluster(ClusterPlan(1, 1, proxy=ProxyConfig(direct_tokens=0)), _COSTS)
    (outcome,), uses = cluster.run([_request(1.0, 1)])
    # the decode node looks up until what was announced is there, then computes the last token
    assert outcome.first == pytest.approx(1.0 + 0.001, abs=0.02)
    assert outcome.error == ""
    assert set(uses) >= {"master", "proxy", "prefill", "decode", "busiest link"}


@pytest.mark.parametrize("gateway, uses", [(None, (0.06, 0.0)), ("envoy", (0.02, 0.012))])
def test_behind_envoy_only_requests_take_the_proxys_time(gateway, uses):
    costs = msgspec.structs.replace(
        _COSTS,
        proxy=ServiceCosts(event_s=0.05),
        picker=ServiceCosts(request_s=0.1),
        envoy=ServiceCosts(event_s=0.16),
    )
    plan = ClusterPlan(0, 1, proxy=ProxyConfig(direct_tokens=0, gateway=gateway))
    _, asked = SimulatedCluster(plan, costs).run([_request(0.0, 1, output=11), _request(10.0, 2)])
    assert (asked["proxy"], asked["proxy's cores"]) == pytest.approx(uses)


def test_what_a_step_has_computed_is_there_for_others_before_the_prompt_is():
    engine = msgspec.structs.replace(_COSTS.engine, step_tokens=500, max_running=1)
    costs = msgspec.structs.replace(_COSTS, engine=engine)
    cluster = SimulatedCluster(ClusterPlan(0, 2, proxy=ProxyConfig(direct_tokens=0)), costs)
    # to the other node, while the first half is computed
    outcomes, _ = cluster.run([_request(0.0, 1), _request(0.6, 1)])
    assert [one.cached for one in outcomes] == [0, 500]


@pytest.mark.parametrize("half, prefilling", [(0, 3), (1, 1)], ids=["long prompts", "long answers"])
def test_roles_follow_the_load_at_every_proxy(half, prefilling):
    load = roles.Load(partial(roles.requests_of, half), range(2 * half, 2 * half + 2), 1.0)
    clusters = []

    def simulated(plan, costs):
        clusters.append(SimulatedCluster(plan._replace(both=4), costs))
        return clusters[-1]

    with patch.multiple(roles, SimulatedCluster=simulated, _HOUR_S=150.0):
        kept = roles.run(load, 1.5 if half == 0 else 2.5, None, roles.LARGE)
    assert kept.share > 0.95
    for proxy in clusters[0].proxies:
        assert sum(role.does == "prefill" for role in proxy.roles.now.values()) == prefilling


def test_with_limits_an_overload_loses_no_answers_in_time():
    load = roles.Load(partial(roles.requests_of, 0), range(2), 1.0)
    limits = LimitsConfig(ttft_s=roles.FIRST_S, token_s=roles.TOKEN_S)
    with patch.object(roles, "_HOUR_S", 60.0):
        usual = roles.run(load, 2.0, 4, roles.LARGE)
        without, kept = (roles.run(load, 5.0, 4, roles.LARGE, each, 1) for each in (roles.NO_LIMITS, limits))
    assert usual.share > 0.95
    assert sum(without.per_s) < 0.7 * sum(usual.per_s)
    assert sum(kept.per_s) > sum(usual.per_s)
    assert kept.error < 0.2


def test_with_limits_tokens_keep_their_pace_however_many_answers_are_asked_for():
    costs = msgspec.structs.replace(roles.LARGE, decode=DecodeCosts(step_s=0.025, sequence_s=3e-3))
    limits = LimitsConfig(ttft_s=roles.FIRST_S, token_s=roles.TOKEN_S)

    def long_answers(rate):
        rng = Random(0)
        return [
            Arrival(number / rate, (Part(number, 600),), rng.randrange(200, 600))
            for number in range(round(rate * 120))
        ]

    load = roles.Load(long_answers, range(1), 1.0)
    with patch.multiple(roles, _NODES=2, _HOUR_S=60.0):
        usual, without, kept = (
            roles.run(load, rate, 1, costs, each, 1)
            for rate, each in ((0.5, limits), (1.5, roles.NO_LIMITS), (1.5, limits))
        )
    assert usual.share > 0.95
    assert without.share == 0
    assert sum(kept.per_s) > 0.95 * sum(usual.per_s)


def test_a_resource_is_full_between_the_numbers_of_nodes_around():
    assert full_at([(1, 0.1), (10, 0.5), (20, 1.5)]) == pytest.approx(15)
    assert full_at([(1, 1.2)]) == 1
    assert full_at([(1, 0.1), (10, 0.9)]) is None


def test_one_seed_is_one_result_and_a_file_gives_costs(tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl.gz", conversations(4, 4))
    costs = tmp_path / "costs.yaml"
    costs.write_text("prefill: {token_s: 1e-4}\n")
    asked = ("bench", "scale", "--trace", trace, "--costs", costs, "--nodes", 1, "--nodes", 3)
    run, again = (cli_json(*asked) for _ in range(2))
    assert run | {"about": ""} == again | {"about": ""}
    assert run["costs"]["prefill"] == {"step_s": 0.003, "token_s": 1e-4, "context_s": 0.0}
    assert [step["nodes"] for step in run["results"]] == [1, 3]


@pytest.mark.parametrize("text", ["prefil: {token_s: 1}", "prefill: {token_s: -1}", "- 1", "a: ["])
def test_costs_that_are_none_are_refused(tmp_path, text):
    file = tmp_path / "costs.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"costs\.yaml"):
        read_costs(file)


@pytest.mark.parametrize("more", [("--limits",), ("--nodes", "5"), ("--gateway", "envoy")])
def test_an_option_that_would_be_ignored_is_refused(tmp_path, more):
    trace = write_trace(tmp_path / "trace.jsonl", conversations(1, 1))
    assert "give one of the two" in cli("bench", "scale", "--trace", trace, "--roles", *more, code=2).stderr
