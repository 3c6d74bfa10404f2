"""Which nodes of the role `both` prefill, and which decode."""

from contextlib import AsyncExitStack
from functools import partial
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from launch.discovery import View
from launch.proxy.app import Proxy
from launch.proxy.routing.roles import NodeReport, Roles, read_metrics
from pd_cache.cluster import NodeRecord, ProxyConfig, RolesConfig
from tests.support.proxy import Node, says, scenario
from tests.support.waiting import Clock

NODES = [f"http://node-{number}" for number in range(6)]
IDLE = NodeReport(0, 0, 0.0, 0)
PROMPTS = NodeReport(2, 1, 0.1, 0)
"""It always computes prompts, and has others to compute."""
ANSWERS = NodeReport(0, 8, 0.9, 0)
EVERY_S = 2.0

reports = st.builds(NodeReport, st.integers(0, 99), st.integers(0, 99), st.floats(0, 1), st.integers(0, 999))
looks = st.lists(
    st.fixed_dictionaries({node: st.tuples(st.booleans(), st.none() | reports) for node in NODES}), min_size=1, max_size=30
)  # fmt: skip
leasts = st.tuples(st.integers(1, 3), st.integers(1, 3))
kinds = st.lists(st.sampled_from(["prefill", "decode", "both", "both"]), min_size=6, max_size=6)


def look(roles, now, nodes, kinds=("both",) * 6, order=NODES):
    roles.look(
        now,
        {node: kinds[NODES.index(node)] for node in order},
        {node for node in order if not nodes[node][0]},
        {node: nodes[node][1] for node in order if nodes[node][1] is not None},
    )
    return {node: role.does for node, role in roles.now.items()}


def steady(roles, begin, seconds, does):
    """Looks until `seconds` are over, with the reports of `does`. Returns the number of prefill nodes."""
    now = begin
    while now <= begin + seconds:
        look(roles, now, {node: (True, does(node, roles)) for node in NODES})
        now += EVERY_S
    return [roles.now[node].does for node in NODES].count("prefill")


@given(looks, leasts, kinds)
def test_the_least_of_each_kind_is_kept_while_so_many_are_alive(history, least, kinds):
    roles = Roles(RolesConfig(min_prefill=least[0], min_decode=least[1]))
    for number, nodes in enumerate(history):
        does = look(roles, number * EVERY_S, nodes, kinds)
        doing = [does.get(node, kind) for node, kind in zip(NODES, kinds, strict=True) if nodes[node][0]]
        can = [kind for node, kind in zip(NODES, kinds, strict=True) if nodes[node][0]]
        decode = min(least[1], len(can) - can.count("prefill"))
        assert doing.count("decode") >= decode
        # decode nodes come first: without them nothing is answered
        assert doing.count("prefill") >= min(least[0], len(can) - max(decode, can.count("decode")))


@given(looks)
def test_roles_change_every_ten_seconds_at_most_while_enough_nodes_are_alive(history):
    roles, changed = Roles(RolesConfig()), [-10.0]
    before = {}
    for number, nodes in enumerate(history):
        now = number * EVERY_S
        does = look(roles, now, {node: (True, report) for node, (_, report) in nodes.items()})
        if before not in ({}, does):
            assert now - changed[-1] >= 10.0
            changed.append(now)
        before = does


@given(looks, leasts, kinds, st.permutations(NODES))
def test_equal_reports_make_equal_roles_whatever_the_order_of_nodes(history, least, kinds, order):
    config = RolesConfig(min_prefill=least[0], min_decode=least[1])
    one, other = Roles(config), Roles(config)
    for number, nodes in enumerate(history):
        now = number * EVERY_S
        assert look(one, now, nodes, kinds) == look(other, now, nodes, kinds, order)
        assert one.resting(now, "prefill") == other.resting(now, "prefill")


def test_nodes_go_where_the_work_is_and_come_back():
    roles = Roles(RolesConfig())
    assert steady(roles, 0, 30, lambda node, roles: IDLE) == 3

    def prompts(node, roles):
        return PROMPTS if node in roles.now and roles.now[node].does == "prefill" else IDLE

    def answers(node, roles):
        return ANSWERS if roles.now[node].does == "decode" else IDLE

    assert steady(roles, 32, 60, prompts) == 5
    assert steady(roles, 94, 120, answers) == 1
    assert "answers for" in roles.now[NODES[4]].why


