"""How fast is each storage tier? Ratios to memcpy, to plain loops of disk calls, and to a hybrid's first
tier.

pd-cache bench tiers --json
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.lib.report import all_at_least, finish, option, output_options
from bench.lib.stats import Steps, gbps, in_turn
from pd_cache.config import CacheConfig, DiskTier, LocalTier, NodeSettings, StorageTier
from pd_cache.tiers import open_backend
from pd_cache.tiers.base import StorageBackend
from pd_cache.tiers.disk import PAGE
from pd_cache.tiers.hybrid import HybridBackend
from pd_cache.tiers.memory import TRAILER_BYTES
from transfer.deadlines import end_in
from transfer.errors import Status
from transfer.settings import TransferSettings
from transfer.staging import StagingPool

CHUNK_BYTES, _OBJECTS = 32 << 20, 16
"""The payload of a chunk, and the chunks of a round."""
ROUNDS = 9


def room(objects: int, payload: int) -> int:
    """Returns the bytes of memory for `objects` objects, each in whole pages."""
    return objects * -(-(payload + TRAILER_BYTES) // PAGE) * PAGE


@contextlib.contextmanager
def opened(
    tiers: Sequence[StorageTier], payload: int, *, staging: int = 8
) -> Iterator[tuple[HybridBackend, StorageBackend]]:
    """Yields the backend of these tiers, as a node opens it, and the backend of the first tier. There is
    memory for `staging` more objects."""
    transfer = TransferSettings(staging_size=room(staging, payload))
    settings = NodeSettings(master="", cache=CacheConfig(tiers=tuple(tiers)), transfer=transfer)
    with contextlib.closing(open_backend(settings, payload)) as backend:
        backend.wait_available(30)
        assert isinstance(backend, HybridBackend)
        yield backend, backend.tiers[0].backend


def fill(backend: StorageBackend) -> None:
    """Fills all memory with random bytes, because a disk may write zeros faster."""
    generator = np.random.default_rng(0)
    lent = []
    while (staged := backend.stage(end=0.0)) is not None:
        staged.payload[:] = generator.bytes(len(staged.payload))
        lent.append(staged)
    for staged in lent:
        staged.release()


def put(backend: StorageBackend, keys: Sequence[str]) -> None:
    """Puts an object under each key, with the bytes that lie in the memory."""
    outcomes = []
    for key in keys:
        staged = backend.stage(end=end_in(30))
        assert staged is not None, "no memory came free"
        outcomes.append(backend.batched_put([key], [staged]))
    statuses = [status for outcome in outcomes for status in outcome.results()]
    assert set(statuses) == {Status.OK}, statuses


def get(
    backend: StorageBackend, keys: Sequence[str], use: Callable[[memoryview], object] | None = None
) -> None:
    """Reads and checks every key in order. Gives each object back before the next."""
    for fetched in backend.batched_get(keys):
        assert not backend.check(fetched), fetched.reason
        assert fetched.payload is not None
        if use is not None:
            use(fetched.payload)
        fetched.release()


def names(count: int) -> list[str]:
    """Returns keys as long as those of chunks."""
    prefix = f"pdc1/{uuid.uuid4().hex}/0"
    return [f"{prefix}/{index:032x}" for index in range(count)]


def compared(nbytes: int, seconds: dict[str, list[float]], limits: Mapping[str, str]) -> dict[str, float]:
    """Returns the GB/s of each step and, for each step in `limits`, the ratio of its speed to the speed of
    its limit: the median over the rounds."""
    figures = gbps(nbytes, seconds)
    for name, limit in limits.items():
        rounds = zip(seconds[limit], seconds[name], strict=True)
        figures[f"{name}_ratio"] = statistics.median(raw / ours for raw, ours in rounds)
    return figures


# --- memory -------------------------------------------------------------------------------------------------


def measure_local(payload: int) -> dict[str, float]:
    """Compares local gets with copies of the same bytes, and a hybrid's gets with those of its first tier."""
    keys = names(_OBJECTS)
    source = [np.ones(payload, dtype=np.uint8) for _ in keys]
    target = [np.ones(payload, dtype=np.uint8) for _ in keys]

    def memcpy() -> None:
        for to, of in zip(target, source, strict=True):
            np.copyto(to, of)

    with (
        tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder,
        opened(
            [LocalTier(capacity=room(_OBJECTS, payload)), DiskTier(path=folder, capacity=room(1, payload))],
            payload,
        ) as (backend, tier),
    ):
        fill(tier)
        put(tier, keys)

        def copied() -> None:
            places = iter(target)
            get(tier, keys, lambda payload: np.copyto(next(places), np.frombuffer(payload, dtype=np.uint8)))

        ways: Steps = {
            "memcpy": memcpy,
            "local_get": lambda: get(tier, keys),
            "local_get_copied": copied,
            "hybrid_get": lambda: get(backend, keys),
        }
        seconds = in_turn(3 * ROUNDS, ways)  # more rounds, because they are short
    limits = {"local_get": "memcpy", "local_get_copied": "memcpy", "hybrid_get": "local_get"}
    return compared(_OBJECTS * payload, seconds, limits)


