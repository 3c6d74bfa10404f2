"""The nodes that the proxy knows: requests to them, checks of their health, and the pools to route over.

The client library's exceptions become HopError here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from launch.discovery import View
from launch.proxy.events import CacheView
from launch.proxy.lookups import Pool, PoolLookups
from launch.proxy.routing.limits import Limits
from launch.proxy.routing.node_pool import Hop, NodePool, Reason
from launch.proxy.routing.roles import NodeReport, Roles, read_metrics
from pd_cache.chunks import Namespace
from pd_cache.cluster import ENGINES, About, LimitsConfig, ProxyConfig, differences, read_about
from pd_cache.errors import PdCacheError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
"""Enough to survive the loss of a packet of the handshake: the kernel sends it again after a second."""
HEALTH_INTERVAL_S = HEALTH_TIMEOUT_S = 2.0
_MAX_ANSWER = 64 << 10
_AT_A_TIME = 64
_HOPS: tuple[Hop, ...] = ("prefill", "decode")
_MAX_METRICS = 4 << 20
_KEEPALIVE_S = 4.0
"""How long an idle connection is kept. uvicorn closes it after 5 s, and no request should meet a closing
connection."""
_PIECE = 1 << 18
_SILENCE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
)
"""A host that lost its power or its cable sends nothing, not even the end of the connection. With these
options the kernel probes the host, and ends the connection after 10 s without an answer. The request then
fails before its deadline. If a node merely computes for long, its kernel answers the probes."""


_FAILURES = (aiohttp.ClientError, OSError, UnicodeError)
_MAX_REFUSAL = 4 << 20
_REFUSAL_S = 2.0
"""How long the body of a refusal may take. It is short, because there may be another node to ask."""
_TO_CLIENT = (
    "Content-Type",
    "Content-Length",
    "Content-Encoding",
    "Cache-Control",
    "Retry-After",
    "WWW-Authenticate",
)


class HopError(PdCacheError):
    """A node failed or refused a request. `reason` says how. `refusal` is the answer for the client, if the
    node sent one."""

    def __init__(self, reason: Reason, message: str, refusal: web.Response | None = None) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.refusal = refusal


def new_session(connections: int) -> aiohttp.ClientSession:
    """Returns the session for all nodes: at most `connections` in all, and no limit per node. It does not
    decompress answers."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=connections, keepalive_timeout=_KEEPALIVE_S, socket_factory=_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),  # the caller has a deadline,
        # and `sock_read` would not see the bytes that a `_Shortcut` passes on
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for option in _SILENCE:
        made.setsockopt(*option)
    return made


async def send(
    session: aiohttp.ClientSession, method: str, url: str, headers: Mapping[str, str], body: bytes | None
) -> aiohttp.ClientResponse:
    """Returns a node's answer, with its body unread. The caller must close it. Raises HopError if none
    came."""
    data: bytes | AsyncIterator[bytes] | None = body
    if body is not None and len(body) > _PIECE:
        data, headers = _pieces(body), {**headers, "Content-Length": str(len(body))}
    try:
        return await session.request(method, url, data=data, headers=headers, allow_redirects=False)
    except _FAILURES as error:
        raise _hop_error(error) from error


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    # aiohttp copies the whole of a BytesIO, and puts the whole of bytes into its buffer
    for start in range(0, len(body), _PIECE):
        yield body[start : start + _PIECE]


async def read_some(answer: aiohttp.ClientResponse) -> bytes:
    """Returns the bytes of the body that have arrived, at least one; empty at the end. Raises HopError if the
    body broke off."""
    try:
        return await answer.content.readany()
    # RuntimeError is aiohttp's for a connection that ended with a broken head of a chunk
    except (*_FAILURES, RuntimeError) as error:
        raise _hop_error(error) from error


async def read_all(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """Returns the whole body. Raises HopError if it breaks off or is longer than `limit` bytes."""
    body = bytearray()
    while data := await read_some(answer):
        body += data
        if len(body) > limit:
            raise HopError("garbage", f"the answer is longer than {limit} bytes")
    return bytes(body)


def client_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _TO_CLIENT if name in answer.headers}


