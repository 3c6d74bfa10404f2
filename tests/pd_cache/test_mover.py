"""ChunkMover: how damaged chunks are read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.mover import ChunkMover, ChunkRun
from pd_cache.paged import open_copier
from pd_cache.paged.base import ChunkSlots, CopyDone, PendingCopy, plan
from pd_cache.paged.cpu import CpuPagedCopier
from pd_cache.reasons import StoreOutcome
from tests.support.backends import count as count_of
from tests.support.backends import make_subject
from tests.support.kv import make_cache
from transfer.errors import Status

BLOCK, CHUNK = 4, 8
LAYOUT = KVLayout.from_tensors(make_cache(block_size=BLOCK))
DATABASE = ChunkedTokenDatabase(CacheMetadata.of("m", LAYOUT).namespace(CacheConfig(chunk_size=CHUNK)))


@pytest.mark.parametrize("tier", ["local", "disk"])
def test_chunks_that_were_damaged_on_the_way_are_read_again_and_stay_in_their_tier(tmp_path, tier, monkeypatch):
    """However many these are, each object is asked for a constant number of times."""
    count = 6
    subject = make_subject(tier, LAYOUT.chunk_bytes(CHUNK), tmp_path, None, objects=count, slots=count + 8)
    try:
        mover = ChunkMover(subject.backend, DATABASE, CacheMetrics())
        names = DATABASE.name_chunks(range(count * CHUNK))
        keys = DATABASE.keys(names)
        tensors = make_cache(block_size=BLOCK)
        run = ChunkRun(names, keys, plan(range(2 * count), LAYOUT, CHUNK), [open_copier(tensors, LAYOUT)])
        assert mover.store(run) == [StoreOutcome.NEW] * count
        asked: list[str] = []
        seen: set[int] = set()
        get, scatter = subject.backend.batched_get, CpuPagedCopier.scatter

        def counted(keys: Sequence[str], **options: Any) -> Any:
            asked.extend(keys)
            return get(keys, **options)

        def damaged_at_first(copier: CpuPagedCopier, chunk: ChunkSlots, source: torch.Tensor) -> PendingCopy:
            copied = scatter(copier, chunk, source)
            assert chunk.blocks is not None
            block = int(chunk.blocks[0])
            if block in seen:
                return copied
            seen.add(block)
            return CopyDone(copied.wait() ^ 1)

        monkeypatch.setattr(subject.backend, "batched_get", counted)
        monkeypatch.setattr(CpuPagedCopier, "scatter", damaged_at_first)
        assert mover.load(run).chunks == count
        assert len(asked) <= 4 * count
        assert subject.count("pd_cache_tier_healed_total") == 0
        assert count_of(mover.metrics, "pd_cache_troubles_total", reason="corrupt") == count
        assert subject.backend.batched_contains(keys) == [Status.OK] * count
        subject.check_integrity()
    finally:
        subject.backend.close()
