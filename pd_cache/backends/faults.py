"""Whose trouble an OSError of the disk tier is: one file's, the whole folder's, or this process's. No I/O."""

from __future__ import annotations

import enum
import errno


class Fault(enum.Enum):
    """What an error says, as far as its number tells."""

    OBJECT = "object"
    """Something stands where a file should be, or may not be touched: that file's alone."""
    UNCLEAR = "unclear"
    """One bad block, or a dead disk: the folder has to be asked."""
    NO_ROOM = "no_room"
    """The file system, or a quota, is full: deleting files helps."""
    TOO_LARGE = "too_large"
    """A limit that deleting files does not change."""
    READ_ONLY = "read_only"
    PROCESS = "process"
    """This process lacks something; it says nothing about the disk."""


_FAULTS = {
    Fault.OBJECT: (
        errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EMLINK, errno.ENAMETOOLONG,
        errno.ENOTDIR, errno.ENOTEMPTY, errno.ENXIO, errno.ETXTBSY, errno.EXDEV,
    ),
    Fault.NO_ROOM: (errno.ENOSPC, errno.EDQUOT),
    Fault.TOO_LARGE: (errno.EFBIG,),
    Fault.READ_ONLY: (errno.EROFS,),
    Fault.PROCESS: (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN),
}  # fmt: skip
_BY_NUMBER = {number: fault for fault, numbers in _FAULTS.items() for number in numbers}

MAY_NOT = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""Numbers by which a folder that can be read says that it cannot be written."""


def fault_of(error: OSError) -> Fault:
    """What the error says about the file that it met."""
    return _BY_NUMBER.get(error.errno or 0, Fault.UNCLEAR)


def name_of(error: OSError) -> str:
    """The error's symbol in lower case, such as `eio`: a metric's label."""
    return errno.errorcode.get(error.errno or 0, "unknown").lower()
