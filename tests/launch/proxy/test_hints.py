"""Hints: what is pinned until when, and what wrong hints are answered. In a real pool:
tests/launch/test_pin.py."""

import asyncio
import io
import json
import math
import threading
from contextlib import asynccontextmanager, closing
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import pytest
from aiohttp import web

from launch.discovery import View
from launch.proxy.exchange import HINTS_HEADER
from launch.proxy.hints import prefetches
from launch.proxy.hints.actions import LARGEST_HINTS, Hints
from launch.proxy.hints.messages import HintRefusedError
from launch.proxy.hints.pins import Pin, Pins
from launch.proxy.keys import Client, Keys, WatchedFiles
from launch.proxy.lookups import Pool
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.routing.direct import DirectRule
from launch.proxy.routing.node_pool import NO_PROMPT
from launch.proxy.routing.prefixes import NamedPrompt, RoutedPrompt
from pd_cache.chunks import BlockHasher, describe_hashes
from pd_cache.cluster import HintsConfig, NodeRecord, ProxyConfig
from tests.launch.proxy.test_direct import CHAT, IDS, PICTURE, POOL, TEXT, Lookups, looks_up, tokenizes
from tests.launch.proxy.test_streams import STREAM
from tests.support.proxy import (
    NAMESPACE,
    answers,
    bearer,
    both_faces,
    cluster,
    decodes,
    error_of,
    files_of,
    hangs,
    message,
    one_hint,
    scenario,
    spelled,
    until,
    view,
)

CHUNK = NAMESPACE.chunk_size


def pin(*names, until=100.0):
    return Pin(names, names[-1], (NAMESPACE.fingerprint(), ""), until)


def test_pins_share_chunks_and_end_by_time_release_and_lack_of_room():
    pins = Pins(3)
    assert pins.retain((Client(), "1"), pin(b"a", b"b", until=50.0), 3) == 2
    assert pins.retain((Client(), "2"), pin(b"a", b"b", b"c", b"d"), 3) == 3, (
        "what another pin has takes no room"
    )
    assert sorted(pins.chunks()) == [b"a", b"b", b"c"]
    assert pins.retain((Client(), "3"), pin(b"x"), 3) == 0
    assert pins.retain((Client(), "3"), pin(b"x"), 4) == 1
    with pytest.raises(HintRefusedError, match="3 pins"):
        pins.retain((Client(), "4"), pin(b"a"), 9)
    assert pins.retain((Client(), "3"), pin(b"y", b"z"), 2) == 0
    assert b"x" in pins.chunks(), "a pin that finds no room leaves the one that it would have replaced"
    assert pins.retain((Client(), "3"), pin(b"a", b"y"), 4) == 2, "in place of its chunks"
    assert pins.end_where(lambda key, pin: pin.until <= 50) == 1
    assert (len(pins), sorted(pins.chunks())) == (2, [b"a", b"b", b"c", b"y"])
    pins.shrink(4, lambda tenant: None)
    assert len(pins) == 2
    pins.shrink(3, lambda tenant: None)
    assert sorted(pins.chunks()) == [b"a", b"b", b"c"], "the newest has ended"
    pins.shrink(0, lambda tenant: None)
    assert (len(pins), pins.chunks()) == (0, [])


def test_no_client_takes_all_that_pins_may():
    pins, many = Pins(6), [f"{n}".encode() for n in range(20)]
    for action_id in ("1", "2", "3"):
        assert pins.retain((Client("greedy"), action_id), pin(b"x"), 12) == 1
    with pytest.raises(HintRefusedError, match="as many pins as are free"):
        pins.retain((Client("greedy"), "4"), pin(b"x"), 12)
    assert pins.retain((Client("greedy"), "3"), pin(*many), 12) == 5, "and what another of its pins has"
    assert pins.retain((Client("ann", "a"), "1"), pin(*many), 12) == 3
    assert pins.retain((Client("ben", "a"), "1"), pin(*many), 12) == 3, "which is his tenant's already"
    assert pins.retain((Client("eve"), "1"), pin(*many), 12) == 2
    with pytest.raises(HintRefusedError, match="all 6 pins are taken"):
        pins.retain((Client("eve"), "2"), pin(*many), 12)
    assert pins.end_where(lambda key, pin: True) == 6
    assert not pins._uses, "a client without pins leaves nothing behind"


