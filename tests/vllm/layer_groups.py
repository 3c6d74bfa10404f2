"""The layer groups that vLLM 0.32 or 0.33 makes; no model runs."""

import importlib
from types import SimpleNamespace

import torch

BLOCK = 256
"""Tokens per block, for the layers that keep every token."""


def vllm_config(layout="BLHNC"):
    """Returns the part of vLLM's settings that the functions below read. `layout` names a layout of KV
    tensors."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    cache = SimpleNamespace(
        block_size=BLOCK,
        enable_prefix_caching=True,
        prefix_match_unit=None,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=None,
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
    )
    return SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, data_parallel_index=0),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )


def layer_specs(layers):
    """Returns the specs of the first layers of DeepSeek-V4-Flash, by name (`vllm/models/deepseek_v4`). Every
    layer has a window. All layers but two also keep compressed tokens, and a compressor's state, which vLLM
    treats as a window. Layers of ratio 4 have an indexer, with the same two specs."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    def kept(ratio, size):
        return MLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, max_tp_shards=1, head_size=size, dtype=torch.uint8, tokens_per_state=ratio, alignment=576
        )  # fmt: skip

    def window(block, size, tokens, dtype):
        return SlidingWindowMLASpec(
            block_size=block, num_kv_heads=1, max_tp_shards=1, head_size=size, dtype=dtype, sliding_window=tokens, alignment=576
        )  # fmt: skip

    specs = {}
    for number in range(layers):
        name, ratio = f"layers.{number}", 0 if number < 2 else (4, 128)[number % 2]
        specs[f"{name}.window"] = window(64, 584, 128, torch.uint8)
        if ratio:
            specs[f"{name}.kept"] = kept(ratio, 584)
            specs[f"{name}.state"] = window(*((4, 2048, 8) if ratio == 4 else (8, 1024, 128)), torch.float32)
        if ratio == 4:
            specs |= {f"{name}.index": kept(4, 132), f"{name}.index_state": window(4, 512, 8, torch.float32)}
    return specs


def planning():
    """Returns vLLM's module that makes groups of layers."""
    from vllm.v1.core import kv_cache_utils

    if hasattr(kv_cache_utils, "get_kv_cache_groups"):
        return kv_cache_utils
    return importlib.import_module("vllm.v1.core.kv_cache_planning")  # since vLLM 0.33
