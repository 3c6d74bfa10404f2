"""A request's way through the nodes, as the proxy's `GET /requests/ID` returns it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pd_cache.reasons import RequestReport


class HopReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One node's report on a request."""

    hop: str
    """The node's work: `prefill` or `decode`."""
    node: str
    """The node's URL, or its name; empty for a client that may not see it."""
    report: RequestReport | None
    """None if the node has no report on the request."""
    direct: str = ""
    """Why no prefill node was asked, in the words of `pd_cache_proxy_handoffs`; empty if one was."""

    def text(self, names: Mapping[str, str]) -> str:
        """Returns the report as text for people. `names` has the known names of nodes by their URLs."""
        what = " the node has no report on this request, or none any more"
        if self.report is not None:
            what = f"\n{self.report.text()}"
        direct = self.direct and f", without a prefill node ({self.direct})"
        return f"{self.hop} at {names.get(self.node, self.node)}{direct}:{what}"


class Trip(msgspec.Struct, frozen=True):
    """A request's way through the nodes, as a proxy knows it."""

    client: str
    """The name of the client's key; empty if clients need no keys."""
    hops: tuple[HopReport, ...]
