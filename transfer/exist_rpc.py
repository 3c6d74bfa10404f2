"""ExistRpc: asks a master which keys it has, over connections of our own.

Mooncake's client cannot be given a deadline: a request blocks for as long as the master does not answer. So requests run on other threads
(`transfer.calls`), and waking two of them costs as much as the request itself. A lookup is one such request. On a socket it has its
deadline without another thread.

The request is `BatchExistKey`, byte for byte as Mooncake's client sends it, which is no public interface. So this is only a short cut.
Whatever it cannot do goes the long way, through the client: if there is no connection, if all of them are in use, if a key is one
that it cannot spell. Requests carry a hash of the method's name and one of its parameters' types, so a master of another version refuses
them. After an answer that is not as expected, all requests go the long way for a minute.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

_MOST = 4
"""Connections of one store. Further threads go the long way meanwhile."""
_FRESH_S = 30.0
"""A connection that was not used for longer is closed: firewalls forget idle ones without a word."""
_AGAIN_S = 1.0
"""How long after a failed attempt to connect the next one may follow."""
_STRANGER_S = 60.0
"""The same after an unexpected answer."""
_LOOK_S = 100e-6
"""For so long an answer is looked for again and again before its thread goes to sleep: being woken takes as long as most answers."""

_MAGIC, _VERSION = 21, 0
_REQUEST = struct.Struct("<4B4I")
"""Magic, version, how arguments are serialized (0: struct_pack), kind of message; number, method, bytes of the body and of attachments."""
_ANSWER = struct.Struct("<4B3I")
"""Magic, version, error, kind of message; number, bytes of the body and of attachments."""
_METHOD = 0xB89FA6B0
"""yalantinglibs' hash of the name `mooncake::WrappedMasterService::BatchExistKey`."""
_PARAMETERS = bytes.fromhex("638df700 0c fd84800c800cff 00")
"""A vector of strings and a string: the hash of the types, "sizes have two bytes", and the types once more, spelled out."""
_RESULT = bytes.fromhex("5d8c5f2a")
"""The hash of the result's type, a vector of `expected<bool, ErrorCode>`."""
_RESULT_TYPES = bytes.fromhex("84870b0100")
_TENANT = b"\x07\x00default"
"""The tenant of every client that `setup()` is given none for."""
_SIZE_BYTES = {0x04: 1, 0x0C: 2}
"""How many bytes the result's size has, by the byte that says so."""
_ROOM = 64
"""More bytes than an answer has besides its verdicts."""
_LARGEST = 0xFFFF
"""Keys of a request, and bytes of a key."""


class UnexpectedAnswerError(Exception):
    """The master does not speak as the version of Mooncake that this was made for."""


def exist_rpc(master: str) -> ExistRpc | None:
    """Returns an `ExistRpc` to the master at `host:port`; None for elected masters, and if requests do not go over TCP."""
    host, _, port = master.rpartition(":")
    usable = host and "/" not in host and port.isdecimal() and os.environ.get("MC_RPC_PROTOCOL", "tcp") == "tcp"
    return ExistRpc(host.strip("[]"), int(port)) if usable else None


