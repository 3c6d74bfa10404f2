"""`pd-cache pool verify`: reads the pool's objects at a bounded rate, and checks each as a load does.

An object is damaged if two reads in a row say so. An object that is gone before it is read is not. The
master leases what is read for some seconds, and takes it for just used: after a scan of a whole pool, its
eviction no longer knows what engines have not used for longest.
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
from launch.operate.pool import Space, keys_of, leading_metrics, opened
from launch.operate.watched import cluster_status
from launch.run.supervise import StopFlag
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.machine import shown_bytes
from pd_cache.errors import PdCacheError
from pd_cache.layout import checksum
from pd_cache.tiers.memory import TRAILER_BYTES, Damage, inspect
from transfer.errors import Status
from transfer.settings import TransferSettings
from transfer.staging import Slot, StagingPool
from transfer.store import MooncakeStore

log = logging.getLogger(__name__)

_CALL_S = 10.0
_DAMAGE = {*(damage.value for damage in Damage), Status.CHECKSUM.value}


class Scan(msgspec.Struct, kw_only=True):
    """How a scan stands. All but `bytes` and `seconds` are numbers of objects."""

    objects: int
    """To look at."""
    done: int = 0
    gone: int = 0
    """Evicted or removed before they were read."""
    damaged: dict[str, int] = msgspec.field(default_factory=Counter)
    """By segment. If an object has copies, these are several, with commas: a read takes any of them."""
    removed: int = 0
    """Damaged, and removed."""
    failed: dict[str, int] = msgspec.field(default_factory=Counter)
    """Not read, by reason."""
    bytes: int = 0
    """That were read."""
    seconds: float = 0.0

    @property
    def well(self) -> bool:
        return not self.damaged and not self.failed

    @property
    def text(self) -> str:
        """Returns this as a line for people."""
        counts = [
            (self.gone, "gone"),
            *((count, f"damaged in {segment}") for segment, count in self.damaged.items()),
            (self.removed, "removed"),
            *((count, f"not read ({reason})") for reason, count in self.failed.items()),
        ]
        found = "".join(f", {count:,} {what}" for count, what in counts if count)
        read = f"{self.done:,} of {self.objects:,} objects, {shown_bytes(self.bytes)} in {self.seconds:.0f} s"
        return f"{read}{found}" if self.damaged else f"{read}{found}, none damaged"


def scan(
    config: ClusterConfig,
    chosen: Sequence[Space],
    *,
    rate: int,
    sample: int | None,
    repair: bool,
    stop: StopFlag,
) -> Iterator[Scan]:
    """Checks the objects of these namespaces: all, or `sample` of them at random. Yields how that stands,
    again and again, until the end or until `stop` is set. Logs the keys of damaged objects.

    `rate`: the most bytes that are read in a second. With `repair`, damaged objects are removed. Raises
    PdCacheError if the pool's master does not answer.
    """
    status = cluster_status(config)
    metrics = leading_metrics(status)
    names = {segment.te_endpoint: segment.segment_name for segment in status.segments or ()}
    keys = list(keys_of(metrics, {space.name for space in chosen}))
    if sample is not None:
        keys = random.sample(keys, min(sample, len(keys)))
    begin, state = time.monotonic(), Scan(objects=len(keys))
    with opened(config, status) as store:
        reader = _Reader(store, config.transfer, rate, stop)
        for start in range(0, len(keys), KEYS_IN_A_URL):
            if stop.is_set():
                break
            batch = keys[start : start + KEYS_IN_A_URL]
            try:
                copies = {key: found for key, found in copies_at(metrics, batch).items() if found}
            except (OSError, ValueError) as error:
                raise PdCacheError(f"the master does not answer: {error}") from error
            state.gone += len(batch) - len(copies)
            state.done += len(batch) - len(copies)
            for objects in reader.read({key: found[0].size_ for key, found in copies.items()}):
                for key, _, size, reason in objects:
                    state.bytes += size
                    if reason in _DAMAGE:
                        ends = [copy.transport_endpoint_ for copy in copies[key]]
                        segment = ", ".join(names.get(end, end) for end in ends)
                        log.warning("%s in %s: %s", key, segment, reason)
                        state.damaged[segment] += 1
                        if repair:
                            state.removed += store.remove([key], timeout=_CALL_S, force=True).count(Status.OK)
                    elif reason == Status.MISSING.value:
                        state.gone += 1
                    elif reason:
                        state.failed[reason] += 1
                state.done += len(objects)
            state.seconds = time.monotonic() - begin
            yield state
    yield state


class _Object(NamedTuple):
    """An object in memory, or the reason why it cannot be used."""

    key: str
    slot: Slot
    size: int
    reason: str


class _Reader:
    """Reads objects at a bounded rate."""

    def __init__(self, store: MooncakeStore, transfer: TransferSettings, rate: int, stop: StopFlag) -> None:
        self._store = store
        self._transfer = transfer
        self._rate = rate
        self._stop = stop
        self._memory: StagingPool | None = None

    def read(self, sizes: Mapping[str, int]) -> Iterator[list[_Object]]:
        """Reads objects of these sizes until the stop. Yields as many together as memory and rate allow;
        their slots are valid until the next step."""
        keys, largest = list(sizes), max(sizes.values(), default=1)
        if self._memory is None or largest > self._memory.slot_bytes:
            size = 1 << (largest - 1).bit_length()  # so that there are few such memories
            self._memory = StagingPool(max(size, self._transfer.staging_size), size, prefaulted=False)
            self._store.attach(self._memory)
        while keys and not self._stop.is_set():
            begin, patience = time.monotonic(), self._transfer.timeouts.get_ms / 1000
            count = max(1, min(self._memory.slots, self._rate // largest))
            slots = [slot for _ in keys[:count] if (slot := self._memory.lease(begin + patience))]
            if not slots:
                raise PdCacheError("a store node does not answer, and reads from it hold all memory")
            group, keys = keys[: len(slots)], keys[len(slots) :]
            try:
                objects = self._get(group, slots, patience)
                for number, found in enumerate(objects):
                    if found.reason in _DAMAGE:
                        (objects[number],) = self._get([found.key], [found.slot], patience)
                yield objects
            finally:
                for slot in slots:
                    slot.release()
            self._stop.wait(begin + sum(found.size for found in objects) / self._rate - time.monotonic())

    def _get(self, keys: list[str], slots: list[Slot], timeout: float) -> list[_Object]:
        objects = []
        results = self._store.start_get(keys, slots, timeout=timeout).results()
        for key, slot, result in zip(keys, slots, results, strict=True):
            reason = "" if result.status is Status.OK else result.status.value
            if not reason:
                data = slot.view[: result.size]
                expected = inspect(key, data, result.size - TRAILER_BYTES)
                if expected != checksum(data[:-TRAILER_BYTES]):
                    reason = (expected if isinstance(expected, Damage) else Damage.CORRUPT).value
            objects.append(_Object(key, slot, result.size, reason))
        return objects
