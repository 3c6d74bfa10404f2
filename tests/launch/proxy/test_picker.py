"""What only the picker does: Envoy asks it for decode nodes, and gateways may ask it nonsense."""

import asyncio
import json
import socket
import ssl
import struct
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import AsyncMock

import aiohttp
import grpc
import psutil
import pytest

from launch.proxy.gateway import envoy as gateway_module
from launch.proxy.gateway import picker
from launch.proxy.gateway.ext_proc import FULL_DUPLEX_STREAMED, ProcessingRequest, ProcessingResponse
from launch.proxy.gateway.picker import ENDPOINT
from tests.support import proxy as support
from tests.support.gateway import envoy, picker_at
from tests.support.pool import free_port
from tests.support.proxy import (
    EVENTS,
    PARAMS,
    STREAMED,
    Node,
    OneByOne,
    answers,
    cluster,
    decode_at,
    decodes,
    disconnects,
    error_of,
    jump,
    prefills,
    proxy_process,
    says,
    scenario,
    until,
    view,
    waits_for,
)

BODY = b'{"model": "tiny", "prompt": "Hi"}'


@pytest.fixture
def behind_envoy(gateway, monkeypatch):
    monkeypatch.setattr(support, "GATEWAY", gateway)


async def code_of(answer):
    """The code of an answer that Envoy makes itself."""
    error = (await answer.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]


# --- behind Envoy -------------------------------------------------------------------------------------------


@scenario
async def test_a_node_gets_what_the_picker_sends_whatever_headers_the_client_adds(behind_envoy):
    async with cluster(1, 2) as c:
        nobody = {
            ENDPOINT: "127.0.0.1:1",
            "X-Secret": "s",
            "Cookie": "c",
            "X-Request-Id": "mine",
            "X-Envoy-Upstream-Rq-Timeout-Ms": "0",
        }
        async with c.post({"prompt": "x" * 100_000}, headers=nobody) as response:
            assert response.headers["X-Request-Id"] == "mine"
            assert (await response.json())["id"] == "d"
        (body,), (headers,) = c.decode[0].bodies, c.decode[0].headers
        assert body == {"prompt": "x" * 100_000, "kv_transfer_params": PARAMS}
        assert headers[ENDPOINT] == c.decode[0].url.removeprefix("http://")
        assert headers["X-Request-Id"] == "mine"
        assert not {"X-Secret", "Cookie"} & set(headers)
        left_ms = int(headers["X-Envoy-Expected-Rq-Timeout-Ms"])
        assert 0 < left_ms < 300_000, "the answer has what is left of the request's deadline"


@scenario
async def test_what_envoy_refuses_itself_is_not_taken_for_a_dead_picker(behind_envoy):
    upgrade = {"Connection": "upgrade", "Upgrade": "websocket"}
    async with cluster(0, 1) as c, c.post(headers=upgrade) as response:
        assert (response.status, await code_of(response)) == (403, "invalid_request")


@scenario
async def test_a_load_balancer_checks_health_by_http_1_0_without_a_host(behind_envoy):
    async with cluster(0, 1) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()


@scenario
async def test_an_answer_that_has_begun_needs_no_picker(behind_envoy):
    async with cluster(0, 1) as c:
        c.decode[0].default = stream = OneByOne()
        async with c.post(STREAMED) as response:
            await until(lambda: not c.proxy.requests.running, "the picker is done with it")
            await c.proxy.close()
            await stream.read(response)
            assert await response.content.read() == b""
        async with c.post() as response, c.get("/health") as page:
            for answer in (response, page):
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert await code_of(answer) == "node_failed"


