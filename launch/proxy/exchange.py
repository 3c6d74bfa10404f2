"""The state of one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import ExitStack

from multidict import CIMultiDictProxy

from launch.openai import ID_HEADER
from launch.proxy.bodies import BodyShare
from launch.proxy.keys import Client, Keys
from launch.proxy.routing.limits import Predicted
from launch.proxy.routing.node_pool import NO_PROMPT, Hop, RetryBudget, Trial
from launch.proxy.trips import HopReport, Trip
from pd_cache.reasons import RequestReport
from pd_cache.tracing import TraceSpan, Tracing, trace_headers

HINTS_HEADER = "X-KV-Hints"
"""The header of a completion's answer that has the answer to its hints."""


class Exchange:
    def __init__(
        self,
        request_id: str,
        path: str,
        headers: CIMultiDictProxy[str],
        budget: RetryBudget,
        share: BodyShare,
        tracing: Tracing,
    ) -> None:
        """`path` and `headers`: what the client sent. `share`: the memory that its body takes."""
        self.id = request_id
        self.path = path
        self.headers = headers
        self.started = time.monotonic()
        self.client = Client()
        """The client and its tenant, if keys name them."""
        self.excluded: Collection[str] = ()
        """The decode nodes that its gateway does not allow."""
        self.body = b""
        """The client's body, until the request is prepared."""
        self.decode_body = b""
        """The body for the decode node, until it answers."""
        self.share = share
        self.prompt = NO_PROMPT
        """A completion's prompt, once the body is read. The lookup adds its names, or why it has none."""
        self.direct = ""
        """Why no prefill node has to compute the prompt; empty if one has to."""
        self.decode_node: str | None = None
        """The decode node to try first, if it loads the prompt before it is asked."""
        self.trial = Trial(budget)
        self.until_answered = ExitStack()
        """Ends the streams that the decode node needs until its first byte."""
        self.hinted: asyncio.Task[str] | None = None
        """Makes the answer to the request's hints; None without hints."""

        # for the client, the log, counters, reports and traces
        self.status = 499
        """The status that its client gets; 499 until there is one."""
        self.answer_status: int | None = None
        """The status of its answer, once the head has been passed on."""
        self.cut_status: int | None = None
        """The status of the error with which its answer ended after the first byte; None if it did not."""
        self.streamed = False
        """Whether its answer comes token by token."""
        self.predicted = Predicted()
        """What was predicted when it was admitted."""
        self.prefill_s: float | None = None
        """How long the prefill hop took; None without one."""
        self.first_byte_s: float | None = None
        """How long the decode node's first byte took; None before it."""
        self.nodes: dict[Hop, str] = {}
        self.reports: dict[Hop, RequestReport | None] = {}
        """The reports in the nodes' answers; None for an answer without one."""
        self.tracing = tracing
        self.span = tracing.begin(
            "pd_cache.proxy", trace_headers(headers), kind="server", request_id=self.id, path=path
        )

    def free(self) -> None:
        """Frees what the request needs only until its answer begins."""
        self.until_answered.close()
        self.share.close()
        self.body = self.decode_body = b""

    def summary(self) -> str:
        """Returns, for the log, which client asked, which nodes answered, and why they did not find more of
        the prompt."""
        parts = [f"{what}={who}" for what, who in zip(("client", "tenant"), self.client, strict=True) if who]
        parts += [f"{hop}={node}" for hop, node in self.nodes.items()]
        parts += [f"{hop}_reason={report.reason}" for hop, report in self.reports.items() if report]
        return " ".join(parts)

    def hop_span(self, what: str, node: str) -> TraceSpan:
        """Returns a span for a request to a node."""
        return self.tracing.begin(f"pd_cache.{what}", self.span.headers, kind="client", node=node)

    def node_headers(self, keys: Keys, span: TraceSpan) -> dict[str, str]:
        """Returns the headers for a node: not the client's key if that is for the proxy, and the nodes' own
        key if there is one."""
        headers = {name.capitalize(): value for name, value in span.headers.items()}
        if keys.node_key is not None:
            headers["Authorization"] = f"Bearer {keys.node_key}"
        elif not keys.guarded and "Authorization" in self.headers:
            headers["Authorization"] = self.headers["Authorization"]
        # no encoding, because bytes are passed on as they come and the client might not accept the encoding
        return {
            **headers,
            ID_HEADER: self.id,
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }

    async def answer_headers(self) -> dict[str, str]:
        """Returns the proxy's own headers of the answer: the request's id, and the answer to its hints."""
        headers = {ID_HEADER: self.id}
        if self.hinted is not None:
            headers[HINTS_HEADER] = await self.hinted
        return headers

    def trip(self) -> Trip:
        hops = (HopReport(hop, node, self.reports.get(hop), self.direct) for hop, node in self.nodes.items())
        return Trip(self.client.name, tuple(hops))
