"""What does the cache server cost? Reports `store_ratio` and `retrieve_ratio`, in comparison with a
`CacheEngine` in this process; and `memory_ratio`, in comparison with memcpy.

The server, Mooncake's master and a store node are processes of their own. Transfers have Llama-3.1-8B's KV
shape (128 KiB a token). The server takes turns with its peers: the engine has the same pool, and
memcpy copies the same bytes into the same shared buffer.

    pd-cache bench server [--device cuda] --json
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import click
import torch

from bench.lib.kv import BLOCK, CHUNK, Device, FlatCopy, PagedPrompt, Shape, device_option
from bench.lib.pool import cluster_here
from bench.lib.report import all_at_least, all_at_most, at_most, finish, output_options
from bench.lib.stats import Steps, gbps, in_turn, quantile, timed
from bench.lib.two_machines import Crew, Location, Site
from pd_cache.cache import BlockCache, CacheEngineBuilder, PromptCache
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import CacheServerNode, ClusterConfig, MasterNode, StoreNode
from pd_cache.config import CacheConfig, LocalTier, MooncakeTier, NodeSettings, StorageTier
from pd_cache.layout import KVLayout
from pd_cache.paged import host_pin
from pd_cache.server.client import RemoteCache
from pd_cache.server.connection import ServerConnection
from pd_cache.server.protocol import EngineIdentity, Lookup
from pd_cache.tiers.mooncake import MooncakeBackend
from transfer.deadlines import end_in
from transfer.staging import StagingPool

CLIENTS = 4
RATE = 1000
"""Lookups a second, of all clients together."""
LOOKUP_TOKENS = 4096
_ROUNDS, _QUESTIONS, _SECONDS = 7, 20_000, 10.0
_PATIENCE_S = 60.0
_WARM_UP = 200


@contextlib.contextmanager
def cache_server(shape: Shape, *tiers: StorageTier) -> Iterator[tuple[NodeSettings, str]]:
    """Runs a pool, and a cache server with these tiers over it. Yields settings for another engine, and the
    server's URL."""
    nodes = (
        MasterNode(name="master", port=0, metrics_port=0),
        StoreNode(name="store", segment_size=shape.pool_bytes),
        CacheServerNode(name="cache"),
    )
    name = f"bench-{uuid.uuid4().hex[:8]}"
    cache = CacheConfig(chunk_size=CHUNK, tiers=(*tiers, MooncakeTier()))
    with cluster_here(ClusterConfig(name=name, nodes=nodes, transfer=shape.staging, cache=cache)) as cluster:
        plain = CacheConfig(chunk_size=CHUNK)
        settings = NodeSettings(master=cluster.config.master_address, cache=plain, transfer=shape.staging)
        yield settings, cluster.urls["cache"]


@contextlib.contextmanager
def served(
    url: str, metadata: CacheMetadata, caches: dict[str, torch.Tensor], tokens: list[int], slots: torch.Tensor
) -> Iterator[RemoteCache]:
    """Yields a server's cache that has got these tensors and holds these tokens."""
    identity = EngineIdentity.of(metadata, CacheConfig(chunk_size=CHUNK))
    with contextlib.closing(RemoteCache(url, identity, move_timeout_s=60)) as cache:
        cache.register_kv_caches(caches)
        cache.connection.wait_ready(_PATIENCE_S)
        prompts, deadline = PromptCache(cache), time.monotonic() + 30
        # the server's client of the pool opens in the background
        while prompts.lookup(tokens) < len(tokens):
            if time.monotonic() > deadline:
                raise RuntimeError("the cache server was not ready for use within 30 s")
            prompts.store(tokens, kv_caches=caches, slot_mapping=slots)
        yield cache


def from_the_pool(prompt: PagedPrompt, settings: NodeSettings, url: str) -> dict[str, float]:
    """Returns the GB/s of the server and of an engine in this process, which take turns: medians over the
    rounds."""
    metadata = CacheMetadata.of(f"bench-{uuid.uuid4().hex}", prompt.layout)
    with (
        served(url, metadata, prompt.tensors, prompt.tokens[:CHUNK], prompt.source[:CHUNK]) as server,
        # its tensors lie in shared memory, too, so both write to the same pages
        contextlib.closing(
            CacheEngineBuilder.get_or_create("bench", settings, metadata, prompt.layout)
        ) as engine,
    ):
        engine.wait_available(30)
        pool, keys = engine.backend, engine.database.keys(engine.database.name_chunks(prompt.tokens))
        assert isinstance(pool, MooncakeBackend)

        def forget() -> None:
            pool.batched_remove(keys, end=end_in(10), force=True)

        def arrived(name: str) -> None:
            assert prompt.arrived(), f"other bytes came back from the {name}"

        forget()
        steps: Steps = {}
        sides: list[tuple[str, BlockCache]] = [("server", server), ("engine", engine)]
        for name, cache in sides:
            steps |= {
                f"{name}_store": partial(prompt.store, cache),
                f"_{name}_scramble": prompt.scramble,
                f"{name}_retrieve": partial(prompt.retrieve, cache),
                f"_{name}_arrived": partial(arrived, name),
                f"_{name}_forget": forget,
            }
        rates = gbps(prompt.nbytes, in_turn(_ROUNDS, steps))
    return {
        **rates,
        "store_ratio": rates["server_store_gbps"] / rates["engine_store_gbps"],
        "retrieve_ratio": rates["server_retrieve_gbps"] / rates["engine_retrieve_gbps"],
    }


