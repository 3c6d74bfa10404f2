"""Keeps new clients away from a listening socket while connected clients continue.

ZMQ can only stop listening, and then it also ends every connection that was accepted there: its listener owns them.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of socket(7), which Python does not name."""
_DROP = array("B", struct.pack("HBBI", 6, 0, 0, 0))
"""A program of one instruction for the kernel's packet filter: return 0, which drops the packet."""
_IPC = "ipc://"


class Door:
    """The access to one listening socket. It is open at first."""

    def __init__(self, url: str) -> None:
        """`url`: a ZMQ address, `ipc://PATH` or `tcp://HOST:PORT`."""
        self._path = url.removeprefix(_IPC) if url.startswith(_IPC) else None

    def shut(self, listener: int) -> None:
        """Keeps new clients out from now on. `listener` is the socket's file descriptor. Raises OSError if that is impossible.

        Over TCP, the packets that would open a connection are dropped, and the client's kernel sends them again. A path is moved aside,
        so that a client finds no listener there.
        """
        if self._path is not None:
            os.rename(self._path, self._aside)
        else:
            _set_option(listener, _ATTACH_FILTER, struct.pack("HP", 1, _DROP.buffer_info()[0]))

    def open(self, listener: int) -> None:
        """Lets clients in again. Raises OSError if that is impossible."""
        if self._path is not None:
            os.rename(self._aside, self._path)
        else:
            _set_option(listener, _DETACH_FILTER, struct.pack("i", 0))

    @property
    def _aside(self) -> str:
        return f"{self._path}.full"


def _set_option(listener: int, option: int, value: bytes) -> None:
    borrowed = socket.socket(fileno=listener)
    try:
        borrowed.setsockopt(socket.SOL_SOCKET, option, value)
    finally:
        borrowed.detach()
