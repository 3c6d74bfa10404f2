"""How long does a lookup take? Reports milliseconds and lookups a second, in comparison with raw
`batch_is_exist` and LMCache's lookup client.

    pd-cache bench lookup [--lmcache]
    pd-cache bench lookup --serve HOST:PORT        on one of two machines; on the other --connect HOST:PORT
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import click
import numpy as np

from bench.lib.pool import bench_transfer, local_pool, raw_client
from bench.lib.report import Check, Rows, at_least, at_most, option, output_options, tracked
from bench.lib.stats import Steps, in_turn
from bench.lib.two_machines import MOST, Crew, Location, Site, conduct, machine_options
from pd_cache.chunks import CacheMetadata, ChunkedTokenDatabase, ChunkNamer, Tokens, stride_hashes
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.lookup import MooncakeLookupClient
from transfer.errors import TransferError

CHUNK, _BLOCK = 256, 16
_PEER_RATIO = 0.8
"""The target: a lookup's time, as a share of LMCache's."""
_RATES = {4096: 0.6, 32768: 0.4}
"""The target, by tokens: lookups a second over raw requests a second, with any number of clients."""
_SEGMENT = 64 << 20
_ROUNDS, _SECONDS, _WARM_UP = 200, 2.0, 20
_OPEN_S, _MARGIN_S = 30.0, 20.0
Kind = Literal["raw", "lookup"]


def measure(
    client: MooncakeLookupClient,
    database: ChunkedTokenDatabase,
    raw: Any,
    peer: Any,
    tokens: list[int],
) -> dict[str, float]:
    """Returns a row of the report: the lookups of a prompt that is wholly in the pool, for the first time and
    again."""
    keys = database.keys(database.name_chunks(tokens))
    store(client, raw, keys, tokens)
    array, hashes = np.array(tokens), block_hashes(len(tokens) // _BLOCK, len(tokens))
    put(raw, database.keys(stride_hashes(hashes, CHUNK // _BLOCK)))

    def names(prompt: Tokens = tokens) -> list[bytes]:
        return ChunkNamer(CHUNK).name_chunks(prompt)  # a new namer, which has not seen the prompt

    functions: Steps = {
        "hash_ms": lambda: database.keys(names()),
        "raw_exist_ms": lambda: raw.batch_is_exist(keys),
        "first_ms": lambda: client.find(names()),
        "array_ms": lambda: client.find(names(array)),
        "hashes_ms": lambda: client.find(stride_hashes(hashes, CHUNK // _BLOCK)),
        "again_ms": lambda: client.lookup(tokens),
    }
    if peer is not None:
        theirs = [key.to_string() for _, _, key in peer.token_database.process_tokens(tokens)]
        put(raw, theirs)
        if peer.lookup(tokens) != len(tokens):
            raise TransferError("LMCache does not find what was put under its own keys")
        functions["lmcache_ms"] = lambda: peer.lookup(tokens)
    seconds = in_turn(_ROUNDS, functions)
    return {
        "tokens": len(tokens),
        **{name: 1e3 * statistics.median(values) for name, values in seconds.items()},
    }


def metadata_of(model: str) -> CacheMetadata:
    """Returns a cache of Llama-3.1-8B's shape."""
    return CacheMetadata(
        model=model,
        kv_dtype="bfloat16",
        page_format="heads_first.8x16x512",
        layers=32,
        block_size=_BLOCK,
        page_bytes=65536,
    )


