"""What does an engine's cache cost? Reports `store_ratio` and `retrieve_ratio`, in comparison with Mooncake's
own batch calls for the same bytes.

`raw_put_copied` and `raw_get_copied` are the same calls with the copy that a paged buffer needs: a batch is
copied while the batch before it is on the network. Over TCP, transfers need the processors, too, so this copy
is not free. Its cost differs between processes, depending on the memory that each has got.

The prompt has Llama-3.1-8B's KV shape (32 layers, 8 KV heads, 128, bf16: 128 KiB per token), over TCP from a
store node in another process. Rounds are interleaved, raw and ours in turn, and medians are compared.

`gather` and `scatter` are the copier alone, between the paged cache and staging memory; they include the
checksum. `to_host` and `to_device` are one copy of as many contiguous bytes. `checksum` is the hash alone.

    pd-cache bench engine [--device cuda] --json
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import click
import torch

from bench.lib.kv import CHUNK, CopiedPool, Device, FlatCopy, PagedPrompt, RawPool, Shape, device_option
from bench.lib.pool import local_pool, raw_client
from bench.lib.report import all_at_least, at_least, finish, option, output_options
from bench.lib.stats import gbps, in_turn, timed
from pd_cache.cache import CacheEngine, CacheEngineBuilder
from pd_cache.chunks import CacheMetadata
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.layout import checksum
from pd_cache.paged import host_pin, open_copier
from pd_cache.paged.base import PendingCopy, Slots, plan
from transfer.staging import StagingPool


def measure(
    engine: CacheEngine, prompt: PagedPrompt, raw: RawPool, copied: CopiedPool, rounds: int
) -> dict[str, Any]:
    """Returns the GB/s of each step, as medians over the rounds. The first store, into memory that was never
    written to, is listed separately."""
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


def measure_copier(prompt: PagedPrompt, memory: StagingPool, rounds: int) -> dict[str, Any]:
    """Returns the GB/s between the paged cache and `memory`, which has a slot for each chunk, and the GB/s of
    a plain copy."""
    nbytes = CHUNK * prompt.layout.token_bytes
    chunks = plan(Slots(prompt.source), prompt.layout, CHUNK)
    with ExitStack() as stack:
        copier = stack.enter_context(closing(open_copier(list(prompt.tensors.values()), prompt.layout)))
        slots = [slot for _ in chunks if (slot := memory.lease(0.0)) is not None]
        for slot in slots:
            stack.callback(slot.release)
        views = [slot.view[:nbytes] for slot in slots]
        payloads = [torch.frombuffer(view, dtype=torch.uint8) for view in views]
        flat = FlatCopy.new(views, prompt.device)

        def copy(start: Callable[[torch.Tensor, torch.Tensor], PendingCopy]) -> None:
            for pending in [start(*pair) for pair in zip(chunks, payloads, strict=True)]:
                pending.wait()

        rates = gbps(
            nbytes * len(chunks),
            in_turn(
                rounds,
                {
                    "to_host": flat.to_host,
                    # `scatter` puts back what this has read, so the prompt stays as it is
                    "gather": partial(copy, copier.gather),
                    "checksum": lambda: [checksum(view) for view in views],
                    "scatter": partial(copy, copier.scatter),
                    "to_device": flat.to_device,
                },
            ),
        )
    return {
        **rates,
        "gather_ratio": rates["gather_gbps"] / rates["to_host_gbps"],
        "scatter_ratio": rates["scatter_gbps"] / rates["to_device_gbps"],
    }


@click.command()
@option("--rounds", default=9, type=click.IntRange(5))
@device_option
@output_options
def main(rounds: int, device: Device, **output: Any) -> None:
    """Store and retrieve against raw Mooncake."""
    shape = Shape()
    prompt = PagedPrompt(shape, device)
    metadata = CacheMetadata.of(f"bench-{uuid.uuid4().hex}", prompt.layout)
    # prefaulted, one slot an object
    memory = StagingPool(shape.chunks * (shape.object_bytes + 4096), shape.object_bytes, pin=host_pin())
    copier = measure_copier(prompt, memory, rounds)
    keys = [f"raw/{uuid.uuid4().hex}" for _ in range(shape.chunks)]
    with local_pool(shape.pool_bytes) as master, raw_client(master) as client:
        settings = NodeSettings(master=master, cache=CacheConfig(chunk_size=CHUNK), transfer=shape.staging)
        with closing(CacheEngineBuilder.get_or_create("bench", settings, metadata, prompt.layout)) as engine:
            engine.wait_available(30)
            raw = RawPool(client, memory, keys, shape.object_bytes)
            with closing(CopiedPool(raw, prompt.device)) as copied:
                results = copier | measure(engine, prompt, raw, copied, rounds)
    first = results["first_store_gbps"] / results["store_gbps"]
    checks = all_at_least(
        results,
        store_ratio=0.9,
        store_ratio_copied=0.95,
        retrieve_ratio=0.9,
        retrieve_ratio_copied=0.95,
        bytes_equal=1.0,
    )
    checks.append(at_least("first_store_gbps / store_gbps", first, 0.7))
    if device == "cuda":
        checks += all_at_least(results, gather_ratio=0.9, scatter_ratio=0.9)
    finish(results, checks, **output)
