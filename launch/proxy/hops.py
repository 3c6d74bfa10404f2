"""One request to one node. The client library's exceptions end here."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import aiohttp

from launch.proxy.routing import Reason
from pd_cache.errors import PdCacheError

_KEEPALIVE_S = 4.0
"""Below the 5 s after which a uvicorn node closes an idle connection, so that no request meets a closing one."""
_LARGE_BODY = 1 << 20


class HopError(PdCacheError):
    """A node that failed a request; `reason` says how."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


def new_session(connections: int, connect_timeout_s: float) -> aiohttp.ClientSession:
    """The session for all nodes: at most `connections` in all, no limit per node, answers' bytes left as they are."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, limit_per_host=0, keepalive_timeout=_KEEPALIVE_S),
        # `connect` covers name resolution, too; the total is the caller's deadline
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


async def send(
    session: aiohttp.ClientSession, method: str, url: str, headers: Mapping[str, str], body: bytes | None
) -> aiohttp.ClientResponse:
    """A node's answer, its body unread. The caller closes it. HopError if none came."""
    # the library warns about large bodies that are not a file
    data = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY else body
    with _mapped():
        return await session.request(method, url, data=data, headers=headers, allow_redirects=False)


async def read_some(answer: aiohttp.ClientResponse) -> bytes:
    """What has arrived of the body, at least a byte; empty at its end. HopError if it broke off."""
    with _mapped():
        return await answer.content.readany()


async def read_all(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """The whole body. HopError if it broke off or is longer than `limit` bytes."""
    body = bytearray()
    while data := await read_some(answer):
        body += data
        if len(body) > limit:
            raise HopError("garbage", f"the answer is longer than {limit} bytes")
    return bytes(body)


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        raise HopError("unreachable", _told(error)) from error
    except asyncio.TimeoutError as error:  # an OSError, too, from Python 3.11 on
        raise HopError("timeout", _told(error)) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, OSError) as error:
        raise HopError("disconnected", _told(error)) from error
    except aiohttp.ClientError as error:
        raise HopError("garbage", _told(error)) from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
