"""What the HTTP servers of the proxy and of the reference engine share: OpenAI's error object, and what they log of their clients."""

from __future__ import annotations

import logging
import sys
from typing import Any

from pd_cache.sparse_log import SparseLog


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns the body of an answer with an HTTP `status` of 400 or more. `param`: the field of the request that is wrong."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


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
