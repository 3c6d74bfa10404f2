"""An in-memory cache with the methods of CacheEngine that the engine uses. It really copies KV bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from tests.support.waiting import PATIENCE_S

Key = tuple[tuple[object, ...], tuple[int, ...]]


class FakeCache:
    """Chunks of tokens by the whole prefix up to their end. Several engines may share one."""

    def __init__(self, chunk_size: int = 16) -> None:
        self.chunk_size = chunk_size
        self.available = True
        self.chunks: dict[Key, list[torch.Tensor]] = {}
        self.stored = threading.Condition()
        self.store_masks: list[list[bool] | None] = []

    def lookup(self, tokens: Sequence[int], *, extra_keys: Iterable[object] = ()) -> int:
        found = 0
        for key in self._keys(tokens, extra_keys):
            if not self.available or key not in self.chunks:
                break
            found += self.chunk_size
        return found

    def retrieve(self, tokens, mask=None, *, kv_caches, slot_mapping, extra_keys=()):
        assert len(slot_mapping) == len(tokens)
        loaded = torch.zeros(len(tokens), dtype=torch.bool)
        for index, key in enumerate(self._keys(tokens, extra_keys)):
            if not self.available or key not in self.chunks:
                break
            span = slice(index * self.chunk_size, (index + 1) * self.chunk_size)
            for pages, kept in zip(kv_caches.values(), self.chunks[key], strict=True):
                block, offset = self._place(pages, slot_mapping[span])
                pages[block, :, offset] = kept
            loaded[span] = True
        return loaded

    def store(self, tokens, mask=None, *, kv_caches, slot_mapping, extra_keys=()):
        assert len(slot_mapping) == len(tokens)
        new = 0
        with self.stored:
            for index, key in enumerate(self._keys(tokens, extra_keys)):
                span = slice(index * self.chunk_size, (index + 1) * self.chunk_size)
                wanted = mask is None or bool(mask[span].all())
                if self.available and wanted and key not in self.chunks:
                    places = [(pages, *self._place(pages, slot_mapping[span])) for pages in kv_caches.values()]
                    self.chunks[key] = [pages[block, :, offset].clone() for pages, block, offset in places]
                    new += self.chunk_size
            self.store_masks.append(None if mask is None else mask.tolist())
            self.stored.notify_all()
        return new

    def wait_for_stores(self, count: int) -> None:
        """Until `count` stores have ended."""
        with self.stored:
            assert self.stored.wait_for(lambda: len(self.store_masks) >= count, PATIENCE_S), "nothing was stored"

    def _keys(self, tokens: Sequence[int], extra_keys: Iterable[object]) -> list[Key]:
        size = self.chunk_size
        return [(tuple(extra_keys), tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    @staticmethod
    def _place(pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slots // pages.shape[2], slots % pages.shape[2]


class RaisingCache(FakeCache):
    """Fails at the calls named in `at`."""

    def __init__(self, at: Iterable[str]) -> None:
        super().__init__()
        self.at = set(at)

    def lookup(self, *args, **kwargs):
        return self._fail("lookup") or super().lookup(*args, **kwargs)

    def retrieve(self, *args, **kwargs):
        self._fail("retrieve")
        return super().retrieve(*args, **kwargs)

    def store(self, *args, **kwargs):
        self._fail("store")
        return super().store(*args, **kwargs)

    def _fail(self, call: str) -> None:
        if call in self.at:
            raise RuntimeError(f"the cache fails at {call}")


class HangingCache(FakeCache):
    """Does not answer the calls named in `at` until `let_go` is set; then scribbles over what it was to load."""

    def __init__(self, at: Iterable[str]) -> None:
        super().__init__()
        self.at = set(at)
        self.let_go = threading.Event()
        self.entered = threading.Event()

    def lookup(self, tokens, *, extra_keys=()):
        self._hang("lookup")
        return len(tokens) // self.chunk_size * self.chunk_size

    def retrieve(self, tokens, mask=None, *, kv_caches, slot_mapping, extra_keys=()):
        self._hang("retrieve")
        for pages in kv_caches.values():
            block, offset = self._place(pages, slot_mapping)
            pages[block, :, offset] = float("nan")
        return torch.ones(len(tokens), dtype=torch.bool)

    def store(self, *args, **kwargs):
        self._hang("store")
        return super().store(*args, **kwargs)

    def _hang(self, call: str) -> None:
        if call in self.at:
            self.entered.set()
            assert self.let_go.wait(2 * PATIENCE_S)


class ScribblingCache(FakeCache):
    """Claims a prefix, overwrites its slots with garbage and says that nothing, or nonsense, was loaded."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def lookup(self, tokens, *, extra_keys=()):
        return len(tokens) // self.chunk_size * self.chunk_size

    def retrieve(self, tokens, mask=None, *, kv_caches, slot_mapping, extra_keys=()):
        for pages in kv_caches.values():
            block, offset = self._place(pages, slot_mapping)
            pages[block, :, offset] = float("nan")
        return self.answer(len(tokens))
