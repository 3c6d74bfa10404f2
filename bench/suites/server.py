"""The cache server: what a question costs, what a transfer reaches, and whether memory stays flat.

The server runs in a process of its own (`pd-cache launch cache-server`), over ipc://, with Mooncake's master and a store node in
two others. Transfers have Llama-3.1-8B's KV shape by default (128 KiB a token). Rounds are interleaved with what they are
compared with: `memcpy` of the same bytes into the same shared buffer, and an in-process `CacheEngine` on the same pool.

    pd-cache bench server --json         or  python -m bench.suites.server --json
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from bench.lib.kv import PagedPrompt, Shape, gbps, shape_options, timed
from bench.lib.report import Check, finish, option, output_options, progress, size
from bench.lib.server_lookups import (
    LOOKUP_TOKENS,
    RATE,
    lookups_at_a_rate,
    memory_growth,
    raw_round_trips,
    round_trips,
)
from bench.lib.stats import quantile
from launch.up import quiet, running
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import CacheServerNode, ClusterConfig, MasterNode, StoreNode, dump_config, read_config
from pd_cache.config import CacheConfig, LocalTier, MooncakeTier, NodeSettings
from pd_cache.engine import CacheEngineBuilder
from pd_cache.layout import KVLayout
from pd_cache.prompts import PromptCache
from pd_cache.server.client import ServerCache
from pd_cache.server.connection import server_status
from pd_cache.server.protocol import EngineIdentity
from transfer.settings import ByteSize, TransferSettings


@contextlib.contextmanager
def cache_server(segment: int, staging: ByteSize, cache: CacheConfig) -> Iterator[tuple[NodeSettings, str, int]]:
    """Yields a pool and a cache server on it: settings for an engine of one's own, the server's URL, and its pid."""
    nodes = (
        MasterNode(name="master", port=0, metrics_port=0),
        StoreNode(name="store", segment_size=ByteSize(segment)),
        CacheServerNode(name="cache"),
    )
    transfer = TransferSettings(staging_size=staging)
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder:
        file = Path(folder) / "server.yaml"
        name = f"bench-{uuid.uuid4().hex[:8]}"
        file.write_text(dump_config(ClusterConfig(name=name, nodes=nodes, transfer=transfer, cache=cache)))
        config, source = read_config(file)
        with running(config, source, sink=quiet) as cluster:
            plain = CacheConfig(chunk_size=cache.chunk_size)
            settings = NodeSettings(master=cluster.config.master_address, cache=plain, transfer=transfer)
            url = cluster.urls["cache"]
            yield settings, url, server_status(url, 10).pid


def served_cache(url: str, metadata: CacheMetadata, caches: dict[str, torch.Tensor], chunk: int) -> ServerCache:
    """Returns a server's cache, which has been lent these tensors."""
    cache = ServerCache(url, EngineIdentity.of(metadata, CacheConfig(chunk_size=chunk)), move_timeout_s=60)
    cache.register_kv_caches(caches)
    return cache


