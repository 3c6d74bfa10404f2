"""Classifies an OSError of the disk tier: it concerns one file, the whole folder, or this process. No I/O."""

from __future__ import annotations

import enum
import errno


class DiskFault(enum.Enum):
    """What the number of an error says."""

    OBJECT = "object"
    """It concerns one file only: something else is in its place, or this process may not touch it."""
    UNCLEAR = "unclear"
    """One bad block or a dead disk: a check of the folder decides."""
    NO_ROOM = "no_room"
    """The file system, or a quota, is full: deleting files helps."""
    TOO_LARGE = "too_large"
    """A limit that deleting files does not change."""
    READ_ONLY = "read_only"
    PROCESS = "process"
    """This process lacks something. The error says nothing about the disk."""


_FAULTS = {
    DiskFault.OBJECT: (
        errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG,
        errno.ENOTDIR, errno.ENOTEMPTY, errno.ENXIO, errno.ETXTBSY, errno.EXDEV,
    ),
    DiskFault.NO_ROOM: (errno.ENOSPC, errno.EDQUOT),
    DiskFault.TOO_LARGE: (errno.EFBIG,),
    DiskFault.READ_ONLY: (errno.EROFS,),
    DiskFault.PROCESS: (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN),
}  # fmt: skip
_BY_NUMBER = {number: fault for fault, numbers in _FAULTS.items() for number in numbers}

MAY_NOT = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""Error numbers of a folder that can be read but not written."""


def fault_of(error: OSError) -> DiskFault:
    """Returns what an error of one file says."""
    return _BY_NUMBER.get(error.errno or 0, DiskFault.UNCLEAR)


def name_of(error: OSError) -> str:
    """Returns the error's symbol in lower case, such as `eio`, for a metric's label."""
    return errno.errorcode.get(error.errno or 0, "unknown").lower()
