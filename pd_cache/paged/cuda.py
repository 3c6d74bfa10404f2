"""Gather and scatter on CUDA tensors: one kernel launch moves a chunk's pages of all layers.

The chunk object is assembled in a device buffer, the *bounce buffer*, so that one large copy crosses the bus
instead of one small copy a page. A gather runs the kernel and then copies to the host. A scatter copies to
the device and then runs the kernel. Each direction has two streams of its own, so that stores and loads
overlap with the model and with each other. They are used in turn, so that one chunk's kernels run beside the
next chunk's copy.

The order of work:

- A gather reads the cache after all work that was on the calling thread's current stream at the call. A
  caller on another thread than the model's must first make its current stream wait for the model's stream.
- A scatter writes the cache after all work that was on the calling thread's current stream at the call, so
  kernels that still read the old contents are not disturbed. Work that is put on that stream after the call
  sees the new data, without a wait on the host. Other streams may touch the slots after `wait()` has
  returned.
- Nothing makes the model wait for a gather. So the caller must leave the slots unchanged, and keep `out`
  alive and unread, until `wait()` has returned. In the same way, `source` must stay alive and unchanged until
  the scatter's `wait()` has returned.
- `close()` waits for all streams.

Host memory that is not page-locked works, too, but the call then returns only after the copy.

Checksums are computed on the device, from the bounce buffer (`pd_cache.paged.xxh3`). So they reveal foreign
bytes in staging memory, and bytes that were lost on the bus. They end on streams of their own, because a
chunk's checksum takes about as long as its copy.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd_cache.errors import PdCacheError
from pd_cache.layout import KVLayout, checksum
from pd_cache.paged.base import PagedCopier, PendingCopy, check_payload, plane_bytes
from pd_cache.paged.xxh3 import Xxh3

log = logging.getLogger(__name__)

_ELEMENTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MOST_LANES = 1024
_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device that this process uses


@triton.jit  # type: ignore[untyped-decorator]
def _move(
    planes: tl.tensor,
    blocks: tl.tensor,
    chunk: tl.tensor,
    count: tl.tensor,
    GATHER: tl.constexpr,
    ELEMENTS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Copies between the cache and a chunk object. Program (plane * count + n, part) moves a part of block n
    of the chunk in one plane.

    planes: int64 [planes, 2], the address of a plane and the bytes from one block to the next. blocks: int64
    [count], where each block of the chunk lies in the cache. chunk: elements [planes, count, ELEMENTS].
    """
    index = tl.program_id(0).to(tl.int64)
    plane = index // count
    block = tl.load(blocks + index % count)  # below zero: the block is left out, and the chunk gets zeros
    page = tl.load(planes + 2 * plane) + block * tl.load(planes + 2 * plane + 1)
    element = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = element < tl.where(block < 0, 0, ELEMENTS)
    in_cache = page.to(chunk.dtype) + element
    in_chunk = chunk + (index * ELEMENTS + element)
    if GATHER:
        tl.store(in_chunk, tl.load(in_cache, mask=inside, other=0), mask=element < ELEMENTS)
    else:
        tl.store(in_cache, tl.load(in_chunk, mask=inside), mask=inside)


