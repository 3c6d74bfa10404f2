"""What the proxy remembers of requests: which nodes they went to, and what these reported; and who may see it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from launch.proxy.metrics import REPORT_BYTES, read_report
from pd_cache.reasons import RequestReport
from tests.support.proxy import PARAMS, answers, cluster, scenario, streams_then

PREFILL = RequestReport.of(600, 256, reason="never_stored")
DECODE = RequestReport.of(600, 256, found=512, loaded=512, reason="evicted")
TRAP = json.dumps({"text": '"report": {"asked": 1}'})


def told(report: RequestReport) -> dict[str, object]:
    return {"pd_cache": {"report": msgspec.to_builtins(report), "prefill": None}}


def test_a_report_is_found_at_the_end_of_an_answer() -> None:
    answer = json.dumps({"choices": [{"text": "x" * 100_000}], "usage": {}, **told(DECODE)}).encode()
    assert read_report(answer) == read_report(answer[-REPORT_BYTES:]) == DECODE


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b'"report"',
        b'"report": {',
        b'"report": {"asked": 1, "reason": "because"}',
        b'"report": {"asked": -1}',
        b'{"report": [1, 2]}',
        TRAP.encode(),
        b'"report": {"asked": "\xff"}',
    ],
)
def test_anything_else_is_no_report(answer: bytes) -> None:
    assert read_report(answer) is None


def test_a_generated_text_is_no_report() -> None:
    assert read_report(json.dumps({**told(DECODE), "text": '"report": {"asked": 1}'}).encode()) == DECODE


@scenario
async def test_a_request_is_remembered_with_its_nodes_and_their_reports() -> None:
    async with cluster() as c:
        params = {**PARAMS, "pd_cache": {"prefix_tokens": 512, "report": msgspec.to_builtins(PREFILL)}}
        c.prefill[0].script = [answers(200, {"choices": [], "kv_transfer_params": params})]
        c.decode[0].script = [answers(200, {"choices": [{"text": TRAP}], **told(DECODE)})]
        async with c.post(headers={"X-Request-Id": "mine"}) as response:
            assert (await response.json())["pd_cache"]["report"]["reason"] == "evicted"
        assert c.decode[0].bodies[0]["kv_transfer_params"] == params, "passed on unread"
        async with c.get("/requests/mine") as response:
            assert await response.json() == {
                "client": "",
                "hops": [
                    {"hop": "prefill", "node": c.prefill[0].url, "report": msgspec.to_builtins(PREFILL)},
                    {"hop": "decode", "node": c.decode[0].url, "report": msgspec.to_builtins(DECODE)},
                ],
            }
        async with c.get("/requests/other") as response:
            assert response.status == 404


@scenario
async def test_a_stream_is_remembered_with_the_report_of_its_last_event() -> None:
    async with cluster(prefill=0) as c:
        event = json.dumps({"choices": [{"text": "!"}], **told(DECODE)}).encode()
        pieces = [b'data: {"choices": []}\n\n', b"data: " + event[:50], event[50:] + b"\n\n", b"data: [DONE]\n\n"]
        c.decode[0].script = [streams_then(pieces, None)]
        async with c.post(
            {"model": "tiny", "prompt": "Hi", "stream": True}, headers={"X-Request-Id": "mine"}
        ) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        async with c.get("/requests/mine") as response:
            (hop,) = (await response.json())["hops"]
            assert hop["report"] == msgspec.to_builtins(DECODE)


@pytest.mark.parametrize("monitors", [False, True])
def test_a_client_sees_its_own_requests_only_and_a_monitor_all(tmp_path: Path, monitors: bool) -> None:
    keys, watchers = tmp_path / "keys", tmp_path / "monitors"
    keys.write_text("alice key-of-alice-0123456789\nbob key-of-bob-0123456789\n")
    watchers.write_text("watch key-of-watch-0123456789\n")
    files = {"api_keys_file": str(keys), **({"monitor_keys_file": str(watchers)} if monitors else {})}

    @scenario
    async def run() -> None:
        async with cluster(prefill=0, **files) as c:
            async with c.post(
                headers={"X-Request-Id": "mine", "Authorization": "Bearer key-of-alice-0123456789"}
            ) as response:
                assert response.status == 200
            seen = {}
            for name in ("alice", "bob", "watch", ""):
                headers = {"Authorization": f"Bearer key-of-{name}-0123456789"} if name else {}
                async with c.session.get(c.url + "/requests/mine", headers=headers) as response:
                    seen[name] = response.status
            if monitors:
                assert seen == {"alice": 401, "bob": 401, "watch": 200, "": 401}
            else:
                assert seen == {"alice": 200, "bob": 404, "watch": 401, "": 401}

    run()
