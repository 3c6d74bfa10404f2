"""Reads the bodies of requests, and limits how long that may take and how much memory all bodies may hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import http_exceptions, web

from launch.proxy.answers import ApiError, overloaded
from launch.proxy.exchange import ClientGone

_SMALL = 256 << 10
"""The most bytes of a small body: 64k tokens of text, or a chat of many turns."""


class Body:
    """The memory that one request's body takes."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.size = 0
        """In bytes."""
        self.complete = False
        self.give_up: Callable[[], None] = lambda: None
        """Ends the reading of a body that is not complete."""
        self.given_up = False

    @property
    def large(self) -> bool:
        return self.size > _SMALL


class BodyBudget:
    """Shares a number of bytes among all bodies. Pure.

    Two rules keep room for others, even while complete bodies hold their memory for long:

    - Large bodies together get three quarters of the bytes. The rest is kept for small ones.
    - One client's bodies of a kind, small or large, may take as much as they leave free for that kind. So a client that is alone gets half
      of the room, each of two clients a third, and so on. There is always room for one more client.

    The bytes received so far determine the kind of a body. If one does not fit, a body of its kind that is still arriving is given up:
    the largest one of the client that holds most.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: the most bytes of all bodies together."""
        self._limit = limit
        self._bodies: set[Body] = set()
        self._by_client: Counter[tuple[str, bool]] = Counter()
        """How many bytes each client has in small (False) and in large bodies (True)."""
        self._large = 0
        """How many bytes are in large bodies."""
        self.used = 0
        """How many bytes are in use."""

    @contextmanager
    def opened(self, client: str) -> Iterator[Body]:
        """Accounts for a client's body, whose memory is given back when the block ends."""
        body = Body(client)
        self._bodies.add(body)
        try:
            yield body
        finally:
            self._bodies.remove(body)
            self.release(body)

    def grow(self, body: Body, count: int) -> bool:
        """Notes `count` more bytes of an arriving body. Returns False if this body itself must be given up."""
        if body.given_up:
            return False
        self._resize(body, body.size + count)
        while not self._fits(body):
            arriving = (
                other
                for other in self._bodies
                if not other.complete and not other.given_up and other.large == body.large
            )
            other = max(arriving, key=lambda other: (self._by_client[other.client, other.large], other.size))
            other.given_up = True
            self.release(other)
            if other is body:
                return False
            other.give_up()
        return True

    def extend(self, body: Body, count: int) -> bool:
        """Notes `count` more bytes of something that a request could do without. Returns False, and notes nothing, unless its client then
        leaves at least twice as much room as it takes, and all clients leave half of the whole: that room is for bodies."""
        self._resize(body, body.size + count)
        fits = self._fits(body, spare=2) and self.used * 2 <= self._limit
        if not fits:
            self._resize(body, body.size - count)
        return fits

    def release(self, body: Body) -> None:
        """Gives back the memory of a body that is no longer needed."""
        self._resize(body, 0)

    def _fits(self, body: Body, spare: int = 1) -> bool:
        room = self._limit - self.used
        if body.large:
            room = min(room, self._limit * 3 // 4 - self._large)
        return self._by_client[body.client, body.large] * spare <= room

    def _resize(self, body: Body, size: int) -> None:
        self._add(body, -body.size)
        body.size = size
        self._add(body, size)

    def _add(self, body: Body, count: int) -> None:
        kind = (body.client, body.large)
        self._by_client[kind] += count
        if not self._by_client[kind]:
            del self._by_client[kind]
        self._large += count if body.large else 0
        self.used += count


async def read_body(request: web.Request, body: Body, budget: BodyBudget, most: int, limit_s: float) -> bytes:
    """Returns the whole body of a request, of at most `most` bytes, within `limit_s`.

    Raises ApiError 413 if the body is larger, 408 if it comes too slowly, 503 if the budget has no room for it, 400 if it cannot be read.
    Raises ClientGone if the client hung up.
    """
    if (request.content_length or 0) > most:
        raise _too_large(most)
    reading = asyncio.ensure_future(_read(request, body, budget, most))
    body.give_up = reading.cancel  # type: ignore[assignment]  # the bool that it returns is not used
    try:
        await asyncio.wait({reading}, timeout=limit_s)
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})
        if not reading.cancelled():
            reading.exception()  # retrieved even if the client's disconnect came first
        body.complete = True
    if body.given_up:
        raise overloaded("Other requests take all the memory for bodies that this client may use")
    if reading.cancelled():
        raise ApiError(408, f"The body did not arrive within {limit_s:.3g} s", code="timeout")
    return reading.result()


async def _read(request: web.Request, body: Body, budget: BodyBudget, most: int) -> bytes:
    parts: list[bytes] = []
    total = 0
    try:
        # not `request.read()`, which would keep the bytes for as long as the request lasts
        while data := await request.content.readany():
            total += len(data)
            if total > most:
                raise _too_large(most)
            if not budget.grow(body, len(data)):
                return b""
            parts.append(data)
    except ConnectionError as error:
        raise ClientGone from error
    except (web.RequestPayloadError, http_exceptions.HttpProcessingError) as error:
        raise ApiError(400, f"The body cannot be read: {error}", code="invalid_body") from None
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body is larger than {most} bytes", code="request_too_large")