def from_memory(prompt: PagedPrompt, url: str) -> dict[str, float]:
    """Returns the GB/s of a retrieve from the server's own memory, and of memcpy into the same buffer."""
    metadata = CacheMetadata.of(f"bench-{uuid.uuid4().hex}", prompt.layout)
    with served(url, metadata, prompt.tensors, prompt.tokens, prompt.source) as server:
        # checked now, because memcpy overwrites the bytes to compare with
        prompt.scramble()
        prompt.retrieve(server)
        assert prompt.arrived(), "other bytes came back from the server's memory"
        memory = StagingPool(prompt.nbytes, prompt.nbytes, pin=host_pin())
        slot = memory.lease(0.0)
        assert slot is not None
        storage = prompt.tensors["0"].untyped_storage()
        target = torch.empty(0, dtype=torch.uint8, device=prompt.device).set_(storage)[: prompt.nbytes]
        steps: Steps = {
            "memcpy": FlatCopy([slot.view], target.unsqueeze(0)).to_device,
            "_scramble": prompt.scramble,
            "memory_retrieve": partial(prompt.retrieve, server),
        }
        rates = gbps(prompt.nbytes, in_turn(_ROUNDS, steps))
    return {**rates, "memory_ratio": rates["memory_retrieve_gbps"] / rates["memcpy_gbps"]}


# --- lookups ------------------------------------------------------------------------------------------------


def round_trips(url: str) -> list[float]:
    """Returns the seconds of each of `_QUESTIONS` lookups that ask for nothing, one after the other."""
    with contextlib.closing(
        ServerConnection(url, None, "scheduler", EngineIdentity(model="bench", block_size=16))
    ) as client:
        client.wait_ready(_PATIENCE_S)
        return [timed(lambda: client.ask(Lookup("", ()), 5)) for _ in range(_WARM_UP + _QUESTIONS)][_WARM_UP:]


class AskServer(NamedTuple):
    """The job to ask this server for a prompt of `model` that it holds. All clients together ask `RATE` times
    a second."""

    url: str
    model: str
    seconds: float


class AskingScheduler(Site):
    """One of the clients of `lookups_at_a_rate`: a scheduler that asks when its turn comes."""

    def connect(self, job: AskServer) -> None:
        """Connects to the server."""
        identity = EngineIdentity(model=job.model, block_size=16)
        self._cache = RemoteCache(job.url, identity, kind="scheduler")
        self.held.callback(self._cache.close)

    def ask(self, job: AskServer) -> list[float]:
        """Asks half a second from now, and then at the rate; each client at a time of its own. Returns the
        seconds of each lookup, from when it was due: a lookup that had to wait for the one before it includes
        that wait."""
        start = time.monotonic() + 0.5 + int(self.location.node.rpartition("-")[2]) / RATE
        latencies, prompt = [], list(range(LOOKUP_TOKENS))
        for index in range(int(RATE / CLIENTS * job.seconds)):
            due = start + index * CLIENTS / RATE
            time.sleep(max(0.0, due - time.monotonic()))
            found = self._cache.find(self._cache.name_chunks(prompt), session=str(index))
            self._cache.end(str(index))
            assert found.chunks == LOOKUP_TOKENS // CHUNK, "a lookup missed what is there"
            latencies.append(time.monotonic() - due)
        return latencies


def lookups_at_a_rate(url: str) -> list[float]:
    """Makes `RATE` lookups a second, from four processes; each finds 4096 tokens of a tiny model. Returns the
    seconds of each lookup, from the time when it was due."""
    caches = {"0": torch.zeros(LOOKUP_TOKENS // BLOCK, 1, BLOCK, 8)}
    metadata = CacheMetadata.of(f"small-{uuid.uuid4().hex}", KVLayout.from_tensors(caches))
    job = AskServer(url, metadata.model, _SECONDS)
    with (
        served(url, metadata, caches, list(range(LOOKUP_TOKENS)), torch.arange(LOOKUP_TOKENS)),
        contextlib.closing(Crew(AskingScheduler, Location.here(), CLIENTS)) as crew,
    ):
        crew.everywhere(AskingScheduler.connect, job, timeout_s=_PATIENCE_S)
        found = crew.everywhere(AskingScheduler.ask, job, timeout_s=_SECONDS + _PATIENCE_S)
        return [latency for latencies in found.values() for latency in latencies]


# --- the whole ----------------------------------------------------------------------------------------------


@click.command()
@device_option
@output_options
def main(device: Device, **output: Any) -> None:
    """The cache server's questions and transfers."""
    shape = Shape()
    prompt = PagedPrompt(shape, device)
    # the whole prompt, as read from the pool or stored, fits into the server's own memory
    local = LocalTier(capacity=int(1.25 * shape.nbytes) + (64 << 20))
    results: dict[str, Any] = {}
    with cache_server(shape) as (settings, url):
        trips = round_trips(url)
        results["empty_lookup_p50_us"] = quantile(trips, 0.5) * 1e6
        results["empty_lookup_p99_us"] = quantile(trips, 0.99) * 1e6
        results |= from_the_pool(prompt, settings, url)
        latencies = lookups_at_a_rate(url)
        results["lookup_p50_ms"] = quantile(latencies, 0.5) * 1e3
        results["lookup_p99_ms"] = quantile(latencies, 0.99) * 1e3
    with cache_server(shape, local) as (_, url):
        results |= from_memory(prompt, url)
    checks = [
        *all_at_most(results, empty_lookup_p50_us=150, empty_lookup_p99_us=1000),
        at_most(f"lookup_p99_ms at {RATE}/s", results["lookup_p99_ms"], 5),
        *all_at_least(results, store_ratio=0.95, retrieve_ratio=0.95, memory_ratio=0.65),
    ]
    finish(results, checks, **output)
