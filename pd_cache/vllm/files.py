"""Connects vLLM's API server with the connector, by files and sockets: for `/health`, `/requests/ID` and
`/weights`.

The connector runs in vLLM's engine process. It knows the namespaces of the cache, how many tokens vLLM's own
cache can hold, and the report on each request. Proxies and `explain` ask the API server, which is another
process. So `pd-cache launch` names the same file to both, and gives vLLM `TellCache` as `--middleware`. With
data parallelism, a server has several engines; each answers for its weights at its own socket beside that
file.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import re
import socket
import socketserver
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import pd_cache
from pd_cache.chunks import Namespace
from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.reasons import RequestReport
from pd_cache.versions import Naming, Weights, WeightsVersion
from pd_cache.vllm.costs import Costs
from transfer.settings import mooncake_version

NAMESPACE_FILE = "PD_CACHE_NAMESPACE_FILE"
"""The environment variable that names the file to the API server."""

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_Receive = Callable[[], Awaitable[_Message]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


def write_about(
    file: Path, namespaces: Sequence[Namespace], kv_tokens: int, streams: bool = False, max_model_len: int = 0
) -> None:
    """Writes the body of `/health`, atomically. Raises OSError if the file cannot be written.

    `namespaces` are those of the model's layer groups; empty if they must not be published. `kv_tokens`: how
    many tokens vLLM's own cache can hold. `streams`: whether vLLM loads prompts while another node computes
    them.
    """
    body = {
        "version": pd_cache.__version__,
        "mooncake": mooncake_version(),
        "kv_tokens": kv_tokens,
        "max_model_len": max_model_len,
        "streams": streams,
    }
    if namespaces:
        body |= namespaces[0].described(namespaces[1:])
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    new.write_bytes(msgspec.json.encode(body))
    new.replace(file)


def about(file: Path) -> bytes:
    """Returns what `write_about` wrote; empty if there is no file."""
    with contextlib.suppress(OSError):
        return file.read_bytes()
    return b""


_MOST_BYTES = 1 << 19
_PATH = "/requests/"
_MOST_FOUND = 16


class _Line(msgspec.Struct, frozen=True):
    id: str
    report: RequestReport


def report_file(namespace_file: Path) -> Path:
    """Returns the path of the file of reports, which lies beside a namespace file."""
    return namespace_file.with_name(f"{namespace_file.name}.requests")


def write_report(
    file: Path, request_id: str, report: RequestReport, *, most_bytes: int = _MOST_BYTES
) -> None:
    """Appends a report to a file that all data-parallel ranks of a node share.

    When the file reaches `most_bytes`, it replaces the older file, and a new file begins. Raises OSError if
    the report cannot be written.
    """
    line = msgspec.json.encode(_Line(request_id, report)) + b"\n"
    # nothing was written yet, or another rank has just replaced it
    with contextlib.suppress(FileNotFoundError):
        if file.stat().st_size + len(line) > most_bytes:
            file.replace(_before(file))
    with file.open("ab") as reports:
        reports.write(line)


def find_reports(file: Path, request_id: str) -> list[RequestReport]:
    """Returns the reports on a request, the latest last.

    vLLM makes its ids from the header `X-Request-Id`: it prepends the API's name, and appends the number of
    the prompt and eight random characters. With `n` samples, it prepends the number of the sample, too. A
    report matches if its id is `request_id`, or was made from it.
    """
    found: list[RequestReport] = []
    given, needle = re.escape(request_id), request_id.encode()
    made = re.compile(
        rf"(\d+_)?(cmpl-{given}-\d+|(chatcmpl|generate-tokens)-{given}(_\d+)?)(-[0-9a-f]{{8}})?"
    )
    for path in (_before(file), file):
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            if needle not in line:
                continue
            try:
                read = decode_json(line, _Line)
            except UndecodableError:
                continue  # it is being written
            if read.id == request_id or made.fullmatch(read.id):
                found.append(read.report)
    return found[-_MOST_FOUND:]


def _before(file: Path) -> Path:
    return file.with_name(f"{file.name}.before")


# --- the weights of each engine -----------------------------------------------------------------------------

_ANSWER_S = 1.0
_LONGEST = 1 << 17
"""The most bytes of a naming: enough for all states that it may list."""
_NOBODY = Naming(label="-", ids=())


@contextlib.contextmanager
def serving_weights(file: Path, version: WeightsVersion, costs: Costs) -> Iterator[None]:
    """Answers `name_weights` until the `with` block ends. Raises OSError if no socket can be made beside
    `file`."""

    class NamingHandler(socketserver.StreamRequestHandler):
        timeout = _ANSWER_S

        def handle(self) -> None:
            with contextlib.suppress(OSError, UndecodableError):
                naming = decode_json(self.rfile.readline(_LONGEST), Naming)
                state = msgspec.structs.replace(version.name(naming), declines=costs.declines)
                self.wfile.write(msgspec.json.encode(state) + b"\n")

    path = file.with_name(f"{file.name}.{os.getpid()}.sock")
    path.unlink(missing_ok=True)
    with socketserver.ThreadingUnixStreamServer(str(path), NamingHandler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, name="pd-cache-weights", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            path.unlink(missing_ok=True)


def name_weights(file: Path, naming: Naming = _NOBODY) -> list[Weights]:
    """Sends a naming to all engines whose sockets lie beside a namespace file. Returns the state of each
    engine's weights afterwards.

    Raises OSError or UndecodableError if an engine that runs does not answer within a second.
    """
    states = []
    for path in sorted(file.parent.glob(f"{glob.escape(file.name)}.*.sock")):
        with (
            socket.socket(socket.AF_UNIX) as client,
            contextlib.suppress(ConnectionRefusedError, FileNotFoundError),
        ):
            client.settimeout(_ANSWER_S)
            client.connect(str(path))  # refused by the socket of an engine that was killed
            client.sendall(msgspec.json.encode(naming) + b"\n")
            with client.makefile("rb") as answer:
                states.append(decode_json(answer.readline(_LONGEST), Weights))
    return states


class TellCache:
    """ASGI middleware for vLLM's server.

    - `GET /health`: if vLLM answers 200, the body is what `write_about` wrote, with the state of each
      engine's weights, and `renders`: whether the server has `--enable-scale-out`.
    - `GET /requests/ID`: `{"reports": […]}`, or 404 if there is no report.
    - `POST /weights` with a `Naming` names the weights of this server's engines.
    """

    def __init__(self, app: _App) -> None:
        """`app` is vLLM's own ASGI application."""
        self._app = app
        self._file = Path(os.environ.get(NAMESPACE_FILE) or "none")
        self._written = b""

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and scope["method"] == "POST" and path == "/weights":
            await self._name(receive, send)
        elif scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
        elif path == "/health":
            await self._health(scope, receive, send)
        elif path.startswith(_PATH):
            name = path.removeprefix(_PATH)
            reports = find_reports(report_file(self._file), name) if name else []
            await _answer(send, 200 if reports else 404, msgspec.json.encode({"reports": reports}))
        else:
            await self._app(scope, receive, send)

    async def _health(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        sent: list[_Message] = []

        async def keep(message: _Message) -> None:
            sent.append(message)

        await self._app(scope, receive, keep)
        self._written = self._written or about(self._file)
        if self._written and sent[0]["status"] == 200 and not any(message.get("body") for message in sent):
            renders = getattr(scope["app"].state.args, "enable_scale_out", False)
            await _answer(send, 200, await asyncio.to_thread(self._about, renders))
            return
        for message in sent:
            await send(message)

    def _about(self, renders: bool) -> bytes:
        facts: dict[str, Any] = {"renders": renders}
        with contextlib.suppress(OSError, UndecodableError):
            facts["weights"] = name_weights(self._file)
        return self._written.removesuffix(b"}") + b"," + msgspec.json.encode(facts).removeprefix(b"{")

    async def _name(self, receive: _Receive, send: _Send) -> None:
        body, more = b"", True
        while more and len(body) <= _LONGEST:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            naming = decode_json(body[:_LONGEST], Naming)
            states = await asyncio.to_thread(name_weights, self._file, naming)
        except UndecodableError as error:
            await _answer(send, 400, msgspec.json.encode({"error": str(error)}))
        except OSError as error:
            await _answer(send, 503, msgspec.json.encode({"error": f"an engine does not answer: {error}"}))
        else:
            await _answer(send, 200, msgspec.json.encode(states))


async def _answer(send: _Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
