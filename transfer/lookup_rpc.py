"""LookupRpc: asks a master which keys it has, over connections of our own.

Mooncake's client has no deadlines: a request blocks as long as the master does not answer. So its requests
run on other threads (`transfer.calls`), and waking two threads costs as much as the request itself. A request
over a socket has a deadline without another thread. Median times in ms, for 16 to 128 keys (one pool, one
process):

| threads that ask | here | through the client |
|---|---|---|
| 1 | 0.16–0.6 | 0.6–0.8 |
| 4 | 0.27–0.5 | 0.65–1.3 |
| 8 | 0.7–1.0 | 1.6–2.6 |

The request is `BatchExistKey`, byte for byte as Mooncake's client sends it. This is no public interface, so
requests can always go through the client instead. They do if there is no free connection, or if this module
cannot encode a key. A request carries a hash of the method's name and a hash of its parameters' types, so a
master of another version refuses it. After an unexpected answer, all requests go through the client for a
minute.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

_MOST = 4
"""The most connections of one store. Further threads ask through Mooncake's client."""
_FRESH_S = 30.0
"""A connection that was idle for longer is closed: firewalls forget idle connections without notice."""
_CONNECT_S = 0.5
"""How long connecting may take for each of the master's addresses, and how long the first request may
take."""
_AGAIN_S = 1.0
"""The pause after a failed attempt to connect."""
_STRANGER_S = 60.0
"""The pause after an unexpected answer."""
_LOOK_S = 100e-6
"""How long a thread polls for its answer before it sleeps: waking up takes as long as most answers."""
_PIECE = 1 << 14
"""The most bytes that are read at once: the verdicts on 8000 keys."""
_LONGEST_S = 3600.0
"""The longest wait for a socket, which refuses much longer waits."""

_MAGIC = 21
_REQUEST = struct.Struct("<4B4I")
"""Magic, version, how the arguments are serialized, kind of message; number, method, bytes of the body, bytes
of attachments."""
_ANSWER = struct.Struct("<4B3I")
"""Magic, version, error, kind of message; number, bytes of the body, bytes of attachments."""
_METHOD = 0xB89FA6B0
"""yalantinglibs' hash of the name `mooncake::WrappedMasterService::BatchExistKey`."""
_PARAMETERS = bytes.fromhex("638df700 0c fd84800c800cff 00")
"""The parameters' types, a vector of strings and a string: their hash, a byte that says that sizes have two
bytes, and the types themselves."""
_TENANT = b"\x07\x00default"
"""The tenant of a client whose `setup()` names no tenant."""
_MOST_KEYS, _LONGEST_KEY = 0xFFFF, 4096
_RESULTS = [(bytes.fromhex("5d8c5f2a 04 84870b0100"), 1), (bytes.fromhex("5d8c5f2a 0c 84870b0100"), 2)]
"""For each width of sizes, the first bytes of a vector of `expected<bool, ErrorCode>` (the hash of the types,
the width of sizes, the types), and that width in bytes."""


class UnexpectedAnswerError(Exception):
    """The master's answer has another form than that of the known versions of Mooncake."""


def lookup_rpc(master: str) -> LookupRpc | None:
    """Returns a `LookupRpc` to the master at `host:port`; None for elected masters, and if requests do not go
    over TCP."""
    address = _address(master)
    return LookupRpc(*address) if address is not None and _over_tcp() else None


def why_silent(master: str, seconds: float) -> str | None:
    """Returns why no master, of any version, answers at `host:port`. Returns None if a master answers, for
    elected masters, and if this cannot ask.

    Takes at most twice `seconds`, for each of the host's addresses.
    """
    if (address := _address(master)) is None:
        return None
    try:
        with socket.create_connection(address, timeout=seconds) as connection:
            if not _over_tcp():
                return None
            body = _spelled(())
            connection.sendall(_REQUEST.pack(_MAGIC, 0, 0, 0, 0, _METHOD, len(body), 0) + body)
            answer = connection.recv(2)
    except OSError as error:
        return f"no connection: {error.strerror or error}"
    return (
        None
        if answer == bytes((_MAGIC, 0))
        else f"the process there is not a master: its answer begins with {answer!r}"
    )


def _address(master: str) -> tuple[str, int] | None:
    host, _, port = master.rpartition(":")
    return (host.strip("[]"), int(port)) if host and "/" not in host and port.isdecimal() else None


def _over_tcp() -> bool:
    return os.environ.get("MC_RPC_PROTOCOL", "tcp") == "tcp"


