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
from typing import Protocol

from transfer.errors import TransferError

log = logging.getLogger(__name__)

_PAGE = 4096
_NO_MEMORY = -600
"""The return code that stands for shared memory which could not be had."""
_MADV_REMOVE = 9
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later; older kernels answer EINVAL

Pin = Callable[[int, int], Callable[[], None]]
"""Page-locks `(address, bytes)` for a GPU and returns what undoes it; `pd_cache.paged.cuda` has the one for CUDA."""


def prefault(address: int, nbytes: int) -> float | None:
    """Make the pages of `[address, address + nbytes)` resident and writable, keeping their contents.

    Returns the seconds it took, or None where the kernel cannot do it. The range must be mapped.
    """
    start = time.perf_counter()
    _madvise(address, nbytes, _MADV_HUGEPAGE)  # refused where huge pages are off: then small ones are populated
    if _madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        log.info("prefault of %d bytes refused by the kernel (errno %d)", nbytes, ctypes.get_errno())
        return None
    return time.perf_counter() - start


def _madvise(address: int, nbytes: int, advice: int) -> int:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(address, nbytes, advice))


class Registrar(Protocol):
    """What staging memory needs of a Mooncake client; negative ints are codes."""

    def register_buffer(self, address: int, size: int) -> int: ...
    def unregister_buffer(self, address: int) -> int: ...
    def alloc_from_mem_pool(self, size: int) -> int: ...


