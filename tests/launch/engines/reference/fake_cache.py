"""An in-memory `BlockCache`, as far as the engine uses one. It really copies KV bytes."""

import threading

from pd_cache.chunks import ChunkNamer
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found, Loaded, StoreOutcome
from tests.support.waiting import PATIENCE_S


class FakeCache:
    """Chunks by name. Several engines may share one."""

    block_size = 8

    def __init__(self, chunk_size=16):
        self.chunk_size = chunk_size
        self.metrics = CacheMetrics()
        self.available = True
        self.label = ""
        self.chunks = {}
        self.before = lambda call: None
        """What each call does first, by its name: raise, hang, change this cache."""
        self.stored = threading.Condition()
        self.store_sizes = []
        """Chunks of each store."""
        self.named = 0
        """How many prompts were named."""

    def name_chunks(self, tokens, hashes=None, extra_keys=()):
        self.named += 1
        return ChunkNamer(self.chunk_size).name_chunks(tokens, None, extra_keys)

    def find(self, names, *, chunks_at_hand=0, session=""):
        self.before("find")
        found = self._found(names)
        return Found(found, found, "none" if found == len(names) else "never_stored")

    def load(self, names, blocks, *, kv_caches, session="", label=None):
        self.before("load")
        loaded = self._found(names)
        for index, name in enumerate(names[:loaded]):
            for tensor, kept in zip(kv_caches.values(), self.chunks[name], strict=True):
                tensor[self._place(blocks, index)] = kept
        return Loaded(loaded, "none" if loaded == len(names) else "evicted")

    def store(self, names, blocks, *, kv_caches, label):
        self.before("store")
        assert label == self.label
        outcomes = []
        with self.stored:
            for index, name in enumerate(names):
                new = self.available and name not in self.chunks
                if new:
                    place = self._place(blocks, index)
                    self.chunks[name] = [tensor[place].clone() for tensor in kv_caches.values()]
                outcomes.append(StoreOutcome.NEW if new else StoreOutcome.NOT)
            self.store_sizes.append(len(names))
            self.stored.notify_all()
        return outcomes

    def end(self, session):
        pass

    def wait_for_chunks(self, count):
        """Until `count` chunks have been stored."""
        with self.stored:
            assert self.stored.wait_for(lambda: sum(self.store_sizes) >= count, PATIENCE_S), (
                "nothing was stored"
            )

    def _found(self, names):
        there = [self.available and name in self.chunks for name in names]
        return there.index(False) if False in there else len(there)

    def _place(self, blocks, index):
        per_chunk = self.chunk_size // self.block_size
        return list(blocks[index * per_chunk : (index + 1) * per_chunk])


class ClaimingCache(FakeCache):
    """Claims to have everything. Overwrites the blocks with what no model computes, and says that nothing was
    loaded."""

    def find(self, names, *, chunks_at_hand=0, session=""):
        self.before("find")
        return Found(len(names), len(names), "none")

    def load(self, names, blocks, *, kv_caches, session="", label=None):
        self.before("load")
        for tensor in kv_caches.values():
            tensor[list(blocks)] = float("nan")
        return Loaded(0, "evicted")


class Gate:
    """Holds up one kind of call until it is opened."""

    def __init__(self, call):
        self._call = call
        self.opened = threading.Event()

    def __call__(self, call):
        if call == self._call:
            assert self.opened.wait(2 * PATIENCE_S)