class Transfers:
    """A prompt that moves through the server, through an engine in this process, and by `memcpy`."""

    def __init__(self, prompt: PagedPrompt, settings: NodeSettings, url: str, chunk: int) -> None:
        self.prompt = prompt
        self.metadata = CacheMetadata.of(f"bench-{uuid.uuid4().hex}", prompt.layout)
        # the engine's tensors lie in shared memory, too: both write to the same pages
        self.caches = {str(index): tensor for index, tensor in enumerate(prompt.cache)}
        self.server = served_cache(url, self.metadata, self.caches, chunk)
        self.remote = PromptCache(self.server)
        self.engine = CacheEngineBuilder.get_or_create("bench", settings, self.metadata, prompt.layout)
        self.own = PromptCache(self.engine)
        self.whole = len(prompt.tokens) // chunk * chunk
        self.nbytes = self.whole * prompt.layout.token_bytes
        self._source = np.ones(self.nbytes, np.uint8)
        storage = prompt.cache[0].untyped_storage()
        self._target = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()[: self.nbytes]

    def memcpy(self) -> None:
        np.copyto(self._target, self._source)

    def store(self, cache: Any) -> None:
        stored = cache.store(self.prompt.tokens, kv_caches=self.caches, slot_mapping=self.prompt.source)
        assert stored == self.whole, f"only {stored} tokens were stored"

    def retrieve(self, cache: Any) -> None:
        mask = cache.retrieve(self.prompt.tokens, kv_caches=self.caches, slot_mapping=self.prompt.target)
        assert int(mask.sum()) == self.whole, f"only {int(mask.sum())} tokens were loaded"

    @property
    def keys(self) -> list[str]:
        """The prompt's, in the pool."""
        return self.engine.database.keys(self.engine.database.hash_tokens(self.prompt.tokens))

    def remove(self) -> None:
        """Takes the prompt out of the pool, so that it is stored again."""
        self.engine.backend.store.remove(self.keys, timeout=10, force=True)  # type: ignore[attr-defined]

    def wait_ready(self) -> None:
        """Waits until both ways reach the pool."""
        self.engine.wait_available(30)
        _until(lambda: self.server.available, 30)

        def stored() -> bool:
            slots = self.prompt.source[: self.engine.chunk_size]
            tokens = self.prompt.tokens[: self.engine.chunk_size]
            return self.remote.store(tokens, kv_caches=self.caches, slot_mapping=slots) > 0

        _until(stored, 30)
        self.remove()

    def close(self) -> None:
        self.server.close()
        CacheEngineBuilder.destroy("bench")


def from_the_pool(moves: Transfers, rounds: int) -> dict[str, float]:
    """GB/s of the server and of the engine in this process, medians over the rounds; each goes first in every second one."""
    seconds: dict[str, list[float]] = {
        f"{side}_{what}": [] for side in ("server", "engine") for what in ("store", "retrieve")
    }
    sides = [("server", moves.remote), ("engine", moves.own)]
    for index in range(rounds + 1):
        for name, cache in sides if index % 2 else sides[::-1]:
            store = timed(lambda cache=cache: moves.store(cache))  # type: ignore[misc]
            moves.prompt.scramble()
            retrieve = timed(lambda cache=cache: moves.retrieve(cache))  # type: ignore[misc]
            assert moves.prompt.arrived(), f"other bytes came back from the {name}"
            moves.remove()
            if index:  # the first round writes to memory that was not written to before
                seconds[f"{name}_store"].append(store)
                seconds[f"{name}_retrieve"].append(retrieve)
    rates = gbps(moves.nbytes, seconds)
    return {
        **rates,
        "store_ratio": rates["server_store_gbps"] / rates["engine_store_gbps"],
        "retrieve_ratio": rates["server_retrieve_gbps"] / rates["engine_retrieve_gbps"],
    }


def from_memory(moves: Transfers, rounds: int) -> dict[str, float]:
    """GB/s of a retrieve from the server's own memory, and of memcpy into the same buffer."""
    moves.store(moves.remote)
    seconds: dict[str, list[float]] = {"memory_retrieve": [], "memcpy": []}
    for _ in range(rounds):
        seconds["memcpy"].append(timed(moves.memcpy))
        moves.prompt.scramble()
        seconds["memory_retrieve"].append(timed(lambda: moves.retrieve(moves.remote)))
    rates = gbps(moves.nbytes, seconds)
    return {**rates, "memory_ratio": rates["memory_retrieve_gbps"] / rates["memcpy_gbps"]}


