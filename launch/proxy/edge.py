"""The edge of the proxy: gives each request an id, accounts for its connection, and turns every failure into an answer."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web

from launch.proxy.answers import ApiError
from launch.proxy.connections import Connections
from launch.proxy.exchange import ID_HEADER

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
request_id: ContextVar[str] = ContextVar("request_id")
"""The id of the current request, for the handler inside."""


class Edge:
    """Wraps each request of an application."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(ID_HEADER, "")
        request_id.set(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
        transport = request.transport
        self._connections.began(transport, time.monotonic())
        if not request.can_read_body:
            self._connections.arrived(transport)
        try:
            return await self._told(request, handler)
        finally:
            self._connections.ended(transport, time.monotonic())

    async def _told(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Returns what the handler returns. Turns every exception into an error that OpenAI's clients understand."""
        response: web.StreamResponse
        try:
            response = await handler(request)
        except ApiError as error:
            response = error.response()
        except web.HTTPException as error:
            what = f"{request.method} {request.path[:200]}: {error.reason}"
            response = ApiError(error.status, what, code=error.reason.lower().replace(" ", "_")).response()
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except Exception:  # the client gets an error in OpenAI's shape for every failure
            log.exception("request %s: unexpected error", request_id.get())
            response = ApiError(500, "Internal error of the proxy", code="internal_error").response()
        if not response.prepared:
            response.headers[ID_HEADER] = request_id.get()
        return response
