"""Gather and scatter on CPU tensors.

Pages move as the widest elements that their size and place allow: torch's index kernels cost per element, and 16-byte
elements reach memory speed where single bytes reach a tenth of it. Where all planes lie evenly spaced in one storage
(vLLM's single allocation), one operation moves all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from pd_cache.layout import KVLayout
from pd_cache.paged.base import DONE, ChunkSlots, Completion, PagedCopier, chunk_blocks, plane_bytes

_WIDTHS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def _widest(divisors: Sequence[int]) -> torch.dtype:
    return next(dtype for width, dtype in _WIDTHS if all(value % width == 0 for value in divisors))


class CpuPagedCopier(PagedCopier):
    """Synchronous copies with torch's own kernels, which let go of the GIL."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor], layout: KVLayout) -> None:
        super().__init__(layout)
        planes = plane_bytes(kv_caches, layout)
        if any(plane.device.type != "cpu" for plane in planes):
            raise ValueError(f"CpuPagedCopier needs CPU tensors, got {planes[0].device}")
        places = [int(value) for plane in planes for value in (plane.storage_offset(), plane.stride(0))]
        self._dtype = _widest([layout.piece_bytes, layout.page_bytes, *places])
        self._groups = [group.view(self._dtype) for group in _stack(planes)]

    def gather(self, chunk: ChunkSlots, out: torch.Tensor) -> Completion:
        target = self._object(chunk, out)
        done = 0
        for group in self._groups:
            part = target[done : done + group.shape[0]]
            done += group.shape[0]
            if chunk.blocks is not None:
                torch.index_select(group, 1, chunk.blocks, out=part)
            else:
                for plane, pages in zip(self._by_token(group), self._by_token(part), strict=True):
                    block, offset = self._split(chunk)
                    picked = plane[block, :, offset]  # [tokens, pieces, elements]
                    pages.permute(0, 2, 1, 3).copy_(picked.view(-1, self.layout.block_size, *picked.shape[1:]))
        return DONE

    def scatter(self, chunk: ChunkSlots, source: torch.Tensor) -> Completion:
        pages_of_all = self._object(chunk, source)
        done = 0
        for group in self._groups:
            part = pages_of_all[done : done + group.shape[0]]
            done += group.shape[0]
            if chunk.blocks is not None:
                group[:, chunk.blocks] = part
            else:
                for plane, pages in zip(self._by_token(group), self._by_token(part), strict=True):
                    block, offset = self._split(chunk)
                    plane[block, :, offset] = pages.permute(0, 2, 1, 3).flatten(0, 1)
        return DONE

    def _object(self, chunk: ChunkSlots, payload: torch.Tensor) -> torch.Tensor:
        """The chunk object as `[planes, blocks of the chunk, elements of a page]`."""
        blocks = chunk_blocks(chunk, payload, self.layout)
        return payload.view(self.layout.planes, blocks, self.layout.page_bytes).view(self._dtype)

    def _by_token(self, pages: torch.Tensor) -> torch.Tensor:
        """`[planes, blocks, page]` as `[planes, blocks, pieces, block_size, elements of a piece]`."""
        return pages.view(*pages.shape[:2], self.layout.pieces, self.layout.block_size, -1)

    def _split(self, chunk: ChunkSlots) -> tuple[torch.Tensor, torch.Tensor]:
        assert chunk.slots is not None
        return chunk.slots // self.layout.block_size, chunk.slots % self.layout.block_size


def _stack(planes: list[torch.Tensor]) -> list[torch.Tensor]:
    """The planes as `[planes, blocks, page_bytes]` views: one where they lie evenly spaced in one storage, else one each."""
    first = planes[0]
    starts = [plane.storage_offset() for plane in planes]
    steps = {after - before for before, after in itertools.pairwise(starts)}
    place = (first.untyped_storage().data_ptr(), first.stride())
    same = all((plane.untyped_storage().data_ptr(), plane.stride()) == place for plane in planes)
    if len(planes) > 1 and (not same or len(steps) != 1 or min(steps) <= 0):
        return [plane.unsqueeze(0) for plane in planes]
    step = steps.pop() if steps else first.numel()
    view = torch.empty(0, dtype=torch.uint8)
    view.set_(first.untyped_storage(), starts[0], (len(planes), *first.shape), (step, *first.stride()))
    return [view]