@scenario
async def test_a_gateway_that_sends_its_picker_the_answers_too_passes_them_on_whole_or_breaks_them_off(
    monkeypatch,
):
    like_istio = [("response_body_mode: NONE", "response_body_mode: FULL_DUPLEX_STREAMED")]
    like_istio.append(("response_trailer_mode: SKIP", "response_trailer_mode: SEND"))
    with tempfile.TemporaryDirectory(prefix="pdc-") as folder, envoy(Path(folder), like_istio) as running:
        monkeypatch.setattr(support, "GATEWAY", running)
        async with cluster(0, 1) as c:
            assert json.loads(await c.ask())["id"] == "d"
            async with c.post(headers={"Connection": "upgrade", "Upgrade": "websocket"}) as response:
                assert (response.status, await code_of(response)) == (403, "invalid_request")
            c.decode[0].default = stream = OneByOne()
            async with c.post() as response:
                await stream.read(response)
                assert await response.content.read() == b""
            c.decode[0].default = OneByOne()
            async with c.post() as response:
                await response.content.readexactly(len(EVENTS[0]))
                await c.proxy.close()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()


@asynccontextmanager
async def impatient_envoy(monkeypatch):
    """An Envoy that has half a second for a picker, and an hour for everything else."""
    monkeypatch.setattr(gateway_module, "_LATER_S", 0.0)
    waits = [(f"{name}_timeout: 0.5s", f"{name}_timeout: 3600s") for name in ("message", "stream_idle")]
    limits = {"request_timeout_s": 0.5, "prefill_timeout_s": 0.2}
    with tempfile.TemporaryDirectory(prefix="pdc-") as folder, envoy(Path(folder), waits, **limits) as it:
        yield it


@scenario
async def test_a_picker_that_hangs_hangs_no_request(monkeypatch):
    async with impatient_envoy(monkeypatch) as running, aiohttp.ClientSession(running.url) as session:
        with socket.socket(socket.AF_UNIX) as hung:
            hung.bind(f"{running.folder}/picker")
            hung.listen()
            async with session.post("/v1/completions", data=BODY) as response:
                assert (response.status, await code_of(response)) == (503, "node_failed")


@scenario
async def test_a_picker_that_hangs_when_the_node_answers_hangs_no_request(monkeypatch):
    monkeypatch.setattr(picker, "_answer", lambda *_: asyncio.Event().wait())
    async with impatient_envoy(monkeypatch) as running:
        monkeypatch.setattr(support, "GATEWAY", running)
        async with cluster(0, 1) as c, c.post() as response:
            assert (response.status, await code_of(response)) == (503, "node_failed")


@scenario
async def test_a_node_that_cannot_be_reached_costs_one_request_and_one_that_is_full_is_not_blamed(
    behind_envoy,
):
    async with cluster(0, 2, long_skips=True) as c:
        await c.decode[0].stop()
        for status in (503, 200, 200):
            async with c.post() as response:
                assert response.status == status
                if status == 503:
                    assert await code_of(response) == "node_failed"
                    assert (response.headers["Retry-After"], len(response.headers["X-Request-Id"])) == (
                        "1",
                        32,
                    )
        c.decode[1].script = [answers(503, {"full": 1})]
        assert json.loads(await c.ask(status=503)) == {"full": 1}
        await c.ask()
        assert c.metric("hop_failures_total", hop="decode", reason="unreachable") == 1
        assert c.metric("hop_failures_total", hop="decode", reason="busy") == 1


@scenario
async def test_a_node_whose_name_is_not_known_is_skipped(behind_envoy, monkeypatch):
    async with cluster(0, 2, long_skips=True) as c:
        addresses = {c.decode[0].url: "", c.decode[1].url: c.decode[1].url.removeprefix("http://")}
        monkeypatch.setattr(picker, "_address", AsyncMock(side_effect=addresses.get))
        for _ in range(3):
            await c.ask()
        assert c.metric("hop_failures_total", hop="decode", reason="unreachable") == 1