class Renewing(Lookups):
    """A pool that has the first chunks of each prompt."""

    def __init__(self, found=512):
        super().__init__(found)
        self.renewed = []

    def renew(self, names):
        if self.label is None:
            return None
        self.renewed += [names] if names else []
        return self.label, len(names)


class Kept:
    """Hints of a proxy whose pins may have `room` chunks, with a clock."""

    def __init__(self, room=100, proxies=1, **config):
        self.client = Renewing()
        self.lookups = looks_up(self.client)["lookups"]
        self.metrics = ProxyMetrics()
        self.now, self.room = 0.0, room
        # rounding: a chunk more or less
        size = lambda view: round(self.room * 4 * proxies * self.lookups.chunk_bytes) + 1  # noqa: E731
        hops = SimpleNamespace(look_up=self._look_up, rule=DirectRule(256))
        keys = Keys(ProxyConfig(), WatchedFiles())
        self.hints = Hints(
            HintsConfig(**config), self.lookups, keys, hops, self.metrics, size, lambda: self.now
        )
        records = [NodeRecord(name="m", role="master", address="127.0.0.1:1", lease_ttl_ms=6000)]
        records += [
            NodeRecord(name=f"p{n}", role="proxy", address=f"http://127.0.0.1:{n + 1}")
            for n in range(proxies)
        ]
        self.hints.update(View(tuple(records)))

    async def ask(self, kind, named="a", client="", /, **payload):
        asking = SimpleNamespace(client=Client(client), prompt=NO_PROMPT)
        answer = await self.hints.take(message(kind, payload, named), asking)
        (one,) = answer.actions
        return {field: getattr(one, field) for field in one.__struct_fields__ if field != "action_id"}

    def begin(self, client, request_id, named):
        """A request with this prompt."""
        prompt = RoutedPrompt(1, named=named)
        self.hints.begin(SimpleNamespace(client=client, id=request_id, prompt=prompt), None)

    async def _look_up(self, exchange, completion, prompt, *, name):
        return prompt._replace(named=await self.named(completion.token_ids(), completion.cache_salt))

    async def named(self, tokens, salt=None):
        """A prompt with its names, looked up as that of a request is."""
        return await self.lookups.look_up(tokens, salt, "r")

    def metric(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"pd_cache_proxy_{name}", labels) or 0.0


@scenario
async def test_a_retained_prompt_has_its_leases_renewed_until_its_time_is_over():
    k = Kept(room=4, max_ttl_s=60)
    with closing(k.lookups):
        assert k.hints.renew_s == 2.0
        told = await k.ask("kv.retain", tokens=IDS, ttl_s=30)
        assert (told["status"], told["ttl_s"], told["tokens"], told["in_pool"]) == ("accepted", 30, 768, 512)
        await k.hints.renew()
        assert [len(names) for names in k.client.renewed] == [3]
        assert (k.metric("pins"), k.metric("pinned_objects")) == (1, 3)
        assert k.metric("pinned_bytes") == 3 * NAMESPACE.chunk_bytes
        told = await k.ask("kv.retain", "b", tokens=[*IDS[:512], *[8] * 600], ttl_s=1000)
        assert (told["status"], told["ttl_s"], told["tokens"]) == ("clipped", 60, 768)
        assert told["reason"].startswith("max_ttl_s is 60; pins may take")
        told = await k.ask("kv.retain", "b2", tokens=[9] * 600, ttl_s=30)
        assert (told["status"], told["reason"][:16]) == ("refused", "there is no room")
        k.now = 30.0
        await k.hints.renew()
        assert (len(k.client.renewed[-1]), k.metric("pins")) == (3, 1)
        assert (await k.ask("kv.release", "x", "other client", action_id="b"))["status"] == "refused"
        assert (await k.ask("kv.release", "x", action_id="b"))["released"] == 1
        renewed = len(k.client.renewed)
        await k.hints.renew()
        assert len(k.client.renewed) == renewed, "there is nothing to renew"
        assert k.metric("pinned_objects") == k.metric("pinned_bytes") == 0
        assert k.metric("hints_total", action="retain", outcome="clipped") == 1