@contextlib.contextmanager
def small_prompt(url: str, chunk: int, block: int) -> Iterator[str]:
    """4096 tokens of a tiny model, stored through the server: what lookups find. The model's name."""
    caches = {"0": torch.zeros(LOOKUP_TOKENS // block, 1, block, 8)}
    layout = KVLayout.from_tensors(caches)
    metadata = CacheMetadata.of(f"small-{uuid.uuid4().hex}", layout)
    slots, prompt = torch.arange(LOOKUP_TOKENS), list(range(LOOKUP_TOKENS))
    server = served_cache(url, metadata, caches, chunk)
    remote = PromptCache(server)
    try:

        def stored() -> bool:
            remote.store(prompt, kv_caches=caches, slot_mapping=slots)
            return remote.lookup(prompt) == len(prompt)

        _until(stored, 30)  # the server's client of the pool opens in the background
        yield metadata.model
    finally:
        server.close()


@contextlib.contextmanager
def moving(prompt: PagedPrompt, settings: NodeSettings, url: str, chunk: int) -> Iterator[Transfers]:
    """`Transfers`, ready."""
    moves = Transfers(prompt, settings, url, chunk)
    try:
        moves.wait_ready()
        yield moves
    finally:
        moves.close()


@click.command()
@shape_options
@option("--rounds", default=7, type=click.IntRange(3))
@option("--staging", default="512MiB", callback=size, help="Size of the staging memory.")
@option("--questions", default=20_000, type=click.IntRange(100), help="Empty lookups.")
@option("--seconds", default=10.0, type=click.FloatRange(1), help="Of 1000 lookups each.")
@option("--requests", default=100_000, type=click.IntRange(1000), help="While memory is watched.")
@output_options
def main(
    shape: Shape, rounds: int, staging: ByteSize, questions: int, seconds: float, requests: int, **output: Any
) -> None:
    """The cache server's questions, transfers and memory."""
    prompt, chunk, block = PagedPrompt(shape), shape.chunk, shape.block
    room = shape.pool_bytes
    plain = CacheConfig(chunk_size=chunk)
    # the whole prompt, as read from the pool or stored, fits into the server's own memory
    capacity = ByteSize(int(1.25 * shape.tokens * prompt.layout.token_bytes) + (64 << 20))
    tiered = CacheConfig(chunk_size=chunk, tiers=(LocalTier(capacity=capacity), MooncakeTier()))
    results: dict[str, Any] = {}
    with progress() as bar:
        steps = iter(bar.track(range(5), description="server"))
        with cache_server(room, staging, plain) as (settings, url, pid):
            next(steps)
            trips = round_trips(url, questions)
            results["empty_lookup_p50_us"] = quantile(trips, 0.5) * 1e6
            results["empty_lookup_p99_us"] = quantile(trips, 0.99) * 1e6
            results["zmq_echo_p50_us"] = quantile(echoes := raw_round_trips(questions), 0.5) * 1e6
            results["zmq_echo_p99_us"] = quantile(echoes, 0.99) * 1e6
            next(steps)
            with moving(prompt, settings, url, chunk) as moves:
                results |= from_the_pool(moves, rounds)
            next(steps)
            with small_prompt(url, chunk, block) as model:
                latencies = lookups_at_a_rate(url, model, seconds)
            results["lookup_p50_ms"] = quantile(latencies, 0.5) * 1e3
            results["lookup_p99_ms"] = quantile(latencies, 0.99) * 1e3
        with cache_server(room, staging, tiered) as (settings, url, pid):
            next(steps)
            with moving(prompt, settings, url, chunk) as moves:
                results |= from_memory(moves, rounds)
            next(steps)
            with small_prompt(url, chunk, block) as model:
                results |= memory_growth(url, model, pid, requests)
    checks = [
        Check("empty_lookup_p50_us", results["empty_lookup_p50_us"], 150, at_least=False),
        Check("empty_lookup_p99_us", results["empty_lookup_p99_us"], 1000, at_least=False),
        Check(f"lookup_p99_ms at {RATE}/s", results["lookup_p99_ms"], 5, at_least=False),
        Check("store_ratio", results["store_ratio"], 0.95, at_least=True),
        Check("retrieve_ratio", results["retrieve_ratio"], 0.95, at_least=True),
        Check("memory_ratio", results["memory_ratio"], 0.7, at_least=True),
        Check("mib_after - mib_before", results["mib_after"] - results["mib_before"], 2, at_least=False),
    ]
    finish(results, checks, **output)


def _until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"the cache server was not ready for use within {seconds:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
