"""The engine over HTTP, asked by a real client on a real port; and its process."""

import asyncio
import codecs
import io
import json
import signal
import socket
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from launch.engines.reference.api import ReferenceServer, serve
from launch.engines.reference.engine import ReferenceEngine
from launch.run.supervise import StopFlag, stop_on_signals, stop_signals
from tests.support.proxy import scenario, until

from .conftest import prompt_of, request_of, tiny_config
from .fake_cache import FakeCache

FOR_EVER = 600_000
WAITS = {"kv_transfer_params": {"do_remote_prefill": True, "pd_cache": {"prefix_tokens": 16}}}
"""Fields of a request for which a node waits."""


@asynccontextmanager
async def served(engine, registry=None, **settings):
    """A client session on a running server; both are closed afterwards."""
    stop, address = StopFlag(), asyncio.get_running_loop().create_future()
    running = ReferenceServer(engine, registry).run("127.0.0.1", 0, address.set_result, stop, **settings)
    server = asyncio.create_task(running)
    try:
        await asyncio.wait([server, address], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(address.result(), timeout=timeout) as client:
            client.server, client.stop, client.port = server, stop, int(address.result().rpartition(":")[2])
            yield client
    finally:
        stop.set()
        await asyncio.wait_for(server, 60)


def completion(**fields):
    return {"model": "tiny", "prompt": list(prompt_of(20)), "max_tokens": 6, **fields}


async def post(client, expect=200, headers=None, **fields):
    async with client.post("/v1/completions", json=completion(**fields), headers=headers) as response:
        answer = await response.json()
        assert response.status == expect, answer
        if expect >= 400:
            assert set(answer["error"]) == {"message", "type", "param", "code"}
        return answer


async def get(client, path, expect=200):
    async with client.get(path) as response:
        assert response.status == expect
        return await response.json()


async def post_stream(client, **fields):
    async with client.post("/v1/completions", json=completion(stream=True, **fields)) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        events = (await response.text()).split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


@scenario
async def test_an_answer_has_the_shape_of_openais_and_a_stream_is_the_same_token_by_token(
    make_engine, expected
):
    async with served(make_engine(FakeCache())) as client:
        answer, events = await post(client, cache_salt="a"), await post_stream(client, cache_salt="b")
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected(request_of(20))
    assert choice["finish_reason"] == "length"
    tokens = {"prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 26}
    assert answer["usage"] == {**tokens, "prompt_tokens_details": {"cached_tokens": 0}}
    own = answer["pd_cache"]["self"]
    assert (own["cached_tokens"], own["computed_tokens"]) == (0, 20)
    assert own["ttft_ms"] > 0
    assert answer["pd_cache"]["prefill"] is None
    assert "kv_transfer_params" not in answer
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [one["token_ids"] for one in choices] == [[token] for token in choice["token_ids"]]
    assert "".join(one["text"] for one in choices) == choice["text"]
    assert [one["finish_reason"] for one in choices] == [None] * 5 + ["length"]
    assert chunks[-1]["usage"] == answer["usage"]
    assert chunks[-1]["pd_cache"]["self"]["computed_tokens"] == 20
    assert "usage" not in chunks[0]
    assert len({chunk["id"] for chunk in chunks}) == 1


@scenario
async def test_a_prompt_goes_from_a_prefill_to_a_decode_node(make_engine, expected):
    cache = FakeCache()
    prefill, decode = make_engine(cache), make_engine(cache, wait_ms=FOR_EVER)
    prompt = list(prompt_of(40))
    work = {"cached_tokens": 0, "computed_tokens": 40, "reason": "never_stored"}
    async with served(prefill) as first, served(decode) as second, served(make_engine()) as without_a_cache:
        remote = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = (await post(first, prompt=prompt, **remote))["kv_transfer_params"]
        ours = {"prefix_tokens": 32, "namespace": "", "prefill": work}
        assert params == {"do_remote_prefill": True, "pd_cache": ours}
        answer = await post(second, prompt=prompt, kv_transfer_params=params)
        assert answer["choices"][0]["token_ids"] == expected(request_of(40))
        assert answer["pd_cache"]["prefill"] == work
        assert answer["pd_cache"]["self"]["cached_tokens"] == 32
        events = await post_stream(second, prompt=prompt, kv_transfer_params=params)
        assert json.loads(events[-2])["pd_cache"]["prefill"] == work
        nothing = (await post(without_a_cache, **remote))["kv_transfer_params"]
        assert nothing["pd_cache"]["prefix_tokens"] == 0


@scenario
async def test_a_node_reports_what_became_of_its_last_requests(make_engine, caplog):
    caplog.set_level("INFO", "launch.engines.reference.api")
    cache = FakeCache()
    async with served(make_engine(cache)) as client:
        first = await post(client)
        cache.wait_for_chunks(1)
        again = await post(client, headers={"X-Request-Id": "mine"})
        assert again["id"] == "cmpl-mine"
        assert await get(client, "/requests/mine") == {"reports": [again["pd_cache"]["report"]]}
        assert (await get(client, f"/requests/{first['id']}"))["reports"] == [first["pd_cache"]["report"]]
        assert (await get(client, "/requests/other", 404))["error"]["code"] == "not_found"
    nothing = {"at_hand": 0, "memory": 0, "disk": 0, "pool": 0, "streamed": 0}
    computed, loaded = (one["pd_cache"]["report"] for one in (first, again))
    assert computed == {
        **nothing,
        "asked": 20,
        "found": 0,
        "loaded": 0,
        "computed": 20,
        "reason": "never_stored",
    }
    assert loaded == {**nothing, "asked": 20, "found": 16, "loaded": 16, "computed": 4, "reason": "none"}
    (line,) = [line for line in caplog.messages if line.startswith("request mine: 200 in ")]
    assert "computed=4 reason=none" in line
    counted = cache.metrics.totals()
    assert counted["requests", "never_stored"] == counted["requests", "none"] == 1
    assert counted["missed_tokens", "never_stored"] == 20
    assert counted["prompt_tokens", "loaded"] == 16


BAD = [
    ('{"model": "other"}', 404, "model"), ('{"prompt": [300]}', 400, "prompt"), ('{"prompt": [4611686018427387904]}', 400, "prompt"),
    ('{"prompt": "LONG"}', 400, "prompt"), ('{"max_tokens": 0}', 400, "max_tokens"), ('{"max_tokens": 237}', 400, "prompt"),
    ('{"stop": ["x"]}', 400, "stop"), ('{"stream": true, "max_tokens": -5}', 400, "max_tokens"),
    ('{"kv_transfer_params": {"pd_cache": []}}', 400, "kv_transfer_params.pd_cache"),
]  # fmt: skip


@scenario
async def test_bad_requests_bodies_and_paths_get_openais_error_object(make_engine):
    engine = make_engine()
    async with served(engine) as client:
        for fields, status, param in BAD:
            error = (await post(client, status, **json.loads(fields.replace("LONG", "x" * 300))))["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param), fields
        for body in (b"{", b"", b"[1]", b" " * (1100 << 10)):
            async with client.post("/v1/completions", data=io.BytesIO(body)) as response:
                assert response.status == (413 if len(body) > 1 << 20 else 400)
                assert (await response.json())["error"]["type"] == "invalid_request_error"
        async with client.post(
            "/v1/completions", data=b"x", headers={"Content-Encoding": "gzip"}
        ) as response:
            assert response.status == 415
        async with client.get("/v1/completions") as response:
            assert (response.status, "POST" in response.headers["Allow"]) == (405, True)
        async with client.post("/v1/embeddings", json={}) as response:
            assert response.status == 404
            assert (await response.json())["error"]["message"] == "POST /v1/embeddings: Not Found"
        await post(client, prompt=list(prompt_of(255)), max_tokens=1)
        await post(client, max_tokens="6")
        await post(client, max_tokens=6.0)
        completion = json.dumps({"model": "tiny", "prompt": [1] * 20}).encode()
        async with client.post("/v1/completions", data=codecs.BOM_UTF8 + completion) as response:
            assert response.status == 200
    invalid = engine.metrics.registry.get_sample_value(
        "pd_cache_reference_requests_total", {"outcome": "invalid"}
    )
    assert invalid == len(BAD) + 3


@scenario
async def test_beyond_the_queue_is_503_with_retry_after(make_engine):
    engine = make_engine(slow=True, max_running=1, max_queue=1)
    async with served(engine) as client:
        accepted = [asyncio.create_task(post(client)) for _ in range(2)]
        await until(lambda: len(engine._outstanding) == 2, "it is asked")
        body = {"model": "tiny", "prompt": [1], "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "queue_full"
        engine.model.gate.set()
        await asyncio.gather(*accepted)


@pytest.mark.parametrize("tokens", [0, 1], ids=["before the first token", "in the middle of a stream"])
@scenario
async def test_a_client_that_goes_away_ends_its_request(make_engine, tokens):
    engine = make_engine(slow=True)
    async with served(engine) as client:
        body = {"model": "tiny", "prompt": [1, 2], "stream": True, "max_tokens": 200}
        if tokens:
            engine.model.gate.set()
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: len(engine._outstanding) == 1, "it is asked")
        if tokens:
            response = await asked
            assert (await response.content.readline()).startswith(b"data: ")
            engine.model.gate.clear()
            response.close()
        else:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await asyncio.sleep(0.05)
        engine.model.gate.set()
        await until(lambda: len(engine._outstanding) == 0 and engine.pool.free == 64, "it has ended")
        assert len(engine.model.steps) < 200
        await post(client)


@scenario
async def test_a_failure_before_the_first_token_has_a_status_and_one_after_it_is_an_event(
    make_engine, expected
):
    truth = expected(request_of(20))
    poison = next(token for token in truth if token not in prompt_of(20))
    engine = make_engine(slow=True)
    engine.model.poison.add(poison)
    engine.model.gate.set()
    async with served(engine) as client:
        events = await post_stream(client)
        assert "[DONE]" not in events
        assert set(json.loads(events[-1])["error"]) == {"message", "type", "param", "code"}
        assert len(events) == truth.index(poison) + 2
        answer = await post(client, 500, prompt=[1, poison], stream=True)
        assert answer["error"]["type"] == "server_error"


@scenario
async def test_health_models_metrics_and_tokens_of_a_text(make_engine):
    others = CollectorRegistry()
    Counter("cache_things", "Of the cache", registry=others).inc(3)
    async with served(make_engine(FakeCache()), others) as client:
        health = await get(client, "/health")
        (weights,) = health.pop("weights")
        assert (health, weights["label"]) == ({"status": "ok"}, "")
        (model,) = (await get(client, "/v1/models"))["data"]
        assert model["id"] == "tiny"
        assert "testing" in model["owned_by"]
        async with client.post("/tokenize", json={"model": "tiny", "prompt": "Grüße"}) as response:
            assert (await response.json())["tokens"] == list("Grüße".encode())
        await post(client, prompt="Grüße")
        async with client.get("/metrics") as response:
            assert response.content_type == "text/plain"
            lines = (await response.text()).splitlines()
    assert "cache_things_total 3.0" in lines
    for figure in ('requests_total{outcome="length"} 1.0', "ttft_seconds_count 1.0"):
        assert f"pd_cache_reference_{figure}" in lines


@scenario
async def test_stopping_lets_requests_finish_and_refuses_new_ones(make_engine):
    engine = make_engine(slow=True)
    async with served(engine, grace_s=60) as client:
        asked = asyncio.create_task(post_stream(client))
        await until(lambda: len(engine._outstanding) == 1, "it is asked")
        client.stop.set()
        await until(lambda: not engine.healthy, "it stops")
        engine.model.gate.set()
        assert (await asked)[-1] == "[DONE]"
        await client.server
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(client)


@pytest.mark.parametrize("status, code", [(504, "timeout"), (503, "closed")])
@scenario
async def test_what_takes_too_long_or_does_not_finish_in_the_grace_has_a_status(make_engine, status, code):
    engine = make_engine(FakeCache(), wait_ms=FOR_EVER, request_timeout_s=0.1 if code == "timeout" else 300.0)
    async with served(engine, grace_s=0.05) as client:
        asked = asyncio.create_task(post(client, status, **WAITS))
        await until(lambda: len(engine._outstanding) == 1 or asked.done(), "it is asked")
        if code == "closed":
            client.stop.set()
        assert (await asked)["error"]["code"] == code


# --- the process --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", stop_signals())
def test_a_signal_before_the_server_is_up_ends_it_in_order(number):
    opened_after = []

    def cache(metadata, layout, kv_caches):
        signal.raise_signal(number)
        opened_after.append(metadata)

    def opened():
        return ReferenceServer(ReferenceEngine.open(tiny_config(), cache=cache))

    with stop_on_signals() as stop:
        serve(opened, "127.0.0.1", 0, lambda address: pytest.fail("it must not be ready"), stop)
    assert len(opened_after) == 1


def test_an_address_in_use_is_an_error_and_leaves_nothing_behind(make_engine):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="address"):
        serve(
            lambda: ReferenceServer(make_engine()),
            *taken.getsockname(),
            lambda address: pytest.fail("not ready"),
            StopFlag(),
        )