class LookupRpc:
    """Connections to one master. Thread-safe. Answers nothing after `close`."""

    def __init__(self, host: str, port: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Connects to nothing yet."""
        self._address = (host, port)
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: deque[tuple[socket.socket, float]] = deque()
        """Connections that no thread uses, and since when. The most recently used connection is the last."""
        self._connections: set[socket.socket] = set()
        self._connecting = threading.Lock()
        self._not_before = 0.0
        self._closed = False
        self._numbers = itertools.count(1)

    def ask(self, keys: Sequence[str], deadline: float) -> bytes | None:
        """Returns 1 or 0 for each key: whether the master has it. The master leases the keys that it has.

        Returns None if Mooncake's client has to ask instead. Raises TimeoutError if the master has not
        answered by `deadline`, on the clock.
        """
        if not self._idle:
            return None
        left = self._left(deadline)
        try:
            body = _spelled(keys)
        except ValueError:
            return None
        with self._lock:
            stale = self._clock() - _FRESH_S
            while self._idle and self._idle[0][1] < stale:
                self._discard(self._idle.popleft()[0])
            if not self._idle:
                return None
            connection = self._idle.pop()[0]
        answered = False
        try:
            connection.settimeout(left)
            verdicts = self._exchange(connection, body, len(keys), deadline)
            answered = True
            return verdicts or None
        except TimeoutError:
            raise
        except OSError:  # the master is gone or was restarted; the other way finds out which
            self.drop_idle()
        except UnexpectedAnswerError as error:
            self._give_up(error)
        finally:
            self._put_back(connection, answered)
        return None

    @property
    def wants_connection(self) -> bool:
        """Whether a thread that has time should call `connect`."""
        needed = not self._closed and not self._idle and len(self._connections) < _MOST
        return needed and self._clock() >= self._not_before

    def connect(self) -> None:
        """Makes another connection and tries it, unless another thread is doing so.

        Takes a second at most, half a second more for each further address of the master, and the time of a
        name server.
        """
        if not self._connecting.acquire(blocking=False):
            return
        connection, answered = None, False
        try:
            if self.wants_connection:
                connection = socket.create_connection(self._address, timeout=_CONNECT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._exchange(connection, _spelled(()), 0, self._clock() + _CONNECT_S)
                self._connections.add(connection)
                answered = True
        except OSError as error:
            log.debug("no connection to the master at %s:%d: %s", *self._address, error)
            self._not_before = self._clock() + _AGAIN_S
        except UnexpectedAnswerError as error:
            self._give_up(error)
        finally:
            if connection is not None:
                self._put_back(connection, answered)
            self._connecting.release()

    def drop_idle(self) -> None:
        """Closes the connections that are not in use."""
        with self._lock:
            while self._idle:
                self._discard(self._idle.pop()[0])

    def close(self) -> None:
        """Closes the connections, also for forked children. A connection in use is closed when its request is
        over. Idempotent."""
        self._closed = True
        self.drop_idle()

    def _put_back(self, connection: socket.socket, answered: bool) -> None:
        with self._lock:
            if answered and not self._closed and self._clock() >= self._not_before:
                self._idle.append((connection, self._clock()))
            else:
                self._discard(connection)

    def _discard(self, connection: socket.socket) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # a forked child may still have the socket open
        connection.close()

    def _give_up(self, error: UnexpectedAnswerError) -> None:
        log.info(
            "for a minute, lookups ask the master at %s:%d through Mooncake's client: %s",
            *self._address,
            error,
        )
        self._not_before = self._clock() + _STRANGER_S
        self.drop_idle()

    def _exchange(self, connection: socket.socket, body: bytes, keys: int, deadline: float) -> bytes:
        """Sends a request within the connection's time-out, and returns the verdicts. Raises the errors that
        `ask` handles."""
        number = next(self._numbers) & 0xFFFFFFFF
        connection.sendall(_REQUEST.pack(_MAGIC, 0, 0, 0, number, _METHOD, len(body), 0) + body)
        answer, look_until = b"", self._clock() + _LOOK_S
        connection.setblocking(False)
        while True:
            try:  # looks once even after the deadline, because this process may have been stopped meanwhile
                more = connection.recv(_PIECE)
            except BlockingIOError:
                if self._clock() < look_until:
                    os.sched_yield()
                else:
                    connection.settimeout(self._left(deadline))
                continue
            if not more:
                raise ConnectionError("the master ended the connection")
            answer += more
            if (verdicts := read_answer(answer, number, keys)) is not None:
                return verdicts
            connection.settimeout(self._left(deadline))

    def _left(self, deadline: float) -> float:
        if (left := deadline - self._clock()) <= 0:
            raise TimeoutError("no answer from the master in time")
        return min(left, _LONGEST_S)


def _spelled(keys: Sequence[str]) -> bytes:
    """Returns the body of a request. Raises ValueError if there are too many keys, or one is too long or not
    ASCII."""
    if len(keys) > _MOST_KEYS:
        raise ValueError(f"{len(keys)} keys")
    parts = [_PARAMETERS, len(keys).to_bytes(2, "little")]
    for length, group in itertools.groupby(keys, len):
        run = list(group)
        if length > _LONGEST_KEY or not "".join(run).isascii():
            raise ValueError(run[0][:100])
        size = length.to_bytes(2, "little").decode("latin-1")
        parts.append((size + size.join(run)).encode("latin-1"))
    return b"".join([*parts, _TENANT])


def read_answer(answer: bytes, number: int, keys: int) -> bytes | None:
    """Returns 1 or 0 for each key of the request `number`, or nothing at all if the answer has an error in
    place of a verdict; None if this is only the beginning of an answer.

    Raises UnexpectedAnswerError if it does not answer that request.
    """
    if len(answer) < _ANSWER.size:
        return None
    *head, length, attached = _ANSWER.unpack_from(answer)
    body = answer[_ANSWER.size :]
    most = len(_RESULTS[0][0]) + 2 + 5 * keys  # a verdict takes 2 bytes, an error 5
    if head != [_MAGIC, 0, 0, 0, number] or attached or not len(body) <= length <= most:
        raise UnexpectedAnswerError(f"an answer begins with {answer[: _ANSWER.size].hex()}")
    if len(body) < length:
        return None
    for beginning, width in _RESULTS:
        if body.startswith(beginning + keys.to_bytes(2, "little")[:width]):
            known, verdicts = body[len(beginning) + width :: 2], body[len(beginning) + width + 1 :: 2]
            if len(known) != keys or known.count(1) != keys or verdicts.count(1) + verdicts.count(0) != keys:
                return b""
            return verdicts
    raise UnexpectedAnswerError(f"the result of an answer begins with {body[:16].hex()}")
