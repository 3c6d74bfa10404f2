"""The pool's KV events, of a real master: what is stored, removed, evicted, reset or lost with its node is published."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from launch.masters import keys_at
from launch.pool_events import PoolWatch
from launch.proxy.block_index import BlockBudget, KnownPool, NamedPrompt
from pd_cache.epochs import Epochs
from pd_cache.kv_events import ClearedEvent, Forget, Step
from pd_cache.tokens import ChunkedTokenDatabase, Namespace
from pd_cache.wire.event_streams import EventEndpoints, EventSubscriber
from tests.support.pool import Pool
from tests.support.proxy import NAMESPACE
from tests.support.waiting import wait_for
from transfer.errors import Status
from transfer.store import MooncakeStore

DATABASE = ChunkedTokenDatabase(NAMESPACE)


def names(count: int, seed: str = "") -> list[bytes]:
    return [hashlib.sha256(f"{seed}{number}".encode()).digest()[:16] for number in range(count)]


class Heard:
    """What a subscriber knows of the pool."""

    def __init__(self) -> None:
        self.pool = KnownPool(BlockBudget(1 << 20))
        self.cleared = 0

    def apply(self, steps: Sequence[Step]) -> None:
        self.cleared += sum(
            isinstance(event, ClearedEvent) for step in steps if not isinstance(step, Forget) for event in step.events
        )
        self.pool.apply(steps)

    def chunks(self, prefix: Sequence[bytes]) -> int:
        prompt = NamedPrompt.of(NAMESPACE.fingerprint(), 256 * len(prefix), (), 1, prefix, 256)
        return self.pool.tokens(prompt) // 256


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Callable[[Pool], Heard]]:
    with ExitStack() as stack:

        def hear(pool: Pool, **options: Any) -> Heard:
            ends = EventEndpoints(f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay")
            watch = PoolWatch(pool.metrics_url, ends, interval_s=0.05, most_chunks=10_000, **options)
            stack.callback(watch.close)
            watch.start()
            subscriber = stack.enter_context(closing(EventSubscriber(check_s=0.5, again_s=0.02)))
            made = Heard()
            subscriber.follow({"pool": (ends, made.apply)})
            return made

        yield hear


def put(store: MooncakeStore, chunks: Sequence[bytes], epoch: str = "", size: int = 1000) -> None:
    for key in DATABASE.all_shard_keys(chunks, epoch):
        assert store.put_small(key, b"x" * size, timeout=10) is Status.OK
