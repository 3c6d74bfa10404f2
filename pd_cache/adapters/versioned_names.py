"""VersionedNames: the names under which an adapter keeps values, so that a reset of the weights hides all that was stored before.

The version of the engine's weights (`pd_cache.versions`) is part of each name. An engine that changes its weights says so in its own way:
vLLM drains its tiers, SGLang clears its storage. While it is unknown whether the engine has the current weights, nothing is found, loaded or
stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pd_cache.config import NodeSettings
from pd_cache.objects.cache import Deadline, ObjectCache
from pd_cache.versions import UNKNOWN, WeightsVersion
from transfer.errors import Status


class VersionedNames:
    """The values of one namespace, in the version of this engine's weights. Thread-safe. Its calls raise nothing because of the pool."""

    def __init__(self, cache: ObjectCache, settings: NodeSettings) -> None:
        """The caller closes `cache`, which it keeps, and `version`, which it may reset."""
        self._cache = cache
        self.version = WeightsVersion.of(settings, cache.namespace)

    @property
    def own(self) -> str:
        """The version of what is computed now; `UNKNOWN`, in which nothing is stored, if it is not known."""
        own = self.version.own
        return UNKNOWN if own is None else own

    def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Returns which values are there, by one request."""
        epoch = self.version.current()
        if epoch is None:
            return [False] * len(names)
        statuses = self._cache.exists_many(_within(epoch, names))
        return [status is Status.OK for status in statuses]

    def put(
        self,
        names: Sequence[bytes],
        values: Sequence[Any],
        *,
        epoch: str | None = None,
        timeout: float | Deadline | None = None,
    ) -> list[bool]:
        """Stores values that were computed in the version `epoch`, by default the engine's. Returns which of them others can load now.

        Stores none if that version is not the current one.
        """
        deadline = Deadline.of(timeout)
        # waits for the first answer, before which the engine's own version is not known
        self.version.current(deadline.left())
        epoch = self.own if epoch is None else epoch
        if why := self.version.why_not(epoch):
            self._cache.metrics.trouble("put", why, len(names))
            return [False] * len(names)
        statuses = self._cache.put_many(_within(epoch, names), values, timeout=deadline)
        return [status is Status.OK for status in statuses]

    def read_into(
        self, names: Sequence[bytes], buffers: Sequence[Any], *, timeout: float | Deadline | None = None
    ) -> list[str]:
        """Reads values into the caller's memory. Returns the reason of each miss; see `ObjectCache.read_into`.

        All are misses if the weights change meanwhile.
        """
        deadline = Deadline.of(timeout)
        epoch = self.version.current(deadline.left())
        if epoch is None:
            return ["epoch_unknown"] * len(names)
        reasons = self._cache.read_into(_within(epoch, names), buffers, timeout=deadline)
        if all(reasons):
            return reasons
        reason = self.version.why_not(epoch)
        if not reason:
            return reasons
        self._cache.metrics.trouble("get", reason, len(names))
        return [reason] * len(names)


def _within(epoch: str, names: Sequence[bytes]) -> list[bytes]:
    # labels of versions have no zero byte
    before = epoch.encode() + b"\0"
    return [before + name for name in names]
