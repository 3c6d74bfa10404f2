"""RecentNames: remembers how the chunks of recent prompts are named, so that what comes again is not hashed again. Pure.

A prompt comes again on the decode node's second lookup, with the next turn of a conversation, and behind every shared system prompt. Hashing
is cheap, and yet most of what a lookup of a long prompt costs; comparing bytes costs a tenth of it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from pd_cache.checksum import checksum

_RUN_BYTES = 8 << 10
"""Prompts are remembered in runs of about as many bytes, in whole chunks."""
_MOST_BYTES = 16 << 20
"""Of all runs together: 4 million tokens."""


class RecentNames:
    """Runs of chunks, each with the name before it and the names of its chunks. Thread-safe.

    It holds 16 MiB at most, and its names besides. The run that was not used for the longest time goes first. Bytes are compared, so what
    it returns is what hashing would return.
    """

    def __init__(self, chunk_bytes: int, *, most_bytes: int = _MOST_BYTES) -> None:
        """`chunk_bytes` is what a chunk's tokens take. Of `most_bytes`, at least one run is remembered."""
        self.run_chunks = max(1, _RUN_BYTES // chunk_bytes)
        """How many chunks a run has. Fewer, at a prompt's end, are not remembered."""
        self._runs: OrderedDict[tuple[bytes, int], tuple[bytes, list[bytes]]] = OrderedDict()
        self._most = max(1, most_bytes // (self.run_chunks * chunk_bytes))
        self._lock = threading.Lock()

    def find(self, before: bytes, run: bytes) -> list[bytes] | None:
        """Returns the names of a run's chunks if they are remembered. `before` is the name of the chunk before the run, or the root."""
        key = (before, checksum(run))
        with self._lock:
            found = self._runs.get(key)
            if found is None or found[0] != run:
                return None
            self._runs.move_to_end(key)
            return found[1]

    def note(self, before: bytes, run: bytes, names: list[bytes]) -> None:
        """Remembers the names of a run's chunks."""
        with self._lock:
            self._runs[before, checksum(run)] = (run, names)
            if len(self._runs) > self._most:
                self._runs.popitem(last=False)
