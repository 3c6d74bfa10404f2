"""The error object of OpenAI's API, which the proxy and the reference engine answer with."""

from __future__ import annotations

from typing import Any


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns the body of an answer with an HTTP `status` of 400 or more. `param`: the field of the request that is wrong."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
