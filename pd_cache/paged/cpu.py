"""Gather and scatter on CPU tensors.

NumPy moves the bytes, not torch. NumPy's index operations run on the calling thread alone and release the GIL. Torch's wake a team of
OpenMP threads, which then spin for a while beside the transfers that run at the same time: on two cores that cost a fifth of the
throughput (measured).

Pages move as the widest elements that their size and address allow. If all planes are evenly spaced in one storage (vLLM's single
allocation), a gather is one operation for all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pd_cache.layout import KVLayout
from pd_cache.paged.base import DONE, ChunkSlots, PagedCopier, PendingCopy, chunk_blocks, plane_bytes

Array = npt.NDArray[Any]

_WIDTHS = ((16, np.complex128), (8, np.int64), (4, np.int32), (2, np.int16), (1, np.uint8))


class CpuPagedCopier(PagedCopier):
    """Copies synchronously, on the calling thread."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor], layout: KVLayout) -> None:
        """Raises ValueError for tensors that are not on the CPU or do not fit `layout`."""
        super().__init__(layout)
        planes = plane_bytes(kv_caches, layout)
        if any(plane.device.type != "cpu" for plane in planes):
            raise ValueError(f"CpuPagedCopier needs CPU tensors, got {planes[0].device}")
        places = [int(value) for plane in planes for value in (plane.storage_offset(), plane.stride(0))]
        self._dtype = _widest([layout.piece_bytes, layout.page_bytes, *places])
        self._groups = [group.numpy().view(self._dtype) for group in _stack(planes)]

    def gather(self, chunk: ChunkSlots, out: torch.Tensor) -> PendingCopy:
        done = 0
        target = self._object(chunk, out)
        for group in self._groups:
            part = target[done : done + len(group)]
            done += len(group)
            if chunk.blocks is not None and group.flags.c_contiguous:
                # clip: the indices were checked, and only this mode writes to `out` without a copy in between
                np.take(group, chunk.blocks.numpy(), axis=1, out=part, mode="clip")
                continue
            if chunk.blocks is not None:  # `take` would first copy all of a strided array
                part[...] = group[:, chunk.blocks.numpy()]
                continue
            block, offset = self._split(chunk)
            for plane, pages in zip(self._by_token(group), self._by_token(part), strict=True):
                picked = plane[block, :, offset]  # [tokens, pieces, elements]
                pages.transpose(0, 2, 1, 3)[...] = picked.reshape(-1, self.layout.block_size, *picked.shape[1:])
        return DONE

    def scatter(self, chunk: ChunkSlots, source: torch.Tensor) -> PendingCopy:
        left = self.layout.planes
        pages_of_all = self._object(chunk, source)
        # backwards: the object's checksum was just computed, so its end is still in the processor's cache
        for group in reversed(self._groups):
            part = pages_of_all[left - len(group) : left]
            left -= len(group)
            if chunk.blocks is not None:
                blocks = chunk.blocks.numpy()
                first = int(np.count_nonzero(blocks < 0))  # the blocks to leave out come first
                for plane, pages in zip(group[::-1], part[::-1], strict=True):
                    plane[blocks[first:]] = pages[first:]
                continue
            block, offset = self._split(chunk)
            first = int(np.count_nonzero(block < 0))  # the blocks to leave out come first
            for plane, pages in zip(self._by_token(group), self._by_token(part), strict=True):
                tokens = pages.transpose(0, 2, 1, 3).reshape(-1, self.layout.pieces, pages.shape[3])
                plane[block[first:], :, offset[first:]] = tokens[first:]
        return DONE

    def _object(self, chunk: ChunkSlots, payload: torch.Tensor) -> Array:
        """Returns the chunk object as `[planes, blocks of the chunk, elements of a page]`."""
        blocks = chunk_blocks(chunk, payload, self.layout)
        return payload.numpy().view(self._dtype).reshape(self.layout.planes, blocks, -1)

    def _by_token(self, pages: Array) -> Array:
        """Returns `[planes, blocks, page]` as `[planes, blocks, pieces, block_size, elements of a piece]`."""
        return pages.reshape(*pages.shape[:2], self.layout.pieces, self.layout.block_size, -1)

    def _split(self, chunk: ChunkSlots) -> tuple[Array, Array]:
        assert chunk.slots is not None
        return np.divmod(chunk.slots.numpy(), self.layout.block_size)


def _widest(divisors: Sequence[int]) -> type[np.generic]:
    return next(dtype for width, dtype in _WIDTHS if all(value % width == 0 for value in divisors))


def _stack(planes: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the planes as `[planes, blocks, page_bytes]` views: one view if they are evenly spaced in one storage, otherwise one each."""
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
