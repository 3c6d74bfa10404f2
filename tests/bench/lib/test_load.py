"""The load generator, against servers that misbehave in every known way, and the prompts that it makes."""

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib.arrivals import Arrival, Part, from_trace, ideal_hit_rate, prompt_ids, synthetic
from bench.lib.load import Destination, RequestOutcome, generate, summarize
from bench.lib.trace import SimulatedLru, hit_rate
from tests.support.proxy import Node, answers, hangs, stream
from tests.support.traces import conversations

TOKEN = b'data: {"choices": [{"text": "x", "token_ids": [5]}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
DONE = b"data: [DONE]\n\n"


def load_on(node, count=1, *, late=0.0, **changes):
    """What the generator sees of a server; the load began `late` seconds ago."""

    async def run():
        async with node:
            target = Destination(node.url, "m", 100, deadline_s=60 + late)._replace(**changes)
            arrivals = [Arrival(0.0, (Part(1, 8),), 2)] * count
            return await generate(target, arrivals, time.monotonic() - late)

    return asyncio.run(asyncio.wait_for(run(), 120))


def says(*parts):
    """A server that streams just this."""
    return lambda request: stream(request, [*parts])


well = says(TOKEN, TOKEN[:9], TOKEN[9:], USAGE, DONE)


def test_requests_are_sent_while_others_wait():
    came, all_are_there = 0, asyncio.Event()

    async def when_five_are_there(request):
        nonlocal came
        came += 1
        if came == 5:
            all_are_there.set()
        await all_are_there.wait()
        return await well(request)

    outcomes = load_on(Node(when_five_are_there), 5)
    assert [(one.tokens, one.cached, one.error) for one in outcomes] == [(2, 4, "")] * 5


def test_times_count_from_when_a_request_was_due():
    (one,) = load_on(Node(well), late=5)
    assert 5 <= one.sent <= one.first <= one.last


@pytest.mark.parametrize(
    "handler, kind",
    [
        (answers(503), "http 503"),
        (hangs, "deadline"),
        (well, "no connection"),
        (says(TOKEN), "stream cut off"),
        (says(TOKEN, b'data: {"error": {"message": "no"}}\n\n'), "error in the stream"),
        (says(b"data: {nonsense\n\n"), "broken answer: DecodeError"),
        (says(DONE), "no tokens"),
    ],
)
def test_errors_are_told_apart(handler, kind):
    changes = {"deadline": {"deadline_s": 0.5}, "no connection": {"url": "http://127.0.0.1:1"}}  # fmt: skip
    outcomes = load_on(Node(handler), 2, **changes.get(kind, {}))
    assert [one.error for one in outcomes] == [kind, kind]
    assert summarize(outcomes)["errors"] == {kind: 2}
    assert summarize(outcomes)["answered"] == 0


@pytest.mark.parametrize("prefill, cached", [({"cached_tokens": 3}, 3), (None, 7)])
def test_what_the_prefill_node_found_counts_where_there_was_one(prefill, cached):
    event = {"choices": [], "pd_cache": {"self": {"cached_tokens": 7}, "prefill": prefill}}
    outcomes = load_on(Node(says(TOKEN, USAGE, b"data: " + json.dumps(event).encode() + b"\n\n", DONE)))
    assert summarize(outcomes)["hit_rate"] == cached / 8


def test_each_request_of_a_salted_load_is_isolated_and_otherwise_none_is():
    load_on(salted := Node(well), 3, salted="x")
    assert len({body["cache_salt"] for body in salted.bodies}) == 3
    load_on(plain := Node(well), 3)
    assert plain.bodies[0] == plain.bodies[1] == plain.bodies[2]
    assert "cache_salt" not in plain.bodies[0]


# --- arrivals and prompts -----------------------------------------------------------------------------------


@given(st.floats(1, 600), st.integers(2, 3000))
def test_prompts_of_a_trace_share_tokens_exactly_where_they_share_blocks(scale, longest):
    requests = conversations(2, 3)
    arrivals = from_trace(requests, [0.0] * len(requests), scale, longest)
    first, other, longer = (prompt_ids(arrivals[index].prompt, 50_000) for index in (0, 1, 2))
    assert first[:1] != other[:1]
    assert longer[: len(first)] == first
    for arrival in arrivals:
        assert arrival.output >= 1
        assert arrival.prompt_tokens >= 1
        assert arrival.prompt_tokens + arrival.output <= longest


def test_synthetic_prompts_share_their_beginning_and_the_ideal_is_what_came_before():
    arrivals = synthetic([0.0] * 40, tokens=100, shared=0.6, prefixes=3, output=4)
    prompts = [prompt_ids(arrival.prompt, 50_000) for arrival in arrivals]
    assert all(len(prompt) == 100 for prompt in prompts)
    assert len({tuple(prompt[:60]) for prompt in prompts}) == 3
    assert len({tuple(prompt[60:]) for prompt in prompts}) == 40
    assert ideal_hit_rate(arrivals) == pytest.approx(0.6 * 37 / 40)
    requests = conversations(3, 3)
    assert ideal_hit_rate(from_trace(requests, [0.0] * 9, 16, 10_000)) == hit_rate(requests, SimulatedLru())


# --- figures ------------------------------------------------------------------------------------------------


def test_figures_are_those_of_what_was_answered():
    outcomes = [
        RequestOutcome(
            due=float(due), prompt_tokens=10, first=0.1 * (due + 1), last=1.0, tokens=5, cached=due
        )
        for due in range(4)
    ]
    lost = RequestOutcome(due=4.0, prompt_tokens=10, first=9.0, last=9.0, tokens=3, error="stream cut off")
    summary = summarize([*outcomes, lost])
    figures = {
        "requests": 5,
        "answered": 4,
        "seconds": 4.0,
        "output_tokens_per_s": 5.0,
        "hit_rate": (0 + 1 + 2 + 3) / 40,
    }
    times = {"ttft_p50_ms": 200, "ttft_p99_ms": 400}
    assert summary == summary | figures
    assert {name: summary[name] for name in times} == pytest.approx(times)


def test_a_load_that_nobody_answered_has_figures_too():
    summary = summarize([RequestOutcome(due=0.0, prompt_tokens=1, error="deadline")])
    assert (summary["answered"], summary["output_tokens_per_s"]) == (0, 0)
    assert summary["hit_rate"] is summary["ttft_p50_ms"] is None
    json.dumps(summary, allow_nan=False)
