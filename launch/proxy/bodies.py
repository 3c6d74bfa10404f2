"""Bodies of requests while they arrive: how long that may take, and how much memory all of them may hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import http_exceptions, web

from launch.proxy.answers import ApiError, overloaded
from launch.proxy.exchange import ClientGone


class Body:
    """The memory that one request's body takes."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes."""
        self.complete = False
        self.give_up: Callable[[], None] = lambda: None
        """Ends the reading of a body that is not complete."""
        self.given_up = False


class BodyBudget:
    """Bytes for all bodies together. Pure.

    When they are used up, the largest body that is still arriving is given up: that frees the most for others, and never hits one of
    many small bodies that wait because a client sends large ones slowly.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: bytes in all."""
        self._limit = limit
        self._bodies: set[Body] = set()
        self.used = 0
        """Bytes in use."""

    @contextmanager
    def held(self) -> Iterator[Body]:
        """Accounts for a body, whose memory is given back when the block ends."""
        body = Body()
        self._bodies.add(body)
        try:
            yield body
        finally:
            self._bodies.remove(body)
            self.release(body)

    def grow(self, body: Body, count: int) -> bool:
        """Note `count` more bytes of a body that arrives. Returns False if this body itself is to be given up."""
        if body.given_up:
            return False
        while self.used + count > self._limit:
            arriving = [other for other in self._bodies if not other.complete and not other.given_up]
            largest = max(arriving, key=lambda other: other.size + (count if other is body else 0))
            largest.given_up = True
            if largest is body:
                return False
            self.release(largest)
            largest.give_up()
        body.size += count
        self.used += count
        return True

    def release(self, body: Body) -> None:
        """Give a body's memory back, because the body is not needed any more."""
        self.used -= body.size
        body.size = 0


async def read_body(request: web.Request, body: Body, budget: BodyBudget, most: int, limit_s: float) -> bytes:
    """Returns the whole body of a request, of at most `most` bytes, within `limit_s`.

    Raises ApiError: 413 if it is larger, 408 if it comes too slowly, 503 if the budget has no room for it, 400 if it cannot be read.
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
        raise overloaded("Requests that are being read take all the memory that there is for them")
    if reading.cancelled():
        raise ApiError(408, f"The body did not arrive within {limit_s:.3g} s", code="timeout")
    return reading.result()


async def _read(request: web.Request, body: Body, budget: BodyBudget, most: int) -> bytes:
    parts: list[bytes] = []
    total = 0
    try:
        # not `request.read()`, which keeps the bytes for as long as the request lasts
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
