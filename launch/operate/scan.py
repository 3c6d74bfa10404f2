"""`pd-cache pool verify` and `pool copy`: read the pool's objects at a bounded rate, and check each as a load
does.

An object counts as damaged if two reads in a row find damage. An object that is gone before it is read does
not count as damaged. The master leases each object that is read for some seconds, and counts it as just used.
So after a scan of a whole pool, the master no longer knows which objects engines used least recently.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from launch.masters import KEYS_IN_A_URL, copies_at
from launch.operate.pool import Space, keys_of, manifest_key, opened
from launch.run.supervise import StopFlag
from launch.watch.asker import cluster_status, leading_metrics, no_leader
from pd_cache.chunks import Namespace
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.machine import shown_bytes
from pd_cache.errors import PdCacheError
from pd_cache.layout import checksum
from pd_cache.tiers.memory import TRAILER_BYTES, Damage, inspect
from transfer.deadlines import end_in
from transfer.errors import Status
from transfer.settings import TransferSettings
from transfer.staging import Slot, StagingPool
from transfer.store import GetResult, MooncakeStore

log = logging.getLogger(__name__)

_CALL_S = 10.0
_FULL = 0.8
"""The share of a pool that surely has room: the master evicts from 0.9 on, and its allocator sets aside up to
an eighth more than an object's size (docs/mooncake.md)."""


