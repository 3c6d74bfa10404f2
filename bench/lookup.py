"""How long a lookup takes, against hashing alone and a raw `batch_is_exist` of the same keys, in the same run.

pd-cache bench lookup --json         or  python -m bench.lookup --json
"""

from __future__ import annotations

import random
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch

from bench.pool import local_pool, raw_client
from bench.report import Check, finish, progress
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.lookup import MooncakeLookupClient
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase

_HASH_LIMIT_RATIO = 5 / 1.5
"""Hashing 128k tokens may take 5 ms where building a NumPy array from the same list takes 1.5 ms."""


def interleaved(rounds: int, **functions: Callable[[], object]) -> dict[str, float]:
    """Median milliseconds of each function, called in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in seconds.items()}


def measure(
    client: MooncakeLookupClient, database: ChunkedTokenDatabase, raw: Any, tokens: list[int], rounds: int
) -> dict[str, float]:
    """One row of the report: a prompt whose every chunk is in the pool."""
    keys = database.all_shard_keys(database.hash_tokens(tokens))
    assert raw.put_batch(keys, [b"x"] * len(keys)) == 0
    assert client.lookup(tokens) == len(tokens), "the pool does not hold the whole prompt"
    tensor = torch.tensor(tokens)
    return {
        "tokens": len(tokens),
        **interleaved(
            rounds,
            hash_ms=lambda: database.all_shard_keys(database.hash_tokens(tokens)),
            raw_exist_ms=lambda: raw.batch_is_exist(keys),
            lookup_ms=lambda: client.lookup(tokens),
            hash_tensor_ms=lambda: database.hash_tokens(tensor),
            numpy_ms=lambda: np.array(tokens, dtype=np.int32),
        ),
    }


@click.command()
@click.option("--chunk", default=256, show_default=True, type=click.IntRange(1), help="Tokens a chunk.")
@click.option("--rounds", default=200, show_default=True, type=click.IntRange(5))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--check", "strict", is_flag=True, help="Exit with 1 if a target is missed.")
def main(chunk: int, rounds: int, as_json: bool, strict: bool) -> None:
    """Lookups of 4k, 32k and 128k tokens against their parts."""
    rng = random.Random(0)
    with local_pool(64 << 20) as master, raw_client(master) as raw:
        settings = NodeSettings(master=master, cache=CacheConfig(chunk_size=chunk))
        metadata = CacheMetadata(
            model=f"bench-{uuid.uuid4().hex}",
            kv_dtype="bfloat16",
            page_format="heads_first.8x16x512",
            layers=32,
            block_size=16,
            page_bytes=65536,
        )
        client = MooncakeLookupClient(settings, metadata, master)
        try:
            client.store.wait_open(30)
            database = ChunkedTokenDatabase(metadata.namespace(settings.cache))
            with progress() as bar:
                rows = [
                    measure(client, database, raw, [rng.randrange(128_000) for _ in range(size)], rounds)
                    for size in bar.track((4096, 32768, 131072), description="prompts")
                ]
        finally:
            client.close()
    checks = [
        Check(f"lookup_ms, {row['tokens']} tokens", row["lookup_ms"], 1.3 * row["raw_exist_ms"] + row["hash_ms"], False)
        for row in rows
    ]
    longest = rows[-1]
    checks.append(
        Check("hash_ms, 131072 tokens", longest["hash_ms"], _HASH_LIMIT_RATIO * longest["numpy_ms"], at_least=False)
    )
    finish({"results": rows}, checks, as_json=as_json, strict=strict)


if __name__ == "__main__":
    main()
