"""Replays a trace of conversations on a real pool: its hit rate against the pool's capacity and the master's eviction settings.

For each request of the trace, in order, a client looks up its whole blocks of 512 tokens, loads what is found and compares every byte,
and stores what is missing. Chunks are shrunken to a few KiB, so that the pool of a small machine holds as many as that of a large
cluster. All else is real: keys, lookups, leases, transfers, eviction. Two simulations give the context: one that never forgets (the
trace's ideal), and LRU with the same capacity.

    pd-cache bench replay --trace FILE                     pools of several capacities on this machine, one after the other
    pd-cache bench replay --trace FILE -c cluster.yaml     the cluster's own pool; with --serve and --connect from two machines

Across machines each conversation stays with one client, so that no client looks up what another is just about to store. The **hit rate**
is the prompt tokens that were loaded, divided by all prompt tokens; see `bench/lib/reuse.py`.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from bench.lib.about import about
from bench.lib.pool import local_pool
from bench.lib.report import Check, LinePlot, Report, Table, at_most, finish, option, progress, report_options
from bench.lib.reuse import SimulatedLru, hit_rate
from bench.lib.shrunken import STEP_BYTES, ShrunkenCache, allotted_bytes, object_bytes
from bench.lib.trace import BLOCK_TOKENS, Request, deal, read_trace
from bench.lib.two_machines import Crew, MachineOptions, Site, conduct, machine_options
from launch.discovery import find_master, open_directory
from pd_cache.cache import CacheEngineBuilder
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import ClusterConfig, MasterNode, read_config
from pd_cache.config import CacheConfig, MooncakeTier, NodeSettings
from pd_cache.errors import ConfigError
from pd_cache.paged import Slots
from pd_cache.reasons import StoreOutcome
from pd_cache.tiers.mooncake import MooncakeBackend
from transfer.settings import MIN_SEGMENT, ByteSize, Timeouts, TransferSettings

_UNBOUNDED = math.inf
_ROOM = 1.1
"""The size of an unbounded pool, relative to what the trace needs: eviction must not begin."""
_SLOWEST_S = 0.05
"""A request, on the average, before the replay is given up."""
_STEP_S = 60.0
_FIND_S = 10.0
_OPEN_S = 30.0
_STAGING = ByteSize(32 << 20)
_HALVINGS = 8
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Shares of the trace's distinct blocks: the capacities that are tried by default."""


# --- at every machine ------------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True):
    """Connect to the pool."""

    model: str
    """Clients with the same one share chunks."""
    longest: int
    """Whole blocks of the longest prompt."""
    chunk_bytes: int
    master: str = ""
    """`host:port`; empty for that of the cluster's file."""
    lease_ms: int = 0
    """With `master`: its lease, which no transfer may outlive."""


class Replay(msgspec.Struct, frozen=True):
    """Live through these requests, in order."""

    what: str
    """For the progress bar."""
    requests: list[Request]