class PageMover:
    """Launches the kernel between the pages of all planes and a chunk object on the same device.

    A page moves as the widest elements that its size and the address of every plane allow.
    """

    def __init__(self, planes: Sequence[Tensor], layout: KVLayout) -> None:
        """`planes` are those that `plane_bytes` returned; they are kept, so that the memory outlives the
        addresses taken here."""
        self._planes = planes
        rows = [[plane.data_ptr(), plane.stride(0)] for plane in planes]
        self._table = torch.tensor(rows, dtype=torch.int64, device=planes[0].device)
        width = math.gcd(8, layout.page_bytes, *(value for row in rows for value in row))
        self._element, self._elements = _ELEMENTS[width], layout.page_bytes // width

    def move(self, blocks: Tensor, payload: Tensor, *, gather: bool) -> None:
        """Enqueues a copy on the current stream: of the blocks' pages into `payload`, a contiguous uint8
        device tensor, if `gather`, otherwise of `payload` into the pages.

        The blocks are on the device, too. They are not checked: the kernel uses any index.
        """
        count = blocks.numel()
        lanes = min(_MOST_LANES, 1 << (self._elements - 1).bit_length())
        _move[(len(self._planes) * count, -(-self._elements // lanes))](
            self._table,
            blocks,
            payload.view(self._element),
            count,
            GATHER=gather,
            ELEMENTS=self._elements,
            LANES=lanes,
        )


class _Track:
    """A stream with the device memory that only its work touches, and a second stream on which checksums end.

    All calls of a track share a bounce buffer, as large as the largest chunk so far. This is safe because a
    stream runs its work in order: a call's first write to the buffer comes after the last read of the call
    before. Each call in flight has a sixteenth of a chunk of its own. When it is freed, torch keeps it for
    this stream.
    """

    def __init__(self, planes: Sequence[Tensor], layout: KVLayout) -> None:
        self._lock = threading.Lock()
        device = planes[0].device
        self.stream, self._mixer = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._hash: Xxh3 | None = None
        with torch.cuda.stream(self.stream):
            self.mover = PageMover(planes, layout)
            self._bounce = torch.empty(0, dtype=torch.uint8, device=device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the stream current for one thread at a time. On an error it waits until the stream is idle,
        so that no copy goes on unnoticed."""
        with self._lock, torch.cuda.stream(self.stream):
            try:
                yield
            except BaseException:
                self.stream.synchronize()
                raise

    def bounce(self, nbytes: int) -> Tensor:
        """Returns `nbytes` of the bounce buffer. Call while the stream is current."""
        if self._bounce.numel() < nbytes:
            self._bounce = self._bounce.new_empty(0)  # free the old one before the larger one is allocated
            # otherwise a thread outside inference mode could not write to it
            with torch.inference_mode(False):
                self._bounce = torch.empty(nbytes, dtype=torch.uint8, device=self.stream.device)
        return self._bounce[:nbytes]

    def upload(self, blocks: Tensor) -> Tensor:
        """Returns the blocks on the device. Call while the stream is current.

        torch's pinned allocator reuses the host copy only after the stream has read it.
        """
        return blocks.contiguous().pin_memory().to(self.stream.device, non_blocking=True)

    def checksum(self, bounce: Tensor) -> _Checksum | None:
        """Begins the checksum of what the stream has put into the bounce buffer so far. Returns None for
        sizes whose checksum the host has to take. Call while the stream is current."""
        if not Xxh3.takes(bounce.numel()):
            return None
        if self._hash is None or self._hash.nbytes != bounce.numel():
            self._hash = Xxh3(bounce.numel(), bounce.device)
        sums = self._hash.add_up(bounce)
        self._mixer.wait_stream(self.stream)
        with torch.cuda.stream(self._mixer):
            lanes = self._hash.mix(sums).to("cpu", non_blocking=True)
        sums.record_stream(self._mixer)
        return _Checksum(self._mixer, self._hash, lanes)

    def close(self) -> None:
        with self.current():
            self.stream.synchronize()
            self._mixer.synchronize()
            self._bounce, self._hash = self._bounce.new_empty(0), None


class _Checksum(NamedTuple):
    """A checksum under way on the stream `mixer`."""

    mixer: torch.cuda.Stream
    hash: Xxh3
    lanes: Tensor


class _Recorded:
    """A pending copy that ends when the stream has reached this point, and the checksum is there. Raises an
    error that a kernel or copy met on the device."""

    def __init__(self, stream: torch.cuda.Stream, payload: Tensor, found: _Checksum | None) -> None:
        """`payload` is the chunk object on the host."""
        # blocking: the waiting thread sleeps; by default it would spin on a core that the engine needs
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        if found is not None:
            found.mixer.wait_stream(stream)
        self._event.record(stream if found is None else found.mixer)
        self._payload = payload
        self._found = found

    def wait(self) -> int:
        self._event.synchronize()
        return (
            checksum(self._payload.numpy().data)
            if self._found is None
            else self._found.hash.merge(self._found.lanes)
        )


class CudaPagedCopier(PagedCopier):
    """Asynchronous copies over page-locked host memory; the module's docstring says what waits for what.

    Takes device memory for two chunks per direction, and a sixteenth of a chunk for each call in flight, at
    the first call that needs it. The first call in each direction also makes Triton compile the kernels.
    Blocks have to be as `plan` returns them (int64, in range): they are not checked again.
    """

    def __init__(self, tensors: Sequence[Tensor], layout: KVLayout) -> None:
        super().__init__(layout)
        planes = plane_bytes(tensors, layout)
        self._device = planes[0].device
        self._tracks = [_Track(planes, layout) for _ in range(4)]
        self._out, self._in = itertools.cycle(self._tracks[:2]), itertools.cycle(self._tracks[2:])

    def gather(self, blocks: Tensor, out: Tensor) -> PendingCopy:
        check_payload(blocks, out, self.layout)
        caller = torch.cuda.current_stream(self._device)
        track = next(self._out)
        with track.current():
            placed = track.upload(blocks)
            bounce = track.bounce(out.numel())
            track.stream.wait_stream(caller)
            track.mover.move(placed, bounce, gather=True)
            found = track.checksum(bounce)
            out.view(-1).copy_(bounce, non_blocking=out.is_pinned())
            return _Recorded(track.stream, out, found)

    def scatter(self, blocks: Tensor, source: Tensor) -> PendingCopy:
        check_payload(blocks, source, self.layout)
        caller = torch.cuda.current_stream(self._device)
        track = next(self._in)
        with track.current():
            placed = track.upload(blocks)
            bounce = track.bounce(source.numel())
            bounce.copy_(source.view(-1), non_blocking=source.is_pinned())
            found = track.checksum(bounce)
            track.stream.wait_stream(caller)  # only the kernel touches the cache: the copy need not wait
            track.mover.move(placed, bounce, gather=False)
            caller.wait_stream(track.stream)
            return _Recorded(track.stream, source, found)

    def close(self) -> None:
        """Waits for copies in flight and frees the bounce buffers. May be called again; a later copy
        allocates them again."""
        for track in self._tracks:
            track.close()


def mark(device: torch.device) -> Callable[[], None]:
    """Marks this point of the current stream. Returns a function that makes the stream current at its call
    wait for this point."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))

    def follow() -> None:
        torch.cuda.current_stream(device).wait_event(event)

    return follow


def take_stream(device: torch.device) -> None:
    """Makes a new stream current on the calling thread."""
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def is_available() -> bool:
    """Returns whether this process can use a CUDA device."""
    return bool(torch.cuda.is_available())


def pin_here() -> Callable[[int, int], Callable[[], None]]:
    """Returns `pin_host_memory` for the device that is the calling thread's now, whichever thread calls
    it."""
    return functools.partial(pin_host_memory, device=torch.cuda.current_device())


def pin_host_memory(address: int, nbytes: int, device: int | None = None) -> Callable[[], None]:
    """Page-locks `[address, address + nbytes)` for CUDA. Returns a function that undoes it: a
    `transfer.staging.Pin`.

    It works in the context of `device`, by default the calling thread's, for all devices of the process. A
    thread that has chosen none would open a context on GPU 0. The memory has to be mapped and not locked yet,
    and has to stay mapped until it is unlocked. No copy may be in flight when it is unlocked. A second
    unlocking is logged. Raises PdCacheError if CUDA is missing or refuses.
    """
    if not is_available():
        raise PdCacheError(f"cannot page-lock {nbytes} bytes: torch {torch.__version__} finds no CUDA device")
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    here = torch.cuda.current_device() if device is None else device
    with torch.cuda.device(here):
        status = int(runtime.cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
        if status != 0:
            raise PdCacheError(
                f"CUDA refused to page-lock {nbytes} bytes at {address:#x}: {_refusal(status)}; the range must be mapped and not "
                "page-locked already, and the host must have that much memory to lock: lower staging_size if it has not"
            )

    def undo() -> None:
        with torch.cuda.device(here):
            status = int(runtime.cudaHostUnregister(address))
            if status != 0:  # only logged: an exception would replace one that is being handled
                log.warning(
                    "CUDA did not release %d page-locked bytes at %#x: %s", nbytes, address, _refusal(status)
                )

    return undo


def _refusal(status: int) -> str:
    """Returns the error in words, and clears it. CUDA keeps the error and torch raises it from the thread's
    next kernel, so a kernel is started."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return str(torch.cuda.CudaError(status))
