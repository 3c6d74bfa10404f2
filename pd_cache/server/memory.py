"""Shares KV tensors: an engine and its server map the same memory, so no connection carries the bytes of a
cache.

On the CPU, a torch storage moves to shared memory in place, so that every view of it stays valid. The engine
passes it as a file descriptor. On a GPU, the engine passes a CUDA IPC handle. In both cases the server sees
the engine's own pages.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pd_cache.errors import PdCacheError
from pd_cache.layout import KVCaches, layer_tensors
from pd_cache.server.protocol import CpuStorage, CudaStorage, Storage, TensorView


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


# --- an engine lends its tensors ----------------------------------------------------------------------------

_SHARED_MEMORY = "/dev/shm"


class SharingError(PdCacheError):
    """Raised if KV tensors cannot be shared, or are not where the engine says."""


class Shared(NamedTuple):
    """The description of an engine's tensors for its server."""

    storages: tuple[Storage, ...]
    tensors: tuple[TensorView, ...]
    descriptors: list[int]
    """A descriptor for each CPU storage, in order. The caller must close them."""


def share_tensors(kv_caches: KVCaches) -> Shared:
    """Makes the tensors' memory mappable by another process, and returns its description. CPU storages move
    to shared memory, once.

    Earlier pointers into a CPU storage become invalid; tensors and views stay valid. Raises SharingError if
    the tensors cannot be shared, for example because shared memory is full.
    """
    storages: list[Storage] = []
    places: dict[int, int] = {}
    views: list[TensorView] = []
    descriptors: list[int] = []
    tensors = layer_tensors(kv_caches)
    if not tensors:
        raise SharingError("no KV tensors given")
    try:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            identity = storage._cdata
            if identity not in places:
                places[identity] = len(storages)
                if tensor.device.type == "cpu":
                    descriptors.append(_share_cpu(storage))
                    storages.append(CpuStorage(storage.nbytes()))
                elif tensor.device.type == "cuda":
                    storages.append(_export_cuda(storage))
                else:
                    raise SharingError(
                        f"KV tensors on {tensor.device} cannot be shared; expected cpu or cuda"
                    )
            views.append(
                TensorView(
                    places[identity],
                    int(tensor.storage_offset()),
                    tuple(tensor.shape),
                    tuple(tensor.stride()),
                    str(tensor.dtype).removeprefix("torch."),
                )
            )
    except BaseException:
        close_all(descriptors)
        raise
    return Shared(tuple(storages), tuple(views), descriptors)


def record_event(tensor: torch.Tensor) -> Any:
    """Returns a CUDA event that follows all work on the calling thread's current stream of the tensor's
    device; None on a CPU."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def event_handle(event: Any) -> bytes:
    """Returns a handle by which another process can wait for an event of `record_event`; empty for None."""
    return b"" if event is None else bytes(event.ipc_handle())


def wait_for_event(device: torch.device, handle: bytes) -> None:
    """Makes all later work on this thread's stream wait for an engine's event."""
    event = torch.cuda.Event.from_ipc_handle(device, handle)  # type: ignore[no-untyped-call]
    torch.cuda.current_stream(device).wait_event(event)


def own_stream(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Makes a new stream of a GPU. Returns a function whose contexts make it the calling thread's current
    stream. For a CPU, the contexts are empty."""
    if device.type != "cuda":
        return contextlib.nullcontext
    return functools.partial(torch.cuda.stream, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which a GPU is the calling thread's current device; an empty context for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _share_cpu(storage: torch.UntypedStorage) -> int:
    if not storage.is_shared():
        room = os.statvfs(_SHARED_MEMORY)
        free = room.f_bavail * room.f_frsize
        if storage.nbytes() > free:  # torch would not notice, and a later write would kill the process
            raise SharingError(
                f"{storage.nbytes()} bytes of KV cache do not fit into {_SHARED_MEMORY}, which has {free} free; enlarge it, "
                "e.g. with docker's --shm-size"
            )
    descriptor, _ = storage._share_fd_cpu_()
    return os.dup(descriptor)  # the storage keeps and closes its own descriptor


def gpus() -> list[str]:
    """Returns the UUIDs of this process's GPUs, by torch's ordinal. CUDA_VISIBLE_DEVICES gives each process
    ordinals of its own."""
    return [
        str(torch.cuda.get_device_properties(ordinal).uuid) for ordinal in range(torch.cuda.device_count())
    ]


def _export_cuda(storage: torch.UntypedStorage) -> CudaStorage:
    shared = storage._share_cuda_()  # type: ignore[no-untyped-call]
    ordinal, handle, nbytes, offset, ref_counter, ref_counter_offset, event, event_sync = shared
    return CudaStorage(
        nbytes, gpus()[ordinal], handle, offset, ref_counter, ref_counter_offset, event, event_sync
    )


def import_cuda(storage: CudaStorage) -> torch.Tensor:
    """Maps an engine's storage and returns its bytes. Raises SharingError if this process does not have the
    storage's GPU, or if CUDA refuses."""
    here = gpus()
    if storage.gpu not in here:
        raise SharingError(
            f"the tensor is on GPU {storage.gpu}, but this process has {', '.join(here) or 'none'}: a cache server needs all GPUs of its "
            "engines in CUDA_VISIBLE_DEVICES"
        )
    ordinal = here.index(storage.gpu)
    torch.cuda.init()  # type: ignore[no-untyped-call]  # without this, torch ends the process if it has not used a GPU before
    try:
        untyped = torch.UntypedStorage._new_shared_cuda(
            ordinal,
            storage.handle,
            storage.nbytes,
            storage.offset,
            storage.ref_counter,
            storage.ref_counter_offset,
            storage.event,
            storage.event_sync,
        )
    except RuntimeError as error:
        raise SharingError(
            f"CUDA does not map {storage.nbytes} bytes of GPU {storage.gpu}: {error}"
        ) from None
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", ordinal)).set_(untyped)
