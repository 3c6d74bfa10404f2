"""Lookups of a model with many layer groups: the groups that vLLM makes of DeepSeek-V4-Flash's layers, and
the lookup of vLLM's own MooncakeStoreConnector. Needs vLLM 0.32 or 0.33 here; no model runs."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from pd_cache.chunks import CacheMetadata, LayerGroup
from pd_cache.vllm.layers import NO_DRAFT, kept_layers, parts_of, specs_of

BLOCK = 256
"""Tokens per block, for the layers that keep every token."""
_LAYERS = 43


def vllm_config(layout: str = "BLHNC") -> Any:
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
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"lookup_rpc_port": os.getpid()}),
        speculative_config=None,
    )


def layer_groups(config: Any) -> list[Any]:
    """Returns the groups that vLLM makes."""
    return list(planning().get_kv_cache_groups(config, layer_specs(_LAYERS)))


def layer_specs(layers: int) -> dict[str, Any]:
    """Returns the specs of the first layers, by name (`vllm/models/deepseek_v4`). Every layer has a window.
    All layers but two also keep compressed tokens, and a compressor's state, which vLLM treats as a window.
    Layers of ratio 4 have an indexer, with the same two specs."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    def kept(ratio: int, size: int) -> Any:
        return MLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, max_tp_shards=1, head_size=size, dtype=torch.uint8, tokens_per_state=ratio, alignment=576
        )  # fmt: skip

    def window(block: int, size: int, tokens: int, dtype: torch.dtype) -> Any:
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


def planning() -> Any:
    """Returns vLLM's module that makes groups of layers."""
    from vllm.v1.core import kv_cache_utils

    if hasattr(kv_cache_utils, "get_kv_cache_groups"):
        return kv_cache_utils
    return importlib.import_module("vllm.v1.core.kv_cache_planning")  # since vLLM 0.33


def metadata_of(model: str, groups: Sequence[Any]) -> list[CacheMetadata]:
    """Returns the metadata that the connector for vLLM would make of the parts of these groups."""
    config: Any = SimpleNamespace(kv_cache_groups=groups)
    return [
        CacheMetadata(
            model=model,
            kv_dtype="uint8",
            page_format="opaque",
            layers=len(names),
            block_size=BLOCK // part.kept_blocks(BLOCK),
            page_bytes=specs_of(groups[kept.number])[names[0]].page_size_bytes,
            group=LayerGroup(layers=names[0], keeps=part.kind, tail=part.tail(BLOCK)),
        )
        for kept in kept_layers(config)
        for part, names in parts_of(kept, config, NO_DRAFT)
    ]


@contextmanager
def their_lookup(raw: Any, config: Any, groups: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields vLLM's `LookupKeyClient`, which asks over ZMQ, and the `MooncakeStoreWorker` that answers. The
    worker runs on a thread of this process.

    The worker has only the attributes that its `lookup` uses, made by its own methods. It asks the master
    through `raw`.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import coordinator, data, metrics, worker
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig

    kv = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    sizes = kv_cache_utils.resolve_kv_cache_block_sizes(kv, config)
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config([kv])
    kv.cache_hit_alignment_tokens = kv_cache_utils.resolve_cache_hit_alignment_tokens(
        scheduler, config, *sizes
    )
    answering = worker.MooncakeStoreWorker.__new__(worker.MooncakeStoreWorker)
    answering.store, answering._capacity_only, answering.hash_block_size = raw, False, sizes[1]
    vars(answering).update(tp_rank=0, tp_size=1, pcp_size=1, dcp_size=1, pp_size=1)
    answering.coord = coordinator.MooncakeStoreCoordinator.from_kv_cache_config(kv, config, *sizes)
    answering._kv_cache_groups = answering.coord.kv_cache_groups
    answering._group_tp_replication_factors = (1,) * len(groups)
    answering.token_dbs = answering._build_token_databases(data.KeyMetadata("bench", 0, 0, 0, 0), None)
    answering._init_lookup_key_prefixes()
    answering.kv_connector_stats = metrics.MooncakeStoreConnectorStats()
    answering._kv_connector_stats_lock = threading.Lock()
    server, client = worker.LookupKeyServer(answering, config), worker.LookupKeyClient(config)
    try:
        yield client, answering
    finally:
        client.close()
        server.running = False


def keys_of(worker: Any, lookup: Callable[[], object]) -> list[str]:
    """Returns the keys that a lookup asks the pool for."""
    asked: list[str] = []

    def note(keys: list[str]) -> list[int]:
        asked.extend(keys)
        return [0] * len(keys)

    raw, worker.store = worker.store, SimpleNamespace(batch_is_exist=note)
    try:
        lookup()
    finally:
        worker.store = raw
    return asked
