"""DirectEngine: one process reads and writes the registered memory of another, without keys, leases or a master.

It wraps Mooncake's TransferEngine, on which the store's transfers are built. Its user must know the peers' addresses and whether they
live: a peer that is started again has another address, and only failing transfers show here that a peer died.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from transfer.calls import CallThreads
from transfer.environment import MAX_TRANSFERS, prepare
from transfer.errors import MissingLibraryError, Status, TransferError
from transfer.settings import TransferSettings
from transfer.staging import Slot
from transfer.store import load_mooncake


class _BatchTransfer(Protocol):
    def __call__(self, peer: str, local: list[int], remote: list[int], sizes: list[int]) -> int: ...


class DirectEngine:
    """A TransferEngine in this process. Thread-safe. A call that outlives its deadline is abandoned, and holds its slots until it returns."""

    def __init__(self, settings: TransferSettings, host: str) -> None:
        """`host`: the address at which peers reach this process.

        Raises TransferError if Mooncake refuses, MissingLibraryError if a library is missing.
        """
        prepare(settings)
        load_mooncake()  # raises if a library is missing
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise MissingLibraryError(f"mooncake.engine cannot be imported: {error}") from error
        self._engine: Any = TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", settings.protocol, ",".join(settings.devices))
        if code != 0:
            raise TransferError(f"TransferEngine on {host} over {settings.protocol}: initialize() returned {code}")
        self.address = f"{host}:{self._engine.get_rpc_port()}"
        """The address that peers need. Every start gives a new one."""
        self._threads = CallThreads("mooncake-engine", settings.threads)
        self._registered: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        """Lets peers read and write this memory, which must stay mapped until `close`. Raises TransferError if Mooncake refuses."""
        code = self.register_buffer(address, nbytes)
        if code != 0:
            raise TransferError(f"TransferEngine {self.address} refused to register {nbytes} bytes ({code})")

    def register_buffer(self, address: int, size: int) -> int:
        """Does the same as `register`, but returns Mooncake's code."""
        code = int(self._engine.register_memory(address, size))
        if code == 0:
            self._registered.append(address)
        return code

    def write(self, peer: str, slots: Sequence[Slot], remote: Sequence[int], *, timeout: float) -> Status:
        """Writes each slot to the address of the same index in the peer's registered memory. Returns OK when all are there."""
        return self._batch(self._engine.batch_transfer_sync_write, peer, slots, remote, timeout)

    def read(self, peer: str, slots: Sequence[Slot], remote: Sequence[int], *, timeout: float) -> Status:
        """Fills each slot from the address of the same index in the peer's registered memory. Returns OK when all are full."""
        return self._batch(self._engine.batch_transfer_sync_read, peer, slots, remote, timeout)

    def close(self, timeout: float) -> bool:
        """Waits for the calls under way, then takes the memory back. Returns False if some still run after `timeout` seconds."""
        ended = self._threads.close(timeout)
        while ended and self._registered:
            self._engine.unregister_memory(self._registered.pop())
        return ended

    def _batch(
        self, function: _BatchTransfer, peer: str, slots: Sequence[Slot], remote: Sequence[int], timeout: float
    ) -> Status:
        if len(slots) != len(remote) or not 1 <= len(slots) <= MAX_TRANSFERS:
            raise ValueError(
                f"got {len(slots)} slots and {len(remote)} addresses; expected one address for each slot, 1 to {MAX_TRANSFERS} of them"
            )
        taken, addresses = list(slots), list(remote)
        for slot in taken:
            slot.retain()

        def transfer() -> list[int]:
            code = function(peer, [slot.address for slot in taken], addresses, [slot.size for slot in taken])
            if code != 0:  # Mooncake returns when the first task has failed, while others of the batch go on
                for slot in taken:
                    slot.forfeit(self)
            return [code]

        def let_go() -> None:
            for slot in taken:
                slot.release()

        call = self._threads.submit(transfer, time.monotonic() + timeout, let_go)
        if call is None:
            return Status.OVERLOADED
        codes = call.outcome([])
        if not codes:
            return Status.TIMEOUT
        return Status.OK if codes == [0] else Status.TRANSFER_FAILED
