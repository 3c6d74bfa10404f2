"""SGLang's own host pools on a CPU, and our backend under them as the suite of all adapters drives it."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pd_cache.config import NodeSettings
from tests.support.adapters import PAGE, AdapterSubject, options_of
from tests.support.needs import NO_SGLANG

PAGES = 16
TOKENS = 4
"""Tokens of a page."""
_libraries: list[Any] = []


def need_sglang() -> None:
    """Skips the test if there is no SGLang."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip(NO_SGLANG)
    if not _libraries:
        # SGLang imports torchvision, whose operators come with CUDA builds of torch only; it needs their names, and calls none here
        _libraries.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _libraries[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        with warnings.catch_warnings():  # those of SGLang's imports say nothing about ours
            warnings.simplefilter("ignore")
            for module in ("managers.cache_controller", "mem_cache.storage.backend_factory", "mem_cache.pool_host.mla"):
                importlib.import_module(f"sglang.srt.{module}")


def mha_pool(
    layout: str, *, dtype: torch.dtype = torch.bfloat16, heads: int = 2, width: int = 8, layers: int = 3
) -> Any:
    """A host pool for `PAGES` pages of a model with heads, beside device tensors that lie on the CPU, too."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = [torch.zeros((PAGES * TOKENS, heads, width), dtype=dtype) for _ in range(2 * layers)]
    pointers = [
        torch.tensor([one.data_ptr() for one in part], dtype=torch.uint64) for part in (device[::2], device[1::2])
    ]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(device[::2]),
            v=tuple(device[1::2]),
            k_data_ptrs=pointers[0],
            v_data_ptrs=pointers[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=TOKENS,
        head_num=heads,
        head_dim=width,
        v_head_dim=width,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(info, start_layer=0, end_layer=layers, **_sizes(layout))


def mla_pool(layout: str, *, layers: int = 3, rank: int = 24, rope: int = 8) -> Any:
    """A host pool for `PAGES` pages of latents."""
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = [torch.zeros((PAGES * TOKENS, 1, rank + rope), dtype=torch.bfloat16) for _ in range(layers)]
    info = MLABufferInfo(
        buffers=tuple(device),
        data_ptrs=torch.tensor([one.data_ptr() for one in device], dtype=torch.uint64),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=TOKENS,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(info, start_layer=0, end_layer=layers, target_layer_num=layers, **_sizes(layout))


def _sizes(layout: str) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": TOKENS,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": PAGES * TOKENS,
        "host_token_capacity": PAGES * TOKENS,
    }


def storage_config(extra: dict[str, Any], **changes: Any) -> Any:
    """What SGLang tells a backend about an engine of one rank."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        **{
            **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
            **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "model",
            "extra_config": {
                "backend_name": "pd-cache",
                "module_path": "pd_cache.adapters.sglang_hicache",
                "class_name": "PdCacheStorage",
                "interface_v1": 1,
                "revision": "test",
                **extra,
            },
            **changes,
        }
    )


def open_backend(settings: NodeSettings, host: Any, *, salt: str, **changes: Any) -> Any:
    """Our backend, by SGLang's own factory, with its host pool registered as SGLang does."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = storage_config(options_of(settings, salt), **changes)
    backend = StorageBackendFactory.create_backend("dynamic", config, host)
    backend.register_mem_pool_host(host)
    backend.on_host_pools_registered()
    return backend


class SglangSubject(AdapterSubject):
    """The backend under a real host pool whose pages are exactly the suite's values."""

    def __init__(self, settings: NodeSettings, namespace: str) -> None:
        need_sglang()
        # 2 (K and V) x layers x tokens x heads x width bytes
        layers, heads = 5, 10
        self.host = mha_pool(
            "page_first", dtype=torch.uint8, heads=heads, layers=layers, width=PAGE // (2 * layers * heads * TOKENS)
        )
        self.backend = open_backend(settings, self.host, salt=namespace)
        assert self.backend._pools["kv"].pages.bytes == PAGE
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def _indices(self, count: int) -> torch.Tensor:
        return torch.arange(count * TOKENS, dtype=torch.int64)

    def _page(self, page: int) -> Any:
        return self.host.kv_buffer[:, page * TOKENS : (page + 1) * TOKENS]

    def store(self, values: dict[str, bytes]) -> list[bool]:
        with self._lock:
            stored: list[bool] = []
            names = list(values)
            for start in range(0, len(names), PAGES):
                part = names[start : start + PAGES]
                for page, name in enumerate(part):
                    given = torch.frombuffer(bytearray(values[name]), dtype=torch.uint8)
                    self._page(page).copy_(given.reshape(self._page(page).shape))
                stored += self.backend.batch_set_v1(part, self._indices(len(part)))
            return stored

    def has(self, names: Sequence[str]) -> list[bool]:
        return [self.backend.exists(name) for name in names]

    def load(self, names: Sequence[str]) -> list[bytes | None]:
        with self._lock:
            loaded: list[bytes | None] = []
            for start in range(0, len(names), PAGES):
                part = list(names[start : start + PAGES])
                self.host.kv_buffer.fill_(255)
                found = self.backend.batch_get_v1(part, self._indices(len(part)))
                loaded += [
                    self._page(page).contiguous().numpy().tobytes() if ok else None for page, ok in enumerate(found)
                ]
            return loaded

    def wait_available(self) -> None:
        self.backend.cache.wait_available(60)

    def close(self) -> None:
        self.backend.close()
