"""Moving pages between an engine's paged cache and contiguous chunk objects: the interface and its pure parts.

A chunk object holds its pages in the order plane (layer by layer), block, content of the page, in `layout.chunk_bytes(chunk_size)` bytes;
see `pd_cache.layout` for planes and pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch

from pd_cache.chunks import check_names
from pd_cache.layout import KVLayout


class Slots(NamedTuple):
    """Places of single tokens in a paged cache, for an engine that does not work in whole blocks."""

    mapping: torch.Tensor
    """int `[chunks * chunk_size]`: `block * block_size + offset` of each token."""


BlocksOrSlots = Sequence[int] | Slots
"""Where chunks lie in a paged cache: the blocks, in order, or the slots of the tokens."""


class ChunkSlots(NamedTuple):
    """Where the tokens of one chunk lie: whole blocks, or single slots. Exactly one of the two is given.

    Negative values stand for tokens that are left out: a scatter does not write them, and a gather makes them zeros. Whole blocks only, at
    the start and at the end.
    """

    blocks: torch.Tensor | None
    """int64 `[chunk_size / block_size]`, on the CPU: block b of the chunk is block `blocks[b]` of the cache."""
    slots: torch.Tensor | None
    """int64 `[chunk_size]`, on the CPU: `block * block_size + offset` of each token."""

    def kept(self, block_size: int) -> range:
        """Returns the places, within the chunk, of the blocks that are not left out."""
        places = self.slots[::block_size] if self.slots is not None else self.blocks
        assert places is not None
        kept = (places >= 0).nonzero()
        return range(int(kept[0]), int(kept[-1]) + 1) if kept.numel() else range(0)


class PendingCopy(Protocol):
    """A gather or scatter that may still be running on a device."""

    def wait(self) -> int:
        """Waits for the end: then a gathered buffer can be read, and a scattered one reused. Returns the checksum of the chunk object.

        On the CPU it is end to end: of what the pages hold, and not of staging memory, to which a transfer that was given up may still
        write. On CUDA it is of staging memory, taken after the copy.
        """


class CopyDone:
    """A copy that has ended."""

    def __init__(self, payload_checksum: int) -> None:
        self._checksum = payload_checksum

    def wait(self) -> int:
        return self._checksum


class PagedCopier(ABC):
    """Copies chunks out of and into the tensors of one paged cache.

    The engine keeps ownership of the tensors; the copier never allocates cache memory. Thread-safe as long as no two calls write the same
    slots.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout

    @abstractmethod
    def gather(self, chunk: ChunkSlots, out: torch.Tensor) -> PendingCopy:
        """Copies the chunk's tokens into `out`, a contiguous uint8 CPU tensor of exactly the chunk's bytes."""

    @abstractmethod
    def scatter(self, chunk: ChunkSlots, source: torch.Tensor) -> PendingCopy:
        """Copies `source`, in the layout that `gather` produces, into the chunk's slots. Other slots are untouched."""

    def close(self) -> None:  # noqa: B027 - only copiers with device resources have something to do
        """Releases device resources."""


LEFT_OUT = -1
"""The block, or the slot of a token, that a scatter leaves out."""

LeavingOut = Literal["nothing", "start", "ends"]
"""Where blocks may be left out: nowhere, at the start, or at the start and at the end."""


def leaving_out(*, loads: bool, keeps_tail: bool) -> LeavingOut:
    """Returns where a load, or a store, may leave out blocks. A store may do so only of layers that keep the ends of prefixes."""
    if loads:
        return "ends"
    return "start" if keeps_tail else "nothing"


def plan(
    places: BlocksOrSlots, layout: KVLayout, chunk_size: int, *, may_leave_out: LeavingOut = "nothing"
) -> list[ChunkSlots]:
    """Cuts the blocks, or the slots, of whole chunks into `ChunkSlots`.

    `may_leave_out` says where blocks may be `LEFT_OUT`; slots may be so at the start only. Raises ValueError for places outside the cache,
    for places that occur twice, or for a number of places that is not a whole number of chunks.
    """
    if isinstance(places, Slots):
        return plan_slots(places.mapping, layout, chunk_size, may_leave_out=may_leave_out != "nothing")
    blocks = _block_ids(places)
    per_chunk = chunk_size // layout.block_size
    if blocks.numel() % per_chunk:
        raise ValueError(f"{blocks.numel()} blocks are no whole number of chunks of {per_chunk} blocks")
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
    return [ChunkSlots(row, None) for row in blocks.view(-1, per_chunk).unbind()]


