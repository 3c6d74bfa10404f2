"""Sends requests to the nodes of a fleet, and learns from them about the nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import aiohttp

from launch.proxy.attempts import Attempts
from launch.proxy.exchange import Exchange
from launch.proxy.hops import HopError, send
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.quiet import Quiet
from launch.proxy.routing import Hop, NodePool

log = logging.getLogger(__name__)


class Credentials(NamedTuple):
    """What nodes learn about the client's key, and their own key."""

    guarded: bool
    """Whether clients' keys are for the proxy only and are not passed on."""
    node_key: str | None
    """The nodes' own key."""


class Nodes:
    """Sends requests to nodes, and counts and logs how they fail."""

    def __init__(
        self, pools: dict[Hop, NodePool], metrics: ProxyMetrics, credentials: Callable[[], Credentials]
    ) -> None:
        """`credentials` is called for each request."""
        self.pools = pools
        self.session: aiohttp.ClientSession | None = None
        """Set while the proxy runs."""
        self._metrics = metrics
        self._credentials = credentials
        self._quiet = Quiet()

    async def send(
        self, exchange: Exchange, hop: Hop, node: str, method: str, body: bytes | None
    ) -> aiohttp.ClientResponse:
        """Returns a node's answer to the client's request, with its body unread. The caller must close it. Raises HopError if none came."""
        exchange.nodes[hop] = node
        return await self.post(exchange, node + exchange.path, body, method)

    async def post(
        self, exchange: Exchange, url: str, body: bytes | None, method: str = "POST"
    ) -> aiohttp.ClientResponse:
        """Does the same as `send` for a request of our own, made for the client."""
        assert self.session is not None
        return await send(self.session, method, url, exchange.headers(*self._credentials()), body)

    def failed(self, exchange: Exchange, hop: Hop, node: str, attempts: Attempts | None, error: HopError) -> None:
        """Notes how a node failed. Without `attempts`, only a connection that cannot be made counts against the node."""
        self._metrics.hop_failures.labels(hop, error.reason).inc()
        now = time.monotonic()
        if (left_out := self._quiet.says((node, error.reason), now)) is not None:
            more = f" (and {left_out} more like it before)" if left_out else ""
            log.warning("request %s: %s node %s: %s: %s%s", exchange.id, hop, node, error.reason, error, more)
        if attempts is not None:
            attempts.failed(node, error.reason, now)
        elif error.reason == "unreachable":
            self.pools[hop].failed(node, error.reason, now)
