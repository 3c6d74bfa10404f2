"""Gather and scatter between paged caches and chunk objects, on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pd_cache.layout import KVLayout, layer_tensors
from pd_cache.paged.base import ChunkSlots, PagedCopier, PendingCopy, plan
from transfer.staging import Pin

__all__ = ["ChunkSlots", "Completion", "DeviceMark", "PagedCopier", "PendingCopy", "host_pin", "open_copier", "plan"]


class DeviceMark:
    """What the calling thread has given the device of `tensor` to do so far: for another thread to come after.

    On the CPU everything has happened when its call returned, and there is nothing to wait for.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._follow = None
        if tensor.device.type == "cuda":
            from pd_cache.paged.cuda import mark

            self._follow = mark(tensor.device)

    def follow(self) -> None:
        """Orders what the calling thread's current stream does from now on after the mark."""
        if self._follow is not None:
            self._follow()


def open_copier(kv_caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor], layout: KVLayout) -> PagedCopier:
    """Returns the copier for the device that the tensors lie on. Raises ValueError for tensors that do not fit `layout`."""
    tensors = layer_tensors(kv_caches)
    device = tensors[0].device.type if tensors else "none"
    if device == "cpu":
        from pd_cache.paged.cpu import CpuPagedCopier

        return CpuPagedCopier(kv_caches, layout)
    if device == "cuda":
        from pd_cache.paged.cuda import CudaPagedCopier

        return CudaPagedCopier(kv_caches, layout)
    raise ValueError(f"no way to move pages of {device} tensors; cpu and cuda are known")


def host_pin() -> Pin | None:
    """Returns what page-locks staging memory for the GPU of this process; None where there is none."""
    if torch.version.cuda is None:
        return None
    from pd_cache.paged import cuda

    return cuda.pin_host_memory if cuda.is_available() else None