@scenario
async def test_pins_end_with_the_weights_and_with_the_pool_that_they_were_granted_a_share_of():
    k = Kept(room=6, proxies=3)
    with closing(k.lookups):
        for action_id, token in (("old", 1), ("new", 2)):
            assert (await k.ask("kv.retain", action_id, tokens=[token] * 3 * CHUNK, ttl_s=600))[
                "tokens"
            ] == 768
        k.client.label = None
        await k.hints.renew()
        assert (k.metric("pins"), k.metric("pinned_objects")) == (2, 0)
        assert (await k.ask("kv.retain", "b", tokens=IDS, ttl_s=30))["reason"] == "the pool does not answer"
        k.client.label, k.room, k.now = "", 5, 10.0
        await k.hints.renew()
        assert k.metric("pins") == 1
        assert (await k.ask("kv.release", "x", action_id="new"))["status"] == "refused", "the newest ends"
        k.client.label = "2"
        await k.hints.renew()
        assert (await k.ask("kv.release", "x", tokens=[1] * 3 * CHUNK))["status"] == "refused"


@scenario
async def test_a_pin_for_one_use_ends_with_its_clients_next_request_that_begins_with_the_prompt():
    k = Kept()
    with closing(k.lookups):
        named = await k.named([*IDS, *IDS])
        for action_id, once in (("used", True), ("kept", False)):
            told = await k.ask("kv.retain", action_id, "ann", tokens=IDS, ttl_s=600, once=once)
            assert told["status"] == "accepted"
        k.begin(Client("ben"), "r", named)
        k.begin(Client("ann"), "r1", named._replace(names=named.names[:2]))
        assert len(k.hints.pins) == 2
        k.begin(Client("ann"), "r2", named)
        assert (await k.ask("kv.release", "x", "ann", action_id="used"))["status"] == "refused"
        assert (await k.ask("kv.release", "x", "ann", action_id="kept"))["released"] == 1


@scenario
async def test_a_master_that_hangs_is_asked_for_the_pools_size_once_at_a_time():
    k, asked, answers = Kept(), [], threading.Event()

    def hangs_then_fails(view):
        asked.append(view)
        answers.wait(60)
        raise OSError("no answer")

    with closing(k.lookups):
        k.hints._pool_bytes = hangs_then_fails
        asking = [asyncio.create_task(k.ask("kv.retain", tokens=IDS, ttl_s=9)) for _ in range(20)]
        await until(lambda: bool(asked), "it is asked")
        for _ in range(100):
            await asyncio.sleep(0)
        answers.set()
        assert {(await one)["reason"] for one in asking} == {
            "the size of the pool is not known: no master has answered"
        }
        assert len(asked) == 1
        k.now, k.hints._pool_bytes = 2.0, lambda view: 100 * k.lookups.chunk_bytes
        assert (await k.ask("kv.retain", tokens=IDS, ttl_s=9))["status"] == "accepted"
        k.now, k.hints._pool_bytes = 4.0, hangs_then_fails
        assert (await k.ask("kv.retain", tokens=IDS, ttl_s=9))["status"] == "accepted", "as large as it was"


def hint_of(text):
    """A message with one hint, of its kind and its payload."""
    kind, _, payload = text.partition(" ")
    return message(
        kind, spelled(payload, IDS=IDS, SHORT=[1] * 255, TEXT=TEXT, MANY=["00" * 16] * 16385, PICTURE=PICTURE)
    )


