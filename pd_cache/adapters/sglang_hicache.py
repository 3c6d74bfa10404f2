"""pd-cache as a storage backend of SGLang's HiCache: `--hicache-storage-backend dynamic` with the class `PdCacheStorage` of this module.

HiCache keeps pages of KV in a pool of the host's memory and hands them to a storage backend. docs/adapters/sglang.md shows the flags.

Here is what needs no SGLang: what a page's name is made of, and where a page lies in a host pool. The class itself is loaded when SGLang asks
for it by name.
"""

from __future__ import annotations

import bisect
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_cache.adapters.options import AdapterOptions
from pd_cache.config import LineOrEmpty
from pd_cache.errors import ConfigError, LayoutError
from pd_cache.values import Scattered
from pd_cache.weights import WeightsError, weights_digest

if TYPE_CHECKING:
    from pd_cache.adapters.sglang_storage import PdCacheStorage as PdCacheStorage

log = logging.getLogger(__name__)


class StorageOptions(AdapterOptions, frozen=True, kw_only=True):
    """The keys of `--hicache-storage-backend-extra-config`, besides SGLang's own."""

    revision: LineOrEmpty = ""
    """Stands for the weights, instead of a digest of the model's files. It has to change whenever they do."""
    token_only_keys: bool = False
    """Accepts an SGLang whose hashes of pages leave out LoRA adapters and cache salts."""


FORMAT = 1
"""The version of what is stored under a name. Backends of other versions never find it."""

