"""ChunkMover: what a user's Ctrl-C leaves of the moves under way."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cache.blocks import StoreOutcome
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.mover import ChunkMover, ChunkRun
from pd_cache.paged import open_copier, plan
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase
from tests.support.backends import Subject, make_subject
from tests.support.interrupts import FEWEST, interrupted_at
from tests.support.kv import make_cache
from tests.support.waiting import wait_for

BLOCK, CHUNK = 4, 8
LAYOUT = KVLayout.from_tensors(make_cache(block_size=BLOCK))
DATABASE = ChunkedTokenDatabase(CacheMetadata.of("m", LAYOUT).namespace(CacheConfig(chunk_size=CHUNK)))


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[Subject]:
    one = make_subject("local", LAYOUT.chunk_bytes(CHUNK), tmp_path, None, objects=6, slots=8)
    try:
        yield one
    finally:
        one.backend.close()


def sweep(mover: ChunkMover, call: Callable[[], object]) -> None:
    """Interrupts a call at each of its points, one after another; no move may count as under way after any of them."""
    looks = itertools.count(1)

    def idle() -> bool:
        if next(looks) % 20 == 0:
            gc.collect()  # a traceback in a cycle holds frames, and these hold places; usually there is none
        return not mover._under_way

    for point in itertools.count():
        interrupted = interrupted_at(point, call)
        wait_for(idle, what=f"the end of a move that was interrupted at point {point}")
        if not interrupted:
            break
    assert point > FEWEST


def test_an_interrupted_move_does_not_keep_close_waiting(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    mover = ChunkMover(subject.backend, DATABASE, CacheMetrics())
    keys = DATABASE.keys(DATABASE.hash_tokens(range(CHUNK)))
    run = ChunkRun(keys, plan([1, 0], LAYOUT, CHUNK), [open_copier(make_cache(block_size=BLOCK), LAYOUT)])
    assert mover.store(run) == [StoreOutcome.NEW]
    sweep(mover, lambda: mover.load(run))
    sweep(mover, lambda: mover.store(run))
    assert mover.close(0.0)
    assert not caplog.records
