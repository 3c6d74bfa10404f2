"""Engines of other shapes: tensor parallel, other weights, models that cannot be restored, and a whole cluster from one file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bench.model import write_model
from launch.up import quiet
from launch.up import running as running_cluster
from pd_cache.config import read_config
from tests.support.pool import ROOT, Pool
from tests.support.waiting import wait_for
from tests.vllm.fixtures import Pair
from tests.vllm.servers import ARGS, CHUNK, ENV, PdCacheServer, Reference, Server, cluster_file, running

NewPrompt = Callable[[int], list[int]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 1000
WHOLE = LENGTH // CHUNK * CHUNK

PATIENT = {
    "transfer": {
        "staging_size": "32MiB",
        "prefault": False,
        "timeouts": {"exist_ms": 10_000, "get_ms": 10_000, "put_ms": 30_000},
    },
    "connector": {"lookup_timeout_ms": 10_000, "load_timeout_ms": 60_000},
}
"""For more ranks than cores: those of a tensor parallel vLLM wait for each other with `sched_yield` in a loop, and threads that had
work to do, the pool's too, were seen to wait for a core for seconds."""


def test_tensor_parallel_nodes_share_with_each_other_and_with_nodes_of_another_size(
    model: Path, vllm_pool: Pool, plain: Reference, mode: str, new_prompt: NewPrompt, tmp_path: Path
) -> None:
    two = {"args": {"tensor-parallel-size": 2}, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    nodes = {"prefill-0": two, "decode-0": two, "decode-1": {}}
    file = cluster_file(tmp_path, vllm_pool, model, nodes, mode=mode, **PATIENT)
    with running(file, *nodes) as (prefill, *readers):

        def passed_on(reader: PdCacheServer) -> bool:
            prompt = new_prompt(LENGTH)
            assert prefill.complete(prompt).tokens == plain.tokens(prompt)
            wait_for(lambda: not prefill.blocks_in_use, 120)
            answer = reader.complete(prompt)
            assert answer.tokens == plain.tokens(prompt)
            return answer.cached == WHOLE

        for name, reader in zip(("decode-0", "decode-1"), readers, strict=True):
            wait_for(lambda reader=reader: passed_on(reader), 150, f"a prompt of prefill-0 that {name} loads whole")  # type: ignore[misc]


def test_the_same_name_with_other_weights_shares_nothing(
    vllm_pool: Pool, pair: Pair, mode: str, new_prompt: NewPrompt, tmp_path: Path, model: Path
) -> None:
    other = write_model(tmp_path / model.name, seed=1)
    prompt = new_prompt(LENGTH)
    pair.a.complete(prompt)
    wait_for(lambda: not pair.a.blocks_in_use)
    file = cluster_file(tmp_path, vllm_pool, other, {"decode-0": {}}, mode=mode)
    with running(file, "decode-0") as (server,):
        assert server.complete(prompt).cached == 0


def test_token_mode(
    vllm_pool: Pool, plain: Reference, mode: str, new_prompt: NewPrompt, tmp_path: Path, model: Path
) -> None:
    by_tokens = {"chunk_size": CHUNK, "hash_mode": "tokens"}
    file = cluster_file(tmp_path, vllm_pool, model, {"prefill-0": {}}, mode=mode, cache=by_tokens)
    with running(file, "prefill-0") as (server,):
        prompt = new_prompt(LENGTH)
        assert server.complete(prompt).cached == 0
        wait_for(lambda: not server.blocks_in_use)
        for salt, cached in ((None, WHOLE), ("tenant", 0), ("tenant", WHOLE)):
            server.forget_prefixes()
            answer = server.complete(prompt, **({"cache_salt": salt} if salt else {}))
            assert (answer.cached, answer.tokens) == (cached, plain.tokens(prompt))
            wait_for(lambda: not server.blocks_in_use)


@pytest.mark.parametrize(
    ("change", "args", "sections", "message"),
    [
        (
            {"sliding_window": 128, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
            {},
            {},
            "SlidingWindowSpec",
        ),
        ({}, {"block-size": 96}, {}, "must be a multiple of engine.args.block-size 96"),
        ({}, {}, {"transfer": {"staging_size": "64KiB"}}, "transfer.staging_size"),
    ],
    ids=["sliding window", "block size", "staging too small"],
)
def test_what_cannot_work_is_refused_at_start_with_the_reason(
    change: dict[str, object],
    args: dict[str, object],
    sections: dict[str, object],
    message: str,
    model: Path,
    vllm_pool: Pool,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    if change:
        config = json.loads((model / "config.json").read_text())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**config, **change}))
    file = cluster_file(tmp_path, vllm_pool, folder, {"prefill-0": {}}, args=args, **sections)
    server = PdCacheServer("prefill-0", file)
    with pytest.raises(AssertionError, match=re.escape(message)) as refusal:
        server.wait_ready()
    if change:
        assert str(folder) in str(refusal.value), "the model is named"


def test_a_stream_through_the_proxy_of_a_cluster_from_one_file(
    model: Path, plain: Reference, new_prompt: NewPrompt, tmp_path: Path
) -> None:
    tree = yaml.safe_load((ROOT / "configs" / "vllm-local.yaml").read_text())
    tree["engine"]["model"] = str(model)
    tree["engine"]["args"] |= {**ARGS, "max-model-len": 8192, "block-size": 128}
    tree["engine"]["env"] |= ENV
    tree["nodes"][1]["segment_size"] = "256MiB"
    file = tmp_path / "vllm-local.yaml"
    file.write_text(yaml.safe_dump(tree))
    config, source = read_config(file)
    with running_cluster(config, source, sink=quiet) as cluster:
        proxy, decode = Server(cluster.urls["proxy"]), Server(cluster.urls["decode-0"])
        for prompt in (new_prompt(900), new_prompt(100)):
            events = list(proxy.stream(prompt, 12))
            assert len(events) > 6, "tokens come as they are made"
            assert [token for event in events for token in event] == plain.tokens(prompt, 12)

        def loaded() -> float:
            return decode.metric("vllm:pd_cache_tokens_total", op="retrieve", outcome="loaded")

        assert loaded() == 768
        handoffs = "pd_cache_proxy_handoffs_total"
        assert (proxy.metric(handoffs, result="handed_over"), proxy.metric(handoffs, result="short")) == (1, 1)

        assert decode.health()["namespace"]["hash_mode"] == "blocks"
        # words that do not begin with a special token, t0 to t2, which the tokenizer would cut off
        text = " ".join(f"t{3000 + token % 1000}" for token in new_prompt(1000))
        wait_for(lambda: proxy.health()["lookups"] == "on", 30, "the proxy looks into the pool")
        answers = [proxy.chat(text), decode.chat(text)]
        assert answers[0] == answers[1] != ""
        assert loaded() == 2 * 768
        decode.forget_prefixes()
        assert proxy.chat(text) == answers[0]
        assert proxy.metric(handoffs, result="in_pool") == 1, "what the pool holds needs no prefill node"
        assert loaded() == 3 * 768
