"""Decides which process may touch an engine's blocks: a page that an engine and its server share, and the
kernel's locks on it.

A server that is late, stopped or cut off may still copy blocks that its engine has given to another request.
So each load or store gets a *slot* of the fence, with its *ticket* in it. The server copies only while the
ticket is there. An engine that gives up a load or store removes the ticket.

A load writes to the blocks. So the server locks the slot's bytes around each copy of one or several chunks,
and the engine removes the ticket under the same lock. After that, no part of the load can touch the blocks.
The kernel drops the locks of a process that dies, so a dead server delays no engine. A stopped server delays
an engine only if it was stopped in the middle of a copy.

A store reads the blocks, without a lock. The server looks for the ticket again after each copy; if the ticket
is gone, it does not use the copied bytes. So nothing delays an engine that gives up a store. The server must
see the ticket's removal before later writes to the blocks. x86 keeps the order of writes; on other
processors, both sides take locks of their own in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

SLOTS = 1024
"""The most loads and stores of a worker at a time."""
_GIVE_UP_S = 5.0
_SLOT = struct.Struct("<Q")
_NBYTES = SLOTS * _SLOT.size


class AbandonedError(Exception):
    """The engine has given up the load or store, so its blocks must not be touched."""


class _Page:
    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor. Its open file must be this process's own, because the open file owns the
        locks."""
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _NBYTES)

    def ticket(self, slot: int) -> int:
        return int(_SLOT.unpack_from(self._memory, slot * _SLOT.size)[0])

    def write(self, slot: int, ticket: int) -> None:
        _SLOT.pack_into(self._memory, slot * _SLOT.size, ticket)

    def clear(self) -> None:
        self._memory[:] = bytes(_NBYTES)

    def lock(self, slot: int) -> bool:
        return self._set(slot, fcntl.F_WRLCK)

    def unlock(self, slot: int) -> None:
        self._set(slot, fcntl.F_UNLCK)

    def close(self) -> None:
        self._memory.close()
        os.close(self._descriptor)

    def _set(self, slot: int, kind: int) -> bool:
        # struct flock: type, whence, start, length, pid; the lock belongs to the open file, so threads share
        # it
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, slot * _SLOT.size, _SLOT.size, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True


class _Admitted(NamedTuple):
    """The load or store that has a slot."""

    ticket: int
    loads: bool
    """Whether the operation writes to the blocks, as a load does."""


class Fence:
    """The engine's side of a fence. Thread-safe."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("pd-cache-fence")
        os.truncate(descriptor, _NBYTES)
        self._page = _Page(descriptor)
        self._page.clear()  # this allocates the page's memory, and charges it to this process
        self.descriptor = descriptor
        self._taken: dict[int, _Admitted] = {}
        """The operations that have a slot, by slot."""
        self._next = 1
        self._closed = False
        """If true, `admit` returns no more tickets."""
        self._unmapped = False
        self._lock = threading.Lock()

    def admit(self, *, loads: bool) -> tuple[int, int] | None:
        """Returns a slot with a new ticket in it, as (slot, ticket); None if all slots are taken.

        `loads`: whether the operation writes to the blocks; otherwise it reads them. The caller must `revoke`
        the ticket in the end.
        """
        with self._lock:
            if self._closed or len(self._taken) == SLOTS:
                return None
            ticket, self._next = self._next, self._next + 1
            slot = next(
                slot
                for slot in (at % SLOTS for at in range(ticket, ticket + SLOTS))
                if slot not in self._taken
            )
            self._taken[slot] = _Admitted(ticket, loads)
            self._page.write(slot, ticket)
            return slot, ticket

    def revoke(self, slot: int, ticket: int) -> bool:
        """Removes the ticket and frees the slot. Returns False, and changes nothing, while the server copies
        into the blocks: try again later.

        Returns True if the ticket is not there any more, for example after `close`.
        """
        with self._lock:
            taken = self._taken.get(slot)
            if self._unmapped or taken is None or taken.ticket != ticket:
                return True
            if taken.loads and not self._page.lock(slot):
                return False
            self._page.write(slot, 0)
            if taken.loads:
                self._page.unlock(slot)
            del self._taken[slot]
            return True

    def give_up(self, slot: int, ticket: int) -> None:
        """Removes the ticket. Waits while the server copies into the blocks, but at most five seconds. If the
        server stands still in the middle of a copy, `close` tries again."""
        end = time.monotonic() + _GIVE_UP_S
        while not self.revoke(slot, ticket) and time.monotonic() < end:
            time.sleep(0.001)

    def close(self, timeout: float = 0.0) -> int:
        """Removes all tickets, so that the server touches no block any more, and unmaps the page. Idempotent.

        Returns how many tickets could not be removed within `timeout` seconds because the server was in the
        middle of a copy. The page stays mapped then, and a later `close` or `revoke` tries again.
        """
        with self._lock:
            self._closed = True
        end = time.monotonic() + timeout
        while left := [
            slot for slot, taken in list(self._taken.items()) if not self.revoke(slot, taken.ticket)
        ]:
            if time.monotonic() >= end:
                return len(left)
            time.sleep(0.001)
        with self._lock:
            if not self._unmapped:
                self._unmapped = True
                self._page.close()
        return 0


class FenceView:
    """The server's side of a fence. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        """Maps the fence. The caller keeps ownership of `descriptor`."""
        # the passed descriptor shares the engine's open file, and locks belong to the open file; the server
        # needs an open file of its own
        self._page = _Page(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        self._turns = [threading.Lock() for _ in range(SLOTS)]
        """A lock for each slot. The kernel's locks do not distinguish this process's threads: a late thread
        would release the lock of the slot's next user."""

    @contextlib.contextmanager
    def writing(self, slot: int, ticket: int) -> Iterator[None]:
        """Holds the slot's lock; the server may write to blocks only inside this context. Raises
        AbandonedError if the ticket is gone."""
        with self._turns[slot]:
            if not self._page.lock(slot):
                raise AbandonedError
            try:
                self._check(slot, ticket)
                yield
            finally:
                self._page.unlock(slot)

    @contextlib.contextmanager
    def reading(self, slot: int, ticket: int) -> Iterator[None]:
        """Checks the ticket before and after the `with` block. Raises AbandonedError if it is gone: the bytes
        that were read may then be another request's."""
        self._check(slot, ticket)
        yield
        self._check(slot, ticket)

    def _check(self, slot: int, ticket: int) -> None:
        if self._page.ticket(slot) != ticket:
            raise AbandonedError

    def close(self) -> None:
        self._page.close()
