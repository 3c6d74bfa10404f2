"""Prompts that a decode node loads while a prefill node computes them: which, at which node, and until
when."""

import asyncio
import json
import time

import pytest

from launch.proxy.routing.direct import DirectRule
from tests.support.proxy import (
    PARAMS,
    answers,
    both_faces,
    cluster,
    decodes,
    disconnects,
    hangs,
    prefills,
    scenario,
    until,
    waits_for,
)

PROMPT = list(range(100))
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "stream": True}
STREAM = {
    "do_remote_prefill": True,
    "pd_cache": {"prefix_tokens": 0, "namespace": "", "prefill": None, "stream": True},
}


def streaming(decode=1, tokens=50, streams=True):
    return cluster(1, decode, streams=streams, rule=DirectRule(stream_tokens=tokens))


def params_of(node):
    return [body.get("kv_transfer_params") for body in node.bodies]


@both_faces
@scenario
async def test_the_decode_node_gets_the_prompt_at_once_and_the_stream_ends_with_the_answers_first_byte():
    computed, answered = asyncio.Event(), asyncio.Event()
    async with streaming(decode=3) as running:
        running.prefill[0].default = waits_for(computed, prefills)
        node = running.decode[0]
        node.script = [hangs, waits_for(answered, decodes)]
        asking = asyncio.ensure_future(running.post(BODY, headers={"X-Request-Id": "mine"}).__aenter__())
        await until(lambda: len(node.bodies) == 1 and len(running.prefill[0].bodies) == 1, "both hops")
        early = node.bodies[0]
        assert (early["max_tokens"], early["stream"], early["prompt"]) == (1, False, PROMPT)
        assert early["kv_transfer_params"] == STREAM
        computed.set()
        await until(lambda: len(node.bodies) == 2, "the request itself, at the same node")
        assert node.bodies[1]["kv_transfer_params"] == PARAMS
        assert not node.hung_up, "it goes on until the request has taken over"
        answered.set()
        response = await asking
        await until(lambda: node.hung_up == 1, "the stream is cancelled")
        assert (await response.read()).endswith(b"[DONE]\n\n")
        assert [one["X-Request-Id"] for one in node.headers] == ["mine-stream", "mine"]
        assert not running.decode[1].bodies
        response.close()


@both_faces
@scenario
async def test_nodes_take_turns_as_ever_and_a_stream_counts_as_work():
    async with streaming(decode=2) as running:
        for node in running.decode:
            node.script = [hangs]
        for _ in range(2):
            await running.ask(BODY)
        assert [len(node.bodies) for node in running.decode] == [2, 2]
        await until(lambda: [node.hung_up for node in running.decode] == [1, 1], "both streams ended")
        assert not any(node.load for node in running.proxy._pools.pools["decode"].nodes.values())


@both_faces
@pytest.mark.parametrize(
    "tokens, streams", [(101, True), (None, True), (50, False)], ids=["too short", "never", "the node cannot"]
)
@scenario
async def test_nothing_is_sent_early(tokens, streams):
    async with streaming(tokens=tokens, streams=streams) as running:
        await running.ask(BODY)
        assert params_of(running.decode[0]) == [PARAMS]


@both_faces
@pytest.mark.parametrize("prefill", [disconnects, answers(500, {}), answers(200, {"id": "p"})])
@scenario
async def test_a_prompt_that_nobody_has_computed_is_answered_without_its_stream(prefill):
    async with streaming() as running:
        running.prefill[0].default = prefill
        running.decode[0].script = [hangs]
        assert (await running.ask(BODY)).endswith(b"[DONE]\n\n")
        assert params_of(running.decode[0]) == [STREAM, None]
        await until(lambda: running.decode[0].hung_up == 1, "the stream is cancelled")


@both_faces
@pytest.mark.parametrize("fails", [disconnects, answers(500, {}), answers(400, {}), decodes])
@scenario
async def test_a_stream_that_fails_or_is_answered_counts_for_nothing(fails):
    async with streaming() as running:
        for _ in range(6):
            running.decode[0].script = [fails]
            await running.ask(BODY)
        assert params_of(running.decode[0]) == [STREAM, PARAMS] * 6
        assert running.metric("hop_failures_total", hop="decode", reason="error") == 0


def gone(running, asking):
    asking.cancel()


def late(running, asking):
    running.proxy.requests.admission.closing = True
    for task in list(running.proxy.requests.running):
        task.cancel()


@both_faces
@pytest.mark.parametrize("end", [gone, late], ids=["its client", "the proxy"])
@scenario
async def test_a_stream_ends_with_its_request(end):
    async with streaming() as running:
        running.prefill[0].default = running.decode[0].default = hangs
        asking = asyncio.ensure_future(running.post(BODY).__aenter__())
        await until(lambda: bool(running.decode[0].bodies and running.prefill[0].bodies), "both hops")
        end(running, asking)
        await until(
            lambda: (running.prefill[0].hung_up, running.decode[0].hung_up) == (1, 1), "both cancelled"
        )
        await asyncio.gather(asking, return_exceptions=True)


@both_faces
@scenario
async def test_a_node_that_is_well_again_is_tried_with_the_request_and_not_with_its_stream():
    async with streaming() as running:
        pool = running.proxy._pools.pools["decode"]
        pool.node(running.decode[0].url).breaker.failed("unreachable", time.monotonic() - 2)
        running.decode[0].script = [hangs]
        await running.ask(BODY)
        assert pool.health(time.monotonic()) == {running.decode[0].url: True}


@both_faces
@scenario
async def test_streams_leave_half_of_the_memory_for_bodies_to_requests():
    async with streaming() as running:
        bodies = running.proxy.hops.bodies
        bodies.limit = 8 * len(json.dumps(BODY))
        running.decode[0].script = [hangs]
        await running.ask(BODY)
        bodies.limit = len(json.dumps(BODY)) * 5 // 2
        await running.ask(BODY)
        assert params_of(running.decode[0]) == [STREAM, PARAMS, PARAMS]
        await until(lambda: not bodies.used, "all of it given back")


@scenario
async def test_if_the_node_fails_the_request_itself_another_one_answers():
    async with streaming(decode=2) as running:
        running.decode[0].script = [hangs, disconnects]
        await running.ask(BODY)
        assert params_of(running.decode[1]) == [PARAMS]
        await until(lambda: running.decode[0].hung_up == 1, "the stream is cancelled")