@scenario
async def test_a_node_with_fewer_answers_under_way_is_taken_whoever_asked_for_them(behind_envoy):
    async with cluster(0, 2, policy="least_loaded") as c:
        for node, running in zip(c.decode, (9, 2), strict=True):
            node.default = says(f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n")
        await c.proxy.check_nodes()
        for _ in range(3):
            await c.ask()
        assert [node.paths.count("/v1/completions") for node in c.decode] == [0, 3]


# --- Envoy that pd-cache starts -----------------------------------------------------------------------------


@scenario
async def test_envoy_shows_the_certificate_of_the_file_also_a_new_one_and_its_end_ends_the_proxy(
    certificates, tmp_path
):
    def give(name):
        for kind, source in zip(("cert", "key"), certificates[name], strict=True):
            (tmp_path / f"{kind}.pem").write_text(Path(source).read_text())
        return Path(certificates[name][0]).read_text().strip()

    async def shown():
        return (await asyncio.to_thread(ssl.get_server_certificate, address, timeout=60)).strip()

    expected = give("server")
    tls = {f"{kind}_file": str(tmp_path / f"{kind}.pem") for kind in ("cert", "key")}
    trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=certificates["ca"][0]))
    async with Node(decodes) as node, aiohttp.ClientSession(connector=trusting) as session:
        more = {"direct_tokens": 0, "gateway": "envoy", "tls": tls}
        with proxy_process(tmp_path, decode_at(node.url), **more) as (url, process):
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as response:
                assert (response.status, (await response.json())["id"]) == (200, "d")
            async with session.get(f"{url}/v1/models") as response:
                assert (await response.json())["data"] == [{"id": "tiny"}]
            assert await shown() in expected
            expected = give("client")
            while await shown() not in expected:
                await asyncio.sleep(0.1)
            (envoy,) = psutil.Process(process.pid).children()
            envoy.kill()
            assert await asyncio.to_thread(process.wait, 60) == 1


@scenario
async def test_an_answer_outlives_its_killed_picker_and_new_requests_are_refused_until_it_is_back(tmp_path):
    port, stream = free_port(), OneByOne()

    def behaves(request):
        return (stream if request.method == "POST" else decodes)(request)

    with (
        tempfile.TemporaryDirectory(prefix="pdc-") as folder,
        envoy(Path(folder), [picker_at(folder, "127.0.0.1", port)]) as gateway,
    ):
        async with Node(behaves) as node, aiohttp.ClientSession(gateway.url) as session:

            def picker():
                return proxy_process(tmp_path, decode_at(node.url), picker_port=port, direct_tokens=0)

            def post():
                return session.post("/v1/completions", json={"prompt": "x"})

            with picker() as (_, process):
                async with post() as answer:
                    process.kill()
                    await asyncio.to_thread(process.wait, 60)
                    async with post() as refused:
                        assert refused.status == 503
                    await stream.read(answer)
                    assert await answer.content.read() == b""
            with picker():
                async with post() as answer:
                    await stream.read(answer)


# --- what gateways may ask ----------------------------------------------------------------------------------


def head(path="/v1/completions", method="POST", mode=FULL_DUPLEX_STREAMED, subset=None, **more):
    pairs = {":path": path, ":method": method, **more}
    headers = [{"key": name, "raw_value": value.encode()} for name, value in pairs.items()]
    first = ProcessingRequest(
        request_headers={"headers": {"headers": headers}}, protocol_config={"request_body_mode": mode}
    )
    if subset is not None:
        values = {"list_value": {"values": [{"string_value": address} for address in subset]}}
        fields = {"fields": [{"key": f"{ENDPOINT}-subset", "value": values}]}
        first.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint").value.MergeFrom(
            type(first.attributes.add().value)(**fields)
        )
    return first


def piece(body, last=True):
    return ProcessingRequest(request_body={"body": body, "end_of_stream": last})


@asynccontextmanager
async def picking(folder, *nodes, **config):
    """A picker, and a function that opens a stream to it."""
    async with cluster(*nodes, **config) as c:
        address = f"unix:{folder}/picker"
        await c.proxy.pick_for_gateways(address)
        async with grpc.aio.insecure_channel(address) as channel:
            yield (
                c,
                channel.stream_stream(
                    "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                    request_serializer=ProcessingRequest.SerializeToString,
                    response_deserializer=ProcessingResponse.FromString,
                ),
            )
            await until(lambda: not c.proxy.requests.running, "nothing is left")
            assert not c.proxy.hops.bodies.used