async def refusal_of(answer: aiohttp.ClientResponse) -> web.Response:
    """Returns a whole answer to pass on. Raises HopError if it breaks off or is too long."""
    headers = client_headers(answer)
    if answer.status == 503:
        headers.setdefault("Retry-After", "1")
    return web.Response(status=answer.status, headers=headers, body=await read_all(answer, _MAX_REFUSAL))


async def check_status(answer: aiohttp.ClientResponse) -> None:
    """Raises HopError if the status says that the node failed. A 4xx is an answer, not a failure."""
    status = answer.status
    if 200 <= status < 300 or 400 <= status < 500:
        return
    refusal: web.Response | None = None
    if status >= 500:
        with contextlib.suppress(HopError, TimeoutError):
            async with asyncio.timeout(_REFUSAL_S):
                refusal = await refusal_of(answer)
    raise HopError("busy" if status == 503 else "error", f"status {status}", refusal)


def _hop_error(error: Exception) -> HopError:
    reason: Reason = "garbage"
    if isinstance(
        error, (aiohttp.InvalidURL, UnicodeError, aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)
    ):
        reason = "unreachable"  # UnicodeError: a host name that cannot be looked up
    elif isinstance(error, TimeoutError):  # comes before OSError, of which it is a kind
        reason = "timeout"
    elif isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, OSError)):
        reason = "disconnected"
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, aiohttp.ClientConnectorError) and (number := error.os_error.errno or 0) > 0:
        what = os.strerror(number)  # aiohttp's text repeats the address, which the caller knows
    return HopError(reason, what)


class NodePools:
    def __init__(
        self,
        config: ProxyConfig,
        lookups: PoolLookups,
        master: Callable[[View], str | None] | None = None,
    ) -> None:
        """`master` returns the address of the master of a view's pool."""
        self.pools: dict[Hop, NodePool] = {hop: NodePool(hop, config.policy) for hop in _HOPS}
        self.roles = Roles(config.roles) if config.roles.auto else None
        """The roles of nodes that can prefill and decode; None if they do both at all times."""
        self.limits = Limits(self.pools)
        self.reads_metrics = config.roles.auto or bool(config.tenants_file) or config.limits != LimitsConfig()
        self.gateways = False
        """Whether gateways ask decode nodes. Then only the nodes know how many answers are under way."""
        self.caches = CacheView(config.index_blocks, config.load_bytes)
        """The contents of the nodes' caches according to their events."""
        self._lookups = lookups
        self._master = master or (lambda view: None)
        self._view = View(())
        self._serves: tuple[tuple[Namespace, ...], str | None] = ((), None)
        """The namespaces and the model of the pool in use."""
        self._abouts: dict[str, About] = {}
        self._differences: dict[str, str] = {}

    def update(self, view: View) -> None:
        before, now = _addresses(self._view), _addresses(view)
        for name, address in sorted(now.items() - before.items()):
            log.info("node %s has come, at %s", name, address)
        for name in sorted(before.keys() - now.keys()):
            log.info("node %s is gone", name)
        self._view = view
        self._compare()

    def note_about(self, url: str, about: About) -> None:
        """Notes what a node itself says about its caches. It is used if the node's record says nothing."""
        if self._abouts.get(url, about) != about:
            self._abouts[url] = about
            self._compare()

    def look(self, now: float, reports: Mapping[str, NodeReport]) -> None:
        """Decides the roles of nodes that can prefill and decode, from the reports of all nodes."""
        self.limits.forget(now)
        if self.gateways:
            for url, report in reports.items():
                node = self.pools["decode"].node(url)
                node.elsewhere = max(0.0, report.queued + report.running - node.load)
        if self.roles is None:
            return
        ill = {url for pool in self.pools.values() for url, well in pool.health(now).items() if not well}
        roles = {record.address: record.role for record in self._view.by_role(*ENGINES)}
        self.roles.look(now, roles, ill, reports)
        for hop, pool in self.pools.items():
            pool.resting = self.roles.resting(now, hop)

    def stale_s(self, now: float) -> float:
        return 0.0 if self._view.stale_since is None else now - self._view.stale_since

    def describe(self, now: float) -> dict[str, Any]:
        lookups = media = f"off: {self._lookups.blind}" if self._lookups.blind else "on"
        if not self._lookups.blind and self.pools["decode"].out_of_turn(now, renders=True) is None:
            media = "off: no decode node renders chats"
        return {
            "discovery_stale_s": round(self.stale_s(now), 1),
            "differences": self._differences,
            "lookups": lookups,
            "media_lookups": media,
            **({} if self.roles is None else {"roles": self.roles.describe(now)}),
            **({"events": described} if (described := self.caches.describe())["publishers"] else {}),
        }

    def _compare(self) -> None:
        engines = self._view.by_role(*ENGINES)
        self._abouts = {record.address: self._abouts.get(record.address, About()) for record in engines}
        records = [record.telling(self._abouts[record.address]) for record in engines]
        for hop, pool in self.pools.items():
            pool.update(record for record in records if record.role in (hop, "both"))
        prefill = self.pools["prefill"]
        known_caches = self.caches.update(record for record in records if record.role != "decode")
        prefill.know(known_caches)
        self._lookups.wants_names = bool(known_caches)
        found = differences([*records, *self._view.by_role("master")])
        for name, difference in found.items():
            if self._differences.get(name) != difference:
                log.warning("%s: %s", name, difference)
        self._differences = found
        decode = [record for record in records if record.role != "prefill" and record.cache_namespaces]
        serves = [(record.cache_namespaces, record.model) for record in decode]
        # while nodes of two versions come and go, the proxy keeps its pool as long as a node has it
        if serves and self._serves not in serves:
            self._serves = serves[0]
        master = self._master(self._view)
        if not serves:
            self._lookups.use("no decode node reports its namespace")
        elif master is None:
            self._lookups.use("no master of the pool is known")
        else:
            namespaces, model = self._serves
            prefill.load_cost = self.caches.load_cost(namespaces)
            labels = Counter(record.label for record in decode if record.cache_namespaces == namespaces)
            self._lookups.use(Pool(namespaces, master, model), labels.most_common(1)[0][0])