def prompt(tokens: int, seed: int | str) -> list[int]:
    """Returns random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(128_000) for _ in range(tokens)]


@contextmanager
def looking_up(
    location: Location, master: str, metadata: CacheMetadata
) -> Iterator[tuple[MooncakeLookupClient, ChunkedTokenDatabase, Any]]:
    """Yields a lookup client, the names of its chunks and keys, and a raw client of the same pool."""
    transfer = bench_transfer(location.config)
    settings = NodeSettings(
        master=master, host=location.host, cache=CacheConfig(chunk_size=CHUNK), transfer=transfer
    )
    with closing(MooncakeLookupClient(settings, metadata, master)) as client:
        client.store.wait_open(_OPEN_S)
        with raw_client(master, location.host, transfer) as raw:
            yield client, ChunkedTokenDatabase(metadata.namespace(settings.cache)), raw


def store(client: MooncakeLookupClient, raw: Any, keys: list[str], tokens: list[int]) -> None:
    """Puts the whole prompt into the pool, unless it is there."""
    put(raw, keys)
    if (found := client.lookup(tokens)) != len(tokens):
        raise TransferError(f"the pool holds {found} of the {len(tokens)} tokens that were just put")


def put(raw: Any, keys: list[str]) -> None:
    if code := raw.put_batch(keys, [b"x"] * len(keys)):
        raise TransferError(f"raw put_batch of {len(keys)} keys answered {code}")


def block_hashes(count: int, seed: int) -> list[bytes]:
    """Returns random hashes, as wide as vLLM's."""
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(count)]


def lmcache_client(raw: Any) -> Any:
    """Returns LMCache's `MooncakeLookupClient`: it hashes tokens with Python's built-in `hash` and asks the
    master once.

    It gets the open Mooncake client `raw`, because its own would not find the master: LMCache writes
    `master_server_address` into the settings, but Mooncake 0.3.13 reads `master_server_addr`, and otherwise
    asks 127.0.0.1:50051. Raises click.UsageError if LMCache is not installed.
    """
    if importlib.util.find_spec("lmcache") is None:
        raise click.UsageError("LMCache is not installed in this environment: pip install lmcache")
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    place = (
        "lmcache.inprocess.v1" if importlib.util.find_spec("lmcache.inprocess") else "lmcache.v1"
    )  # since LMCache 0.5.7
    their_client = importlib.import_module(
        f"{place}.lookup_client.mooncake_lookup_client"
    ).MooncakeLookupClient
    their_database = importlib.import_module(f"{place}.token_database").ChunkedTokenDatabase
    metadata = LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(32, 2, CHUNK, 8, 128),
    )
    client = their_client.__new__(their_client)
    client.store = raw
    client.token_database = their_database(LMCacheEngineConfig.from_defaults(chunk_size=CHUNK), metadata)
    return client


# --- many clients -------------------------------------------------------------------------------------------


class Clients(NamedTuple):
    """The job to start `number` clients of this master on each node. Each client has a prompt of every length
    in the pool."""

    number: int
    master: str
    seed: int


class Asking(NamedTuple):
    """The job to look the client's prompt of this length up, again and again."""

    kind: Kind
    tokens: int
    seconds: float


class TimedLookups(Site):
    """One client, in a process of its own."""

    def open(self, job: Clients) -> None:
        """Connects, and puts this client's prompts into the pool: no two clients have the same."""
        self._client, database, self._raw = self.held.enter_context(
            looking_up(self.location, job.master, metadata_of(f"bench-{job.seed}"))
        )
        self._prompts: dict[int, tuple[list[int], list[str]]] = {}
        for length in _RATES:
            tokens = prompt(length, f"{job.seed} {self.location.node} {length}")
            keys = database.keys(database.name_chunks(tokens))
            store(self._client, self._raw, keys, tokens)
            self._prompts[length] = tokens, keys

    def ask(self, job: Asking) -> float:
        """Asks without a pause. Returns the number of answers a second. Raises TransferError if an answer
        does not find the whole prompt."""
        tokens, keys = self._prompts[job.tokens]
        raw, client, answers = self._raw, self._client, 0
        whole = [1] * len(keys)

        def right() -> bool:
            if job.kind == "raw":
                return bool(raw.batch_is_exist(keys) == whole)
            return client.lookup(tokens) == len(tokens)

        for _ in range(_WARM_UP):
            right()
        start = time.perf_counter()
        while time.perf_counter() < start + job.seconds:
            if not right():
                raise TransferError(f"{job.kind}: not the whole prompt of {job.tokens} tokens was found")
            answers += 1
        return answers / (time.perf_counter() - start)


