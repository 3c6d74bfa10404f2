"""Two engines of one host in `host` mode: one stores, the other retrieves, against raw dummy-client calls in the same run.

A master, a store node that runs the host's `mooncake_client`, and two engines, each in a process of its own. Rounds are
interleaved, raw and ours in turn, and medians are compared. Each is held against two measures:

- `raw_put`, `raw_get`: one batch call moves the same objects between its process's shared memory and the segment.
- `raw_put_copied`, `raw_get_copied`: the same, with the one copy that a paged buffer makes necessary: while a call moves a
  batch, a plain copy brings the next into shared memory, or the last out of it. No gather, no scatter, no checksum.

`copy` is a plain copy of as many bytes by one thread, `…_at_once` what both processes reach together. Where two copies at once
are hardly faster than one, memory is the limit, and nobody comes near `raw_put` who has to copy first.

    pd-cache bench host_mode --json         or  python -m bench.suites.host_mode --json
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import click
import numpy as np
import torch

from bench.lib.pool import host_pool, raw_host_client
from bench.lib.report import Check, finish, progress
from bench.suites.engine import Prompt, RawPool, size, timed
from pd_cache.backends.objects import TRAILER_BYTES
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.engine import CacheEngineBuilder
from pd_cache.tokens import CacheMetadata
from transfer.settings import ByteSize, TransferSettings
from transfer.staging import SharedStagingPool

_COPIED_TOGETHER = 64 << 20
"""Bytes of a batch of `CopiedPool`, as many as the engine hands over together."""
_PATIENCE_S = 120.0
"""For one answer of an engine's process."""
TARGET = 0.8


class Shape(NamedTuple):
    """A prompt's KV cache; by default Llama-3.1-8B's, 128 KiB a token."""

    tokens: int = 4096
    chunk: int = 256
    block: int = 16
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128


LLAMA_8B = Shape()


class Setting(NamedTuple):
    """What an engine's process is told."""

    master: str
    client: str
    run: str
    shape: Shape
    staging: int
    threads: int


