"""A request's way through the nodes, as `GET /requests/ID` of the proxy answers with it. Pure."""

from __future__ import annotations

import msgspec

from pd_cache.reasons import RequestReport


class HopReport(msgspec.Struct, frozen=True):
    """One node's report on a request."""

    hop: str
    """`prefill` or `decode`."""
    node: str
    """The node's URL, or its name; empty for a client that may not see it."""
    report: RequestReport | None = None
    """None if the node has none on it."""


class Trip(msgspec.Struct, frozen=True):
    """A request's way through the nodes, as a proxy knows it."""

    client: str
    """The name of the client's key; empty if clients need no keys."""
    hops: tuple[HopReport, ...]
