"""Adds the namespace of the cache to vLLM's `/health`, so that a proxy knows which nodes share chunks.

The connector knows the namespace, in vLLM's engine process; the API server, another process, answers `/health`. A file passes it on:
`pd-cache launch` names the file to both, and gives vLLM `TellNamespace` as `--middleware`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import pd_cache
from pd_cache.tokens import Namespace

NAMESPACE_FILE = "PD_CACHE_NAMESPACE_FILE"
"""The environment variable that names the file to the API server."""

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[_Message]], _Send], Awaitable[None]]


def write_namespaces(file: Path, namespaces: Sequence[Namespace]) -> None:
    """Writes the namespaces of a model's groups of layers, a line each, atomically. Raises OSError if the file cannot be written."""
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    new.write_bytes(b"\n".join(namespace.manifest() for namespace in namespaces))
    new.replace(file)


def read_namespaces(file: Path) -> tuple[Namespace, ...]:
    """Returns what `write_namespaces` wrote; nothing if there is no file, or if another version wrote it."""
    with contextlib.suppress(OSError, ValueError):
        return tuple(Namespace.read(line) for line in file.read_bytes().splitlines())
    return ()


class TellNamespace:
    """ASGI middleware that puts the namespace into the body of a `/health` answered with 200."""

    def __init__(self, app: _App) -> None:
        """`app` is vLLM's own."""
        self._app = app
        self._file = Path(os.environ.get(NAMESPACE_FILE, ""))
        self._body = b""

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[_Message]], send: _Send
    ) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/health":
            send = self._telling(send)
        await self._app(scope, receive, send)

    def _telling(self, send: _Send) -> _Send:
        """Returns `send`, with another body for a 200 that has none."""
        body = self._told()
        delayed: list[_Message] = []

        async def tell(message: _Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200 and body:
                delayed.append(message)
                return
            if delayed and message["type"] == "http.response.body":
                start = delayed.pop()
                if not message.get("body") and not message.get("more_body"):
                    others = [
                        pair for pair in start["headers"] if pair[0].lower() not in (b"content-length", b"content-type")
                    ]
                    about = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
                    start, message = {**start, "headers": others + about}, {**message, "body": body}
                await send(start)
            await send(message)

        return tell

    def _told(self) -> bytes:
        if not self._body and (namespaces := read_namespaces(self._file)):
            first, *further = namespaces
            self._body = msgspec.json.encode({"version": pd_cache.__version__, **first.described(further)})
        return self._body
