"""Everything that clients and operators reach by the proxy, once, with vLLM behind it: one cluster from one
file, as `pd-cache up` runs it."""

import itertools
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from launch.proxy.bodies import tenant_salt
from launch.proxy.gateway.picker import ENDPOINT
from launch.proxy.routing.roles import read_metrics
from launch.run.up import quiet
from launch.run.up import running as running_cluster
from pd_cache.cluster import dump_config, read_config
from tests.support.adapter import write_adapter
from tests.support.cli import cli, cli_json
from tests.support.cluster import fetched, with_ports
from tests.support.pool import ROOT, Node, free_port
from tests.support.proxy import bearer, files_of, one_hint
from tests.support.waiting import wait_for
from tests.vllm.servers import (
    ARGS,
    CHUNK,
    ENV,
    MODEL_NAME,
    PROGRAM,
    Server,
    close,
    whole_chunks,
)

PLAIN, OF_A, OF_B, GATE, NODES = (
    f"key-of-{name}-0123456789" for name in ("nobody", "a", "b", "gate", "nodes")
)
LENGTH = 300
WHOLE = whole_chunks(LENGTH)
LONGEST = {"prefill-0": 2048, "decode-0": 4096}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.description }} {% endfor %}"
    "{{ preface or '' }} {% for message in messages %}{{ message['content'] }} {% endfor %}"
)
_numbers = itertools.count()


