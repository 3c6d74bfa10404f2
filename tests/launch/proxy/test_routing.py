"""The proxy's pure parts: which node is next, and what each hop is sent."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.discovery import View
from launch.proxy.bodies import ApiError, Completion, HandedOver, read_handoff
from launch.proxy.direct import DirectRule
from launch.proxy.keys import Admission
from launch.proxy.nodes import NodePools
from launch.proxy.prefixes import PrefixIndex, RoutedPrompt, count_tokens, read_prompt
from launch.proxy.routing import Hop, NodeBreaker, NodePool, Policy, Target
from pd_cache.cluster import About, NodeRecord, ProxyConfig

TIMES = st.integers(0, 24).map(lambda eighths: eighths / 8)
"""Seconds between events, such that their sums are exact."""


# --- breakers --------------------------------------------------------------------------------------------------------


def test_an_unreachable_node_is_skipped_for_a_second_then_tried_once_a_second() -> None:
    breaker = NodeBreaker(5)
    breaker.failed("unreachable", 10.0)
    assert not breaker.allows(10.9)
    assert breaker.allows(11.0)
    breaker.sent(11.0)
    assert not breaker.allows(11.5), "one request is enough to see"
    assert breaker.allows(12.0)


def test_the_skip_doubles_up_to_ten_seconds_and_an_answer_ends_it() -> None:
    breaker, now, skips = NodeBreaker(5), 0.0, []
    for _ in range(6):
        breaker.sent(now)
        breaker.failed("unreachable", now)
        skips.append(breaker.wait(now))
        now += skips[-1]
        assert breaker.allows(now)
    assert skips == [1, 2, 4, 8, 10, 10]
    breaker.succeeded()
    breaker.failed("unreachable", now)
    assert breaker.wait(now) == 1


def test_requests_that_fail_together_count_as_one_failure() -> None:
    breaker = NodeBreaker(5)
    for now in (5.0, 5.1, 5.9):
        breaker.failed("unreachable", now)
    assert breaker.wait(5.9) == pytest.approx(0.1)


def test_a_node_that_fails_requests_is_skipped_after_several_in_a_row() -> None:
    breaker = NodeBreaker(3)
    for _ in range(2):
        breaker.failed("error", 0)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed("error", 0)
    assert breaker.allows(0)
    breaker.failed("error", 0)
    assert not breaker.allows(0.9)


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["unreachable", "error", "sent", "ok"]), TIMES)))
def test_no_skip_is_longer_than_ten_seconds_and_an_answer_always_ends_it(
    limit: int, events: list[tuple[Any, float]]
) -> None:
    breaker, now, in_a_row = NodeBreaker(limit), 0.0, 0
    for event, passed in events:
        now += passed
        if event == "ok":
            breaker.succeeded()
            in_a_row = 0
            assert breaker.allows(now)
        elif event == "sent":
            breaker.sent(now)
        else:
            breaker.failed(event, now)
            in_a_row += 1
            assert event == "error" or not breaker.allows(now)
            assert in_a_row < limit or not breaker.allows(now)
        assert breaker.wait(now) <= 10
    assert breaker.allows(now + 10)


# --- prompts and prefixes --------------------------------------------------------------------------------------------


def ids(*counts: int, first: int = 10_000) -> bytes:
    """The JSON of a prompt: so many token ids from each of several ranges."""
    return json.dumps(
        [first + 1000 * part + n % 1000 for part, count in enumerate(counts) for n in range(count)]
    ).encode()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [(b"[1, 2, 3]", 3), (b"[ 1]", 1), (b'"abcdefgh"', 2), (b'""', 1), (b'["a", "b"]', 2), (b'[{"role": "user"}]', 4), (b"[]", 1)],
)  # fmt: skip
def test_token_ids_are_counted_and_text_is_guessed(text: bytes, tokens: int) -> None:
    assert count_tokens(text) == tokens


@given(st.binary(max_size=9000), st.binary(max_size=9000), st.binary(max_size=9000))
def test_prompts_share_as_many_blocks_as_they_share_bytes(common: bytes, one: bytes, other: bytes) -> None:
    first, second = read_prompt(common + one), read_prompt(common + other)
    shared = sum(1 for a, b in zip(first.blocks, second.blocks, strict=False) if a == b)
    assert shared >= len(common) // 2048
    for index in range(min(len(first.blocks), len(second.blocks))):
        end = 2048 * (index + 1)
        assert (first.blocks[index] == second.blocks[index]) == ((common + one)[:end] == (common + other)[:end])


def test_prompts_of_different_isolation_share_nothing() -> None:
    text = ids(2000)
    assert not set(read_prompt(text, b"a").blocks) & set(read_prompt(text, b"b").blocks)


def test_an_index_knows_what_was_computed_and_forgets_ends_before_beginnings() -> None:
    index = PrefixIndex(1000)
    index.add(RoutedPrompt(1000, ["a", "b", "c", "d"], 250))
    assert index.match(RoutedPrompt(1200, ["a", "b", "c", "x"], 250)) == 750
    assert index.match(RoutedPrompt(1200, ["x", "b"], 250)) == 0
    index.add(RoutedPrompt(500, ["y", "z"], 250))
    assert index.match(RoutedPrompt(1000, ["a", "b", "c", "d"], 250)) == 500
    assert index.match(RoutedPrompt(500, ["y", "z"], 250)) == 500
    assert index.match(RoutedPrompt(400, ["y", "z"], 250)) == 400, "never more than the prompt"


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=20), st.floats(0, 500))), st.integers(1, 3000))
def test_an_index_is_bounded_and_never_wrong_about_its_own_last_prompt(
    prompts: list[tuple[list[int], float]], capacity: int
) -> None:
    index = PrefixIndex(capacity)
    for blocks, size in prompts:
        prompt = RoutedPrompt(10**6, list(dict.fromkeys(blocks)), size)
        index.add(prompt)
        assert len(index) * 64 <= capacity
        fits = capacity // max(64, round(size))
        assert index.match(prompt) == int(min(len(prompt.blocks), fits) * size)


# --- policies --------------------------------------------------------------------------------------------------------


def pool_of(*urls: str, hop: Hop = "prefill", policy: Policy = "round_robin", **options: int) -> NodePool:
    pool = NodePool(hop, policy, **options)
    pool.update(Target(url) for url in urls)
    return pool


def test_nodes_are_taken_in_turn_and_several_proxies_begin_at_different_ones() -> None:
    begun = set()
    for seed in range(20):
        pool = NodePool("prefill", rng=Random(seed))
        pool.update(map(Target, "abc"))
        taken = [pool.pick(0) for _ in range(7)]
        assert (sorted(map(str, taken[:3])), taken[3:6], taken[6]) == (["a", "b", "c"], taken[:3], taken[0])
        begun.add(taken[0])
    assert begun == {"a", "b", "c"}


def test_a_node_that_joins_is_taken_and_one_that_left_is_not() -> None:
    pool = pool_of("a", "b")
    pool.update([Target("b"), Target("c")])
    assert sorted(str(pool.pick(0)) for _ in range(4)) == ["b", "b", "c", "c"]


def test_what_is_known_of_a_node_is_kept_until_it_is_started_anew() -> None:
    pool = pool_of("a")
    pool.failed("a", "unreachable", 0)
    pool.update([Target("a"), Target("b")])
    assert pool.health(0.5) == {"a": False, "b": True}
    pool.update([Target("a", instance="2"), Target("b")])
    assert pool.health(0.5) == {"a": True, "b": True}


def test_the_least_loaded_prefill_node_has_the_fewest_tokens_to_compute() -> None:
    pool = pool_of("a", "b", policy="least_loaded")
    with (
        pool.working("a", RoutedPrompt(1000)),
        pool.working("b", RoutedPrompt(300)),
        pool.working("b", RoutedPrompt(300)),
    ):
        assert pool.loads() == {"a": 1000, "b": 600}
        assert pool.pick(0) == "b"
    assert pool.loads() == {"a": 0, "b": 0}


def test_the_decode_node_with_room_is_taken() -> None:
    pool = NodePool("decode", "prefix_aware")
    pool.update([Target("small", max_running=2), Target("large", max_running=8)])
    with pool.working("small"), pool.working("large"), pool.working("large"):
        assert pool.pick(0, RoutedPrompt(5)) == "large"


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    pool = pool_of("a", "b", "c", policy="prefix_aware")
    first = read_prompt(ids(2000))
    node = pool.pick(0, first)
    assert node is not None
    with pool.working(node, first):
        pass
    again = read_prompt(ids(2000, 500))
    assert [pool.pick(0, again) for _ in range(3)] == [node] * 3
    assert len({pool.pick(0, read_prompt(ids(2000, first=50_000))) for _ in range(3)}) == 3


def test_a_node_that_says_how_large_its_cache_is_is_guessed_to_hold_no_more() -> None:
    config = ProxyConfig(policy="prefix_aware")
    pools = NodePools(config, DirectRule(0), rng=Random(0))
    pools.update(View(tuple(NodeRecord(name=name, role="prefill", address=f"http://{name}:1") for name in "ab")))
    pool, known = pools.pools["prefill"], read_prompt(ids(2000))
    with pool.working("http://a:1", RoutedPrompt(3)):
        pools.told_namespace("http://a:1", About(kv_tokens=1000))
        assert pool.loads()["http://a:1"] == 3, "it is the same node"
    for prompt in (known, read_prompt(ids(2000, first=50_000))):
        with pool.working("http://a:1", prompt):
            pass
    assert {pool.pick(0, known) for _ in range(2)} == {"http://a:1", "http://b:1"}, (
        "the second took the first one's room"
    )


def test_a_queue_that_is_longer_than_what_the_cache_saves_sends_it_elsewhere() -> None:
    pool = pool_of("a", "b", policy="prefix_aware")
    known = read_prompt(ids(2000))
    with pool.working("a", known):
        pass
    with pool.working("a", RoutedPrompt(1000)):
        assert pool.pick(0, known) == "a"
    with pool.working("a", RoutedPrompt(3000)):
        assert pool.pick(0, known) == "b"


def test_where_no_check_succeeds_the_checks_are_not_believed() -> None:
    pool = pool_of("a", "b")
    pool.checked("a", alive=False)
    assert [pool.pick(0) for _ in range(2)] == ["b", "b"]
    pool.checked("b", alive=False)
    assert {pool.pick(0), pool.pick(0)} == {"a", "b"}


def test_a_check_brings_back_a_node_that_was_unreachable_but_not_one_that_fails_requests() -> None:
    pool = pool_of("a", "b", breaker_failures=1)
    pool.failed("a", "unreachable", 0)
    pool.failed("b", "error", 0)
    pool.checked("a", alive=True)
    pool.checked("b", alive=True)
    assert pool.health(0) == {"a": True, "b": False}


@pytest.mark.parametrize(("now", "seconds"), [(0.0, 1), (0.5, 1), (1.0, 1), (99.0, 1)])
def test_retry_after_is_at_least_a_second(now: float, seconds: int) -> None:
    pool = pool_of("a")
    pool.failed("a", "unreachable", 0.0)
    assert pool.retry_after(now) == seconds
    assert pool_of().retry_after(now) == 1


@given(
    st.sampled_from(["round_robin", "least_loaded", "prefix_aware"]),
    st.sampled_from(["prefill", "decode"]),
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["pick", "down", "up", "leave", "join"]), TIMES)),
)  # fmt: skip
def test_a_node_is_picked_exactly_if_one_is_well_and_all_work_is_given_back(
    policy: Policy, hop: Hop, events: list[tuple[str, str, float]]
) -> None:
    pool, now, there = pool_of(*"abcd", hop=hop, policy=policy), 0.0, set("abcd")
    for node, event, passed in events:
        now += passed
        if event == "down":
            pool.failed(node, "unreachable", now)
        elif event == "up":
            pool.succeeded(node)
        elif event in ("leave", "join"):
            there = there - {node} if event == "leave" else there | {node}
            pool.update(Target(url) for url in sorted(there))
        else:
            well = {url for url, up in pool.health(now).items() if up}
            picked = pool.pick(now, RoutedPrompt(100, ["x", node]))
            assert (picked in well) if well else picked is None
            if picked is not None:
                with pool.working(picked, RoutedPrompt(100, ["x", node])):
                    pool.update(Target(url) for url in sorted(there))
        assert set(pool.loads()) == there
        assert set(pool.loads().values()) <= {0.0}
        assert 1 <= pool.retry_after(now) <= 10


# --- admission -------------------------------------------------------------------------------------------------------


def test_one_client_cannot_take_every_place() -> None:
    admission = Admission(3, 2)
    with admission.admitted("a"), admission.admitted("a"):
        with pytest.raises(ApiError) as refused, admission.admitted("a"):
            pass
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        with admission.admitted("b"):
            with pytest.raises(ApiError) as refused, admission.admitted("c"):
                pass
            assert (refused.value.status, refused.value.retry_after) == (503, 1)
    assert admission.running() == 0


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_the_prefill_body_asks_for_one_token_and_promises_a_remote_decode() -> None:
    body = {
        "model": "m", "prompt": [1, 2], "max_tokens": 99, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.5, "min_tokens": 7, "seed": 3, "kv_transfer_params": {"remote_host": "evil"},
    }  # fmt: skip
    assert json.loads(Completion(json.dumps(body).encode()).for_prefill()) == {
        "model": "m", "prompt": [1, 2], "max_tokens": 1, "stream": False, "temperature": 0.5, "seed": 3,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }  # fmt: skip


def test_what_is_handed_over_keeps_its_bytes() -> None:
    params = '{"x" : 1.50, "n": 123456789012345678901234567890, "x": "\\u00e9", "deep": [{"a": null}]}'
    handoff = read_handoff(f'{{"id": "p", "kv_transfer_params": {params}, "choices": []}}'.encode())
    body = Completion(b'{"prompt": "x", "temperature": 0.70}').for_decode(handoff)
    assert body == f'{{"prompt":"x","temperature":0.70,"kv_transfer_params":{params}}}'.encode()


@pytest.mark.parametrize("answer", [b"{}", b'{"kv_transfer_params": null}', b'{"choices": []}'])
def test_a_prefill_node_may_have_nothing_to_hand_over(answer: bytes) -> None:
    handoff = read_handoff(answer)
    assert not handoff
    assert b"kv_transfer_params" not in Completion(b'{"prompt": "x"}').for_decode(handoff)


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"null", b"<html>", b'{"a": 1', b'"' + b"x" * 100, b'{"a":' + b"[" * 100_000]
)
def test_a_prefill_answer_that_is_no_object_is_refused(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_handoff(answer)


def test_of_a_field_that_stands_twice_every_hop_sees_the_last() -> None:
    assert Completion(b'{"prompt": "a", "prompt": "b"}').for_decode(None) == b'{"prompt":"b"}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"not json", None),
        (b"[1, 2]", None),
        (b"null", None),
        (b'"prompt"', None),
        (b'{"prompt": "x"', None),
        (b'{"prompt": NaN}', None),
        (b'{"prompt": "\xff"}', None),
        (b'{"\xff": 1, "prompt": "x"}', None),
        ('{"prompt": "x"}'.encode("utf-16"), None),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", None),
        (b"{}", "prompt"),
        (b'{"prompt": null}', "prompt"),
        (b'{"prompt": "x", "max_tokens": -1}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": "12"}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "x", "max_completion_tokens": -3}', "max_completion_tokens"),
    ],
)
def test_a_request_that_no_node_could_serve_is_a_400(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        Completion(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    error = json.loads(caught.value.body())["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.text(max_size=8), json_values, max_size=6), params=json_values)
def test_the_decode_node_is_sent_what_the_client_sent(fields: dict[str, object], params: object) -> None:
    fields = {name: value for name, value in fields.items() if name not in ("max_tokens", "max_completion_tokens")}
    fields |= {"prompt": [1, 2, 3], "max_tokens": 5}
    fields.pop("kv_transfer_params", None)
    completion = Completion(json.dumps(fields).encode())
    assert json.loads(completion.for_decode(None)) == fields
    handoff = read_handoff(json.dumps({"kv_transfer_params": params}).encode())
    expected = fields if params is None else {**fields, "kv_transfer_params": params}
    assert json.loads(completion.for_decode(handoff)) == expected
    assert not HandedOver()
