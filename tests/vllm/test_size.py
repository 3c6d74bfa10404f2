"""What `pd-cache size` counts, against what vLLM's connector stores and loads."""

import pytest

from bench.lib.small_models import write_model
from launch.operate.size import size_of
from tests.vllm.servers import DTYPE, cluster_file, running

_TOKENS = 1100
_KINDS = ("llama", "gemma3")
_CHUNK = {"chunk_size": 256, "shards": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / kind, kind=kind, layers=6) for kind in _KINDS]


def test_a_prompt_takes_as_much_as_was_counted(models, vllm_pool, new_prompt, tmp_path):
    files = [cluster_file(tmp_path, vllm_pool, model, {"prefill-0": {}}, cache=_CHUNK) for model in models]
    with running(*files) as servers:
        for model, server in zip(models, servers, strict=True):
            size = size_of(
                model / "config.json", tokens=1, share=0, prompt=_TOKENS, ttft_s=1, ranks=1, kv_dtype=DTYPE
            )
            prompt = new_prompt(_TOKENS)
            server.store(prompt)
            stored = server.metric("vllm:pd_cache_bytes_total", op="store")
            assert size.load_bytes <= stored <= size.stored_bytes, model
            server.forget_prefixes()
            server.store(prompt)
            assert server.metric("vllm:pd_cache_bytes_total", op="retrieve") == size.load_bytes, model
