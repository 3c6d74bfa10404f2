"""CacheEngine.store and .retrieve against Mooncake's own batch calls on the same bytes and objects, in the same run.

Llama-3.1-8B's KV shape by default (32 layers, 8 KV heads, 128, bf16: 128 KiB a token), over TCP from a store node in
another process. Rounds are interleaved, raw and ours in turn, and medians are compared. A thread that wants to run each
millisecond tells for how long all of Python stood still meanwhile: an engine's own threads stand still with it.

    pd-cache bench engine --json         or  python -m bench.suites.engine --json
    pd-cache bench engine --busy 12      beside twelve programs that compute
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
import torch

from bench.lib.pool import local_pool, raw_client
from bench.lib.report import Check, finish, progress
from launch.process import spawn_child
from pd_cache.backends.objects import TRAILER_BYTES
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.engine import CacheEngine, CacheEngineBuilder
from pd_cache.layout import KVLayout
from pd_cache.tokens import CacheMetadata
from transfer.settings import ByteSize, TransferSettings
from transfer.staging import StagingPool


class RawPool:
    """Mooncake's batch calls from and into one registered buffer that holds all objects of a prompt."""

    def __init__(self, client: Any, memory: StagingPool, keys: list[str], object_bytes: int) -> None:
        """`memory` has a slot for each object."""
        self._client = client
        self._memory = memory
        assert memory.register_with(client) == 0
        self.slots = [slot for _ in keys if (slot := memory.try_lease()) is not None]
        self._addresses = [slot.address for slot in self.slots]
        self._sizes = [object_bytes] * len(keys)
        self.keys = keys

    def put(self) -> None:
        codes = self._client.batch_put_from(self.keys, self._addresses, self._sizes)
        assert not any(codes), codes

    def get(self) -> None:
        assert self._client.batch_get_into(self.keys, self._addresses, self._sizes) == self._sizes

    def remove(self, keys: list[str]) -> None:
        assert not any(self._client.batch_remove(keys, True))


