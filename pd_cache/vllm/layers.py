"""The groups of layers in which vLLM keeps a model's KV, and what the cache keeps of each.

| vLLM's spec | kept | a load needs |
|---|---|---|
| `FullAttentionSpec`, `MLAAttentionSpec` | every chunk | every chunk |
| `SlidingWindowSpec` | chunks at the ends of prompts, and behind them | the chunks that the window reaches into |
| `MambaSpec`, mode `align` | the states that vLLM hands over | the state at the end |

vLLM gives the blocks behind a window back while it computes, and overwrites states. So what a load will need must be stored when it is
computed: at the end of a prompt, and where the lookup has found that other prompts have gone another way (vLLM's own rule, for
`prefix_cache_retention_interval: 0`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from pd_cache.config import USUAL_CHUNK
from pd_cache.errors import ConfigError, LayoutError, UnsupportedModelError
from pd_cache.layout import KVLayout, PageKind
from pd_cache.tokens import LayerGroup

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class KeptLayers(NamedTuple):
    """One of vLLM's groups of layers."""

    number: int
    """Its place among vLLM's groups."""
    block_size: int
    """Tokens per block."""
    kind: Literal["full", "window", "state"] = "full"
    window: int = 0
    """How many tokens, the latest, a token attends to; 0 for all."""
    state: str = ""
    """What a state consists of."""

    def tail(self, chunk_size: int) -> int:
        """Returns how many chunks, the last ones, a load needs; 0 for all."""
        if self.kind == "state":
            return 1
        if self.kind == "full":
            return 0
        blocks = max(1, -(-(self.window - 1) // self.block_size))  # as vLLM counts them
        return -(-blocks * self.block_size // chunk_size)

    @property
    def divisible(self) -> bool:
        """Whether a load may end one token before a chunk's end. A state is that of one place; and if a window begins with a block's last
        token, then without its last token it reaches one block further back than its tail."""
        return self.kind == "full" or (self.kind == "window" and (self.window - 1) % self.block_size != 0)


def kept_layers(kv_cache_config: KVCacheConfig) -> list[KeptLayers]:
    """Returns the groups of a model that `check_supported` accepts, those of full attention first."""
    groups = [_kept(number, group.kv_cache_spec) for number, group in enumerate(kv_cache_config.kv_cache_groups)]
    return sorted(groups, key=lambda one: one.kind != "full")


def _kept(number: int, spec: KVCacheSpec) -> KeptLayers:
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    if isinstance(spec, SlidingWindowSpec):
        return KeptLayers(number, spec.block_size, "window", spec.sliding_window)
    if isinstance(spec, MambaSpec):
        parts = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        return KeptLayers(number, spec.block_size, "state", state=parts.replace("torch.", ""))
    return KeptLayers(number, spec.block_size)


def fitting_chunk(wanted: int | Literal["auto"], groups: Sequence[KeptLayers]) -> int:
    """Returns the tokens per chunk. Raises ConfigError, which names a size that fits, for a wanted size that does not."""
    unit = math.lcm(*(group.block_size for group in groups))
    # vLLM hands over the state at the last multiple of its blocks before a prompt's end, which a larger chunk would seldom hit
    only = unit if any(group.kind == "state" for group in groups) else None
    if wanted == "auto":
        return only or -(-USUAL_CHUNK // unit) * unit
    if only is not None and wanted != only:
        raise ConfigError(
            f"cache.chunk_size {wanted}: this model keeps states, which vLLM hands over at multiples of {only} tokens; set it to {only}, "
            "or to auto"
        )
    if wanted % unit:
        near = " or ".join(str(size) for size in (wanted // unit * unit, (wanted // unit + 1) * unit) if size)
        blocks = ", ".join(map(str, sorted({group.block_size for group in groups})))
        raise ConfigError(
            f"cache.chunk_size {wanted} must be a multiple of vLLM's block size {blocks}, e.g. {near}; auto takes a size that fits"
        )
    return wanted


def described(group: KeptLayers, names: Sequence[str], tensors: GroupTensors, chunk_size: int) -> LayerGroup:
    """Returns what the namespace says of the layers `names`."""
    kept = {"full": "every token", "window": f"the last {group.window} tokens", "state": f"a state of {group.state}"}[
        group.kind
    ]
    inside = tensors.inside and f": {tensors.inside}"
    return LayerGroup(layers=_ranges(names), keeps=kept + inside, tail=group.tail(chunk_size))


def _ranges(names: Sequence[str]) -> str:
    """Returns the numbers of layers, in short, e.g. `0-4,6`; their names if numbers do not tell them apart."""
    found = sorted({int(match[0]) for name in names if (match := re.search(r"\d+", name))})
    if len(found) != len(names):
        return ",".join(sorted(names))
    runs: list[list[int]] = []
    for number in found:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class GroupTensors(NamedTuple):
    """The KV tensors of a group, one a layer, in layer order."""

    tensors: list[torch.Tensor]
    layout: KVLayout
    inside: str = ""
    """What lies inside an opaque page; empty if the layout says it."""


def group_tensors(
    group: KeptLayers,
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    names: Sequence[str],
    blocks: int,
    model: str,
) -> GroupTensors:
    """Returns the tensors of the layers `names`, of which vLLM has `blocks` blocks.

    States, and blocks that the attention kernel cuts into smaller ones, move as opaque pages. Raises UnsupportedModelError for tensors
    whose blocks are not contiguous.
    """
    found: dict[int, torch.Tensor | Sequence[torch.Tensor]] = {}
    for name in _in_layer_order(names):
        cache = kv_caches[name]
        first = cache if isinstance(cache, torch.Tensor) else cache[0]
        found.setdefault(first.data_ptr(), cache)  # layers may share one
    caches = list(found.values())
    plain = [cache for cache in caches if isinstance(cache, torch.Tensor)]
    try:
        if len(plain) == len(caches) and group.kind != "state":
            layout = KVLayout.from_tensors(plain)
            if layout.block_size == group.block_size and layout.blocks == blocks:
                return GroupTensors(plain, layout)
        pages = [_pages([cache] if isinstance(cache, torch.Tensor) else cache, blocks) for cache in caches]
        layout = KVLayout.from_tensors(pages, PageKind.OPAQUE, block_size=group.block_size)
        return GroupTensors(pages, layout, _inside(caches[0], blocks))
    except LayoutError as error:
        raise UnsupportedModelError(f"{model}: {error}") from None


def _inside(cache: torch.Tensor | Sequence[torch.Tensor], blocks: int) -> str:
    parts = [cache] if isinstance(cache, torch.Tensor) else cache
    shapes = ([part.shape[0] // blocks, *part.shape[1:]] for part in parts)
    return ", ".join(f"{part.dtype} {shape}".removeprefix("torch.") for part, shape in zip(parts, shapes, strict=True))


def _pages(parts: Sequence[torch.Tensor], blocks: int) -> torch.Tensor:
    """Returns blocks as bytes, uint8 `[blocks, bytes]`: a view of memory in which each block's parts lie close together."""
    spans = []
    for part in parts:
        if part.shape[0] % blocks:
            raise LayoutError(f"a tensor of {list(part.shape)} does not hold {blocks} blocks")
        ratio = part.shape[0] // blocks
        dense = ratio == 1 or part.stride(0) == part[0].numel()
        if not part[0].is_contiguous() or not dense:
            raise LayoutError(
                f"a block of the tensor of {list(part.shape)} with strides {list(part.stride())} is no one run of bytes"
            )
        size, start = part.element_size(), part.storage_offset() * part.element_size()
        spans.append((start, start + ratio * part[0].numel() * size, ratio * part.stride(0) * size))
    begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
    strides = {span[2] for span in spans}
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(strides) != 1 or len(storages) != 1 or end - begin > min(strides):
        raise LayoutError(f"the parts of a state lie apart: strides of {sorted(strides)} bytes, from {begin} to {end}")
    view = torch.empty(0, dtype=torch.uint8, device=parts[0].device)
    view.set_(parts[0].untyped_storage(), begin, (blocks, end - begin), (strides.pop(), 1))
    return view


def _in_layer_order(names: Sequence[str]) -> list[str]:
    """Returns layers' names in the order of their numbers, which is the same on every node."""
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else -1 for part in re.split(r"(\d+)", name)])