class Served(NamedTuple):
    file: Path
    proxy: Server
    prefill: Server
    decode: Server

    def went(self, result):
        """How many prompts the decode node was given so."""
        return self.proxy.metric("pd_cache_proxy_handoffs_total", result=result)

    def hops(self, request_id):
        """What nodes reported of a request of PLAIN."""
        return {hop["hop"]: hop["report"] for hop in self.proxy.ask(f"/requests/{request_id}")["hops"]}

    def asked(self, body, path="/v1/completions", **headers):
        """The proxy's answer, whatever its status."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return fetched(
            self.proxy.url + path, {**BODY, **body}, headers={**bearer(PLAIN), **named}, timeout=600
        )

    def cached(self, prompt, key=PLAIN, salt=None, **headers):
        """How many of a prompt's tokens any of the nodes had. It is stored afterwards."""
        name = f"request-{next(_numbers)}"
        body = {"prompt": prompt, **({"cache_salt": salt} if salt is not None else {})}
        answer = self.asked(body, **bearer(key), X_Request_Id=name, **headers)
        assert answer.status == 200, answer
        self.settle()
        hop = fetched(f"{self.proxy.url}/requests/{name}", headers=bearer(key)).body["hops"][0]
        return int(hop["report"]["at_hand"] + hop["report"]["loaded"])

    def settle(self):
        self.prefill.settle()
        self.decode.settle()

    def agrees(self, body, path="/v1/completions", **headers):
        """The proxy's answer, which is that of the decode node to the same request with a salt that nobody
        else has."""
        answer = self.asked(body, path, **headers)
        alone = self.decode.ask(path, {**BODY, **body, "cache_salt": f"alone-{next(_numbers)}"})
        assert answer.status == 200, answer
        assert close(answer.body["choices"], alone["choices"])
        assert answer.body["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
        return answer.body


BODY = {"model": MODEL_NAME, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxy")
    (folder / "template").write_text(TEMPLATE)
    tree = yaml.safe_load((ROOT / "configs" / "vllm-local.yaml").read_text())
    tree["engine"] |= {"model": str(model), "executable": PROGRAM[0]}
    tree["engine"]["args"] |= {
        **ARGS, "max-num-batched-tokens": 1024, "enable-lora": True, "scheduling-policy": "priority", "chat-template": str(folder / "template"),
        "trust-request-chat-template": True,
    }  # fmt: skip
    tree["engine"]["env"] |= {**ENV, "VLLM_API_KEY": NODES}
    tree["cache"]["chunk_size"] = CHUNK
    tree["nodes"][1]["segment_size"] = "64MiB"
    tree["nodes"].append({"name": "store-1", "role": "store", "segment_size": "64MiB"})
    for node in tree["nodes"]:
        if node["name"] in LONGEST:
            node["args"] = {"max-model-len": LONGEST[node["name"]]}
    keys = f"pat {PLAIN}\nann {OF_A} a\nben {OF_B} b\ngate {GATE} @X-Tenant\n"
    (folder / "node_key").write_text(NODES)
    tree["proxy"] = {
        **files_of(folder, api_keys=keys, tenants="tenants: {a: {}, b: {}}"), "node_key_file": str(folder / "node_key"),
        "direct_tokens": 2 * CHUNK, "hints": {"max_share": 0.5},
    }  # fmt: skip
    # no deadline is met too late because the machine is busy
    tree["transfer"]["timeouts"] = {"exist_ms": 10_000}
    tree["connector"] |= {"load": "always", "lookup_timeout_ms": 10_000, "load_timeout_ms": 60_000}
    tree["handoff"] = {"wait_ms": 60_000, "stream": "always"}
    file = folder / "vllm-local.yaml"
    file.write_text(yaml.safe_dump(tree))
    file.write_text(dump_config(with_ports(read_config(file)[0])))
    config, source = read_config(file)
    with running_cluster(config, source, sink=quiet) as cluster:
        proxy = Server(cluster.urls["proxy"], bearer(PLAIN))
        prefill, decode = (Server(cluster.urls[name], bearer(NODES)) for name in LONGEST)
        wait_for(lambda: proxy.ask("/health")["lookups"] == "on", "the proxy looks into the pool")
        yield Served(file, proxy, prefill, decode)


def words(tokens):
    """As a text. Its words do not begin with a special token, t0 to t2, which the tokenizer would cut off."""
    return " ".join(f"t{3000 + token % 1000}" for token in tokens)


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


# --- whose request it is ------------------------------------------------------------------------------------


def test_clients_need_a_key_which_nodes_do_not_get(served, new_prompt):
    body = {"prompt": new_prompt(5)}
    for given, status in ((bearer("wrong"), 401), (bearer(NODES), 401), (bearer(PLAIN), 200)):
        assert served.asked(body, **given).status == status
    assert (
        fetched(f"{served.decode.url}/v1/completions", {**BODY, **body}, headers=bearer(PLAIN)).status == 401
    )


def test_nobody_finds_a_tenants_prompts_but_the_tenant_by_its_key_or_its_gateway(served, plain, new_prompt):
    prompt = new_prompt(LENGTH)
    assert served.cached(prompt, OF_A) == 0
    assert served.cached(prompt, GATE, X_Tenant="a") >= WHOLE
    for key, tenant in ((PLAIN, None), (OF_B, "b")):
        assert served.cached(prompt, key) == 0
        assert served.cached(prompt, GATE, X_Tenant=tenant or "a") >= WHOLE
    for key in (OF_A, OF_B, PLAIN):
        answer = served.asked({"prompt": prompt, "return_token_ids": True}, **bearer(key))
        assert answer.body["choices"][0]["token_ids"] == plain.tokens(prompt)
    assert served.asked({"prompt": prompt}, **bearer(GATE, X_Tenant="c")).status == 403


@pytest.mark.parametrize("salt", ["own", "é" * 500, "/@\\\0"], ids=["short", "long", "odd"])
def test_a_tenants_own_salts_may_be_any_text(served, new_prompt, salt):
    prompt = new_prompt(LENGTH)
    assert served.cached(prompt, OF_A, salt) == 0
    assert served.cached(prompt, OF_A) == 0
    assert served.cached(prompt, OF_A, salt + "x") == 0
    assert served.cached(prompt, OF_A, salt) >= WHOLE


def test_without_a_tenant_salts_are_vllms_and_none_is_a_tenants(served, new_prompt):
    prompt = new_prompt(LENGTH)
    for salt, cached in (("x" * 128, False), ("x" * 127, False), ("x" * 128, True)):
        assert (served.cached(prompt, PLAIN, salt) >= WHOLE) == cached
    for salt in ("x" * 129, "a/b", "", tenant_salt(None, "a")):
        answer = served.asked({"prompt": prompt, "cache_salt": salt})
        assert answer.status == 400
        assert "cache_salt" in answer.body["error"]["message"]


# --- what a request may ask for -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, went",
    [
        ({}, "handed_over"),
        ({"n": 3, "temperature": 1, "seed": 5}, "handed_over"),
        ({"best_of": 3}, "handed_over"),
        ({"use_beam_search": True, "n": 2}, "handed_over"),
        ({"logprobs": 3}, "handed_over"),
        ({"logprobs": 1, "logprob_token_ids": [7, 8]}, "handed_over"),
        ({"echo": True}, "handed_over"),
        ({"echo": True, "logprobs": 2}, "scored"),
        ({"echo": True, "logprobs": 2, "max_tokens": 0}, "scored"),
        ({"prompt_logprobs": 2}, "scored"),
        ({"min_tokens": 4, "stop": ["t"], "ignore_eos": False}, "handed_over"),
        ({"priority": -5}, "handed_over"),
        ({"truncate_prompt_tokens": 200}, "handed_over"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_a_completion_is_that_of_the_decode_node_alone_and_its_prefill_computes_one_token(
    served, new_prompt, fields, went
):
    prompt = new_prompt(LENGTH)
    before = served.went(went), served.prefill.metric("vllm:generation_tokens_total")
    served.agrees({"prompt": prompt, **fields})
    assert served.went(went) == before[0] + 1
    computed = served.prefill.metric("vllm:generation_tokens_total") - before[1]
    assert computed == (went == "handed_over")
    served.agrees({"prompt": prompt, **fields})  # now that the pool has it
    served.settle()


def test_a_list_of_prompts_is_answered_as_by_the_decode_node_alone(served, new_prompt):
    ids = [new_prompt(LENGTH), new_prompt(LENGTH + 200), new_prompt(9)]
    late = served.decode.metric("vllm:pd_cache_troubles_total", op="lookup", reason="deadline")
    for prompts in (ids, [words(one) for one in ids]):
        for _ in range(2):
            assert len(served.agrees({"prompt": prompts})["choices"]) == len(ids)
            served.settle()
    assert served.decode.metric("vllm:pd_cache_troubles_total", op="lookup", reason="deadline") == late


def test_a_text_and_a_chat_are_known_to_the_pool_by_their_tokens(served, new_prompt):
    tool = {"type": "function", "function": {"name": "f", "description": words(new_prompt(LENGTH))}}
    template = "{% for message in messages %}t3000 {{ message['content'] }} {% endfor %}"
    hello = words(new_prompt(20))
    for path, body in (
        ("/v1/completions", {"prompt": words(new_prompt(LENGTH))}),
        (
            "/v1/chat/completions",
            chat(words(new_prompt(LENGTH)), logprobs=True, top_logprobs=2, n=2, temperature=1, seed=5),
        ),
        ("/v1/chat/completions", chat(hello, tools=[tool], tool_choice="none")),
        ("/v1/chat/completions", chat(hello, chat_template_kwargs={"preface": words(new_prompt(LENGTH))})),
        ("/v1/chat/completions", chat(words(new_prompt(LENGTH)), chat_template=template)),
        ("/v1/chat/completions", chat(words(new_prompt(LENGTH)), max_tokens=None, max_completion_tokens=3)),
    ):
        for went in ("handed_over", "in_pool"):
            before = served.went(went)
            served.agrees(body, path)
            assert served.went(went) == before + 1, body
            served.settle()


def test_a_stream_has_the_tokens_as_they_are_made(served, plain, new_prompt):
    for prompt in (new_prompt(900), new_prompt(50)):
        events = served.proxy.stream(prompt, 12)
        assert len(events) > 6
        assert [token for event in events for token in event] == plain.tokens(prompt, 12)
    text = words(new_prompt(LENGTH))
    assert served.proxy.chat(text) == served.decode.chat(text) != ""


def test_the_list_of_models_is_the_decode_nodes(served):
    (ours,), (theirs,) = (one.ask("/v1/models")["data"] for one in (served.proxy, served.decode))
    assert (
        (ours["id"], ours["max_model_len"]) == (theirs["id"], theirs["max_model_len"]) == (MODEL_NAME, 4096)
    )


def test_a_prompt_that_is_too_long_for_the_prefill_node_only_is_computed_by_the_decode_node(
    served, plain, new_prompt
):
    prompt, refused = new_prompt(2100), served.went("prefill_refused")
    assert served.agrees({"prompt": prompt, "return_token_ids": True})["choices"][0][
        "token_ids"
    ] == plain.tokens(prompt)
    assert served.went("prefill_refused") == refused + 1
    answer = served.asked({"prompt": new_prompt(4200)})
    assert answer.status == 400
    assert "4096" in answer.body["error"]["message"], "the decode node's words"


def test_an_adapter_is_served_by_its_name_also_if_only_the_decode_node_has_it(
    served, model, new_prompt, tmp_path
):
    prompt = new_prompt(LENGTH)
    folder = str(write_adapter(tmp_path / "adapter", model, seed=1))
    base = served.agrees({"prompt": prompt})["choices"]
    assert served.asked({"prompt": prompt, "model": "other"}).status == 404
    for node in (served.decode, served.prefill):
        node.ask("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": folder})
        for _ in range(3):
            assert served.agrees({"prompt": prompt, "model": "other"})["choices"] != base
            served.settle()
    assert served.agrees({"prompt": prompt})["choices"] == base
    assert {one["id"] for one in served.proxy.ask("/v1/models")["data"]} == {MODEL_NAME, "other"}


def test_a_client_that_leaves_ends_its_request_at_both_nodes(served, plain, new_prompt):
    prompts = [new_prompt(2000), new_prompt(1500)]

    def computed():
        return served.prefill.metric("vllm:prompt_tokens_total")

    before = computed()
    with served.proxy.abandoned(prompts[0]):
        # a busy machine may look only when the prefill is over
        wait_for(lambda: served.prefill.blocks_in_use or computed() > before, "the prefill")
    with served.proxy.abandoned(prompts[1], 2000):
        wait_for(lambda: served.decode.metric("vllm:generation_tokens_total") > 0, "the answer")
    for node in (served.prefill, served.decode):
        wait_for(lambda node=node: not node.metric("vllm:num_requests_running"), "the end")
    served.settle()
    for prompt in prompts:
        assert served.proxy.complete(prompt).tokens == plain.tokens(prompt)


def test_the_proxy_reads_from_a_nodes_metrics_what_it_does(served, new_prompt):
    def report():
        with urllib.request.urlopen(served.decode.url + "/metrics", timeout=600) as page:
            return read_metrics(page.read(), 0)

    before = report()
    assert not before.busy
    with served.proxy.abandoned(new_prompt(1500), 2000):
        wait_for(lambda: report().running and report().used, "the answer")
    served.settle()
    served.proxy.complete(new_prompt(100))
    after = report()
    assert after.ended > before.ended
    assert after.tokens > before.tokens
    assert after.token_s > before.token_s


def test_beyond_its_limits_a_tenant_is_refused_and_another_is_answered(served, plain, new_prompt):
    file = served.file.parent / "tenants"
    prompts, text = [new_prompt(LENGTH) for _ in range(6)], file.read_text()

    def crowd(key):
        with ThreadPoolExecutor(len(prompts)) as threads:
            bodies = [{"prompt": prompt, "stream": True} for prompt in prompts]  # only streams are measured
            return list(threads.map(lambda body: served.asked(body, **bearer(key)), bodies))

    def refused():
        return [answer for answer in crowd(OF_A) if answer.status == 429]

    file.write_text("tenants: {a: {limits: {ttft_s: 0.001}}, b: {limits: {ttft_s: 600, token_s: 60}}}")
    try:
        (late, *_) = wait_for(refused, "one that would be late")
        assert late.body["error"]["code"] == "over_ttft_s"
        assert int(late.headers["Retry-After"]) >= 1
        assert [answer.status for answer in crowd(OF_B)] == [200] * len(prompts)
        alone = served.asked({"prompt": prompts[0], "return_token_ids": True}, **bearer(OF_A))
        assert alone.body["choices"][0]["token_ids"] == plain.tokens(prompts[0])
    finally:
        file.write_text(text)


# --- behind Envoy -------------------------------------------------------------------------------------------


def test_through_envoy_answers_and_handoffs_are_the_same_whatever_node_the_client_names(
    served, plain, new_prompt, tmp_path
):
    tree = yaml.safe_load(served.file.read_text())
    tree["proxy"]["gateway"] = "envoy"
    next(node for node in tree["nodes"] if node["role"] == "proxy")["port"] = free_port()
    file = tmp_path / "envoy.yaml"
    file.write_text(yaml.safe_dump(tree))
    named = {ENDPOINT: served.prefill.url.removeprefix("http://")}
    with Node("proxy", "proxy", file) as node:
        through = served._replace(file=file, proxy=Server(node.address, bearer(PLAIN, **named)))
        wait_for(lambda: through.proxy.ask("/health")["lookups"] == "on", "the proxy looks into the pool")
        computed = served.prefill.metric("vllm:generation_tokens_total")
        through.agrees({"prompt": new_prompt(LENGTH)}, X_Request_Id="through", **named)
        through.agrees(chat(words(new_prompt(LENGTH)), logprobs=True), "/v1/chat/completions", **named)
        prompt, text = new_prompt(LENGTH), words(new_prompt(LENGTH))
        events = through.proxy.stream(prompt, 12)
        assert len(events) > 6
        assert [token for event in events for token in event] == plain.tokens(prompt, 12)
        assert through.proxy.chat(text) == served.decode.chat(text) != ""
        assert through.went("handed_over") == 4
        assert served.prefill.metric("vllm:generation_tokens_total") == computed + 4, "one for each prompt"
        hops = {hop["hop"]: hop["report"] for hop in cli_json("explain", "through", "-c", file)["hops"]}
        assert all(hops[hop]["asked"] == LENGTH for hop in ("prefill", "decode"))
        assert hops["decode"]["at_hand"] + hops["decode"]["loaded"] == WHOLE
        served.settle()


# --- hints --------------------------------------------------------------------------------------------------


def hint(served, kind, **payload):
    """The answer to one action."""
    return dict(served.proxy.ask("/hints", one_hint(f"kv.{kind}", payload))["actions"][0])


def targets(name, tokens):
    """A path and a body of a request, and by what hints name its prompt."""
    text = words(tokens)
    return {
        "tokens": ("/v1/completions", {"prompt": tokens}, {"tokens": tokens}),
        "prompt": ("/v1/completions", {"prompt": text}, {"prompt": text}),
        "messages": ("/v1/chat/completions", chat(text), chat(text)),
        "request_id": ("/v1/completions", {"prompt": tokens}, {"request_id": "hinted"}),
    }[name]


@pytest.mark.parametrize("by", ["tokens", "prompt", "messages", "request_id"])
def test_a_prompt_is_retained_released_and_prefetched(served, new_prompt, by):
    path, body, target = targets(by, new_prompt(LENGTH))
    first = served.asked(body, path, X_Request_Id="hinted")
    served.settle()
    told = hint(served, "retain", ttl_s=60, **target)
    assert (told["status"], told["tokens"], told["in_pool"]) == ("accepted", WHOLE, WHOLE)
    assert served.proxy.metric("pd_cache_proxy_pins") == 1
    assert hint(served, "release", **target)["released"] == 1
    assert served.proxy.metric("pd_cache_proxy_pins") == 0

    served.decode.forget_prefixes()
    loaded = served.decode.loaded
    told = hint(served, "prefetch", **target)
    if by == "request_id":
        assert told["status"] == "refused"
        return
    assert (told["status"], told["in_pool"]) == ("accepted", WHOLE)
    wait_for(lambda: served.decode.loaded == loaded + WHOLE, "it is loaded before its request comes")
    again = served.asked(body, path)
    assert close(again.body["choices"], first.body["choices"])
    assert served.decode.loaded == loaded + WHOLE, "the request finds it in vLLM's own cache"
    served.settle()


def test_a_hint_in_a_body_is_about_its_prompt_and_vllm_does_not_get_it(served, new_prompt):
    body = {"prompt": new_prompt(LENGTH)}
    answer = served.asked({**body, "kv_hints": one_hint("kv.retain", {"ttl_s": 60, "once": True}, "b")})
    (told,) = json.loads(answer.headers["X-KV-Hints"])["actions"]
    assert (answer.status, told["status"], told["tokens"]) == (200, "accepted", WHOLE)
    served.asked(body)
    assert hint(served, "release", action_id="b")["status"] == "refused", "it was for one request"


# --- what operators see and do ------------------------------------------------------------------------------


def test_explain_says_of_each_node_what_it_had(served, new_prompt, tmp_path):
    prompt = new_prompt(LENGTH)
    for name, hops in (("ex-1", {"prefill", "decode"}), ("ex-2", {"decode"})):
        served.asked({"prompt": prompt}, X_Request_Id=name)
        served.settle()
        told = cli_json("explain", name, "-c", served.file)["hops"]
        assert {hop["hop"] for hop in told if hop["report"]} == hops
        assert {hop["report"]["asked"] for hop in told} == {LENGTH}
    (tmp_path / "prompt").write_text(json.dumps(prompt))
    told = cli_json("explain", "--prompt", tmp_path / "prompt", "-c", served.file)
    assert [one["found"] for one in told["nodes"]] == [WHOLE, WHOLE]


def test_a_store_is_drained_and_the_pool_listed_and_emptied_and_answers_stay_the_same(
    served, plain, new_prompt
):
    prompt = new_prompt(LENGTH)
    cli("pool", "rm", MODEL_NAME, "--yes", "-c", served.file)
    served.prefill.forget_prefixes()
    served.decode.forget_prefixes()
    assert served.cached(prompt) == 0
    (space,) = cli_json("pool", "ls", "-c", served.file)["namespaces"]
    assert (space["model"], space["objects"], sorted(space["nodes"])) == (
        MODEL_NAME,
        WHOLE // CHUNK,
        ["decode-0", "prefill-0"],
    )
    assert MODEL_NAME in cli("pool", "ls", "-c", served.file).stdout
    assert "drained" in cli("drain", "store-0", "-c", served.file).stdout
    for found in (WHOLE, 0):
        served.prefill.forget_prefixes()
        served.decode.forget_prefixes()
        loaded = served.decode.loaded
        answer = served.proxy.complete(prompt)
        assert answer.tokens == plain.tokens(prompt)
        if found:
            assert served.decode.loaded == loaded + found
            assert "objects removed" in cli("pool", "rm", MODEL_NAME, "--yes", "-c", served.file).stdout
        served.settle()
