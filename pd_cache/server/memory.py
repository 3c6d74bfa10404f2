"""Shares KV tensors: an engine and its server map the same memory, so no connection carries the bytes of a cache.

On the CPU, a torch storage moves to sealed shared memory in place, so that every view of it stays valid. The engine passes it as a file
descriptor. On a GPU, the engine passes a CUDA IPC handle. Either way the server sees the engine's own pages.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from pd_cache.errors import LayoutError, PdCacheError
from pd_cache.layout import KVLayout, PageKind, layer_tensors, shard_tensors
from pd_cache.paged import ChunkSlots, PagedCopier, PendingCopy, open_copier
from pd_cache.paged.base import CopyDone
from pd_cache.server.fence import AbandonedError, FenceView
from pd_cache.server.protocol import CpuStorage, CudaStorage, Register, Storage, TensorView
from pd_cache.server.sealed import check_sealed, close_all, is_sealed, reseat
from transfer.staging import prefault

_SHARED_MEMORY = "/dev/shm"


class SharingError(PdCacheError):
    """KV tensors that cannot be shared, or that do not lie where the engine says."""


class Shared(NamedTuple):
    """The description of an engine's tensors for its server."""

    storages: tuple[Storage, ...]
    tensors: tuple[TensorView, ...]
    descriptors: list[int]
    """One for each CPU storage, in order. The caller must close them."""


