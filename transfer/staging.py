"""Leases slots of registered memory between the paged cache and the network.

A slot is reference counted: its holder has one reference, and so has every call in flight that was given the slot's address. A
caller whose deadline passes lets go of its own reference at once. The call's reference keeps the slot *quarantined*: it is not
handed out again before the call returns. If a call returned but its transfer may go on, the slot is *forfeited*: its memory is
never handed out again.

A peer that hangs must not take the memory that others need, so a `Quota` bounds how many slots may wait for peers at a time.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from transfer.errors import TransferError
from transfer.locks import Condition

log = logging.getLogger(__name__)

_PAGE = 4096
_NO_MEMORY = -600
"""Our return code for shared memory that could not be allocated."""
_MADV_DONTNEED = 4
_MADV_REMOVE = 9
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later; older kernels answer EINVAL

Pin = Callable[[int, int], Callable[[], None]]
"""Page-locks `(address, bytes)` for a GPU and returns a function that undoes it. `pd_cache.paged.cuda` has the one for CUDA."""


def prefault(address: int, nbytes: int) -> float | None:
    """Makes the pages of `[address, address + nbytes)` resident and writable. Keeps their contents. The range must be mapped.

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


class RegistersMemory(Protocol):
    """Registers memory for transfers. Negative ints are codes."""

    def register_buffer(self, address: int, size: int) -> int: ...


class Registrar(RegistersMemory, Protocol):
    """The methods of a Mooncake client that staging memory needs. Negative ints are codes."""

    def unregister_buffer(self, address: int) -> int: ...
    def alloc_from_mem_pool(self, size: int) -> int: ...


def _nothing() -> None:
    return


class _SlotMemory(NamedTuple):
    """The memory of a slot: `pages` is a view of whole pages that begin at `address`."""

    address: int
    pages: memoryview


class Quota:
    """Bounds how many slots may wait for peers, for one direction of transfers. The lock of its pool guards it.

    A slot counts from its lease until `Slot.settle`, or until nothing refers to it any more. A late call refers to it until it returns.
    """

    def __init__(self, most: int, headroom: int = 0) -> None:
        """`headroom`: how many of these slots a lease that does not wait leaves to leases that wait."""
        self.most = max(1, most)
        self.headroom = min(headroom, self.most - 1)
        self.slots: set[weakref.ref[Slot]] = set()
        """The slots that count, and forgotten ones until a lease finds no room."""

    def has_room(self, waits: bool) -> bool:
        """Returns whether a lease may take a slot. `waits`: whether it is a lease that waits."""
        most = self.most if waits else self.most - self.headroom
        if len(self.slots) >= most:
            self.slots = {slot for slot in self.slots if slot() is not None}
        return len(self.slots) < most


class Slot:
    """A leased piece of staging memory of `size` bytes at `address`. `view` is a writable view of these bytes.

    `pages` are the whole pages that begin there. A slot that is forgotten without `release`, for example because its holder is
    interrupted, goes back to its pool when nothing refers to this object any more. Calls in flight do refer to it.
    """

    __slots__ = ("__weakref__", "_pool", "_quota", "_references", "address", "pages", "size", "view")

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
        self._pool._retain(self)

    def release(self) -> None:
        """Lets go of one reference. The last one gives the slot back to its pool."""
        self._pool._release(self)

    def settle(self) -> None:
        """Notes that the slot no longer waits for a peer, so that its quota has room for another. Idempotent."""
        self._pool._settle(self)

    def forfeit(self, client: RegistersMemory) -> None:
        """Does `StagingPool.forfeit` for this slot."""
        self._pool.forfeit([self], client)


