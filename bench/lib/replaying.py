"""One machine's part in `bench/suites/replay.py`: a client of the pool that lives through its share of a trace."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence

import msgspec

from bench.lib.report import progress
from bench.lib.shrunken import ShrunkenCache
from bench.lib.trace import BLOCK_TOKENS, Request
from bench.lib.two_machines import Location, Nothing, Site, step
from launch.discovery import find_master
from pd_cache.blocks import Slots, StoreOutcome
from pd_cache.chunks import CacheMetadata
from pd_cache.config import CacheConfig, MooncakeTier, NodeSettings
from pd_cache.engine import CacheEngine, CacheEngineBuilder
from transfer.errors import Status
from transfer.settings import ByteSize, Timeouts, TransferSettings

_FIND_S = 10.0
_OPEN_S = 30.0
_STAGING = ByteSize(32 << 20)
_REMOVED_AT_ONCE = 512


class Open(msgspec.Struct, frozen=True, kw_only=True):
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


class Opened(msgspec.Struct, frozen=True):
    """Connected."""

    lease_ms: int
    """As far as the client knows."""


class Replay(msgspec.Struct, frozen=True):
    """Live through these requests, in order."""

    what: str
    """For the progress bar."""
    requests: list[Request]
    speed: float | None
    """How many times as fast as the trace was; None is as fast as possible."""


class Remove(msgspec.Struct, frozen=True):
    """Take these blocks' chunks out of the pool."""

    blocks: list[int]
    lease_ms: int


class Tally(msgspec.Struct):
    """What became of requests, summed up."""

    requests: int = 0
    prompt_tokens: int = 0
    found_chunks: int = 0
    """How many chunks the prefixes have that lookups found."""
    loaded_chunks: int = 0
    """How many of those were loaded with the right bytes."""
    damaged_chunks: int = 0
    """Loaded with other bytes than were stored."""
    stored_chunks: int = 0
    refused_chunks: int = 0
    """That the pool did not take."""
    troubles: dict[str, float] = {}
    """As the engine counts them, by operation and reason."""
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.loaded_chunks * BLOCK_TOKENS / max(1, self.prompt_tokens)

    @staticmethod
    def together(tallies: Iterable[Tally]) -> Tally:
        """Returns the tally of clients that worked at the same time."""
        parts = list(tallies)
        total = Tally(seconds=max(part.seconds for part in parts))
        for part in parts:
            for name in ("requests", "prompt_tokens", *(f for f in Tally.__struct_fields__ if f.endswith("_chunks"))):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for reason, count in part.troubles.items():
                total.troubles[reason] = total.troubles.get(reason, 0) + count
        return total


