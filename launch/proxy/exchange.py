"""Exchange: one request on its way through the proxy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web

from launch.proxy.attempts import Trial
from launch.proxy.budget import RetryBudget
from launch.proxy.connections import Connections
from launch.proxy.trips import HopReport, Trip
from pd_cache.reports import RequestReport
from pd_cache.tracing import HEADERS, UNTRACED, TraceSpan, Tracing, trace_headers

ID_HEADER = "X-Request-Id"
_TO_NODE = ("Authorization", "Traceparent", "Tracestate")


class ClientGone(Exception):
    """The client closed its connection."""


class Exchange:
    """One request under way, and how far it has come."""

    def __init__(self, request: web.Request, request_id: str, budget: RetryBudget, connections: Connections) -> None:
        self.request = request
        self._connections = connections
        self.id = request_id
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
        self.forget_body: Callable[[], None] = lambda: None
        """Called when the body is not needed any more."""
        self.take_memory: Callable[[int], bool] = lambda count: False
        """Charges the client for `count` more bytes, until the body is not needed any more. Returns False if it has no room for them."""
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

    def headers(self, guarded: bool, node_key: str | None) -> dict[str, str]:
        """Returns the headers for a node. If the proxy is `guarded` by keys, leaves out the client's key. Adds `node_key` if there is one."""
        headers = {name: self.request.headers[name] for name in _TO_NODE if name in self.request.headers}
        if self._trace:  # a client's state without a context that can be read belongs to no trace
            headers = {name: value for name, value in headers.items() if name.lower() not in HEADERS}
            headers |= {name.capitalize(): value for name, value in self._trace.items()}
        if guarded:
            headers.pop("Authorization", None)
        if node_key is not None:
            headers["Authorization"] = f"Bearer {node_key}"
        # bytes are passed on as they come, and the client might not accept every encoding
        return {**headers, ID_HEADER: self.id, "Content-Type": "application/json", "Accept-Encoding": "identity"}

    def trip(self) -> Trip:
        """Returns which nodes the request went to, and what these reported."""
        hops = (HopReport(hop, node, self.reports.get(hop)) for hop, node in self.nodes.items())
        return Trip(self.client, tuple(hops))

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        self._connections.writing(self.request.transport, time.monotonic())
        try:
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone from error
        finally:
            self._connections.wrote(self.request.transport)
        self.event_ended = data.endswith((b"\n\n", b"\r\n\r\n"))
