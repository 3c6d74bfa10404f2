"""pd-cache as a secondary tier of vLLM's KV offloading: vLLM's own connector, scheduler and tiering manager,
with its copies made on the CPU."""

import uuid
from contextlib import contextmanager

import pytest

from bench.lib.small_models import write_model
from bench.lib.vllm_server import vllm_server
from tests.support.pool import ROOT
from tests.support.waiting import wait_for
from tests.vllm.servers import ARGS, BLOCK, ENV, MODEL_NAME, PROGRAM, Server, begun, connector

PROMPT = 1000
TIMEOUTS = {"exist_ms": 10_000, "get_ms": 20_000, "put_ms": 20_000, "close_ms": 10_000}


@contextmanager
def tiered(model, pool, salt):
    """With the flag as its users write it, apart from the spec, which vLLM's own worker has no CPU for."""
    tier = {
        "type": "PdCacheTierManager",
        "module_path": "pd_cache.adapters.vllm_tier",
        "master": pool.address,
        "namespace": salt,
        "transfer": {"staging_size": "32MiB", "prefault": False, "timeouts": TIMEOUTS},
    }
    spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.support.vllm_cpu_tiering"}
    options = {"cpu_bytes_to_use": 256 << 20, "secondary_tiers": [tier], **spec}
    env, flag = {**ENV, "PYTHONPATH": str(ROOT)}, connector("OffloadingConnector", "kv_both", options)
    with vllm_server(model, MODEL_NAME, ARGS, env, flag, ready_timeout_s=900, program=PROGRAM[0]) as url:
        yield Server(url)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model most of whose layers have a sliding window: vLLM keeps their KV in groups."""
    return write_model(tmp_path_factory.mktemp("tiering") / "gemma3", kind="gemma3", layers=6)


def test_what_one_engine_stored_in_the_pool_a_fresh_one_loads_and_computes_the_same_tokens(
    folder, vllm_pool, new_prompt
):
    """A computes a prompt: vLLM copies its blocks to A's primary tier, and cascades them to ours. B has
    nothing but the pool."""
    salt, before, prompt = uuid.uuid4().hex, vllm_pool.keys(), new_prompt(PROMPT)
    servers = [begun(tiered(folder, vllm_pool, salt)) for _ in "ab"]  # started at the same time
    with servers[0] as first_ready, servers[1] as second_ready:
        a, b = first_ready(), second_ready()
        first = a.complete(prompt)
        assert first.cached == 0
        whole = PROMPT // BLOCK
        cascading = "vllm:kv_offload_tiering_active_cascade_jobs"
        wait_for(
            lambda: len(vllm_pool.keys() - before) >= whole and not a.metric(cascading),
            "all chunks in the pool",
        )
        second = b.complete(prompt)
        assert second.cached == whole * BLOCK
        assert second.tokens == first.tokens
        assert b.metric("vllm:kv_offload_tiering_read_bytes_total") > 0
        # what A has in its own memory it needs no pool for; what B got from the pool is in its primary tier
        # now
        assert b.complete(prompt).tokens == first.tokens