def plan_named(
    names: Sequence[bytes], places: BlocksOrSlots, layout: KVLayout, chunk_size: int, *, may_leave_out: LeavingOut
) -> list[ChunkSlots]:
    """Returns `plan` of the places of these chunks. Raises ValueError as it does, for other names, or for places of another number of
    chunks."""
    check_names(names)
    chunks = plan(places, layout, chunk_size, may_leave_out=may_leave_out)
    if len(chunks) != len(names):
        raise ValueError(f"{len(names)} chunks were named, and the places are of {len(chunks)}")
    return chunks


def plan_slots(
    slot_mapping: torch.Tensor, layout: KVLayout, chunk_size: int, *, may_leave_out: bool = False
) -> list[ChunkSlots]:
    """Cuts the slot mapping of whole chunks, int `[chunks * chunk_size]`, into `ChunkSlots`.

    With `may_leave_out` it may begin with whole blocks of `LEFT_OUT`. Raises ValueError for a mapping of another type or shape, for slots
    outside the cache, or for two tokens that share a slot.
    """
    if slot_mapping.dim() != 1 or slot_mapping.is_floating_point() or slot_mapping.dtype == torch.bool:
        raise ValueError(f"slot_mapping must be 1-D of integers, got {tuple(slot_mapping.shape)} {slot_mapping.dtype}")
    slots = slot_mapping.detach().to(device="cpu", dtype=torch.int64)
    if slots.numel() % chunk_size:
        raise ValueError(f"{slots.numel()} slots are no whole number of chunks of {chunk_size}")
    if not slots.numel():
        return []
    size, capacity = layout.block_size, layout.blocks * layout.block_size
    left_out = int((slots == LEFT_OUT).sum()) if may_leave_out else 0
    if left_out:
        if left_out % size or bool((slots[:left_out] != LEFT_OUT).any()):
            raise ValueError(f"only whole blocks at the start may be left out, got {left_out} slots of {LEFT_OUT}")
        # numbered below zero, each differently, so that the code below treats them like other blocks
        slots = torch.cat((torch.arange(-left_out, 0), slots[left_out:]))
    if left_out == slots.numel():
        low, high = 0, 0
    else:
        low, high = (int(value) for value in torch.aminmax(slots[left_out:]))
    if low < 0 or high >= capacity:
        raise ValueError(f"slots must lie in [0, {capacity}), got values from {low} to {high}")
    by_block = slots.view(-1, size)
    heads = by_block[:, 0]
    whole = (heads % size == 0) & (by_block == heads.unsqueeze(1) + torch.arange(size)).all(dim=1)
    all_whole = bool(whole.all())
    taken = heads // size if all_whole else slots
    if torch.unique(taken).numel() != taken.numel():
        raise ValueError("slot_mapping names a slot twice: two tokens cannot share one")
    chunks = slots.numel() // chunk_size
    if all_whole:
        return [ChunkSlots(blocks, None) for blocks in taken.view(chunks, -1).unbind()]
    per_chunk = whole.view(chunks, -1).all(dim=1).tolist()
    return [
        ChunkSlots(mapping.view(-1, size)[:, 0] // size, None) if is_whole else ChunkSlots(None, mapping)
        for is_whole, mapping in zip(per_chunk, slots.view(chunks, -1).unbind(), strict=True)
    ]


def _block_ids(places: Sequence[int]) -> torch.Tensor:
    """Returns a copy on the CPU, which the caller cannot change after it was checked."""
    try:
        blocks = torch.as_tensor(places if len(places) else torch.empty(0, dtype=torch.int64))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"blocks must be integers: {error}") from None
    if blocks.dim() != 1 or blocks.is_floating_point() or blocks.is_complex() or blocks.dtype == torch.bool:
        raise ValueError(f"blocks must be 1-D of integers, got {tuple(blocks.shape)} {blocks.dtype}")
    return blocks.detach().to(device="cpu", dtype=torch.int64, copy=True)


def chunk_blocks(chunk: ChunkSlots, payload: torch.Tensor, layout: KVLayout) -> int:
    """Returns how many blocks the chunk has; `payload` is so many blocks, as contiguous bytes on the CPU."""
    if chunk.blocks is not None:
        blocks = chunk.blocks.numel()
    else:
        assert chunk.slots is not None
        blocks = chunk.slots.numel() // layout.block_size
    assert payload.numel() == blocks * layout.block_bytes
    assert (payload.dtype, payload.device.type, payload.is_contiguous()) == (torch.uint8, "cpu", True)
    return blocks


def plane_bytes(tensors: Sequence[torch.Tensor], layout: KVLayout) -> list[torch.Tensor]:
    """Returns each plane of the tensors, from which `layout` was derived, as a uint8 view `[blocks, page_bytes]` of the engine's own memory."""
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