async def asked(process, *messages):
    """The answer to these messages."""
    call = process()
    for message in messages:
        await call.write(message)
    answer = await call.read()
    call.cancel()
    return answer


def refusal(answer):
    return answer.immediate_response.status.code, json.loads(answer.immediate_response.body)["error"]["code"]


@scenario
async def test_what_is_no_completion_is_refused(tmp_path):
    nested = head(**{"content-encoding": "gzip"})
    ended = head()
    ended.request_headers.end_of_stream = True
    large = [piece(b" " * (1 << 20), last=False)] * 17
    async with picking(tmp_path, 0, 1) as (c, process):
        for messages, status, code in (
            ([head("/v1/nothing")], 404, "not_found"),
            ([head(method="GET")], 404, "not_found"),
            ([head(mode=2)], 500, None),
            ([nested], 415, "unsupported_media_type"),
            ([ended], 400, "invalid_json"),
            ([head(), piece(b'{"prompt": ')], 400, "invalid_json"),
            ([head(), *large], 413, "request_too_large"),
        ):
            assert refusal(await asked(process, *messages)) == (status, code)
        call = process()
        await call.write(piece(b""))
        with pytest.raises(grpc.aio.AioRpcError, match="begins with a request's headers"):
            await call.read()
        assert c.decode[0].bodies == []
        await asked(process, head(), piece(BODY[:9], last=False), piece(BODY[9:]))


@scenario
async def test_a_stream_that_stops_is_refused_at_its_deadline_and_one_that_ends_is_forgotten(tmp_path):
    async with picking(tmp_path, 0, 1, request_timeout_s=20, max_requests=2) as (c, process):
        half = [head(), piece(BODY[:9], last=False)]
        gone = process()
        for message in half:
            await gone.write(message)
        await until(lambda: c.proxy.hops.bodies.used > 0, "half of a body has come")
        gone.cancel()
        await until(lambda: c.metric("requests_total", status="499") == 1, "forgotten")
        empty, stopped = process(), process()
        for message in half:
            await stopped.write(message)
        await empty.write(head())
        await until(lambda: c.proxy.requests.admission.running() == 2, "both have a place")
        assert refusal(await asked(process, head())) == (503, "overloaded")
        jump(20)
        for call in (stopped, empty):
            assert refusal(await call.read()) == (408, "timeout")
            call.cancel()


@scenario
async def test_a_stream_ends_at_its_deadline_also_if_its_gateway_does_not_read_the_decision(
    tmp_path, caplog, monkeypatch
):
    large, written = b'{"prompt": "' + b"x" * (15 << 20) + b'"}', []
    streamed = picker._streamed
    monkeypatch.setattr(picker, "_streamed", lambda *of: written.append(time.monotonic()) or streamed(*of))
    async with picking(tmp_path, 0, 1, request_timeout_s=20) as (c, process):
        call = process()
        await call.write(head())
        for start in range(0, len(large), 1 << 20):
            part = large[start : start + (1 << 20)]
            await call.write(piece(part, last=start + len(part) == len(large)))
        await until(
            lambda: written and time.monotonic() - written[-1] > 0.5, "the decision waits for its reader"
        )
        jump(20)
        await until(lambda: c.metric("requests_total", status="504") == 1, "its time is over")
        with suppress(grpc.aio.AioRpcError):  # UNAVAILABLE, unless the decision was just written
            while await call.read() is not grpc.aio.EOF:
                pass
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def frame(kind, stream, payload, flags=0):
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@scenario
async def test_a_stream_ends_at_its_deadline_also_if_its_gateway_had_no_room_for_a_decision(
    tmp_path, caplog, monkeypatch
):
    decision, begun = picker._decision, []

    def noted(*of):
        begun.append(of)
        yield from decision(*of)

    monkeypatch.setattr(picker, "_decision", noted)
    pairs = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        b":authority": b"picker",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    headers = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs.items()
    )
    async with picking(tmp_path, 0, 1, request_timeout_s=20) as (c, _):
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/picker")
        no_window = (4).to_bytes(2, "big") + bytes(4)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, no_window) + frame(1, 1, headers, 4))
        for message in (head(), piece(BODY)):
            data = message.SerializeToString()
            writer.write(frame(0, 1, b"\0" + len(data).to_bytes(4, "big") + data))
        await until(lambda: begun, "the decision waits for its reader")
        jump(20)
        await until(lambda: c.metric("requests_total", status="504") == 1, "its time is over")
        writer.write(frame(8, 1, (1 << 20).to_bytes(4, "big")))
        ended = False
        while not ended:
            length, kind, flags, stream = struct.unpack(">3sBBI", await reader.readexactly(9))
            await reader.readexactly(int.from_bytes(length, "big"))
            ended = stream == 1 and (kind == 3 or flags & 1)
        writer.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@scenario
