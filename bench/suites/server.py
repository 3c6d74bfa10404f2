"""The cache server: what a question costs, what a transfer reaches, and whether memory stays flat.

The server runs in a process of its own (`pd-cache launch cache-server`), over ipc://, with Mooncake's master and a store node in
two others. Transfers have Llama-3.1-8B's KV shape by default (128 KiB a token). Rounds are interleaved with what they are
compared with: `memcpy` of the same bytes into the same shared buffer, and an in-process `CacheEngine` on the same pool.

    pd-cache bench server --json         or  python -m bench.suites.server --json
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
import msgspec
import numpy as np
import psutil
import torch
import zmq

from bench.lib.kv import BLOCK, CHUNK, PagedPrompt, Shape
from bench.lib.pool import cluster_here
from bench.lib.report import at_least, at_most, finish, option, output_options, progress
from bench.lib.stats import gbps, quantile, timed
from bench.lib.two_machines import Crew, Location, Site
from launch.supervise import end, spawn_child
from pd_cache.cache import BlockCache, CacheEngineBuilder, PromptCache
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import CacheServerNode, ClusterConfig, MasterNode, StoreNode
from pd_cache.config import CacheConfig, LocalTier, MooncakeTier, NodeSettings, StorageTier
from pd_cache.layout import KVLayout
from pd_cache.server.adapters import SchedulerAdapter
from pd_cache.server.client import ServerCache
from pd_cache.server.connection import ServerConnection, server_status
from pd_cache.server.protocol import EngineIdentity, Lookup
from transfer.settings import ByteSize

CLIENTS = 4
RATE = 1000
"""Lookups a second, of all clients together."""
LOOKUP_TOKENS = 4096
_PATIENCE_S = 60.0
_WARM_UP = 200
_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
while True:
    socket.send_multipart(socket.recv_multipart())
"""


@contextlib.contextmanager
def cache_server(shape: Shape, *tiers: StorageTier) -> Iterator[tuple[NodeSettings, str, int]]:
    """Yields a pool and a cache server with these tiers on it: settings for an engine of one's own, the server's URL, and its pid."""
    nodes = (
        MasterNode(name="master", port=0, metrics_port=0),
        StoreNode(name="store", segment_size=ByteSize(shape.pool_bytes)),
        CacheServerNode(name="cache"),
    )
    name, cache = f"bench-{uuid.uuid4().hex[:8]}", CacheConfig(chunk_size=CHUNK, tiers=(*tiers, MooncakeTier()))
    with cluster_here(ClusterConfig(name=name, nodes=nodes, transfer=shape.staging, cache=cache)) as cluster:
        plain = CacheConfig(chunk_size=CHUNK)
        settings = NodeSettings(master=cluster.config.master_address, cache=plain, transfer=shape.staging)
        url = cluster.urls["cache"]
        yield settings, url, server_status(url, 10).pid


def served_cache(url: str, metadata: CacheMetadata, caches: dict[str, torch.Tensor]) -> ServerCache:
    """Returns a server's cache, which has been lent these tensors."""
    cache = ServerCache(url, EngineIdentity.of(metadata, CacheConfig(chunk_size=CHUNK)), move_timeout_s=60)
    cache.register_kv_caches(caches)
    return cache


class Transfers:
    """A prompt that moves through the server, through an engine in this process, and by `memcpy`."""

    def __init__(self, prompt: PagedPrompt, settings: NodeSettings, url: str) -> None:
        self.prompt = prompt
        metadata = CacheMetadata.of(f"bench-{uuid.uuid4().hex}", prompt.layout)
        # the engine's tensors lie in shared memory, too: both write to the same pages
        self.server = served_cache(url, metadata, prompt.tensors)
        self.engine = CacheEngineBuilder.get_or_create("bench", settings, metadata, prompt.layout)
        self.nbytes = prompt.whole_tokens * prompt.layout.token_bytes
        self._source = np.ones(self.nbytes, np.uint8)
        storage = prompt.tensors["0"].untyped_storage()
        self._target = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()[: self.nbytes]

    def memcpy(self) -> None:
        np.copyto(self._target, self._source)

    def remove(self) -> None:
        """Takes the prompt out of the pool, so that it is stored again."""
        keys = self.engine.database.keys(self.engine.database.hash_tokens(self.prompt.tokens))
        self.engine.backend.store.remove(keys, timeout=10, force=True)  # type: ignore[attr-defined]

    def wait_ready(self) -> None:
        """Waits until both ways reach the pool."""
        self.engine.wait_available(30)
        _until(lambda: self.server.available, 30)
        prompt, remote = self.prompt, PromptCache(self.server)
        tokens, slots = prompt.tokens[:CHUNK], prompt.source[:CHUNK]
        _until(lambda: remote.store(tokens, kv_caches=prompt.tensors, slot_mapping=slots) > 0, 30)
        self.remove()

    def close(self) -> None:
        self.server.close()
        CacheEngineBuilder.destroy("bench")


