"""Serves clients' connections: reads the body, asks the decode node, and relays its answer, without a task
for each piece. What comes before the decode node is in `requests`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

import aiohttp
import msgspec
from aiohttp import web

from launch.openai import ApiError, overloaded
from launch.proxy.bodies import ClientGone, read_body, read_models
from launch.proxy.exchange import Exchange
from launch.proxy.hints.actions import HINTS_S, LARGEST_HINTS
from launch.proxy.hops import no_answer
from launch.proxy.metrics import REPORT_BYTES, read_report
from launch.proxy.nodes import (
    HopError,
    check_status,
    client_headers,
    read_some,
    send,
)
from launch.proxy.requests import MODELS, Requests
from launch.proxy.routing.node_pool import Attempts, Reason
from pd_cache.cluster import LARGEST_BODY

log = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
"""The key under which the outermost handler leaves the id in aiohttp's request."""
_LAST_WORDS_S = 1.0
"""How long informing a client that its stream broke may take."""
_MOST_UNSENT = 64 << 10
"""If more bytes than this wait for the client in this process, no more are read from the node."""
_LIST_AT_ONE_S = 1.0


class Serving:
    """Serves the pages of OpenAI's API, and `/hints`."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._limit_s = requests.config.request_timeout_s

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """Answers a completion or a chat."""
        exchange = self._requests.new(request[REQUEST_ID], request.path, request.headers)
        relay = Relay(exchange, request)
        read = _reader(exchange, request, LARGEST_BODY, self._limit_s)
        try:
            async with self._requests.accepted(exchange, read):
                await self._requests.prepare(exchange)
                return await self._decode(exchange, relay)
        except ApiError as error:
            if relay.response is None:
                raise  # `openai.errors` answers with it
            return await relay.cut(relay.response, error)  # by an event in a stream, or by breaking off

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Answers with the models of a decode node."""
        exchange = self._requests.new(request[REQUEST_ID], request.path, request.headers)
        async with self._requests.accepted(exchange, _reader(exchange, request, 0, self._limit_s)):
            response = await self._models(exchange)
            exchange.status = response.status
            return response

    async def hint(self, request: web.Request) -> web.StreamResponse:
        """Answers a message of hints."""
        exchange = self._requests.new(request[REQUEST_ID], request.path, request.headers)
        async with self._requests.accepted(exchange, _reader(exchange, request, LARGEST_HINTS, HINTS_S)):
            answer = await self._requests.hints.take(exchange.body, exchange)
            exchange.status = 200
            return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _decode(self, exchange: Exchange, relay: Relay) -> web.StreamResponse:
        """Passes a decode node's answer on. If a node fails before its first byte, asks another. If all fail,
        returns a 5xx answer of theirs. Raises ApiError if none gave one, or if the answer breaks off."""
        hops, refusals = self._requests.hops, dict[Reason, web.Response]()
        attempts = Attempts(hops.pools["decode"], exchange.trial, first=exchange.decode_node)
        # None if no node is left, if the request failed two, if two lost their connections (those of the
        # prefill hop included), or without retry budget. Refused connections and 503s count for neither
        while (node := attempts.next(time.monotonic())) is not None:
            try:
                return await self._ask(exchange, relay, node, attempts)
            except HopError as error:
                begun = relay.response is not None
                hops.failed(exchange, "decode", node, None if begun else attempts, error)
                if begun:  # the client has a part of the answer
                    what = f"The decode node failed while it answered: {error.reason}"
                    raise ApiError(502, what, code="node_failed") from error
                if error.refusal is not None:
                    refusals[error.reason] = error.refusal
        # a 503 invites the client to try again, which a blamed request should not be
        busy = None if attempts.blamed else refusals.get("busy")
        if (refusal := busy or refusals.get("error")) is None:
            raise no_answer(attempts)
        exchange.status = refusal.status
        return refusal

    async def _ask(
        self, exchange: Exchange, relay: Relay, node: str, attempts: Attempts
    ) -> web.StreamResponse:
        """Passes the answer of a decode node on. Raises HopError if no connection is made, if it breaks, or
        if the answer is a 5xx or empty. Silence is no failure: the node may have a long queue."""
        hops = self._requests.hops
        with hops.asking(exchange, "decode", node) as (headers, asked):
            answer = await send(hops.session, "POST", node + exchange.path, headers, exchange.decode_body)
            with closing(answer):
                await check_status(answer)  # a 4xx is an answer
                first = await read_some(answer)
                well = answer.status < 300
                if well and not first:
                    raise HopError("garbage", "the answer is empty")
                attempts.answered(node, time.monotonic(), well=well)
                self._requests.answering(exchange, asked, well=well)  # frees the body, ends its loads
                return await relay.pass_on(answer, first, self._requests)

    async def _models(self, exchange: Exchange) -> web.Response:
        """Returns the models of the first decode node that answers, of two. Only a refused connection counts
        against a node, because the list says nothing about how the node computes."""
        hops, tried = self._requests.hops, list[str]()
        pool, headers = hops.pools["decode"], exchange.node_headers(self._requests.keys, exchange.span)
        while len(tried) < 2 and (node := pool.out_of_turn(time.monotonic(), tried)) is not None:
            tried.append(node)
            exchange.nodes["decode"] = node
            try:
                found = await hops.whole(node + MODELS, headers, None, read_models, _LIST_AT_ONE_S)
            except HopError as error:
                if error.reason == "refused" and error.refusal is not None:
                    pool.node(node).reached()
                    return error.refusal
                hops.failed(exchange, "decode", node, None, error)
            else:
                pool.node(node).reached()
                body = msgspec.json.encode({"object": "list", "data": found})
                return web.Response(body=body, content_type="application/json")
        raise overloaded("No decode node could answer")


