"""KVLayout: how an engine lays out its paged cache, and how many bytes a chunk has. Pure.

Every layout that we know can be described in the same way. The cache is a list of **planes**, one or two per
layer. A plane is an array of **pages**: page b is the part of block b that lies in this plane, and it is
contiguous. Inside a page, the bytes of a token are `pieces` runs of `piece_bytes`: a page is `[pieces,
block_size, piece_bytes]`.

| tensors of a layer | planes per layer | pieces |
|---|---|---|
| `HEADS_FIRST` `[blocks, kv_heads, block_size, 2*head_dim]` | 1 | kv_heads |
| `KV_OUTER` `[2, blocks, block_size, kv_heads, head_dim]` | 2 | 1 |
| `KV_INNER` `[blocks, 2, block_size, kv_heads, head_dim]` | 1 | 2 |
| `HEADS_LAST`: the same, in memory `[blocks, block_size, kv_heads, 2*head_dim]` | 1 | 1 |
| `MLA` `[blocks, block_size, dim]` | 1 | 1 |
| `OPAQUE` uint8 `[blocks, bytes]`: a state, or other bytes that are only copied | 1 | – |

Whole blocks move as opaque pages.

If each piece is a head (`HEADS_FIRST`), pages can be cut into **shards** of some heads each. Shards are
contiguous slices, so nodes of different tensor-parallel size can use the same objects.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import xxhash

from pd_cache.errors import LayoutError

if TYPE_CHECKING:
    import torch

KVCaches = Mapping[str, "torch.Tensor"] | Sequence["torch.Tensor"]
"""An engine's KV tensors, one per layer, in layer order."""

Digest = xxhash.xxh3_64
"""Computes the checksum of a chunk's payload piece by piece, in order, from the engine's own bytes; see
`pd_cache.paged.base`."""
checksum = xxhash.xxh3_64_intdigest
"""Computes the checksum of a whole payload."""


class PageKind(enum.Enum):
    """The known arrangements of a layer's tensor."""

    HEADS_FIRST = "heads_first"
    HEADS_LAST = "heads_last"
    KV_OUTER = "kv_outer"
    KV_INNER = "kv_inner"
    MLA = "mla"
    OPAQUE = "opaque"