class Replayer:
    """A client of the pool. Close it."""

    def __init__(self, settings: NodeSettings, job: Open) -> None:
        """Begins to connect."""
        self._cache = ShrunkenCache(job.longest, job.chunk_bytes)
        self._instance = f"replay-{uuid.uuid4().hex}"
        metadata = CacheMetadata.of(job.model, self._cache.layout)
        self.engine: CacheEngine = CacheEngineBuilder.get_or_create(
            self._instance, settings, metadata, self._cache.layout
        )

    def close(self) -> None:
        CacheEngineBuilder.destroy(self._instance)

    def run(self, requests: Iterable[Request], speed: float | None) -> Tally:
        """Live through requests, one after the other."""
        tally = Tally()
        start = time.monotonic()
        for request in requests:
            if speed is not None:
                time.sleep(max(0.0, start + request.timestamp / 1000 / speed - time.monotonic()))
            self._one(request.whole_blocks, tally)
            tally.requests += 1
            tally.prompt_tokens += request.input_length
        tally.seconds = time.monotonic() - start
        for (name, *labels), count in self.engine.metrics.totals().items():
            if name == "troubles" and count:
                tally.troubles[".".join(labels)] = count
        return tally

    def _one(self, blocks: Sequence[int], tally: Tally) -> None:
        engine, cache = self.engine, self._cache
        names = _names(blocks)
        found = engine.lookup(names)
        loaded = 0
        if found:
            slots = Slots(cache.target(found))
            loaded = engine.retrieve(names[:found], slots, kv_caches=cache.tensors)
            if not cache.arrived(blocks[:loaded]):
                tally.damaged_chunks += loaded
                loaded = 0
        tally.found_chunks += found
        tally.loaded_chunks += loaded
        if missing := names[loaded:]:
            slots = Slots(cache.fill(blocks[loaded:]))
            outcomes = engine.store(missing, slots, kv_caches=cache.tensors)
            tally.stored_chunks += outcomes.count(StoreOutcome.NEW)
            tally.refused_chunks += outcomes.count(StoreOutcome.NOT)

    def remove(self, blocks: Sequence[int], lease_ms: int) -> None:
        """Takes chunks out of the pool, as far as that goes: those under a lease when it is over."""
        database = self.engine.database
        keys = [*database.all_shard_keys(_names(blocks)), database.manifest_key]
        for _ in range(2):
            busy = []
            for start in range(0, len(keys), _REMOVED_AT_ONCE):
                some = keys[start : start + _REMOVED_AT_ONCE]
                statuses = self.engine.backend.batched_remove(some, timeout=_FIND_S)
                busy += [key for key, status in zip(some, statuses, strict=True) if status is Status.BUSY]
            keys = busy
            if not keys:
                return
            time.sleep(lease_ms / 1000 + 0.1)


def _names(blocks: Iterable[int]) -> list[bytes]:
    return [block.to_bytes(16, "big") for block in blocks]


class ReplaySite(Site):
    """This machine's client."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._replayer: Replayer | None = None

    @step
    def open(self, job: Open) -> Opened:
        """Connects; a client from before is closed."""
        self._disconnect()
        settings = self._settings(job)
        self._replayer = Replayer(settings, job)
        self._replayer.engine.wait_available(_OPEN_S)
        return Opened(job.lease_ms or find_master(self.location.config, _FIND_S).lease_ttl_ms)

    @step
    def replay(self, job: Replay) -> Tally:
        """Live through a share of the trace."""
        assert self._replayer is not None, "not open"
        with progress() as bar:
            return self._replayer.run(bar.track(job.requests, description=job.what), job.speed)

    @step
    def remove(self, job: Remove) -> Nothing:
        """Leaves nothing behind in a pool that is not ours."""
        assert self._replayer is not None, "not open"
        self._replayer.remove(job.blocks, job.lease_ms)
        return Nothing()

    @step
    def disconnect(self, job: Nothing) -> Nothing:
        """Disconnects: the pool is about to end."""
        self._disconnect()
        return job

    def close(self) -> None:
        self._disconnect()

    def _disconnect(self) -> None:
        replayer, self._replayer = self._replayer, None
        if replayer is not None:
            replayer.close()

    def _settings(self, job: Open) -> NodeSettings:
        tier = MooncakeTier()
        if job.master:
            longest = min(60_000, job.lease_ms)
            transfer = TransferSettings(staging_size=_STAGING, timeouts=Timeouts(get_ms=longest, put_ms=longest))
            settings = NodeSettings(master=job.master, host=self.location.host, transfer=transfer)
        else:
            config = find_master(self.location.config, _FIND_S)
            settings = config.settings_of(config.nodes[0])
            transfer = msgspec.structs.replace(settings.transfer, staging_size=_STAGING)
            settings = msgspec.structs.replace(settings, host=self.location.host, transfer=transfer, segment_size=0)
            tier = next((one for one in config.cache.tiers if isinstance(one, MooncakeTier)), tier)
        cache = CacheConfig(chunk_size=BLOCK_TOKENS, hash_mode="blocks", tiers=(tier,))
        return msgspec.structs.replace(settings, cache=cache)
