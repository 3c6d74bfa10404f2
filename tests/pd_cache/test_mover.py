"""ChunkMover: how damaged chunks are read again."""

from __future__ import annotations

import pytest
import torch

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.mover import ChunkMover, ChunkRun
from pd_cache.paged import open_copier
from pd_cache.paged.base import CopyDone, PendingCopy, plan
from pd_cache.paged.cpu import CpuPagedCopier
from pd_cache.reasons import StoreOutcome
from tests.support.backends import count as count_of
from tests.support.backends import make_subject
from tests.support.kv import make_cache

BLOCK, CHUNK = 4, 8
LAYOUT = KVLayout.from_tensors(make_cache(block_size=BLOCK))
DATABASE = ChunkedTokenDatabase(CacheMetadata.of("m", LAYOUT).namespace(CacheConfig(chunk_size=CHUNK)))


@pytest.mark.parametrize("tier", ["local", "disk"])
def test_a_chunk_that_was_damaged_on_the_way_ends_the_load_and_is_stored_again(tmp_path, tier, monkeypatch):
    """Its tier believes the first reader, although another might find it intact."""
    count = 6
    subject = make_subject(tier, LAYOUT.chunk_bytes(CHUNK), tmp_path, None, objects=count, slots=count + 8)
    try:
        mover = ChunkMover(subject.backend, DATABASE, CacheMetrics())
        names = DATABASE.name_chunks(range(count * CHUNK))
        tensors = make_cache(block_size=BLOCK)
        run = ChunkRun(
            names, DATABASE.keys(names), plan(range(2 * count), LAYOUT, CHUNK), [open_copier(tensors, LAYOUT)]
        )
        assert mover.store(run) == [StoreOutcome.NEW] * count
        scatter = CpuPagedCopier.scatter

        def damaged(copier: CpuPagedCopier, blocks: torch.Tensor, source: torch.Tensor) -> PendingCopy:
            copied = scatter(copier, blocks, source)
            return CopyDone(copied.wait() ^ 1) if int(blocks[0]) == 6 else copied

        with monkeypatch.context() as patch:
            patch.setattr(CpuPagedCopier, "scatter", damaged)
            loaded = mover.load(run)
        assert (loaded.chunks, loaded.reason) == (3, "damaged")
        assert subject.count("pd_cache_tier_healed_total") == 1
        assert count_of(mover.metrics, "pd_cache_troubles_total", reason="corrupt") == 1
        outcomes = [StoreOutcome.BEFORE] * count
        outcomes[3] = StoreOutcome.NEW
        assert mover.store(run) == outcomes
        assert mover.load(run).chunks == count
        subject.check_integrity()
    finally:
        subject.backend.close()