def share_tensors(kv_caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> Shared:
    """Makes the tensors' memory mappable by another process, and returns its description. CPU storages move to shared memory, once.

    Pointers into a CPU storage that were taken before become invalid; tensors and views stay valid. Raises SharingError if the tensors
    cannot be shared, for example for want of shared memory.
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
                    raise SharingError(f"KV tensors on {tensor.device} cannot be shared; expected cpu or cuda")
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
    """Returns a CUDA event after all work on the calling thread's present stream of the tensor's device; None on a CPU."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def event_handle(event: Any) -> bytes:
    """Returns a handle with which another process can wait for an event of `record_event`; empty for None."""
    return b"" if event is None else bytes(event.ipc_handle())


def _share_cpu(storage: torch.UntypedStorage) -> int:
    if not storage.is_shared():
        room = os.statvfs(_SHARED_MEMORY)
        free = room.f_bavail * room.f_frsize
        if storage.nbytes() > free:  # torch would not notice, and a later write would kill the process
            raise SharingError(
                f"{storage.nbytes()} bytes of KV cache do not fit into {_SHARED_MEMORY}, which has {free} free; enlarge it, "
                "e.g. with docker's --shm-size"
            )
        descriptor, nbytes = storage._share_fd_cpu_()
        try:
            reseat(descriptor, storage.data_ptr(), nbytes)
        except OSError as error:
            raise SharingError(f"could not move {nbytes} bytes of KV cache to sealed memory: {error}") from None
    descriptor, _ = storage._share_fd_cpu_()
    if not is_sealed(descriptor):
        raise SharingError(
            "the KV cache already lies in shared memory that is not sealed against shrinking; lend tensors that no other "
            "process shares"
        )
    return os.dup(descriptor)  # the storage owns the other one


def _export_cuda(storage: torch.UntypedStorage) -> CudaStorage:
    device, handle, nbytes, offset, ref_counter, ref_counter_offset, event, event_sync = storage._share_cuda_()  # type: ignore[no-untyped-call]
    return CudaStorage(nbytes, device, handle, offset, ref_counter, ref_counter_offset, event, event_sync)


# --- the server's side -----------------------------------------------------------------------------------------------


class MappedTensors:
    """Maps an engine's KV tensors. `unmap` gives the memory back as soon as nothing uses it."""

    def __init__(
        self,
        request: Register,
        descriptors: Sequence[int],
        fence: FenceView,
        shards_per_rank: int = 1,
        block_size: int = 0,
    ) -> None:
        """Maps the memory of the descriptors (in the order of the CPU storages; the caller keeps them) and of the handles.

        `shards_per_rank` is how many shards of each chunk the tensors hold, `block_size` the engine's, which opaque pages do not show. Takes over `fence`, which copies must pass. Raises
        SharingError, SealError or LayoutError, with nothing left open, if the parts do not fit together.
        """
        self.fence = fence
        self._maps: list[mmap.mmap] = []
        self._lock = threading.Condition()
        self._users = 0
        self._closed = False
        self._copiers: list[PagedCopier] = []
        """One for each shard."""
        try:
            tensors = self._map(request, list(descriptors))
            kind = PageKind(request.layout_kind) if request.layout_kind else None
            self.layout = KVLayout.from_tensors(tensors, kind, block_size=block_size)
            self.device = tensors[0].device
            self.shard_layout = self.layout.shard(shards_per_rank)
            for views in shard_tensors(tensors, shards_per_rank):
                self._copiers.append(open_copier(views, self.shard_layout))
        except BaseException as error:
            tensors = views = []
            self._release()
            if isinstance(error, ValueError) and not isinstance(error, LayoutError):
                raise SharingError(str(error)) from None
            raise

    @contextlib.contextmanager
    def using(self, shard: int) -> Iterator[PagedCopier]:
        """Yields the copier of a shard, and keeps the memory mapped for as long as the block runs. Raises AbandonedError after `unmap`."""
        with self._lock:
            if self._closed:
                raise AbandonedError
            self._users += 1
            copier = self._copiers[shard]
        try:
            yield copier
        finally:
            del copier
            with self._lock:
                self._users -= 1
                if self._closed and not self._users:
                    self._release()
                    self._lock.notify_all()

    def unmap(self, timeout: float) -> bool:
        """Lets no more copies begin, and waits up to `timeout` seconds for running ones. Returns True if the memory is then unmapped.

        If it returns False, a thread that still copies will unmap the memory.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                if not self._users:
                    self._release()
            return self._lock.wait_for(lambda: not self._users, timeout)

    def _map(self, request: Register, descriptors: list[int]) -> list[torch.Tensor]:
        bases: list[torch.Tensor] = []
        for storage in request.storages:
            if isinstance(storage, CudaStorage):
                bases.append(_import_cuda(storage))
                continue
            if not descriptors:
                raise SharingError("expected one file descriptor for each CPU storage, got fewer")
            descriptor = descriptors.pop(0)
            check_sealed(descriptor, storage.nbytes)
            self._maps.append(mmap.mmap(descriptor, storage.nbytes))
            base = torch.frombuffer(self._maps[-1], dtype=torch.uint8)
            prefault(base.data_ptr(), storage.nbytes)
            bases.append(base)
        if descriptors:
            raise SharingError("expected one file descriptor for each CPU storage, got more")
        return [_view(view, bases) for view in request.tensors]

    def _release(self) -> None:
        while self._copiers:
            self._copiers.pop().close()
        maps, self._maps = self._maps, []
        for memory in maps:
            with contextlib.suppress(
                BufferError
            ):  # a traceback may still hold a view; the memory then goes with the traceback
                memory.close()
        self.fence.close()


def _import_cuda(storage: CudaStorage) -> torch.Tensor:
    if storage.device >= torch.cuda.device_count():
        raise SharingError(
            f"the tensor is on GPU {storage.device}, but this process has {torch.cuda.device_count()} GPUs"
        )
    untyped = torch.UntypedStorage._new_shared_cuda(
        storage.device,
        storage.handle,
        storage.nbytes,
        storage.offset,
        storage.ref_counter,
        storage.ref_counter_offset,
        storage.event,
        storage.event_sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", storage.device)).set_(untyped)


def _view(view: TensorView, bases: list[torch.Tensor]) -> torch.Tensor:
    dtype = getattr(torch, view.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SharingError(f"{view.dtype!r} is not a torch dtype")
    try:
        base = bases[view.storage]
        typed = base[: base.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return torch.as_strided(typed, view.shape, view.stride, view.offset)
    except (IndexError, RuntimeError) as error:  # torch checks that the tensor ends within its storage
        raise SharingError(f"{view} does not lie in the {len(bases)} storages that were lent: {error}") from None


class FencedCopier(PagedCopier):
    """Copies chunks of one move, each only if the engine has not given up the move. For one thread at a time.

    Copies raise AbandonedError if the ticket is gone or the engine's deadline has passed.
    """

    def __init__(
        self, tensors: MappedTensors, shard: int, slot: int, ticket: int, event: bytes, until: float = math.inf
    ) -> None:
        """`shard` counts from 0 among those that the tensors hold. `until` is when the engine gives up, by `time.monotonic()`."""
        super().__init__(tensors.shard_layout)
        self._tensors = tensors
        self._shard = shard
        self._slot = slot
        self._ticket = ticket
        self._event = event
        self._until = until

    def gather(self, chunk: ChunkSlots, out: torch.Tensor) -> PendingCopy:
        with self._inside(self._tensors.fence.reading) as copier:
            return CopyDone(copier.gather(chunk, out).wait())

    def scatter(self, chunk: ChunkSlots, source: torch.Tensor) -> PendingCopy:
        with self._inside(self._tensors.fence.writing) as copier:
            return CopyDone(copier.scatter(chunk, source).wait())

    @contextlib.contextmanager
    def _inside(self, passing: Callable[[int, int], AbstractContextManager[None]]) -> Iterator[PagedCopier]:
        if time.monotonic() > self._until:
            raise AbandonedError
        with self._tensors.using(self._shard) as copier, passing(self._slot, self._ticket):
            if self._event:
                _wait_on_stream(self._tensors.device, self._event)
                self._event = b""
            yield copier


def _wait_on_stream(device: torch.device, handle: bytes) -> None:
    """Makes all later work on this thread's stream wait for an engine's event."""
    event = torch.cuda.Event.from_ipc_handle(device, handle)  # type: ignore[no-untyped-call]
    torch.cuda.current_stream(device).wait_event(event)
