"""How many file descriptors this process may have open; every connection takes one."""

from __future__ import annotations

import os
import resource

_MOST = 1 << 20
"""We never need more, and some programs allocate memory for each descriptor that they may have."""


def descriptor_limits() -> tuple[int, int]:
    """Returns the soft limit, which is in force, and the hard limit, up to which this process may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_MOST if soft == resource.RLIM_INFINITY else soft), (_MOST if hard == resource.RLIM_INFINITY else hard)


def raise_limit() -> int:
    """Raises the soft limit to the hard one, or to a million. Returns the new soft limit; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # the kernel's own limit, fs.nr_open, is lower: keep the present limit
            pass
    return descriptor_limits()[0]


def next_descriptor() -> int:
    """Returns the number that the next opened file gets: at least this many are open. Returns the limit itself if none is left."""
    try:
        descriptor = os.dup(2)
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.close(descriptor)
    return descriptor
