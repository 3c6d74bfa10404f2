"""File descriptors: how many this process may have open. A connection takes one, a stream through the proxy two."""

from __future__ import annotations

PER_REQUEST = 4
"""Of the proxy: the client's connection and the node's, and one of each that was used a moment ago and is kept for the next."""
RESERVED = 256
"""For health checks, discovery, lookups in the pool, and files."""


def descriptors_for(max_requests: int) -> int:
    """The limit of open files that a proxy needs for so many requests at a time."""
    return RESERVED + PER_REQUEST * max_requests