class Scan(msgspec.Struct, kw_only=True):
    """The progress of a scan. All fields but `bytes` and `seconds` are numbers of objects."""

    objects: int
    """The objects to check."""
    done: int = 0
    gone: int = 0
    """Objects that were evicted or removed before they were read."""
    damaged: dict[str, int] = msgspec.field(default_factory=Counter)
    """Damaged objects by segment. For an object with several copies, the key lists all their segments with
    commas, because a read may take any copy."""
    removed: int = 0
    """Damaged objects that were removed."""
    failed: dict[str, int] = msgspec.field(default_factory=Counter)
    """Objects that were not read or not written, by reason."""
    copied: int = 0
    there: int = 0
    """Objects that the other pool had before, or that others have written there meanwhile."""
    bytes: int = 0
    """The bytes that were read."""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Returns the progress as a line for people."""
        counts = [
            (self.copied, "copied"),
            (self.there, "there already"),
            (self.gone, "gone"),
            *((count, f"damaged in {segment}") for segment, count in self.damaged.items()),
            (self.removed, "removed"),
            *((count, f"failed ({reason})") for reason, count in self.failed.items()),
        ]
        found = "".join(f", {count:,} {what}" for count, what in counts if count)
        read = f"{self.done:,} of {self.objects:,} objects, {shown_bytes(self.bytes)} in {self.seconds:.0f} s"
        return f"{read}{found}" if self.damaged else f"{read}{found}, none damaged"


def scan(
    config: ClusterConfig,
    chosen: Sequence[Space],
    *,
    rate: int,
    stop: StopFlag,
    sample: int | None = None,
    repair: bool = False,
    to: MooncakeStore | None = None,
) -> Iterator[Scan]:
    """Checks the objects of these namespaces: all, or `sample` of them at random. Yields its progress again
    and again, until the end or until `stop` is set. Logs the keys of damaged objects.

    `rate`: the most bytes that are read in a second. With `repair`, damaged objects are removed. `to`: a
    client of another pool, which gets a copy of each object that it lacks and that is intact. Raises
    PdCacheError if the pool's master does not answer.
    """
    status = cluster_status(config)
    metrics, patience = leading_metrics(status), config.transfer.timeouts.put_ms / 1000
    names = {segment.te_endpoint: segment.segment_name for segment in status.segments or ()}
    keys = list(keys_of(metrics, {space.name for space in chosen}))
    if sample is not None:
        keys = random.sample(keys, min(sample, len(keys)))
    begin, state = time.monotonic(), Scan(objects=len(keys))
    with opened(config, status) as store:
        reader = _Reader([store] if to is None else [store, to], config.transfer, rate, stop)
        for start in range(0, len(keys), KEYS_IN_A_URL):
            if stop.is_set():
                break
            batch = keys[start : start + KEYS_IN_A_URL]
            try:
                copies = {key: found for key, found in copies_at(metrics, batch).items() if found}
            except (OSError, ValueError) as error:
                raise PdCacheError(f"the master does not answer: {error}") from error
            sizes = {key: found[0].size_ for key, found in copies.items()}
            if to is not None:
                for key, known in zip(
                    copies, to.batched_contains(list(copies), end_in(_CALL_S)), strict=True
                ):
                    if known is Status.OK:
                        del sizes[key]
                    elif known is not Status.MISSING:
                        raise PdCacheError(f"the other pool does not answer: {known.value}")
            state.gone += len(batch) - len(copies)
            state.there += len(copies) - len(sizes)
            state.done += len(batch) - len(sizes)
            for objects in reader.read(sizes):
                for key, _, size, outcome in objects:
                    state.bytes += size
                    if isinstance(outcome, Damage):
                        ends = [copy.transport_endpoint_ for copy in copies[key]]
                        segment = ", ".join(names.get(end, end) for end in ends)
                        log.warning("%s in %s: %s", key, segment, outcome.value)
                        state.damaged[segment] += 1
                        if repair:
                            state.removed += store.remove([key], end_in(_CALL_S), force=True).count(Status.OK)
                    elif outcome is Status.MISSING:
                        state.gone += 1
                    elif outcome is not Status.OK:
                        state.failed[outcome.value] += 1
                intact = [found[:3] for found in objects if found.outcome is Status.OK]
                if to is not None and intact:
                    put_keys, slots, lengths = zip(*intact, strict=True)
                    put = to.start_put(list(put_keys), slots, lengths, end_in(patience))
                    outcomes = Counter(outcome.value for outcome in put.results())
                    state.copied += outcomes.pop(Status.OK.value, 0)
                    state.there += outcomes.pop(Status.BUSY.value, 0)  # another writer has begun it
                    state.failed.update(outcomes)
                state.done += len(objects)
            state.seconds = time.monotonic() - begin
            yield state
    yield state


def copy(
    config: ClusterConfig, target: ClusterConfig, chosen: Sequence[Space], *, rate: int, stop: StopFlag
) -> Iterator[Scan]:
    """Copies the objects of these namespaces that the pool of `target` lacks. Yields as `scan` does.

    Raises PdCacheError if that pool has no room for them, or is the same, or if a master does not answer.
    """
    status, own = cluster_status(target), leading_metrics(cluster_status(config))
    if not status.leading:
        raise PdCacheError(f"the other pool: {no_leader(status)}")
    if leading_metrics(status) == own:
        raise PdCacheError("both files have the same pool: nothing to copy")
    wanted = sum(space.bytes or 0 for space in chosen)
    room = _FULL * sum(segment.size_bytes for segment in status.segments or ())
    if wanted > room:
        raise PdCacheError(
            f"{shown_bytes(wanted)} are to be copied, but the other pool has room for {shown_bytes(room)}: give it "
            "more memory, or name what to copy"
        )
    with opened(target, status) as to:
        for space in chosen:
            if space.namespace is not None:
                manifest = msgspec.convert(space.namespace, Namespace).manifest()
                to.put_small(manifest_key(space.fingerprint), manifest, end_in(_CALL_S))
        yield from scan(config, chosen, rate=rate, stop=stop, to=to)


class _Object(NamedTuple):
    """An object in memory: intact if `outcome` is OK."""

    key: str
    slot: Slot
    size: int
    outcome: Status | Damage


class _Reader:
    """Reads objects at a bounded rate."""

    def __init__(
        self, stores: Sequence[MooncakeStore], transfer: TransferSettings, rate: int, stop: StopFlag
    ) -> None:
        """`stores`: the first is read; all can transfer from and to the memory."""
        self._stores = stores
        self._transfer = transfer
        self._rate = rate
        self._stop = stop
        self._memory: StagingPool | None = None

    def read(self, sizes: Mapping[str, int]) -> Iterator[list[_Object]]:
        """Reads objects of these sizes until the stop. Yields as many objects at a time as memory and rate
        allow; their slots are valid until the next step."""
        keys, largest = list(sizes), max([1, *sizes.values()])
        while keys and not self._stop.is_set():
            if self._memory is None or largest > self._memory.slot_bytes:
                slot_bytes = 1 << (largest - 1).bit_length()  # so that there are few such memories
                staging = max(slot_bytes, self._transfer.staging_size)
                self._memory = StagingPool(staging, slot_bytes, prefaulted=False)
                for store in self._stores:
                    store.attach(self._memory)
            begin, patience = time.monotonic(), self._transfer.timeouts.get_ms / 1000
            count = max(1, min(self._memory.slots, self._rate // largest))
            slots = [slot for _ in keys[:count] if (slot := self._memory.lease(begin + patience))]
            if not slots:
                raise PdCacheError("a store node does not answer, and reads from it hold all memory")
            group, keys = keys[: len(slots)], keys[len(slots) :]
            get = self._stores[0].start_get
            try:
                objects = list(map(_inspected, group, slots, get(group, slots).results()))
                for number, (key, slot, _, outcome) in enumerate(objects):
                    if isinstance(outcome, Damage):
                        objects[number] = _inspected(key, slot, *get([key], [slot]).results())
                yield objects
            finally:
                for slot in slots:
                    slot.release()
            self._stop.wait(begin + sum(found.size for found in objects) / self._rate - time.monotonic())


def _inspected(key: str, slot: Slot, result: GetResult) -> _Object:
    outcome: Status | Damage = result.status
    if outcome is Status.OK:
        data = slot.view[: result.size]
        expected = inspect(key, data, result.size - TRAILER_BYTES)
        if expected != checksum(data[:-TRAILER_BYTES]):
            outcome = expected if isinstance(expected, Damage) else Damage.CORRUPT
    elif outcome is Status.CHECKSUM:  # Mooncake's own
        outcome = Damage.CORRUPT
    return _Object(key, slot, result.size, outcome)
