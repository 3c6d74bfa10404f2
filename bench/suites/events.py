"""KV events: how soon subscribers learn of a removal from the pool, and how fast the proxy's index of blocks is.

The pool is the bench's own: a master and a client with memory, and as many chunks as asked for. It removes chunks one by one and measures
when a subscriber hears of each. The index is filled over real sockets from publishers that send what a restarted proxy would get from vLLM:
replays of batches of blocks. Then prompts are looked up in it.

    pd-cache bench events                  or  python -m bench.suites.events
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from bench.lib.pool import raw_client, whole_pool
from bench.lib.report import Check, Report, Table, finish, option, output_options, progress
from bench.lib.stats import quantile
from launch.masters import keys_at
from launch.proxy.block_index import BlockBudget, KnownCache, NamedPrompt
from pd_cache.cluster import MasterNode
from pd_cache.cluster.addresses import free_port
from pd_cache.kv_events import EventBatch, Forget, RemovedEvent, Step, StoredEvent
from pd_cache.pool_contents import PoolContents, PoolListing
from pd_cache.wire.event_streams import EventEndpoints, EventPublisher, EventSubscriber

_SPACE = "0123456789abcdef"
_BLOCK_TOKENS = 16
_PROMPT_BLOCKS = 2048
_WAIT_S = 120.0
_HASH_BYTES = 16


class _Removals:
    """When each removal was heard of."""

    def __init__(self) -> None:
        self.heard: dict[bytes, float] = {}
        self.known = 0
        self.changed = threading.Condition()

    def apply(self, steps: Sequence[Step]) -> None:
        now = time.perf_counter()
        with self.changed:
            for step in steps:
                for event in () if isinstance(step, Forget) else step.events:
                    if isinstance(event, StoredEvent):
                        self.known += len(event.block_hashes)
                    elif isinstance(event, RemovedEvent):
                        self.heard.update((name, now) for name in event.block_hashes if isinstance(name, bytes))
            self.changed.notify_all()

    def wait(self, condition: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(condition, _WAIT_S):
                raise click.ClickException(f"not heard of within {_WAIT_S:g} s")


def measure_removals(chunks: int, removals: int, interval_s: float) -> dict[str, float]:
    """Returns how late `removals` removals from a pool of `chunks` chunks are heard of. They come at random, twice an interval."""
    rng, host = random.Random(1), "127.0.0.1"
    names = [rng.randbytes(_HASH_BYTES) for _ in range(chunks)]
    with ExitStack() as stack:
        node = MasterNode(
            name="master",
            events_port=free_port(host),
            events_interval_ms=round(interval_s * 1000),
            events_chunks=2 * chunks,
        )
        config = stack.enter_context(whole_pool(max(64 << 20, 4096 * chunks), node))
        endpoints = config.event_addresses(config.master)
        assert endpoints is not None
        metrics = f"http://{config.master.host}:{config.master.metrics_port}"
        client = stack.enter_context(raw_client(config.master_address))
        for start in range(0, chunks, 1000):
            keys = [f"pdc1/{_SPACE}/0/{name.hex()}" for name in names[start : start + 1000]]
            client.put_batch(keys, [b"x" * 64] * len(keys))
        subscriber, removals_heard = stack.enter_context(closing(EventSubscriber())), _Removals()
        subscriber.follow({"pool": (EventEndpoints(*endpoints), removals_heard.apply)})
        removals_heard.wait(lambda: removals_heard.known >= chunks)
        removed = {}
        for name in names[:removals]:
            removed[name] = time.perf_counter()
            if client.remove(f"pdc1/{_SPACE}/0/{name.hex()}") != 0:
                raise click.ClickException("the master did not remove a chunk that has no lease")
            time.sleep(rng.uniform(0, interval_s))  # not in step with the lists
        removals_heard.wait(lambda: len(removals_heard.heard) == len(removed))
        late = [removals_heard.heard[name] - at for name, at in removed.items()]
        begun = time.perf_counter()
        keys_at(metrics, _WAIT_S, 1 << 30)
        return {
            "chunks": chunks,
            "interval_s": interval_s,
            "list_s": time.perf_counter() - begun,
            "late_p50_s": statistics.median(late),
            "late_p99_s": quantile(late, 0.99),
            "late_max_s": max(late),
        }


def measure_index(folder: Path, blocks: int, publishers: int) -> dict[str, float]:
    """Returns what an index of `blocks` blocks on `publishers` nodes costs."""
    rng = random.Random(2)
    hashes = [rng.getrandbits(64) for _ in range(blocks)]
    share = blocks // publishers
    ends = [EventEndpoints(f"ipc://{folder}/{index}", f"ipc://{folder}/{index}.replay") for index in range(publishers)]
    with ExitStack() as stack:
        for index, one in enumerate(ends):
            publisher = stack.enter_context(closing(EventPublisher(one, list, keep_bytes=1 << 30)))
            mine = hashes[index * share : (index + 1) * share]
            for start in range(0, share, 128):  # a step of vLLM that computes 2048 tokens
                part: list[int | bytes] = [*mine[start : start + 128]]
                tokens = _tokens(len(part) * _BLOCK_TOKENS)
                publisher.publish([StoredEvent(part, token_ids=tokens, block_size=_BLOCK_TOKENS, medium="GPU")])
        budget = BlockBudget(2 * blocks)
        caches = [KnownCache(budget) for _ in ends]
        begun = time.perf_counter()
        subscriber = stack.enter_context(closing(EventSubscriber()))
        subscriber.follow(
            {index: (one, cache.apply) for index, (one, cache) in enumerate(zip(ends, caches, strict=True))}
        )
        while budget.used < share * publishers:
            if time.perf_counter() - begun > _WAIT_S:
                raise click.ClickException(f"only {budget.used} of {blocks} blocks within {_WAIT_S:g} s")
            time.sleep(0.005)
        rebuilt = time.perf_counter() - begun
        prompts = []
        for _ in range(50):
            cache = rng.randrange(publishers)
            start = cache * share + rng.randrange(max(1, share - _PROMPT_BLOCKS))
            prompt = NamedPrompt(_SPACE, 0, hashes[start : start + _PROMPT_BLOCKS], _BLOCK_TOKENS)
            prompts.append((cache, prompt))
        looked, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < 1.0:
            for owner, prompt in prompts:
                found = [cache.tokens(prompt) // _BLOCK_TOKENS for cache in caches]
                looked += sum(found) + publishers - 1  # each of the others is asked for the first block
                if found[owner] != min(len(prompt.blocks), share):
                    raise click.ClickException("the index does not know what it was told")
        lookups = looked / (time.perf_counter() - begun)
    return {
        "blocks": blocks,
        "publishers": publishers,
        "rebuilt_s": rebuilt,
        "lookups_per_s": lookups,
        "bytes_per_block": _bytes_per_block(share),
        "bytes_per_chunk": _bytes_per_chunk(min(share, 100_000)),
    }


def _tokens(count: int) -> Any:
    import msgspec

    return msgspec.Raw(msgspec.msgpack.encode([50_000 + index for index in range(count)]))


def _bytes_per_block(blocks: int) -> float:
    """Measured apart from all else, by Python's own account."""
    rng = random.Random(3)
    tracemalloc.start()
    try:
        cache = KnownCache(BlockBudget(blocks))
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(0, blocks, 128):
            cache.apply([EventBatch(0.0, [StoredEvent([rng.getrandbits(64) for _ in range(128)])])])
        return (tracemalloc.get_traced_memory()[0] - before) / max(1, len(cache))
    finally:
        tracemalloc.stop()


