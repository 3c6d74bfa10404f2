"""The project's root exception, and the meaning of Mooncake's return codes for a cache.

Mooncake's client raises nothing: every call returns an int, and a negative one is a code of its `ErrorCode` enumeration
(mooncake-store/include/types.h). Outside this package, only `Status` is used.
"""

from __future__ import annotations

import enum


class PdCacheError(Exception):
    """The root of every exception that pd-cache raises, except ValueError for a caller's mistake."""


class TransferError(PdCacheError):
    """A transfer component cannot be set up or was used in the wrong state."""


class MissingLibraryError(TransferError):
    """Mooncake's wheel, or a system library that it links to, cannot be loaded."""


class PoolUnavailableError(TransferError):
    """The pool could not be reached in the time that the caller gave."""


class Status(enum.Enum):
    """The outcome of one key in one call. Only `OK` means that the bytes are where the caller wanted them."""

    OK = "ok"
    MISSING = "missing"
    """No such object: never stored, evicted or removed."""
    BUSY = "busy"
    """Another client is writing, leasing or replicating the object right now."""
    LEASE_EXPIRED = "lease_expired"
    """The read outlived the lease that protected the object: its bytes may be another object's by now."""
    NO_SPACE = "no_space"
    TRANSFER_FAILED = "transfer_failed"
    """The node that holds the bytes did not deliver or take them."""
    CHECKSUM = "checksum"
    INVALID = "invalid"
    """Mooncake refused the arguments."""
    POOL_DOWN = "pool_down"
    """The master did not answer, or the circuit breaker is open."""
    TIMEOUT = "timeout"
    """The caller's deadline passed first. The call may still run."""
    OVERLOADED = "overloaded"
    """All transfer threads of this process are held, by too many calls at once or by a peer that hangs."""
    TIER_OFF = "tier_off"
    """A storage tier of this node failed and is switched off for a while."""
    READ_ONLY = "read_only"
    """A storage tier of this node can be read but not written."""
    CLOSED = "closed"
    """The store is not open."""
    INTERNAL = "internal"
    """Any other code."""


OUTAGE = frozenset({Status.POOL_DOWN, Status.TRANSFER_FAILED, Status.TIMEOUT})
"""Outcomes that say something about the pool's health rather than about the key."""

_BY_CODE = {
    0: Status.OK,
    -10: Status.NO_SPACE,  # BUFFER_OVERFLOW
    -101: Status.NO_SPACE,  # SEGMENT_NOT_FOUND: nothing is mounted that could take the bytes
    -102: Status.INVALID,
    -103: Status.POOL_DOWN,  # CLIENT_NOT_FOUND: the master has forgotten this client, which has not registered again yet
    -200: Status.NO_SPACE,
    -400: Status.INVALID,
    -500: Status.TRANSFER_FAILED,
    -600: Status.INVALID,
    -601: Status.INVALID,
    -700: Status.TRANSFER_FAILED,
    -701: Status.TRANSFER_FAILED,
    -702: Status.MISSING,  # INVALID_REPLICA: only a kind of replica exists that this call cannot read
    -703: Status.BUSY,
    -704: Status.MISSING,
    -705: Status.BUSY,
    -706: Status.BUSY,
    -707: Status.LEASE_EXPIRED,
    -708: Status.BUSY,
    -710: Status.MISSING,
    -711: Status.BUSY,
    -712: Status.MISSING,
    -713: Status.MISSING,
    -714: Status.BUSY,
    -800: Status.TRANSFER_FAILED,
    -801: Status.CHECKSUM,
    -900: Status.POOL_DOWN,
    -901: Status.POOL_DOWN,
    -9001: Status.TIMEOUT,  # our own: `transfer.moves.LATE`
}

_BY_RANGE = (
    (-1099, -1000, Status.POOL_DOWN),  # election, etcd and "not in this state" codes of a master that is not serving
    (-1399, -1100, Status.TRANSFER_FAILED),  # files, buckets and offload: the disk tier behind a segment
    (-1599, -1500, Status.INVALID),
    (-1699, -1600, Status.TRANSFER_FAILED),
    (-1799, -1700, Status.NO_SPACE),  # tenant quotas
)


def status_of(code: int) -> Status:
    """Returns the meaning of a Mooncake return code. Positive values are byte counts and therefore `OK`."""
    if code >= 0:
        return Status.OK
    in_range = (status for low, high, status in _BY_RANGE if low <= code <= high)
    return _BY_CODE.get(code) or next(in_range, Status.INTERNAL)
