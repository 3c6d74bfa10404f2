"""Moves bytes between machines. All code that knows Mooncake's client is here.

Importing this package loads no shared library. `MooncakeStore(...)` loads them, and names a missing one.
"""

from transfer.errors import (
    MissingLibraryError,
    PdCacheError,
    PoolUnavailableError,
    Status,
    TransferError,
)
from transfer.settings import ByteSize, Placement, TransferSettings, rdma_devices
from transfer.staging import Slot, StagingPool
from transfer.store import GetResult, MooncakeStore

__all__ = [
    "ByteSize",
    "GetResult",
    "MissingLibraryError",
    "MooncakeStore",
    "PdCacheError",
    "Placement",
    "PoolUnavailableError",
    "Slot",
    "StagingPool",
    "Status",
    "TransferError",
    "TransferSettings",
    "rdma_devices",
]