def _addresses(view: View) -> dict[str, str]:
    return {record.name: record.address for record in view.nodes}


async def check_nodes(nodes: NodePools, session: aiohttp.ClientSession) -> None:
    """Asks all nodes for their health, and notes it in their pools."""
    places = asyncio.Semaphore(_AT_A_TIME)

    async def check(url: str) -> None:
        why, page = f"no answer within {HEALTH_TIMEOUT_S:g} s", b""
        try:
            async with places, asyncio.timeout(HEALTH_TIMEOUT_S):
                why = await _why_ill(nodes, session, url)
                if not why and (nodes.reads_metrics or nodes.gateways):
                    _, page = await _page(session, f"{url}/metrics", _MAX_METRICS)
        except TimeoutError:
            pass
        except HopError as error:
            why = why and f"{error.reason}: {error}"  # it is well even if its metrics cannot be had
        except Exception as error:  # one check must not end the checks of all nodes
            log.exception("node %s: the health check failed unexpectedly", url)
            why = repr(error)
        routed = [pool.nodes[url] for pool in nodes.pools.values() if url in pool.nodes]
        changed = [node.checked(alive=not why) for node in routed]
        if any(changed):
            log.warning("node %s: %s", url, f"not well: {why}" if why else "well again")
        most = max((node.record.capacity.max_running for node in routed), default=0)
        if (report := read_metrics(page, most)) is not None:
            reports[url] = report
            nodes.limits.look(time.monotonic(), url, report)

    reports: dict[str, NodeReport] = {}
    urls = {url for pool in nodes.pools.values() for url in pool.nodes}
    await asyncio.gather(*(check(url) for url in urls))
    nodes.look(time.monotonic(), reports)


async def _why_ill(nodes: NodePools, session: aiohttp.ClientSession, url: str) -> str:
    """Returns why a node is not well; empty if it is well. A node is well if it answers anything but a
    5xx."""
    status, body = await _page(session, f"{url}/health", _MAX_ANSWER)
    if status >= 500:
        return f"status {status}"
    nodes.note_about(url, read_about(body))
    return ""


async def _page(session: aiohttp.ClientSession, url: str, limit: int) -> tuple[int, bytes]:
    """Returns the status and the body of the answer to a GET. With a 5xx, the body is empty."""
    answer = await send(session, "GET", url, {"Accept-Encoding": "identity"}, None)
    try:
        return answer.status, b"" if answer.status >= 500 else await read_all(answer, limit)
    finally:
        answer.close()