def _bytes_per_chunk(chunks: int) -> float:
    """The most that the pool's publisher takes while it compares two lists, without the lists themselves."""
    rng = random.Random(4)
    keys = [f"pdc1/{_SPACE}/0/{rng.randbytes(_HASH_BYTES).hex()}".encode() for _ in range(chunks)]
    tracemalloc.start()
    try:
        contents = PoolContents(2 * chunks)
        contents.commit(contents.compare(PoolListing(keys, 2 * chunks), {}))
        contents.commit(contents.compare(PoolListing(keys, 2 * chunks), {}))
        return tracemalloc.get_traced_memory()[1] / chunks
    finally:
        tracemalloc.stop()


@click.command()
@option("--chunks", "sizes", multiple=True, default=(1_000, 100_000), type=click.IntRange(100), help="Chunks in the pool; may be given several times.")  # fmt: skip
@option("--removals", default=40, type=click.IntRange(2), help="Removals that are measured, for each size.")
@option("--interval", default=1.0, type=click.FloatRange(0.05), help="`events_interval_ms`, in seconds.")
@option("--blocks", default=1_000_000, type=click.IntRange(1000), help="Blocks in the index.")
@option("--publishers", default=4, type=click.IntRange(1))
@output_options
def main(sizes: tuple[int, ...], removals: int, interval: float, blocks: int, publishers: int, **output: Any) -> None:
    """How soon subscribers learn of a removal from the pool, and how fast the index of blocks is."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    rows: list[dict[str, Any]] = []
    with progress() as bar, tempfile.TemporaryDirectory() as name:
        index = measure_index(Path(name), blocks, publishers)
        for chunks in bar.track(sizes, description="pools"):
            rows.append(measure_removals(chunks, removals, interval))
    checks = [
        Check("lookups of a block per second", index["lookups_per_s"], 200_000, at_least=True),
        Check("the index of a million blocks rebuilt in s", index["rebuilt_s"] * 1e6 / blocks, 5.0, at_least=False),
    ]
    for row in rows:
        bound = max(interval, 10 * row["list_s"]) + 5 * row["list_s"] + 0.5
        checks.append(Check(f"late_max_s of {row['chunks']} chunks", row["late_max_s"], bound, at_least=False))
    report = Report(
        "KV events",
        parts=[
            Table("The proxy's index of blocks", tuple(index), [tuple(index.values())]),
            Table("The pool's removals", tuple(rows[0]), [tuple(row.values()) for row in rows]),
        ],
    )
    finish({"index": index, "results": rows}, checks, report=report, **output)


if __name__ == "__main__":
    main()
