"""Gather and scatter between paged caches and chunk objects, on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pd_cache.layout import KVLayout
from pd_cache.paged.base import PagedCopier
from transfer.staging import Pin


def mark(tensor: torch.Tensor) -> Callable[[], None] | None:
    """Marks the work that the calling thread has queued on the device of `tensor` so far. Returns a function
    that orders later work on its caller's current stream after the mark.

    On the CPU, a call's work is done when the call returns, so there is nothing to wait for: returns None.
    """
    if tensor.device.type != "cuda":
        return None
    from pd_cache.paged import cuda

    return cuda.mark(tensor.device)


def open_copier(tensors: Sequence[torch.Tensor], layout: KVLayout) -> PagedCopier:
    """Returns the copier for these tensors, from which `layout` was derived. Raises ValueError unless they
    are on the CPU or on CUDA."""
    device = tensors[0].device.type
    if device == "cpu":
        from pd_cache.paged.cpu import CpuPagedCopier

        return CpuPagedCopier(tensors, layout)
    if device == "cuda":
        from pd_cache.paged.cuda import CudaPagedCopier

        return CudaPagedCopier(tensors, layout)
    raise ValueError(f"no way to move pages of {device} tensors; cpu and cuda are known")


def own_stream(device: torch.device) -> None:
    """Gives the calling thread a stream of its own on a GPU. From now on, its copies wait only for marks that
    it follows, and no other thread's work waits for them. Does nothing on the CPU."""
    if device.type == "cuda":
        from pd_cache.paged.cuda import take_stream

        take_stream(device)


def has_gpu() -> bool:
    """Returns whether this process can use a GPU."""
    if torch.version.cuda is None:
        return False
    from pd_cache.paged import cuda

    return cuda.is_available()


def host_pin() -> Pin | None:
    """Returns a function that page-locks staging memory in the context of the calling thread's current GPU.
    Any thread may call the function. Returns None if there is no GPU."""
    if not has_gpu():
        return None
    from pd_cache.paged.cuda import pin_here

    return pin_here()
