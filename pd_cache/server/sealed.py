"""Shared memory whose size can no longer change, not even by its owner's hand.

SIGBUS kills a process that touches a mapped page beyond the end of its file. So an engine that shrank the memory it has lent would kill
the cache server of its host, and with it the cache of every other engine. The kernel can prevent that: a memfd takes seals, which stay
for as long as the file exists. The client seals what it lends, and the server maps nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE, which the module fcntl does not name."""
_READ_ONLY = fcntl.F_SEAL_WRITE | _SEAL_FUTURE_WRITE
_PIECE = 64 << 20
_BLOCK = 512
"""Bytes of a block in `st_blocks`."""


class SealError(ValueError):
    """A file descriptor that is not sealed memory, or has less memory than announced."""


def close_all(descriptors: Sequence[int]) -> None:
    """Closes file descriptors."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def sealed_memory(name: str, nbytes: int) -> int:
    """Returns a descriptor of `nbytes` of new shared memory, all zero, whose size cannot change. The caller closes it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Returns whether the size of the file can never change."""
    return _seals(descriptor) & _SEALS == _SEALS


def check_sealed(descriptor: int, nbytes: int) -> None:
    """Raises SealError, with the reason, unless the descriptor is `nbytes` of memory that is safe to map, read and write.

    Safe means that no access can kill this process, block it, or allocate memory. That takes a memfd of ordinary pages, sealed against
    changes of its size, and allocated to the last page.
    """
    seals = _seals(descriptor)
    if seals < 0:
        raise SealError("expected sealed memory of memfd_create(), got another kind of file descriptor")
    if seals & _SEALS != _SEALS:
        raise SealError(
            "the shared memory is not sealed; it needs F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL, so that it cannot "
            "shrink while the server uses it"
        )
    if seals & _READ_ONLY or fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise SealError("the shared memory cannot be written; the server must be able to load chunks into it")
    page = os.fstatvfs(descriptor).f_bsize
    if page != mmap.PAGESIZE:
        raise SealError(f"the shared memory has pages of {page} bytes; expected pages of {mmap.PAGESIZE} bytes")
    status = os.fstat(descriptor)
    if status.st_size < nbytes:
        raise SealError(f"expected a storage of {nbytes} bytes, the file has {status.st_size}")
    if status.st_blocks * _BLOCK < nbytes:
        raise SealError(
            f"of {nbytes} bytes of shared memory only {status.st_blocks * _BLOCK} are allocated; write all of it before "
            "lending it, so that the engine is charged for it and not the server"
        )


def reseat(source: int, address: int, nbytes: int) -> None:
    """Moves the memory at `address` into sealed memory, in place. It must be a shared mapping of the whole file `source`.

    Afterwards the same addresses map sealed memory with the same contents, and the descriptor `source` refers to that memory. Nothing may
    write there meanwhile. Raises OSError, with nothing changed, if there is not enough memory.
    """
    descriptor = sealed_memory("pd-cache-tensors", nbytes)
    try:
        done = 0
        while done < nbytes:
            sent = os.sendfile(descriptor, source, done, min(_PIECE, nbytes - done))
            if not sent:
                raise OSError(f"the file of {nbytes} bytes ended after {done}")
            done += sent
        _map_over(descriptor, address, nbytes)
        os.dup2(descriptor, source, inheritable=False)
    finally:
        os.close(descriptor)


def _seals(descriptor: int) -> int:
    """Returns the seals of a file, or -1 if it cannot have any."""
    try:
        return int(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS))
    except OSError:
        return -1


_MAP_FIXED = 0x10


def _map_over(descriptor: int, address: int, nbytes: int) -> None:
    """Replaces the mapping at `address` with a mapping of the file."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_longlong,
    )
    library.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_SHARED | _MAP_FIXED
    got = library.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if got != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
