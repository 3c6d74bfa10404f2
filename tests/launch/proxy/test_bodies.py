"""Bodies of requests: what nodes are sent of them, and the memory that they take."""

import asyncio
import codecs
import gc
import io
import json
import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.openai import ApiError
from launch.proxy.bodies import SAMPLING, BodyMemory, BodyShare, Completion, HandedOver, read_handoff
from tests.support.proxy import (
    Node,
    answers,
    both_faces,
    cluster,
    decode_at,
    error_of,
    proxy_process,
    scenario,
    until,
)
from transfer.settings import ByteSize

MIB = 1 << 20

# --- what nodes are sent ------------------------------------------------------------------------------------


def test_hops_that_need_a_prompts_kv_ask_for_one_token_of_one_sequence_and_nothing_else():
    body = {"model": "m", "prompt": [1, 2], "priority": 3}
    sampling = dict.fromkeys(sorted(SAMPLING), 64)
    asked = {**body, **sampling, "max_tokens": 99, "stream": True}
    completion = Completion(json.dumps({**asked, "kv_transfer_params": {"remote_host": "evil"}}).encode())
    one_token = {**body, "max_tokens": 1, "temperature": 0, "stream": False}
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    assert json.loads(completion.for_prefill()) == {**one_token, "kv_transfer_params": remote}
    streamed = json.loads(completion.for_stream())
    assert streamed.pop("kv_transfer_params")["pd_cache"]["stream"] is True
    assert streamed == one_token
    assert json.loads(completion.for_load()) == {**one_token, "kv_transfer_params": None}
    assert json.loads(completion.for_decode(None)) == asked
    for prompt in ("prompt", "messages"):
        formatted = json.dumps({prompt: [], "response_format": {"type": "json_object"}}).encode()
        hop = json.loads(Completion(formatted, chat=prompt == "messages").for_prefill())
        assert ("response_format" in hop) == (prompt == "messages"), "chat templates get it"


def test_what_is_handed_over_keeps_its_bytes_and_of_a_field_that_stands_twice_every_hop_sees_the_last():
    params = '{"x" : 1.50, "n": 123456789012345678901234567890, "x": "\\u00e9", "deep": [{"a": null}]}'
    handoff = read_handoff(f'{{"id": "p", "kv_transfer_params": {params}, "choices": []}}'.encode())
    body = Completion(b'{"prompt": "a", "prompt": "x", "temperature": 0.70}').for_decode(handoff)
    assert body == f'{{"prompt":"x","temperature":0.70,"kv_transfer_params":{params}}}'.encode()


def test_what_vllm_reads_as_a_number_passes_and_so_does_a_byte_order_mark():
    body = b'{"prompt":"x","max_tokens":"5","max_completion_tokens":5.0}'
    assert Completion(codecs.BOM_UTF8 + body).for_decode(None) == body


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(fields=st.dictionaries(st.text(max_size=8), json_values, max_size=6), params=json_values)
def test_the_decode_node_is_sent_what_the_client_sent(fields, params):
    fields = {**fields, "prompt": [1, 2, 3], "max_tokens": 5}
    fields.pop("max_completion_tokens", None)
    fields.pop("kv_transfer_params", None)
    completion = Completion(json.dumps(fields).encode())
    assert json.loads(completion.for_decode(None)) == fields
    handoff = read_handoff(json.dumps({"kv_transfer_params": params}).encode())
    expected = fields if params is None else {**fields, "kv_transfer_params": params}
    assert json.loads(completion.for_decode(handoff)) == expected
    assert not HandedOver()


PART = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}%s}'


@pytest.mark.parametrize(
    "part",
    [
        PART % ', "uuid": "cat"',
        PART % r', "\u0075uid": "cat"',
        PART.replace("image_url", "text", 1) % ', "uuid": 5',
        PART % "",
    ],
)
def test_nodes_learn_that_an_image_has_only_the_name_that_they_give_it(part):
    bare = json.loads(part)
    bare.pop("uuid", None)
    chat = '{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": ["b", %s], "x": 1.50}]}'
    completion = Completion((chat % part).encode(), chat=True)
    for body, params in (
        (completion.for_prefill(), {"do_remote_decode": True, "do_remote_prefill": False}),
        (completion.for_decode(None), {}),
        (completion.for_load(), {}),
    ):
        sent = json.loads(body)
        assert sent["messages"] == json.loads(chat % json.dumps(bare))["messages"]
        assert sent["kv_transfer_params"] == {**params, "media_hashed": True}
    assert json.loads(completion.for_stream())["kv_transfer_params"]["media_hashed"] is True
    assert b"1.50" in completion.for_decode(None)
    assert not completion.plain()


@pytest.mark.parametrize(
    "content", ['"a"', "null", "[]", '["a", {"type": "text", "text": "uuid"}]', "5", "[5]", '{"uuid": 1}']
)
def test_what_has_no_images_is_sent_as_it_came(content):
    body = f'{{"messages":[{{"role":"user","content":{content}}}]}}'
    assert Completion(body.encode(), chat=True).for_decode(None) == body.encode()


def test_a_chat_may_name_images_in_messages_of_a_thousand_parts():
    content = (PART % ', "uuid": 1', *[PART % ""] * 999)
    for parts in (content, (*content, '"a"')):
        named, other = (f'{{"role": "user", "content": [{text}]}}' for text in (", ".join(parts), PART % ""))
        with nullcontext() if parts is content else pytest.raises(ApiError, match="more than 1000 parts"):
            Completion(f'{{"messages": [{named}, {other}]}}'.encode(), chat=True)


