"""Leases slots of registered memory between the paged cache and the network.

A slot is reference counted: its holder has one reference, and so has every call in flight that was given the
slot's address. A caller whose deadline passes gives its own reference back at once. The call's reference
keeps the slot *quarantined*: it is not leased again before the call returns. If a call has returned but its
transfer may go on, the slot is *forfeited*: its memory is never leased again.

A peer that hangs must not take the memory that others need. So a `Quota` for each direction bounds how many
slots may wait for peers, and leases that cannot wait leave some slots free (*headroom*). Of 64 slots:

    share   slots   what it bounds
    5/8     40      slots of reads that wait for a peer
    4/8     32      slots of puts that wait for a peer
    1/8      8      headroom of each quota: reading ahead stops at 32 slots, gathering ahead at 24
    1/4     16      headroom of the pool
    1/8      8      the batches of all threads of a direction; with the spare threads, 2/8

If reads hang, they hold at most 40 slots. Late puts of all threads hold 16 more, and 8 remain for other puts.
`store.py` sets the pool's headroom, and `pd_cache/tiers/mooncake.py` sets the quotas and the batches.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from transfer.errors import TransferError

log = logging.getLogger(__name__)

_PAGE = 4096
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later; older kernels answer EINVAL

Pin = Callable[[int, int], Callable[[], None]]
"""Page-locks `(address, bytes)` for a GPU, and returns a function that undoes this. `pd_cache.paged.cuda` has
the one for CUDA."""

_forfeited: list[memoryview] = []
"""Memory that a transfer may still use. Its addresses stay mapped until the process ends."""
_FORFEITS = 8
"""How many times its own size a pool may forfeit and replace. This costs addresses, not memory, because the
pages are given back."""


class RegistersMemory(Protocol):
    """Registers memory for transfers. Negative ints are codes."""

    def register_buffer(self, address: int, size: int) -> int: ...


class _SlotMemory(NamedTuple):
    """The memory of a slot: `pages` is a view of whole pages that begin at `address`."""

    address: int
    pages: memoryview


class Quota:
    """Bounds how many slots may wait for peers, for one direction of transfers. The lock of its pool guards
    it.

    A slot counts from its lease until `Slot.settle`, or until its last reference is given back. A late call
    has a reference until it returns.
    """

    def __init__(self, most: int, headroom: int = 0) -> None:
        """`headroom`: how many of these slots stay free for leases that wait."""
        self.most = max(1, most)
        self.headroom = min(headroom, self.most - 1)
        self.taken = 0


class Slot:
    """A leased piece of staging memory of `size` bytes at `address`. `view` is a writable view of these
    bytes.

    `pages` are the whole pages that begin there.
    """

    __slots__ = ("_pool", "_quota", "_references", "address", "pages", "size", "view")

    def __init__(self, pool: StagingPool, place: _SlotMemory, quota: Quota | None = None) -> None:
        """Makes a slot with one reference. The caller counts it in `quota`."""
        self._pool = pool
        self._quota = quota
        self._references = 1
        self.address = place.address
        self.pages = place.pages
        self.view = place.pages[: pool.slot_bytes]
        self.size = pool.slot_bytes

    def retain(self) -> None:
        """Takes one more reference. The caller must already hold one."""
        with self._pool._changed:
            if self._references < 1:
                raise TransferError("a staging slot was retained after its last reference was given back")
            self._references += 1

    def release(self) -> None:
        """Gives one reference back. The last one gives the slot back to its pool."""
        with self._pool._changed:
            if self._references < 1:
                raise TransferError("a staging slot was released more often than it was retained")
            self._references -= 1
            if not self._references:
                self._leave_quota()
                self._pool._take_back(self)

    def settle(self) -> None:
        """Notes that the slot no longer waits for a peer, so that its quota has room for another.
        Idempotent."""
        with self._pool._changed:
            self._leave_quota()

    def _leave_quota(self) -> None:
        """Call with the lock held."""
        if self._quota is not None:
            self._quota.taken -= 1
            self._quota = None
            self._pool._changed.notify_all()


class StagingPool:
    """Leases equal slots of memory, as many as fit into `size` bytes. Thread-safe."""

    def __init__(
        self,
        size: int,
        slot_bytes: int,
        *,
        prefaulted: bool = True,
        pin: Pin | None = None,
        headroom: int = 0,
    ) -> None:
        """Maps the memory. `headroom`: how many slots stay free for leases that wait.

        Raises ValueError if not even one slot fits.
        """
        stride = self.stride_of(slot_bytes)
        count = size // stride
        if slot_bytes <= 0 or count < 1:
            raise ValueError(
                f"the staging memory holds no slot of {slot_bytes} bytes; make it at least {stride} bytes"
            )
        self.slot_bytes = slot_bytes
        self.slots = count
        """The number of slots, leased or free."""
        self.headroom = min(headroom, count - 1)
        self.nbytes = count * stride
        self.forfeited_bytes = 0
        """How many bytes of memory were given up because a transfer may still write to them."""
        self._changed = threading.Condition()
        """Guards all slots. Notified when a slot was given back or settled."""
        self._prefaulted = prefaulted
        self._pin = pin
        self._unpins: list[Callable[[], None]] = []
        self._closed = False
        self._clients: list[RegistersMemory] = []
        """The clients that can transfer from and to this memory. `_registering` guards them, and the
        mappings."""
        self._mappings: list[tuple[int, int]] = []
        """The address and the bytes of all memory that was ever mapped."""
        self._registering = threading.Lock()
        self.address, memory = self._map(count)
        self._places = self._cut(self.address, memory)
        """All slots, by address."""
        # last in, first out: a slot that was just used is still in the processor's cache
        self._free = dict(reversed(self._places.items()))
        """Slots that are not leased. The most recently used one comes last."""
        self._leased: dict[int, Slot] = {}

    @staticmethod
    def stride_of(slot_bytes: int) -> int:
        """Returns the bytes from one slot to the next: whole pages, so that direct I/O may use them."""
        return -(-slot_bytes // _PAGE) * _PAGE

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_use(self) -> int:
        """The number of slots that are leased or quarantined."""
        with self._changed:
            return len(self._places) - len(self._free)

    def lease(self, deadline: float, quota: Quota | None = None) -> Slot | None:
        """Returns a slot with one reference. Returns None if none came free by `deadline`
        (`time.monotonic()`), or if the pool is closed.

        A lease whose deadline has already passed does not wait. It leaves the last `headroom` slots, of the
        pool and of the quota, to leases that wait, so that reading ahead never takes all slots.
        """
        waits = deadline > time.monotonic()
        least = 0 if waits else self.headroom
        with self._changed:
            while not self._closed:
                if len(self._free) > least and (
                    quota is None or quota.taken < (quota.most if waits else quota.most - quota.headroom)
                ):
                    address, place = self._free.popitem()
                    slot = self._leased[address] = Slot(self, place, quota)
                    if quota is not None:
                        quota.taken += 1
                    return slot
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
        return None

    def register(self, client: RegistersMemory) -> int:
        """Registers all of the memory with a client of a pool, and later also the memory that replaces
        forfeited slots. Returns 0, or a negative code if the client refuses."""
        with self._registering:
            code = min(client.register_buffer(address, nbytes) for address, nbytes in self._mappings)
            if code == 0:
                self._clients.append(client)
        return code

    def forget(self, client: RegistersMemory) -> None:
        """Registers no more memory with this client, which is about to be closed."""
        with self._registering:
            self._clients = [other for other in self._clients if other is not client]

    def forfeit(self, slots: Sequence[Slot]) -> None:
        """Gives up the memory of these leased slots for good, because a transfer that was given up may still
        use it.

        New memory takes its place until `_FORFEITS` times the pool's size was given up. After that the pool
        shrinks. The contents of the slots stay valid until they are released.
        """
        with self._changed:
            lost = [slot for slot in slots if slot.address in self._places]
            count = len(lost)
            for slot in lost:
                _forfeited.append(slot.pages)
                del self._places[slot.address], self._leased[slot.address]
            self.slots -= count
            self.forfeited_bytes += count * self.stride_of(self.slot_bytes)
            replace = bool(count) and self.forfeited_bytes <= _FORFEITS * self.nbytes
        if not replace:
            return
        with self._registering:
            try:
                address, memory = self._map(count)
            except OSError as error:  # the pool shrinks
                log.error("staging: %d slots are lost: could not map new memory for them: %s", count, error)
                return
            if any(code := client.register_buffer(address, len(memory)) for client in self._clients):
                log.error(
                    "staging: %d slots are lost: Mooncake refused new memory for them (%d)", count, code
                )
                return
        places = self._cut(address, memory)
        with self._changed:
            self.slots += count
            self._places |= places
            self._free |= places
            self._changed.notify_all()

    def check_integrity(self) -> None:
        """Asserts that every slot is either free or leased, and none is both (for tests)."""
        with self._changed:
            assert len(self._places) == self.slots, "a slot is lost"
            assert not self._free.keys() & self._leased.keys(), "a slot is free and leased"
            assert self._free.keys() | self._leased.keys() == self._places.keys(), (
                "a slot is neither free nor leased"
            )

    def close(self) -> None:
        """Refuses further leases. The memory itself lives until nothing refers to it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        while self._unpins:
            self._unpins.pop()()

    def _take_back(self, slot: Slot) -> None:
        """Frees a slot to which nothing refers any more. For `Slot.release`, with the lock held."""
        if slot.address in self._places:
            del self._leased[slot.address]
            self._free[slot.address] = self._places[slot.address]
            # wakes all waiting threads, because their quotas decide which of them can use the slot
            self._changed.notify_all()
        elif (
            self._pin is None
        ):  # forfeited: its bytes are no longer needed; its addresses stay mapped for a late write
            _madvise(slot.address, len(slot.pages), _MADV_DONTNEED)

    def _map(self, count: int) -> tuple[int, memoryview]:
        """Returns new memory for `count` slots: its address, and the memory itself."""
        nbytes = count * self.stride_of(self.slot_bytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._mappings.append((address, nbytes))
        if self._prefaulted and (seconds := prefault(address, nbytes)) is not None:
            log.info("staging: %d slots of %d bytes prefaulted in %.3f s", count, self.slot_bytes, seconds)
        return address, memoryview(memory)

    def _cut(self, address: int, memory: memoryview) -> dict[int, _SlotMemory]:
        if self._pin is not None:
            self._unpins.append(self._pin(address, len(memory)))
        stride = self.stride_of(self.slot_bytes)
        return {
            address + start: _SlotMemory(address + start, memory[start : start + stride])
            for start in range(0, len(memory) - stride + 1, stride)
        }


# --- resident memory ----------------------------------------------------------------------------------------


def prefault(address: int, nbytes: int) -> float | None:
    """Makes the pages of `[address, address + nbytes)` resident and writable. Keeps their contents. The range
    must be mapped.

    Returns the seconds it took, or None if the kernel cannot do it.
    """
    start = time.perf_counter()
    _madvise(address, nbytes, _MADV_HUGEPAGE)  # refused if huge pages are off; then small pages are populated
    if _madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        log.info("the kernel refused to prefault %d bytes (errno %d)", nbytes, ctypes.get_errno())
        return None
    return time.perf_counter() - start


def _madvise(address: int, nbytes: int, advice: int) -> int:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(address, nbytes, advice))


def mapping_at(address: int, maps: Iterable[str]) -> range | None:
    """Returns the writable mapping in which `address` lies, from the lines of /proc/self/maps; None if there
    is none."""
    for line in maps:
        span, permissions = line.split(maxsplit=2)[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return range(start, end) if "w" in permissions else None
    return None


def prefault_segment(size: int, base: int | None) -> None:
    """Makes the new segment of `size` bytes resident, if that is possible.

    Mooncake maps a segment without touching it, so the first writer of each page pays for the fault: 0.25 to
    1.2 GB/s, while later writes reach 2.4 (measured). `base`: the address of the first object in the segment;
    None if it is not known.
    """
    if base is None:
        log.warning("segment of %d bytes not prefaulted: its address could not be found", size)
        return
    with Path("/proc/self/maps").open() as maps:
        mapping = mapping_at(base, maps)
    if mapping is None or mapping.stop - base < size:
        # never touch memory that may not be the segment
        log.warning("segment of %d bytes not prefaulted: the mapping at %#x is smaller", size, base)
        return
    if (seconds := prefault(base, size)) is not None:
        log.info("segment: %d bytes prefaulted in %.3f s", size, seconds)
