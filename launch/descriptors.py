"""File descriptors: how many this process may have open. A connection takes one, a stream through the proxy two."""

from __future__ import annotations

PER_REQUEST = 4
"""Descriptors of the proxy for each request: the client's connection and the node's, and an idle one of each kind kept for reuse."""
RESERVED = 256
"""Descriptors of the proxy for health checks, discovery, lookups in the pool, and files."""


def descriptors_for(max_requests: int) -> int:
    """Returns the limit of open files that a proxy needs for this many requests at a time."""
    return RESERVED + PER_REQUEST * max_requests