def from_the_pool(moves: Transfers, rounds: int) -> dict[str, float]:
    """GB/s of the server and of the engine in this process, medians over the rounds; each goes first in every second one."""
    seconds: dict[str, list[float]] = {
        f"{side}_{what}": [] for side in ("server", "engine") for what in ("store", "retrieve")
    }
    sides: list[tuple[str, BlockCache]] = [("server", moves.server), ("engine", moves.engine)]
    for index in range(rounds + 1):
        for name, cache in sides if index % 2 else sides[::-1]:
            store = timed(partial(moves.prompt.store, cache))
            moves.prompt.scramble()
            retrieve = timed(partial(moves.prompt.retrieve, cache))
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
    moves.prompt.store(moves.server)
    seconds: dict[str, list[float]] = {"memory_retrieve": [], "memcpy": []}
    for _ in range(rounds):
        seconds["memcpy"].append(timed(moves.memcpy))
        moves.prompt.scramble()
        seconds["memory_retrieve"].append(timed(partial(moves.prompt.retrieve, moves.server)))
    rates = gbps(moves.nbytes, seconds)
    return {**rates, "memory_ratio": rates["memory_retrieve_gbps"] / rates["memcpy_gbps"]}


@contextlib.contextmanager
def small_prompt(url: str) -> Iterator[str]:
    """4096 tokens of a tiny model, stored through the server: what lookups find. The model's name."""
    caches = {"0": torch.zeros(LOOKUP_TOKENS // BLOCK, 1, BLOCK, 8)}
    layout = KVLayout.from_tensors(caches)
    metadata = CacheMetadata.of(f"small-{uuid.uuid4().hex}", layout)
    slots, prompt = torch.arange(LOOKUP_TOKENS), list(range(LOOKUP_TOKENS))
    server = served_cache(url, metadata, caches)
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
def moving(prompt: PagedPrompt, settings: NodeSettings, url: str) -> Iterator[Transfers]:
    """`Transfers`, ready."""
    moves = Transfers(prompt, settings, url)
    try:
        moves.wait_ready()
        yield moves
    finally:
        moves.close()


# --- lookups ---------------------------------------------------------------------------------------------------------


def round_trips(url: str, count: int) -> list[float]:
    """Returns the seconds of each of `count` lookups that ask for nothing, one after the other."""
    with contextlib.closing(
        ServerConnection(url, None, "scheduler", EngineIdentity(model="bench", block_size=16))
    ) as client:
        client.wait_ready(_PATIENCE_S)
        return [timed(lambda: client.ask(Lookup("", b""), 5)) for _ in range(_WARM_UP + count)][_WARM_UP:]


def raw_round_trips(count: int) -> list[float]:
    """Returns what ZMQ itself takes for frames of that size between two Python processes: the floor of `round_trips`."""
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder:
        url = f"ipc://{folder}/echo.sock"
        echo = spawn_child((sys.executable, "-c", _ECHO, url))
        try:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.rcvtimeo = int(1000 * _PATIENCE_S)
                socket.connect(url)

                def trip() -> None:
                    socket.send(b"x" * 32)
                    socket.recv()

                return [timed(trip) for _ in range(_WARM_UP + count)][_WARM_UP:]
        finally:
            end([echo], 0, ask=False)


class AskServer(msgspec.Struct, frozen=True):
    """Ask this server for a prompt of `model` that it holds, `RATE` times a second with the others."""

    url: str
    model: str
    seconds: float


class AskingScheduler(Site):
    """One of the clients of `lookups_at_a_rate`: a scheduler that asks when its turn comes."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._open = contextlib.ExitStack()

    def connect(self, job: AskServer) -> None:
        """Gets ready to ask."""
        self._adapter = SchedulerAdapter(job.url, None, EngineIdentity(model=job.model, block_size=16))
        self._open.callback(self._adapter.shutdown)

    def ask(self, job: AskServer) -> list[float]:
        """Asks half a second from now, and then at the rate; each client at a time of its own. Returns the seconds of each lookup, from when
        it was due: they include the wait of one that was delayed by the one before."""
        start = time.monotonic() + 0.5 + int(self.location.node.rpartition("-")[2]) / RATE
        latencies, prompt = [], list(range(LOOKUP_TOKENS))
        for index in range(int(RATE / CLIENTS * job.seconds)):
            due = start + index * CLIENTS / RATE
            time.sleep(max(0.0, due - time.monotonic()))
            found = _look_up(self._adapter, str(index), prompt, 0.0001)
            assert found == LOOKUP_TOKENS, "a lookup missed what is there"
            latencies.append(time.monotonic() - due)
        return latencies

    def close(self) -> None:
        self._open.close()


def _look_up(adapter: SchedulerAdapter, request: str, prompt: list[int], pause_s: float) -> int | None:
    """Looks up in a session, ends it, and returns the tokens found."""
    adapter.maybe_submit_lookup_request(request, token_ids=prompt)
    while (found := adapter.check_lookup_result(request)) is None:
        if pause_s:
            time.sleep(pause_s)
    adapter.end_session(request)
    adapter.cleanup_lookup_result(request)
    return found


def lookups_at_a_rate(url: str, model: str, seconds: float) -> list[float]:
    """Latencies, from when each was due, of `RATE` lookups a second that find 4096 tokens, from four processes."""
    job = AskServer(url, model, seconds)
    with contextlib.closing(Crew(AskingScheduler, Location.here(), CLIENTS)) as crew:
        crew.run(AskingScheduler.connect, job, timeout_s=_PATIENCE_S)
        found = crew.run(AskingScheduler.ask, job, timeout_s=seconds + _PATIENCE_S)
        return [latency for one in found for latency in one]


def memory_growth(url: str, model: str, pid: int, requests: int) -> dict[str, float]:
    """Returns the server's own memory before and after many requests, each a lookup with a session that is ended, after a warm-up."""
    adapter = SchedulerAdapter(url, None, EngineIdentity(model=model, block_size=16))
    prompt = list(range(LOOKUP_TOKENS // 4))

    def resident() -> float:
        memory = psutil.Process(pid).memory_info()
        return float(memory.rss - memory.shared) / 2**20  # what it shares with engines does not count

    def ask(count: int) -> None:
        for index in range(count):
            _look_up(adapter, str(index), prompt, 0.0)

    try:
        ask(max(1000, requests // 10))
        before = resident()
        seconds = timed(lambda: ask(requests))
        return {"mib_before": before, "mib_after": resident(), "requests_per_s": requests / seconds}
    finally:
        adapter.shutdown()


# --- the whole -------------------------------------------------------------------------------------------------------


@click.command()
@option("--tokens", default=4096, type=click.IntRange(CHUNK), help="Of the prompt that is transferred.")
@option("--layers", default=32, type=click.IntRange(1))
@option("--rounds", default=7, type=click.IntRange(3))
@option("--questions", default=20_000, type=click.IntRange(100), help="Empty lookups.")
@option("--seconds", default=10.0, type=click.FloatRange(1), help="Of 1000 lookups each.")
@option("--requests", default=100_000, type=click.IntRange(1000), help="While memory is watched.")
@output_options
def main(tokens: int, layers: int, rounds: int, questions: int, seconds: float, requests: int, **output: Any) -> None:
    """The cache server's questions, transfers and memory."""
    shape = Shape(tokens, layers)
    prompt = PagedPrompt(shape)
    # the whole prompt, as read from the pool or stored, fits into the server's own memory
    local = LocalTier(capacity=ByteSize(int(1.25 * shape.nbytes) + (64 << 20)))
    results: dict[str, Any] = {}
    with progress() as bar:
        steps = iter(bar.track(range(5), description="server"))
        with cache_server(shape) as (settings, url, _):
            next(steps)
            trips = round_trips(url, questions)
            results["empty_lookup_p50_us"] = quantile(trips, 0.5) * 1e6
            results["empty_lookup_p99_us"] = quantile(trips, 0.99) * 1e6
            results["zmq_echo_p50_us"] = quantile(echoes := raw_round_trips(questions), 0.5) * 1e6
            results["zmq_echo_p99_us"] = quantile(echoes, 0.99) * 1e6
            next(steps)
            with moving(prompt, settings, url) as moves:
                results |= from_the_pool(moves, rounds)
            next(steps)
            with small_prompt(url) as model:
                latencies = lookups_at_a_rate(url, model, seconds)
            results["lookup_p50_ms"] = quantile(latencies, 0.5) * 1e3
            results["lookup_p99_ms"] = quantile(latencies, 0.99) * 1e3
        with cache_server(shape, local) as (settings, url, pid):
            next(steps)
            with moving(prompt, settings, url) as moves:
                results |= from_memory(moves, rounds)
            next(steps)
            with small_prompt(url) as model:
                results |= memory_growth(url, model, pid, requests)
    checks = [
        at_most("empty_lookup_p50_us", results["empty_lookup_p50_us"], 150),
        at_most("empty_lookup_p99_us", results["empty_lookup_p99_us"], 1000),
        at_most(f"lookup_p99_ms at {RATE}/s", results["lookup_p99_ms"], 5),
        at_least("store_ratio", results["store_ratio"], 0.95),
        at_least("retrieve_ratio", results["retrieve_ratio"], 0.95),
        at_least("memory_ratio", results["memory_ratio"], 0.7),
        at_most("mib_after - mib_before", results["mib_after"] - results["mib_before"], 2),
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
