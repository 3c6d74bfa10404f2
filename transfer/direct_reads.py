"""Reads of objects in peers' memory over a transfer engine of our own, for TCP only. The caller sleeps until
the bytes have come.

Mooncake's client polls for the end of a transfer without a pause, which takes a core from other programs
(docs/mooncake.md, "It waits by spinning"). It still does some reads:

- the first read from a peer, because it takes a minute if the peer is stopped;
- reads from a peer after a read from it has failed, because the engine never updates a peer's addresses;
- reads that come while the engine connects to a peer;
- reads of objects that do not lie in another node's memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from transfer.settings import hushed

log = logging.getLogger(__name__)

_LOOK_S = 0.0005
"""The pause between two looks at a transfer."""
FAILED = -800
"""Mooncake's code for a transfer that failed."""


class TransferEngine(Protocol):
    """The methods of `mooncake.engine.TransferEngine` that we use."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int: ...
    def batch_transfer_async_read(
        self, peer: str, addresses: list[int], peer_addresses: list[int], sizes: list[int]
    ) -> int: ...
    def transfer_check_status(self, transfer: int) -> int: ...


idle: list[TransferEngine] = []
"""Engines of closed stores, kept for later stores. Destroying an engine takes a second, during which no other
thread of the process runs Python."""


def _taken_engine() -> TransferEngine | None:
    """Returns an idle engine or a new one; None if Mooncake starts none."""
    with contextlib.suppress(IndexError):
        return idle.pop()
    try:
        from mooncake.engine import TransferEngine as Engine

        engine: TransferEngine = Engine()
        with hushed():  # no peer ever calls this engine, so its address does not matter
            return engine if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0 else None
    except Exception:  # the client can read, too
        log.exception("no transfer engine")
        return None


class Replica(NamedTuple):
    """An object in a peer's memory."""

    peer: str
    address: int
    nbytes: int


class DirectReads:
    """Reads from peers from which Mooncake's client has already read. Thread-safe."""

    def __init__(self, engine: TransferEngine | None = None) -> None:
        """Without an `engine`, the first read takes one, because most stores never read."""
        self._engine = engine
        self._met: set[str] = set()
        """The peers that have delivered to Mooncake's client, and from which no read of ours has failed."""
        self._failed: set[str] = set()
        self._open: set[str] = set()
        """The peers to which the engine has connected. It begins no other transfer while it connects."""
        self._opening = threading.Lock()

    def meet(self, peers: set[str]) -> None:
        """Notes that peers delivered to Mooncake's client."""
        self._met |= peers - self._failed

    def read(self, replicas: Sequence[Replica], addresses: Sequence[int], end: float) -> list[int] | None:
        """Reads each object into the memory at its address. Returns for each how many bytes it has, or
        Mooncake's code for a failed transfer. Returns None if the client has to read.

        A transfer that has not ended by `end` counts as failed, and may still go on.
        """
        peers = {replica.peer for replica in replicas}
        if not peers <= self._met or self._opening.locked():
            return None
        transfers: list[int] = []
        unreachable: set[str] = set()
        with contextlib.nullcontext() if peers <= self._open else self._opening:
            self._engine = self._engine or _taken_engine()
            if self._engine is None:
                return None
            for (peer, peer_address, nbytes), address in zip(replicas, addresses, strict=True):
                # looking for a peer that has just stopped takes a minute, so this looks once, not for each
                # object
                begun = 0
                if peer not in unreachable:
                    begun = self._engine.batch_transfer_async_read(peer, [address], [peer_address], [nbytes])
                if not begun:
                    unreachable.add(peer)
                transfers.append(begun)
        self._open |= peers
        codes = [
            replica.nbytes if transfer and self._ends_well(transfer, end) else FAILED
            for replica, transfer in zip(replicas, transfers, strict=True)
        ]
        if failed := {replica.peer for replica, code in zip(replicas, codes, strict=True) if code == FAILED}:
            self._failed |= failed
            self._met -= failed
        return codes

    def close(self) -> None:
        """Gives the engine up. No read may be under way."""
        if self._engine is not None:
            idle.append(self._engine)
        self._engine = None

    def _ends_well(self, transfer: int, end: float) -> bool:
        """Waits for a transfer until `end`. Returns whether the bytes are there."""
        assert self._engine is not None
        while (state := self._engine.transfer_check_status(transfer)) not in (1, -1):
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_S)
        return state == 1