class StagingPool:
    """Leases equal slots of memory, as many as fit into `size` bytes."""

    def __init__(
        self, size: int, slot_bytes: int, *, prefaulted: bool = True, pin: Pin | None = None, headroom: int = 0
    ) -> None:
        """Maps the memory. `headroom`: how many slots a lease that does not wait leaves to leases that wait.

        Raises ValueError if not even one slot fits.
        """
        self._lay_out(size, slot_bytes, pin, headroom)
        self._prefaulted = prefaulted
        self._populate(*self._map(self.slots))

    @staticmethod
    def stride_of(slot_bytes: int) -> int:
        """Returns the bytes from one slot to the next: whole pages, so that direct I/O may use them."""
        return -(-slot_bytes // _PAGE) * _PAGE

    def _lay_out(self, size: int, slot_bytes: int, pin: Pin | None, headroom: int) -> None:
        stride = self.stride_of(slot_bytes)
        count = size // stride
        if slot_bytes <= 0 or count < 1:
            raise ValueError(f"the staging memory holds no slot of {slot_bytes} bytes; make it at least {stride} bytes")
        self.slot_bytes = slot_bytes
        self.slots = count
        """The number of slots, leased or free."""
        self.headroom = min(headroom, count - 1)
        self.nbytes = count * stride
        self.address = 0
        self.forfeited_bytes = 0
        """How many bytes of memory were given up because a transfer may still write to them."""
        self._pin = pin
        self._unpins: list[Callable[[], None]] = []
        self._places: dict[int, _SlotMemory] = {}
        """All slots, by address."""
        self._free: dict[int, _SlotMemory] = {}
        """Slots that are not leased. The most recently used one comes last."""
        self._leased: dict[int, weakref.ref[Slot]] = {}
        """For each slot that is not free, the `Slot` that it was last leased as."""
        self.reclaim: Callable[[], None] = _nothing
        """Makes overdue calls let go of their slots. Called when a lease finds none."""
        self._changed = Condition()
        self._closed = False

    def _map(self, count: int) -> tuple[int, memoryview]:
        """Returns new memory for `count` slots: its address, and the memory itself."""
        nbytes = count * self.stride_of(self.slot_bytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self._prefaulted and (seconds := prefault(address, nbytes)) is not None:
            log.info("staging: %d slots of %d bytes prefaulted in %.3f s", count, self.slot_bytes, seconds)
        return address, memoryview(memory)

    def _populate(self, address: int, memory: memoryview) -> None:
        """Cuts `memory`, which lies at `address`, into slots, which are leased from now on."""
        places = self._cut(address, memory)
        with self._changed:
            self.address = address
            self._places = places
            # last in, first out, because a slot that was just used is still in the processor's cache
            self._free = dict(reversed(places.items()))
            self._leased = {}
            self._changed.notify_all()

    def _cut(self, address: int, memory: memoryview) -> dict[int, _SlotMemory]:
        if self._pin is not None:
            self._unpins.append(self._pin(address, len(memory)))
        stride = self.stride_of(self.slot_bytes)
        return {
            address + start: _SlotMemory(address + start, memory[start : start + stride])
            for start in range(0, len(memory) - stride + 1, stride)
        }

    def register_with(self, client: Registrar) -> int:
        """Registers the memory with a Mooncake client. Returns the client's code."""
        return client.register_buffer(self.address, self.nbytes)

    def unregister_from(self, client: Registrar) -> None:
        """Takes the memory back from a client that is about to be closed. Does nothing for a full client, which lets go of it by itself."""

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_use(self) -> int:
        """The number of slots that are leased or quarantined."""
        with self._changed:
            self._collect()
            return len(self._places) - len(self._free)

    def lease(self, deadline: float, quota: Quota | None = None) -> Slot | None:
        """Returns a slot with one reference, or None if none came free by `deadline` (`time.monotonic()`).

        A lease whose deadline has already passed does not wait. It leaves the last `headroom` slots, of the pool and of the quota, to
        leases that wait, so that reading ahead never takes all slots. Returns None at once while there is no memory
        (`SharedStagingPool`).
        """
        waits = deadline > time.monotonic()
        looked = False
        while True:
            with self._changed:
                if self._closed or not self._places:
                    return None
                headroom = 0 if waits else self.headroom
                if len(self._free) <= headroom:
                    self._collect()
                if len(self._free) > headroom and (quota is None or quota.has_room(waits)):
                    return self._take(quota)
                if looked:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return None
                    self._changed.wait(min(remaining, _FORGOTTEN_S))
            # without the lock, because a call may let go of slots of another pool
            self.reclaim()
            looked = True

    def try_lease(self, quota: Quota | None = None) -> Slot | None:
        """Returns a slot if one is free now, beyond the headroom."""
        return self.lease(0.0, quota)

    def forfeit(self, slots: Sequence[Slot], client: RegistersMemory) -> None:
        """Gives up the memory of these leased slots for good, because a transfer that was given up may still use it.

        New memory takes its place until `_FORFEITS` times the pool's size was given up. After that the pool shrinks. The contents of the
        slots stay valid until they are released.
        """
        with self._changed:
            lost = [slot for slot in slots if slot.address in self._places]
            count = len(lost)
            for slot in lost:
                _forfeited.append(slot.pages)
                del self._places[slot.address]
            self.slots -= count
            self.forfeited_bytes += count * self.stride_of(self.slot_bytes)
            replace = bool(count) and self.forfeited_bytes <= _FORFEITS * self.nbytes
        if not replace:
            return
        try:
            address, memory = self._map(count)
        except OSError as error:  # the pool shrinks
            log.error("staging: %d slots are lost: could not map new memory for them: %s", count, error)
            return
        if (code := client.register_buffer(address, len(memory))) != 0:
            log.error("staging: %d slots are lost: Mooncake refused new memory for them (%d)", count, code)
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
            self._collect()
            assert self._free.keys() <= self._places.keys(), "the free list holds something that is not a slot"
            assert len(self._places) == (self.slots if self.address else 0), "a slot is lost"
            for address in self._places:
                leased = self._holder(address) is not None
                assert leased is not (address in self._free), "a slot is free and leased, or neither"

    def close(self) -> None:
        """Refuses further leases. The memory itself lives until nothing refers to it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        while self._unpins:
            self._unpins.pop()()

    def _take(self, quota: Quota | None) -> Slot:
        """Leases a free slot. Its order of steps makes sure that an interrupt loses nothing: see `_collect`. Call with the lock held."""
        address, place = self._free.popitem()
        slot = Slot(self, place, quota)
        self._leased[address] = reference = weakref.ref(slot)
        if quota is not None:
            quota.slots.add(reference)
        return slot

    def _holder(self, address: int) -> Slot | None:
        """Returns the `Slot` that has the memory at `address`; None if nothing refers to it any more."""
        reference = self._leased.get(address)
        slot = None if reference is None else reference()
        return slot if slot is not None and slot._references else None

    def _collect(self) -> None:
        """Takes back slots that were forgotten without `release`. Call with the lock held."""
        if len(self._free) < len(self._places):
            for address in [address for address in self._places if address not in self._free]:
                if self._holder(address) is None:
                    self._returned(address)

    def _retain(self, slot: Slot) -> None:
        with self._changed:
            if slot._references < 1:
                raise TransferError("a staging slot was retained after its last reference was given back")
            slot._references += 1

    def _release(self, slot: Slot) -> None:
        with self._changed:
            if slot._references < 1:
                raise TransferError("a staging slot was released more often than it was retained")
            slot._references -= 1
            if slot._references:
                return
            self._leave_quota(slot)
            if slot.address in self._places:
                self._returned(slot.address)
            else:
                self._dismissed(slot)

    def _settle(self, slot: Slot) -> None:
        with self._changed:
            self._leave_quota(slot)

    def _leave_quota(self, slot: Slot) -> None:
        """Call with the lock held."""
        if slot._quota is not None:
            slot._quota.slots.discard(weakref.ref(slot))
            slot._quota = None
            self._changed.notify_all()

    def _returned(self, address: int) -> None:
        """Frees a slot to which nothing refers any more. Call with the lock held."""
        self._free[address] = self._places[address]
        self._leased.pop(address, None)
        # wake all threads: their quotas decide which of them can use the slot
        self._changed.notify_all()

    def _dismissed(self, slot: Slot) -> None:
        """Called, with the lock held, when nothing refers any more to a slot whose memory the pool has given up."""
        if self._pin is None:  # its bytes are no longer needed; its addresses stay mapped for a late write
            _madvise(slot.address, len(slot.pages), _MADV_DONTNEED)


_forfeited: list[memoryview] = []
"""Memory that a transfer may still use. Its addresses stay mapped until the process ends."""
_FORFEITS = 8
"""How many times its own size a pool may forfeit and replace. This costs addresses, not memory: the pages are given back."""
_FORGOTTEN_S = 0.25
"""The longest time until a waiting lease notices a slot that was forgotten."""


class SharedStagingPool(StagingPool):
    """Leases slots of memory that a host's `mooncake_client` maps, too. A dummy client provides the memory once it is connected.

    Until then, and after `retire`, nothing can be leased.
    """

    def __init__(self, size: int, slot_bytes: int, *, pin: Pin | None = None, headroom: int = 0) -> None:
        """Maps nothing yet. `headroom`: see `StagingPool`. Raises ValueError if not even one slot fits."""
        self._lay_out(size, slot_bytes, pin, headroom)
        self._retired: list[int] = []
        self._retired_slots: list[weakref.ref[Slot]] = []
        """The slots that were leased when their memory was retired."""
        self._let_go = False
        """Whether the `mooncake_client` has let go of the retired memory. Until then it may carry out a late write there."""
        self._reusable = False

    def register_with(self, client: Registrar) -> int:
        """Takes memory that `client` shares with its `mooncake_client`, and cuts it into slots. Returns a code."""
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

    def let_go(self) -> None:
        """Notes that no earlier connection is open, so that `mooncake_client` uses no retired memory any more."""
        with self._changed:
            self._let_go = True
            self._discard_retired()

    def unregister_from(self, client: Registrar) -> None:
        with self._changed:
            address = self.address
        self._reusable = bool(address) and client.unregister_buffer(address) == 0

    def retire(self) -> None:
        """Gives up the present memory for good, because a transfer may still write to it. Leased slots stay readable."""
        with self._changed:
            if self.address:
                self._retired.append(self.address)
                self._retired_slots += self._leased.values()
            self._places, self._free, self._leased = {}, {}, {}
            self.address = 0
            self._let_go = False
            self._changed.notify_all()

    def close(self) -> None:
        super().close()
        with self._changed:
            self._collect()
            if self._reusable and len(self._free) == len(self._places):
                self._reusable = False
                self._leave_to_next(self.address)

    def _dismissed(self, slot: Slot) -> None:
        self._discard_retired()

    def _leave_to_next(self, address: int) -> None:
        _discard(address, self.nbytes)
        with _spare_lock:
            _spare.setdefault(self.nbytes, []).append(address)

    def _discard_retired(self) -> None:
        """Gives back the pages of retired memory. Its address range stays: Mooncake has no call that frees it."""
        self._retired_slots = [
            reference for reference in self._retired_slots if (slot := reference()) is not None and slot._references
        ]
        while self._retired and self._let_go and not self._retired_slots:
            _discard(self._retired.pop(), self.nbytes)


_spare: dict[int, list[int]] = {}
"""The memory of closed `SharedStagingPool`s, by size. Mooncake has no call that frees it, so the next pool takes it."""
_spare_lock = threading.Lock()


def _discard(address: int, nbytes: int) -> None:
    """Gives the pages of shared memory back to the system. The mapping stays, and reads as zeros."""
    _madvise(address, nbytes, _MADV_REMOVE)
