"""LookupClient: how long a prefix of a prompt does the cache hold?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import ExtraKey, Tokens


class LookupClient(ABC):
    """Answers with a number of tokens; errors answer 0 and are counted, whatever they are.

    `request_configs` may hold `extra_keys`: the request's isolation (cache_salt, LoRA name, multi-modal hashes).
    """

    def __init__(self, metrics: CacheMetrics | None = None) -> None:
        self.metrics = metrics or CacheMetrics()

    def lookup(
        self,
        token_ids: Tokens | None = None,
        lookup_id: str | None = None,
        request_configs: Mapping[str, Any] | None = None,
        *,
        block_hashes: Sequence[bytes] | None = None,
        held: int = 0,
    ) -> int:
        """End of the longest contiguous prefix found, in tokens.

        Either `token_ids` or, in hash mode, the engine's `block_hashes`. Whole chunks among the first `held` tokens are
        at hand already: they are not asked for, and count as found. `lookup_id` names the request in log lines, and
        where a lookup protects what it found, until it is loaded or until `end`.
        """
        try:
            extra_keys = _extra_keys(request_configs)
            return self._lookup(token_ids, block_hashes, held, extra_keys, lookup_id)
        except Exception as error:  # noqa: BLE001 - a lookup never fails its request: the interface says 0
            self.metrics.trouble(
                "lookup", f"error_{type(error).__name__}", detail=f"{lookup_id or 'a lookup'}: {error}"
            )
            return 0

    @abstractmethod
    def _lookup(
        self,
        token_ids: Tokens | None,
        block_hashes: Sequence[bytes] | None,
        held: int,
        extra_keys: Sequence[ExtraKey],
        lookup_id: str | None,
    ) -> int: ...

    def end(self, lookup_id: str) -> None:  # noqa: B027 - only some keep anything
        """The request of this id is over: what its lookup found need be kept no longer."""

    def supports_producer_reuse(self) -> bool:
        """Prefill nodes may look up and reuse, too."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Let go of what the client opened itself. Idempotent."""


def _extra_keys(request_configs: Mapping[str, Any] | None) -> Sequence[ExtraKey]:
    if not request_configs:
        return ()
    unknown = set(request_configs) - {"extra_keys"}
    if unknown:
        raise ValueError(f"unknown request_configs {sorted(unknown)}; known is extra_keys")
    return tuple(request_configs["extra_keys"])
