"""What does a pool of this size find of a trace? Reports `hit_rate`, in comparison with an LRU of the same
room and a pool that never forgets.

For each request of the trace, in order, a client looks up its whole blocks of 512 tokens, loads what is found
and compares every byte, and stores what is missing. Chunks have only a few KiB, so that the pool of a small
machine holds as many as that of a large cluster. All else is real: keys, lookups, leases, transfers,
eviction. LRU and the pool that never forgets (the trace's ideal) are simulated.

    pd-cache bench replay --trace FILE          pools of several capacities on this machine, one by one

The **hit rate** is the prompt tokens that were loaded, divided by all prompt tokens; see
`bench/lib/trace.py`.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import click
import numpy as np
import numpy.typing as npt
import torch

from bench.lib.pool import local_pool
from bench.lib.report import Check, at_most, file_type, finish, option, output_options, tracked
from bench.lib.trace import BLOCK_TOKENS, Request, SimulatedLru, hit_rate_of, read_trace
from pd_cache.cache import CacheEngineBuilder
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import MasterNode
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.layout import KVLayout
from pd_cache.paged.base import Slots
from pd_cache.reasons import StoreOutcome
from pd_cache.tiers.memory import TRAILER_BYTES
from transfer.settings import MIN_SEGMENT, Timeouts, TransferSettings

Words = npt.NDArray[np.uint64]
UNBOUNDED = math.inf
_ROOM = 1.1
"""The size of an unbounded pool, relative to what the trace needs: eviction must not begin."""
_OPEN_S = 30.0
_STAGING = 32 << 20
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Shares of the trace's distinct blocks: the capacities that are tried by default."""

CHUNK_BYTES = 4096
"""One or more half-precision numbers a token."""

_FIRST, _NEXT = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D  # odd, so that no two blocks or words come out equal


