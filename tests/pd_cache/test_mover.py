"""ChunkMover: chunks that are there together, and damaged ones."""

import contextlib
import functools
from types import SimpleNamespace

import pytest

from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.mover import ChunkMover, ChunkRun
from pd_cache.paged import open_copier
from pd_cache.paged.base import CopyDone, plan
from pd_cache.paged.cpu import CpuPagedCopier
from pd_cache.reasons import StoreOutcome
from pd_cache.server.fence import AbandonedError
from pd_cache.tiers.memory import Fetched
from tests.support.backends import count as count_of
from tests.support.backends import make_subject
from tests.support.kv import make_cache

BLOCK, CHUNK = 4, 8
LAYOUT = KVLayout.from_tensors(make_cache(block_size=BLOCK))
DATABASE = ChunkedTokenDatabase(CacheMetadata.of("m", LAYOUT).namespace(CacheConfig(chunk_size=CHUNK)))


@pytest.mark.parametrize("tier", ["local", "disk"])
def test_chunks_that_were_damaged_on_the_way_end_the_load_and_are_stored_again(tmp_path, tier, monkeypatch):
    """Their tier believes the first reader, although another might find them intact. A disk may read the
    second one later, in another batch."""
    count = 6
    subject = make_subject(tier, LAYOUT.chunk_bytes(CHUNK), tmp_path, None, objects=count, slots=count + 8)
    try:
        mover = ChunkMover(subject.backend, DATABASE, CacheMetrics())
        names = DATABASE.name_chunks(range(count * CHUNK))
        tensors = make_cache(block_size=BLOCK)
        copiers = functools.partial(contextlib.nullcontext, [open_copier(tensors, LAYOUT)])
        run = ChunkRun(names, DATABASE.keys(names), plan(range(2 * count), LAYOUT, CHUNK), 1, copiers)
        assert mover.store(run) == [StoreOutcome.NEW] * count
        scatter = CpuPagedCopier.scatter

        def damaged(copier, blocks, source):
            copied = scatter(copier, blocks, source)
            return CopyDone(copied.wait() ^ 1) if int(blocks[0]) in (6, 10) else copied

        with monkeypatch.context() as patch:
            patch.setattr(CpuPagedCopier, "scatter", damaged)
            loaded = mover.load(run)
        assert (loaded.chunks, loaded.reason) == (3, "damaged")
        healed = subject.count("pd_cache_tier_healed_total")
        assert healed == 2 or (tier == "disk" and healed == 1)
        assert count_of(mover.metrics, "pd_cache_troubles_total", reason="corrupt") == 1
        outcomes = [StoreOutcome.BEFORE] * count
        outcomes[3] = StoreOutcome.NEW
        outcomes[5] = StoreOutcome.NEW if healed == 2 else StoreOutcome.BEFORE
        assert mover.store(run) == outcomes
        assert mover.load(run).chunks == count
        subject.check_integrity()
    finally:
        subject.backend.close()


class Later(CpuPagedCopier):
    """Copies that end when they are waited for, as those of a GPU may."""

    def __init__(self):
        super().__init__(make_cache(block_size=BLOCK), LAYOUT)
        self.events = []
        self.fails_at = ""

    def scatter(self, *given):
        return self._begin("scatter", *given)

    def gather(self, *given):
        return self._begin("gather", *given)

    def _begin(self, what, blocks, payload):
        name, copy = f"{what} {blocks[0]}", getattr(super(), what)
        if self.fails_at == name:
            raise RuntimeError("no such kernel")
        self.events.append(name)
        return SimpleNamespace(
            wait=lambda: (self.events.append(f"waited {blocks[0]}"), copy(blocks, payload).wait())[1]
        )


def without_the_second(fetches):
    first, second = next(fetches)
    second.release()
    yield [first, Fetched(None)]
    yield from fetches


def test_copies_of_chunks_that_are_there_together_run_at_once_and_none_where_there_is_none(tmp_path):
    subject = make_subject("local", LAYOUT.chunk_bytes(CHUNK), tmp_path, None, objects=4, slots=16)
    subject.bases["local"].together = 2
    try:
        mover, copier = ChunkMover(subject.backend, DATABASE, CacheMetrics()), Later()
        names = DATABASE.name_chunks(range(3 * CHUNK))
        copiers = functools.partial(contextlib.nullcontext, [copier])
        run = ChunkRun(names, DATABASE.keys(names), plan(range(6), LAYOUT, CHUNK), 1, copiers)
        assert mover.store(run) == [StoreOutcome.NEW] * 3
        copier.events.clear()
        assert mover.load(run).chunks == 3
        assert copier.events == ["scatter 0", "scatter 2", "waited 0", "waited 2", "scatter 4", "waited 4"]

        copier.events.clear()
        copier.fails_at = "scatter 2"
        with pytest.raises(RuntimeError, match="no such kernel"):
            mover.load(run)
        assert copier.events == ["scatter 0", "waited 0"], (
            "its memory is given back when nothing reads it any more"
        )

        copier.fails_at = ""
        fetch = subject.backend.batched_fetch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                subject.backend,
                "batched_fetch",
                lambda *args, **options: without_the_second(fetch(*args, **options)),
            )
            assert mover.load(run).chunks == 1, (
                "what comes behind a miss is not taken for it, whether or not the miss has a reason"
            )

        def forbidden():
            raise AbandonedError

        absent = DATABASE.name_chunks(range(8, 8 + CHUNK))
        nothing = ChunkRun(absent, DATABASE.keys(absent), run.chunks[:1], 1, forbidden)
        assert mover.load(nothing).reason == "never_stored"
    finally:
        subject.backend.close()
        subject.check_integrity()