def _reader(
    exchange: Exchange, request: web.Request, most: int, limit_s: float
) -> Callable[[], Awaitable[bytes]]:
    """Returns a function that reads a client's body (`read_body`)."""
    # not `request.read()`, which would keep the bytes for as long as the request lasts
    pieces, announced = request.content.iter_any(), request.content_length
    return lambda: read_body(pieces, exchange.share, most, limit_s, announced)


class Relay:
    """A client's connection, and the part of the answer that was sent so far."""

    def __init__(self, exchange: Exchange, request: web.Request) -> None:
        self.exchange = exchange
        self.request = request
        self.response: web.StreamResponse | None = None
        """The answer, once its head was sent."""
        self._ending = bytearray()
        """At least the last `REPORT_BYTES` bytes that were sent."""

    async def pass_on(
        self, answer: aiohttp.ClientResponse, first: bytes, requests: Requests
    ) -> web.StreamResponse:
        """Passes on a decode node's answer as it comes, beginning with `first`. Raises HopError if it breaks
        off, ClientGone if the client hung up."""
        exchange = self.exchange
        headers = {**client_headers(answer), **await exchange.answer_headers()}
        response = web.StreamResponse(status=answer.status, headers=headers)
        exchange.streamed = response.content_type == "text/event-stream"
        if self.request.version < aiohttp.HttpVersion11:
            response.force_close()  # that is how the client knows the answer's end

        def note() -> None:
            exchange.reports["decode"] = read_report(self._ending)
            requests.trips.note(exchange.id, exchange.trip())

        try:
            await response.prepare(self.request)
            self.response, exchange.answer_status = response, response.status
            data = first
            while data:
                self.note_sent(data)
                if answer.content.at_eof():
                    note()  # before the client can know that this is all
                await response.write(data)
                data = await _Shortcut(self, answer, response).taken() or await read_some(answer)
            note()
            await response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
        exchange.status = response.status
        if exchange.streamed and response.status == 200 and exchange.first_byte_s is not None:
            requests.hops.limits.ended(time.monotonic() - exchange.started - exchange.first_byte_s)
        return response

    def note_sent(self, data: bytes) -> None:
        self._ending += data
        if len(self._ending) > 2 * REPORT_BYTES:
            del self._ending[:-REPORT_BYTES]

    async def cut(self, response: web.StreamResponse, error: ApiError) -> web.StreamResponse:
        """Reports an error after the first byte: by an event in a stream, otherwise by breaking off."""
        log.warning("request %s: cut after its first byte: %s", self.exchange.id, error.message)
        if self.exchange.streamed and response.content_length is None:
            between = b"" if self._ending.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
            try:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await response.write(between + b"data: " + error.body() + b"\n\n")
                    await response.write_eof()
                return response
            except (TimeoutError, ConnectionError):
                pass
        if self.request.transport is not None:
            self.request.transport.abort()
        return response


