"""Which node is next, and whose fault a failure is: the pure parts of routing, under any history of nodes and
requests."""

import json
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from launch.discovery import View
from launch.proxy.lookups import PoolLookups
from launch.proxy.nodes import NodePools
from launch.proxy.routing import node_pool
from launch.proxy.routing.node_pool import Attempts, NodeBreaker, NodePool, RetryBudget, Trial
from launch.proxy.routing.prefixes import PrefixIndex, RoutedPrompt, read_prompt
from pd_cache.cluster import About, NodeRecord, ProxyConfig
from tests.support.proxy import InOrder, record

TIMES = st.integers(0, 24).map(lambda eighths: eighths / 8)
"""Seconds between events, such that their sums are exact."""


def opens_after(failures):
    return patch.object(node_pool, "BREAKER_FAILURES", failures)


def pool_of(*urls, hop="prefill", policy="round_robin", rng=None):
    pool = NodePool(hop, policy, rng=rng)
    pool.update(record(url) for url in urls)
    return pool


# --- any history --------------------------------------------------------------------------------------------

NODES = "abcd"
MODES = {
    "answers": None, "fails": "error", "dies": "disconnected", "answers nonsense": "garbage", "hangs": "timeout", "is full": "busy",
    "is gone": "unreachable",
}  # fmt: skip
AT_FAULT = ("unreachable", "timeout")
SENT = ("error", "disconnected", "garbage", "timeout")
"""The reasons of requests that a node has begun to work on."""


