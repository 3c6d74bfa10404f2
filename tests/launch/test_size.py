"""`pd-cache size`: what it counts of a model, and which files it refuses. tests/vllm/test_size.py compares it
with vLLM."""

import json

import msgspec
import pytest

from launch.operate.size import Size
from tests.support.cli import cli

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA = LLAMA | {"model_type": "gemma3_text", "sliding_window": 1024}
DEEPSEEK = LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def run(config, folder, *more, code=0):
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return cli("size", "--model", file, "--tokens", "1000000", *more, code=code).output


def sized(config, folder, *more):
    return msgspec.json.decode(run(config, folder, "--json", *more), type=Size)


def test_a_token_takes_what_each_kind_of_layers_keeps(tmp_path):
    assert [group.token_bytes for group in sized(LLAMA, tmp_path).groups] == [128 << 10]
    assert [group.token_bytes for group in sized(LLAMA, tmp_path, "--kv-dtype", "fp8").groups] == [64 << 10]
    assert [group.token_bytes for group in sized(DEEPSEEK, tmp_path).groups] == [32 * 576 * 2]
    full, window = sized({"text_config": GEMMA}, tmp_path).groups
    assert (full.layers, full.tail_chunks, window.layers, window.tail_chunks) == (5, 0, 27, 4)


def test_a_load_takes_of_windows_only_the_end(tmp_path):
    size = sized(GEMMA, tmp_path, "--prompt", "8192", "--ttft", "0.5", "--tp", "4")
    assert size.load_bytes == (5 * 32 + 27 * 4) * 256 * 4096
    assert size.link_gbit == pytest.approx(size.load_bytes * 8 / 0.5 / 1e9)
    assert size.staging_bytes == 8 * 256 * (128 << 10) // 4


def test_more_hits_need_a_larger_pool_and_all_of_them_room_for_all_tokens(tmp_path):
    sizes = [sized(LLAMA, tmp_path, "--share", share) for share in ("0", "0.1235", "0.2", "0.33", "0.3734")]
    pools = [size.pool_bytes for size in sizes]
    assert pools == sorted(pools)
    assert pools[0] == 0
    assert pools[-1] == 1_000_000 * (128 << 10) * 9 // 8
    assert sizes[1].pool_share == 0.031, "12.35 % of all tokens are hits in a pool of 5,340 of 170,899 blocks"


def test_a_hit_rate_above_that_of_the_trace_takes_room_for_all_tokens_and_says_so(tmp_path):
    assert sized(LLAMA, tmp_path, "--share", "0.9").pool_bytes == 1_000_000 * (128 << 10) * 9 // 8
    said = run(LLAMA, tmp_path, "--share", "0.9")
    assert (
        "room for all of 1,000,000 different tokens: 90.0% is impossible for FAST'25's conversations" in said
    )


def test_a_models_folder_will_do_and_counts_may_be_short(tmp_path):
    long = sized(LLAMA, tmp_path, "--tokens", "20000000", "--prompt", "128000")
    given = ("size", "--model", tmp_path, "--tokens", "20M", "--prompt", "128k", "--json")
    assert msgspec.json.decode(cli(*given).output, type=Size) == long
    for wrong in ("0", "-1", "20MB", "M", "1e6"):
        assert "expected a number such as 8192, 128k or 20M" in run(
            LLAMA, tmp_path, "--tokens", wrong, code=2
        )


@pytest.mark.parametrize(
    "config, why",
    [
        ({}, "expected num_hidden_layers, num_attention_heads and one of float32, bfloat16, float16, fp8"),
        (LLAMA | {"torch_dtype": "int3"}, "one of float32, bfloat16, float16, fp8, got 32, 32 and int3"),
        (LLAMA | {"layer_types": ["full_attention", "linear_attention"]}, "has layers with a state"),
        (LLAMA | {"hybrid_override_pattern": "M-M*"}, "has layers with a state"),
        (LLAMA | {"num_hidden_layers": "many"}, "expected a model's config.json"),
    ],
)
def test_a_model_that_cannot_be_counted_is_refused(config, why, tmp_path):
    assert why in run(config, tmp_path, code=2)


@pytest.mark.parametrize("ranks", ["3", "64"])
def test_a_tensor_parallel_size_that_vllm_refuses_is_refused(ranks, tmp_path):
    expected = f"--tp {ranks}: expected a divisor of the model's 32 attention heads, and a divisor or a multiple of its 8 KV heads"
    assert expected in run(LLAMA, tmp_path, "--tp", ranks, code=2)


def test_people_read_a_table_and_three_lines(tmp_path):
    output = run(LLAMA, tmp_path)
    assert "131,072" in output
    assert (
        "30.0% of all prompt tokens are hits for FAST'25's conversations, where an unbounded pool has 37.3%"
        in output
    )
    assert [line.partition(":")[0] for line in output.splitlines()[-3:]] == [
        "pool",
        "network",
        "transfer.staging_size",
    ]