_AXES = {
    PageKind.HEADS_FIRST: ("blocks", "pieces", "tokens", "elements"),
    PageKind.HEADS_LAST: ("blocks", "elements", "tokens", "elements"),
    PageKind.KV_OUTER: ("planes", "blocks", "tokens", "elements", "elements"),
    PageKind.KV_INNER: ("blocks", "pieces", "tokens", "elements", "elements"),
    PageKind.MLA: ("blocks", "tokens", "elements"),
    PageKind.OPAQUE: ("blocks", "elements"),
}
"""What each dimension of a layer's tensor counts. A piece may span several dimensions."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The shape of an engine's paged cache. Two nodes share chunks only if `page_format`, dtype and layers
    agree."""

    kind: PageKind
    layers: int
    blocks: int
    block_size: int
    """Tokens per block."""
    pieces: int
    piece_bytes: int
    dtype: str
    """The name of the tensors' type, e.g. `bfloat16`."""

    @cached_property
    def planes(self) -> int:
        """The number of planes of all layers: one or two a layer."""
        return self.layers * (2 if self.kind is PageKind.KV_OUTER else 1)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one block in one plane."""
        if self.kind is PageKind.OPAQUE:
            return self.piece_bytes
        return self.pieces * self.block_size * self.piece_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.planes * self.page_bytes

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.block_bytes // self.block_size

    @cached_property
    def page_format(self) -> str:
        """A short text that identifies the content of a page, e.g. `heads_first.8x16x512`; part of the
        namespace."""
        return f"{self.kind.value}.{self.pieces}x{self.block_size}x{self.piece_bytes}"

    def chunk_bytes(self, chunk_size: int) -> int:
        """Returns the bytes of a chunk's pages. Raises ValueError if `chunk_size` is not a whole number of
        blocks."""
        if chunk_size < 1 or chunk_size % self.block_size:
            raise ValueError(
                f"chunk_size {chunk_size} must be a positive multiple of block_size {self.block_size}"
            )
        return chunk_size // self.block_size * self.block_bytes

    def shard(self, count: int) -> KVLayout:
        """Returns the layout of a shard, if each page is cut into `count` equal shards. Raises LayoutError if
        pages cannot be cut into so many."""
        if count == 1:
            return self
        if self.kind is not PageKind.HEADS_FIRST:
            raise LayoutError(
                f"the pages of {self.page_format} cannot be cut into {count} shards: their heads are not outermost, so a "
                "head is not a contiguous slice"
            )
        if count < 1 or self.pieces % count:
            raise LayoutError(f"{self.pieces} KV heads cannot be cut into {count} equal shards")
        return msgspec.structs.replace(self, pieces=self.pieces // count)

    @classmethod
    def from_tensors(
        cls, kv_caches: KVCaches, kind: PageKind | None = None, *, block_size: int = 0
    ) -> KVLayout:
        """Derives the layout from the engine's tensors, one per layer, in layer order.

        `kind` is needed only if shapes do not distinguish `KV_OUTER` from `KV_INNER` (both first dimensions
        are 2), and for `OPAQUE`, which needs `block_size`, too. Raises LayoutError for tensors that differ
        from each other, have an unknown shape, or have pages that are not contiguous.
        """
        tensors = layer_tensors(kv_caches)
        if not tensors:
            raise LayoutError("no KV tensors given")
        first = tensors[0]
        for index, tensor in enumerate(tensors):
            if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
                raise LayoutError(
                    f"layer {index} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, layer 0 is "
                    f"{list(first.shape)} {first.dtype} on {first.device}: all layers must agree"
                )
        shape = tuple(int(size) for size in first.shape)
        kind = kind or _guess(first)
        if len(shape) != len(_AXES[kind]) or 0 in shape:
            raise LayoutError(
                f"a {kind.value} tensor has {len(_AXES[kind])} dimensions, none empty; got {list(shape)}"
            )
        for index, tensor in enumerate(tensors):
            if not _page(kind, tensor).is_contiguous():
                raise LayoutError(
                    f"layer {index}: the pages of {kind.value} {list(shape)} with strides {list(tensor.stride())} are not "
                    "contiguous, so a block cannot be moved as one run of bytes"
                )
        if kind is PageKind.OPAQUE and (first.element_size() != 1 or block_size < 1):
            raise LayoutError(
                f"opaque pages are bytes of blocks of a given size; got {first.dtype} and a block size of {block_size}"
            )
        sizes = dict.fromkeys(("pieces", "elements"), 1)
        for axis, size in zip(_AXES[kind], shape, strict=True):
            sizes[axis] = sizes.get(axis, 1) * size
        return cls(
            kind=kind,
            layers=len(tensors),
            blocks=sizes["blocks"],
            block_size=sizes.get("tokens", block_size),
            pieces=sizes["pieces"],
            piece_bytes=sizes["elements"] * first.element_size(),
            dtype=str(first.dtype).removeprefix("torch."),
        )


def layer_tensors(kv_caches: KVCaches) -> list[torch.Tensor]:
    """Returns the tensors in layer order, whether the engine keeps them in a mapping or a sequence."""
    return list(kv_caches.values()) if isinstance(kv_caches, Mapping) else list(kv_caches)


def shard_tensors(tensors: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Returns, for each of `count` shards, a view of its part of each `HEADS_FIRST` tensor; see
    `KVLayout.shard`."""
    if count == 1:
        return [list(tensors)]
    return [list(views) for views in zip(*(tensor.chunk(count, dim=1) for tensor in tensors), strict=True)]


def _page(kind: PageKind, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the first page, with its dimensions in the order in which the bytes should lie."""
    if kind is PageKind.KV_OUTER:
        return tensor[0, 0]
    return tensor[0].transpose(0, 1) if kind is PageKind.HEADS_LAST else tensor[0]


def _guess(tensor: torch.Tensor) -> PageKind:
    shape = tuple(tensor.shape)
    if len(shape) == 3:
        return PageKind.MLA
    if len(shape) == 4:
        heads_last = not tensor[0].is_contiguous() and tensor[0].transpose(0, 1).is_contiguous()
        return PageKind.HEADS_LAST if heads_last else PageKind.HEADS_FIRST
    if len(shape) == 5 and (shape[0] == 2) != (shape[1] == 2):
        return PageKind.KV_OUTER if shape[0] == 2 else PageKind.KV_INNER
    raise LayoutError(
        f"unknown layout of a KV tensor of shape {list(shape)}; known are [blocks, kv_heads, block_size, 2*head_dim], "
        "[2, blocks, block_size, kv_heads, head_dim], [blocks, 2, block_size, kv_heads, head_dim] and "
        "[blocks, block_size, dim]; pass `kind` if two of them fit"
    )
