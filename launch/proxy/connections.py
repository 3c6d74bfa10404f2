"""Limits the number of clients' connections, and how long each may keep us waiting. Pure: the time comes from the caller.

The HTTP server has one deadline, for a connection without a request. It has none for a head that comes byte by byte, none for a client
that does not read, and no limit on the number of connections.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum

_PATIENCE_S = 3.0
"""How long a client may owe us a request before its connection may be closed to make room for another."""


class Why(Enum):
    """The reason why the proxy closes a connection."""

    TOO_MANY = "too_many"
    NO_HEAD = "no_head"
    IDLE = "idle"
    UNREAD = "unread"


class _ConnectionStage(Enum):
    HEAD = "head"
    """It is waiting for the rest of a request's head."""
    BODY = "body"
    """It is waiting for the rest of a request's body. `bodies` keeps that deadline."""
    BUSY = "busy"
    """A request is being answered."""
    IDLE = "idle"


class Connection:
    """The state of one client's connection."""

    def __init__(self, close: Callable[[], None], now: float) -> None:
        self.close = close
        self.stage = _ConnectionStage.HEAD
        self.since = now
        """When its stage began."""
        self.waiting_since = now
        """The time since which none of its requests has been in progress."""
        self.writing_since: float | None = None
        """When the present write began; None if there is none."""
        self.transport: Hashable = None


class Connections:
    """All connections of one server."""

    def __init__(
        self,
        limit: int,
        *,
        header_s: float = 10.0,
        idle_s: float = 75.0,
        write_s: float = 30.0,
        on_close: Callable[[Why], None] = lambda why: None,
    ) -> None:
        """`limit`: the most connections at a time.

        At the limit, a new connection takes the place of the one whose client has owed a request for longest, if it has owed it for a
        while. Otherwise the new one has to wait.
        """
        self._limit = limit
        self._header_s = header_s
        self._idle_s = idle_s
        self._write_s = write_s
        self.on_close = on_close
        self._all: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Connections whose client owes us a request or the rest of one. The one that has owed it for longest comes first."""
        self._by_transport: dict[Hashable, Connection] = {}

    def __len__(self) -> int:
        return len(self._all)

    def has_room(self, now: float) -> bool:
        """Returns whether another connection may be taken. Ends one to make room, if that is allowed."""
        if len(self._all) < self._limit:
            return True
        longest = next(iter(self._waiting), None)
        if longest is None or now - longest.waiting_since < _PATIENCE_S:
            return False
        self.on_close(Why.TOO_MANY)
        self._end(longest)
        return True

    def opened(self, close: Callable[[], None], now: float) -> Connection:
        """Notes a new connection, which `close` ends. There must be room for it."""
        connection = Connection(close, now)
        self._all.add(connection)
        self._waiting[connection] = None
        return connection

    def carries(self, connection: Connection, transport: Hashable) -> None:
        """Notes that requests of this connection will be known by `transport`."""
        connection.transport = transport
        self._by_transport[transport] = connection

    def received(self, connection: Connection, now: float) -> None:
        """Notes that bytes arrived."""
        if connection.stage is _ConnectionStage.IDLE:
            connection.stage, connection.since = _ConnectionStage.HEAD, now

    def began(self, transport: Hashable, now: float) -> None:
        """Notes that a request's head is complete. Ignores unknown transports, as the methods below do."""
        connection = self._by_transport.get(transport)
        if connection is not None:
            connection.stage, connection.since = _ConnectionStage.BODY, now

    def arrived(self, transport: Hashable) -> None:
        """Notes that a request is complete. From now on the client waits for us."""
        connection = self._by_transport.get(transport)
        if connection is not None:
            connection.stage = _ConnectionStage.BUSY
            self._waiting.pop(connection, None)

    def ended(self, transport: Hashable, now: float) -> None:
        """Notes that a request was answered. The last bytes may still be on their way."""
        connection = self._by_transport.get(transport)
        if connection is not None:
            connection.stage, connection.since, connection.waiting_since = _ConnectionStage.IDLE, now, now
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def writing(self, transport: Hashable, now: float) -> None:
        """Notes that bytes are about to be written. The write waits if the client does not read."""
        connection = self._by_transport.get(transport)
        if connection is not None:
            connection.writing_since = now

    def wrote(self, transport: Hashable) -> None:
        """Notes that the bytes were written."""
        connection = self._by_transport.get(transport)
        if connection is not None:
            connection.writing_since = None

    def closed(self, connection: Connection) -> None:
        """Notes the connection's end."""
        self._all.discard(connection)
        self._waiting.pop(connection, None)
        self._by_transport.pop(connection.transport, None)

    def close_overdue(self, now: float) -> None:
        """Ends connections that have kept us waiting for too long."""
        for connection in list(self._all):
            why = self._overdue(connection, now)
            if why is not None:
                self.on_close(why)
                self._end(connection)

    def close_all(self) -> None:
        """Ends all connections."""
        for connection in list(self._all):
            self._end(connection)

    def _overdue(self, connection: Connection, now: float) -> Why | None:
        waited = now - connection.since
        if connection.stage is _ConnectionStage.HEAD and waited > self._header_s:
            return Why.NO_HEAD
        if connection.stage is _ConnectionStage.IDLE and waited > self._idle_s:
            return Why.IDLE
        if connection.writing_since is not None and now - connection.writing_since > self._write_s:
            return Why.UNREAD
        return None

    def _end(self, connection: Connection) -> None:
        self.closed(connection)
        connection.close()