@pytest.mark.parametrize(
    "sent, reason",
    [
        ('kv.prefetch {"request_id": "r"}', "a node needs the prompt itself"),
        ('kv.prefetch {"tokens": IDS, "prompt": TEXT}', "exactly one of"),
        ('kv.prefetch {"tokens": SHORT}', "no whole chunk"),
        ('kv.prefetch {"tokens": IDS}', "load no prompt before its request comes"),
        ('kv.share {"tokens": IDS}', "kv.share 1.0 is not supported"),
        (message("kv.retain", {"tokens": IDS, "ttl_s": 9}, version="2.0"), "kv.retain 2.0 is not supported"),
        ('kv.retain {"tokens": IDS}', "ttl_s"),
        ('kv.retain {"tokens": IDS, "ttl_s": 0}', "ttl_s"),
        ('kv.retain {"tokens": IDS, "ttl_s": "9"}', "ttl_s"),
        ('kv.retain {"ttl_s": 9}', "exactly one of tokens, prompt, messages, block_hashes, request_id"),
        ('kv.retain {"tokens": IDS, "prompt": TEXT, "ttl_s": 9}', "exactly one of"),
        ('kv.retain {"request_id": "r", "tokens": IDS, "ttl_s": 9}', "exactly one of"),
        ('kv.retain {"request_id": "r", "ttl_s": 9}', "knows no such request of this client"),
        ('kv.retain {"request_id": null, "ttl_s": 9}', "missing"),
        ('kv.retain {"block_hashes": [], "ttl_s": 9}', "no whole chunk"),
        ('kv.retain {"block_hashes": ["xyz"], "ttl_s": 9}', "block_hashes"),
        ('kv.retain {"block_hashes": ["00000000000000000000000000000000"], "ttl_s": 9, "model": "adapter"}', "only prompts for"),
        ('kv.retain {"block_hashes": MANY, "ttl_s": 9}', "length <= 16384"),
        ('kv.retain {"tokens": TEXT, "ttl_s": 9}', "list of token ids"),
        ('kv.retain {"tokens": [1, -1], "ttl_s": 9}', "list of token ids"),
        ('kv.retain {"tokens": null, "ttl_s": 9}', "missing"),
        ('kv.retain {"tokens": SHORT, "ttl_s": 9}', "no whole chunk"),
        ('kv.retain {"tokens": IDS, "ttl_s": 9, "model": "adapter"}', "only prompts for the model base"),
        ('kv.retain {"tokens": IDS, "ttl_s": 9, "cache_salt": 7}', "`cache_salt` must be text"),
        ('kv.retain {"messages": [{"role": "user", "content": [PICTURE]}], "ttl_s": 9}', "cannot be named: no decode node renders chats"),
        ('kv.release {"action_id": "none"}', "no such pin"),
        ('kv.release {"action_id": 7}', "action_id"),
        ('kv.retain {"tokens": IDS, "ttl_s": 9, "once": 1}', "once"),
        ("kv.retain [1]", "Expected `object`"),
        (message("kv.retain", {"tokens": IDS, "ttl_s": 9}, action_id=""), "action_id"),
        (b'{"protocol_version": "0.1", "message_id": "m", "actions": [7]}', "Expected `object`"),
        (b'{"protocol_version": "0.2", "message_id": "m", "actions": []}', None),
        (b'{"protocol_version": "0.1", "message_id": "m", "actions": {}}', None),
        (b'{"protocol_version": "0.1", "message_id": "m", "actions": [' + b",".join([b"1"] * 9) + b"]}", None),
        (b'"hello"', None),
        (b"", None),
    ],
)  # fmt: skip
@scenario
async def test_wrong_hints_are_refused_and_fail_no_completion(sent, reason):
    sent = hint_of(sent) if isinstance(sent, str) else sent
    async with pinning(pool=POOL._replace(model="base")) as c:
        async with c.session.post(c.url + "/hints", data=sent) as response:
            if reason is None:
                assert response.status == 400
                assert (await error_of(response))["code"] == "bad_hints"
            else:
                (action,) = (await response.json())["actions"]
                assert action["status"] == "refused"
                assert reason in action["reason"]
        hints = json.loads(sent or "[]")
        async with c.post({"prompt": IDS, "model": "base", "kv_hints": hints}) as response:
            assert response.status == 200
            told = json.loads(response.headers[HINTS_HEADER])
            assert "kv_hints" in told["error"] if reason is None else len(told["actions"]) == 1
        assert c.metric("pins") == ("request_id" in (reason or "")), "its own prompt"


