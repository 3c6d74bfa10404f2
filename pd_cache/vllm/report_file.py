"""Serves the reports on vLLM's last requests at `/requests/ID`, beside vLLM's own pages.

The connector makes the reports, in vLLM's engine process; the API server, another process, answers. Two files beside the namespace file pass
them on (`namespace_file.py`): one that is being written, and the one before it. Together they hold at most a megabyte.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.reports import RequestReport
from pd_cache.vllm.namespace_file import NAMESPACE_FILE

_MOST_BYTES = 1 << 19
_PATH = "/requests/"
_MOST_FOUND = 16

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, Callable[[], Awaitable[_Message]], _Send], Awaitable[None]]


class _Line(msgspec.Struct, frozen=True):
    id: str
    report: RequestReport


def report_file(namespace_file: Path) -> Path:
    """Returns the path of the file of reports that lies beside a namespace file."""
    return namespace_file.with_name(f"{namespace_file.name}.requests")


class ReportWriter:
    """Appends reports to a file. For one thread."""

    def __init__(self, file: Path, most_bytes: int = _MOST_BYTES) -> None:
        """Begins the file anew with the first report. When it has `most_bytes`, it takes the place of the one before it."""
        self._file = file
        self._most_bytes = most_bytes
        self._written: int | None = None

    def write(self, request_id: str, report: RequestReport) -> None:
        """Appends a line. Raises OSError if it cannot be written."""
        if self._written is None:
            _before(self._file).unlink(missing_ok=True)
            self._file.unlink(missing_ok=True)
            self._written = 0
        line = msgspec.json.encode(_Line(request_id, report)) + b"\n"
        if self._written + len(line) > self._most_bytes:
            self._file.replace(_before(self._file))
            self._written = 0
        with self._file.open("ab") as file:
            file.write(line)
        self._written += len(line)


def find_reports(file: Path, request_id: str) -> list[RequestReport]:
    """Returns the reports on a request, the latest last.

    vLLM makes the ids of its requests out of the `X-Request-Id` that it is sent, with letters and numbers before and behind it. So a
    report's id may be `request_id`, or contain it between two hyphens.
    """
    found: list[RequestReport] = []
    wanted = f"-{request_id}-"
    needle = request_id.encode()
    for one in (_before(file), file):
        try:
            lines = one.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            if needle not in line:
                continue
            try:
                read = decode_json(line, _Line)
            except UndecodableError:
                continue  # it is being written
            if read.id == request_id or wanted in f"-{read.id}-":
                found.append(read.report)
    return found[-_MOST_FOUND:]


def _before(file: Path) -> Path:
    return file.with_name(f"{file.name}.before")


class TellRequests:
    """ASGI middleware that answers a GET of `/requests/ID`: `{"reports": […]}`, or 404 if there is no report."""

    def __init__(self, app: _App) -> None:
        """`app` is vLLM's own."""
        self._app = app
        self._file = report_file(Path(os.environ.get(NAMESPACE_FILE) or "none"))

    async def __call__(self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: _Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "GET" or not path.startswith(_PATH):
            await self._app(scope, receive, send)
            return
        name = path[len(_PATH) :]
        reports = find_reports(self._file, name) if name else []
        body = msgspec.json.encode({"reports": reports})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200 if reports else 404, "headers": headers})
        await send({"type": "http.response.body", "body": body})
