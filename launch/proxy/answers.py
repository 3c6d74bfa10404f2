"""What a client gets in place of an answer: errors in the shape that OpenAI's clients understand, and refusals of nodes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from aiohttp import web

from launch.openai import error_body
from pd_cache.errors import PdCacheError


class ApiError(PdCacheError):
    """An error for the client: an HTTP status and an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        """In seconds."""

    def body(self) -> bytes:
        """Returns `{"error": {...}}` as JSON."""
        return msgspec.json.encode(error_body(self.message, self.status, param=self.param, code=self.code))

    def response(self) -> web.Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)


class Refusal(NamedTuple):
    """A node's whole answer that is not a success."""

    status: int
    headers: dict[str, str]
    """The headers that a client may see."""
    body: bytes


class ClientGone(Exception):
    """The client closed its connection."""


def passed_on(refusal: Refusal) -> web.Response:
    """Returns a node's refusal, unchanged."""
    response = web.Response(status=refusal.status, body=refusal.body, headers=refusal.headers)
    if refusal.status == 503:
        response.headers.setdefault("Retry-After", "1")
    return response


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    """Returns a 503 that asks the client to come back in `retry_after` seconds."""
    return ApiError(503, message, code="overloaded", retry_after=retry_after)
