"""The proxy's socket: plain or TLS, with a limit on connections and deadlines for clients that owe a request."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from launch.proxy.connections import Connection, Connections

log = logging.getLogger(__name__)

_BACKLOG = 1024
_LOOK_S = 1.0
_NO_ROOM_S = 0.02
_SHUTDOWN: dict[str, Any] = {"ssl_shutdown_timeout": 2.0} if sys.version_info >= (3, 11) else {}
"""How long a client may take to confirm the end of a TLS connection."""
_LINGER_S = 2.0
"""How long the rest of an unwanted body is read. A client may not read its answer before it has sent the body."""


class Listener:
    """Accepts connections for an application."""

    def __init__(
        self,
        make_app: Callable[[], web.Application],
        connections: Connections,
        tls: Callable[[], ssl.SSLContext] | None,
        header_timeout_s: float,
    ) -> None:
        """`tls` is called for each connection. `setup` calls `make_app` when the event loop runs.

        `header_timeout_s` bounds a TLS handshake. `connections` has all other deadlines.
        """
        self._make_app = make_app
        self._runner: web.AppRunner | None = None
        self._connections = connections
        self._tls = tls
        self._header_timeout_s = header_timeout_s
        self._socket: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._handshakes: set[asyncio.Task[None]] = set()
        """Handshakes under way. The event loop keeps only weak references to them."""

    async def start(self, host: str, port: int) -> str:
        """Accepts connections from now on. Returns the base URL. Raises OSError if the address cannot be bound."""
        loop = asyncio.get_running_loop()
        family, *_, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        self._socket = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._tasks = [asyncio.create_task(self._accept(self._socket)), asyncio.create_task(self._look())]
        bound = self._socket.getsockname()[1]
        return f"{'http' if self._tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{bound}"

    async def setup(self) -> None:
        """Starts the application. It accepts no connections yet."""
        self._runner = web.AppRunner(
            self._make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0, lingering_time=_LINGER_S
        )
        await self._runner.setup()

    async def close(self) -> None:
        """Accepts no more connections, drains the application, and ends all connections."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._socket is not None:
            self._socket.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._connections.close_all()
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._connections.close_overdue(time.monotonic())

    async def _accept(self, listening: socket.socket) -> None:
        """Accepts connections for ever. While there is no room, the kernel keeps new ones waiting."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._connections.has_room(time.monotonic()):
                await asyncio.sleep(_NO_ROOM_S)
            try:
                taken, _ = await loop.sock_accept(listening)
            except (
                OSError
            ) as error:  # the client is gone again; or no descriptor is left, in this process or the machine
                log.debug("could not accept a connection: %s", error)
                await asyncio.sleep(_NO_ROOM_S)
                continue
            try:
                await loop.connect_accepted_socket(self._protocol, taken)
            except OSError as error:
                log.debug("a connection ended as it was accepted: %s", error)
                taken.close()

    def _protocol(self) -> asyncio.Protocol:
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        served = _Served(server(), self._connections)
        if self._tls is None:
            return _Plain(served, self._connections)
        return _Secured(served, self._connections, self._tls(), self._header_timeout_s, self._handshakes)


class _Served(asyncio.Protocol):
    """Stands between a transport and the HTTP server's protocol, and notes what arrives."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._connection: Connection | None = None
        self._early: list[bytes] = []

    def serve(self, connection: Connection, transport: asyncio.BaseTransport) -> None:
        """Passes requests that come over `transport` to the HTTP server from now on."""
        self._connections.carries(connection, transport)
        self._inner.connection_made(transport)
        self._connection = connection
        for data in self._early:
            self._inner.data_received(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._connection is None:
            self._early.append(data)  # came together with the end of the handshake
            return
        self._connections.received(self._connection, time.monotonic())
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._connections.closed(self._connection)
            self._inner.connection_lost(exc)


class _Plain(asyncio.Protocol):
    """A connection that was just accepted."""

    def __init__(self, served: _Served, connections: Connections) -> None:
        self._served = served
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._begin(self._connections.opened(transport.abort, time.monotonic()), transport)

    def _begin(self, connection: Connection, transport: asyncio.Transport) -> None:
        transport.set_protocol(self._served)
        self._served.serve(connection, transport)


class _Secured(_Plain):
    """A connection that begins with a TLS handshake.

    The handshake begins here, not at the listening socket, so that a connection counts from its first moment.
    """

    def __init__(
        self,
        served: _Served,
        connections: Connections,
        tls: ssl.SSLContext,
        limit_s: float,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        super().__init__(served, connections)
        self._tasks = tasks
        self._tls = tls
        self._limit_s = limit_s

    def _begin(self, connection: Connection, transport: asyncio.Transport) -> None:
        task = asyncio.ensure_future(self._secure(connection, transport))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _secure(self, connection: Connection, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                transport, self._served, self._tls, server_side=True, ssl_handshake_timeout=self._limit_s, **_SHUTDOWN
            )
        except (TimeoutError, OSError) as error:  # ssl.SSLError is an OSError
            log.debug("a TLS handshake failed: %s", error)
            self._connections.closed(connection)
            transport.abort()
            return
        if secured is None or secured.is_closing():
            self._connections.closed(connection)
            transport.abort()
            return
        self._served.serve(connection, secured)
