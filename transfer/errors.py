"""The project's root exception, and the meaning of Mooncake's return codes for a cache.

Mooncake's client raises nothing: every call returns an int, and a negative one is a code of its `ErrorCode`
enumeration (mooncake-store/include/types.h). Outside this package, only `Status` is used.
"""

from __future__ import annotations

import enum


class PdCacheError(Exception):
    """The root of all exceptions of pd-cache, except ValueError for a caller's mistake."""


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
    """The read outlived the lease that protected the object, so its bytes may by now be another object's."""
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
    """All transfer threads of this process are busy, with too many calls or with a peer that hangs."""
    TIER_OFF = "tier_off"
    """A storage tier of this node failed and is switched off for a while."""
    READ_ONLY = "read_only"
    """A storage tier of this node can be read but not written."""
    CLOSED = "closed"
    """The store is not open."""
    INTERNAL = "internal"
    """Any other code."""


OUTAGE = frozenset({Status.POOL_DOWN, Status.TRANSFER_FAILED, Status.TIMEOUT})
"""Outcomes that concern the pool's health rather than the key."""

_CODES = {
    # -101, SEGMENT_NOT_FOUND: no segment is mounted that could take the bytes. The range has the quotas of
    # tenants
    Status.NO_SPACE: (-10, -101, -200, *range(-1799, -1699)),
    Status.INVALID: (-102, -400, -600, -601, *range(-1599, -1499)),
    # -103, CLIENT_NOT_FOUND: the master has forgotten this client, which has not registered again yet. The
    # range has the codes of a master that does not serve: elections, etcd, "not in this state"
    Status.POOL_DOWN: (-103, -900, -901, *range(-1099, -999)),
    # the ranges have the codes of files, buckets and offload: of the disk tier behind a segment
    Status.TRANSFER_FAILED: (-500, -700, -701, -800, *range(-1399, -1099), *range(-1699, -1599)),
    # -702, INVALID_REPLICA: there are only replicas of a kind that this call cannot read
    Status.MISSING: (-702, -704, -710, -712, -713),
    Status.BUSY: (-703, -705, -706, -708, -711, -714),
    Status.LEASE_EXPIRED: (-707,),
    Status.CHECKSUM: (-801,),
    Status.TIMEOUT: (-9001,),  # our own: `transfer.moves.LATE`
}
_BY_CODE = {code: status for status, codes in _CODES.items() for code in codes}


def status_of(code: int) -> Status:
    """Returns the meaning of a Mooncake return code. Positive values are byte counts and therefore `OK`."""
    return Status.OK if code >= 0 else _BY_CODE.get(code, Status.INTERNAL)
