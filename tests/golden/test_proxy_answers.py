"""What the proxy answers its clients, and what it asks its nodes, as `proxy_answers.txt` holds it: of each
case the requests to nodes, and then the answer. Each has a line with its headers, and its body.

`python -m tests.golden.test_proxy_answers` writes the file anew.
"""

import asyncio
import contextlib
import json
import re
import tempfile
from pathlib import Path

import aiohttp
import msgspec

import pd_cache
from launch.discovery import View
from pd_cache.reasons import RequestReport
from tests.support.proxy import (
    EVENTS,
    answers,
    bearer,
    cluster,
    disconnects,
    files_of,
    hangs,
    jump,
    one_hint,
    says,
    scenario,
    streams_then,
    until,
    view,
)
from transfer.settings import mooncake_version

GOLDEN = Path(__file__).with_name("proxy_answers.txt")
KEY, OTHER_KEY, MONITOR = (f"sk-{name}-0123456789abcdef" for name in ("alice", "bob", "monitor"))
PROMPT = {"model": "tiny", "prompt": "Hi", "max_tokens": 5}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 5}
_LEFT_OUT = ("Date", "Server", "Connection", "Content-Length", "Host", "User-Agent", "Transfer-Encoding")
REPORT = RequestReport.of(600, 256, found=512, loaded=512, reason="evicted")


class Recorder:
    """Asks a cluster, and notes what it answers in words that do not change from run to run."""

    def __init__(self, cluster, found):
        self._cluster = cluster
        self._found = found
        self._words = {
            node.url: f"http://{hop}-{number}"
            for hop, nodes in (("prefill", cluster.prefill), ("decode", cluster.decode))
            for number, node in enumerate(nodes)
        }

    async def ask(self, name, method, path, body=None, **options):
        """Notes the answer under `name`, and what nodes were asked for it."""
        nodes = (*self._cluster.prefill, *self._cluster.decode)
        asked = {node.url: len(node.bodies) for node in nodes}
        data = {"json": body} if body is not None else {}
        async with self._cluster.session.request(
            method, self._cluster.url + path, **data, **options
        ) as response:
            try:
                # `response.read` waits for the request's body, too
                text = (await response.content.read()).decode()
            except aiohttp.ClientPayloadError:
                text = "the answer broke off"
            response.close()
        if path == "/metrics" and response.status == 200:
            text = "\n".join(sorted(re.findall(r"^# TYPE (pd_cache_\w+ \w+)", text, re.MULTILINE)))
        self._found.append(f"=== {name}")
        for node in nodes:
            since = slice(asked[node.url], None)
            for there, sent, headers in zip(
                node.paths[since], node.bodies[since], node.headers[since], strict=True
            ):
                self._note(node.url + there, headers, json.dumps(sent))
        self._note(str(response.status), response.headers, text)

    async def post(self, name, body=PROMPT, **options):
        """Notes the answer to a completion."""
        await self.ask(name, "POST", "/v1/completions", body, **options)

    async def get(self, name, path, **options):
        await self.ask(name, "GET", path, **options)

    async def announce(self, name, size):
        """Notes the answer to the head of a request whose body of `size` bytes never comes."""
        host, _, port = self._cluster.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n\r\n".encode()
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.split(": ", 1) for line in head[1:-1])
        body = (await reader.readexactly(int(headers["Content-Length"]))).decode()
        writer.close()
        self._found.append(f"=== {name}")
        self._note(head[0].split()[1], headers, body)

    def _note(self, first, headers, text):
        kept = sorted((key.title(), value) for key, value in headers.items() if key.title() not in _LEFT_OUT)
        with contextlib.suppress(ValueError):
            text = json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
        text = "\n".join((" | ".join([first, *(f"{key}: {value}" for key, value in kept)]), text))
        for url, word in self._words.items():
            text = text.replace(url, word)
        text = text.replace(mooncake_version(), "MOONCAKE").replace(pd_cache.__version__, "VERSION")
        text = re.sub(r"\b[0-9a-f]{32}\b", "GENERATED", text)
        self._found.append(re.sub(r"within [0-9.]+ s", "within SOME s", text))


def key(value):
    return {"headers": bearer(value)}


async def record():
    """Returns all cases."""
    found = []
    await _record_good_ones(found)
    await _record_refusals(found)
    await _record_failures(found)
    with tempfile.TemporaryDirectory() as folder:
        await _record_keys(found, Path(folder))
    return "\n".join(found) + "\n"


async def _record_good_ones(found):
    async with cluster() as c:
        to = Recorder(c, found)
        ids = {"headers": {"X-Request-Id": "a-request:1", "Authorization": "Bearer x", "Cookie": "a=b"}}
        await to.post("completion", **ids)
        stream = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}
        await to.post("completion, streamed", stream)
        await to.ask("chat", "POST", "/v1/chat/completions", CHAT)
        await to.ask("chat, streamed", "POST", "/v1/chat/completions", {**CHAT, "stream": True})
        smuggled = {**PROMPT, "kv_transfer_params": {"remote_host": "elsewhere"}}
        await to.post("kv_transfer_params of a client", smuggled)
        c.decode[0].script = [answers(200, {"pd_cache": {"report": msgspec.to_builtins(REPORT)}})]
        reported = {"headers": {"X-Request-Id": "reported"}}
        await to.post("completion with a report", **reported)
        await to.get("request", "/requests/reported")
        await to.get("request that is not known", "/requests/nothing")
        await to.get("models", "/v1/models")
        await to.get("health", "/health")
        await to.get("metrics", "/metrics")
        c.proxy.update(View(()))
        await to.get("health without nodes", "/health")
        c.proxy.update(view([], [c.decode[0].url]))
        await to.post("completion without prefill nodes")