def fields(count):
    return b",".join(b'"%x":1' % number for number in range(count))


@pytest.mark.parametrize(
    "body, param",
    [
        *((body, None) for body in (b"", b"not json", b"[1, 2]", b"null", b'"prompt"', b'{"prompt": "x"', b'{"prompt": NaN}')),
        *((body, None) for body in (b'{"prompt": "\xff"}', b'{"\xff": 1, "prompt": "x"}', '{"prompt": "x"}'.encode("utf-16"))),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", None),
        (b"{}", "prompt"),
        (b'{"prompt": null}', "prompt"),
        *((b'{"prompt": "x", "max_tokens": %b}' % count, "max_tokens") for count in (b"-1", b'"-1"', b'"x"', b"1.5", b"true")),
        (b'{"prompt": "x", "max_completion_tokens": -3}', "max_completion_tokens"),
        (b'{"prompt": "x", ' + fields(1000) + b"}", None),
        (b'{"prompt": [' + b'{"a":1},' * 60_000 + b"{}], " + fields(1000) + b"}", None),
        (b'{"prompt": "x", ' + fields(60_000) + b"}", None),
    ],
)  # fmt: skip
def test_a_request_that_no_node_could_serve_is_a_400(body, param):
    with pytest.raises(ApiError) as caught:
        Completion(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert (caught.value.code == "too_many_fields") == (fields(1000) in body)
    error = json.loads(caught.value.body())["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", ' + fields(999) + b"}",
        b'{"prompt": [' + b'{"a":1},' * 60_000 + b"{}]}",
        b'{"prompt": "' + b":" * 60_000 + b'", "tools": [{' + fields(60_000) + b"}]}",
    ],
)
def test_a_body_may_have_a_thousand_fields_of_whatever_content(body):
    Completion(body)


# --- memory -------------------------------------------------------------------------------------------------


def test_large_bodies_leave_a_quarter_of_the_memory_to_small_ones():
    memory = BodyMemory(64 * MIB)
    large, small = BodyShare(memory), BodyShare(memory)
    assert large.grow(24 * MIB)
    assert not large.grow(1)
    assert all(BodyShare(memory).grow(1 << 18) for _ in range(31))
    assert small.grow(1 << 18)
    assert not small.grow(1)
    large.close()
    assert large.grow(1 << 20)


@both_faces
@scenario
async def test_a_body_without_room_is_refused_and_a_small_one_still_served():
    def body(mib):
        return io.BytesIO(b'{"prompt": "' + b"x" * (mib * MIB + 1) + b'"}')

    async with cluster(0, 1, body_memory=ByteSize(48 * MIB)) as c:
        async with c.stuck_at(c.decode[0], data=body(15)):
            async with c.post(data=body(4)) as response:
                assert (response.status, (await error_of(response))["code"]) == (503, "overloaded")
            await c.ask(data=body(0))
        await until(lambda: c.proxy.hops.bodies.used == 0, "the memory was given back")
        await c.ask(data=body(15))


@both_faces
@scenario
async def test_the_body_of_a_failed_request_is_freed_without_the_garbage_collector():
    async with cluster(0, 1) as c:
        await c.decode[0].stop()
        body = b'{"prompt": "' + b"x" * 8 * MIB + b'"}'
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            await c.ask(data=io.BytesIO(body), status=503)
            await until(lambda: tracemalloc.get_traced_memory()[0] < MIB, "the memory was given back")
        finally:
            tracemalloc.stop()
            gc.enable()


BODIES = {
    "many keys": lambda size: b'{"prompt": "x", ' + fields(size // 11) + b"}",
    "a long text": lambda size: b'{"prompt": "' + b"x" * size + b'"}',
    "many token ids": lambda size: b'{"prompt": [' + b"7," * (size // 2) + b"7]}",
    "many messages": lambda size: b'{"prompt": [' + b"{}," * (size // 3) + b"{}]}",
    "many colons": lambda size: b'{"prompt": "' + b'\\":' * (size // 3) + b'"}',
}


class Discarding(Node):
    """Keeps and decodes no body, so that checks of its health are answered while gigabytes come, however slow
    the machine is."""

    async def handle(self, request):
        async for _ in request.content.iter_any():
            pass
        return await self.default(request)


@scenario
async def test_fourteen_large_bodies_at_once_are_served_or_refused_in_less_than_a_gigabyte(tmp_path):
    async with Discarding(answers(200, {})) as node, aiohttp.ClientSession() as session:
        with proxy_process(tmp_path, decode_at(node.url), direct_tokens=0) as (url, process):

            async def status(body):
                async with session.post(f"{url}/v1/completions", data=io.BytesIO(body)) as response:
                    return response.status

            for kind, make in BODIES.items():
                body = await asyncio.to_thread(make, 147 * MIB // 10)
                assert 13 * MIB < len(body) <= 16 * MIB
                statuses = await asyncio.gather(*(status(body) for _ in range(14)))
                answered = {400} if kind == "many keys" else {200}
                assert answered <= set(statuses) <= answered | {503}, (kind, statuses)
                assert await status(b'{"prompt": "x"}') == 200
                status_file = Path(f"/proc/{process.pid}/status").read_text()
                memory = dict(line.split(":") for line in status_file.splitlines())
                assert int(memory["VmHWM"].split()[0]) < 1 << 20, (kind, memory["VmHWM"])
            # no body stays until the garbage collector runs; those of one kind are 200 MiB
            assert int(memory["VmRSS"].split()[0]) < 512 << 10, memory["VmRSS"]
