"""Prompts with images: nobody gets the KV of another image, whatever names it."""

import base64
import contextlib
import io
import itertools
import json
import random
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from launch.proxy.bodies import Completion
from tests.support.proxy import one_hint
from tests.support.waiting import wait_for
from tests.vllm.media_models import GEMMA, LLAVA, PATCH, QWEN, SIDE, WORDS
from tests.vllm.servers import (
    CHUNK,
    HANDOFF_MS,
    MODEL_NAME,
    PdCacheServer,
    Server,
    before,
    begun,
    by_hand,
    close,
    cluster_file,
    running,
)

BEFORE, AFTER = 90, 210
HASHING = {"enable-prefix-caching": False}
NUMBERING = {**HASHING, "mm-processor-cache-gb": 0}
RENDERING = {"enable-scale-out": True}


class Servers(NamedTuple):
    """One node for each mode of names finds what it has stored itself: vLLM's own prefix cache is off."""

    blocks: PdCacheServer
    decode: PdCacheServer
    """It decodes what `blocks` prefills, and has a prefix cache."""
    tokens: PdCacheServer
    """It trusts names of clients. So does the next one."""
    numbering: PdCacheServer
    plain: Server
    proxy: Server


@contextlib.contextmanager
def looked_up(prefill, decode):
    """A proxy before these nodes of one file."""
    urls = {node.node.name: node.url for node in (prefill, decode)}
    with before(prefill.file, urls, direct_tokens=CHUNK) as proxy:
        looks_up = "the proxy looks up chats with images"
        wait_for(lambda: proxy.ask("/health")["media_lookups"] == "on", looks_up)
        yield proxy


def pair_of(folder, pool, model):
    """The file of a prefill and a decode node, of which only the latter has a prefix cache."""
    nodes = {"prefill-0": {"args": HASHING}, "decode-0": {"args": RENDERING}}
    handoff = {"wait_ms": HANDOFF_MS, "stream": "always"}
    return cluster_file(folder, pool, model, nodes, handoff=handoff)


@pytest.fixture(scope="module")
def servers(vllm_pool, tmp_path_factory):
    model, folder = tmp_path_factory.mktemp("llava"), tmp_path_factory.mktemp("media")
    LLAVA.write(model)
    by_blocks = pair_of(folder, vllm_pool, model)
    by_tokens = cluster_file(
        folder, vllm_pool, model, {"prefill-0": {"args": HASHING}, "prefill-1": {"args": NUMBERING}},
        connector={"trust_media_ids": True}, cache={"chunk_size": CHUNK, "hash_mode": "tokens"},
    )  # fmt: skip
    with (
        begun(by_hand(model, "--no-enable-prefix-caching")) as plain,
        running(by_blocks, by_tokens) as nodes,
        looked_up(*nodes[:2]) as proxy,
    ):
        yield Servers(*nodes, plain(), proxy)


_numbers = itertools.count()