async def _record_refusals(found):
    async def slow():
        yield b'{"prompt": '
        await asyncio.Event().wait()

    async with cluster() as c:
        to = Recorder(c, found)
        bodies = {
            "empty": b"", "half": b"{", "array": b"[]", "no prompt": b"{}", "null prompt": b'{"prompt": null}', "not UTF-8": b"\xff\xfe",
            "negative max_tokens": b'{"prompt": "x", "max_tokens": -1}', "text max_tokens": b'{"prompt": "x", "max_tokens": "5"}',
        }  # fmt: skip
        for name, body in bodies.items():
            await to.ask(f"body: {name}", "POST", "/v1/completions", data=body)
        await to.ask("body: chat without messages", "POST", "/v1/chat/completions", PROMPT)
        gzip = {"headers": {"Content-Encoding": "gzip"}}
        await to.ask("body: not gzip", "POST", "/v1/completions", data=b"this is not gzip", **gzip)
        await to.announce("body: too large", (16 << 20) + 1)
        await to.get("path that is not known", "/v1/nothing")
        await to.get("method that is not allowed", "/v1/completions")
        await to.ask("query without a namespace", "POST", "/query", {"token_ids": [1]})
        await to.ask("query: no query", "POST", "/query", {"token_ids": "x"})
        hints = one_hint("kv.retain", {"tokens": [1], "ttl_s": 9})
        await to.ask("hints without a namespace", "POST", "/hints", hints)
        await to.ask("hints: no hints", "POST", "/hints", {"actions": []})
        await to.post("completion with hints", {**PROMPT, "kv_hints": hints})
        c.proxy.update(View(()))
        await to.post("completion without nodes")
        await to.get("models without nodes", "/v1/models")
    async with cluster(request_timeout_s=1) as c:
        await Recorder(c, found).ask("body: too slow", "POST", "/v1/completions", data=slow())
    async with cluster(request_timeout_s=60) as c:
        c.decode[0].default = hangs
        to = Recorder(c, found)
        asking = asyncio.ensure_future(to.post("decode node too slow"))
        await until(lambda: len(c.decode[0].bodies) == 1, "the node has it")
        jump(60)
        await asking
    async with cluster(0, 1, max_requests=1) as c, c.stuck_at(c.decode[0]):
        await Recorder(c, found).post("too many requests")


async def _record_failures(found):
    boom = {"error": {"message": "boom", "type": "server_error", "param": None, "code": None}}
    for name, prefill, decode, stream in (
        ("prefill node refuses", answers(422, boom, Retry_After="3"), None, False),
        ("prefill node fails", answers(500, boom), None, False),
        ("prefill node stores nothing", answers(200, {"choices": []}), None, False),
        ("decode node refuses", None, answers(429, boom, Retry_After="3"), False),
        ("decode node is full", None, answers(503, boom, Retry_After="7"), False),
        ("decode node fails", None, answers(500, boom), False),
        ("decode node disconnects", None, disconnects, False),
        ("decode node redirects", None, answers(302), False),
        ("decode node answers something", None, says(b"anything"), False),
        ("decode node breaks off a stream", None, streams_then(EVENTS[:2], disconnects), True),
    ):
        async with cluster() as c:
            c.prefill[0].default = prefill or c.prefill[0].default
            c.decode[0].default = decode or c.decode[0].default
            await Recorder(c, found).post(name, {**PROMPT, "stream": stream})
    async with cluster(0, 3) as c:
        for node in c.decode:
            node.default = disconnects
        await Recorder(c, found).post("two decode nodes disconnect")


async def _record_keys(found, folder):
    files = files_of(folder, api_keys=f"alice {KEY}\nbob {OTHER_KEY}\n", node_key="the-nodes-own-key\n")
    async with cluster(**files, max_requests_per_key=1) as c:
        to = Recorder(c, found)
        await to.post("no key")
        await to.post("wrong key", **key("sk-wrong-0123456789abcdef"))
        await to.post("right key", headers=bearer(KEY, X_Request_Id="of-alice"))
        await to.get("her request", "/requests/of-alice", **key(KEY))
        await to.get("her request for another", "/requests/of-alice", **key(OTHER_KEY))
        await to.get("her request without a key", "/requests/of-alice")
        await to.get("health without a key", "/health")
        await to.get("health with a key", "/health", **key(KEY))
        await to.get("metrics without a key", "/metrics")
        await to.ask("query without a key", "POST", "/query", {"token_ids": [1]})
        await to.get("models without a key", "/v1/models")
        async with c.stuck_at(c.decode[0], **key(KEY)):
            await to.post("too many requests of a key", **key(KEY))
    async with cluster(**files, **files_of(folder, monitor_keys=f"prometheus {MONITOR}\n")) as c:
        to = Recorder(c, found)
        await to.get("metrics for a client, with monitors", "/metrics", **key(KEY))
        await to.get("metrics for a monitor", "/metrics", **key(MONITOR))
        await to.get("health for a client, with monitors", "/health", **key(KEY))
        await to.post("completion for a monitor", **key(MONITOR))


@scenario
async def test_the_proxys_answers_are_those_of_the_golden_file():
    assert await record() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(asyncio.run(record()))
