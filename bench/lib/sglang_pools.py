"""A host pool of SGLang's on a CPU, and backends over it."""

from __future__ import annotations

import importlib
from typing import Any

import torch

_libraries: list[Any] = []


def host_pool(*, pages: int, tokens: int, layers: int) -> Any:
    """Returns a host pool of random bytes for a model with 8 KV heads of 128 in bf16."""
    if not _libraries:
        # SGLang imports torchvision, whose operators come with CUDA builds of torch only; it needs their names, and calls none here
        library: Any = torch.library.Library
        _libraries.append(library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _libraries[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = [torch.zeros((tokens, 8, 128), dtype=torch.bfloat16) for _ in range(2 * layers)]
    tables = [
        torch.tensor([one.data_ptr() for one in half], dtype=torch.uint64) for half in (device[::2], device[1::2])
    ]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(device[::2]),
            v=tuple(device[1::2]),
            k_data_ptrs=tables[0],
            v_data_ptrs=tables[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=tokens,
        head_num=8,
        head_dim=128,
        v_head_dim=128,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    host = MHATokenToKVPoolHost(
        info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=tokens,
        layout="page_first",
        pin_memory=False,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=pages * tokens,
    )
    host.kv_buffer.view(torch.uint8).random_(0, 255)
    return host


def ours(host: Any, master: str, page_bytes: int) -> Any:
    """Returns pd-cache's backend over a host pool, once it is open."""
    staging = max(512 << 20, 32 * page_bytes)
    backend = _made(
        "dynamic",
        host,
        {
            "backend_name": "pd-cache",
            "module_path": "pd_cache.adapters.sglang_hicache",
            "class_name": "PdCacheStorage",
            "interface_v1": 1,
            "revision": "bench",
            "master": master,
            "transfer": {"staging_size": staging},
        },
    )
    backend.cache.wait_available(60)
    return backend


def mooncakes_own(host: Any, master: str) -> Any:
    """Returns SGLang's own Mooncake backend over a host pool."""
    return _made(
        "mooncake",
        host,
        {
            "master_server_address": master,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 0,
            "protocol": "tcp",
            "device_name": "",
        },
    )


def _made(kind: str, host: Any, extra: dict[str, Any]) -> Any:
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    factory = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    config = storage.HiCacheStorageConfig(
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
        **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
        extra_config=extra,
    )
    backend = factory.create_backend(kind, config, host)
    backend.register_mem_pool_host(host)
    backend.on_host_pools_registered()
    return backend