class Slot:
    """A leased piece of staging memory of `size` bytes at `address`; `view` is the same bytes, writable.

    `pages` are the whole pages that begin with them.
    """

    __slots__ = ("_pool", "_references", "address", "index", "pages", "size", "view")

    def __init__(self, pool: StagingPool, index: int, address: int, pages: memoryview, size: int) -> None:
        self._pool = pool
        self._references = 0
        self.index = index
        self.address = address
        self.pages = pages
        self.view = pages[:size]
        self.size = size

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
        self._lay_out(size, slot_bytes, pin)
        self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if prefaulted and (seconds := prefault(address, self.nbytes)) is not None:
            log.info("staging: %d slots of %d bytes prefaulted in %.3f s", self.slots, slot_bytes, seconds)
        self._populate(address, memoryview(self._map))

    @staticmethod
    def stride_of(slot_bytes: int) -> int:
        """Bytes from one slot to the next: whole pages, so that direct I/O may use them."""
        return -(-slot_bytes // _PAGE) * _PAGE

    def _lay_out(self, size: int, slot_bytes: int, pin: Pin | None) -> None:
        stride = self.stride_of(slot_bytes)
        count = size // stride
        if slot_bytes <= 0 or count < 1:
            raise ValueError(f"it holds no slot of {slot_bytes} bytes; make it at least {stride}")
        self.slot_bytes = slot_bytes
        self.slots = count
        self.nbytes = count * stride
        self.address = 0
        self._pin = pin
        self._unpins: list[Callable[[], None]] = []
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._changed = threading.Condition()
        self._closed = False

    def _populate(self, address: int, memory: memoryview) -> None:
        """Cut `memory`, which lies at `address`, into slots, and lease from these from now on."""
        stride = self.nbytes // self.slots
        if self._pin is not None:
            self._unpins.append(self._pin(address, self.nbytes))
        slots = [
            Slot(self, index, address + index * stride, memory[index * stride : (index + 1) * stride], self.slot_bytes)
            for index in range(self.slots)
        ]
        with self._changed:
            self.address = address
            self._slots = slots
            # last in, first out: a slot that was just used is still in the processor's cache
            self._free = list(reversed(slots))
            self._changed.notify_all()

    def register_with(self, client: Registrar) -> int:
        """Make the memory known to a Mooncake client; its return code."""
        return client.register_buffer(self.address, self.nbytes)

    def unregister_from(self, client: Registrar) -> None:
        """Take the memory back from a client that is about to be closed. A full client lets go of it by itself."""

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_use(self) -> int:
        """Slots that are leased or quarantined."""
        with self._changed:
            return len(self._slots) - len(self._free)

    def lease(self, deadline: float) -> Slot | None:
        """A slot with one reference, waiting for one until `deadline` (of `time.monotonic()`); None if none came.

        None at once while there is no memory (`SharedStagingPool`).
        """
        with self._changed:
            while not self._free:
                remaining = deadline - time.monotonic()
                if self._closed or not self._slots or remaining <= 0:
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
        while self._unpins:
            self._unpins.pop()()

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
                self._returned(slot)

    def _returned(self, slot: Slot) -> None:
        """The last reference of `slot` is gone. Called with the lock held."""
        self._free.append(slot)
        self._changed.notify()


class SharedStagingPool(StagingPool):
    """Slots in memory that a host's `mooncake_client` maps, too: it comes from a dummy client, once that is connected.

    Until then, and after `retire`, nothing can be leased.
    """

    def __init__(self, size: int, slot_bytes: int, *, pin: Pin | None = None) -> None:
        """Nothing is mapped yet. ValueError where not even one slot fits."""
        self._lay_out(size, slot_bytes, pin)
        self._retired: list[int] = []
        self._retired_leased = 0
        self._let_go = False
        """Whether the `mooncake_client` has let go of the retired memory: it may carry out a late write of it till then."""
        self._reusable = False

    def register_with(self, client: Registrar) -> int:
        """Take memory that `client` shares with its `mooncake_client`, and cut it into slots; a return code.

        Its earlier connections are closed: nobody else uses memory that was retired.
        """
        with self._changed:
            self._let_go = True
            self._discard_retired()
        with _spare_lock:
            spare = _spare.get(self.nbytes)
            address = spare.pop() if spare else 0
        if address:
            prefault(address, self.nbytes)
        else:
            address = client.alloc_from_mem_pool(self.nbytes)
        if not address:
            return _NO_MEMORY
        code = client.register_buffer(address, self.nbytes)
        if code == 0:
            memory = (ctypes.c_ubyte * self.nbytes).from_address(address)
            self._populate(address, memoryview(memory).cast("B"))
        else:
            self._leave_to_next(address)
        return code

    def unregister_from(self, client: Registrar) -> None:
        with self._changed:
            address = self.address
        self._reusable = bool(address) and client.unregister_buffer(address) == 0

    def retire(self) -> None:
        """Never hand out the present memory again: somebody may still write to it. Leased slots stay readable."""
        with self._changed:
            if self._slots:
                self._retired.append(self.address)
                self._retired_leased += len(self._slots) - len(self._free)
            self._slots, self._free = [], []
            self.address = 0
            self._let_go = False
            self._changed.notify_all()

    def close(self) -> None:
        super().close()
        with self._changed:
            if self._reusable and len(self._free) == len(self._slots):
                self._reusable = False
                self._leave_to_next(self.address)

    def _returned(self, slot: Slot) -> None:
        if self._slots and self._slots[slot.index] is slot:
            super()._returned(slot)
        else:
            self._retired_leased -= 1
            self._discard_retired()

    def _leave_to_next(self, address: int) -> None:
        _discard(address, self.nbytes)
        with _spare_lock:
            _spare.setdefault(self.nbytes, []).append(address)

    def _discard_retired(self) -> None:
        """Only the address range of retired memory stays: Mooncake has no call that frees it."""
        while self._retired and self._let_go and not self._retired_leased:
            _discard(self._retired.pop(), self.nbytes)


_spare: dict[int, list[int]] = {}
"""Memory of closed `SharedStagingPool`s, by size: Mooncake has no call that frees it, so the next pool takes it."""
_spare_lock = threading.Lock()


def _discard(address: int, nbytes: int) -> None:
    """Give the pages of shared memory back to the system; its mapping stays, and reads as zeros."""
    _madvise(address, nbytes, _MADV_REMOVE)
