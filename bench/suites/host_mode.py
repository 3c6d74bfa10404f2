"""Two engines of one host in `host` mode: one stores, the other retrieves, against raw dummy-client calls in the same run.

A master, a store node that runs the host's `mooncake_client`, and two engines, each in a process of its own. Rounds are interleaved, raw
and ours in turn, and medians are compared. Each is compared with two measures:

- `raw_put`, `raw_get`: one batch call moves the same objects between its process's shared memory and the segment.
- `raw_put_copied`, `raw_get_copied`: the same, with the one copy that a paged buffer makes necessary: while a call moves a
  batch, a plain copy brings the next into shared memory, or the last out of it. No gather, no scatter, no checksum.

`copy` is a plain copy of as many bytes by one thread; `…_at_once` is what both processes reach together. If two copies at once are hardly
faster than one, memory is the limit, and a program that has to copy first cannot come near `raw_put`.

    pd-cache bench host_mode --json         or  python -m bench.suites.host_mode --json
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import click
import msgspec
import numpy as np
import torch

from bench.lib.fleet import Crew, Location, Nothing, Site, step
from bench.lib.kv import CopiedPool, PagedPrompt, RawPool, Shape, gbps, shape_options, timed
from bench.lib.pool import host_pool, raw_host_client
from bench.lib.report import Check, finish, option, output_options, progress, size
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.engine import CacheEngineBuilder
from pd_cache.tokens import CacheMetadata
from transfer.settings import ByteSize, TransferSettings
from transfer.staging import SharedStagingPool

_PATIENCE_S = 120.0
_TARGET = 0.8
_WRITER, _READER, _BOTH = range(1), range(1, 2), range(2)


class HostModeSetting(msgspec.Struct, frozen=True):
    """The parameters of an engine's process."""

    master: str
    client: str
    run: str
    shape: Shape
    staging: int
    threads: int


class Action(msgspec.Struct, frozen=True):
    """What to do, by name."""

    name: str


class Took(msgspec.Struct, frozen=True):
    """Seconds, and whether the prompt's target holds the source's bytes by now, where that was asked."""

    seconds: float
    equal: bool = False


class EngineSite(Site):
    """One engine, in a process of its own, and a raw client beside it."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._open = ExitStack()

    @step
    def open(self, job: HostModeSetting) -> Nothing:
        """Connects to the host's client."""
        torch.manual_seed(0)  # the same prompt in both processes, so that each can check what it got
        shape = job.shape
        self._prompt = prompt = PagedPrompt(shape)
        transfer = TransferSettings(
            client="host", client_address=job.client, staging_size=ByteSize(job.staging), threads=job.threads
        )
        settings = NodeSettings(master=job.master, cache=CacheConfig(chunk_size=shape.chunk), transfer=transfer)
        metadata = CacheMetadata.of(job.run, prompt.layout)
        engine = CacheEngineBuilder.get_or_create("bench", settings, metadata, prompt.layout)
        self._open.callback(CacheEngineBuilder.destroy, "bench")
        keys = engine.database.keys(engine.database.hash_tokens(prompt.tokens))
        source = np.ones(shape.chunks * shape.object_bytes, np.uint8)
        target = np.zeros_like(source)
        engine.wait_available(30)
        client = self._open.enter_context(raw_host_client(job.client))
        memory = SharedStagingPool(shape.chunks * (shape.object_bytes + 4096), shape.object_bytes)
        raw = RawPool(client, memory, [f"{job.run}/{index}" for index in range(shape.chunks)], shape.object_bytes)
        copied = self._open.enter_context(closing(CopiedPool(raw)))
        self._actions: dict[str, Callable[[], object]] = {
            "store": partial(prompt.store, engine),
            "scramble": prompt.scramble,
            "retrieve": partial(prompt.retrieve, engine),
            "remove": lambda: raw.remove(keys),
            "raw_put": raw.put,
            "raw_get": raw.get,
            "raw_put_copied": copied.put,
            "raw_get_copied": copied.get,
            "raw_remove": lambda: raw.remove(raw.keys),
            "copy": lambda: np.copyto(target, source),
        }
        return Nothing()

    @step
    def do(self, job: Action) -> Took:
        """It, timed."""
        return Took(timed(self._actions[job.name]))

    @step
    def check(self, job: Nothing) -> Took:
        """Compares what was loaded."""
        return Took(0.0, self._prompt.arrived())

    def close(self) -> None:
        self._open.close()


