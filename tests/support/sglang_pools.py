"""SGLang's own host pools on a CPU, and storage backends over them."""

import importlib
import warnings

import torch

_libraries = []


def import_sglang():
    """Imports what SGLang's HiCache needs, on a machine without CUDA."""
    if _libraries:
        return
    # SGLang imports torchvision, whose operators come with CUDA builds of torch only; it needs their names,
    # and calls none here
    library = torch.library.Library
    _libraries.append(library("torchvision", "DEF"))
    for name in ("nms", "qnms"):
        _libraries[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with warnings.catch_warnings():  # SGLang's imports warn about themselves, not about our code
        warnings.simplefilter("ignore")
        for module in (
            "managers.cache_controller",
            "mem_cache.storage.backend_factory",
            "mem_cache.pool_host.mla",
        ):
            importlib.import_module(f"sglang.srt.{module}")


def mha_pool(layout, *, pages, tokens, layers, heads=8, width=128, dtype=torch.bfloat16):
    """Returns a host pool for `pages` pages of `tokens` tokens of a model with heads. The device's tensors
    are on the CPU, too."""
    import_sglang()
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = [torch.zeros((tokens, heads, width), dtype=dtype) for _ in range(2 * layers)]
    keys, values = tuple(device[::2]), tuple(device[1::2])
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=keys,
            v=values,
            k_data_ptrs=pointers(keys),
            v_data_ptrs=pointers(values),
            layout=KVBufferLayout.NHD,
        ),
        page_size=tokens,
        head_num=heads,
        head_dim=width,
        v_head_dim=width,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(info, start_layer=0, end_layer=layers, **sizes(layout, pages, tokens))


def our_options(**further):
    """Returns `--hicache-storage-backend-extra-config` for our backend."""
    return {
        "backend_name": "pd-cache",
        "module_path": "pd_cache.adapters.sglang_hicache",
        "class_name": "PdCacheStorage",
        "interface_v1": 1,
        **further,
    }


def storage_config(extra, **changes):
    """Returns what SGLang says to a backend about an engine of one rank, apart from `changes`."""
    import_sglang()
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        **{
            **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
            **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "model",
            "extra_config": extra,
            **changes,
        }
    )


def open_backend(host, config):
    """Returns our backend by SGLang's own factory, with its host pool registered as SGLang does."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    backend = StorageBackendFactory.create_backend("dynamic", config, host)
    backend.register_mem_pool_host(host)
    backend.on_host_pools_registered()
    return backend


def pointers(tensors):
    """Returns the addresses of tensors as SGLang takes them."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def sizes(layout, pages, tokens):
    """Returns what every host pool is given, for `pages` pages of `tokens` tokens."""
    return {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": tokens,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": tokens,
        "host_token_capacity": pages * tokens,
    }
