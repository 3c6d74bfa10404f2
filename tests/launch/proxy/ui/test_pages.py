"""`/ui` and its events: what they say, to whom, and what followers and nodes can do to the proxy."""

import asyncio
import base64
import json
import socket

import msgspec
import pytest

from launch.discovery import View
from launch.proxy.ui import pages
from pd_cache.cluster import NodeRecord
from pd_cache.reasons import RequestReport
from tests.support.proxy import (
    PARAMS,
    answers,
    bearer,
    cluster,
    error_of,
    files_of,
    says,
    scenario,
    until,
)

METRICS = b"""
pd_cache_bytes_total{op="retrieve"} %d
pd_cache_prompt_tokens_total{source="computed"} %d
pd_cache_missed_tokens_total{reason="evicted"} %d
"""
KEY, OTHER, WATCHING = "sk-0123456789abcdef", "sk-fedcba9876543210", "watch-0123456789abcdef"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Events and questions follow one another as fast as a test can read them."""
    monkeypatch.setattr(pages, "INTERVAL_S", 0.05)


def counting():
    """Metrics that grow with each question."""
    asked = iter(range(1_000_000))

    async def behaviour(request):
        number = next(asked)
        return await says(METRICS % (1000 * number, 10 * number, 10 * number))(request)

    return behaviour


class Follower:
    """Reads events."""

    def __init__(self, response):
        self.response = response

    async def event(self):
        """The next event."""
        while True:
            line = await self.response.content.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                return json.loads(line[6:])

    async def until(self, condition):
        while not condition(event := await self.event()):
            pass
        return event


def follow(c, **headers):
    return c.session.get(c.url + "/ui/events", headers=headers)


def named(event, name):
    return next(node for node in event["nodes"] if node["name"] == name)


@scenario
async def test_events_say_what_nodes_do_now_and_what_became_of_prompts():
    async with cluster() as c:
        told = RequestReport(asked=300, loaded=200, pool=256, computed=100, reason="evicted")
        params = {**PARAMS, "pd_cache": {"report": msgspec.to_builtins(told)}}
        decoded = {
            "pd_cache": {
                "report": msgspec.to_builtins(RequestReport(asked=300, loaded=299, pool=299, computed=1))
            }
        }
        c.prefill[0].script = [answers(200, {"choices": [], "kv_transfer_params": params})]
        c.decode[0].script = [answers(200, {"choices": [], **decoded})]
        await c.ask(headers={"X-Request-Id": "mine"})
        c.prefill[0].default, c.decode[0].default = counting(), counting()
        async with follow(c) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            event = await Follower(response).until(lambda event: named(event, "prefill-0")["load"])
        node = named(event, "prefill-0")
        assert (node["state"], node["hit"], node["missed"][0][0]) == ("up", 0.0, "evicted")
        assert event["minutes"][-1] is None or event["minutes"][-1]["pool"] == 200
        (slow,) = event["slow"]
        assert (slow["id"], [hop["node"] for hop in slow["hops"]]) == ("mine", ["prefill-0", "decode-0"])
        assert (slow["status"], slow["hops"][0]["reason"]) == (200, "evicted")
        assert slow["hops"][0]["sources"] == {
            "engine": 0,
            "memory": 0,
            "disk": 0,
            "pool": 200,
            "computed": 100,
        }
        async with c.get("/ui/requests/mine") as response:
            explained = await response.text()
        assert explained.startswith(
            "request mine\nprefill at prefill-0:\n  300 tokens: 0 in the engine's own cache,"
        )
        assert "evicted: the node that looked had stored this chunk" in explained
        async with c.get("/ui/requests/other") as response:
            assert response.status == 404


@scenario
async def test_a_proxy_whose_decode_nodes_are_gone_does_not_serve_and_counts_what_it_refuses():
    async with cluster(health_interval_s=0.1) as c:
        async with follow(c) as response:
            follower = Follower(response)
            assert (await follower.event())["serves"]
            await c.decode[0].stop()
            await follower.until(lambda event: not event["serves"])
            await c.ask(status=503)
            event = await follower.until(lambda event: event["failed"])
        assert event["failed"] == {"503": 1}
        assert sum(minute["errors"] for minute in event["minutes"] if minute) == 1


@scenario
async def test_nodes_are_asked_only_while_somebody_follows():
    async with cluster(prefill=0) as c:
        c.decode[0].default = counting()
        await asyncio.sleep(0.2)
        assert c.decode[0].paths == []
        async with follow(c) as response:
            await Follower(response).until(lambda event: named(event, "decode-0")["state"] == "up")
        await until(lambda: not c.proxy._ui.followers, "the proxy sees that the follower is gone")
        asked = -1
        while asked != len(c.decode[0].paths):  # what was asked before may still come
            asked = len(c.decode[0].paths)
            await asyncio.sleep(0.2)
        async with follow(c) as response:
            event = await Follower(response).event()
        assert named(event, "decode-0")["state"] == "asking", "what was known has grown old"


@scenario
async def test_segments_are_shown_with_the_nodes_that_give_them():
    listed = [
        {"segment_name": "h:1", "size_bytes": 100, "te_endpoint": "", "allocator_used_bytes": 40},
        {"segment_name": "h:2\n<b>", "size_bytes": 100, "te_endpoint": ""},
    ]
    async with cluster(prefill=0, decode=2) as c:
        node, master = c.decode

        async def behaviour(request):
            segments = request.path == "/get_segments_detail"
            return await (answers(200, {"segments": listed}) if segments else says(b"master_key_count 1\n"))(
                request
            )

        master.health = answers(200, {"role": "leader", "service_ready": True})
        master.default, node.default = behaviour, says(b'pd_cache_segment_bytes{segment="h:1"} 100\n')
        records = (
            NodeRecord(name="decode-0", role="decode", address=node.url),
            NodeRecord(name="master", role="master", address="h:1", metrics=master.url),
        )
        c.proxy._ui.update(View(records))
        async with follow(c) as response:
            event = await Follower(response).until(
                lambda event: any(segment["owner"] for segment in event["segments"])
            )
    assert event["segments"] == [
        {"name": "h:2\\n<b>", "owner": "", "size": 100, "used": 0},
        {"name": "h:1", "owner": "decode-0", "size": 100, "used": 40},
    ]


@scenario
async def test_followers_are_limited_and_a_place_comes_free(monkeypatch):
    monkeypatch.setattr(pages, "_FOLLOWERS", 2)
    async with cluster(prefill=0) as c:
        async with follow(c), follow(c), follow(c) as third, c.post() as response:
            assert (third.status, response.status) == (503, 200)
            assert "2 browsers follow" in (await error_of(third))["message"]
        await until(lambda: not c.proxy._ui.followers, "their places are free")
        async with follow(c) as response:
            assert response.status == 200


@scenario
async def test_a_follower_that_never_reads_is_cut_off(monkeypatch):
    monkeypatch.setattr(pages, "_WRITE_S", 0.3)
    monkeypatch.setattr(pages, "INTERVAL_S", 0.001)
    written = []

    def state(client):
        written.append(1 << 16)
        return "x" * (1 << 16)

    async with cluster(prefill=0) as c:
        monkeypatch.setattr(c.proxy._ui, "state", state)
        host, _, port = c.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as mute:
            mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            mute.sendall(b"GET /ui/events HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: c.proxy._ui.followers == 1, "it follows")
            await until(lambda: c.proxy._ui.followers == 0, "it is cut off")
        assert sum(written) < 1 << 25


@scenario
async def test_followers_are_told_to_go_when_the_proxy_ends():
    async with cluster(prefill=0) as c:
        async with follow(c) as response:
            await Follower(response).event()
            await c.proxy._ui._close(None)
            rest = await response.read()
        assert rest.endswith(b"\n"), "it ends at the end of an event"


@scenario
async def test_the_page_may_load_nothing_from_elsewhere():
    async with cluster() as c:
        for path, kind in (
            ("/ui", "text/html"),
            ("/ui/page.css", "text/css"),
            ("/ui/page.js", "text/javascript"),
        ):
            async with c.get(path) as response:
                assert response.headers["Content-Type"] == f"{kind}; charset=utf-8"
                policy = response.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self';")
                assert "unsafe" not in policy
                assert "innerHTML" not in await response.text()


def basic(key):
    return "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()


@scenario
async def test_with_keys_the_page_is_closed_to_others_and_a_browser_asks_for_one(tmp_path):
    files = files_of(tmp_path, api_keys=f"alice {KEY}\n", monitor_keys=f"prometheus {WATCHING}\n")
    async with cluster(**files) as c:
        for path in ("/ui", "/ui/page.js", "/ui/page.css", "/ui/events", "/ui/requests/mine"):
            for wrong in (
                "",
                "Bearer nothing",
                f"Bearer {KEY}",
                basic(KEY),
                "Basic !",
                "Basic",
                basic("") + "==",
            ):
                headers = {"Authorization": wrong} if wrong else {}
                async with c.get(path, headers=headers) as response:
                    assert response.status == 401
                    assert response.headers["WWW-Authenticate"].startswith("Basic ")
            for right in (f"Bearer {WATCHING}", basic(WATCHING)):
                async with c.get(path, headers={"Authorization": right}) as response:
                    assert response.status == (404 if "requests" in path else 200)


@scenario
async def test_with_a_clients_key_only_its_own_requests_are_shown(tmp_path):
    async with cluster(**files_of(tmp_path, api_keys=f"alice {KEY}\nbob {OTHER}\n")) as c:
        for number, key in enumerate((KEY, OTHER)):
            await c.ask(headers=bearer(key, X_Request_Id=f"r{number}"))
        async with follow(c, Authorization=basic(OTHER)) as response:
            event = await Follower(response).event()
        assert [one["id"] for one in event["slow"]] == ["r1"]
        for number, status in enumerate((404, 200)):
            async with c.get(f"/ui/requests/r{number}", headers={"Authorization": basic(OTHER)}) as response:
                assert response.status == status
