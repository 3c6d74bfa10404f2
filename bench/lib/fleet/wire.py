"""Messages between the machines of a bench: msgpack in frames over TCP, typed and versioned; never pickle.

Both ends send a beat every two seconds, so that silence means that the other end is gone: its machine, its link, or a process that
was stopped. A process that ends closes its connection, which is noticed at once.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from bench.lib.fleet.errors import FleetError
from pd_cache.decoding import UndecodableError, msgpack_decoder

PROTOCOL = 1
"""Raised with every change that an older version would not understand."""
MAX_FRAME = 64 << 20
"""Bytes of one message; what comes from a stranger is refused before it is read."""
_BEAT_S = 2.0
_SILENCE_S = 30.0
"""Longer than Mooncake holds the GIL at its worst (docs/mooncake.md), also on a machine that is busy with other things."""
_LENGTH = struct.Struct("!I")

_Text = Annotated[str, msgspec.Meta(max_length=300)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A participant's first message."""

    protocol: int
    bench: _Text
    node: _Text
    host: _Text
    version: _Text


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Do a step of the bench now."""

    number: int
    step: str
    job: msgspec.Raw


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The outcome of a step."""

    number: int
    result: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why there is no outcome."""

    number: int
    why: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Still here."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """The last message, from either end: that all is done (`why` is empty), or why it goes no further."""

    why: str = ""


Message = Hello | Run | Done | Failed | Beat | End
_decoded = msgpack_decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class Disconnected(FleetError):
    """The connection ended, or its other end fell silent."""


def decode_message(raw: bytes) -> Message:
    """Returns the message in a frame. Raises Disconnected for anything else: who sends that is no participant."""
    try:
        message: Message = _decoded(raw)
    except UndecodableError as error:
        raise Disconnected(f"it sent something that is no message of a bench: {error}") from None
    return message


class Connection:
    """Messages over one socket. One thread receives; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over, of TCP or a pair within this machine."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_SILENCE_S)
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def send(self, message: Message) -> None:
        """Disconnected if the other end does not take it."""
        frame = _encoder.encode(message)
        if len(frame) > MAX_FRAME:
            raise FleetError(f"a message of {len(frame)} bytes is larger than the {MAX_FRAME} that are allowed")
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise Disconnected(_reason(error)) from None

    def receive(self, timeout_s: float = math.inf) -> Message:
        """The next message that is no beat. Disconnected when none will come, none came within `timeout_s`, or what came is none."""
        deadline = time.monotonic() + timeout_s
        while True:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
            if length > MAX_FRAME:
                raise Disconnected(f"it sent a frame of {length} bytes; {MAX_FRAME} are allowed")
            message = decode_message(self._read(length, deadline))
            if not isinstance(message, Beat):
                return message

    def follow(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        """From now on, beat, and call `on_message` with what comes, and once `on_lost` with why nothing comes any more.

        On a thread of the connection's own.
        """

        def receive() -> None:
            try:
                while not self._closed.is_set():
                    on_message(self.receive())
            except Disconnected as error:
                if not self._closed.is_set():
                    on_lost(str(error))

        def beat() -> None:
            with contextlib.suppress(Disconnected):
                while not self._closed.wait(_BEAT_S):
                    self.send(Beat())

        for function in (receive, beat):
            thread = threading.Thread(target=function, name=f"bench-{function.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, why: str | None = None) -> None:
        """Say `End(why)`, if `why` is given and the other end listens, and disconnect. Idempotent."""
        if self._closed.is_set():
            return
        if why is not None:
            with contextlib.suppress(Disconnected):
                self.send(End(why))
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._socket.close()

    def _read(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            remaining = deadline - time.monotonic()
            try:
                if remaining <= 0:
                    raise TimeoutError
                if not self._poll.poll(1000 * min(remaining, _SILENCE_S)):
                    raise TimeoutError
                part = self._socket.recv(min(size, 1 << 20))
            except OSError as error:
                raise Disconnected(_reason(error)) from None
            if not part:
                raise Disconnected("its connection ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "nothing was heard of it for too long"
    return f"its connection broke ({error.strerror or error})"