class LookupSite(Site):
    """A node's clients."""

    def open(self, job: Clients) -> None:
        """Starts the clients. Replaces the earlier clients."""
        self.held.close()
        self._crew = self.held.enter_context(closing(Crew(TimedLookups, self.location, job.number)))
        self._crew.everywhere(TimedLookups.open, job, timeout_s=_OPEN_S + _MARGIN_S)

    def ask(self, job: Asking) -> float:
        """Makes all clients look up at the same time. Returns the number of answers a second of all clients
        together."""
        return sum(self._crew.everywhere(TimedLookups.ask, job, timeout_s=job.seconds + _MARGIN_S).values())


# --- at the machine that leads ------------------------------------------------------------------------------


def measure_clients(machines: Crew, master: str, levels: Sequence[int]) -> Rows:
    """Returns a row for each length and number of clients a node, raw and lookups in turn."""
    seed = random.randrange(1 << 31)
    rows = []
    for count in tracked(levels, "clients"):
        # the more clients, the longer their start on one machine takes
        timeout = 2 * _MARGIN_S + _OPEN_S + 5 * count
        machines.everywhere(LookupSite.open, Clients(count, master, seed), timeout_s=timeout)
        for tokens in _RATES:
            row: dict[str, Any] = {"tokens": tokens, "clients": count * len(machines.nodes)}
            for kind in get_args(Kind):
                job = Asking(kind, tokens, _SECONDS)
                rates = machines.everywhere(LookupSite.ask, job, timeout_s=_SECONDS + 2 * _MARGIN_S)
                row[f"{kind}_per_s"] = sum(rates.values())
            rows.append({**row, "ratio": row["lookup_per_s"] / row["raw_per_s"]})
    return rows


def lead(machines: Crew, levels: Sequence[int], lmcache: bool) -> dict[str, Any]:
    """Runs all parts on a pool that the bench starts on the leading machine."""
    here = machines.location
    master = machines.later.enter_context(
        local_pool(_SEGMENT, host=here.host, transfer=bench_transfer(here.config))
    )
    with looking_up(here, master, metadata_of(f"bench-{uuid.uuid4().hex}")) as (client, database, raw):
        peer = lmcache_client(raw) if lmcache else None
        sizes = (4096, 32768, 131072)
        parts = [measure(client, database, raw, peer, prompt(size, size)) for size in sizes]
    return {"results": parts, "clients": measure_clients(machines, master, levels)}


def checks_of(figures: dict[str, Any]) -> list[Check]:
    """Returns the checks of one client's lookups, against LMCache's, and of many clients' against raw
    requests."""
    checks = [
        at_most(
            f"{time}, {row['tokens']} tokens, against LMCache", row[time], _PEER_RATIO * row["lmcache_ms"]
        )
        for row in figures["results"]
        if "lmcache_ms" in row
        for time in ("first_ms", "array_ms", "hashes_ms", "again_ms")
    ]
    checks += [
        at_least(
            f"lookups a second / raw requests, {row['tokens']} tokens, {row['clients']} clients",
            row["ratio"],
            _RATES[row["tokens"]],
        )
        for row in figures["clients"]
    ]
    return checks


@click.command()
@machine_options
@option(
    "--lmcache",
    is_flag=True,
    help="Measure LMCache's MooncakeLookupClient beside ours; it must be installed here.",
)
@option("--clients", multiple=True, default=(1, 2, 4, 8), type=click.IntRange(1, MOST), help="Clients a node; may be given several times.")  # fmt: skip
@output_options
def main(lmcache: bool, clients: tuple[int, ...], **options: Any) -> None:
    """Lookups of 4k, 32k and 128k tokens against their parts, then from more and more clients on every
    node."""
    led = partial(lead, levels=sorted(set(clients)), lmcache=lmcache)
    conduct(LookupSite, led, checks_of, local=1, **options)
