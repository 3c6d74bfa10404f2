"""RemoteCache: a `CacheEngine` that lives in a cache server. For engines that call a cache on threads of their own."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from pd_cache.config import CacheConfig
from pd_cache.engine import check_slot_mapping, unwanted_prefix
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.paged import plan_slots
from pd_cache.server.channel import Context
from pd_cache.server.client import CacheClient, failure_of
from pd_cache.server.messages import Found, Loaded, Retrieve, Store, Stored
from pd_cache.tokens import CacheMetadata, ExtraKey, Tokens


class _Wanted(NamedTuple):
    first: int
    names: list[bytes]
    blocks: list[int]


class RemoteCache:
    """`lookup`, `retrieve` and `store` as `CacheEngine` has them, over one paged cache. Thread-safe.

    Each call waits for its answer, at most until its deadline. A lookup keeps what it found until the same thread retrieves or
    looks up again. Tokens must lie in whole blocks.
    """

    def __init__(
        self,
        server_url: str,
        metadata: CacheMetadata,
        kv_caches: Mapping[str, torch.Tensor],
        layout: KVLayout,
        chunk_size: int,
        *,
        context: Context[Any] | None = None,
        lookup_timeout_s: float = 1.0,
        move_timeout_s: float = 15.0,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Begin to connect; does not wait for the server, which is lent `kv_caches`, moved to shared memory, when it comes.

        All calls are about these tensors. ValueError for a bad address or chunk size; SharingError for tensors that cannot be
        shared.
        """
        layout.chunk_bytes(chunk_size)
        self.metrics = metrics or CacheMetrics()
        self.layout = layout
        self.chunk_size = chunk_size
        self._lookup_timeout_s = lookup_timeout_s
        self._move_timeout_s = move_timeout_s
        self._tensors = list(kv_caches.values())
        self._client = CacheClient.of(server_url, context, "worker", metadata, CacheConfig(chunk_size=chunk_size))
        try:
            self._client.register(kv_caches, layout.kind)
        except BaseException:
            self._client.close()
            raise

    @property
    def available(self) -> bool:
        """Whether the server is there."""
        return self._client.ready

    def lookup(self, tokens: Tokens, *, held: int = 0, extra_keys: Iterable[ExtraKey] = ()) -> int:
        """End of the longest contiguous prefix that the cache holds, in tokens; see `CacheEngine.lookup`."""
        names = self._client.name_chunks(tokens, None, extra_keys)
        skip = min(max(held, 0) // self.chunk_size, len(names))
        if skip == len(names):
            return skip * self.chunk_size
        future = self._client.lookup(_session(), names, held=skip, timeout=self._lookup_timeout_s)
        reason = failure_of(future)
        answer = None if reason else future.result()
        if isinstance(answer, Found):
            return answer.chunks * self.chunk_size
        self.metrics.trouble("lookup", reason or "nonsense")
        return skip * self.chunk_size

    def retrieve(
        self,
        tokens: Tokens,
        mask: torch.Tensor | None = None,
        *,
        kv_caches: Mapping[str, torch.Tensor],
        slot_mapping: torch.Tensor,
        extra_keys: Iterable[ExtraKey] = (),
    ) -> torch.Tensor:
        """Load a prompt's chunks; see `CacheEngine.retrieve`."""
        first, names, blocks = self._check(tokens, mask, kv_caches, slot_mapping, extra_keys)
        result = torch.zeros(len(tokens), dtype=torch.bool)
        move = self._client.move(Retrieve, _session(), names, blocks, None, self._move_timeout_s)
        move.wait()
        if isinstance(move.answer, Loaded):
            result[first : first + move.answer.chunks * self.chunk_size] = True
        else:
            self.metrics.trouble("retrieve", move.failure or "nonsense", len(names))
        return result

    def store(
        self,
        tokens: Tokens,
        mask: torch.Tensor | None = None,
        *,
        kv_caches: Mapping[str, torch.Tensor],
        slot_mapping: torch.Tensor,
        extra_keys: Iterable[ExtraKey] = (),
    ) -> int:
        """Store a prompt's whole chunks; see `CacheEngine.store`."""
        _, names, blocks = self._check(tokens, mask, kv_caches, slot_mapping, extra_keys)
        move = self._client.move(Store, "", names, blocks, None, self._move_timeout_s)
        move.wait()
        if isinstance(move.answer, Stored):
            return move.answer.stored * self.chunk_size
        self.metrics.trouble("store", move.failure or "nonsense", len(names))
        return 0

    def close(self) -> None:
        """Take the paged cache back and disconnect. Idempotent."""
        self._client.close()

    def _check(
        self,
        tokens: Tokens,
        mask: torch.Tensor | None,
        kv_caches: Mapping[str, torch.Tensor],
        slot_mapping: torch.Tensor,
        extra_keys: Iterable[ExtraKey],
    ) -> _Wanted:
        if not all(map(operator.is_, kv_caches.values(), self._tensors)) or len(kv_caches) != len(self._tensors):
            raise ValueError("kv_caches are not the tensors that were registered")
        first = unwanted_prefix(mask, len(tokens), self.chunk_size)
        check_slot_mapping(slot_mapping, len(tokens))
        names = self._client.name_chunks(tokens, None, extra_keys)
        end = len(names) * self.chunk_size
        chunks = plan_slots(slot_mapping[min(first, end) : end], self.layout, self.chunk_size)
        blocks: list[int] = []
        for chunk in chunks:
            if chunk.blocks is None:
                raise ValueError("slot_mapping must be of whole blocks: a cache server moves nothing smaller")
            blocks += chunk.blocks.tolist()
        return _Wanted(first, names[first // self.chunk_size :], blocks)


def _session() -> str:
    return f"thread-{threading.get_ident()}"