def test_a_node_that_reports_nothing_does_not_hide_the_work_of_the_others():
    def blind(node, roles, busy, does):
        if node in (NODES[0], NODES[5]):
            return None
        return busy if node in roles.now and roles.now[node].does == does else IDLE

    assert steady(Roles(RolesConfig()), 0, 90, partial(blind, busy=PROMPTS, does="prefill")) == 5
    assert steady(Roles(RolesConfig()), 0, 120, partial(blind, busy=ANSWERS, does="decode")) == 1


@scenario
async def test_what_a_node_reported_before_its_metrics_broke_is_forgotten(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("launch.proxy.nodes.time", SimpleNamespace(monotonic=clock))
    metrics = "vllm:num_requests_running %s\nvllm:num_requests_waiting 0\n"
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Node(says(metrics % 0))) for _ in range(4)]
        engines.sort(key=lambda node: node.url)
        engines[0].default, engines[0].script = says(b"", 404), [says(metrics % 1)]
        proxy = Proxy(ProxyConfig(roles=RolesConfig(auto=True)))
        await proxy.setup()
        stack.push_async_callback(proxy.close)
        records = [
            NodeRecord(name=f"n{at}", role="both", address=node.url) for at, node in enumerate(engines)
        ]
        proxy.update(View(tuple(records)))
        for clock.now in range(0, 100, 2):
            await proxy.check_nodes()
        roles = proxy._pools.describe(clock.now)["roles"]
        assert [roles[node.url]["does"] for node in engines] == ["prefill", "prefill", "decode", "decode"]


def test_a_balanced_load_moves_nothing():
    roles = Roles(RolesConfig())

    def both(node, roles):
        return PROMPTS._replace(queued=0) if node in NODES[:3] else ANSWERS

    assert steady(roles, 0, 200, both) == 3
    assert {role.since for role in roles.now.values()} == {0}


def test_a_node_that_changes_gets_nothing_new_until_it_has_finished():
    roles = Roles(RolesConfig())
    idle = dict.fromkeys(NODES, (True, IDLE))
    look(roles, 0, idle)
    leaving = NODES[3]
    dead = {**idle, **dict.fromkeys(NODES[:3], (False, None))}
    look(roles, 2, dead | {leaving: (True, ANSWERS)})
    assert roles.now[leaving].does == "prefill"
    assert roles.now[leaving].why == "too few nodes were alive"
    assert leaving in roles.resting(2, "prefill") & roles.resting(2, "decode")
    look(roles, 4, dead | {leaving: (True, IDLE)})
    assert leaving not in roles.resting(4, "prefill")


def test_a_node_that_does_not_finish_gets_new_requests_in_the_end():
    roles = Roles(RolesConfig())
    nodes = {node: (node not in NODES[:3], ANSWERS) for node in NODES}
    look(roles, 0, dict.fromkeys(NODES, (True, IDLE)))
    look(roles, 2, nodes)
    assert NODES[3] in roles.resting(2, "prefill")
    look(roles, 22, nodes)
    assert NODES[3] not in roles.resting(22, "prefill")


def test_reports_are_read_from_the_metrics_of_vllm_and_of_the_reference_engine():
    vllm = b"""# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:request_success_total{engine="0",finished_reason="stop"} 1.2e+02
vllm:request_success_total{engine="0",finished_reason="length"} 5.0
"""
    assert read_metrics(vllm, 0) == NodeReport(1.0, 5.0, 0.3, 125.0)
    reference = b"""pd_cache_reference_queue_length 0.0
pd_cache_reference_running 2.0
pd_cache_reference_free_blocks 300.0
pd_cache_reference_blocks 400.0
pd_cache_reference_requests_total{outcome="length"} 9.0
pd_cache_reference_requests_created{outcome="length"} 1.7e+09
"""
    assert read_metrics(reference, 8) == NodeReport(0.0, 2.0, 0.25, 9.0)
    assert read_metrics(reference, 4) == NodeReport(0.0, 2.0, 0.5, 9.0)
    waits = b"vllm:num_requests_waiting 1\nvllm:num_requests_running "
    for number in (b"1.0.0", b"1e999", b"1e300", b"-1"):
        assert read_metrics(waits + number + b"\n", 0) is None
    for other in (b"", b"<html>"):
        assert read_metrics(other, 0) is None
