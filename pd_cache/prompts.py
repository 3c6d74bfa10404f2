"""PromptCache: a `BlockCache` in terms of tokens, masks and slot mappings, for callers that use those."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from pd_cache.blocks import BlockCache, Slots, StoreOutcome
from pd_cache.chunks import ExtraKey, Tokens

Mask = torch.Tensor | Sequence[bool]


class _Wanted(NamedTuple):
    names: list[bytes]
    places: Slots
    first: int
    """The first wanted token."""
    length: int
    """The prompt's length in tokens."""


class PromptCache:
    """`lookup`, `store` and `retrieve` for prompts, given as token ids or as the engine's block hashes. Thread-safe.

    What the pool cannot do is counted, and never raised. The caller's mistakes raise ValueError before anything moves.
    """

    def __init__(self, cache: BlockCache) -> None:
        """The caller keeps ownership of `cache`."""
        self.cache = cache

    def lookup(
        self,
        tokens: Tokens | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        at_hand: int = 0,
        extra_keys: Iterable[ExtraKey] = (),
        session: str = "",
        timeout: float | None = None,
    ) -> int:
        """Returns the length, in tokens, of the longest prefix that the cache holds.

        The whole chunks among the first `at_hand` tokens are not looked up and count as found. `timeout` (s) bounds the request.
        """
        size, names = self.cache.chunk_size, self.cache.name_chunks(tokens, hashes, extra_keys)
        chunks = min(max(at_hand, 0) // size, len(names))
        return self.cache.lookup(names, at_hand=chunks, session=session, timeout=timeout) * size

    def store(
        self,
        tokens: Tokens | None = None,
        mask: Mask | None = None,
        *,
        slot_mapping: torch.Tensor,
        kv_caches: Any = None,
        hashes: Sequence[bytes] | None = None,
        extra_keys: Iterable[ExtraKey] = (),
        epoch: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Stores the whole chunks of a prompt that the pool lacks. Returns how many tokens were newly stored.

        The prompt is `tokens`, n ids, or `hashes`, one per block, with n = blocks * block_size. mask: bool [n], `FFFTTT`; the False
        prefix is a whole number of chunks that need no storing. slot_mapping: int [n], `block * block_size + offset` of each token.
        kv_caches: the engine's tensors, one per layer; by default the registered ones. epoch: that of the weights with which they were
        computed, if weights change while the engine runs (`BlockCache.epoch`). timeout (s) bounds the whole call; without it, each
        transfer has the configured timeout.
        """
        wanted = self._wanted(tokens, mask, slot_mapping, hashes, extra_keys)
        outcomes = self.cache.store(wanted.names, wanted.places, kv_caches=kv_caches, epoch=epoch, timeout=timeout)
        return outcomes.count(StoreOutcome.NEW) * self.cache.chunk_size

    def retrieve(
        self,
        tokens: Tokens | None = None,
        mask: Mask | None = None,
        *,
        slot_mapping: torch.Tensor,
        kv_caches: Any = None,
        hashes: Sequence[bytes] | None = None,
        extra_keys: Iterable[ExtraKey] = (),
        session: str = "",
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Loads a prompt's chunks into the paged buffer, up to the first that the pool lacks.

        Returns a bool tensor [n] on the CPU: True for each token whose KV is now in the buffer, one contiguous run from the mask's first
        True. Slots of wanted tokens that are False in it may have been overwritten; all other slots are untouched.

        The arguments are those of `store`, except that the mask's False prefix is not wanted and that the wanted slots may begin with
        whole blocks of -1. Those blocks are skipped: the engine has them. timeout (s) bounds the whole call.
        """
        wanted = self._wanted(tokens, mask, slot_mapping, hashes, extra_keys)
        loaded = self.cache.retrieve(wanted.names, wanted.places, kv_caches=kv_caches, session=session, timeout=timeout)
        result = torch.zeros(wanted.length, dtype=torch.bool)
        result[wanted.first : wanted.first + loaded * self.cache.chunk_size] = True
        return result

    def _wanted(
        self,
        tokens: Tokens | None,
        mask: Mask | None,
        slot_mapping: torch.Tensor,
        hashes: Sequence[bytes] | None,
        extra_keys: Iterable[ExtraKey],
    ) -> _Wanted:
        """Checks the arguments and returns the part of the prompt that is wanted."""
        cache, size = self.cache, self.cache.chunk_size
        names = cache.name_chunks(tokens, hashes, extra_keys)
        length = len(tokens) if tokens is not None else len(hashes or ()) * cache.block_size
        first = _unwanted_prefix(mask, length, size)
        if not isinstance(slot_mapping, torch.Tensor) or tuple(slot_mapping.shape) != (length,):
            shape = tuple(slot_mapping.shape) if isinstance(slot_mapping, torch.Tensor) else type(slot_mapping).__name__
            raise ValueError(f"slot_mapping must be a tensor of one slot for each of {length} tokens, got {shape}")
        end = len(names) * size
        return _Wanted(names[first // size :], Slots(slot_mapping[min(first, end) : end]), first, length)


def _unwanted_prefix(mask: Mask | None, length: int, chunk_size: int) -> int:
    """Returns how many tokens, from the first, a mask of `length` leaves out. Raises ValueError for a mask of any other shape."""
    if mask is None:
        return 0
    wanted = mask if isinstance(mask, torch.Tensor) else torch.tensor(list(mask), dtype=torch.bool)
    if wanted.dtype != torch.bool or tuple(wanted.shape) != (length,):
        raise ValueError(f"mask must be {length} booleans, got {tuple(wanted.shape)} {wanted.dtype}")
    first = length - int(wanted.sum())
    if bool(wanted[:first].any()) or first % chunk_size:
        raise ValueError(
            f"mask must be a False prefix of a whole number of chunks of {chunk_size} tokens, then True; "
            f"got {first} False of {length}"
        )
    return first
