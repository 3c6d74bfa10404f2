"""CacheEngine.store and .retrieve against Mooncake's own batch calls on the same bytes and objects, in the same run.

`raw_put_copied` and `raw_get_copied` are the same calls with the one copy that a paged buffer makes necessary, and nothing else: a batch is
copied while the one before is on the network. Where the network's bytes cost processors, as with TCP, that copy is not free, and how
much it costs differs between processes with the memory that each of them got.

The default is Llama-3.1-8B's KV shape (32 layers, 8 KV heads, 128, bf16: 128 KiB per token), over TCP from a store node in another
process. Rounds are interleaved, raw and ours in turn, and medians are compared.

    pd-cache bench engine --json
"""

from __future__ import annotations

import uuid
from contextlib import closing
from functools import partial
from typing import Any

import click

from bench.lib.kv import CHUNK, CopiedPool, PagedPrompt, RawPool, Shape
from bench.lib.pool import local_pool, raw_client
from bench.lib.report import at_least, finish, option, output_options
from bench.lib.stats import gbps, in_turn, timed
from pd_cache.cache import CacheEngine, CacheEngineBuilder
from pd_cache.chunks import CacheMetadata
from pd_cache.config import CacheConfig, NodeSettings
from transfer.staging import StagingPool


def measure(engine: CacheEngine, prompt: PagedPrompt, raw: RawPool, copied: CopiedPool, rounds: int) -> dict[str, Any]:
    """Returns GB/s of each, medians over the rounds; the very first store, into memory not written to before, is listed apart."""
    keys = engine.database.keys(engine.database.name_chunks(prompt.tokens))
    nbytes = len(keys) * prompt.layout.chunk_bytes(engine.chunk_size)
    store = partial(prompt.store, engine)
    first = timed(store)
    raw.remove(keys)
    rates = gbps(
        nbytes,
        in_turn(
            rounds,
            {
                "raw_put_copied": copied.put,
                "_remove_copied": lambda: raw.remove(raw.keys),
                "raw_put": raw.put,
                "store": store,
                "raw_get_copied": copied.get,
                "raw_get": raw.get,
                "_scramble": prompt.scramble,
                "retrieve": partial(prompt.retrieve, engine),
                "_remove": lambda: raw.remove([*raw.keys, *keys]),
            },
        ),
    )
    return {
        **rates,
        "store_ratio": rates["store_gbps"] / rates["raw_put_gbps"],
        "store_ratio_copied": rates["store_gbps"] / rates["raw_put_copied_gbps"],
        "retrieve_ratio": rates["retrieve_gbps"] / rates["raw_get_gbps"],
        "retrieve_ratio_copied": rates["retrieve_gbps"] / rates["raw_get_copied_gbps"],
        "first_store_gbps": nbytes / first / 1e9,
        "bytes_equal": prompt.arrived(),
    }


@click.command()
@option("--tokens", default=4096, type=click.IntRange(CHUNK), help="Of the prompt.")
@option("--layers", default=32, type=click.IntRange(1))
@option("--rounds", default=9, type=click.IntRange(5))
@output_options
def main(tokens: int, layers: int, rounds: int, **output: Any) -> None:
    """Store and retrieve against raw Mooncake."""
    shape = Shape(tokens, layers)
    prompt = PagedPrompt(shape)
    metadata = CacheMetadata.of(f"bench-{uuid.uuid4().hex}", prompt.layout)
    # prefaulted, one slot an object
    memory = StagingPool(shape.chunks * (shape.object_bytes + 4096), shape.object_bytes)
    keys = [f"raw/{uuid.uuid4().hex}" for _ in range(shape.chunks)]
    with local_pool(shape.pool_bytes) as master, raw_client(master) as client:
        settings = NodeSettings(master=master, cache=CacheConfig(chunk_size=CHUNK), transfer=shape.staging)
        with closing(CacheEngineBuilder.get_or_create("bench", settings, metadata, prompt.layout)) as engine:
            engine.wait_available(30)
            raw = RawPool(client, memory, keys, shape.object_bytes)
            with closing(CopiedPool(raw)) as copied:
                results = measure(engine, prompt, raw, copied, rounds)
    first = results["first_store_gbps"] / results["store_gbps"]
    checks = [
        at_least("store_ratio", results["store_ratio"], 0.9),
        at_least("store_ratio_copied", results["store_ratio_copied"], 0.95),
        at_least("retrieve_ratio", results["retrieve_ratio"], 0.9),
        at_least("retrieve_ratio_copied", results["retrieve_ratio_copied"], 0.95),
        at_least("first_store_gbps / store_gbps", first, 0.7),
        at_least("bytes_equal", float(results["bytes_equal"]), 1.0),
    ]
    finish(results, checks, **output)
