"""Finds the memory that this node gives to the pool, and makes it resident.

Mooncake maps a segment without touching it, so the first writer of each page pays for the fault: 0.25 to 1.2 GB/s, while later
writes reach 2.4 (measured). Mooncake's client has no call that returns the segment's address. A tiny object placed into the fresh
segment has the base address, and the kernel's map of the process shows how far the mapping reaches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from transfer.staging import prefault

log = logging.getLogger(__name__)


def mapping_at(address: int, maps: Iterable[str]) -> range | None:
    """Returns the writable mapping in which `address` lies, from the lines of /proc/self/maps; None if there is none."""
    for line in maps:
        span, permissions = line.split(maxsplit=2)[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return range(start, end) if "w" in permissions else None
    return None


def prefault_segment(size: int, base: int | None) -> float | None:
    """Makes the freshly mounted segment of `size` bytes resident. Returns the seconds that it took, or None if it was not possible.

    `base`: the address of the first object in the segment; None if it is not known.
    """
    if base is None:
        log.warning("segment of %d bytes not prefaulted: its address could not be found", size)
        return None
    with Path("/proc/self/maps").open() as maps:
        mapping = mapping_at(base, maps)
    if mapping is None or mapping.stop - base < size:
        # never touch memory that may not be the segment
        log.warning("segment of %d bytes not prefaulted: the mapping at %#x is smaller", size, base)
        return None
    seconds = prefault(base, size)
    if seconds is not None:
        log.info("segment: %d bytes prefaulted in %.3f s", size, seconds)
    return seconds
