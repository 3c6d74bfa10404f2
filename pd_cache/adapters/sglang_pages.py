"""The parts of the HiCache backend of SGLang (`sglang_hicache`) that need no SGLang: its options, the names
of pages, and the places of pages in a host pool.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cache.adapters.options import AdapterOptions, weights_of
from pd_cache.config import LineOrEmpty, Seconds
from pd_cache.errors import LayoutError
from pd_cache.objects.values import Scattered, memory_of

OPTIONS = "--hicache-storage-backend-extra-config"


class StorageOptions(AdapterOptions, frozen=True, kw_only=True):
    """The keys of `--hicache-storage-backend-extra-config`, besides SGLang's own."""

    revision: LineOrEmpty = ""
    """Identifies the weights, together with the model's name, in place of a digest of the model's files. It
    has to change whenever the weights change."""
    timeout_s: Seconds = 5.0
    """How long one call may take. SGLang waits 10 s for a call when it detaches a backend or flushes its
    cache, and then raises in its scheduler."""


FORMAT = 1
"""The version of what is stored under a name. Backends of other versions never find it."""

SGLANGS_OWN = {
    "backend_name", "module_path", "class_name", "interface_v1", "extra_backend_tag", "tp_lcm_size",
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
}  # fmt: skip
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
"""The attributes of a host pool that change the meaning of a page's bytes."""
_OF_THE_SERVER = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "json_model_override_args",
    "speculative_draft_kv_cache_dtype",
)
"""The arguments of SGLang's server that change the KV, besides the weights."""
_REPLICATED = ("indexer", "draft_indexer", "deepseek_v4_")
"""Pools with the same bytes on all tensor-parallel ranks, if all ranks have the same KV (MLA)."""
_LATENT = ("MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool")


class PoolPages:
    """The pages of one host pool: their names, and views of the pool's own memory."""

    def __init__(self, pool: Any, prefix: bytes) -> None:
        """`prefix` begins all names. Raises LayoutError if the pool's memory cannot be addressed page by
        page."""
        self.pool, self._prefix = pool, prefix
        self.page_size = int(getattr(pool, "logical_page_size", 0) or pool.page_size or 1)
        """How many indices a page has."""
        self._size = int(getattr(pool, "logical_size", 0) or getattr(pool, "size", 0))
        tensors = _flattened(
            pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else pool.kv_buffer
        )
        self._memory = sorted(
            (tensor.data_ptr(), memory_of(tensor.detach())) for tensor in tensors if tensor.numel()
        )
        self._starts = [start for start, _ in self._memory]
        import torch

        self.bytes = len(self.values(torch.arange(self.page_size))[0])
        """The bytes of a page."""

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the names of pages. `keys` are SGLang's hashes of their tokens."""
        return [self._prefix + str(key).encode() for key in keys]

    def values(self, indices: Any) -> list[Scattered]:
        """Returns one value for each page. Each `page_size` indices (int64) form a page. Raises ValueError
        for indices that are not of whole pages of the pool, and LayoutError for a layout that the pool itself
        cannot address."""
        pages = self._pages_at(indices)
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

    def _pages_at(self, indices: Any) -> int:
        """Returns how many pages these indices form. Raises ValueError unless the indices of each page are
        consecutive and begin at a multiple of the page size."""
        import torch

        pages, rest = divmod(len(indices), self.page_size)
        if not pages and not rest:
            return 0
        indices = indices.to(torch.int64)
        firsts = indices[:: self.page_size]
        if (
            rest
            or bool((firsts % self.page_size != 0).any())
            or not torch.equal(indices.reshape(pages, -1), firsts[:, None] + torch.arange(self.page_size))
            or not 0 <= int(firsts.min()) <= int(firsts.max()) <= self._size - self.page_size
        ):
            raise ValueError(
                f"expected the indices of whole pages of {self.page_size} below {self._size}, got {len(indices)} others"
            )
        return pages

    def _view(self, address: int, size: int) -> memoryview:
        """Returns memory of the pool. Raises LayoutError if it is not the pool's."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0:
            start, memory = self._memory[index]
            if address - start + size <= len(memory):
                return memory[address - start : address - start + size]
        raise LayoutError(f"{type(self.pool).__name__} gave an address outside its buffers")


def _flattened(buffers: Any) -> list[Any]:
    if isinstance(buffers, list | tuple):
        return [tensor for buffer in buffers for tensor in _flattened(buffer)]
    return [] if buffers is None else [buffers]


def namespace_of(config: Any, server: Mapping[str, Any], *, revision: str, salts: Sequence[str]) -> str:
    """Returns a text that is equal for two backends if and only if they may exchange pages of a pool, apart
    from the differences in `prefix_of`.

    `config` is SGLang's `HiCacheStorageConfig`, `server` the arguments of its server, if there are any.
    Raises ConfigError if the weights of the model or of its draft model cannot be identified and there is no
    `revision`.
    """
    model = str(server.get("model_path") or config.model_name or "")
    draft = str(server.get("speculative_draft_model_path") or "")
    of_draft = str(server.get("speculative_draft_model_revision"))
    fields = {
        "format": FORMAT,
        "engine": "sglang-hicache",
        "weights": weights_of(model, revision, OPTIONS, str(server.get("revision"))),
        # some host pools keep the KV of a draft model in the pages of the main one
        "draft": weights_of(draft, revision, OPTIONS, of_draft) if draft not in ("", model) else "",
        # the pool's own dtype does not distinguish two kinds of fp8
        **{name: str(server.get(name)) for name in _OF_THE_SERVER},
        "salts": list(salts),
    }
    return json.dumps(fields, sort_keys=True)


def prefix_of(config: Any, pool_name: str, pool: Any) -> bytes:
    """Returns the beginning of the names of a pool's pages: it identifies the pool, and the rank that has
    this share of the pages.

    The name has no rank if all ranks have the same bytes.
    """
    classes = {kind.__name__ for kind in type(pool).__mro__}
    alike = bool(config.is_mla_model) and (
        pool_name == "kv" or pool_name.startswith(_REPLICATED) or not classes.isdisjoint(_LATENT)
    )
    fields = {
        "pool": pool_name,
        "class": type(pool).__name__,
        "form": "pieces",
        "shape": {name: str(getattr(pool, name, None)) for name in _SHAPE},
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dcp": [getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)],
        "tp": "all" if alike else [config.tp_rank, config.tp_size],
    }
    return json.dumps(fields, sort_keys=True).encode() + b"\0"