class Tally(msgspec.Struct):
    """What became of requests, summed up."""

    prompt_tokens: int = 0
    found: int = 0
    """How many chunks the prefixes have that lookups found."""
    loaded: int = 0
    """How many of those were loaded with the right bytes."""
    damaged: int = 0
    """Loaded with other bytes than were stored."""
    stored: int = 0
    refused: int = 0
    """That the pool did not take."""
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.loaded * BLOCK_TOKENS / max(1, self.prompt_tokens)

    @staticmethod
    def together(tallies: Iterable[Tally]) -> Tally:
        """Returns the tally of clients that worked at the same time."""
        parts = list(tallies)
        total = Tally(seconds=max(part.seconds for part in parts))
        for part in parts:
            for name in ("prompt_tokens", "found", "loaded", "damaged", "stored", "refused"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total


class ReplaySite(Site):
    """This machine's client of the pool, which lives through its share of the trace."""

    def open(self, job: Open) -> None:
        """Connects; a client from before is closed."""
        self.close()
        settings = self._settings(job)
        self._cache = ShrunkenCache(job.longest, job.chunk_bytes)
        metadata, layout = CacheMetadata.of(job.model, self._cache.layout), self._cache.layout
        engine = CacheEngineBuilder.get_or_create(job.model, settings, metadata, layout)
        self._engine = self.held.enter_context(closing(engine))
        self._engine.wait_available(_OPEN_S)

    def replay(self, job: Replay) -> Tally:
        """Lives through requests, one after the other."""
        tally, start = Tally(), time.monotonic()
        with progress() as bar:
            for request in bar.track(job.requests, description=job.what):
                self._one(request.whole_blocks, tally)
                tally.prompt_tokens += request.input_length
        tally.seconds = time.monotonic() - start
        return tally

    def _one(self, blocks: Sequence[int], tally: Tally) -> None:
        engine, cache, names = self._engine, self._cache, _names(blocks)
        found = engine.find(names).chunks
        loaded = 0
        if found:
            loaded = engine.load(names[:found], Slots(cache.target(found)), kv_caches=cache.tensors).chunks
            if not cache.arrived(blocks[:loaded]):
                tally.damaged += loaded
                loaded = 0
        tally.found += found
        tally.loaded += loaded
        if missing := names[loaded:]:
            outcomes = engine.store(missing, Slots(cache.fill(blocks[loaded:])), kv_caches=cache.tensors)
            tally.stored += outcomes.count(StoreOutcome.NEW)
            tally.refused += outcomes.count(StoreOutcome.NOT)

    def remove(self, job: None) -> None:
        """Takes this bench's chunks out of a pool that is not its own, leased or not."""
        assert isinstance(self._engine.backend, MooncakeBackend)
        self._engine.backend.store.remove_matching(f"^{self._engine.database.prefix()}/", timeout=_STEP_S)

    def disconnect(self, job: None) -> None:
        """Disconnects: the pool is about to end."""
        self.close()

    def _settings(self, job: Open) -> NodeSettings:
        tier = MooncakeTier()
        if job.master:
            settings = NodeSettings(master=job.master, host=self.location.host, transfer=_within(job.lease_ms))
        else:
            config = find_master(self.location.config, _FIND_S)
            settings = config.settings_of(config.nodes[0])
            transfer = msgspec.structs.replace(settings.transfer, staging_size=_STAGING)
            settings = msgspec.structs.replace(settings, host=self.location.host, transfer=transfer, segment_size=0)
            tier = next((one for one in config.cache.tiers if isinstance(one, MooncakeTier)), tier)
        cache = CacheConfig(chunk_size=BLOCK_TOKENS, hash_mode="blocks", tiers=(tier,))
        return msgspec.structs.replace(settings, cache=cache)


def _within(lease_ms: int) -> TransferSettings:
    """Returns settings with which no transfer outlives its lease; these take milliseconds."""
    longest = min(60_000, lease_ms)
    return TransferSettings(staging_size=_STAGING, timeouts=Timeouts(get_ms=longest, put_ms=longest))


def _names(blocks: Iterable[int]) -> list[bytes]:
    return [block.to_bytes(16, "big") for block in blocks]


# --- at the machine that leads ---------------------------------------------------------------------------------------


class Leader:
    """The part of the machine that leads."""

    def __init__(self, machines: Crew, requests: Sequence[Request], chunk_bytes: int) -> None:
        self._machines, self._trace, self._chunk_bytes = machines, requests, chunk_bytes
        self._slot = allotted_bytes(object_bytes(chunk_bytes))
        shares = deal(requests, len(machines.nodes))
        self._shares = {
            node: [requests[index] for index in share] for node, share in zip(machines.nodes, shares, strict=True)
        }
        self.ideal = hit_rate(requests, SimulatedLru())
        self.distinct = sorted({block for request in requests for block in request.whole_blocks})

    def capacities(self, asked: Sequence[float]) -> Sequence[float]:
        """Returns the pools' room in chunks: as asked, or by default. Raises UsageError for one that would be too small."""
        least = -(-MIN_SEGMENT // self._slot)
        if small := [int(one) for one in asked if one < least]:
            raise click.UsageError(
                f"--capacity {small[0]}: Mooncake's least segment of 16MiB has room for {least} chunks of {self._chunk_bytes} bytes; "
                "choose larger --chunk-bytes"
            )
        return asked or (*(float(max(least, round(share * len(self.distinct)))) for share in _SHARES), _UNBOUNDED)

    def on_pool_of_its_own(self, capacity: float, master: MasterNode) -> dict[str, Any]:
        """Returns a row, from a pool of this machine with room for so many chunks, which lasts as long as that takes."""
        bounded, lease_ms = capacity != _UNBOUNDED, master.lease_ttl_ms
        chunks = capacity if bounded else _ROOM * len(self.distinct) / master.eviction_high_watermark
        size = max(MIN_SEGMENT, math.ceil(chunks) * self._slot)
        with local_pool(size, transfer=_within(lease_ms), master=master) as address:
            tally = self._replay(f"{capacity:.0f} chunks" if bounded else "unbounded", address, lease_ms)
            self._machines.everywhere(ReplaySite.disconnect, None, timeout_s=_STEP_S)
        return self._row(tally, capacity, master)

    def on_the_clusters_pool(self, config: ClusterConfig) -> dict[str, Any]:
        """Returns a row, from a pool that others may use, too. Its chunks are removed afterwards. Raises ConfigError if no node gives
        memory."""
        with open_directory(config) as directory:
            directory.wait_synced(_FIND_S)
            capacity = sum(record.capacity.segment_bytes for record in directory.view().nodes)
        if not capacity:
            raise ConfigError(f"no node of the cluster {config.name} gives memory to the pool; are they running?")
        tally = self._replay(config.name)
        self._machines.run(ReplaySite.remove, {self._machines.nodes[0]: None}, timeout_s=2 * _STEP_S)
        master = next((node for node in config.nodes if isinstance(node, MasterNode)), None)
        return self._row(tally, capacity // self._slot, master)

    def _replay(self, what: str, master: str = "", lease_ms: int = 0) -> Tally:
        """Returns what became of the requests."""
        longest = max(1, *(len(request.whole_blocks) for request in self._trace))
        job = Open(f"replay-{uuid.uuid4().hex}", longest, self._chunk_bytes, master, lease_ms)
        self._machines.everywhere(ReplaySite.open, job, timeout_s=_STEP_S)
        jobs = {node: Replay(what, share) for node, share in self._shares.items()}
        tallies = self._machines.run(ReplaySite.replay, jobs, timeout_s=_STEP_S + _SLOWEST_S * len(self._trace))
        return Tally.together(tallies.values())

    def _row(self, tally: Tally, capacity: float, master: MasterNode | None) -> dict[str, Any]:
        bounded = capacity != _UNBOUNDED
        return {
            "capacity_chunks": int(capacity) if bounded else "unbounded",
            "capacity_mib": capacity * self._slot / (1 << 20) if bounded else None,
            "watermark": master and master.eviction_high_watermark,
            "ratio": master and master.eviction_ratio,
            "lease_ms": master and master.lease_ttl_ms,
            "hit_rate": tally.hit_rate,
            "lru": hit_rate(self._trace, SimulatedLru(int(capacity))) if bounded else self.ideal,
            "ideal": self.ideal,
            "refused": tally.refused,
            "lost": tally.found - tally.loaded - tally.damaged,
            "damaged": tally.damaged,
            "stored": tally.stored,
            "seconds": tally.seconds,
        }

    def figures(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns all figures."""
        return {
            "requests": len(self._trace),
            "prompt_tokens": sum(request.input_length for request in self._trace),
            "distinct_chunks": len(self.distinct),
            "object_bytes": [object_bytes(self._chunk_bytes)],
            "allotted_bytes": [self._slot],
            "results": rows,
        }

    def report(self, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, str]) -> Report:
        """Returns the table, and the hit rate over the capacity."""
        most = len(self.distinct)
        halved = sorted({max(1, most >> halvings) for halvings in range(_HALVINGS)})
        pools = [(most if row["lru"] is row["ideal"] else row["capacity_chunks"], row["hit_rate"]) for row in rows]
        lines = {
            "ideal": [(float(capacity), self.ideal) for capacity in halved],
            "LRU, in simulation": [(float(room), hit_rate(self._trace, SimulatedLru(room))) for room in halved],
            "pool": sorted((float(room), found) for room, found in pools),
        }
        caption = "The unbounded pool stands at the number of different chunks."
        plot = LinePlot(
            "Hit rate against the pool's capacity", "capacity, chunks of 512 tokens", "hit rate", lines, caption
        )
        note = "refused: chunks that the pool did not take. lost: chunks that a lookup found and that then could not be loaded."
        summary = (
            f"{len(self._trace)} requests, {most} different chunks, by {len(self._shares)} client(s). "
            "The hit rate is the tokens that were loaded, of all prompt tokens."
        )
        parts: list[Table | LinePlot] = [
            Table.of("Pools", rows, note),
            plot,
        ]
        return Report("A trace on a real pool", summary, parts, facts)


def checks_of(rows: Iterable[dict[str, Any]]) -> list[Check]:
    """Returns the targets that the rows allow to judge."""
    checks = [
        at_most("unbounded: points below the ideal", 100 * (row["ideal"] - row["hit_rate"]), 0.1)
        for row in rows
        if row["capacity_chunks"] == "unbounded"
    ]
    damaged = sum(row["damaged"] for row in rows)
    return [*checks, at_most("damaged chunks", float(damaged), 0.0)]


def _capacities(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[float, ...]:
    def read(value: str) -> float:
        if value == "unbounded":
            return _UNBOUNDED
        if not value.isdecimal() or int(value) < 1:
            raise click.BadParameter(f"{value!r} is neither a number of chunks nor `unbounded`", context, option)
        return float(value)

    return tuple(map(read, values))


def _eviction(context: click.Context, option: click.Parameter, value: str) -> tuple[float, float]:
    try:
        watermark, ratio = map(float, value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not of the form 0.9,0.1", context, option) from None
    if not (0 < watermark <= 1 and 0 < ratio <= 1):
        raise click.BadParameter(f"{value!r}: both must be above 0 and at most 1", context, option)
    return watermark, ratio


def _chunk_bytes(context: click.Context, option: click.Parameter, value: int) -> int:
    if value % STEP_BYTES:
        raise click.BadParameter(f"{value} is not a multiple of {STEP_BYTES}", context, option)
    return value


_CAPACITY = (
    "Chunks that the pool has room for, or `unbounded`; may be given several times. "
    "By default 1/32, 1/16, 1/8 and 1/4 of the trace's distinct blocks, and unbounded."
)


@click.command()
@machine_options
@option("--trace", required=True, type=click.Path(path_type=Path), help="In the format of bench/lib/trace.py, as those of https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.")  # fmt: skip
@option("--requests", "limit", type=click.IntRange(1), help="Only the first so many.")
@option("--capacity", "capacities", multiple=True, callback=_capacities, help=_CAPACITY)
@option("--evict", default="0.9,0.1", callback=_eviction, help="Of pools of this machine: the master's eviction_high_watermark and eviction_ratio.")  # fmt: skip
@option("--lease-ms", default=200, type=click.IntRange(100), help="Of pools of this machine: how long a chunk that was looked up is safe from eviction, in the time of the replay.")  # fmt: skip
@option("--chunk-bytes", default=4096, type=click.IntRange(STEP_BYTES, 16 << 20), callback=_chunk_bytes, help="Of a chunk. With a file it decides how many the pool has room for.")  # fmt: skip
@report_options
def main(
    where: MachineOptions,
    trace: Path,
    limit: int | None,
    capacities: tuple[float, ...],
    evict: tuple[float, float],
    lease_ms: int,
    chunk_bytes: int,
    **output: Any,
) -> None:
    """A trace's hit rate on a real pool, against its ideal and LRU."""
    here = ("capacities", "evict", "lease_ms")
    context = click.get_current_context()
    if where.file is not None and any(
        context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in here
    ):
        raise click.UsageError(
            "--capacity, --evict and --lease-ms are for pools of this machine; with -c the pool is the cluster's"
        )
    if where.connect and where.file is None:
        raise click.UsageError(
            "--connect: say which pool, that of a cluster's file (-c): those of this machine alone are on its loopback"
        )
    config = None if where.file is None else read_config(where.file)[0]

    def lead(running: Crew) -> tuple[Leader, list[dict[str, Any]]]:
        leader = Leader(running, read_trace(trace, limit), chunk_bytes)
        if config is not None:
            return leader, [leader.on_the_clusters_pool(config)]
        master = MasterNode(
            name="master", lease_ttl_ms=lease_ms, eviction_high_watermark=evict[0], eviction_ratio=evict[1]
        )
        return leader, [leader.on_pool_of_its_own(room, master) for room in leader.capacities(capacities)]

    led = conduct(where, ReplaySite, lead)
    if led is not None:
        leader, rows = led
        finish(leader.figures(rows), checks_of(rows), report=leader.report(rows, about(config)), **output)


if __name__ == "__main__":
    main()
