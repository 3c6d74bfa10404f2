"""A request's way over nodes of which some fail, as `proxy_ways.json` holds it: which are asked, what the
client gets, who is blamed.

`python -m tests.golden.test_proxy_ways` writes the file anew.
"""

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from tests.support.pool import free_port
from tests.support.proxy import (
    EVENTS,
    PARAMS,
    answers,
    cluster,
    decodes,
    dies_after_headers,
    disconnects,
    hangs,
    jump,
    prefills,
    says,
    scenario,
    speaks_no_http,
    until,
)

GOLDEN = Path(__file__).with_name("proxy_ways.json")
GONE = "gone"
_FAILS = {
    "refuses": answers(400, {"error": {"message": "no"}}),
    "fails": answers(500, {"error": {"message": "boom"}}),
    "is full": answers(503, {"error": {"message": "full"}}, Retry_After="7"),
    "redirects": answers(302, None, Location="http://127.0.0.1:1/"),
    "dies": disconnects,
    "dies after its headers": dies_after_headers,
    "speaks no HTTP": speaks_no_http,
    "hangs": hangs,
}
PREFILL = {
    "answers": prefills,
    **_FAILS,
    "answers no JSON": says(b"<html>"),
    "answers half an object": says(b'{"kv_transfer_params": {"a"'),
    "answers without end": says(b" " * (5 << 20)),
    "stores nothing": answers(200, {"choices": []}),
}
DECODE = {"answers": decodes, **_FAILS}


def ways():
    """Returns what the prefill nodes and the decode nodes do, in each case."""
    found = []
    kinds = [*PREFILL, GONE]
    found += [((first, second), ("answers",)) for first in kinds for second in ("answers", first)]
    found += [
        (("answers",), pair) for pair in itertools.product((*DECODE, GONE), repeat=2) if pair[0] != "hangs"
    ]
    found += [((), (kind,) * 3) for kind in (*DECODE, GONE)]
    found += [(("dies", "dies"), ("dies", "answers")), (("dies",), ("dies", "answers")), ((), ())]
    return found


def named(way):
    return f"{', '.join(way[0]) or 'none'} | {', '.join(way[1]) or 'none'}"


async def walk(prefill, decode):
    """Sends one request, and the same as a stream, to nodes that do this, in this order."""
    whole, streamed = await _walk(prefill, decode, stream=False), await _walk(prefill, decode, stream=True)
    assert whole == streamed
    return whole


async def _walk(prefill, decode, *, stream):
    urls = [
        [f"http://127.0.0.1:{free_port()}" if kind == GONE else "" for kind in kinds]
        for kinds in (prefill, decode)
    ]
    timeouts = {"request_timeout_s": 20, "prefill_timeout_s": 1.0 if "hangs" in prefill else 60.0}
    async with cluster(*urls, failures=1, long_skips=True, **timeouts) as c:
        for nodes, kinds, behaviours in ((c.prefill, prefill, PREFILL), (c.decode, decode, DECODE)):
            for node, kind in zip(nodes, (kind for kind in kinds if kind != GONE), strict=True):
                node.default = behaviours[kind]
        body = {"model": "tiny", "prompt": "a prompt", "max_tokens": 3, "stream": stream}
        asking = asyncio.ensure_future(c.post(body).__aenter__())
        hanging = [node for node in c.decode if node.default is hangs]
        await until(lambda: asking.done() or any(node.bodies for node in hanging), "it is answered, or hangs")
        if not asking.done():
            jump(20)  # to the request's deadline
        async with await asking as response:
            status, text = response.status, await response.text()
        health = await c.told("/health")
        sent = [received for node in c.decode for received in node.bodies]
        assert all(received["prompt"] == body["prompt"] for received in sent), "no prompt is lost"
        return {
            "status": status,
            "says": _said(text),
            "prefill asked": [len(node.bodies) for node in c.prefill],
            "decode asked": [len(node.bodies) for node in c.decode],
            "handed over": [received.get("kv_transfer_params") == PARAMS for received in sent],
            "up": [list(health[hop].values()) for hop in ("prefill", "decode")],
        }


def _said(text):
    if text in ("".join(event.decode() for event in EVENTS), '{"id": "d", "choices": [{"text": "hello"}]}'):
        return "an answer"
    error = json.loads(text)["error"]
    return str(error.get("code") or error["message"])


@pytest.mark.parametrize("way", ways(), ids=named)
@scenario
async def test_a_requests_way_is_that_of_the_golden_file(way):
    assert await walk(*way) == json.loads(GOLDEN.read_text())[named(way)]


if __name__ == "__main__":
    found = {named(way): asyncio.run(walk(*way)) for way in ways()}
    lines = [f"{json.dumps(way)}: {json.dumps(found[way], sort_keys=True)}" for way in sorted(found)]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