class CopiedPool:
    """Raw calls on what lies in ordinary memory: each batch is copied to or from shared memory beside the call before."""

    def __init__(self, client: Any, raw: RawPool, object_bytes: int) -> None:
        count = max(1, _COPIED_TOGETHER // object_bytes)
        self._client = client
        self._caller = ThreadPoolExecutor(1)
        self._memory = np.ones((len(raw.keys), object_bytes), np.uint8)
        self._shared = [np.frombuffer(slot.view, np.uint8) for slot in raw.slots]
        self._batches = [range(first, min(first + count, len(raw.keys))) for first in range(0, len(raw.keys), count)]
        self._calls: list[tuple[Any, ...]] = [
            ([raw.keys[i] for i in batch], [raw.slots[i].address for i in batch], [object_bytes] * len(batch))
            for batch in self._batches
        ]

    def put(self) -> None:
        calls = []
        for batch, arguments in zip(self._batches, self._calls, strict=True):
            for index in batch:
                np.copyto(self._shared[index], self._memory[index])
            calls.append(self._caller.submit(self._client.batch_put_from, *arguments))
        assert not any(code for call in calls for code in call.result())

    def get(self) -> None:
        calls = [self._caller.submit(self._client.batch_get_into, *arguments) for arguments in self._calls]
        for batch, call in zip(self._batches, calls, strict=True):
            assert min(call.result()) > 0
            for index in batch:
                np.copyto(self._memory[index], self._shared[index])

    def close(self) -> None:
        self._caller.shutdown()


def serve(setting: Setting, pipe: Connection) -> None:
    """One engine: answers the name of an action with the seconds that it took, until it is told to stop."""
    torch.manual_seed(0)  # the same prompt in both processes, so that each can check what it got
    shape = setting.shape
    prompt = Prompt(*shape)
    objects, object_bytes = shape.tokens // shape.chunk, prompt.layout.chunk_bytes(shape.chunk) + TRAILER_BYTES
    settings = NodeSettings(
        master=setting.master,
        cache=CacheConfig(chunk_size=shape.chunk),
        transfer=TransferSettings(
            client="host",
            client_address=setting.client,
            staging_size=ByteSize(setting.staging),
            threads=setting.threads,
        ),
    )
    engine = CacheEngineBuilder.get_or_create(
        "bench", settings, CacheMetadata.of(setting.run, prompt.layout), prompt.layout
    )
    keys = engine.database.keys(engine.database.hash_tokens(prompt.tokens))
    source = np.ones(objects * object_bytes, np.uint8)
    target = np.zeros_like(source)
    copied: CopiedPool | None = None

    def store() -> None:
        stored = engine.store(prompt.tokens, kv_caches=prompt.cache, slot_mapping=prompt.source)
        assert stored == len(keys) * shape.chunk, f"only {stored} tokens were stored"

    def retrieve() -> None:
        mask = engine.retrieve(prompt.tokens, kv_caches=prompt.cache, slot_mapping=prompt.target)
        assert int(mask.sum()) == len(keys) * shape.chunk, f"only {int(mask.sum())} tokens were loaded"

    try:
        engine.wait_available(30)
        with raw_host_client(setting.client) as client:
            memory = SharedStagingPool(objects * (object_bytes + 4096), object_bytes)
            raw = RawPool(client, memory, [f"{setting.run}/{index}" for index in range(objects)], object_bytes)
            copied = CopiedPool(client, raw, object_bytes)
            actions: dict[str, Callable[[], object]] = {
                "store": store,
                "scramble": prompt.scramble,
                "retrieve": retrieve,
                "remove": lambda: raw.remove(keys),
                "raw_put": raw.put,
                "raw_get": raw.get,
                "raw_put_copied": copied.put,
                "raw_get_copied": copied.get,
                "raw_remove": lambda: raw.remove(raw.keys),
                "copy": lambda: np.copyto(target, source),
            }
            pipe.send("ready")
            while (what := pipe.recv()) != "stop":
                pipe.send(prompt.arrived() if what == "arrived" else timed(actions[what]))
    finally:
        if copied is not None:
            copied.close()
        CacheEngineBuilder.destroy("bench")


class Engine:
    """The other end of `serve`."""

    def __init__(self, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(setting, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, action: str) -> None:
        self._pipe.send(action)

    def answer(self) -> Any:
        """What the process says next. RuntimeError if it says nothing more."""
        with contextlib.suppress(EOFError):
            if self._pipe.poll(_PATIENCE_S):
                return self._pipe.recv()
        raise RuntimeError(f"an engine's process ended, or did not answer in {_PATIENCE_S:g} s")

    def do(self, action: str) -> Any:
        """Have it done, and wait for it."""
        self.begin(action)
        return self.answer()

    def close(self) -> None:
        """Stop the process; it has a while to unmap its memory."""
        with contextlib.suppress(OSError):
            self._pipe.send("stop")
        self._process.join(15)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._pipe.close()


def at_once(first: Engine, first_action: str, second: Engine, second_action: str) -> float:
    """Seconds until both are done with what they began together."""

    def both() -> None:
        first.begin(first_action)
        second.begin(second_action)
        first.answer()
        second.answer()

    return timed(both)


def rounds_of(writer: Engine, reader: Engine, nbytes: int, rounds: Iterable[int]) -> dict[str, Any]:
    """GB/s of each action, medians over the rounds, and the ratios of ours to raw."""
    seconds: dict[str, list[float]] = {}

    def note(name: str, took: float) -> None:
        seconds.setdefault(name, []).append(took)

    def one_round() -> None:
        note("copy", writer.do("copy"))
        note("copy_at_once", at_once(writer, "copy", reader, "copy"))
        note("raw_put_copied", writer.do("raw_put_copied"))
        writer.do("raw_remove")
        note("raw_put", writer.do("raw_put"))
        note("store", writer.do("store"))
        note("raw_get_copied", reader.do("raw_get_copied"))
        note("raw_get", reader.do("raw_get"))
        reader.do("scramble")
        note("retrieve", reader.do("retrieve"))
        note("raw_get_at_once", at_once(writer, "raw_get", reader, "raw_get"))
        note("retrieve_at_once", at_once(writer, "retrieve", reader, "retrieve"))
        writer.do("raw_remove")
        writer.do("remove")

    one_round()  # whose memory nobody has touched before
    first = seconds["store"][0]
    seconds.clear()
    for _ in rounds:
        one_round()
    gbps = {f"{name}_gbps": nbytes / statistics.median(took) / 1e9 for name, took in seconds.items()}
    for name in ("copy_at_once", "raw_get_at_once", "retrieve_at_once"):
        gbps[f"{name}_gbps"] *= 2  # both moved as many bytes
    return {
        **gbps,
        "store_ratio": gbps["store_gbps"] / gbps["raw_put_gbps"],
        "retrieve_ratio": gbps["retrieve_gbps"] / gbps["raw_get_gbps"],
        "store_ratio_copied": gbps["store_gbps"] / gbps["raw_put_copied_gbps"],
        "retrieve_ratio_copied": gbps["retrieve_gbps"] / gbps["raw_get_copied_gbps"],
        "retrieve_at_once_ratio": gbps["retrieve_at_once_gbps"] / gbps["raw_get_at_once_gbps"],
        "first_store_gbps": nbytes / first / 1e9,
        "bytes_equal": bool(reader.do("arrived")),
    }


def measure(
    shape: Shape = LLAMA_8B, *, rounds: Iterable[int] = range(9), staging: int = 512 << 20, threads: int = 1
) -> tuple[dict[str, Any], list[Check]]:
    """Start all of it on this machine, measure, and stop it again: the figures, and the targets they are held against."""
    with torch.device("meta"):
        object_bytes = Prompt(shape.chunk, *shape[1:]).layout.chunk_bytes(shape.chunk) + TRAILER_BYTES
    objects = shape.tokens // shape.chunk
    # room for what raw and ours hold at the same time, below the level at which the master begins to evict
    with (
        host_pool(int(2.5 * objects * object_bytes) + (256 << 20)) as (master, client),
        contextlib.ExitStack() as stack,
    ):
        setting = Setting(master, client, f"bench-{uuid.uuid4().hex}", shape, staging, threads)
        engines = [Engine(setting) for _ in range(2)]
        for engine in engines:
            stack.callback(engine.close)
        for engine in engines:
            engine.answer()
        writer, reader = engines
        results = rounds_of(writer, reader, objects * object_bytes, rounds)
    return results, [
        Check("host mode: store_ratio", results["store_ratio"], TARGET, at_least=True),
        Check("host mode: retrieve_ratio", results["retrieve_ratio"], TARGET, at_least=True),
        Check("host mode: store_ratio_copied", results["store_ratio_copied"], TARGET, at_least=True),
        Check("host mode: retrieve_ratio_copied", results["retrieve_ratio_copied"], TARGET, at_least=True),
        Check("host mode: bytes_equal", float(results["bytes_equal"]), 1.0, at_least=True),
    ]


@click.command()
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(1))
@click.option("--chunk", default=256, show_default=True, type=click.IntRange(1))
@click.option("--layers", default=32, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(3))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1, 64), help="transfer.threads")
@click.option("--staging", default="512MiB", show_default=True, callback=size, help="Staging memory of each engine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--check", "strict", is_flag=True, help="Exit with 1 if a target is missed.")
def main(
    tokens: int, chunk: int, layers: int, rounds: int, threads: int, staging: ByteSize, as_json: bool, strict: bool
) -> None:
    """Store and retrieve through a host's mooncake_client against raw dummy-client calls."""
    shape = Shape(tokens, chunk, layers=layers)
    if tokens < chunk or chunk % shape.block:
        raise click.UsageError(
            f"--tokens {tokens} must hold a chunk, and --chunk {chunk} be a multiple of {shape.block}"
        )
    with progress() as bar:
        tracked = bar.track(range(rounds), description="rounds")
        results, checks = measure(shape, rounds=tracked, staging=staging, threads=threads)
    finish(results, checks, as_json=as_json, strict=strict)


if __name__ == "__main__":
    main()
