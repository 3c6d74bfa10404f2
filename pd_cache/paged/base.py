"""Moves pages between an engine's paged cache and contiguous chunk objects: the interface and its pure parts.

A chunk object holds its pages in the order plane (layer by layer), block, content of the page, in
`layout.chunk_bytes(chunk_size)` bytes; see `pd_cache.layout` for planes and pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from pd_cache.chunks import Names, check_names
from pd_cache.layout import KVLayout


class Slots(NamedTuple):
    """Blocks of a paged cache, given by the slots of their tokens, as in engines' slot mappings."""

    mapping: Tensor
    """int `[chunks * chunk_size]`: `block * block_size + offset` of each token. The tokens of a block follow
    one another."""


BlocksOrSlots = Sequence[int] | Slots
"""The places of chunks in a paged cache: the blocks, in order, or the slots of the tokens."""


class PendingCopy(Protocol):
    """A gather or scatter that may still be running on a device."""

    def wait(self) -> int:
        """Waits for the end of the copy. After that, a gathered buffer can be read, and a scattered buffer
        can be reused. Returns the checksum of the chunk object.

        The checksum is end to end: it covers the bytes in the pages, not those in staging memory, to which an
        abandoned transfer may still write.
        """


class CopyDone:
    """A copy that has ended."""

    def __init__(self, payload_checksum: int) -> None:
        self._checksum = payload_checksum

    def wait(self) -> int:
        return self._checksum


class PagedCopier(ABC):
    """Copies chunks out of and into the tensors of one paged cache.

    A chunk is given by its blocks: int64 `[chunk_size / block_size]`, on the CPU. Negative blocks, at the
    start and at the end, are left out: a scatter does not write them, and a gather writes zeros for them.

    The engine keeps ownership of the tensors; the copier never allocates cache memory. Thread-safe as long as
    no two calls write the same blocks.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout

    @abstractmethod
    def gather(self, blocks: Tensor, out: Tensor) -> PendingCopy:
        """Copies the chunk's blocks into `out`, a contiguous uint8 CPU tensor of exactly the chunk's
        bytes."""

    @abstractmethod
    def scatter(self, blocks: Tensor, source: Tensor) -> PendingCopy:
        """Copies `source`, in the layout that `gather` produces, into the chunk's blocks. Other blocks are
        untouched."""

    def close(self) -> None:  # noqa: B027 - only copiers with device resources have something to do
        """Releases device resources."""


LEFT_OUT = -1
"""The block, and the slot of each of its tokens, that a scatter leaves out."""

LeavingOut = Literal["nothing", "start", "ends"]
"""Where blocks may be left out: nowhere, at the start, or at the start and at the end."""


def plan(
    places: BlocksOrSlots, layout: KVLayout, chunk_size: int, *, may_leave_out: LeavingOut = "nothing"
) -> list[Tensor]:
    """Returns the blocks of each chunk, as copiers take them.

    `may_leave_out` says where blocks may be `LEFT_OUT`. Raises ValueError for places outside the cache, for
    places that occur twice, for places of a part of a chunk, or for slots of a part of a block.
    """
    blocks = (
        _blocks_of(places, layout.block_size) if isinstance(places, Slots) else _integers("blocks", places)
    )
    per_chunk = chunk_size // layout.block_size
    if blocks.numel() % per_chunk:
        raise ValueError(f"{blocks.numel()} blocks are not a whole number of chunks of {per_chunk} blocks")
    if not blocks.numel():
        return []
    taken = blocks
    if may_leave_out != "nothing":
        wanted = (blocks != LEFT_OUT).nonzero()
        end = int(wanted[-1]) + 1 if wanted.numel() and may_leave_out == "ends" else blocks.numel()
        taken = blocks[int(wanted[0]) : end] if wanted.numel() else blocks[:0]
    if taken.numel():
        low, high = (int(value) for value in torch.aminmax(taken))
        if low < 0 or high >= layout.blocks:
            raise ValueError(f"blocks must lie in [0, {layout.blocks}), got values from {low} to {high}")
        if torch.unique(taken).numel() != taken.numel():
            raise ValueError("a block is named twice: two places of a prompt cannot share one")
    return list(blocks.view(-1, per_chunk).unbind())


def plan_named(
    names: Names, places: BlocksOrSlots, layout: KVLayout, chunk_size: int, *, loads: bool, tail: int
) -> list[Tensor]:
    """As `plan`, for a load or a store of chunks with names. A store may leave out blocks only of layers with
    a `tail`, which need only the ends of prefixes.

    Also raises ValueError for bad names, or if names and places are not equally many chunks.
    """
    check_names(names)
    may_leave_out: LeavingOut = "ends" if loads else "start" if tail else "nothing"
    chunks = plan(places, layout, chunk_size, may_leave_out=may_leave_out)
    if len(chunks) != len(names):
        raise ValueError(f"{len(names)} chunk names, but the places of {len(chunks)}")
    return chunks


def _blocks_of(places: Slots, size: int) -> Tensor:
    """Returns the blocks of a slot mapping. Raises ValueError unless it consists of whole blocks of `size`
    tokens."""
    slots = _integers("slot_mapping", places.mapping)
    if slots.numel() % size:
        raise ValueError(f"{slots.numel()} slots are not a whole number of blocks of {size} tokens")
    by_block = slots.view(-1, size)
    heads = by_block[:, 0]
    whole = (heads >= 0) & (heads % size == 0) & (by_block == heads[:, None] + torch.arange(size)).all(dim=1)
    left_out = (by_block == LEFT_OUT).all(dim=1)
    if not bool((whole | left_out).all()):
        raise ValueError(
            f"slot_mapping must be of whole blocks of {size} tokens, with the tokens of a block in order"
        )
    return torch.where(left_out, LEFT_OUT, heads // size)


def _integers(what: str, places: Sequence[int] | Tensor) -> Tensor:
    """Returns a copy on the CPU, which the caller cannot change after the check."""
    try:
        blocks = torch.as_tensor(places if len(places) else torch.empty(0, dtype=torch.int64))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{what} must be integers: {error}") from None
    if blocks.dim() != 1 or blocks.is_floating_point() or blocks.is_complex() or blocks.dtype == torch.bool:
        raise ValueError(f"{what} must be 1-D of integers, got {tuple(blocks.shape)} {blocks.dtype}")
    return blocks.detach().to(device="cpu", dtype=torch.int64, copy=True)


def check_payload(blocks: Tensor, payload: Tensor, layout: KVLayout) -> None:
    """Asserts that `payload` is as large as these blocks, and contiguous bytes on the CPU."""
    assert payload.numel() == blocks.numel() * layout.block_bytes
    assert (payload.dtype, payload.device.type, payload.is_contiguous()) == (torch.uint8, "cpu", True)


def plane_bytes(tensors: Sequence[Tensor], layout: KVLayout) -> list[Tensor]:
    """Returns each plane of the tensors, from which `layout` was derived, as a uint8 view `[blocks,
    page_bytes]` of the engine's own memory."""
    planes = []
    for tensor in tensors:
        parts = tensor.unbind(0) if layout.planes == 2 * layout.layers else (tensor,)
        for part in parts:
            element = part.element_size()
            view = torch.empty(0, dtype=torch.uint8, device=part.device)
            view.set_(
                part.untyped_storage(),
                part.storage_offset() * element,
                (layout.blocks, layout.page_bytes),
                (part.stride(0) * element, 1),
            )
            planes.append(view)
    return planes
