"""Registered buffers between the paged cache and the network, leased and given back.

A slot is reference counted: whoever fills or reads it holds one reference, and so does every call in flight that
Mooncake was given its address for. A caller whose deadline passes lets go of its own reference at once; the slot is
*quarantined* by the call's reference until the call really returns, and is never handed out before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable

from transfer.errors import TransferError

log = logging.getLogger(__name__)

_PAGE = 4096
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later; older kernels answer EINVAL

Pin = Callable[[int, int], Callable[[], None]]
"""Page-locks `(address, bytes)` for a GPU and returns what undoes it; `pd_cache.paged.cuda` has the one for CUDA."""


def prefault(address: int, nbytes: int) -> float | None:
    """Make the pages of `[address, address + nbytes)` resident and writable, keeping their contents.

    Returns the seconds it took, or None where the kernel cannot do it. The range must be mapped.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start = time.perf_counter()
    madvise(address, nbytes, _MADV_HUGEPAGE)  # refused where huge pages are off: then small ones are populated
    if madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        log.info("prefault of %d bytes refused by the kernel (errno %d)", nbytes, ctypes.get_errno())
        return None
    return time.perf_counter() - start


class Slot:
    """A leased piece of staging memory of `size` bytes at `address`; `view` is the same bytes, writable."""

    __slots__ = ("_pool", "_references", "address", "index", "size", "view")

    def __init__(self, pool: StagingPool, index: int, address: int, view: memoryview) -> None:
        self._pool = pool
        self._references = 0
        self.index = index
        self.address = address
        self.view = view
        self.size = len(view)

    def retain(self) -> None:
        """Take one more reference; the caller must hold one already."""
        self._pool._retain(self)

    def release(self) -> None:
        """Let go of one reference; the last one gives the slot back to its pool."""
        self._pool._release(self)


class StagingPool:
    """`size // slot_bytes` equal slots in one region of memory, at most that many leased at a time."""

    def __init__(self, size: int, slot_bytes: int, *, prefaulted: bool = True, pin: Pin | None = None) -> None:
        """Map `size` bytes. ValueError where not even one slot fits."""
        stride = self.stride_of(slot_bytes)
        count = size // stride
        if slot_bytes <= 0 or count < 1:
            raise ValueError(f"it holds no slot of {slot_bytes} bytes; make it at least {stride}")
        self.slot_bytes = slot_bytes
        self.nbytes = count * stride
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if prefaulted and (seconds := prefault(self.address, self.nbytes)) is not None:
            log.info("staging: %d slots of %d bytes prefaulted in %.3f s", count, slot_bytes, seconds)
        self._unpin = pin(self.address, self.nbytes) if pin is not None else None
        self._stride = stride
        self._whole = whole = memoryview(self._map)
        self._slots = [
            Slot(self, index, self.address + index * stride, whole[index * stride : index * stride + slot_bytes])
            for index in range(count)
        ]
        # last in, first out: a slot that was just used is still in the processor's cache
        self._free = list(reversed(self._slots))
        self._changed = threading.Condition()
        self._closed = False

    @staticmethod
    def stride_of(slot_bytes: int) -> int:
        """Bytes from one slot to the next: whole pages, so that direct I/O may use them."""
        return -(-slot_bytes // _PAGE) * _PAGE

    @property
    def slots(self) -> int:
        return len(self._slots)

    def pages(self, slot: Slot) -> memoryview:
        """All of the slot's pages, of which its `view` is the beginning."""
        return self._whole[slot.index * self._stride : (slot.index + 1) * self._stride]

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_use(self) -> int:
        """Slots that are leased or quarantined."""
        with self._changed:
            return len(self._slots) - len(self._free)

    def lease(self, deadline: float) -> Slot | None:
        """A slot with one reference, waiting for one until `deadline` (of `time.monotonic()`); None if none came."""
        with self._changed:
            while not self._free:
                remaining = deadline - time.monotonic()
                if self._closed or remaining <= 0:
                    return None
                self._changed.wait(remaining)
            if self._closed:
                return None
            slot = self._free.pop()
            slot._references = 1
            return slot

    def try_lease(self) -> Slot | None:
        """A slot if one is free now."""
        return self.lease(0.0)

    def check_integrity(self) -> None:
        """Assert that every slot is either free without references or leased with some (for tests)."""
        with self._changed:
            free = {slot.index for slot in self._free}
            assert len(free) == len(self._free), "a slot is free twice"
            for slot in self._slots:
                assert (slot._references == 0) == (slot.index in free), (
                    f"slot {slot.index}: {slot._references} references"
                )

    def close(self) -> None:
        """Refuse further leases. The memory itself lives until nothing refers to it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._unpin is not None:
            self._unpin()

    def _retain(self, slot: Slot) -> None:
        with self._changed:
            if slot._references < 1:
                raise TransferError(f"staging slot {slot.index} was retained after its last reference was given back")
            slot._references += 1

    def _release(self, slot: Slot) -> None:
        with self._changed:
            if slot._references < 1:
                raise TransferError(f"staging slot {slot.index} was released more often than it was retained")
            slot._references -= 1
            if slot._references == 0:
                self._free.append(slot)
                self._changed.notify()
