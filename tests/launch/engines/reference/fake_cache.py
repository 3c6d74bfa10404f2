"""An in-memory `BlockCache`, as far as the engine uses one. It really copies KV bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from pd_cache.chunks import ChunkNamer
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found, Loaded, StoreOutcome
from tests.support.waiting import PATIENCE_S


class FakeCache:
    """Chunks by name. Several engines may share one."""

    block_size = 8

    def __init__(self, chunk_size: int = 16) -> None:
        self.chunk_size = chunk_size
        self.metrics = CacheMetrics()
        self.available = True
        self.epoch = ""
        self.chunks: dict[bytes, list[torch.Tensor]] = {}
        self.stored = threading.Condition()
        self.store_sizes: list[int] = []
        """Chunks of each store."""
        self.named = 0
        """How many prompts were named."""
        self.ended: list[str] = []

    def name_chunks(self, tokens, hashes=None, extra_keys=()) -> list[bytes]:
        self.named += 1
        return ChunkNamer(self.chunk_size).hash_tokens(tokens, extra_keys)

    def lookup(self, names: Sequence[bytes], *, session: str = "") -> int:
        found = 0
        for name in names:
            if not self.available or name not in self.chunks:
                break
            found += 1
        return found

    def retrieve(self, names, blocks, *, kv_caches, session="") -> int:
        per_chunk = self.chunk_size // self.block_size
        assert len(blocks) == len(names) * per_chunk
        for index, name in enumerate(names):
            if not self.available or name not in self.chunks:
                return index
            place = list(blocks[index * per_chunk : (index + 1) * per_chunk])
            for tensor, kept in zip(kv_caches.values(), self.chunks[name], strict=True):
                tensor[place] = kept
        return len(names)

    def survey(self, names, *, session="") -> Found:
        found = self.lookup(names, session=session)
        return Found(found, found, "none" if found == len(names) else "never_stored")

    def restore(self, names, blocks, *, kv_caches, session="", epoch=None) -> Loaded:
        loaded = self.retrieve(names, blocks, kv_caches=kv_caches, session=session)
        return Loaded(loaded, "none" if loaded == len(names) else "evicted")

    def store(self, names, blocks, *, kv_caches, epoch) -> list[StoreOutcome]:
        assert epoch == self.epoch
        per_chunk = self.chunk_size // self.block_size
        assert len(blocks) == len(names) * per_chunk
        outcomes = []
        with self.stored:
            for index, name in enumerate(names):
                if self.available and name not in self.chunks:
                    place = list(blocks[index * per_chunk : (index + 1) * per_chunk])
                    self.chunks[name] = [tensor[place].clone() for tensor in kv_caches.values()]
                    outcomes.append(StoreOutcome.NEW)
                else:
                    outcomes.append(StoreOutcome.BEFORE if self.available else StoreOutcome.NOT)
            self.store_sizes.append(len(names))
            self.stored.notify_all()
        return outcomes

    def end(self, session: str) -> None:
        self.ended.append(session)

    def wait_for_stores(self, count: int) -> None:
        """Until `count` stores have ended."""
        with self.stored:
            assert self.stored.wait_for(lambda: len(self.store_sizes) >= count, PATIENCE_S), "nothing was stored"


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

    def lookup(self, names, *, session=""):
        self._hang("lookup")
        return len(names)

    def retrieve(self, names, blocks, *, kv_caches, session=""):
        self._hang("retrieve")
        scribble(blocks, kv_caches)
        return len(names)

    def store(self, *args, **kwargs):
        self._hang("store")
        return super().store(*args, **kwargs)

    def _hang(self, call: str) -> None:
        if call in self.at:
            self.entered.set()
            assert self.let_go.wait(2 * PATIENCE_S)


class ScribblingCache(FakeCache):
    """Claims a prefix, overwrites its blocks with garbage and says that nothing, or nonsense, was loaded."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def lookup(self, names, *, session=""):
        return len(names)

    def retrieve(self, names, blocks, *, kv_caches, session=""):
        scribble(blocks, kv_caches)
        return self.answer(len(names))


def scribble(blocks: Sequence[int], kv_caches: dict[str, torch.Tensor]) -> None:
    """Fill blocks with what no model computes."""
    for tensor in kv_caches.values():
        tensor[list(blocks)] = float("nan")
