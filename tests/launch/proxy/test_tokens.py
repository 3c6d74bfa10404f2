"""Text prompts whose tokens a decode node returned: which nodes get the tokens in place of the text, and the memory that they take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from aiohttp import web

from launch.proxy.bodies import Completion
from tests.launch.proxy.test_direct import Lookups, rule
from tests.support.proxy import (
    NAMESPACE,
    PARAMS,
    Behaviour,
    Cluster,
    Node,
    answers,
    cluster,
    disconnects,
    hangs,
    prefills,
    scenario,
    until,
    view,
)
from transfer.settings import ByteSize

TEXT = "It was a dark and stormy night. " * 200
OTHER = msgspec.structs.replace(NAMESPACE, model="tiny@2")
MIB = 1 << 20


def ids(text: str) -> list[int]:
    return list(text.encode())


async def tokenizes(request: web.Request) -> web.StreamResponse:
    return web.json_response({"tokens": ids((await request.json())["prompt"])})


async def completes(request: web.Request) -> web.StreamResponse:
    """Answers as an engine would, which computes on tokens."""
    prompt = (await request.json())["prompt"]
    tokens = ids(prompt) if isinstance(prompt, str) else prompt
    return web.json_response({"choices": [{"text": str(sum(tokens))}], "usage": {"prompt_tokens": len(tokens)}})


def refuses_tokens(then: Behaviour) -> Behaviour:
    async def behaviour(request: web.Request) -> web.StreamResponse:
        is_text = isinstance((await request.json())["prompt"], str)
        return await (then if is_text else answers(400, {"error": "token id 7 is out of vocabulary"}))(request)

    return behaviour


def begin(c: Cluster, *others: Node) -> None:
    """Lets every node return tokens and say that it has our namespace; `others` have another one."""
    for node in c.decode:
        node.tokenize, node.default = tokenizes, completes
    c.proxy.update(view([node.url for node in c.prefill], [node.url for node in c.decode], described(c, others)))


def described(c: Cluster, others: tuple[Node, ...] = ()) -> dict[str, dict[str, Any]]:
    return {node.url: (OTHER if node in others else NAMESPACE).described() for node in (*c.prefill, *c.decode)}


def prompts(*nodes: Node) -> list[Any]:
    return [body["prompt"] for node in nodes for body in node.bodies]


@scenario
async def test_both_hops_get_the_tokens_and_the_answer_is_that_to_the_text() -> None:
    async with cluster() as c:
        begin(c)
        async with c.post({"prompt": TEXT, "seed": 3}) as response:
            expected = await response.json()
    async with cluster(direct=rule(Lookups(0))) as c:
        begin(c)
        async with c.post({"prompt": TEXT, "seed": 3}) as response:
            assert (response.status, await response.json()) == (200, expected)
        assert prompts(*c.prefill, *c.decode) == [ids(TEXT)] * 2
        handed_over = {"seed": 3, "kv_transfer_params": PARAMS}
        assert {name: c.decode[0].bodies[0][name] for name in handed_over} == handed_over
        assert c.prefill[0].bodies[0]["max_tokens"] == 1
        assert c.proxy.requests.bodies.used == 0


T, IDS = TEXT, ids(TEXT)


@pytest.mark.parametrize(
    ("prefill", "decode", "found", "others", "expected"),
    [
        (1, 1, 1 << 20, (), [[], [IDS, IDS]]),  # no prefill node is needed
        (2, 1, 0, (1,), [[IDS], [T], [IDS, IDS]]),  # that prefill node has another namespace
        (1, 2, 0, (), [[T, T], [T], [T]]),  # what one decode node returns must not spoil prompts that another answers
        (1, 1, 0, None, [[T, T], [T, T]]),  # no node says its namespace
    ],
    ids=["direct", "another namespace", "two decode nodes", "no namespace"],
)
@scenario
async def test_nodes_get_tokens_only_where_these_are_certainly_theirs(
    prefill: int, decode: int, found: int, others: tuple[int, ...] | None, expected: list[list[Any]]
) -> None:
    """Sends two requests. `others`: prefill nodes of another namespace; None if no node says its own."""
    async with cluster(prefill, decode, direct=rule(Lookups(found))) as c:
        if others is None:
            c.decode[0].tokenize = tokenizes
        else:
            begin(c, *(c.prefill[number] for number in others))
        for _ in range(2):
            async with c.post({"prompt": TEXT}) as response:
                assert response.status == 200
        assert [prompts(node) for node in (*c.prefill, *c.decode)] == expected
        assert c.proxy.requests.bodies.used == 0


@scenario
async def test_a_decode_node_that_joins_meanwhile_gets_no_tokens_of_another() -> None:
    """Nodes of one namespace have the same weights, and not necessarily the same tokenizer."""
    async with cluster(1, 2, direct=rule(Lookups(0))) as c:

        async def joins(request: web.Request) -> web.StreamResponse:
            begin(c)
            return await completes(request)

        begin(c)
        c.prefill[0].default = joins
        c.decode[0].script = [answers(500)]
        c.proxy.update(view([c.prefill[0].url], [c.decode[0].url], described(c)))
        async with c.post({"prompt": TEXT}) as response:
            assert response.status == 200
        assert [prompts(node) for node in (*c.prefill, *c.decode)] == [[ids(TEXT)], [ids(TEXT)], [TEXT]]


@scenario
async def test_a_namespace_that_only_health_reports_counts_and_a_node_that_comes_back_with_another_gets_the_text() -> (
    None
):
    async with cluster(direct=rule(Lookups(0)), health_interval_s=0.02) as c:
        c.decode[0].tokenize, node = tokenizes, c.decode[0]

        async def told(fingerprint: str) -> None:
            await until(lambda: c.proxy._pools.fingerprint(node.url) == fingerprint, "it is known")

        for one in (*c.prefill, *c.decode):
            one.health = answers(200, NAMESPACE.described())
        await told(NAMESPACE.fingerprint())
        await until(lambda: c.proxy._pools.fingerprint(c.prefill[0].url) is not None, "that of the other, too")

        async def starts_anew(request: web.Request) -> web.StreamResponse:
            node.health = answers(200, OTHER.described())
            await told(OTHER.fingerprint())
            return await prefills(request)

        for behaviour in (prefills, starts_anew):
            c.prefill[0].script.append(behaviour)
            async with c.post({"prompt": TEXT}) as response:
                assert response.status == 200
        assert prompts(*c.prefill, *c.decode) == [ids(TEXT), ids(TEXT), ids(TEXT), TEXT]


NEEDS_TEXT = [
    {"echo": True},
    {"suffix": "The end."},
    {"prompt_logprobs": 1},
    {"add_special_tokens": False},
    {"truncate_prompt_tokens": 100},
    {"truncation_side": "left"},
    {"vllm_xargs": {"a": 1}},
    {"of_a_later_version": 0},
    {"prompt": [TEXT]},
]


@pytest.mark.parametrize("more", NEEDS_TEXT, ids=lambda more: next(iter(more)))
@scenario
async def test_a_request_that_may_need_its_text_goes_as_it_is(more: dict[str, Any]) -> None:
    async with cluster(direct=rule(Lookups(0))) as c:
        begin(c)
        c.decode[0].tokenize, c.decode[0].default = answers(200, {"tokens": [7] * 1000}), answers(200, {})
        async with c.post({"prompt": TEXT, **more}) as response:
            assert response.status == 200
        assert prompts(*c.prefill, *c.decode) == [more.get("prompt", TEXT)] * 2


def test_only_one_text_takes_tokens_whatever_is_left_at_its_default() -> None:
    neutral = {"echo": False, "suffix": None, "logprobs": 5, "return_token_ids": True, "cache_salt": "a", "stop": ["x"]}
    for prompt, takes in (("x", True), ([7], False), (["x"], False), (["x", "y"], False)):
        assert Completion(json.dumps({"prompt": prompt, **neutral}).encode()).takes_tokens() == takes
    chat = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    assert not Completion(json.dumps(chat).encode(), prompt="messages").takes_tokens()


@scenario
async def test_a_refusal_of_tokens_is_not_the_clients_which_wrote_a_text() -> None:
    async with cluster(direct=rule(Lookups(0))) as c:
        begin(c)
        c.prefill[0].default, c.decode[0].default = refuses_tokens(prefills), refuses_tokens(completes)
        async with c.post({"prompt": TEXT}) as response:
            assert response.status == 200
        assert prompts(*c.prefill, *c.decode) == [ids(TEXT), TEXT] * 2
        c.prefill[0].default = refuses_tokens(answers(400, {"error": "the text is too long"}))
        async with c.post({"prompt": TEXT}) as response:
            assert (response.status, await response.json()) == (400, {"error": "the text is too long"})
        assert c.proxy.requests.bodies.used == 0


@scenario
async def test_retries_go_on_with_what_each_node_may_get() -> None:
    async with cluster(2, 1, direct=rule(Lookups(0))) as c:
        begin(c, c.prefill[1])
        c.prefill[0].script = [disconnects]
        async with c.post({"prompt": TEXT}) as response:
            assert response.status == 200
        assert [prompts(node) for node in (*c.prefill, *c.decode)] == [[ids(TEXT)], [TEXT], [ids(TEXT)]]
        assert c.proxy.requests.bodies.used == 0


# --- memory ----------------------------------------------------------------------------------------------------------


@scenario
async def test_tokens_are_charged_to_the_client_until_the_decode_node_answers() -> None:
    async with cluster(direct=rule(Lookups(0))) as c:
        begin(c)
        go = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            await go.wait()
            return await completes(request)

        body = json.dumps({"prompt": TEXT}).encode()
        tokens = json.dumps(ids(TEXT)).encode()
        c.decode[0].default = waits
        asking = asyncio.ensure_future(c.post(data=body).__aenter__())
        await until(lambda: c.decode[0].bodies != [], "the decode node has it")
        assert c.proxy.requests.bodies.used > 2 * len(body) + 2 * len(tokens)
        go.set()
        async with await asking as response:
            assert response.status == 200
        assert c.proxy.requests.bodies.used == 0


@scenario
async def test_without_room_for_the_tokens_nodes_get_the_text() -> None:
    client, tokens = Lookups(0), [123456789] * 1_250_000  # 13 MiB of JSON
    async with cluster(direct=rule(client), body_memory=ByteSize(48 * MIB)) as c:
        begin(c)
        assert c.proxy.requests.bodies.take(20 * MIB, large=True)
        c.decode[0].tokenize = answers(200, {"tokens": tokens})
        async with c.post({"prompt": "x" * 8000}) as response:
            assert response.status == 200
        assert client.asked == [], "so many tokens are not looked up"
        assert prompts(*c.prefill, *c.decode) == ["x" * 8000] * 2
        assert c.proxy.requests.bodies.used == 20 * MIB


@pytest.mark.parametrize("hop", ["prefill", "decode"])
@scenario
async def test_the_memory_for_tokens_is_given_back_when_the_client_goes_away(hop: str) -> None:
    async with cluster(direct=rule(Lookups(0))) as c:
        begin(c)
        node = getattr(c, hop)[0]
        node.default = hangs
        asking = asyncio.ensure_future(c.post({"prompt": TEXT}).__aenter__())
        await until(lambda: node.bodies != [], "the node has it")
        assert c.proxy.requests.bodies.used > len(TEXT) * 2
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: c.proxy.requests.bodies.used == 0, "the memory was given back")


@scenario
async def test_tokens_that_came_before_a_lookup_that_was_too_slow_are_used_and_charged_once() -> None:
    client = Lookups(0)
    client.gate.clear()
    async with cluster(direct=rule(client, timeout_s=1)) as c:
        begin(c)
        async with c.post({"prompt": TEXT}) as response:
            assert response.status == 200
        assert prompts(*c.prefill, *c.decode) == [ids(TEXT)] * 2
        assert c.proxy.requests.bodies.used == 0
        client.gate.set()
