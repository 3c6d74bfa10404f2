"""Deadlines for nodes. They do not run while the proxy itself stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

_SLICE_S = 0.1
"""The most that one turn of the event loop counts, even if it took longer."""


async def within(work: Awaitable[T], seconds: float) -> T:
    """Returns the result of `work`. If it takes longer than `seconds`, cancels it and raises TimeoutError.

    If the machine is busy, the event loop may find, after the deadline, an answer that arrived long before. So the time in which the loop
    did not run does not count against the node.
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
            task.exception()  # retrieved, so that asyncio does not log it
    if task.cancelled():
        raise TimeoutError
    return task.result()
