"""What the HTTP servers of the proxy and of the reference engine share: OpenAI's errors, a request's id, and what they log of their clients."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from pd_cache.errors import PdCacheError
from pd_cache.sparse_log import SparseLog

log = logging.getLogger(__name__)

ID_HEADER = "X-Request-Id"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ApiError(PdCacheError):
    """An error for the client: an HTTP status and an error object. A 429 or 503 asks the client to come back in a second."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """`param`: the field of the request that is wrong."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)


def overloaded(message: str) -> ApiError:
    """Returns a 503."""
    return ApiError(503, message, code="overloaded")


def given_id(request: web.Request) -> str:
    """Returns the id that a request came with; empty if it came with none, or a strange one."""
    given = request.headers.get(ID_HEADER, "")
    return given if _ID.fullmatch(given) else ""


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Returns what the handler returns. Turns every exception into an error that OpenAI's clients understand."""
    try:
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
    except Exception:  # the client gets an error in OpenAI's shape for every failure
        log.exception("request %s: unexpected error", given_id(request) or "without an id")
        return ApiError(500, "Internal error; see the log", code="internal_error").response()


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """The log of an aiohttp server: of what clients do wrong, one line of each kind in ten seconds, without a byte of theirs.

    aiohttp logs each request that it cannot read with a traceback that quotes it: keys and prompts in clear, as fast as clients send.
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
        """Logs nothing: such lines quote clients, too."""