def picture(width=SIDE, height=SIDE):
    """Returns the URL of an image that no other test has used: each of its patches has one colour."""
    patches = np.random.default_rng(next(_numbers)).integers(
        0, 256, (height // PATCH, width // PATCH, 3), np.uint8
    )
    Image.fromarray(patches.repeat(PATCH, 0).repeat(PATCH, 1)).save(file := io.BytesIO(), "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Chat:
    """A text with images, some of which have a client's name."""

    def __init__(self, model=LLAVA):
        self._model = model
        self._rng = random.Random(f"chat {next(_numbers)}")
        self._texts = []
        self._parts = []
        self.tokens = 0

    def text(self, words):
        self._texts += [f"t{self._rng.randrange(10, WORDS)}" for _ in range(words)]
        self.tokens += words
        return self

    def image(self, url, **name):
        self._texts.append(self._model.image)
        self._parts.append({"type": "image_url", "image_url": {"url": url}, **name})
        self.tokens += self._model.tokens
        return self

    def but(self, place, url, **name):
        """The same with another image at this place."""
        other = Chat(self._model)
        other._texts, other.tokens = self._texts, self.tokens
        other._parts = [*self._parts]
        other._parts[place] = {"type": "image_url", "image_url": {"url": url}, **name}
        return other

    def later(self):
        """The same with a word more, right before the first image."""
        other = Chat(self._model)
        place = self._texts.index(self._model.image)
        other._texts = [*self._texts[:place], "t7", *self._texts[place:]]
        other._parts, other.tokens = self._parts, self.tokens + 1
        return other

    @property
    def whole(self):
        """The tokens of its whole chunks."""
        return self.tokens // CHUNK * CHUNK

    def body(self, **fields):
        content = [{"type": "text", "text": " ".join(self._texts)}, *self._parts]
        return {
            "model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0,
            "ignore_eos": True, **fields,
        }  # fmt: skip


class Said(NamedTuple):
    cached: int
    text: str
    reason: str = ""


def ask(server, chat, *, proxied=False, **fields):
    """`proxied`: with the body that the proxy makes of it."""
    body = chat.body(**fields)
    if proxied:
        body = json.loads(Completion(json.dumps(body).encode(), chat=True).for_decode(None))
    answer = server.ask("/v1/chat/completions", body)
    server.settle()
    assert answer["usage"]["prompt_tokens"] == chat.tokens
    cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    report = (answer.get("kv_transfer_params") or {}).get("pd_cache", {}).get("report", {})
    return Said(cached, answer["choices"][0]["message"]["content"], report.get("reason", ""))


def written(server):
    return server.metric("vllm:pd_cache_tokens_total", op="store", outcome="stored")


@pytest.mark.parametrize("mode", ["blocks", "tokens"])
def test_what_is_loaded_of_a_prompt_with_images_is_of_the_same_images_at_the_same_place(servers, mode):
    server, cat, dog = getattr(servers, mode), picture(), picture()
    first = Chat().text(BEFORE).image(cat).text(AFTER)
    two = Chat().text(BEFORE).image(cat).text(AFTER).image(dog).text(AFTER)
    shared, between = BEFORE // CHUNK * CHUNK, (BEFORE + LLAVA.tokens + AFTER) // CHUNK * CHUNK
    answers = []
    for chat, cached in (
        (first, 0),
        (first, first.whole),
        (first.but(0, dog), shared),
        (first.later(), shared),
        (two, 0),
        (two.but(1, cat), between),
        (two.but(0, dog), shared),
        (two, two.whole),
    ):
        said = ask(server, chat, proxied=True)
        assert said[:2] == (cached, ask(servers.plain, chat).text)
        answers.append(said.text)
    assert answers[0] == answers[1]
    assert len({*answers[1:7]}) == 6, "the images decide about the answer"


def test_clients_names_of_images_count_only_within_a_salt_unless_the_file_trusts_them(servers):
    cat, dog = picture(), picture()
    chat, hashed = Chat().text(BEFORE).image(cat, uuid="cat").text(AFTER), "ab" * 32
    before = written(servers.blocks)
    for name in ("cat", hashed):
        assert ask(servers.blocks, chat.but(0, cat, uuid=name))[::2] == (0, "media_unidentified")
    assert ask(servers.blocks, chat.but(0, dog))[::2] == (0, "media_unidentified"), (
        "vLLM's hashes look like names"
    )
    assert written(servers.blocks) == before
    assert (
        servers.blocks.metric("vllm:pd_cache_missed_tokens_total", reason="media_unidentified")
        == 3 * chat.tokens
    )
    for salt, cached in (("mine", 0), ("mine", chat.whole), ("yours", 0)):
        assert ask(servers.blocks, chat, cache_salt=salt).cached == cached
    answer = ask(servers.plain, chat.but(0, dog)).text
    for cached in (0, chat.whole):  # under a name that vLLM knows for another image
        assert ask(servers.blocks, chat.but(0, dog, uuid=hashed), proxied=True)[:2] == (cached, answer)
    for cached in (0, chat.whole):
        assert ask(servers.tokens, chat).cached == cached


def test_images_that_vllm_numbers_are_neither_loaded_nor_stored(servers):
    chat, before = Chat().text(BEFORE).image(picture()).text(AFTER), written(servers.numbering)
    answer = ask(servers.plain, chat).text
    for options in ({}, {"cache_salt": "mine"}, {"proxied": True}):
        assert ask(servers.numbering, chat, **options) == (0, answer, "media_unidentified")
    text = Chat().text(AFTER)
    assert (ask(servers.numbering, text).cached, ask(servers.numbering, text).cached) == (0, text.whole)
    assert written(servers.numbering) == before + text.whole


def test_chats_with_images_come_by_the_proxy_like_texts(servers):
    cat, dog, bird = picture(), picture(), picture()
    # one of vLLM's blocks has tokens of both images
    chat = Chat().text(BEFORE).image(cat).image(cat).text(AFTER)
    later = chat.but(0, bird)

    def went(result):
        return servers.proxy.metric("pd_cache_proxy_handoffs_total", result=result)

    def hinted(kind, chat, **options):
        payload = {"messages": chat.body()["messages"], **options}
        answer = servers.proxy.ask("/hints", one_hint(kind, payload))["actions"][0]
        return answer["status"], answer["in_pool"]

    ask(servers.blocks, later, proxied=True)
    loaded = servers.decode.loaded
    assert hinted("kv.prefetch", later) == ("accepted", chat.whole)
    wait_for(lambda: servers.decode.loaded == loaded + chat.whole, what="the prompt was prefetched")
    for asked, result in (
        (later, "in_pool"),
        (chat, "handed_over"),
        (chat, "in_pool"),
        (chat.but(1, dog), "handed_over"),
        (Chat().text(BEFORE // 2), "short"),
    ):
        before, name = went(result), f"chat-{next(_numbers)}"
        body = asked.body(logprobs=True)
        answer = servers.proxy.ask("/v1/chat/completions", body, {"X-Request-Id": name})
        assert went(result) == before + 1
        assert close(answer["choices"], servers.plain.ask("/v1/chat/completions", body)["choices"])
        for node in (servers.blocks, servers.decode):
            node.settle()
        report = servers.proxy.ask(f"/requests/{name}")["hops"][-1]["report"]
        loaded = report["loaded"] if result == "handed_over" else 0
        assert report["at_hand"] + loaded >= asked.whole, "vLLM has what was prefetched, and what it once had"
    assert hinted("kv.retain", chat, ttl_s=9) == ("accepted", chat.whole)


class Pair(NamedTuple):
    prefill: PdCacheServer
    decode: PdCacheServer
    plain: Server
    proxy: Server


@pytest.fixture(scope="module", params=[QWEN, GEMMA], ids=["qwen", "gemma"])
def images(request, vllm_pool, tmp_path_factory):
    """A model with images, and a prefill and a decode node of it."""
    model = tmp_path_factory.mktemp("model")
    request.param.write(model)
    file = pair_of(tmp_path_factory.mktemp("images"), vllm_pool, model)
    with (
        begun(by_hand(model, "--no-enable-prefix-caching")) as plain,
        running(file) as nodes,
        looked_up(*nodes) as proxy,
    ):
        yield request.param, Pair(*nodes, plain(), proxy)


def test_images_of_models_with_positions_or_windows_of_their_own_come_by_the_proxy(images):
    model, servers = images
    cat, dog, wide = picture(), picture(), picture(2 * SIDE, SIDE // 2)
    chat = Chat(model).text(BEFORE).image(cat).text(AFTER).image(cat).text(AFTER)
    shared, between = BEFORE // CHUNK * CHUNK, (BEFORE + model.tokens + AFTER) // CHUNK * CHUNK
    asked_for = chat, chat.but(0, dog), chat.but(0, wide), chat.later(), chat.but(1, wide)
    # the end of a common beginning is stored with the second prompt that has it, if there are windows
    expected = {QWEN: (0, shared, shared, shared, between), GEMMA: (0, 0, shared, shared, shared)}[model]
    said = []
    for asked, found in zip(asked_for, expected, strict=True):
        name, body = f"images-{next(_numbers)}", asked.body(logprobs=True)
        plain = servers.plain.ask("/v1/chat/completions", body)
        assert plain["usage"]["prompt_tokens"] == asked.tokens
        answer = servers.proxy.ask("/v1/chat/completions", body, {"X-Request-Id": name})
        assert close(answer["choices"], plain["choices"])
        parts = list(servers.proxy.choices("/v1/chat/completions", {**body, "stream": True}))
        streamed = [token for part in parts if part["logprobs"] for token in part["logprobs"]["content"]]
        assert close(streamed, plain["choices"][0]["logprobs"]["content"])
        for node in (servers.prefill, servers.decode):
            node.settle()
        prefilled, decoded = (hop["report"] for hop in servers.proxy.ask(f"/requests/{name}")["hops"])
        assert prefilled["loaded"] == found
        assert decoded["at_hand"] + decoded["loaded"] >= asked.whole
        said.append(plain["choices"])
    assert not any(itertools.starmap(close, itertools.combinations(said, 2))), (
        "the images decide about the answer"
    )