# --- disk ---------------------------------------------------------------------------------------------------


def measure_disk(payload: int, folder: Path) -> dict[str, float]:
    """Compares disk gets and puts with plain loops of the same calls, with the tier's flags, sizes and number
    of threads, in turn."""
    file_bytes = room(1, payload)
    tier = DiskTier(path=str(folder / "tier"), capacity=room(2 * _OBJECTS, payload))
    keys, raw = names(_OBJECTS), folder / "raw"
    memory = StagingPool(tier.threads * file_bytes, file_bytes)  # like the tier's: prefaulted, in huge pages
    slots = [slot.view for _ in range(tier.threads) if (slot := memory.lease(0.0)) is not None]

    def fresh() -> None:
        shutil.rmtree(raw, ignore_errors=True)
        raw.mkdir()

    def loop(mode: int, call: Callable[[int, list[memoryview], int], int]) -> None:
        def thread(number: int) -> None:
            view = slots[number]
            for index in range(number, _OBJECTS, tier.threads):
                descriptor = os.open(raw / str(index), mode | (os.O_DIRECT if tier.direct else 0), 0o600)
                try:
                    done = 0
                    while done < len(view):
                        done += call(descriptor, [view[done:]], done)
                finally:
                    os.close(descriptor)

        list(pool.map(thread, range(tier.threads)))

    with (
        opened([tier], payload, staging=3 * tier.threads) as (_, disk),
        ThreadPoolExecutor(tier.threads) as pool,
    ):
        fill(disk)

        def remove() -> None:
            assert set(disk.batched_remove(keys)) == {Status.OK}

        ways: Steps = {
            "_fresh": fresh,
            "raw_write": partial(loop, os.O_WRONLY | os.O_CREAT, os.pwritev),
            "raw_read": partial(loop, os.O_RDONLY, os.preadv),
            "disk_put": partial(put, disk, keys),
            "disk_get": partial(get, disk, keys),
            "_remove": remove,
        }
        seconds = in_turn(ROUNDS, ways)
    return compared(_OBJECTS * file_bytes, seconds, {"disk_get": "raw_read", "disk_put": "raw_write"})


# --- the whole ----------------------------------------------------------------------------------------------


@click.command()
@option(
    "--path",
    default=tempfile.gettempdir,
    show_default="temporary files",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder of the disk tier.",
)
@output_options
def main(path: Path, **output: Any) -> None:
    """Every storage tier against its limit."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-", dir=path) as folder:
        figures |= measure_local(CHUNK_BYTES)
        figures |= measure_disk(CHUNK_BYTES, Path(folder))
    # a local get reads the bytes once, for the checksum: without the copy, it is faster than memcpy
    checks = all_at_least(
        figures, local_get_copied_ratio=0.8, disk_get_ratio=0.8, disk_put_ratio=0.8, hybrid_get_ratio=0.95
    )
    finish(figures, checks, **output)
