"""Every storage tier against its limit in the same run: memory against memcpy, the disk against plain loops, a hybrid against its
first tier alone; how long `contains` and an eviction take.

    pd-cache bench tiers --json
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.lib.report import Check, at_least, at_most, finish, option, output_options, size
from bench.lib.stats import gbps, in_turn
from pd_cache.config import CacheConfig, DiskTier, EvictionName, LocalTier, NodeSettings, StorageTier
from pd_cache.tiers import open_backend
from pd_cache.tiers.base import StorageBackend
from pd_cache.tiers.hybrid import HybridBackend
from pd_cache.tiers.index import EvictingIndex
from pd_cache.tiers.memory import TRAILER_BYTES
from transfer.errors import Status
from transfer.settings import ByteSize, TransferSettings
from transfer.staging import StagingPool

POLICIES: tuple[EvictionName, ...] = ("lru", "lfu", "s3fifo")
PAGE = 4096
_OBJECTS = 16
"""Chunks of a round."""


def room(objects: int, payload: int) -> int:
    """Memory for so many objects, in whole pages each."""
    return objects * -(-(payload + TRAILER_BYTES) // PAGE) * PAGE


@contextlib.contextmanager
def opened(tiers: Sequence[StorageTier], payload: int, *, staging: int = 8) -> Iterator[StorageBackend]:
    """Yields the backend of these tiers, as a node has it, with memory for `staging` objects in addition."""
    transfer = TransferSettings(staging_size=room(staging, payload))
    settings = NodeSettings(master="", cache=CacheConfig(tiers=tuple(tiers)), transfer=transfer)
    with contextlib.closing(open_backend(settings, payload)) as backend:
        backend.wait_available(30)
        yield backend


def first_tier(backend: StorageBackend) -> StorageBackend:
    assert isinstance(backend, HybridBackend)
    return backend.tiers[0].backend


def fill(backend: StorageBackend) -> None:
    """Random bytes into all memory: a disk may have an easy time with zeros."""
    generator = np.random.default_rng(0)
    lent = []
    while (staged := backend.stage(timeout=0.0)) is not None:
        staged.payload[:] = generator.bytes(len(staged.payload))
        lent.append(staged)
    for staged in lent:
        staged.release()


def put(backend: StorageBackend, keys: Sequence[str]) -> None:
    """Puts whatever lies in the memory under each key."""
    outcomes = []
    for key in keys:
        staged = backend.stage(timeout=30)
        assert staged is not None, "no memory came free"
        outcomes.append(backend.batched_put([key], [staged]))
    statuses = [status for outcome in outcomes for status in outcome.results()]
    assert set(statuses) == {Status.OK}, statuses


def get(backend: StorageBackend, keys: Sequence[str], use: Callable[[memoryview], object] | None = None) -> None:
    """Reads every key: checked, in order, each given back before the next."""
    for fetched in backend.batched_get(keys):
        assert not fetched.check(), fetched.reason
        assert fetched.payload is not None
        if use is not None:
            use(fetched.payload)
        fetched.release()


def names(count: int) -> list[str]:
    """Keys as long as those of chunks."""
    prefix = f"pdc1/{uuid.uuid4().hex}/0"
    return [f"{prefix}/{index:032x}" for index in range(count)]


def compared(nbytes: int, seconds: dict[str, list[float]], limits: Mapping[str, str]) -> dict[str, Any]:
    """Returns GB/s of each. Where there is a limit, also how fast it was, of the limit: the median over the rounds, the least and the
    greatest."""
    figures: dict[str, Any] = {**gbps(nbytes, seconds)}
    for name, limit in limits.items():
        ratios = [raw / ours for raw, ours in zip(seconds[limit], seconds[name], strict=True)]
        figures[f"{name}_ratio"] = statistics.median(ratios)
        figures[f"{name}_spread"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return figures


# --- memory ----------------------------------------------------------------------------------------------------------


def measure_local(payload: int, rounds: int) -> dict[str, Any]:
    """Local gets against copying the same bytes, and a hybrid's against its first tier's."""
    keys = names(_OBJECTS)
    source = [np.ones(payload, dtype=np.uint8) for _ in keys]
    target = [np.ones(payload, dtype=np.uint8) for _ in keys]

    def memcpy() -> None:
        for to, of in zip(target, source, strict=True):
            np.copyto(to, of)

    def copied(backend: StorageBackend) -> None:
        places = iter(target)
        get(backend, keys, lambda payload: np.copyto(next(places), np.frombuffer(payload, dtype=np.uint8)))

    with (
        tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder,
        opened(
            [LocalTier(capacity=room(_OBJECTS, payload)), DiskTier(path=folder, capacity=room(1, payload))], payload
        ) as backend,
    ):
        tier = first_tier(backend)
        fill(tier)
        put(tier, keys)
        ways: dict[str, Callable[[], object]] = {
            "memcpy": memcpy,
            "local_get": lambda: get(tier, keys),
            "local_get_copied": lambda: copied(tier),
            "hybrid_get": lambda: get(backend, keys),
        }
        seconds = in_turn(3 * rounds, ways)  # short ones
    limits = {"local_get": "memcpy", "local_get_copied": "memcpy", "hybrid_get": "local_get"}
    return compared(_OBJECTS * payload, seconds, limits)


def measure_contains(rounds: int, folder: Path) -> dict[str, Any]:
    """Microseconds of one `contains` over 512 keys, half of them there."""
    payload, asked, entries = 64, 512, 4096
    keys = names(entries)
    asked_keys = [*keys[:: 2 * entries // asked], *names(asked // 2)]
    figures = {}
    for name, tier in (
        ("local", LocalTier(capacity=room(entries, payload))),
        ("disk", DiskTier(path=str(folder), capacity=room(entries, payload))),
    ):
        with opened([tier], payload, staging=256) as backend:
            for start in range(0, entries, 128):
                put(first_tier(backend), keys[start : start + 128])
            tier_backend = first_tier(backend)
            assert tier_backend.batched_contains(asked_keys).count(Status.OK) == asked // 2
            seconds = in_turn(20 * rounds, {name: partial(tier_backend.batched_contains, asked_keys)})
            figures[f"{name}_contains_us"] = 1e6 * statistics.median(seconds[name])
    return figures


# --- disk ------------------------------------------------------------------------------------------------------------


class RawDisk:
    """The file system itself, with the tier's flags, sizes and number of threads."""

    def __init__(self, folder: Path, file_bytes: int, tier: DiskTier) -> None:
        self._folder, self._tier, self._pool = folder, tier, ThreadPoolExecutor(tier.threads)
        self._memory = StagingPool(tier.threads * file_bytes, file_bytes)  # as the tier's: prefaulted, in huge pages
        self._slots = [slot.view for _ in range(tier.threads) if (slot := self._memory.lease(0.0)) is not None]

    def fresh(self) -> None:
        """Forgets all files."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()

    def run(self, mode: int, call: Callable[[int, list[memoryview], int], int]) -> None:
        """Plain loops of the tier's calls, one a thread, over all files."""

        def one(thread: int) -> None:
            memory = self._slots[thread]
            for index in range(thread, _OBJECTS, self._tier.threads):
                flags = mode | (os.O_DIRECT if self._tier.direct else 0)
                descriptor = os.open(self._folder / str(index), flags, 0o600)
                try:
                    done = 0
                    while done < len(memory):
                        done += call(descriptor, [memory[done:]], done)
                finally:
                    os.close(descriptor)

        list(self._pool.map(one, range(self._tier.threads)))


