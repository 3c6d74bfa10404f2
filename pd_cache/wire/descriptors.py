"""Reads and raises the limit on this process's file descriptors. Every connection takes one."""

from __future__ import annotations

import os
import resource

_MOST = 1 << 20
"""We never need more. Some programs allocate memory for each descriptor that they may have."""


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
    """Returns the number that the next opened file would get, or the limit if none is left. At least this many descriptors are open."""
    try:
        descriptor = os.dup(2)
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.close(descriptor)
    return descriptor
