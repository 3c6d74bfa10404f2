"""LookupClient: finds the longest prefix of a prompt that the cache holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cache.groups import Surveyed
from pd_cache.metrics import CacheMetrics
from pd_cache.tokens import ChunkedTokenDatabase, ExtraKey, Tokens


class LookupClient(ABC):
    """Finds prefixes, in tokens. Counts any error; the result is then what is already at hand."""

    def __init__(self, database: ChunkedTokenDatabase, metrics: CacheMetrics | None = None) -> None:
        """`database` names the chunks."""
        self.metrics = metrics or CacheMetrics()
        self._database = database

    @property
    @abstractmethod
    def available(self) -> bool:
        """False while the process that answers lookups is known to be unreachable: every lookup is then an immediate miss."""

    def lookup(
        self,
        token_ids: Tokens | None = None,
        lookup_id: str | None = None,
        request_configs: Mapping[str, Any] | None = None,
        *,
        block_hashes: Sequence[bytes] | None = None,
        at_hand: int = 0,
    ) -> int:
        """Returns the end of the longest contiguous prefix found, in tokens; 0 for a prompt that cannot be named.

        Takes either `token_ids` or, in hash mode, the engine's `block_hashes`. `request_configs` may hold `extra_keys`: the request's
        isolation (cache_salt, LoRA name, multi-modal hashes). The other arguments are those of `find`.
        """
        try:
            names = self._database.name_chunks(token_ids, block_hashes, _extra_keys(request_configs))
        except Exception as error:  # noqa: BLE001 - a lookup never fails its request
            self._count(error, lookup_id)
            return 0
        return self.find(names, lookup_id, at_hand=at_hand)

    def find(self, names: Sequence[bytes], lookup_id: str | None = None, *, at_hand: int = 0) -> int:
        """Does the same as `lookup` for a prompt whose chunks are already named.

        Whole chunks among the first `at_hand` tokens are not looked up, and count as found. `lookup_id` names the request in log lines. If
        a lookup protects what it found, it does so for that id, until the prefix is loaded or until `end`.
        """
        return self.survey(names, lookup_id, at_hand=at_hand).chunks * self._database.chunk_size

    def survey(self, names: Sequence[bytes], lookup_id: str | None = None, *, at_hand: int = 0) -> Surveyed:
        """Does the same as `find`. Returns the prefix in chunks, how many chunks the layers have that need all of them, and why the prefix
        is not longer."""
        chunks = min(max(at_hand, 0) // self._database.chunk_size, len(names))
        if chunks < len(names):
            try:
                return self._find(names, chunks, lookup_id or "")
            except Exception as error:  # noqa: BLE001 - a lookup never fails its request
                self._count(error, lookup_id)
                return Surveyed(chunks, chunks, "error")
        return Surveyed(chunks, chunks)

    @abstractmethod
    def _find(self, names: Sequence[bytes], at_hand: int, lookup_id: str) -> Surveyed:
        """Returns the end of the prefix. All numbers are in chunks. May raise any exception."""

    @abstractmethod
    def reset(self) -> str | None:
        """Begins a new epoch of the model's weights, for all nodes: nothing that was stored before is found or loaded again.

        Returns the epoch's label, or None if the pool did not take it. Waits for a few answers of the pool, each with its deadline.
        """

    def stored(self, names: Sequence[bytes]) -> None:  # noqa: B027 - only some clients keep a history
        """Notes that the engine has stored these chunks, so that they count as evicted if a later lookup does not find them."""

    def end(self, lookup_id: str) -> None:  # noqa: B027 - only some clients protect anything
        """Releases what the lookups of this id protect. Call it when the request is over."""

    def supports_producer_reuse(self) -> bool:
        """Returns whether prefill nodes, too, may look up and reuse chunks."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Releases what the client opened itself. Idempotent."""

    def _count(self, error: Exception, lookup_id: str | None) -> None:
        self.metrics.trouble("lookup", f"error_{type(error).__name__}", detail=f"{lookup_id or 'a lookup'}: {error}")


def _extra_keys(request_configs: Mapping[str, Any] | None) -> Sequence[ExtraKey]:
    if not request_configs:
        return ()
    unknown = set(request_configs) - {"extra_keys"}
    if unknown:
        raise ValueError(f"unknown request_configs {sorted(unknown)}; expected only extra_keys")
    return tuple(request_configs["extra_keys"])
