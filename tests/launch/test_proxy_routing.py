"""The proxy's pure parts: which node is next, and what each hop is sent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.proxy.answers import ApiError
from launch.proxy.completion import Completion, Handoff, read_handoff
from launch.proxy.routing import Attempts, NodePool

# --- routing ---------------------------------------------------------------------------------------------------------


def test_nodes_are_taken_in_turn() -> None:
    pool = NodePool(["a", "b", "c"])
    assert [pool.pick(0) for _ in range(7)] == ["a", "b", "c", "a", "b", "c", "a"]


def test_the_same_node_twice_counts_once() -> None:
    assert len(NodePool(["a", "b", "a"])) == 2


def test_an_unreachable_node_is_skipped_for_a_second_then_tried_again() -> None:
    pool = NodePool(["a", "b"])
    pool.unreachable("a", 10.0)
    assert [pool.pick(10.9) for _ in range(3)] == ["b", "b", "b"]
    assert {pool.pick(11.0), pool.pick(11.0)} == {"a", "b"}


def test_the_skip_doubles_up_to_ten_seconds_and_an_answer_ends_it() -> None:
    pool, now, skips = NodePool(["a"]), 0.0, []
    for _ in range(6):
        pool.unreachable("a", now)
        skips.append(pool.retry_after(now))
        now += skips[-1]
        assert pool.pick(now) == "a"
    assert skips == [1, 2, 4, 8, 10, 10]
    pool.reached("a")
    pool.unreachable("a", now)
    assert pool.retry_after(now) == 1


def test_requests_that_fail_together_count_as_one_failure() -> None:
    pool = NodePool(["a"])
    for now in (5.0, 5.1, 5.9):
        pool.unreachable("a", now)
    assert pool.health(5.99) == {"a": False}
    assert pool.health(6.0) == {"a": True}


@pytest.mark.parametrize(("now", "seconds"), [(0.0, 1), (0.5, 1), (1.0, 1), (99.0, 1)])
def test_retry_after_is_at_least_a_second(now: float, seconds: int) -> None:
    pool = NodePool(["a"])
    pool.unreachable("a", 0.0)
    assert pool.retry_after(now) == seconds
    assert NodePool([]).retry_after(now) == 1


def test_one_request_tries_each_node_once() -> None:
    attempts = Attempts(NodePool(["a", "b", "c"]))
    order = []
    while (node := attempts.next(0.0)) is not None:
        order.append(node)
        attempts.failed(node, "busy", 0.0)
    assert order == ["a", "b", "c"]


def test_a_request_that_brings_nodes_down_visits_three_at_most() -> None:
    attempts = Attempts(NodePool([str(n) for n in range(9)]))
    for expected in ("0", "1", "2"):
        assert attempts.next(0.0) == expected
        attempts.failed(expected, "disconnected", 0.0)
    assert attempts.next(0.0) is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["pick", "down", "up"]), st.floats(0, 3))))
def test_no_node_is_lost_and_no_skip_is_longer_than_ten_seconds(events: list[tuple[str, str, float]]) -> None:
    pool, now = NodePool(list("abcd")), 0.0
    for node, event, passed in events:
        now += passed
        if event == "down":
            pool.unreachable(node, now)
            assert not pool.health(now)[node]
        elif event == "up":
            pool.reached(node)
            assert pool.health(now)[node]
        else:
            healthy = {name for name, up in pool.health(now).items() if up}
            picked = [pool.pick(now) for _ in range(len(healthy) or 1)]
            assert set(picked) == (healthy or {None})  # a full turn, and each of them once
            assert pool.pick(now, healthy) is None
        assert 1 <= pool.retry_after(now) <= 10
    assert all(pool.health(now + 10).values())


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


def test_max_completion_tokens_is_lowered_where_it_is_given() -> None:
    assert (
        json.loads(Completion(b'{"prompt": "x", "max_completion_tokens": 9}').for_prefill())["max_completion_tokens"]
        == 1
    )
    assert "max_completion_tokens" not in json.loads(Completion(b'{"prompt": "x"}').for_prefill())


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


def test_a_client_cannot_say_where_the_cache_lies() -> None:
    body = b'{"prompt": "x", "kv_transfer_params": {"remote_host": "evil"}}'
    assert Completion(body).for_decode(None) == b'{"prompt":"x"}'


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
    assert not Handoff()