class ShrunkenCache:
    """An engine's paged cache in miniature. Each block of a trace has a page of a few KiB, whose bytes are
    computed from the block's number. There are pages to store from, and as many pages to load into."""

    def __init__(self, blocks: int, chunk_bytes: int) -> None:
        """`blocks` of the longest prompt; `chunk_bytes` a multiple of 2 * BLOCK_TOKENS."""
        self._blocks = blocks
        self._bits = torch.zeros(
            (2 * blocks, BLOCK_TOKENS, chunk_bytes // (2 * BLOCK_TOKENS)), dtype=torch.int16
        )
        self._words = np.arange(chunk_bytes // 8, dtype=np.uint64) * np.uint64(_NEXT)
        slots = torch.arange(2 * blocks * BLOCK_TOKENS)
        self._source, self._target = slots[: blocks * BLOCK_TOKENS], slots[blocks * BLOCK_TOKENS :]
        self.tensors = [self._bits.view(torch.float16)]
        self.layout = KVLayout.from_tensors(self.tensors)

    def fill(self, blocks: Sequence[int]) -> torch.Tensor:
        """Writes the pages of a prompt's blocks. Returns the slot mapping from which to store them."""
        self._pages(0, len(blocks))[:] = self._bytes_of(blocks)
        return self._source[: len(blocks) * BLOCK_TOKENS]

    def target(self, blocks: int) -> torch.Tensor:
        """Clears the pages of `blocks` blocks, and returns the slot mapping to load into them."""
        self._pages(self._blocks, blocks)[:] = 0
        return self._target[: blocks * BLOCK_TOKENS]

    def arrived(self, blocks: Sequence[int]) -> bool:
        """Returns whether the target holds exactly the bytes of these blocks."""
        return np.array_equal(self._pages(self._blocks, len(blocks)), self._bytes_of(blocks))

    def _pages(self, first: int, count: int) -> Words:
        return cast(Words, self._bits[first : first + count].flatten(1).numpy().view(np.uint64))

    def _bytes_of(self, blocks: Sequence[int]) -> Words:
        seeds = (np.array(blocks, dtype=np.uint64) + np.uint64(1)) * np.uint64(_FIRST)
        return cast(Words, seeds[:, None] ^ self._words)


def allotted_bytes(nbytes: int) -> int:
    """Returns how many bytes Mooncake's allocator reserves for an object: the next number with at most four
    significant binary digits.

    So an object a little larger than a power of two takes an eighth more. Mooncake's own metrics count the
    requested bytes.
    """
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


def replay(what: str, requests: Sequence[Request], settings: NodeSettings) -> Counter[str]:
    """Replays the requests, one after the other, on the pool of these settings. Returns how many chunks were
    `loaded`, `damaged` (loaded with other bytes than were stored), `stored`, and `refused`. `what` is for the
    progress bar."""
    cache = ShrunkenCache(max(1, *(len(request.whole_blocks) for request in requests)), CHUNK_BYTES)
    model = f"replay-{uuid.uuid4().hex}"
    metadata, tally = CacheMetadata.of(model, cache.layout), Counter[str]()
    with closing(CacheEngineBuilder.get_or_create(model, settings, metadata, cache.layout)) as engine:
        engine.wait_available(_OPEN_S)
        for blocks in tracked([request.whole_blocks for request in requests], what):
            names = [block.to_bytes(16, "big") for block in blocks]
            loaded = 0
            if found := engine.find(names).chunks:
                slots = Slots(cache.target(found))
                loaded = engine.load(names[:found], slots, kv_caches=cache.tensors).chunks
                if not cache.arrived(blocks[:loaded]):
                    tally["damaged"] += loaded
                    loaded = 0
            tally["loaded"] += loaded
            if missing := names[loaded:]:
                slots = Slots(cache.fill(blocks[loaded:]))
                outcomes = engine.store(missing, slots, kv_caches=cache.tensors)
                tally["stored"] += outcomes.count(StoreOutcome.NEW)
                tally["refused"] += outcomes.count(StoreOutcome.NOT)
    return tally


def measure_pool(
    requests: Sequence[Request], distinct: int, capacity: float, watermark: float, ratio: float
) -> dict[str, Any]:
    """Replays the trace, which has `distinct` chunks, on a pool with room for `capacity` chunks. Returns the
    figures."""
    bounded, slot = capacity != UNBOUNDED, allotted_bytes(CHUNK_BYTES + TRAILER_BYTES)
    # no transfer outlives its lease, and a lease delays eviction
    lease_ms = 200 if bounded else 60_000
    timeouts = Timeouts(get_ms=lease_ms, put_ms=lease_ms)
    transfer = TransferSettings(staging_size=_STAGING, timeouts=timeouts)
    master = MasterNode(
        name="master", lease_ttl_ms=lease_ms, eviction_high_watermark=watermark, eviction_ratio=ratio
    )
    chunks = capacity if bounded else _ROOM * distinct / watermark
    segment = max(MIN_SEGMENT, math.ceil(chunks) * slot)
    room = int(capacity) if bounded else "unbounded"
    with local_pool(segment, transfer=transfer, master=master) as address:
        # a chunk is a block of the trace, named by its number
        cache = CacheConfig(chunk_size=BLOCK_TOKENS, hash_mode="blocks")
        settings = NodeSettings(master=address, cache=cache, transfer=transfer)
        tally = replay(f"{room} chunks", requests, settings)
    prompt_tokens = sum(request.input_length for request in requests)
    return {
        "capacity_chunks": room,
        "hit_rate": tally["loaded"] * BLOCK_TOKENS / prompt_tokens,
        "lru": hit_rate_of(requests, SimulatedLru(int(min(capacity, distinct)))),
        "ideal": hit_rate_of(requests, SimulatedLru()),
        **{what: tally[what] for what in ("stored", "refused", "damaged")},
    }


def checks_of(rows: Iterable[dict[str, Any]]) -> list[Check]:
    """Returns the targets that these rows can show to be met or missed."""
    checks = [
        at_most("unbounded: points below the ideal", 100 * (row["ideal"] - row["hit_rate"]), 0.1)
        for row in rows
        if row["capacity_chunks"] == "unbounded"
    ]
    damaged = sum(row["damaged"] for row in rows)
    return [*checks, at_most("damaged chunks", float(damaged), 0.0)]


@click.command()
@option("--trace", required=True, type=file_type, help="A trace in the format of bench/lib/trace.py, such as those of https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.")  # fmt: skip
@option("--capacity", "capacities", multiple=True, type=click.IntRange(1), help="Chunks that the pool has room for; may be given several times. By default 1/32, 1/16, 1/8 and 1/4 of the trace's distinct blocks, and unbounded.")  # fmt: skip
@option("--evict", nargs=2, default=(0.9, 0.1), type=click.FloatRange(0, 1, min_open=True), help="The master's eviction_high_watermark and eviction_ratio.")  # fmt: skip
@output_options
def main(trace: Path, capacities: tuple[int, ...], evict: tuple[float, float], **output: Any) -> None:
    """A trace's hit rate on a real pool, against its ideal and LRU."""
    requests = read_trace(trace)
    distinct = len({block for request in requests for block in request.whole_blocks})
    least = -(-MIN_SEGMENT // allotted_bytes(CHUNK_BYTES + TRAILER_BYTES))
    shares = (max(least, round(share * distinct)) for share in _SHARES)
    rooms: Sequence[float] = capacities or (*shares, UNBOUNDED)
    if min(rooms) < least:
        least_segment = (
            f"Mooncake's least segment of 16MiB has room for {least} chunks of {CHUNK_BYTES} bytes"
        )
        raise click.UsageError(f"--capacity {min(rooms):.0f}: {least_segment}")
    rows = [measure_pool(requests, distinct, room, *evict) for room in rooms]
    prompt_tokens = sum(request.input_length for request in requests)
    figures = {"prompt_tokens": prompt_tokens, "distinct_chunks": distinct, "results": rows}
    finish(figures, checks_of(rows), **output)
