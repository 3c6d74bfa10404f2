"""The common part of the HTTP servers of the proxy and of the reference engine: how they run, OpenAI's
errors, a request's id, the last requests, and the log."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections import OrderedDict
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from multidict import CIMultiDictProxy

from pd_cache.decoding import one_line
from pd_cache.errors import PdCacheError
from pd_cache.sparse_log import SparseLog

log = logging.getLogger(__name__)

T = TypeVar("T")
ID_HEADER = "X-Request-Id"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HEAD = "it may have 128 headers, and lines of 8190 bytes"


class ApiError(PdCacheError):
    """An error for the client: an HTTP status and an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 1,
    ) -> None:
        """`param`: the field of the request that is wrong. `retry_after`: after how many seconds the client
        should repeat a request that got a 429 or 503."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        headers = {"Retry-After": str(self.retry_after)} if self.status in (429, 503) else {}
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=headers
        )


def overloaded(message: str) -> ApiError:
    """Returns the error for a server that is full or closing."""
    return ApiError(503, message, code="overloaded")


def given_id(headers: CIMultiDictProxy[str]) -> str:
    """Returns the id that the client sent with a request; empty if there is none, or if it has unusual
    characters."""
    given = headers.get(ID_HEADER, "")
    return given if _ID.fullmatch(given) else ""


def check_encoding(headers: CIMultiDictProxy[str]) -> None:
    """Raises ApiError 415 if a request's body is encoded."""
    if (encoding := headers.get("Content-Encoding", "identity").lower()) != "identity":
        what = f"The body must not be encoded, and its Content-Encoding is {one_line(encoding)[:40]}"
        raise ApiError(415, what, code="unsupported_media_type")


class RecentReports(Generic[T]):
    """Reports on the last requests, by their ids."""

    def __init__(self, most: int = 1000) -> None:
        """Keeps the reports on the `most` latest requests."""
        self._most = most
        self._known: OrderedDict[str, T] = OrderedDict()

    def note(self, request_id: str, report: T) -> None:
        """Remembers a report. Replaces an earlier report with the same id."""
        self._known.pop(request_id, None)
        self._known[request_id] = report
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def get(self, request_id: str) -> T | None:
        """Returns the report with this id; None if there was none, or if it was forgotten."""
        return self._known.get(request_id)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Returns what the handler returns. Turns every exception into an error that OpenAI's clients
    understand."""
    try:
        check_encoding(request.headers)
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        what = f"{request.method} {request.path[:200]}: {error.reason}"
        response = ApiError(error.status, what, code=error.reason.lower().replace(" ", "_")).response()
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        raise  # the client is gone
    except Exception:  # for every failure, the client gets an error in OpenAI's form
        log.exception("request %s: unexpected error", given_id(request.headers) or "without an id")
        return ApiError(500, "Internal error; see the log", code="internal_error").response()


def runner_of(app: web.Application, **options: Any) -> web.AppRunner:
    """Returns the runner of an application in the running event loop. It ends the requests of clients that go
    away, decompresses no bodies, and logs sparsely. `options` are aiohttp's."""
    server_log = ServerLog()
    asyncio.get_running_loop().set_exception_handler(server_log.trouble)
    web.RequestHandler.handle_error = _unreadable  # type: ignore[assignment, method-assign]  # there is no option
    # a kilobyte decompresses to a megabyte, which would hold the loop
    return web.AppRunner(
        app, handler_cancellation=True, access_log=None, logger=server_log, auto_decompress=False, **options
    )


def _unreadable(
    connection: web.RequestHandler,
    request: web.BaseRequest,
    status: int = 500,
    exc: BaseException | None = None,
    message: str | None = None,
) -> web.StreamResponse:
    """Answers a request that aiohttp cannot read; otherwise aiohttp would quote it in plain text."""
    if isinstance(exc, ConnectionError):
        raise exc  # the client is gone
    connection.log_exception("", exc_info=exc)
    if request.writer.output_size > 0:
        raise ConnectionError("the answer has begun")
    what = f"The request cannot be read ({type(exc).__name__}): {_HEAD}"
    response = ApiError(status, what, code="invalid_request").response()
    response.force_close()
    return response


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """The log of an aiohttp server and its event loop. It reports clients' mistakes, and failures outside of
    requests, with at most one line of each kind in ten seconds. No line quotes what a client sent.

    Without this log, aiohttp would log a traceback for each request that it cannot read, as fast as clients
    send them. Such a traceback quotes keys and prompts. asyncio would log a traceback for each connection
    that it cannot accept.
    """

    def __init__(self) -> None:
        super().__init__(logging.getLogger("launch.http"), {})
        self._sparse = SparseLog()

    def exception(self, msg: object, *args: object, exc_info: Any = True, **_: object) -> None:
        error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1]
        kind = type(error).__name__
        if (count := self._sparse.admit(kind)) is not None:
            self.warning("requests that could not be read, since the last such line: %d (%s)", count, kind)

    def debug(self, msg: object, *args: object, **_: object) -> None:
        """Logs nothing, because such lines quote clients, too."""

    def trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs an exception that asyncio reports outside of requests. It is the loop's exception handler."""
        error = context.get("exception")
        if (count := self._sparse.admit(("loop", type(error)))) is not None:
            known = isinstance(error, OSError)  # for example, no file descriptor is left
            line = one_line(f"{context.get('message')}: {error!r}")
            self.error("%s (since the last such line: %d)", line, count, exc_info=None if known else error)
