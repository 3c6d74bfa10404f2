"""The way of an answer's bytes from a node's connection to the client's: without a task for each piece."""

from __future__ import annotations

import asyncio

import aiohttp

from launch.proxy.exchange import Exchange

_MOST_UNSENT = 64 << 10
"""The most bytes that may wait for the client in this process until no more are read from the node."""


class Shortcut(asyncio.Protocol):
    """Writes what a node sends to its client at once, as long as the client keeps up.

    It stands in for aiohttp's protocol of the node's connection, which goes on to parse what comes.
    """

    def __init__(self, exchange: Exchange, answer: aiohttp.ClientResponse) -> None:
        self._exchange = exchange
        self._answer = answer
        self._over: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def taken(self) -> bytes:
        """Returns when the answer has ended or broken off, or the client is too slow: bytes that were read,
        but not written yet.

        The rest is in `answer.content`.
        """
        exchange, connection = self._exchange, self._answer.connection
        node, client = connection and connection.transport, exchange.request.transport
        if connection is None or node is None or client is None:
            return b""  # all has come, or one of them is gone
        assert exchange.response is not None
        assert connection.protocol is not None
        self._node, self._parser, self._client = node, connection.protocol, client
        self._chunked = "Transfer-Encoding" in exchange.response.headers
        self._node.set_protocol(self)
        try:
            self._pass_on()
            return await self._over
        finally:
            self._end()

    def _pass_on(self) -> None:
        content, client = self._answer.content, self._client
        while (
            content.exception() is None
            and not client.is_closing()
            and client.get_write_buffer_size() <= _MOST_UNSENT
        ):
            data = content.read_nowait()  # meanwhile aiohttp may parse more, which it held back
            if content.is_eof():
                self._end(data)
                return
            if not data:
                return
            self._exchange.note_sent(data)
            client.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        self._end()

    def _end(self, unsent: bytes = b"") -> None:
        if not self._over.done():
            self._over.set_result(unsent)
        if self._node.get_protocol() is self:  # otherwise the connection may be another request's by now
            self._node.set_protocol(self._parser)

    # --- events of the node's connection --------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._parser.data_received(data)
        self._pass_on()

    def eof_received(self) -> None:
        self._parser.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._parser.connection_lost(error)
        self._end()

    def pause_writing(self) -> None:
        self._parser.pause_writing()

    def resume_writing(self) -> None:
        self._parser.resume_writing()
