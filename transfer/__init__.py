"""Bytes between machines: everything that knows Mooncake, and nothing else does.

Importing this package loads no shared library; `MooncakeStore(...)` does, and says what is missing.
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