class ExistRpc:
    """Connections to one master. Thread-safe; closed ones answer nothing."""

    def __init__(self, host: str, port: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Connects to nothing yet."""
        self._address = (host, port)
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: deque[tuple[socket.socket, float]] = deque()
        """Connections that no thread uses, and since when. The one used last is at the end."""
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        """All connections. One that an interrupted thread has lost goes by itself."""
        self._connecting = threading.Lock()
        self._not_before = 0.0
        self._gave_up = False
        """Whether the master has once answered what is not expected."""
        self._closed = False
        self._numbers = itertools.count(1)

    def ask(self, keys: Sequence[str], deadline: float) -> bytes | None:
        """Returns 1 or 0 for each key: whether the master has it. It leases those that it has.

        Returns None if the keys have to go the long way. Raises TimeoutError if the master has not answered by `deadline`, on the clock.
        """
        if not self._idle:
            return None
        try:
            body = _spelled(keys)
        except ValueError:
            return None
        if (connection := self._take()) is None:
            return None
        answered = False
        try:
            found = self._exchange(connection, body, len(keys), deadline)
            answered = True
            return found
        except TimeoutError:
            raise
        except OSError:  # the master is gone, or was started anew: the long way tells which
            self._drop_idle()
            return None
        except UnexpectedAnswerError as error:
            self._give_up(error)
            return None
        finally:
            self._put_back(connection, answered)

    @property
    def wants_connection(self) -> bool:
        """Whether a thread that has time should call `connect`."""
        return (
            not self._closed
            and not self._idle
            and len(self._connections) < _MOST
            and self._clock() >= self._not_before
            and not self._connecting.locked()
        )

    def connect(self, deadline: float) -> None:
        """Makes one more connection and tries it. May wait until `deadline`, and longer for a name server."""
        if not self.wants_connection or not self._connecting.acquire(blocking=False):
            return
        try:
            self._not_before = self._clock() + _AGAIN_S
            connection = socket.create_connection(self._address, timeout=max(0.001, deadline - self._clock()))
            answered = False
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._exchange(connection, _spelled(()), 0, deadline)
                self._connections.add(connection)
                self._not_before, answered = 0.0, True
            finally:
                self._put_back(connection, answered)
        except OSError as error:  # among them TimeoutError
            log.debug("no connection to the master at %s:%d: %s", *self._address, error)
        except UnexpectedAnswerError as error:
            self._give_up(error)
        finally:
            self._connecting.release()

    def close(self) -> None:
        """Closes the connections; one in use, as soon as its request is over. Idempotent."""
        self._closed = True
        self._drop_idle()

    def _take(self) -> socket.socket | None:
        with self._lock:
            stale = self._clock() - _FRESH_S
            while self._idle and self._idle[0][1] < stale:
                self._discard(self._idle.popleft()[0])
            return self._idle.pop()[0] if self._idle else None

    def _put_back(self, connection: socket.socket, answered: bool) -> None:
        with self._lock:
            if answered and not self._closed:
                self._idle.append((connection, self._clock()))
            else:
                self._discard(connection)

    def _drop_idle(self) -> None:
        with self._lock:
            while self._idle:
                self._discard(self._idle.pop()[0])

    def _discard(self, connection: socket.socket) -> None:
        self._connections.discard(connection)
        connection.close()

    def _give_up(self, error: UnexpectedAnswerError) -> None:
        if not self._gave_up:
            log.info("the master at %s:%d is asked through Mooncake's client only: %s", *self._address, error)
        self._gave_up = True
        self._not_before = self._clock() + _STRANGER_S
        self._drop_idle()

    def _exchange(self, connection: socket.socket, body: bytes, keys: int, deadline: float) -> bytes:
        number = next(self._numbers) & 0xFFFFFFFF
        head = _REQUEST.pack(_MAGIC, _VERSION, 0, 0, number, _METHOD, len(body), 0)
        connection.settimeout(self._left(deadline))
        connection.sendall(head + body)
        answer = b""
        while (verdicts := read_answer(answer, number, keys)) is None:
            if not (more := self._receive(connection, _ROOM + 2 * keys, deadline)):
                raise ConnectionError("the master ended the connection")
            answer += more
        return verdicts

    def _receive(self, connection: socket.socket, most: int, deadline: float) -> bytes:
        """Returns what has come, `most` bytes of it, or nothing if the connection has ended."""
        look_until = self._clock() + _LOOK_S
        connection.setblocking(False)
        while self._clock() < look_until:
            try:
                return connection.recv(most)
            except BlockingIOError:
                os.sched_yield()
        connection.settimeout(self._left(deadline))
        return connection.recv(most)

    def _left(self, deadline: float) -> float:
        if (left := deadline - self._clock()) <= 0:
            raise TimeoutError("no answer from the master in time")
        return left


def _spelled(keys: Sequence[str]) -> bytes:
    """Returns the body of a request. Raises ValueError if there are too many keys, or one is too long or not ASCII."""
    if len(keys) > _LARGEST:
        raise ValueError(f"{len(keys)} keys")
    parts = [_PARAMETERS, len(keys).to_bytes(2, "little")]
    for length, group in itertools.groupby(keys, len):
        run = list(group)
        if length > _LARGEST or not "".join(run).isascii():
            raise ValueError(run[0][:100])
        size = length.to_bytes(2, "little").decode("latin-1")
        parts.append((size + size.join(run)).encode("latin-1"))
    parts.append(_TENANT)
    return b"".join(parts)


def read_answer(answer: bytes, number: int, keys: int) -> bytes | None:
    """Returns 1 or 0 for each key of the request `number`; None if the answer is longer than what is there of it.

    Raises UnexpectedAnswerError if no answer to this request begins like that, OSError if the master answers without knowing it of all keys.
    """
    if len(answer) < _ANSWER.size:
        return None
    magic, version, error, _, of, length, attached = _ANSWER.unpack_from(answer)
    head = len(_RESULT) + 1
    most = head + len(_RESULT_TYPES) + 2 + 5 * keys  # an error takes 5 bytes, a verdict 2
    if (magic, version, error, of, attached) != (_MAGIC, _VERSION, 0, number, 0) or length > most:
        raise UnexpectedAnswerError(f"an answer begins with {answer[: _ANSWER.size].hex()}")
    body = answer[_ANSWER.size :]
    if len(body) < length:
        return None
    wide = _SIZE_BYTES.get(body[head - 1] if len(body) >= head else -1, 0)
    start = head + len(_RESULT_TYPES) + wide
    size = int.from_bytes(body[start - wide : start], "little")
    if not wide or body[: head - 1] != _RESULT or body[head : start - wide] != _RESULT_TYPES or size != keys:
        raise UnexpectedAnswerError(f"the result of an answer begins with {body[:start].hex()}")
    known, verdicts = body[start::2], body[start + 1 :: 2]  # a key that has an error, 0 and its number, has no verdict
    if len(known) != keys or known.count(1) != keys or verdicts.count(1) + verdicts.count(0) != keys:
        raise OSError("the master does not know it of all keys")
    return verdicts
