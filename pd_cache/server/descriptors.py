"""How many files this process may have open: every connection to a server is one."""

from __future__ import annotations

import os
import resource


def raise_limit() -> int:
    """Raises the soft limit on open files to the hard one, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def next_descriptor() -> int:
    """The number that the next file to be opened will have: no fewer files are open. The limit itself if none is left."""
    try:
        descriptor = os.dup(2)
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.close(descriptor)
    return descriptor