class Prompt:
    """One prompt's KV in random blocks of a paged cache, and other random blocks to load it into."""

    def __init__(self, tokens: int, chunk: int, block: int, layers: int, kv_heads: int, head_dim: int) -> None:
        blocks = -(-tokens // block)
        shape = (layers, 2 * blocks, kv_heads, block, 2 * head_dim)
        self._bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
        self.cache = list(self._bits.view(torch.bfloat16).unbind())
        self.layout = KVLayout.from_tensors(self.cache)
        self.tokens = list(range(tokens))
        self._order = (torch.randperm(blocks), blocks + torch.randperm(blocks))
        self._whole_blocks = tokens // chunk * chunk // block
        self.source, self.target = (
            (blocks_of.unsqueeze(1) * block + torch.arange(block)).flatten()[:tokens] for blocks_of in self._order
        )

    def scramble(self) -> None:
        """Make the target differ from the source everywhere."""
        source, target = self._order
        self._bits[:, target] = self._bits[:, source] ^ 1

    def arrived(self) -> bool:
        """Whether source and target hold the same bytes, as far as whole chunks reach."""
        source, target = (order[: self._whole_blocks] for order in self._order)
        return torch.equal(self._bits[:, source], self._bits[:, target])


class Heartbeat(threading.Thread):
    """A Python thread that wants to run each millisecond."""

    _BEAT_S = 0.001

    def __init__(self) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._over = threading.Event()
        self._last = time.perf_counter()
        self._longest = 0.0

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.is_set():
            time.sleep(self._BEAT_S)
            now = time.perf_counter()
            self._longest, self._last = max(self._longest, now - self._last - self._BEAT_S), now

    def longest(self) -> float:
        """Seconds of the longest standstill since this was asked before."""
        longest, self._longest = self._longest, 0.0
        return longest


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """So many programs that compute beside us."""
    programs = [spawn_child((sys.executable, "-c", "while True: pass")) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def timed(function: Callable[[], object]) -> float:
    """Seconds that the call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(engine: CacheEngine, prompt: Prompt, raw: RawPool, rounds: Iterable[int]) -> dict[str, Any]:
    """GB/s of each, medians over the rounds; the very first store, into memory nobody has written to, apart.

    And the longest standstill in any round of each.
    """
    keys = engine.database.keys(engine.database.hash_tokens(prompt.tokens))
    nbytes = len(keys) * prompt.layout.chunk_bytes(engine.chunk_size)

    def store() -> None:
        stored = engine.store(prompt.tokens, kv_caches=prompt.cache, slot_mapping=prompt.source)
        assert stored == len(keys) * engine.chunk_size, f"only {stored} tokens were stored"

    def retrieve() -> None:
        mask = engine.retrieve(prompt.tokens, kv_caches=prompt.cache, slot_mapping=prompt.target)
        assert int(mask.sum()) == len(keys) * engine.chunk_size, f"only {int(mask.sum())} tokens were loaded"

    first = timed(store)
    retrieve()
    raw.remove(keys)
    raw.put()
    raw.get()
    raw.remove(raw.keys)
    seconds: dict[str, list[float]] = {"store": [], "retrieve": [], "raw_put": [], "raw_get": []}
    still = dict.fromkeys(seconds, 0.0)

    def measured(name: str, function: Callable[[], object]) -> None:
        heart.longest()
        seconds[name].append(timed(function))
        still[name] = max(still[name], heart.longest())

    with Heartbeat() as heart:
        for _ in rounds:
            measured("raw_put", raw.put)
            measured("store", store)
            measured("raw_get", raw.get)
            prompt.scramble()
            measured("retrieve", retrieve)
            raw.remove(raw.keys)
            raw.remove(keys)
    gbps = {f"{name}_gbps": nbytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    return {
        **gbps,
        "store_ratio": gbps["store_gbps"] / gbps["raw_put_gbps"],
        "retrieve_ratio": gbps["retrieve_gbps"] / gbps["raw_get_gbps"],
        "first_store_gbps": nbytes / first / 1e9,
        **{f"{name}_standstill_ms": longest * 1e3 for name, longest in still.items()},
        "bytes_equal": prompt.arrived(),
    }


def size(context: click.Context, parameter: click.Parameter, value: str) -> ByteSize:
    """A click callback for sizes such as 4GiB."""
    try:
        return ByteSize.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(1))
@click.option("--chunk", default=256, show_default=True, type=click.IntRange(1))
@click.option(
    "--block", default=16, show_default=True, type=click.IntRange(1), help="Tokens a block of the paged cache."
)
@click.option("--layers", default=32, show_default=True, type=click.IntRange(1))
@click.option("--kv-heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--head-dim", default=128, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(5))
@click.option("--staging", default="512MiB", show_default=True, callback=size, help="Size of the staging memory.")
@click.option("--busy", default=0, show_default=True, type=click.IntRange(0), help="Programs that compute beside it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--check", "strict", is_flag=True, help="Exit with 1 if a target is missed.")
def main(
    tokens: int,
    chunk: int,
    block: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    rounds: int,
    staging: ByteSize,
    busy: int,
    as_json: bool,
    strict: bool,
) -> None:
    """Store and retrieve against raw Mooncake."""
    if tokens < chunk or chunk % block:
        raise click.UsageError(
            f"--tokens {tokens} must hold a chunk, and --chunk {chunk} be a multiple of --block {block}"
        )
    prompt = Prompt(tokens, chunk, block, layers, kv_heads, head_dim)
    objects, object_bytes = tokens // chunk, prompt.layout.chunk_bytes(chunk) + TRAILER_BYTES
    # room for what raw and ours hold at the same time, below the level at which the master begins to evict
    with local_pool(int(2.5 * objects * object_bytes) + (256 << 20)) as master, raw_client(master) as client:
        settings = NodeSettings(
            master=master,
            cache=CacheConfig(chunk_size=chunk),
            transfer=TransferSettings(staging_size=staging),
        )
        metadata = CacheMetadata.of(f"bench-{uuid.uuid4().hex}", prompt.layout)
        engine = CacheEngineBuilder.get_or_create("bench", settings, metadata, prompt.layout)
        try:
            engine.wait_available(30)
            with progress() as bar, busy_programs(busy):
                tracked = bar.track(range(rounds), description="rounds")
                memory = StagingPool(objects * (object_bytes + 4096), object_bytes)  # prefaulted, one slot an object
                raw = RawPool(client, memory, [f"raw/{uuid.uuid4().hex}" for _ in range(objects)], object_bytes)
                results = measure(engine, prompt, raw, tracked)
        finally:
            CacheEngineBuilder.destroy("bench")
    first = results["first_store_gbps"] / results["store_gbps"]
    more = max(
        results[f"{ours}_standstill_ms"] - results[f"{raws}_standstill_ms"]
        for ours, raws in (("store", "raw_put"), ("retrieve", "raw_get"))
    )
    checks = [
        Check("store_ratio", results["store_ratio"], 0.9, at_least=True),
        Check("retrieve_ratio", results["retrieve_ratio"], 0.9, at_least=True),
        Check("first_store_gbps / store_gbps", first, 0.7, at_least=True),
        Check("standstill_ms beyond raw's", more, 60.0, at_least=False),
        Check("bytes_equal", float(results["bytes_equal"]), 1.0, at_least=True),
    ]
    finish(results, checks, as_json=as_json, strict=strict)


if __name__ == "__main__":
    main()
