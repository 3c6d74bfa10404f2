"""The engine over HTTP, asked by a real client on a real port."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from launch.engines.reference import run_engine
from pd_cache.cluster import HandoffConfig
from tests.support.waiting import wait_for

from .conftest import SlowModel, prompt_of, request_of
from .fake_cache import FakeCache, HangingCache, RaisingCache


@asynccontextmanager
async def served(engine, **settings):
    """A client session on a running server; both are closed afterwards."""
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    server = asyncio.create_task(run_engine(engine, "127.0.0.1", 0, address.set_result, stop, **settings))
    try:
        await asyncio.wait([server, address], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(f"http://{address.result()}", timeout=timeout) as client:
            client.server, client.stop = server, stop
            yield client
    finally:
        stop.set()
        await asyncio.wait_for(server, 60)


async def post(client, expect: int = 200, headers: dict | None = None, **fields) -> dict:
    body = {"model": "tiny", "prompt": list(prompt_of(20)), "max_tokens": 6, **fields}
    async with client.post("/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == expect, answer
        return answer


async def get(client, path: str, expect: int = 200) -> dict:
    async with client.get(path) as response:
        answer = await response.json()
        assert response.status == expect, answer
        return answer


async def post_stream(client, **fields) -> list:
    body = {"model": "tiny", "prompt": list(prompt_of(20)), "max_tokens": 6, "stream": True, **fields}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        events = (await response.text()).split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


async def until(condition) -> None:
    await asyncio.to_thread(wait_for, condition)


def test_a_completion_has_the_shape_of_openais(make_engine, expected):
    truth = expected(request_of(20))

    async def run():
        async with served(make_engine(FakeCache())) as client:
            return await post(client)

    answer = asyncio.run(run())
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    (choice,) = answer["choices"]
    assert choice["token_ids"] == truth
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 6,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    own = answer["pd_cache"]["self"]
    assert (own["cached_tokens"], own["computed_tokens"]) == (0, 20)
    assert own["ttft_ms"] > 0
    assert answer["pd_cache"]["prefill"] is None
    assert "kv_transfer_params" not in answer


def test_a_stream_is_the_same_answer_token_by_token(make_engine):
    async def run():
        async with served(make_engine()) as client:
            return await post(client), await post_stream(client)

    whole, events = asyncio.run(run())
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1] * 6
    assert [chunk["choices"][0]["token_ids"][0] for chunk in chunks] == whole["choices"][0]["token_ids"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["pd_cache"]["self"]["computed_tokens"] == 20
    assert "usage" not in chunks[0]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_text_is_tokenized(make_engine):
    async def run():
        async with served(make_engine()) as client:
            text = await post(client, prompt="Grüße")
            ids = await post(client, prompt=[list("Grüße".encode())])
            assert text["choices"] == ids["choices"]
            assert text["usage"]["prompt_tokens"] == 7

    asyncio.run(run())


def test_a_subnormal_temperature_is_answered_as_zero_is(make_engine):
    async def run():
        async with served(make_engine()) as client:
            answers = [await post(client, temperature=temperature) for temperature in (0, 1e-320)]
            assert answers[0]["choices"] == answers[1]["choices"]

    asyncio.run(run())


def test_a_seed_repeats_a_sampled_answer(make_engine):
    async def run():
        async with served(make_engine()) as client:
            answers = [await post(client, temperature=1.2, seed=seed, max_tokens=20) for seed in (1, 1, 2)]
            return [answer["choices"][0]["token_ids"] for answer in answers]

    first, again, other = asyncio.run(run())
    assert first == again != other


def test_a_prompt_goes_from_a_prefill_to_a_decode_node(make_engine, expected):
    cache = FakeCache()
    prefill, decode = make_engine(cache), make_engine(cache, handoff=HandoffConfig(wait_ms=600_000))
    prompt = list(prompt_of(40))
    work = {"cached_tokens": 0, "computed_tokens": 40, "reason": "never_stored"}

    async def run():
        async with served(prefill) as first, served(decode) as second:
            handed = await post(first, prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            params = handed["kv_transfer_params"]
            assert params == {
                "do_remote_prefill": True,
                "pd_cache": {
                    "prefix_tokens": 32,
                    "namespace": "",
                    "prefill": work,
                },
            }
            answer = await post(second, prompt=prompt, kv_transfer_params=params)
            assert answer["choices"][0]["token_ids"] == expected(request_of(40))
            assert answer["pd_cache"]["prefill"] == work
            assert answer["pd_cache"]["self"]["cached_tokens"] == 32
            events = await post_stream(second, prompt=prompt, kv_transfer_params=params)
            assert json.loads(events[-2])["pd_cache"]["prefill"] == work

    asyncio.run(run())


def test_a_node_reports_what_became_of_its_last_requests(make_engine, caplog):
    cache = FakeCache()
    engine = make_engine(cache)

    async def run():
        async with served(engine) as client:
            first = await post(client)
            cache.wait_for_stores(1)
            again = await post(client, headers={"X-Request-Id": "mine"})
            kept = await get(client, "/requests/mine")
            assert kept == {"reports": [again["pd_cache"]["report"]]}
            assert (await get(client, f"/requests/{first['id']}"))["reports"] == [first["pd_cache"]["report"]]
            assert (await get(client, "/requests/other", 404))["error"]["code"] == "not_found"
            return first["pd_cache"]["report"], again["pd_cache"]["report"]

    with caplog.at_level("INFO", "launch.engines.reference.server"):
        first, again = asyncio.run(run())
    nothing = {"at_hand": 0, "memory": 0, "disk": 0, "pool": 0}
    assert first == {**nothing, "asked": 20, "found": 0, "loaded": 0, "computed": 20, "reason": "never_stored"}
    assert again == {**nothing, "asked": 20, "found": 16, "loaded": 16, "computed": 4, "reason": "none"}
    assert any("request mine: 200" in line and "computed=4 reason=none" in line for line in caplog.messages)
    counted = cache.metrics.totals()
    assert counted["requests", "never_stored"] == counted["requests", "none"] == 1
    assert counted["missed_tokens", "never_stored"] == 20
    assert counted["prompt_tokens", "loaded"] == 16


def test_an_announced_prefix_that_did_not_come_in_time_gives_the_reason(make_engine):
    params = {"do_remote_prefill": True, "pd_cache": {"prefix_tokens": 16}}

    async def run():
        async with served(make_engine(FakeCache(), handoff=HandoffConfig(wait_ms=1))) as client:
            return (await post(client, kv_transfer_params=params))["pd_cache"]["report"]["reason"]

    assert asyncio.run(run()) == "deadline"


@pytest.mark.parametrize(("at", "reason"), [("lookup", "error"), ("retrieve", "error")])
def test_a_cache_that_raises_gives_the_reason(make_engine, at, reason):
    cache = RaisingCache([at])

    async def run():
        async with served(make_engine(cache)) as client:
            if at == "retrieve":
                await post(client)
                cache.wait_for_stores(1)
            return (await post(client))["pd_cache"]["report"]["reason"]

    assert asyncio.run(run()) == reason


def test_nothing_is_announced_without_a_cache(make_engine):
    async def run():
        async with served(make_engine()) as client:
            answer = await post(client, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            assert answer["kv_transfer_params"]["pd_cache"]["prefix_tokens"] == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"prompt": [300]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [2**70]}, 400, "prompt"),
        ({"prompt": [1] * 300}, 400, "prompt"),
        ({"prompt": "x" * 300}, 400, "prompt"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 237}, 400, "prompt"),
        ({"max_tokens": 10**30}, 400, "prompt"),
        ({"temperature": 3}, 400, "temperature"),
        ({"temperature": 10**400}, 400, "temperature"),
        ({"stop": ["x"]}, 400, "stop"),
        ({"kv_transfer_params": {"pd_cache": []}}, 400, "kv_transfer_params.pd_cache"),
        ({"stream": True, "max_tokens": -5}, 400, "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_requests_get_openais_error_object(make_engine, fields, status, param):
    engine = make_engine()

    async def run():
        async with served(engine) as client:
            error = (await post(client, status, **fields))["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            await post(client)

    asyncio.run(run())
    assert engine.metrics.registry.get_sample_value("pd_cache_reference_requests_total", {"outcome": "invalid"}) == 1


def test_bodies_that_are_no_json_or_too_large_and_wrong_paths_are_refused(make_engine):
    async def run():
        async with served(make_engine()) as client:
            for body in (b"{", b"\xff", b"", b"[1]", b" " * (1100 << 10)):
                async with client.post("/v1/completions", data=io.BytesIO(body)) as response:
                    assert response.status == 400
                    assert (await response.json())["error"]["type"] == "invalid_request_error"
            async with client.get("/v1/completions") as response:
                assert response.status == 405
                assert "POST" in response.headers["Allow"]
                assert "error" in await response.json()
            async with client.post("/v1/embeddings", json={}) as response:
                assert response.status == 404
                assert (await response.json())["error"]["message"] == "this node has no POST /v1/embeddings"

    asyncio.run(run())


def test_beyond_the_queue_is_503_with_retry_after(make_engine):
    models = []
    engine = make_engine(wrap=lambda model: models.append(SlowModel(model)) or models[0], max_running=1, max_queue=1)

    async def run():
        async with served(engine) as client:
            accepted = [asyncio.create_task(post(client)) for _ in range(2)]
            await until(lambda: engine.outstanding == 2)
            body = {"model": "tiny", "prompt": [1], "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "queue_full"
            models[0].gate.set()
            await asyncio.gather(*accepted)
            await post(client)

    asyncio.run(run())


def test_the_log_tells_a_request_by_the_id_that_the_proxy_gave_it(make_engine, caplog):
    caplog.set_level("INFO", logger="launch.engines.reference")

    async def run():
        async with served(make_engine()) as client:
            body = {"model": "tiny", "prompt": [1], "max_tokens": 1}
            async with client.post("/v1/completions", json=body, headers={"X-Request-Id": "it-is-me"}) as response:
                assert response.status == 200

    asyncio.run(run())
    assert any(line.startswith("request it-is-me: 200 in ") for line in caplog.messages)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(make_engine, stream):
    models = []
    engine = make_engine(wrap=lambda model: models.append(SlowModel(model)) or models[0])

    async def run():
        async with served(engine) as client:
            asked = asyncio.create_task(post(client, stream=stream, max_tokens=200))
            await until(lambda: engine.outstanding == 1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await asyncio.sleep(0.05)
            models[0].gate.set()
            await until(lambda: engine.outstanding == 0 and engine.free_blocks == 64)
            await post(client)

    asyncio.run(run())
    sample = engine.metrics.registry.get_sample_value
    assert sample("pd_cache_reference_requests_total", {"outcome": "aborted"}) == 1


def test_a_client_that_goes_away_in_the_middle_of_a_stream_ends_its_request(make_engine):
    class Paced:
        """Lets one token through each time it is told to."""

        def __init__(self, model):
            self.slow = SlowModel(model)

        def __getattr__(self, name):
            return getattr(self.slow, name)

        def step(self, parts):
            try:
                return self.slow.step(parts)
            finally:
                if len(self.slow.steps) >= 3:
                    self.slow.gate.clear()

    models = []
    engine = make_engine(wrap=lambda model: models.append(Paced(model)) or models[0])

    async def run():
        async with served(engine) as client:
            models[0].gate.set()
            body = {"model": "tiny", "prompt": [1, 2], "stream": True, "max_tokens": 200}
            response = await client.post("/v1/completions", json=body)
            assert (await response.content.readline()).startswith(b"data: ")
            response.close()
            await asyncio.sleep(0.05)
            models[0].slow.steps.clear()
            models[0].gate.set()
            await until(lambda: engine.outstanding == 0 and engine.free_blocks == 64)
            assert len(models[0].slow.steps) <= 3

    asyncio.run(run())


def test_a_failure_before_the_first_token_has_a_status_and_one_after_it_is_an_event(make_engine, expected, caplog):
    truth = expected(request_of(20))
    poison = next(token for token in truth if token not in prompt_of(20))
    models = []

    def wrap(model):
        models.append(SlowModel(model, frozenset({poison})))
        models[0].gate.set()
        return models[0]

    async def run():
        async with served(make_engine(wrap=wrap)) as client:
            events = await post_stream(client)
            assert "[DONE]" not in events
            assert set(json.loads(events[-1])["error"]) == {"message", "type", "param", "code"}
            assert len(events) == truth.index(poison) + 2
            answer = await post(client, 500, prompt=[1, poison], stream=True)
            assert answer["error"]["type"] == "server_error"
            await post(client, prompt=[1, 2], max_tokens=1)

    asyncio.run(run())


def test_a_request_that_takes_too_long_is_504(make_engine):
    engine = make_engine(FakeCache(), handoff=HandoffConfig(wait_ms=600_000), request_timeout_s=0.1)
    params = {"do_remote_prefill": True, "pd_cache": {"prefix_tokens": 16}}

    async def run():
        async with served(engine) as client:
            assert (await post(client, 504, kv_transfer_params=params))["error"]["code"] == "timeout"

    asyncio.run(run())


def test_the_prefill_answer_does_not_wait_for_the_store(make_engine):
    cache = HangingCache(["store"])
    cache.lookup = lambda names, session="": 0

    async def run():
        async with served(make_engine(cache)) as client:
            answer = await post(client, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            assert answer["kv_transfer_params"]["pd_cache"]["prefix_tokens"] == 16
            cache.let_go.set()

    try:
        asyncio.run(run())
    finally:
        cache.let_go.set()


def test_health_models_and_metrics(make_engine):
    others = CollectorRegistry()
    Counter("cache_things", "Of the cache", registry=others).inc(3)

    async def run():
        async with served(make_engine(FakeCache()), registry=others) as client:
            async with client.get("/health") as response:
                assert (response.status, await response.json()) == (200, {"status": "ok"})
            async with client.get("/v1/models") as response:
                (model,) = (await response.json())["data"]
                assert model["id"] == "tiny"
                assert "testing" in model["owned_by"]
            await post(client)
            async with client.get("/metrics") as response:
                assert response.content_type == "text/plain"
                return await response.text()

    lines = asyncio.run(run()).splitlines()
    assert "cache_things_total 3.0" in lines
    for line in (
        "pd_cache_reference_queue_length 0.0",
        'pd_cache_reference_requests_total{outcome="length"} 1.0',
        "pd_cache_reference_prompt_tokens_total 20.0",
        "pd_cache_reference_computed_tokens_total 20.0",
        "pd_cache_reference_cached_tokens_total 0.0",
        "pd_cache_reference_ttft_seconds_count 1.0",
        "pd_cache_reference_output_length_tokens_sum 6.0",
    ):
        assert line in lines


def test_stopping_lets_requests_finish_and_refuses_new_ones(make_engine):
    models = []
    engine = make_engine(wrap=lambda model: models.append(SlowModel(model)) or models[0])

    async def run():
        async with served(engine, grace_s=60) as client:
            asked = asyncio.create_task(post_stream(client))
            await until(lambda: engine.outstanding == 1)
            client.stop.set()
            await until(lambda: not engine.healthy)
            models[0].gate.set()
            events = await asked
            assert events[-1] == "[DONE]"
            await client.server
            with pytest.raises(aiohttp.ClientConnectionError):
                await post(client)

    asyncio.run(run())


def test_stopping_ends_what_does_not_finish_in_the_grace(make_engine):
    engine = make_engine(FakeCache(), handoff=HandoffConfig(wait_ms=600_000))
    params = {"do_remote_prefill": True, "pd_cache": {"prefix_tokens": 16}}

    async def run():
        async with served(engine, grace_s=0.05) as client:
            asked = asyncio.create_task(post(client, 503, kv_transfer_params=params))
            await until(lambda: engine.outstanding == 1)
            client.stop.set()
            assert (await asked)["error"]["code"] == "closed"

    asyncio.run(run())


def test_an_engine_that_failed_is_unhealthy(make_engine, caplog):
    engine = make_engine()
    engine._scheduler.tick = lambda: 1 / 0

    async def run():
        async with served(engine) as client:
            error = (await post(client, expect=500 if engine.healthy else 503))["error"]
            assert error["type"] == "server_error"
            await until(lambda: not engine.healthy)
            async with client.get("/health") as response:
                assert response.status == 503

    asyncio.run(run())


def test_requests_that_cannot_be_read_are_one_line_in_the_log_without_a_byte_of_theirs(make_engine, caplog):
    async def run():
        async with served(make_engine(FakeCache())) as client:
            port = client._base_url.port
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST / HTTP/1.1\r\nAuthorization: Bearer secret\r\nno header\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.0 400 Bad Request\r\n")
                writer.close()

    asyncio.run(run())
    (line,) = [record for record in caplog.records if record.name == "launch.http"]
    assert not line.exc_info
    assert "secret" not in caplog.text
