"""VersionedNames: the names under which an adapter keeps values. A change of the weights hides all values
that were stored before.

The version of the engine's weights (`pd_cache.versions`) is part of each name. Each engine reports a change
of its weights in its own way: vLLM drains its tiers, SGLang clears its storage. No command reaches an
adapter, so it gives the new weights a random label. From then on, no other process shares its values. To
share again, restart the process, with another `namespace` if its weights are not those of its files.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pd_cache.objects.object_cache import Deadline, ObjectCache
from pd_cache.versions import FIRST
from transfer.errors import Status


class VersionedNames:
    """The values of a namespace, for the version of this engine's weights. Thread-safe. The pool's trouble
    raises nothing."""

    def __init__(self, cache: ObjectCache) -> None:
        """The caller keeps ownership of `cache`."""
        self._cache = cache
        self.label = FIRST
        """The label of the engine's present weights."""

    def reset(self) -> None:
        """Notes that the engine's weights have changed."""
        self.label = secrets.token_hex(8)

    def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Returns which values are there, with one request."""
        statuses = self._cache.exists_many(_within(self.label, names))
        return [status is Status.OK for status in statuses]

    def put(
        self,
        names: Sequence[bytes],
        values: Sequence[Any],
        *,
        label: str | None = None,
        timeout: float | Deadline | None = None,
    ) -> list[bool]:
        """Stores values that were computed with the weights of `label`, by default the engine's. Returns for
        each value whether other processes can load it now.

        Stores none if the engine has other weights by now.
        """
        label = self.label if label is None else label
        if label != self.label:
            self._cache.metrics.trouble("put", "reset", len(names))
            return [False] * len(names)
        statuses = self._cache.put_many(_within(label, names), values, timeout=timeout)
        return [status is Status.OK for status in statuses]

    def read_into(
        self, names: Sequence[bytes], buffers: Sequence[Any], *, timeout: float | Deadline | None = None
    ) -> list[str]:
        """Reads values into the caller's memory. Returns the reason of each miss; see
        `ObjectCache.read_into`.

        If the weights change meanwhile, all values are misses.
        """
        label = self.label
        reasons = self._cache.read_into(_within(label, names), buffers, timeout=timeout)
        if label == self.label or all(reasons):
            return reasons
        self._cache.metrics.trouble("get", "reset", len(names))
        return ["reset"] * len(names)


def _within(label: str, names: Sequence[bytes]) -> list[bytes]:
    # labels of versions have no zero byte
    before = label.encode() + b"\0"
    return [before + name for name in names]