class Routing(RuleBasedStateMachine):
    """Nodes answer, die, hang, leave and come back, while some clients send requests that every node
    fails."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.breakers = opens_after(2)
        self.breakers.start()
        self.pool = pool_of(*NODES, policy="prefix_aware", rng=InOrder())
        self.budget = RetryBudget(10**6)
        self.modes = dict.fromkeys(NODES, "answers")
        self.always_well = set(NODES)

    def teardown(self):
        self.breakers.stop()

    @rule(node=st.sampled_from(NODES), mode=st.sampled_from(list(MODES)))
    def change(self, node, mode):
        self.modes[node] = mode
        if mode not in ("answers", "is full"):
            self.always_well.discard(node)

    @rule(passed=TIMES)
    def wait(self, passed):
        self.now += passed

    @rule(node=st.sampled_from(NODES))
    def check(self, node):
        self.pool.node(node).checked(alive=MODES[self.modes[node]] not in AT_FAULT)

    @rule(left=st.sets(st.sampled_from(NODES), max_size=3))
    def leave(self, left):
        self.pool.update(record(node) for node in NODES if node not in left)

    @rule(poison=st.sampled_from([None, None, *SENT[:3]]), block=st.integers(0, 3))
    def request(self, poison, block):
        well = {node for node, up in self.pool.health(self.now).items() if up}
        prompt = RoutedPrompt(100, [block])
        attempts = Attempts(self.pool, Trial(self.budget), prompt)
        answered, failed = "", {}
        while (node := attempts.next(self.now)) is not None:
            assert node not in failed, "each node at most once"
            assert node in well or well <= failed.keys(), "one that is skipped only if there is no other"
            with self.pool.working(node, prompt):
                why = MODES[self.modes[node]] or poison
            if why is None:
                attempts.answered(node, self.now, well=True)
                answered = node
                break
            failed[node] = why
            attempts.failed(node, why, self.now)
        sent = [why for why in failed.values() if why in SENT]
        assert len(sent) <= 2, "no request costs more than two nodes"
        if len(sent) < 2:  # no prompt is lost while a node is left to ask
            assert answered or well <= failed.keys()

    @invariant()
    def no_node_is_blamed_for_a_bad_request(self):
        health = self.pool.health(self.now)
        assert all(health.get(node, True) for node in self.always_well)

    @invariant()
    def all_work_is_given_back(self):
        assert {node.load for node in self.pool.nodes.values()} <= {0.0}


TestRouting = Routing.TestCase
TestRouting.settings = settings(stateful_step_count=40)


# --- whose fault a failure is -------------------------------------------------------------------------------


def request_of(pool, fails, budget=None):
    """The node that answered a request that some nodes fail; empty if none did."""
    attempts = Attempts(pool, Trial(budget or RetryBudget(1000)))
    while (node := attempts.next(0.0)) is not None:
        if node not in fails:
            attempts.answered(node, 0.0, well=True)
            return node
        attempts.failed(node, fails[node], 0.0)
    return ""


def decode_nodes(*urls):
    return pool_of(*urls, hop="decode", rng=InOrder())


@opens_after(2)
def test_refusals_do_not_make_up_for_failures():
    pool = decode_nodes("a", "b")
    assert request_of(pool, {"a": "error"}) == "b"
    refused = Attempts(pool, Trial(RetryBudget(1000)))
    assert refused.next(0.0) == "a"
    refused.answered("a", 0.0, well=False)
    assert request_of(pool, {}) == "b"
    assert request_of(pool, {"a": "error"}) == "b"
    assert pool.health(0.0) == {"a": False, "b": True}


def test_prefill_nodes_that_drop_every_request_do_not_stop_decode_nodes_from_answering():
    prefill, decode = decode_nodes("p", "q"), decode_nodes("d")
    for _ in range(6):  # five in a row are believed to be the requests' fault
        one = Trial(RetryBudget(1000))
        before = Attempts(prefill, one)
        while (node := before.next(0.0)) is not None:
            before.failed(node, "disconnected", 0.0)
    assert Attempts(decode, one).next(0.0) == "d"


def test_two_broken_nodes_of_three_are_found_out():
    pool, broken = decode_nodes("a", "b", "c"), {"a": "error", "b": "error"}
    answered = [request_of(pool, broken) for _ in range(40)]
    assert answered.count("") <= 1, "the second try goes to a node that is known to answer"
    assert pool.health(0.0) == {"a": False, "b": False, "c": True}


@opens_after(1)
@given(st.lists(st.booleans(), min_size=60, max_size=200), st.integers(2, 5), st.integers(0, 4))
def test_a_broken_node_is_found_out_whatever_poison_there_is(poisons, nodes, broken):
    urls = [str(n) for n in range(nodes)]
    pool, bad = decode_nodes(*urls), urls[broken % nodes]
    for poison in poisons:
        request_of(pool, dict.fromkeys(urls if poison else [bad], "error"))
    good = poisons.count(False)
    assert all(up for url, up in pool.health(0.0).items() if url != bad)
    assert not pool.health(0.0)[bad] or good < 2 * nodes or good < len(poisons) // 2


@patch.multiple(node_pool, _A_REQUEST=0.25, _A_SECOND=1.0)
def test_retries_are_a_fraction_of_requests_and_a_few_a_second():
    budget, made = RetryBudget(10), 0
    for _ in range(100):
        budget.asked(0.0)
        if budget.allows(0.0):
            budget.take(0.0)
            made += 1
    assert made == 10 + 24, "what was saved up, and of each four requests one"
    assert [budget.allows(now) for now in (0.2, 1.0)] == [False, True]
    assert [budget.allows(100.0) and budget.take(100.0) is None for _ in range(12)].count(True) == 10


@opens_after(1)
@pytest.mark.parametrize("reason, answered", [("unreachable", "b"), ("busy", "b"), ("error", "")])
def test_without_a_retry_left_a_request_goes_on_only_if_no_node_has_begun_to_work_on_it(reason, answered):
    pool = decode_nodes("a", "b")
    assert request_of(pool, {"a": reason}, RetryBudget(0)) == answered
    assert pool.health(0.0) == {"a": reason != "unreachable", "b": True}


# --- breakers -----------------------------------------------------------------------------------------------


def test_an_unreachable_node_is_skipped_for_a_second_and_twice_as_long_each_time_up_to_ten():
    breaker, now, skips = NodeBreaker(), 10.0, []
    for _ in range(6):
        breaker.sent(now)
        for late in (0.0, 0.1):  # requests that fail together count once
            breaker.failed("unreachable", now + late)
        skips.append(next(seconds for seconds in range(20) if breaker.allows(now + seconds)))
        now += skips[-1]
    assert skips == [1, 2, 4, 8, 10, 10]
    breaker.sent(now)
    assert (breaker.allows(now + 0.5), breaker.allows(now + 1)) == (False, True), (
        "one request a second is let through"
    )
    breaker.succeeded()
    breaker.failed("unreachable", now)
    assert (breaker.allows(now + 0.9), breaker.allows(now + 1)) == (False, True)


@opens_after(1)
def test_a_check_brings_back_a_node_that_was_unreachable_but_not_one_that_fails_requests():
    pool = pool_of("a", "b")
    for node, reason in (("a", "unreachable"), ("b", "error")):
        pool.node(node).breaker.failed(reason, 0)
        pool.node(node).checked(alive=True)
    assert pool.health(0) == {"a": True, "b": False}


# --- prompts and prefixes -----------------------------------------------------------------------------------


def ids(*counts, first=10000):
    """The JSON of a prompt: so many token ids from each of several ranges."""
    return json.dumps(
        [first + 1000 * part + n % 1000 for part, count in enumerate(counts) for n in range(count)]
    ).encode()


@pytest.mark.parametrize(
    "text, tokens",
    [(b"[1, 2, 3]", 3), (b"[ 1]", 1), (b'"abcdefgh"', 2), (b'""', 1), (b'["a", "b"]', 2), (b'[{"role": "user"}]', 4), (b"[]", 1)],
)  # fmt: skip
def test_token_ids_are_counted_and_text_is_guessed(text, tokens):
    assert read_prompt(text).tokens == tokens


@given(st.binary(max_size=9000), st.binary(max_size=9000), st.binary(max_size=9000))
def test_prompts_share_as_many_blocks_as_they_share_bytes(common, one, other):
    first, second = read_prompt(common + one), read_prompt(common + other)
    for index in range(min(len(first.blocks), len(second.blocks))):
        end = 2048 * (index + 1)
        assert (first.blocks[index] == second.blocks[index]) == (
            (common + one)[:end] == (common + other)[:end]
        )
    assert not set(first.blocks) & set(read_prompt(common + one, b"another model").blocks)


def test_an_index_knows_what_was_computed_and_forgets_ends_before_beginnings():
    index = PrefixIndex(1000)
    index.add(RoutedPrompt(1000, ["a", "b", "c", "d"], 250))
    assert index.match(RoutedPrompt(1200, ["a", "b", "c", "x"], 250)) == 750
    index.add(RoutedPrompt(500, ["y", "z"], 250))
    assert index.match(RoutedPrompt(1000, ["a", "b", "c", "d"], 250)) == 500
    assert index.match(RoutedPrompt(400, ["y", "z"], 250)) == 400, "never more than the prompt"


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=20), st.floats(0, 500))), st.integers(1, 3000)
)
def test_an_index_is_bounded_and_never_wrong_about_its_own_last_prompt(prompts, capacity):
    index = PrefixIndex(capacity)
    for blocks, size in prompts:
        prompt = RoutedPrompt(10**6, list(dict.fromkeys(blocks)), size)
        index.add(prompt)
        assert len(index._blocks) * 64 <= capacity
        fits = capacity // max(64, round(size))
        assert index.match(prompt) == int(min(len(prompt.blocks), fits) * size)


# --- policies -----------------------------------------------------------------------------------------------


def test_nodes_are_taken_in_turn_and_several_proxies_begin_at_different_ones():
    begun = set()
    for seed in range(20):
        pool = pool_of("a", "b", "c", rng=Random(seed))
        taken = [pool.pick(0) for _ in range(7)]
        assert (sorted(map(str, taken[:3])), taken[3:6], taken[6]) == (["a", "b", "c"], taken[:3], taken[0])
        begun.add(taken[0])
    assert begun == {"a", "b", "c"}
    assert pool.cheapest(0) == pool.cheapest(0) == pool.pick(0), "who only asks takes no turn"
    assert {pool.out_of_turn(0) for _ in range(99)} == begun, (
        "a text whose node returns no tokens waits for it"
    )


def test_what_is_known_of_a_node_is_kept_until_it_is_started_anew():
    pool = pool_of("a")
    pool.node("a").breaker.failed("unreachable", 0)
    pool.update([record("a"), record("b")])
    assert pool.health(0.5) == {"a": False, "b": True}
    pool.update([record("a", instance="2"), record("b")])
    assert pool.health(0.5) == {"a": True, "b": True}


def test_the_least_loaded_prefill_node_has_the_fewest_tokens_and_the_decode_node_with_room_is_taken():
    pool, prompt = pool_of("a", "b", policy="least_loaded"), RoutedPrompt(300)
    with pool.working("a", RoutedPrompt(1000)), pool.working("b", prompt), pool.working("b", prompt):
        assert {url: pool.nodes[url].load for url in "ab"} == {"a": 1000, "b": 600}
        assert pool.pick(0) == "b"
    decode = NodePool("decode", "prefix_aware")
    decode.update([record("small", max_running=2), record("large", max_running=8)])
    with decode.working("small"), decode.working("large"), decode.working("large"):
        assert decode.pick(0, RoutedPrompt(5)) == "large"


def test_a_prompt_goes_where_its_beginning_was_computed_unless_the_queue_there_is_longer_than_what_that_saves():
    pool = pool_of("a", "b", "c", policy="prefix_aware")
    known = read_prompt(ids(2000))
    with pool.working("a", known):
        pass
    assert [pool.pick(0, read_prompt(ids(2000, 500))) for _ in range(3)] == ["a"] * 3
    assert len({pool.pick(0, read_prompt(ids(2000, first=50_000))) for _ in range(3)}) == 3
    for queued, taken in ((1000, "a"), (3000, "b")):
        with pool.working("a", RoutedPrompt(queued)), pool.working("c", RoutedPrompt(4000)):
            assert pool.pick(0, known) == taken


def test_a_node_that_says_how_large_its_cache_is_is_guessed_to_hold_no_more():
    pools = NodePools(ProxyConfig(policy="prefix_aware"), PoolLookups())
    pools.update(
        View(tuple(NodeRecord(name=name, role="prefill", address=f"http://{name}:1") for name in "ab"))
    )
    pool, known = pools.pools["prefill"], read_prompt(ids(2000))
    with pool.working("http://a:1", RoutedPrompt(3)):
        pools.note_about("http://a:1", About(kv_tokens=1000))
        assert pool.nodes["http://a:1"].load == 3, "it is the same node"
    for prompt in (known, read_prompt(ids(2000, first=50_000))):
        with pool.working("http://a:1", prompt):
            pass
    assert {pool.pick(0, known) for _ in range(2)} == {"http://a:1", "http://b:1"}, (
        "the second took the first's room"
    )
