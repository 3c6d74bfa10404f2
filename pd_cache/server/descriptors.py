"""How many files this process may have open: every connection is one."""

from __future__ import annotations

import os
import resource

_MOST = 1 << 20
"""More is never needed here, and there are programs that set aside memory for each descriptor that they may have."""


def descriptor_limits() -> tuple[int, int]:
    """The soft limit, which holds, and the hard one, up to which this process may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_MOST if soft == resource.RLIM_INFINITY else soft), (_MOST if hard == resource.RLIM_INFINITY else hard)


def raise_limit() -> int:
    """Raises the soft limit to the hard one, or to a million. Returns what it is now; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # the kernel's own limit, fs.nr_open, is lower: what there is must do
            pass
    return descriptor_limits()[0]


def next_descriptor() -> int:
    """The number that the next file to be opened will have: no fewer files are open. The limit itself if none is left."""
    try:
        descriptor = os.dup(2)
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.close(descriptor)
    return descriptor