SGLANGS_OWN = frozenset(
    (
        *("backend_name", "module_path", "class_name", "interface_v1", "extra_backend_tag", "tp_lcm_size"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        "hicache_storage_pass_prefix_keys",
    )
)
"""Keys of the extra config that are SGLang's own."""

_SHAPE = (
    "layout",
    "dtype",
    "page_size",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "num_mamba_layers",
    "conv_dtype",
    "temporal_dtype",
    "conv_state_shapes",
    "temporal_state_shape",
    "storage_format_tag",
    "dcp_size",
    "dcp_rank",
)
"""What, of a host pool, changes the meaning of a page's bytes."""
_REPLICATED = ("indexer", "draft_indexer", "deepseek_v4_")
"""Pools of which all tensor-parallel ranks have the same bytes, if the model's KV is that of all ranks (MLA)."""
_LATENT = ("MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool")


def __getattr__(name: str) -> object:
    if name == "PdCacheStorage":
        from pd_cache.adapters.sglang_storage import PdCacheStorage

        return PdCacheStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class PoolPages:
    """The pages of one host pool, as views of its own memory."""

    def __init__(self, pool: Any) -> None:
        """Raises LayoutError if the pool's memory cannot be addressed page by page."""
        self.pool = pool
        self.page_size = int(getattr(pool, "logical_page_size", 0) or pool.page_size or 1)
        """How many indices name a page."""
        self._size = int(getattr(pool, "logical_size", 0) or getattr(pool, "size", 0))
        tensors = _flattened(
            pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else pool.kv_buffer
        )
        self._memory = sorted((tensor.data_ptr(), _bytes_of(tensor)) for tensor in tensors if tensor.numel())
        self._starts = [start for start, _ in self._memory]
        import torch

        self.bytes = len(self.values(torch.zeros(self.page_size, dtype=torch.int64))[0])
        """The bytes of a page."""

    def values(self, indices: Any) -> list[Scattered]:
        """Returns the page at each `page_size` of these indices (int64), as one value. Raises ValueError for indices that are not of
        whole pages of the pool, and LayoutError for a layout that the pool itself cannot address."""
        pages, rest = divmod(len(indices), self.page_size)
        if rest or (pages and not 0 <= int(indices.min()) <= int(indices.max()) < max(self._size, 1)):
            raise ValueError(
                f"expected indices of whole pages of {self.page_size} below {self._size}, got {len(indices)}"
            )
        if not pages:
            return []
        try:
            addresses, sizes = self.pool.get_page_buffer_meta(indices)
        except (ValueError, NotImplementedError, TypeError) as error:
            raise LayoutError(f"{type(self.pool).__name__} of layout {self.pool.layout}: {error}") from error
        pieces, rest = divmod(len(addresses), pages)
        if rest or not pieces or len(sizes) != len(addresses):
            raise LayoutError(f"{type(self.pool).__name__} gave {len(addresses)} addresses for {pages} pages")
        views = [self._view(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        return [Scattered(views[page * pieces : (page + 1) * pieces]) for page in range(pages)]

    def _view(self, address: int, size: int) -> memoryview:
        """Returns memory of the pool. Raises LayoutError if it is not the pool's."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0:
            start, memory = self._memory[index]
            if address - start + size <= len(memory):
                return memory[address - start : address - start + size]
        raise LayoutError(f"{type(self.pool).__name__} gave an address outside its buffers")


def bytes_of(tensor: Any) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU. Raises ValueError for any other."""
    if getattr(tensor, "device", None) is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("expected a contiguous tensor on the CPU")
    return _bytes_of(tensor)


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def _flattened(buffers: Any) -> list[Any]:
    if isinstance(buffers, list | tuple):
        return [tensor for buffer in buffers for tensor in _flattened(buffer)]
    return [] if buffers is None else [buffers]


def namespace_of(config: Any, server: Any, *, revision: str, salt: str) -> str:
    """Returns a text that two backends share exactly if their pages of one pool may be exchanged, apart from what `prefix_of` says.

    `config` is SGLang's `HiCacheStorageConfig`. `server` has the server's arguments, if there are any. Raises ConfigError if the model's
    weights cannot be told from others' and there is no `revision`.
    """
    model = str(getattr(server, "model_path", None) or config.model_name or "")
    said = {
        "format": FORMAT,
        "engine": "sglang-hicache",
        "weights": f"revision {revision}" if revision else _weights(model),
        # the pool's own dtype does not distinguish two kinds of fp8
        **{
            name: str(getattr(server, name, None))
            for name in ("dtype", "kv_cache_dtype", "quantization", "json_model_override_args")
        },
        "salt": salt,
    }
    return json.dumps(said, sort_keys=True)


def prefix_of(config: Any, pool_name: str, pool: Any, form: str) -> bytes:
    """Returns what the names of a pool's pages begin with: whose share of which pool, and the form of the bytes.

    A rank's share has its rank in the name, unless all ranks have the same bytes.
    """
    classes = {one.__name__ for one in type(pool).__mro__}
    alike = bool(config.is_mla_model) and (
        pool_name == "kv" or pool_name.startswith(_REPLICATED) or not classes.isdisjoint(_LATENT)
    )
    said = {
        "pool": pool_name,
        "class": type(pool).__name__,
        "form": form,
        "shape": {name: str(getattr(pool, name, None)) for name in _SHAPE},
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dcp": [getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)],
        "tp": "all" if alike else [config.tp_rank, config.tp_size],
    }
    return json.dumps(said, sort_keys=True).encode() + b"\0"


def names_of(prefix: bytes, keys: Sequence[str]) -> list[bytes]:
    """Returns the names of pages, by SGLang's hashes of their tokens."""
    return [prefix + str(key).encode() for key in keys]


def split_options(extra: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options that are SGLang's own, and ours."""
    given = dict(extra or {})
    own = {key: given.pop(key) for key in SGLANGS_OWN & given.keys()}
    return own, given


def _weights(model: str) -> str:
    try:
        return weights_digest(Path(model))
    except (WeightsError, OSError) as error:
        raise ConfigError(
            f"{model}: cannot tell its weights from those of other models ({error}); put a `revision` into "
            "--hicache-storage-backend-extra-config, which changes whenever they do"
        ) from error
