"""Messages between the machines of a bench: msgpack over ZMQ, typed and versioned; never pickle.

ZMQ frames them, bounds their size and its own handshake, and sends heartbeats on a thread that needs no GIL. A process that ends is
noticed at once, a machine or link that falls silent after 30 seconds.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Annotated

import msgspec
import zmq

from pd_cache.decoding import UndecodableError, msgpack_decoder
from pd_cache.errors import PdCacheError

PROTOCOL = 2
"""Raised with every change that an older version would not understand."""
MAX_MESSAGE = 64 << 20
"""Bytes; ZMQ closes the connection of a peer that announces more."""
BEAT = b""
"""Says nothing; it cannot be sent to a participant that is gone."""
_LINGER_MS = 2000
_OPTIONS = (
    (zmq.LINGER, _LINGER_MS),
    (zmq.MAXMSGSIZE, MAX_MESSAGE),
    (zmq.HANDSHAKE_IVL, 5000),
    (zmq.HEARTBEAT_IVL, 2000),
    (zmq.HEARTBEAT_TIMEOUT, 30_000),
)

_Text = Annotated[str, msgspec.Meta(max_length=300)]
_encode = msgspec.msgpack.Encoder().encode


class FleetError(PdCacheError):
    """Machines that should measure together cannot: the message names them."""


class ParticipantHello(msgspec.Struct, frozen=True, tag="hello"):
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


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    """The outcome of a step."""

    number: int
    result: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why there is no outcome."""

    number: int
    why: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """The last message, from either end: that all is done (`why` is empty), or why it goes no further."""

    why: str = ""


Message = ParticipantHello | Run | StepDone | Failed | End
_decoded = msgpack_decoder(Message)


def encode_message(message: Message) -> bytes:
    """Returns the message as it travels. Raises FleetError if it is too large for that."""
    encoded = _encode(message)
    if len(encoded) > MAX_MESSAGE:
        raise FleetError(f"a message of {len(encoded)} bytes is larger than the {MAX_MESSAGE} that are allowed")
    return encoded


def decode_message(raw: bytes) -> Message:
    """Returns the message. Raises FleetError for anything else: its sender is not a participant."""
    try:
        message: Message = _decoded(raw)
    except UndecodableError as error:
        raise FleetError(f"it sent something that is no message of a bench: {error}") from None
    return message


def open_socket(kind: int) -> zmq.Socket[bytes]:
    """Returns a socket with a context of its own, bounded in all that it takes and waits for. `close_socket` closes it."""
    socket = zmq.Context().socket(kind)
    for option, value in _OPTIONS:
        socket.setsockopt(option, value)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # messages that are read ahead for each peer, which may be a stranger. A participant reads more ahead: if it is
        # full of beats, ZMQ stops reading, hears no heartbeat any more, and disconnects
        socket.setsockopt(zmq.RCVHWM, 8)
    return socket


def close_socket(socket: zmq.Socket[bytes]) -> None:
    """Closes it with all sockets of its context, when what was sent has left or two seconds have passed. Idempotent."""
    if not socket.closed:
        socket.disable_monitor()  # before what listens to it is closed: libzmq aborts where an event meets a closed listener
    socket.context.destroy(_LINGER_MS)


def end_if_stuck(status: int, message: str = "") -> None:
    """Ends this process immediately, with `message` on stderr, if a call into Mooncake that its owner has given up is still under way.

    Such a call cannot be cancelled and may last for a minute after its peer is gone. Python would end beside it, destroy what it uses,
    and be killed by SIGSEGV. Close everything before.
    """
    if any(thread.name.startswith("mooncake-") for thread in threading.enumerate()):
        print(message, end="\n" if message else "", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)