def rounds_of(crew: Crew, nbytes: int, rounds: Iterable[int]) -> dict[str, Any]:
    """GB/s of each action, medians over the rounds, and the ratios of ours to raw."""
    seconds: dict[str, list[float]] = {}

    def do(action: str, who: range) -> float:
        return crew.run(EngineSite.do, Action(action), timeout_s=_PATIENCE_S, of=who)[0].seconds

    def note(name: str, who: range) -> None:
        seconds.setdefault(name, []).append(do(name, who))

    def at_once(name: str) -> None:
        """Until both are done with what they began together."""
        seconds.setdefault(f"{name}_at_once", []).append(timed(lambda: do(name, _BOTH)))

    def one_round() -> None:
        note("copy", _WRITER)
        at_once("copy")
        note("raw_put_copied", _WRITER)
        do("raw_remove", _WRITER)
        note("raw_put", _WRITER)
        note("store", _WRITER)
        note("raw_get_copied", _READER)
        note("raw_get", _READER)
        do("scramble", _READER)
        note("retrieve", _READER)
        at_once("raw_get")
        at_once("retrieve")
        do("raw_remove", _WRITER)
        do("remove", _WRITER)

    one_round()  # its memory has not been touched before
    first = seconds["store"][0]
    seconds.clear()
    for _ in rounds:
        one_round()
    rates = gbps(nbytes, seconds)
    for name in ("copy_at_once", "raw_get_at_once", "retrieve_at_once"):
        rates[f"{name}_gbps"] *= 2  # both moved as many bytes
    (checked,) = crew.run(EngineSite.check, Nothing(), timeout_s=_PATIENCE_S, of=_READER)
    return {
        **rates,
        "store_ratio": rates["store_gbps"] / rates["raw_put_gbps"],
        "retrieve_ratio": rates["retrieve_gbps"] / rates["raw_get_gbps"],
        "store_ratio_copied": rates["store_gbps"] / rates["raw_put_copied_gbps"],
        "retrieve_ratio_copied": rates["retrieve_gbps"] / rates["raw_get_copied_gbps"],
        "retrieve_at_once_ratio": rates["retrieve_at_once_gbps"] / rates["raw_get_at_once_gbps"],
        "first_store_gbps": nbytes / first / 1e9,
        "bytes_equal": checked.equal,
    }


@click.command()
@shape_options
@option("--rounds", default=9, type=click.IntRange(3))
@option("--threads", default=1, type=click.IntRange(1, 64), help="transfer.threads")
@option("--staging", default="512MiB", callback=size, help="Staging memory of each engine.")
@output_options
def main(shape: Shape, rounds: int, threads: int, staging: ByteSize, **output: Any) -> None:
    """Store and retrieve through a host's mooncake_client against raw dummy-client calls."""
    with (
        host_pool(shape.pool_bytes) as (master, client),
        closing(Crew(EngineSite, Location.here())) as crew,
        progress() as bar,
    ):
        crew.grow(2)
        setting = HostModeSetting(master, client, f"bench-{uuid.uuid4().hex}", shape, staging, threads)
        crew.run(EngineSite.open, setting, timeout_s=_PATIENCE_S)
        tracked = bar.track(range(rounds), description="rounds")
        results = rounds_of(crew, shape.chunks * shape.object_bytes, tracked)
    ratios = ("store_ratio", "retrieve_ratio", "store_ratio_copied", "retrieve_ratio_copied")
    checks = [Check(name, results[name], _TARGET, at_least=True) for name in ratios]
    finish(results, [*checks, Check("bytes_equal", float(results["bytes_equal"]), 1.0, at_least=True)], **output)


if __name__ == "__main__":
    main()
