"""File descriptors: how many this process may have open. A connection takes one, a stream through the proxy two."""

from __future__ import annotations

import resource

_MOST = 1 << 20
"""More is never needed here, and there are programs that set aside memory for each descriptor that they may have."""

PER_REQUEST = 4
"""Of the proxy: the client's connection and the node's, and one of each that was used a moment ago and is kept for the next."""
RESERVED = 256
"""For health checks, discovery, lookups in the pool, and files."""


def descriptors_for(max_requests: int) -> int:
    """The limit of open files that a proxy needs for so many requests at a time."""
    return RESERVED + PER_REQUEST * max_requests


def descriptor_limits() -> tuple[int, int]:
    """The soft limit, which holds, and the hard one, up to which this process may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_MOST if soft == resource.RLIM_INFINITY else soft), (_MOST if hard == resource.RLIM_INFINITY else hard)


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, or to a million. Returns what it is now; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # the kernel's own limit, fs.nr_open, is lower: what there is must do
            pass
    return descriptor_limits()[0]
