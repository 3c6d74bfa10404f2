"""Deadlines for nodes, which do not run while the proxy itself stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

_SLICE_S = 0.1
"""A turn of the event loop counts as no more than this, however long it took."""


async def within(work: Awaitable[T], seconds: float) -> T:
    """Returns the result of `work`. Raises TimeoutError if it took longer than `seconds`, and cancels it.

    If the machine is busy, the event loop may come back after the deadline to an answer that has long been there. So the time in which
    it did not run does not count against the node that was to answer.
    """
    task = asyncio.ensure_future(work)
    try:
        while seconds > 0 and not task.done():
            await asyncio.wait({task}, timeout=min(seconds, _SLICE_S))
            seconds -= _SLICE_S
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved even if nobody waits any more
    if task.cancelled():
        raise TimeoutError
    return task.result()