def measure_disk(payload: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Disk gets and puts against the file system itself, in turn."""
    file_bytes = -(-(payload + TRAILER_BYTES) // PAGE) * PAGE
    tier = DiskTier(path=str(folder / "tier"), capacity=room(2 * _OBJECTS, payload))
    keys = names(_OBJECTS)
    with opened([tier], payload, staging=3 * tier.threads) as backend:
        disk = first_tier(backend)
        fill(disk)
        raw = RawDisk(folder / "raw", file_bytes, tier)

        def remove() -> None:
            assert set(disk.batched_remove(keys)) == {Status.OK}

        seconds = in_turn(
            rounds,
            {
                "_fresh": raw.fresh,
                "raw_write": partial(raw.run, os.O_WRONLY | os.O_CREAT, os.pwritev),
                "raw_read": partial(raw.run, os.O_RDONLY, os.preadv),
                "disk_put": partial(put, disk, keys),
                "disk_get": partial(get, disk, keys),
                "_remove": remove,
            },
        )
    return compared(_OBJECTS * file_bytes, seconds, {"disk_get": "raw_read", "disk_put": "raw_write"})


# --- eviction --------------------------------------------------------------------------------------------------------


def measure_eviction(entries: int, policy: EvictionName, least: int) -> float:
    """Microseconds of processor time to evict one entry and take in another, in an index that holds `entries`.

    At least `least` are replaced, and each once; the median over slices of that.
    """
    index: EvictingIndex[int] = EvictingIndex(entries, policy)

    def take_in(keys: Sequence[str]) -> float:
        start = time.thread_time()  # nothing here waits: other processes do not count
        for key in keys:
            assert index.reserve(key).refusal is None
            index.fill(key, 0)
        return time.thread_time() - start

    take_in(names(entries))
    slices = 20
    part = max(entries, least) // slices
    seconds = [take_in(names(part)) for _ in range(slices)]
    assert len(index) == entries
    return 1e6 * statistics.median(seconds) / part


# --- the whole -------------------------------------------------------------------------------------------------------


def checks_of(figures: dict[str, Any], most: int) -> list[Check]:
    """Returns the targets."""
    checks = [
        # without the copy, a get reads the bytes once, for the checksum: faster than any copy
        at_least("local_get, copied out / memcpy", figures["local_get_copied_ratio"], 0.8),
        at_least("disk_get / raw read", figures["disk_get_ratio"], 0.8),
        at_least("disk_put / raw write", figures["disk_put_ratio"], 0.8),
        at_least("hybrid_get / local_get", figures["hybrid_get_ratio"], 0.95),
        at_most("local_contains_us, 512 keys", figures["local_contains_us"], 200.0),
        at_most("disk_contains_us, 512 keys", figures["disk_contains_us"], 1000.0),
    ]
    for policy in POLICIES:
        growth = figures[f"evict_us_{policy}_{most}"] / figures[f"evict_us_{policy}_1000"]
        # a thousand entries lie in the processor's cache, a million do not: more than that would be more than O(1)
        checks.append(at_most(f"eviction {policy}, {most} / 1000 entries", growth, 3.0))
    return checks


_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


@click.command()
@option("--chunk", default="32MiB", callback=size, help="Bytes of a payload.")
@option("--rounds", default=9, type=click.IntRange(3))
@option("--path", default=tempfile.gettempdir, show_default="temporary files", type=_FOLDER, help="Of the disk tier.")
@option("--entries", default=1_000_000, type=click.IntRange(1000), help="Largest index.")
@output_options
def main(
    chunk: ByteSize,
    rounds: int,
    path: Path,
    entries: int,
    **output: Any,
) -> None:
    """Every storage tier against its limit."""
    figures: dict[str, Any] = {"chunk_bytes": int(chunk), "chunks": _OBJECTS}
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-", dir=path) as folder:
        figures |= measure_local(chunk, rounds)
        figures |= measure_contains(rounds, Path(folder) / "contains")
        figures |= measure_disk(chunk, rounds, Path(folder))
    for policy in POLICIES:
        for held in (1000, entries):
            figures[f"evict_us_{policy}_{held}"] = measure_eviction(held, policy, min(100_000, entries))
    finish(figures, checks_of(figures, entries), **output)
