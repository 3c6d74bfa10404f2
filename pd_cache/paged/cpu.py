"""Gather and scatter on CPU tensors.

NumPy moves the bytes, not torch. NumPy's index operations run on the calling thread alone and release the
GIL. Torch's operations wake OpenMP threads, which then spin for a while beside the transfers: on two cores
that cost a fifth of the throughput (measured).

Pages move as the widest elements that their size and address allow. If all planes are evenly spaced in one
storage (vLLM's single allocation), one operation moves pages of several layers.

A chunk moves step by step. The checksum of a step's bytes is computed while they are in the processor's
cache. It covers the engine's pages, before a gather and after a scatter, and never staging memory, to which
an abandoned transfer may still write. Small pages go through memory of the thread, and their checksum is
computed there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_cache.layout import Digest, KVLayout
from pd_cache.paged.base import CopyDone, PagedCopier, PendingCopy, check_payload, plane_bytes

Array = npt.NDArray[Any]

_LARGE_PAGE = 16 << 10
"""Pages of at least this size are hashed one by one in place. For smaller pages, Python's share of the time
would be too large."""
_STEP_BYTES = 1 << 20
"""The bytes of a step: few enough for the caches of a core, and enough for Python's share of the time to be
small."""

_WIDTHS = ((16, np.complex128), (8, np.int64), (4, np.int32), (2, np.int16), (1, np.uint8))


class _Places(NamedTuple):
    """The places of some blocks of a chunk."""

    cut: slice
    """The blocks' numbers within the chunk."""
    blocks: Array
    kept: range
    """The numbers of those blocks that are not left out."""
    in_place: list[int]
    """The blocks, if their pages are hashed in place; empty if a copy is hashed."""


class CpuPagedCopier(PagedCopier):
    """Copies on the calling thread, so that a copy has ended when its call returns."""

    def __init__(self, tensors: Sequence[Tensor], layout: KVLayout) -> None:
        super().__init__(layout)
        planes = plane_bytes(tensors, layout)
        places = [int(value) for plane in planes for value in (plane.storage_offset(), plane.stride(0))]
        sizes = [layout.page_bytes, *places]
        self._dtype = next(dtype for width, dtype in _WIDTHS if all(size % width == 0 for size in sizes))
        self._own = threading.local()
        self._groups = [group.numpy().view(self._dtype) for group in _stack(planes)]

    def gather(self, blocks: Tensor, out: Tensor) -> PendingCopy:
        digest = Digest()
        for planes, places, part in self._steps(blocks, out):
            if places.in_place:
                for plane, pages in zip(planes, part, strict=True):
                    for block, page in zip(places.in_place, pages, strict=True):
                        digest.update(plane[block])
                        page[...] = plane[block]
            else:
                pages = self._pages(planes, places, part.shape)
                digest.update(pages.view(np.uint8).data)
                part[...] = pages
        return CopyDone(digest.intdigest())

    def scatter(self, blocks: Tensor, source: Tensor) -> PendingCopy:
        digest = Digest()
        for planes, places, part in self._steps(blocks, source):
            if places.in_place:
                # NumPy copies a page fastest if it is one element, and on the last axis it still releases the
                # GIL
                whole = f"V{self.layout.page_bytes}"
                for plane, target, pages in zip(planes, planes.view(whole), part.view(whole), strict=True):
                    target[places.blocks] = pages
                    for block in places.in_place:
                        digest.update(plane[block])
            else:
                pages = self._scratch(part.shape)
                pages[...] = part
                digest.update(pages.view(np.uint8).data)
                self._write(planes, places, pages)
        return CopyDone(digest.intdigest())

    def _steps(self, blocks: Tensor, payload: Tensor) -> Iterator[tuple[Array, _Places, Array]]:
        """Cuts a chunk object into contiguous parts `[planes, blocks, elements of a page]`, in order.

        Yields for each part the engine's planes, the places of its blocks, and the part itself.
        """
        check_payload(blocks, payload, self.layout)
        count, ids = blocks.numel(), blocks.numpy()
        kept = (blocks >= 0).nonzero()
        first, end = (int(kept[0]), int(kept[-1]) + 1) if kept.numel() else (0, 0)
        pages = payload.numpy().view(self._dtype).reshape(self.layout.planes, count, -1)
        large = self.layout.page_bytes >= _LARGE_PAGE
        per_step = max(1, _STEP_BYTES // self.layout.page_bytes)
        runs = []
        for start in range(0, count, per_step):
            cut = slice(start, min(start + per_step, count))
            left = range(max(0, first - start), max(0, min(end, cut.stop) - start))
            in_place = ids[cut].tolist() if large and len(left) == len(ids[cut]) else []
            runs.append(_Places(cut, ids[cut], left, in_place))
        # pages in place are taken plane by plane in any case
        together = len(runs) == 1 and bool(runs[0].in_place)
        planes_per_step = self.layout.planes if together else max(1, per_step // count)
        done = 0
        for group in self._groups:
            for first in range(0, len(group), planes_per_step):
                planes = group[first : first + planes_per_step]
                part = pages[done : done + len(planes)]
                done += len(planes)
                for places in runs:
                    yield planes, places, part[:, places.cut]

    def _pages(self, planes: Array, places: _Places, shape: tuple[int, ...]) -> Array:
        """Returns a copy of pages of the cache, in memory of this thread. `shape` is `[planes, blocks,
        elements of a page]`."""
        pages = self._scratch(shape)
        if planes.flags.c_contiguous:
            # clip: the indices were checked, and only this mode writes to `out` without a copy in between
            np.take(planes, places.blocks, axis=1, out=pages, mode="clip")
        else:  # `take` would first copy the whole strided array
            pages[...] = planes[:, places.blocks]
        pages[:, : places.kept.start] = 0
        pages[:, places.kept.stop :] = 0
        return pages

    def _write(self, planes: Array, places: _Places, pages: Array) -> None:
        """Copies `pages`, `[planes, blocks, elements of a page]`, into the cache."""
        start, end = places.kept.start, places.kept.stop
        for plane, page in zip(planes, pages, strict=True):
            plane[places.blocks[start:end]] = page[start:end]

    def _scratch(self, shape: tuple[int, ...]) -> Array:
        """Returns memory of this thread, with arbitrary contents. The next call returns the same memory."""
        count = int(np.prod(shape))
        if getattr(self._own, "memory", None) is None or self._own.memory.size < count:
            self._own.memory = np.empty(count, self._dtype)
        memory: Array = self._own.memory
        return memory[:count].reshape(shape)


def _stack(planes: list[Tensor]) -> list[Tensor]:
    """Returns the planes as `[planes, blocks, page_bytes]` views: one view if they are evenly spaced in one
    storage, otherwise one each."""
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
