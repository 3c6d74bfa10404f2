"""PipelinedBackend wraps a backend, and fetches the next chunks while the caller works on the last.

Use it for backends that work on the caller's thread. `MooncakeBackend` and `LocalDiskBackend` need no
wrapper: they have their own threads, and read ahead by themselves.

The first chunk is fetched on the caller's thread, because nothing could overlap with it. From then on, a
thread reads ahead, by at most `depth` of the backend's lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import Any

from pd_cache.chunks import Keys
from pd_cache.tiers.base import StorageBackend
from pd_cache.tiers.memory import Fetched
from transfer.deadlines import End


def _of_inner(name: str) -> Any:
    """Returns a property that is the wrapped backend's attribute of this name."""
    return property(attrgetter(f"inner.{name}"))


class PipelinedBackend(StorageBackend):
    """Wraps and owns a backend. Each read runs ahead on its own thread."""

    def __init__(self, inner: StorageBackend, depth: int = 4) -> None:
        """Keeps at most `depth` lists of chunks ready for each reader, besides the lists that `inner` reads
        ahead."""
        self.inner = inner
        self._depth = depth

    payload_bytes = _of_inner("payload_bytes")
    memory = _of_inner("memory")
    batch_size = _of_inner("batch_size")
    kind = _of_inner("kind")
    near = _of_inner("near")
    available = _of_inner("available")
    wait_available = _of_inner("wait_available")
    batched_contains = _of_inner("batched_contains")
    batched_wants = _of_inner("batched_wants")
    check = _of_inner("check")
    stage = _of_inner("stage")
    wait_room = _of_inner("wait_room")
    batched_put = _of_inner("batched_put")
    batched_remove = _of_inner("batched_remove")
    pin = _of_inner("pin")
    unpin = _of_inner("unpin")
    annotate = _of_inner("annotate")
    close = _of_inner("close")

    def batched_fetch(
        self, keys: Keys, *, payload_bytes: int | None = None, end: End = None
    ) -> Generator[list[Fetched], None, None]:
        fetches = self.inner.batched_fetch(keys, payload_bytes=payload_bytes, end=end)
        pump = ThreadPoolExecutor(1, "read-ahead")
        futures: deque[Future[list[Fetched]]] = deque()
        taken = 0
        try:
            while taken < len(keys):
                # needs no time-out: the backend's fetch has one
                together = futures[0].result() if futures else next(fetches)
                if futures:
                    futures.popleft()
                if not together:
                    raise ValueError(f"the backend gave {taken} outcomes for {len(keys)} keys")
                taken += len(together)
                while len(futures) < min(self._depth, len(keys) - taken):
                    futures.append(pump.submit(next, fetches, []))
                yield together
        finally:
            for future in futures:
                if not future.cancel():
                    future.add_done_callback(_release)
            if futures:
                pump.submit(fetches.close)  # after the fetch under way
            else:
                fetches.close()
            pump.shutdown(wait=False)


def _release(future: Future[list[Fetched]]) -> None:
    if future.exception() is None:
        for fetched in future.result():
            fetched.release()
