"""Connects vLLM's API server with the connector, by a file and sockets: for `/health`, `/requests/ID` and
`/weights`.

The connector runs in vLLM's engine process. It knows the namespaces of the cache, how many tokens vLLM's own
cache can hold, and the reports on the latest requests. Proxies and `explain` ask the API server, which is
another process. So `pd-cache launch` names the same file to both, and gives vLLM `TellCache` as
`--middleware`. The connector writes what does not change into the file. The server asks for the rest at a
socket beside it. With data parallelism, a server has several engines, and each engine has its own socket.
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


# --- reports and weights, from each engine ------------------------------------------------------------------

_PATH = "/requests/"
_MOST_FOUND = 16
_ANSWER_S = 1.0
_LONGEST = 1 << 17
"""The most bytes of a question or an answer: enough for all states that a naming may list."""
_NOBODY = Naming(label="-", ids=())

Reports = Sequence[tuple[str, RequestReport]]
"""Reports on requests, with vLLM's ids of these, the latest last."""


class _Question(msgspec.Struct, frozen=True):
    naming: Naming = _NOBODY
    request_id: str = ""


class _Answer(msgspec.Struct, frozen=True):
    weights: Weights
    """The state of the engine's weights, after the naming."""
    reports: list[RequestReport]
    """Those on the request."""


@contextlib.contextmanager
def answering(file: Path, version: WeightsVersion, costs: Costs, reports: Reports) -> Iterator[None]:
    """Answers `name_weights` and `find_reports` until the `with` block ends. Raises OSError if no socket can
    be made beside `file`."""

    class QuestionHandler(socketserver.StreamRequestHandler):
        timeout = _ANSWER_S

        def handle(self) -> None:
            with contextlib.suppress(OSError, UndecodableError):
                question = decode_json(self.rfile.readline(_LONGEST), _Question)
                state = msgspec.structs.replace(version.name(question.naming), declines=costs.declines)
                found = reports_on(question.request_id, list(reports)) if question.request_id else []
                self.wfile.write(msgspec.json.encode(_Answer(state, found)) + b"\n")

    path = file.with_name(f"{file.name}.{os.getpid()}.sock")
    path.unlink(missing_ok=True)
    with socketserver.ThreadingUnixStreamServer(str(path), QuestionHandler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, name="pd-cache-answers", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            path.unlink(missing_ok=True)


def reports_on(request_id: str, reports: Reports) -> list[RequestReport]:
    """Returns the last reports on a request.

    vLLM makes its ids from the header `X-Request-Id`: it prepends the API's name, and appends the number of
    the prompt and eight random characters. With `n` samples, it prepends the number of the sample, too. A
    report matches if its id is `request_id`, or was made from it.
    """
    given = re.escape(request_id)
    made = re.compile(
        rf"(\d+_)?(cmpl-{given}-\d+|(chatcmpl|generate-tokens)-{given}(_\d+)?)(-[0-9a-f]{{8}})?"
    )
    near = [entry for entry in reports if request_id in entry[0]]  # most are not, and it takes less time
    return [report for name, report in near if name == request_id or made.fullmatch(name)][-_MOST_FOUND:]


def name_weights(file: Path, naming: Naming = _NOBODY) -> list[Weights]:
    """Sends a naming to all engines whose sockets lie beside a namespace file. Returns the state of each
    engine's weights afterwards.

    Raises OSError or UndecodableError if an engine that runs does not answer within a second.
    """
    return [answer.weights for answer in _answers(file, _Question(naming))]


def find_reports(file: Path, request_id: str) -> list[RequestReport]:
    """Returns the reports on a request that these engines keep. Raises the same errors."""
    answers = _answers(file, _Question(request_id=request_id))
    return [report for answer in answers for report in answer.reports]


def _answers(file: Path, question: _Question) -> Iterator[_Answer]:
    for path in sorted(file.parent.glob(f"{glob.escape(file.name)}.*.sock")):
        with (
            socket.socket(socket.AF_UNIX) as client,
            contextlib.suppress(ConnectionRefusedError, FileNotFoundError),
        ):
            client.settimeout(_ANSWER_S)
            client.connect(str(path))  # refused by the socket of an engine that was killed
            client.sendall(msgspec.json.encode(question) + b"\n")
            with client.makefile("rb") as answer:
                yield decode_json(answer.readline(_LONGEST), _Answer)


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
            reports: list[RequestReport] = []
            with contextlib.suppress(OSError, UndecodableError):
                reports = await asyncio.to_thread(find_reports, self._file, path.removeprefix(_PATH))
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
