"""One request on its way through the proxy, and what is sent to nodes for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from launch.proxy.answers import ClientGone
from launch.proxy.bodies import BodyShare
from launch.proxy.keys import Keys
from launch.proxy.metrics import HopReport, ProxyMetrics, Trip
from launch.proxy.nodes import HopError, send
from launch.proxy.routing import Attempts, Hop, NodePool, RetryBudget, Trial
from pd_cache.reasons import RequestReport
from pd_cache.sparse_log import SparseLog
from pd_cache.tracing import HEADERS, UNTRACED, TraceSpan, Tracing, trace_headers

log = logging.getLogger(__name__)

ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)
"""Where the outermost handler leaves the id in aiohttp's request."""
_TO_NODE = ("Authorization", "Traceparent", "Tracestate")


class Exchange:
    """One request under way, and how far it has come."""

    def __init__(self, request: web.Request, budget: RetryBudget, share: BodyShare) -> None:
        self.request = request
        self.id = request[REQUEST_ID]
        self.started = time.monotonic()
        self.path = request.path
        self.trial = Trial(budget)
        self.client = ""
        """The client's name, if keys identify it."""
        self.nodes: dict[str, str] = {}
        self.reports: dict[str, RequestReport] = {}
        """What nodes said of the prompt, by hop."""
        self.first_byte_s: float | None = None
        """How long the decode node's first byte took; None before it."""
        self.model: str | None = None
        """The model that the nodes must serve; None for any."""
        self.share = share
        """The memory that its body takes."""
        self.response: web.StreamResponse | None = None
        """Set when the first byte is about to be sent."""
        self.tracing = UNTRACED
        self.span: TraceSpan = UNTRACED.begin("request")
        """The proxy's own span for the request."""
        self._trace: Mapping[str, str] = {}
        """The trace context for nodes: that of the hop under way. Empty: the client's own."""
        self.event_ended = True
        """Whether what was sent so far ends with a blank line, as each server-sent event does."""

    def told(self) -> str:
        """Returns, for the log, which client asked, which nodes answered, and why they did not find more of the prompt."""
        missed = {f"{hop}_reason": report.reason for hop, report in self.reports.items()}
        parts = {**({"client": self.client} if self.client else {}), **self.nodes, **missed}
        return " ".join(f"{name}={value}" for name, value in parts.items())

    def begin_span(self, tracing: Tracing) -> TraceSpan:
        """Begins the request's span, under the client's trace context."""
        self.tracing = tracing
        self.span = tracing.begin(
            "pd_cache.proxy", trace_headers(self.request.headers), kind="server", request_id=self.id, path=self.path
        )
        return self.span

    @contextmanager
    def hop_span(self, hop: str, node: str) -> Iterator[TraceSpan]:
        """A span for a request to a node. What is sent while it lasts has the span as its parent."""
        if not self.tracing.on:
            yield self.span
            return
        with self.tracing.begin(f"pd_cache.{hop}", self.span.headers, kind="client", node=node) as span:
            self._trace = span.headers
            try:
                yield span
            finally:
                self._trace = {}

    def headers(self, keys: Keys) -> dict[str, str]:
        """Returns the headers for a node: not the client's key if that is for the proxy, and the nodes' own key if there is one."""
        headers = {name: self.request.headers[name] for name in _TO_NODE if name in self.request.headers}
        if self._trace:  # a client's state without a context that can be read belongs to no trace
            headers = {name: value for name, value in headers.items() if name.lower() not in HEADERS}
            headers |= {name.capitalize(): value for name, value in self._trace.items()}
        if keys.guarded:
            headers.pop("Authorization", None)
        if keys.node_key is not None:
            headers["Authorization"] = f"Bearer {keys.node_key}"
        # bytes are passed on as they come, and the client might not accept every encoding
        return {**headers, ID_HEADER: self.id, "Content-Type": "application/json", "Accept-Encoding": "identity"}

    def trip(self) -> Trip:
        """Returns which nodes the request went to, and what these reported."""
        hops = (HopReport(hop, node, self.reports.get(hop)) for hop, node in self.nodes.items())
        return Trip(self.client, tuple(hops))

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        try:
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone from error
        self.event_ended = data.endswith((b"\n\n", b"\r\n\r\n"))


class NodeClient:
    """Sends requests to nodes, and counts and logs how they fail."""

    def __init__(self, pools: dict[Hop, NodePool], metrics: ProxyMetrics, keys: Keys) -> None:
        self.pools = pools
        self.session: aiohttp.ClientSession | None = None
        """Set while the proxy runs."""
        self._metrics = metrics
        self._keys = keys
        self._sparse = SparseLog()

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
        return await send(self.session, method, url, exchange.headers(self._keys), body)

    def failed(self, exchange: Exchange, hop: Hop, node: str, attempts: Attempts | None, error: HopError) -> None:
        """Notes how a node failed. Without `attempts`, only a connection that cannot be made counts against the node."""
        self._metrics.hop_failures.labels(hop, error.reason).inc()
        now = time.monotonic()
        if (count := self._sparse.admit((node, error.reason))) is not None:
            more = f" (and {count - 1} more like it before)" if count > 1 else ""
            log.warning("request %s: %s node %s: %s: %s%s", exchange.id, hop, node, error.reason, error, more)
        if attempts is not None:
            attempts.failed(node, error.reason, now)
        elif error.reason == "unreachable":
            self.pools[hop].failed(node, error.reason, now)
