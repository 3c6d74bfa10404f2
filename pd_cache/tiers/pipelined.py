"""PipelinedBackend: wraps a backend, and fetches the next chunks while the caller works on the last.

It is for backends of others that work on the caller's thread. `MooncakeBackend` and `LocalDiskBackend` need no wrapper: they have their
own threads and run ahead by themselves.

The first chunk is fetched on the caller's own thread, because nothing could overlap with it. From then on, a thread of this read runs
ahead, by `depth` chunks at most.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence

from pd_cache.tiers.base import PutOutcome, StorageBackend
from pd_cache.tiers.memory import Fetched, Staged
from transfer.errors import Status

_CLOSE_S = 5.0


class _Pump:
    """A thread that takes over an iterator of fetches and keeps up to `depth` of them ready, as long as its reader wants them."""

    def __init__(self, fetches: Generator[Fetched, None, None], depth: int) -> None:
        self._fetches = fetches
        self._wanted = True
        self._depth = depth
        self._ready: deque[Fetched] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[Fetched]:
        while True:
            with self._changed:
                # needs no timeout: the backend's fetch has a deadline
                self._changed.wait_for(lambda: self._ready or self._ended)
                if not self._ready:
                    if self._error is not None:
                        raise self._error
                    return
                fetched = self._ready.popleft()
                self._changed.notify_all()
            yield fetched

    def stop(self) -> None:
        """Gives up the fetches that were not taken. The thread ends as soon as its present fetch does."""
        with self._changed:
            self._wanted = False
            ready, self._ready = self._ready, deque()
            self._changed.notify_all()
        for fetched in ready:
            fetched.release()

    def _run(self) -> None:
        """Runs on the pump's thread."""
        try:
            for fetched in self._fetches:
                with self._changed:
                    self._changed.wait_for(lambda: not self._wanted or len(self._ready) < self._depth)
                    if self._wanted:
                        self._ready.append(fetched)
                        self._changed.notify_all()
                        continue
                fetched.release()
                return
        except BaseException as error:  # noqa: BLE001 - the reader raises it again
            self._error = error
        finally:
            self._fetches.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()


class PipelinedBackend(StorageBackend):
    """Wraps and owns a backend. Each read runs ahead on its own thread."""

    def __init__(self, inner: StorageBackend, depth: int = 4) -> None:
        """Keeps at most `depth` chunks ready for each reader, besides those that `inner` reads ahead."""
        self.inner = inner
        self.payload_bytes = inner.payload_bytes
        self.batch_size = inner.batch_size
        self.memory = inner.memory
        self.settles_at_once = inner.settles_at_once
        self._depth = depth
        self._pumps: set[_Pump] = set()
        self._lock = threading.Lock()

    @property
    def available(self) -> bool:
        return self.inner.available

    def wait_available(self, timeout: float) -> None:
        self.inner.wait_available(timeout)

    def batched_contains(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        return self.inner.batched_contains(keys, timeout=timeout)

    def batched_wants(self, keys: Sequence[str], *, timeout: float | None = None) -> list[Status]:
        return self.inner.batched_wants(keys, timeout=timeout)

    def batched_get(
        self, keys: Sequence[str], *, payload_bytes: int | None = None, timeout: float | None = None
    ) -> Generator[Fetched, None, None]:
        fetches = self.inner.batched_get(keys, payload_bytes=payload_bytes, timeout=timeout)
        pump: _Pump | None = None
        try:
            first = next(fetches, None)
            if first is None:
                return
            if len(keys) > 1:
                pump = _Pump(fetches, self._depth)
                with self._lock:
                    self._pumps = {one for one in self._pumps if one.thread.is_alive()} | {pump}
            yield first
            if pump is not None:
                rest = len(keys) - 1
                for fetched in pump:
                    rest -= 1
                    yield fetched
                for _ in range(rest):  # the backend was closed meanwhile
                    yield Fetched(None, Status.CLOSED.value)
        finally:
            if pump is None:
                fetches.close()
            else:
                pump.stop()

    def stage(self, *, payload_bytes: int | None = None, timeout: float | None = None) -> Staged | None:
        return self.inner.stage(payload_bytes=payload_bytes, timeout=timeout)

    def wait_room(self, timeout: float | None = None) -> bool:
        return self.inner.wait_room(timeout)

    def batched_put(self, keys: Sequence[str], staged: Sequence[Staged], *, timeout: float | None = None) -> PutOutcome:
        return self.inner.batched_put(keys, staged, timeout=timeout)

    def batched_remove(self, keys: Sequence[str], *, timeout: float | None = None, force: bool = False) -> list[Status]:
        return self.inner.batched_remove(keys, timeout=timeout, force=force)

    def pin(self, keys: Sequence[str]) -> Sequence[str]:
        return self.inner.pin(keys)

    def unpin(self, keys: Sequence[str]) -> None:
        self.inner.unpin(keys)

    def annotate(self, key: str, value: bytes, *, timeout: float | None = None) -> Status:
        return self.inner.annotate(key, value, timeout=timeout)

    def close(self) -> None:
        with self._lock:
            pumps = list(self._pumps)
        self.inner.close()
        end = time.monotonic() + _CLOSE_S
        for pump in pumps:
            pump.stop()
        for pump in pumps:
            pump.thread.join(max(0.0, end - time.monotonic()))
