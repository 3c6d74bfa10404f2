"""The layer groups of a model in vLLM, and what the cache keeps of each.

| vLLM's spec | kept | a load needs |
|---|---|---|
| `FullAttentionSpec`, `MLAAttentionSpec` | every chunk | every chunk |
| `SlidingWindowSpec`, `SlidingWindowMLASpec` | chunks at prompts' ends | those in the window |
| `MambaSpec`, mode `align` | the states that vLLM hands over | the state at the end |

While vLLM computes, it frees the blocks that lie before a window, and overwrites states. So the connector
must store windows and states as soon as they are computed. It stores those at the end of a prompt, and at the
point where the lookup found that prompts diverge. vLLM follows the same rule for
`prefix_cache_retention_interval: 0`.

vLLM may put the layers of a draft model into a group with layers of the model itself. Here they are layer
groups of their own, over the same blocks, so that nodes with and without a draft model share everything else.

vLLM may also put layers of one kind with pages of different size into a group: latents beside an indexer's
cache, or layers with different numbers of KV heads. Only workers know about this; to the scheduler, such
layers are one layer group. A worker cuts the group into one part for each spec, with a cache and a namespace
of its own. It does with all parts what the scheduler asks for the group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from pd_cache.chunks import LayerGroup
from pd_cache.config import USUAL_CHUNK
from pd_cache.errors import ConfigError, LayoutError, UnsupportedModelError
from pd_cache.layout import KVLayout, PageKind

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


class KeptLayers(NamedTuple):
    """A layer group: the layers of one of vLLM's groups. A draft model's layers are a layer group of their
    own."""

    number: int
    """The index of vLLM's group."""
    block_size: int
    """Tokens per block."""
    kind: Literal["full", "window", "state"] = "full"
    window: int = 0
    """How many of the latest tokens a token attends to; 0 for all."""
    latent: bool = False
    """Whether the layers keep latents (MLA), which are the same on all tensor-parallel ranks."""
    state: str = ""
    """The types and shapes of a state's tensors."""
    drafts: Literal["", "same", "next"] = ""
    """Which tokens the draft model reads (`DraftLayers.reads`); empty for layers of the model itself."""

    def tail(self, chunk_size: int) -> int:
        """Returns how many of the last chunks a load needs; 0 for all."""
        if self.kind == "state":
            return 1
        if self.kind == "full":
            return 0
        return -(-self._reach * self.block_size // chunk_size)

    def kept_blocks(self, chunk_size: int) -> int:
        """Returns how many blocks of a chunk a worker stores, counted from the chunk's end. For windows of
        latents that are shorter than a chunk, the worker stores only about as many blocks as a load needs.
        DeepSeek V4 has windows of 8 tokens, and each of these tokens takes as much memory as 56 others."""
        per_chunk = chunk_size // self.block_size
        needed = min(self._reach, per_chunk) if self.latent and self.kind == "window" else per_chunk
        return next(count for count in range(needed, per_chunk + 1) if per_chunk % count == 0)

    @property
    def _reach(self) -> int:
        """How many blocks a window overlaps, as vLLM counts them."""
        return max(1, -(-(self.window - 1) // self.block_size))

    @property
    def ahead(self) -> int:
        """1 if a chunk's KV depends on the token after the chunk, so that it is stored under the name of the
        next chunk; otherwise 0."""
        return 1 if self.drafts == "next" else 0

    @property
    def divisible(self) -> bool:
        """Whether a load may end one token before a chunk's end. A state may not, because it belongs to a
        single position. A window that begins with a block's last token may not, either: if the load ended one
        token earlier, the window would reach a block further back than `tail` says."""
        return self.kind == "full" or (self.kind == "window" and (self.window - 1) % self.block_size != 0)


class DraftLayers(NamedTuple):
    names: frozenset[str] = frozenset()
    reads: Literal["same", "next"] = "next"
    """`same`: the draft model reads the same tokens as the model. `next`: at each position, it reads the next
    token and the hidden state that the model computed at this position."""


NO_DRAFT = DraftLayers()


def kept_layers(kv_cache_config: KVCacheConfig, draft: DraftLayers = NO_DRAFT) -> list[KeptLayers]:
    """Returns the layer groups of a model that `check_supported` accepts: full attention first, draft models
    last."""
    groups: list[KeptLayers] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        kept, drafted = _kept(number, group.kv_cache_spec), draft.names.intersection(group.layer_names)
        # a pipeline stage may have no layers of a group
        if not drafted or len(drafted) < len(group.layer_names):
            groups.append(kept)
        if drafted:
            groups.append(kept._replace(drafts=draft.reads))
    return sorted(groups, key=lambda group: (group.drafts != "", group.kind != "full"))


def own_hit(tokens: int, groups: Sequence[KeptLayers]) -> int:
    """Returns how many tokens of a prompt of `tokens` tokens vLLM's own prefix cache can restore at most:
    whole blocks, without the last token.

    A draft model that reads the next token costs another block. If vLLM has one group, vLLM 0.32 drops the
    last block that it finds. If it has several, it looks one block further in the draft model's group, and
    drops that block (`find_longest_cache_hit` in `v1/core/kv_cache_coordinator.py`).
    """
    unit = math.lcm(*(group.block_size for group in groups))
    end = (tokens - 1) // unit * unit
    dropped = {group.block_size for group in groups if group.ahead}
    if len({group.number for group in groups}) == 1:
        return max(0, end - sum(dropped))
    return max(0, min([end, *((tokens // size - 1) * size // unit * unit for size in dropped)]))


def cache_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Returns how many tokens vLLM's own cache holds. Each of vLLM's groups needs blocks of its own for the
    same tokens."""
    groups = kv_cache_config.kv_cache_groups
    blocks = max(0, kv_cache_config.num_blocks - 1)  # without the null block
    return int(blocks // len(groups) * min(group.kv_cache_spec.block_size for group in groups))


def specs_of(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """Returns the spec of each layer of a group of vLLM's. In vLLM's scheduler, the first layer's spec
    stands for all."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(
        group.layer_names, group.kv_cache_spec
    )
    # a pipeline stage has some of the layers; a layer that reads the KV of another one may have no spec
    return {name: specs[name] for name in group.layer_names if name in specs}


def parts_of(
    group: KeptLayers, kv_cache_config: KVCacheConfig, draft: DraftLayers
) -> list[tuple[KeptLayers, list[str]]]:
    """Returns the parts of a layer group, one for each spec: the part's own `KeptLayers`, and the names of
    its layers. `kv_cache_config` is a worker's."""
    found: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs_of(kv_cache_config.kv_cache_groups[group.number]).items():
        if (name in draft.names) == bool(group.drafts):
            found.setdefault(spec, []).append(name)
    return [(_kept(group.number, spec)._replace(drafts=group.drafts), names) for spec, names in found.items()]


def _kept(number: int, spec: KVCacheSpec) -> KeptLayers:
    from vllm.v1.kv_cache_interface import (
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    spec = getattr(spec, "first_spec", spec)  # all layers of a group are of one kind, with one window
    latent = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    if isinstance(spec, SlidingWindowSpec):
        # before a window, vLLM keeps the tokens whose drafts several MTP modules may compute again
        window = spec.sliding_window + spec.extra_retained_tokens
        return KeptLayers(number, spec.block_size, "window", window, latent)
    if isinstance(spec, MambaSpec):
        shapes = ", ".join(
            f"{dtype} {list(shape)}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        return KeptLayers(number, spec.block_size, "state", state=shapes.replace("torch.", ""))
    return KeptLayers(number, spec.block_size, latent=latent)


def fitting_chunk(wanted: int | Literal["auto"], groups: Sequence[KeptLayers]) -> int:
    """Returns the tokens per chunk. Raises ConfigError if the wanted size does not fit; the message names a
    size that does."""
    unit = math.lcm(*(group.block_size for group in groups))
    # vLLM hands over the state at the last multiple of its blocks before a prompt's end; a larger chunk would
    # seldom end there
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


def described(
    group: KeptLayers,
    names: Sequence[str],
    tensors: GroupTensors,
    chunk_size: int,
    drafter: str = "",
    others: Collection[str] = (),
) -> LayerGroup:
    """Returns what the namespace says about the layers `names`. `drafter` identifies the draft model to which
    they belong, and `others` are the names of the model's other layers of this kind."""
    kept = {
        "full": "every token",
        "window": f"the last {group.window} tokens",
        "state": f"a state of {group.state}",
    }[group.kind]
    inside = tensors.inside and f": {tensors.inside}"
    drafted = group.drafts and f", for drafts of {drafter}"
    return LayerGroup(
        layers=_ranges(names, others),
        keeps=kept + inside + drafted,
        tail=group.tail(chunk_size),
        ahead=group.ahead,
    )


def _ranges(names: Sequence[str], others: Collection[str]) -> str:
    """Returns the numbers of the layers in short form, e.g. `0-4,6`. Returns their names instead if two
    layers have the same number, or a layer has none. If layers of `others` have the same numbers, the rest of
    a name follows, e.g. `0-4.indexer`."""
    numbers, further = (
        {int(match[0]) for name in some if (match := re.search(r"\d+", name))} for some in (names, others)
    )
    found = sorted(numbers)
    if len(found) != len(names):
        return ",".join(sorted(names))
    runs: list[list[int]] = []
    for number in found:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    rest = re.split(r"\d+", names[0], maxsplit=1)[1] if numbers & further else ""
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + rest


class GroupTensors(NamedTuple):
    """The KV tensors of a layer group, in layer order. Layers that share a tensor share an entry."""

    tensors: list[torch.Tensor]
    layout: KVLayout
    inside: str = ""
    """What lies inside an opaque page; empty if `layout` says so itself."""


def group_tensors(
    group: KeptLayers,
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    names: Sequence[str],
    blocks: int,
    model: str,
    chunk_size: int,
) -> GroupTensors:
    """Returns the KV tensors of the layers `names`, which have `blocks` blocks.

    States move as opaque pages. So do blocks that the attention kernel cuts into smaller blocks, and blocks
    of compressed tokens. If only some blocks of a chunk are kept, each counts as more tokens in the layout,
    so that a chunk has `chunk_size` tokens. Raises UnsupportedModelError if a block of a tensor is not
    contiguous.
    """
    block_size = chunk_size // group.kept_blocks(chunk_size)
    found: dict[int, torch.Tensor | Sequence[torch.Tensor]] = {}
    # by the numbers in their names, an order which is the same on every node
    for name in sorted(
        names, key=lambda name: [int(part) if part.isdigit() else -1 for part in re.split(r"(\d+)", name)]
    ):
        cache = kv_caches[name]
        first = cache if isinstance(cache, torch.Tensor) else cache[0]
        found.setdefault(first.data_ptr(), cache)  # layers may share a tensor
    caches = list(found.values())
    plain = [cache for cache in caches if isinstance(cache, torch.Tensor)]
    try:
        if len(plain) == len(caches) and group.kind != "state":
            layout = KVLayout.from_tensors(plain)
            if layout.block_size == block_size and layout.blocks == blocks:
                return GroupTensors(plain, layout)
        pages = [_pages([cache] if isinstance(cache, torch.Tensor) else cache, blocks) for cache in caches]
        layout = KVLayout.from_tensors(pages, PageKind.OPAQUE, block_size=block_size)
        return GroupTensors(pages, layout, _inside(caches[0], blocks))
    except LayoutError as error:
        raise UnsupportedModelError(f"{model}: {error}") from None


def _inside(cache: torch.Tensor | Sequence[torch.Tensor], blocks: int) -> str:
    parts = [cache] if isinstance(cache, torch.Tensor) else cache
    shapes = ([part.shape[0] // blocks, *part.shape[1:]] for part in parts)
    return ", ".join(
        f"{part.dtype} {shape}".removeprefix("torch.") for part, shape in zip(parts, shapes, strict=True)
    )


def _pages(parts: Sequence[torch.Tensor], blocks: int) -> torch.Tensor:
    """Returns the blocks as bytes, uint8 `[blocks, bytes]`: a view of the memory of `parts`. Raises
    LayoutError if a part of a block is not contiguous, or if the parts of a block lie too far apart."""
    spans = []
    for part in parts:
        if part.shape[0] % blocks:
            raise LayoutError(f"a tensor of {list(part.shape)} does not hold {blocks} blocks")
        ratio = part.shape[0] // blocks
        dense = ratio == 1 or part.stride(0) == part[0].numel()
        if not part[0].is_contiguous() or not dense:
            raise LayoutError(
                f"a block of the tensor of {list(part.shape)} with strides {list(part.stride())} is not contiguous"
            )
        size, start = part.element_size(), part.storage_offset() * part.element_size()
        spans.append((start, start + ratio * part[0].numel() * size, ratio * part.stride(0) * size))
    begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
    strides = {span[2] for span in spans}
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(strides) != 1 or len(storages) != 1 or end - begin > min(strides):
        raise LayoutError(
            f"the parts of a state lie apart: strides of {sorted(strides)} bytes, from {begin} to {end}"
        )
    view = torch.empty(0, dtype=torch.uint8, device=parts[0].device)
    view.set_(parts[0].untyped_storage(), begin, (blocks, end - begin), (strides.pop(), 1))
    return view
