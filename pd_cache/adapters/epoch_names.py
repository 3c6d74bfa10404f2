"""EpochNames: the names under which an adapter keeps values, so that a reset of the weights hides all that was stored before.

An engine that changes its weights says so in its own way: vLLM drains its tiers, SGLang clears its storage. Either begins a new epoch of the
model (`pd_cache.epochs`), for all nodes of the namespace at once. The epoch is part of each name. While it is unknown, because the pool does not
answer, nothing is found, loaded or stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pd_cache.deadline import Deadline
from pd_cache.epochs import last_word
from pd_cache.object_cache import ObjectCache
from transfer.errors import Status

log = logging.getLogger(__name__)

EPOCH_UNKNOWN = "epoch_unknown"
"""The reason of a miss: the pool does not say which epoch is current."""
RESET = "reset"
"""The reason of a miss: a new epoch began before the load had ended."""
_AGAIN_S = 1.0
"""How long after a reset that the pool did not take the next call tries again."""


class EpochNames:
    """The values of one namespace, in its current epoch. Thread-safe. Its calls raise nothing because of the pool."""

    def __init__(self, cache: ObjectCache, *, clock: Callable[[], float] = time.monotonic) -> None:
        """The caller keeps `cache`, and closes it."""
        self._cache = cache
        self._epochs = cache.backend.epochs.of(cache.namespace)
        self._clock = clock
        self._due: float | None = None
        """When a reset that the pool has not taken is tried again; None if there is none."""
        self._resetting = threading.Lock()
        """Held while a thread begins an epoch."""
        self._attempt: threading.Thread | None = None
        """The last thread that tried a reset again."""

    @property
    def last(self) -> str:
        """The epoch as last known: what is computed now may be stored in it, and in no later one."""
        return self._epochs.last

    def current(self, expected: str | None = None, *, timeout: float | Deadline | None = None) -> str | None:
        """Returns the current epoch; None if it is unknown, or not known within `timeout` (s), or while a reset waits for the pool. Asks at
        most twice a second, unless the epoch is not the `expected` one."""
        due, deadline = self._due, Deadline.of(timeout)
        if due is not None and (self._clock() < due or not self._begin_again(deadline)):
            return None
        return self._epochs.current(expected, timeout=deadline)

    def begin(self) -> bool:
        """Begins a new epoch, for all nodes. Returns whether the pool has taken it; if not, later calls try again, and nothing is found
        until then."""
        with self._resetting:
            return self._begin()

    def exist(self, names: Sequence[bytes], *, timeout: float | None = None) -> list[bool]:
        """Returns which values are there, by one request."""
        deadline = Deadline(timeout)
        epoch = self.current(timeout=deadline)
        if epoch is None:
            return [False] * len(names)
        statuses = self._cache.exists_many(_within(epoch, names), timeout=deadline.left())
        return [status is Status.OK for status in statuses]

    def put(
        self, names: Sequence[bytes], values: Sequence[Any], *, epoch: str | None = None, timeout: float | None = None
    ) -> list[bool]:
        """Stores values that were computed in `epoch`, by default the last known one. Returns which of them others can load now.

        Stores none if that epoch is not the current one.
        """
        epoch = self.last if epoch is None else epoch
        deadline = Deadline(timeout)
        current = self.current(timeout=deadline)
        if current != epoch:
            self._cache.metrics.trouble("put", EPOCH_UNKNOWN if current is None else RESET, len(names))
            return [False] * len(names)
        statuses = self._cache.put_many(_within(epoch, names), values, timeout=deadline.left())
        return [status is Status.OK for status in statuses]

    def read_into(self, names: Sequence[bytes], buffers: Sequence[Any], *, timeout: float | None = None) -> list[str]:
        """Reads values into the caller's memory. Returns the reason of each miss; see `ObjectCache.read_into`.

        All are misses if a new epoch begins meanwhile.
        """
        deadline = Deadline(timeout)
        epoch = self.current(timeout=deadline)
        if epoch is None:
            return [EPOCH_UNKNOWN] * len(names)
        reasons = self._cache.read_into(_within(epoch, names), buffers, timeout=deadline.left())
        if all(reasons):
            return reasons
        after = self.current(epoch, timeout=last_word(deadline))
        if after == epoch:
            return reasons
        reason = EPOCH_UNKNOWN if after is None else RESET
        self._cache.metrics.trouble("get", reason, len(names))
        return [reason] * len(names)

    def _begin_again(self, deadline: Deadline) -> bool:
        """Tries a reset again that is due, unless another thread is trying it. Returns whether none is due any more, by the deadline.

        The attempt goes on if its caller has no time to wait for it.
        """
        if self._attempt is not None and self._attempt.is_alive():
            return False
        self._attempt = attempt = threading.Thread(target=self._begin_if_due, name="pd-cache-reset", daemon=True)
        try:
            attempt.start()
        except RuntimeError as error:  # a later call tries again
            log.warning("cannot begin a new epoch: %s", error)
            return False
        left = deadline.left()
        attempt.join(None if left is None else min(left, threading.TIMEOUT_MAX))
        return self._due is None

    def _begin_if_due(self) -> None:
        with self._resetting:
            try:
                if self._due is not None:
                    self._begin()
            except Exception:  # a later call tries again
                log.exception("cannot begin a new epoch")

    def _begin(self) -> bool:
        begun = self._cache.available and self._epochs.begin() is not None
        self._due = None if begun else self._clock() + _AGAIN_S
        return begun


def _within(epoch: str, names: Sequence[bytes]) -> list[bytes]:
    # labels of epochs have no zero byte
    before = epoch.encode() + b"\0"
    return [before + name for name in names]
