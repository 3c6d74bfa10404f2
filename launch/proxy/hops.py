"""Sends one request to one node. Turns the client library's exceptions into HopError."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace

from launch.proxy.patience import within
from launch.proxy.routing import Reason
from pd_cache.errors import PdCacheError

_KEEPALIVE_S = 4.0
"""How long an idle connection is kept. A uvicorn node closes one after 5 s, and no request should meet a closing connection."""
_LARGE_BODY = 1 << 20
_SILENCE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
)
"""A host that lost its power or its cable sends nothing, not even the end of the connection. With these options the kernel probes the
host, and ends the connection after 10 s without an answer. The request then fails before its deadline. If a node merely computes for long,
its kernel answers the probes."""


_MAX_REFUSAL = 4 << 20
_REFUSAL_S = 2.0
"""How long the body of a refusal may take. It is short, because there may be another node to ask."""
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""The kernel's errors if this process, or this machine, has no file descriptor, memory or port left."""
_TO_CLIENT = ("Content-Type", "Content-Length", "Content-Encoding", "Cache-Control", "Retry-After", "WWW-Authenticate")


class Refusal(NamedTuple):
    """A node's whole answer that is not a success."""

    status: int
    headers: dict[str, str]
    """The headers that a client may see."""
    body: bytes


class HopError(PdCacheError):
    """A node failed a request. `reason` says how. `refusal` is the node's answer, if it may be passed on to the client."""

    def __init__(self, reason: Reason, message: str, refusal: Refusal | None = None) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.refusal = refusal


def new_session(connections: int, connect_timeout_s: float) -> aiohttp.ClientSession:
    """Returns the session for all nodes: at most `connections` in all, and no limit per node. It does not decompress answers."""
    return aiohttp.ClientSession(
        connector=_PatientConnector(
            connect_timeout_s, limit=connections, keepalive_timeout=_KEEPALIVE_S, socket_factory=_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None),  # the caller has a deadline, and so has the connector
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


class _PatientConnector(aiohttp.TCPConnector):
    """Makes connections within a deadline that allows for a busy machine. aiohttp's deadline would blame the node for the proxy's delays."""

    def __init__(self, connect_timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._connect_timeout_s = connect_timeout_s

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        """Returns a new connection. The deadline includes the lookup of the host's name."""
        connecting = asyncio.ensure_future(super()._create_connection(req, traces, timeout))
        try:
            return await within(connecting, self._connect_timeout_s)
        except asyncio.CancelledError:
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().close()
            raise


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    try:
        for level, option, value in _SILENCE:
            made.setsockopt(level, option, value)
    except BaseException:
        made.close()
        raise
    return made


async def send(
    session: aiohttp.ClientSession, method: str, url: str, headers: Mapping[str, str], body: bytes | None
) -> aiohttp.ClientResponse:
    """Returns a node's answer, with its body unread. The caller must close it. Raises HopError if none came."""
    # aiohttp warns about large bodies that are not files
    data = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY else body
    with _mapped():
        return await session.request(method, url, data=data, headers=headers, allow_redirects=False)


async def read_some(answer: aiohttp.ClientResponse) -> bytes:
    """Returns the bytes of the body that have arrived, at least one; empty at the end. Raises HopError if the body broke off."""
    with _mapped():
        return await answer.content.readany()


async def read_all(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """Returns the whole body. Raises HopError if it breaks off or is longer than `limit` bytes."""
    body = bytearray()
    while data := await read_some(answer):
        body += data
        if len(body) > limit:
            raise HopError("garbage", f"the answer is longer than {limit} bytes")
    return bytes(body)


def client_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """Returns the headers of a node's answer that the client gets."""
    return {name: answer.headers[name] for name in _TO_CLIENT if name in answer.headers}


async def refusal_of(answer: aiohttp.ClientResponse) -> Refusal:
    """Returns a whole answer to pass on. Raises HopError if it breaks off or is too long."""
    return Refusal(answer.status, client_headers(answer), await read_all(answer, _MAX_REFUSAL))


async def check_status(answer: aiohttp.ClientResponse) -> None:
    """Raises HopError if the status says that the node failed. A 4xx is an answer, not a failure."""
    status = answer.status
    if 200 <= status < 300 or 400 <= status < 500:
        return
    refusal: Refusal | None = None
    if status >= 500:
        with contextlib.suppress(HopError, TimeoutError):
            refusal = await asyncio.wait_for(refusal_of(answer), _REFUSAL_S)
    raise HopError("busy" if status == 503 else "error", f"status {status}", refusal)


def _exhausted(error: BaseException) -> bool:
    number = error.os_error.errno if isinstance(error, aiohttp.ClientConnectorError) else getattr(error, "errno", None)
    return number in _EXHAUSTED


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except (aiohttp.InvalidURL, UnicodeError) as error:  # a host name that cannot be looked up
        raise HopError("unreachable", _told(error)) from error
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        raise HopError("exhausted" if _exhausted(error) else "unreachable", _told(error)) from error
    except TimeoutError as error:  # an OSError, too, from Python 3.11 on
        raise HopError("timeout", _told(error)) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, OSError) as error:
        raise HopError("disconnected", _told(error)) from error
    except aiohttp.ClientError as error:
        raise HopError("garbage", _told(error)) from error


def _told(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and (number := error.os_error.errno or 0) > 0:
        return os.strerror(number)  # aiohttp's text repeats the address, which the caller knows
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