@scenario
async def test_an_action_with_far_too_many_fields_is_refused_before_objects_are_made_of_them():
    async with pinning() as c:
        action = await c.hint("kv.release", {"action_id": "a"} | {f"x{n}": 1 for n in range(60_000)})
        assert (action["status"], action["reason"]) == ("refused", "The body has more than 1000 fields")


@both_faces
@scenario
async def test_a_completion_may_bring_as_much_as_a_message_of_its_own():
    hints = one_hint("kv.retain", {"tokens": [1] * (LARGEST_HINTS // 3 + 1), "ttl_s": 9})
    body = io.BytesIO(json.dumps({"prompt": IDS, "kv_hints": hints}).encode())
    async with pinning() as c, c.post(data=body) as response:
        assert response.status == 200
        assert json.loads(response.headers[HINTS_HEADER])["error"] == "kv_hints have more than 4194304 bytes"


@asynccontextmanager
async def pinning(decode=1, pool=POOL, **config):
    """A cluster whose pool has room for 1000 pinned chunks."""
    async with cluster(1, decode, **looks_up(Renewing(), pool=pool), **config) as c:
        c.proxy._hints._pool_bytes = lambda view: 4000 * NAMESPACE.chunk_bytes + 1
        for node in c.decode:
            node.tokenize = tokenizes
        yield c


@both_faces
@pytest.mark.parametrize(
    "body, tokens",
    [
        ({"prompt": IDS}, 768),
        ({"prompt": TEXT}, 768),
        ({"messages": CHAT}, 768),
        ({"prompt": [3] * 255}, None),
    ],
)
@scenario
async def test_a_completion_brings_hints_about_itself_and_its_nodes_do_not_get_them(body, tokens):
    async with pinning() as c:
        hints = one_hint("kv.retain", {"ttl_s": 60})
        async with c.post({**body, "kv_hints": hints}) as response:
            assert response.status == 200
            (action,) = json.loads(response.headers[HINTS_HEADER])["actions"]
        assert action.get("tokens") == tokens, action
        for node in (*c.prefill, *c.decode):
            assert all("kv_hints" not in sent for sent in node.bodies)
        target = {"tokens": body["prompt"]} if isinstance(body.get("prompt"), list) else body
        released = (await c.hint("kv.release", target)).get("released")
        assert released == (tokens and 1), "the same prompt from outside"
        async with c.post(body | {"prompt": IDS}) as response:
            assert HINTS_HEADER not in response.headers


@scenario
async def test_hints_need_a_clients_key_lookups_and_a_share(tmp_path):
    sent = {"tokens": IDS, "ttl_s": 60}
    keys, posted = files_of(tmp_path, api_keys="alice alice-has-a-long-key\n"), message("kv.retain", sent)
    async with pinning(**keys) as c, c.session.post(c.url + "/hints", data=posted) as response:
        assert response.status == 401
    async with cluster(**looks_up(Renewing(), 0)) as c:
        for target in (sent, {"request_id": "r", "ttl_s": 60}):
            why = (await c.hint("kv.retain", target))["reason"]
            assert why == "the prompt cannot be named: direct_tokens is 0"
    async with pinning(hints=HintsConfig(max_share=0)) as c:
        assert "max_share is 0" in (await c.hint("kv.retain", sent))["reason"]


@scenario
async def test_a_prompt_is_named_by_its_request_or_by_the_hashes_of_its_blocks():
    hashes = describe_hashes("sha256", "vllm-none-hash", "")
    space = msgspec.structs.replace(NAMESPACE, hash_mode="blocks", hash_seed=hashes)
    blocks = [one.hex() for one in BlockHasher(space.block_size, hashes).hashes(IDS)]
    async with pinning(pool=Pool((space,), "127.0.0.1:1")) as c:
        await c.ask({"prompt": IDS}, headers={"X-Request-Id": "mine"})
        assert (await c.hint("kv.retain", {"request_id": "mine", "ttl_s": 60}))["tokens"] == 768
        assert (await c.hint("kv.release", {"block_hashes": blocks}))["released"] == 1, "the same prompt"
        told = await c.hint("kv.retain", {"block_hashes": blocks, "ttl_s": 60})
        assert (told["status"], told["tokens"], told["in_pool"]) == ("accepted", 768, 512)
        assert (await c.hint("kv.release", {"request_id": "mine"}))["released"] == 1
        assert (await c.hint("kv.release", {"request_id": "another"}))["status"] == "refused"


def test_a_bounded_number_of_requests_is_remembered_for_their_own_clients():
    k = Kept()
    hints = k.hints
    long = NamedPrompt("", 0, names=[b"n"] * (1 << 16))
    k.begin(Client("alice"), "0", long)
    for number in range(1100):
        k.begin(Client("bob"), str(number), long._replace(names=[b"n"]))
    assert len(hints._recent) == 1000
    k.begin(Client("alice"), "1", long)
    k.begin(Client("alice"), "1", long)
    assert hints._recent_chunks == (1 << 16) + 999
    k.begin(Client("alice"), "2", long)
    assert list(hints._recent) == [(Client("alice"), "1"), (Client("alice"), "2")]
    k.lookups.close()


@both_faces
@scenario
async def test_a_prefetched_prompt_is_loaded_by_a_decode_node_and_its_request_goes_there(monkeypatch):
    async with pinning(2, streams=True) as c:
        node = c.decode[0]
        node.script = [hangs]
        told = await c.hint("kv.prefetch", {"tokens": IDS, "model": "tiny", "cache_salt": "s"})
        assert (told["status"], told["node"], told["ttl_s"]) == ("accepted", node.url, 60)
        assert (told["tokens"], told["in_pool"]) == (768, 512)
        assert node.bodies == [{"prompt": IDS, "model": "tiny", "cache_salt": "s", "max_tokens": 1, "temperature": 0, "stream": False, "kv_transfer_params": STREAM}]  # fmt: skip
        await c.ask({"prompt": [8] * 300})
        assert len(c.decode[1].bodies) == 1, "the prefetch counts as work"
        await c.ask({"prompt": [*IDS, 9], "cache_salt": "s"})
        assert len(node.bodies) == 2
        await until(lambda: node.hung_up == 1, "it ends with the answer of a request that begins with it")
        assert not c.proxy._hints.prefetches._under_way

        c.decode[0].script = c.decode[1].script = [answers(503)]
        assert "status 503" in (await c.hint("kv.prefetch", {"tokens": IDS}))["reason"]
        c.decode[0].script = c.decode[1].script = [hangs, hangs, hangs]
        monkeypatch.setattr(prefetches, "PREFETCH_S", 0.5)
        for _ in range(2):
            assert (await c.hint("kv.prefetch", {"tokens": IDS}))["status"] == "accepted"
        assert len(c.proxy._hints.prefetches._under_way) == 1, "the second takes the place of the first"
        await until(lambda: not c.proxy._hints.prefetches._under_way, "it ends with its time")
        monkeypatch.undo()
        assert (await c.hint("kv.prefetch", {"tokens": IDS}))["status"] == "accepted"
    assert sum(one.hung_up for one in c.decode) == 4, "it ends with the proxy"


@scenario
async def test_a_node_without_streams_loads_a_prompt_ahead_by_answering_it_with_one_token(monkeypatch):
    """A model with several layer groups has no streams."""
    windows = msgspec.structs.replace(NAMESPACE, group="1", keeps="a window", tail=1)
    async with pinning(2, POOL._replace(namespaces=(NAMESPACE, windows))) as c:
        prefetch = partial(c.hint, "kv.prefetch", {"tokens": IDS})
        assert "the pool lacks too much of it" in (await prefetch())["reason"]
        c.proxy._lookups._client.found = 768
        c.decode[0].script = c.decode[1].script = [answers(503)]
        with monkeypatch.context() as patient:
            patient.setattr(prefetches, "_REFUSED_S", 60.0)
            assert "status 503" in (await prefetch())["reason"]
        assert not c.proxy._hints.prefetches._under_way
        c.decode[0].script, c.decode[1].script = [hangs, hangs], [hangs, hangs]
        told, again = await asyncio.gather(prefetch(), prefetch())
        assert told["status"] == again["status"] == "accepted", (
            "though the second has taken the place of the first"
        )

        async def fails_late(request):
            await asyncio.sleep(2 * prefetches._REFUSED_S)
            return web.Response(status=500)

        c.decode[0].script, c.decode[1].script = [fails_late], [fails_late]
        assert (await prefetch())["status"] == "accepted"
        await until(lambda: not c.proxy._hints.prefetches._under_way, "it has its place no longer")
        c.decode[0].script, c.decode[1].script = [], []
        told = await prefetch()
        node = next(one for one in c.decode if one.url == told["node"])
        assert (told["status"], told["in_pool"]) == ("accepted", 768)
        assert node.bodies[-1] == {
            "prompt": IDS,
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
            "kv_transfer_params": None,
        }
        await c.ask({"prompt": [*IDS, 9]})
        assert node.bodies[-1]["prompt"] == [*IDS, 9], "its request goes there"
        assert not c.proxy._hints.prefetches._under_way


@scenario
async def test_only_those_who_may_see_nodes_are_given_the_address_of_one(tmp_path):
    files = files_of(
        tmp_path, api_keys="ann key-of-ann-0123456789\n", monitor_keys="eve key-of-eve-0123456789\n"
    )
    async with pinning(streams=True, **files) as c:
        prefetch = partial(c.hint, "kv.prefetch", {"tokens": IDS}, headers=bearer("key-of-ann-0123456789"))
        c.decode[0].script = [hangs]
        told = await prefetch()
        assert (told["status"], "node" in told) == ("accepted", False)
        c.proxy.update(view([], [c.decode[0].url]))  # which takes no streams
        assert "load no prompt before its request" in (await prefetch())["reason"]
        c.proxy._hints._asked, c.proxy._hints._pool = -math.inf, None
        with patch.object(c.proxy._hints, "_pool_bytes", side_effect=OSError("10.0.0.1:9003: refused")):
            retain = c.hint("kv.retain", {"tokens": IDS, "ttl_s": 9}, headers=bearer("key-of-ann-0123456789"))
            assert (await retain)["reason"] == "the size of the pool is not known: no master has answered"


@scenario
async def test_a_hint_that_comes_while_many_prompts_are_looked_up_is_refused_for_that_reason(monkeypatch):
    monkeypatch.setattr("launch.proxy.hops.MAX_WAITING", 0)
    reason = "the prompt cannot be named: 0 others are being looked up; try again"
    async with pinning() as c:
        assert (await c.hint("kv.retain", {"tokens": IDS, "ttl_s": 9}))["reason"] == reason
        hints = one_hint("kv.retain", {"ttl_s": 9})
        async with c.post({"prompt": IDS, "kv_hints": hints}) as response:
            assert json.loads(response.headers[HINTS_HEADER])["actions"][0]["reason"] == reason


@scenario
async def test_nothing_is_prefetched_that_the_pool_does_not_have():
    async with pinning() as c:
        c.proxy._lookups._client.found = 0
        assert (await c.hint("kv.prefetch", {"tokens": IDS}))[
            "reason"
        ] == "the pool has no chunk of the prompt"


@scenario
async def test_no_client_takes_all_prefetches(tmp_path, monkeypatch):
    monkeypatch.setattr(prefetches, "_MOST_PREFETCHED", 4)
    keys = "".join(f"{name} key-of-{name}-0123456789\n" for name in ("ann", "ben", "eve"))
    async with pinning(streams=True, **files_of(tmp_path, api_keys=keys)) as c:
        c.decode[0].default = hangs

        async def prefetch(name, token):
            headers = bearer(f"key-of-{name}-0123456789")
            return (await c.hint("kv.prefetch", {"tokens": [token] * 256}, headers=headers))["status"]

        assert [await prefetch("ann", n) for n in range(3)] == ["accepted", "accepted", "refused"]
        assert [await prefetch("ben", n) for n in (7, 8)] == ["accepted", "refused"]

        asked = []

        async def tokenizes_and_says_so(request):
            asked.append(request.path)
            return await tokenizes(request)

        c.decode[0].tokenize, c.decode[0].default = tokenizes_and_says_so, decodes
        await c.ask({"prompt": "short"}, headers=bearer("key-of-eve-0123456789"))
        assert not asked, "a short prompt of another client is not named"
