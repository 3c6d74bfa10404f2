"""PipelinedBackend: wraps a backend, and fetches the next chunks while the caller works on the last.

It is for backends of others that work on the caller's thread. `MooncakeBackend` and `LocalDiskBackend` need no wrapper: they have their
own threads and run ahead by themselves.

The first chunk is fetched on the caller's own thread, because nothing could overlap with it. From then on, a thread of this read runs
ahead, by `depth` of the backend's lists at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pd_cache.chunks import Keys
from pd_cache.tiers.base import PutOutcome, StorageBackend
from pd_cache.tiers.memory import Fetched, Staged
from transfer.deadlines import Timeout
from transfer.errors import Status


class PipelinedBackend(StorageBackend):
    """Wraps and owns a backend. Each read runs ahead on its own thread."""

    def __init__(self, inner: StorageBackend, depth: int = 4) -> None:
        """Keeps at most `depth` lists of chunks ready for each reader, besides those that `inner` reads ahead."""
        self.inner = inner
        self.payload_bytes = inner.payload_bytes
        self.batch_size = inner.batch_size
        self.memory = inner.memory
        self.kind = inner.kind
        self._depth = depth

    @property
    def available(self) -> bool:
        return self.inner.available

    def wait_available(self, timeout: float) -> None:
        self.inner.wait_available(timeout)

    def batched_contains(self, keys: Keys, *, timeout: Timeout = None) -> list[Status]:
        return self.inner.batched_contains(keys, timeout=timeout)

    def batched_wants(self, keys: Keys, *, timeout: Timeout = None) -> list[Status]:
        return self.inner.batched_wants(keys, timeout=timeout)

    def batched_fetch(
        self, keys: Keys, *, payload_bytes: int | None = None, timeout: Timeout = None
    ) -> Generator[list[Fetched], None, None]:
        fetches = self.inner.batched_fetch(keys, payload_bytes=payload_bytes, timeout=timeout)
        pump = ThreadPoolExecutor(1, "read-ahead")
        ahead: deque[Future[list[Fetched]]] = deque()
        taken = 0
        try:
            while taken < len(keys):
                # needs no timeout: the backend's fetch has a deadline
                together = ahead[0].result() if ahead else next(fetches)
                if ahead:
                    ahead.popleft()
                if not together:
                    raise ValueError(f"the backend gave {taken} outcomes for {len(keys)} keys")
                taken += len(together)
                while len(ahead) < min(self._depth, len(keys) - taken):
                    ahead.append(pump.submit(next, fetches, []))
                yield together
        finally:
            for future in ahead:
                if not future.cancel():
                    future.add_done_callback(_release)
            if ahead:
                pump.submit(fetches.close)  # behind what is under way
            else:
                fetches.close()
            pump.shutdown(wait=False)

    def check(self, fetched: Fetched, payload_checksum: int | None = None) -> str:
        return self.inner.check(fetched, payload_checksum)

    def stage(self, *, payload_bytes: int | None = None, timeout: Timeout = None) -> Staged | None:
        return self.inner.stage(payload_bytes=payload_bytes, timeout=timeout)

    def wait_room(self, timeout: Timeout = None) -> bool:
        return self.inner.wait_room(timeout)

    def batched_put(self, keys: Keys, staged: Sequence[Staged], *, timeout: Timeout = None) -> PutOutcome:
        return self.inner.batched_put(keys, staged, timeout=timeout)

    def batched_remove(self, keys: Keys, *, timeout: Timeout = None, force: bool = False) -> list[Status]:
        return self.inner.batched_remove(keys, timeout=timeout, force=force)

    def pin(self, keys: Keys) -> Keys:
        return self.inner.pin(keys)

    def unpin(self, keys: Keys) -> None:
        self.inner.unpin(keys)

    def annotate(self, key: str, value: bytes, *, timeout: Timeout = None) -> Status:
        return self.inner.annotate(key, value, timeout=timeout)

    def close(self) -> None:
        self.inner.close()


def _release(future: Future[list[Fetched]]) -> None:
    if future.exception() is None:
        for fetched in future.result():
            fetched.release()