async def test_a_request_that_two_prefill_nodes_lost_gets_the_error_of_both_faces(tmp_path):
    async with picking(tmp_path, 2, 1) as (c, process):
        for node in c.prefill:
            node.default = disconnects
        async with c.post() as response:
            assert (response.status, (await error_of(response))["code"]) == (502, "node_failed")
        assert refusal(await asked(process, head(), piece(BODY))) == (502, "node_failed")


@scenario
async def test_a_node_that_comes_while_a_prompt_is_computed_is_picked_only_if_its_gateway_allows_it(tmp_path):
    computed = asyncio.Event()
    async with Node(decodes) as late, picking(tmp_path, 1, 1) as (c, process):
        prefill, gone = c.prefill[0], c.decode[0].url
        for allowed, expected in ((gone, (503, "overloaded")), (late.url, None)):
            c.proxy.update(view([prefill.url], [gone]))
            computed.clear()
            prefill.script, before = [waits_for(computed, prefills)], len(prefill.bodies)
            call = process()
            await call.write(head(subset=[gone.removeprefix("http://"), allowed.removeprefix("http://")]))
            await call.write(piece(BODY))
            await until(lambda: len(prefill.bodies) > before, "its prompt is computed")  # noqa: B023
            c.proxy.update(view([prefill.url], [late.url]))
            computed.set()
            answer = await call.read()
            call.cancel()
            assert (refusal(answer) if answer.HasField("immediate_response") else None) == expected


@scenario
async def test_a_gateway_limits_the_choice_of_nodes(tmp_path):
    async with picking(tmp_path, 0, 3) as (c, process):
        addresses = [node.url.removeprefix("http://") for node in c.decode]

        async def picked(*subset):
            answer = await asked(process, head(subset=subset), piece(BODY))
            if answer.HasField("immediate_response"):
                return refusal(answer)
            (namespace,) = answer.dynamic_metadata.fields
            (field,) = namespace.value.struct_value.fields
            assert (namespace.key, field.key) == ("envoy.lb", ENDPOINT)
            return field.value.string_value

        for address in addresses:
            assert await picked(address, "10.0.0.9:80") == address
        assert await picked("10.0.0.9:80") == await picked() == (503, "overloaded")


@scenario
async def test_names_of_nodes_are_looked_up_at_once_and_an_ipv4_address_comes_first(tmp_path, monkeypatch):
    asked_for, found = set(), [(socket.AF_INET6, "::1", 0, 0), (socket.AF_INET, "10.0.0.1")]

    async def look_up(host, port, **_):
        asked_for.add(host)
        await until(lambda: len(asked_for) == 2, "both names are looked up")
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, port, *more)) for family, address, *more in found
        ]

    async with picking(tmp_path, 0, ["http://a.example:80", "http://b.example:80"]) as (_, process):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        answer = await asked(process, head(subset=["10.0.0.1:80"]), piece(BODY))
        assert (
            answer.dynamic_metadata.fields[0].value.struct_value.fields[0].value.string_value == "10.0.0.1:80"
        )