class _Shortcut(asyncio.Protocol):
    """Writes a node's bytes to the client as soon as they arrive, while the client keeps up, without a
    step of the request.

    It stands between the node's connection and aiohttp's protocol, which parses the bytes. While the parser
    is between two chunks, a chunk that is an event goes to the client unparsed.
    """

    def __init__(self, relay: Relay, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        self._relay = relay
        self._answer = answer
        self._chunked = "Transfer-Encoding" in response.headers
        self._between = False
        """Whether the parser is between two chunks, and the client gets chunks, too."""
        self._over: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def taken(self) -> bytes:
        """Passes the answer on until it ends, breaks off, or the client is too slow. Returns the bytes that
        it has read and not written. All that follows them is in `answer.content`."""
        relay, connection = self._relay, self._answer.connection
        node, client = connection and connection.transport, relay.request.transport
        if connection is None or node is None or client is None:
            return b""  # all has come, or one of them is gone
        assert connection.protocol is not None
        self._node, self._parser, self._client = node, connection.protocol, client
        self._node.set_protocol(self)
        try:
            self._pass_on(b"")
            return await self._over
        finally:
            self._end()

    def _keeps_up(self) -> bool:
        return not self._client.is_closing() and self._client.get_write_buffer_size() <= _MOST_UNSENT

    def _pass_on(self, parsed: bytes) -> None:
        """Passes on all that the parser has. `parsed`: what it was handed last."""
        content, self._between = self._answer.content, False
        while content.exception() is None and self._keeps_up():
            data = content.read_nowait()  # meanwhile aiohttp may parse more, which it held back
            if content.is_eof():
                self._end(data)
                return
            if not data:
                return
            self._relay.note_sent(data)
            self._between = self._chunked and data == _event_in(parsed)
            self._client.write(_chunk(data) if self._chunked else data)
        self._end()

    def _end(self, unsent: bytes = b"") -> None:
        if not self._over.done():
            self._over.set_result(unsent)
        if self._node.get_protocol() is self:  # otherwise the connection may be another request's by now
            self._node.set_protocol(self._parser)

    # --- events of the node's connection --------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._between and (event := _event_in(data)) and self._keeps_up():
            self._relay.note_sent(event)
            self._client.write(data)
            return
        self._parser.data_received(data)
        self._pass_on(data)

    def eof_received(self) -> None:
        self._parser.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._parser.connection_lost(error)
        self._end()

    def pause_writing(self) -> None:
        self._parser.pause_writing()

    def resume_writing(self) -> None:
        self._parser.resume_writing()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event_in(data: bytes) -> bytes:
    """Returns the event that is the only chunk in `data`; empty if `data` is anything else.

    If the parser returns exactly this event for these bytes, it was between two chunks. Inside a chunk, it
    would return the event's size, too, or fail, because `data: ` is no size.
    """
    event = data.partition(b"\r\n")[2][:-2]
    return event if event.startswith(b"data: ") and data == _chunk(event) else b""
