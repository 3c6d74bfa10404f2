"""`pd-cache pool verify` and `pool copy`: read the pool's objects at a bounded rate, and check each as a load
does.

An object counts as damaged if two reads in a row find damage. An object that is gone before it is read does
not. The master leases each object that is read for some seconds, and counts it as just used. So after a scan
of a whole pool, eviction no longer knows which objects engines have not used for longest.
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
from launch.operate.pool import Space, keys_of, leading_metrics, manifest_key, opened, survey
from launch.operate.watched import cluster_status
from launch.run.supervise import StopFlag
from pd_cache.chunks import Namespace
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
    """The progress of a scan. All fields but `bytes` and `seconds` are numbers of objects."""

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
    """Not read or not written, by reason."""
    copied: int = 0
    there: int = 0
    """In the other pool before."""
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
    """Checks the objects of these namespaces: all, or `sample` of them at random. Yields how that stands,
    again and again, until the end or until `stop` is set. Logs the keys of damaged objects.

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
            state.gone += len(batch) - len(copies)
            state.done += len(batch) - len(copies)
            lacking = list(copies)
            if to is not None:
                known = to.batch_exist(lacking, timeout=_CALL_S)
                lacking = [key for key, there in zip(lacking, known, strict=True) if there is not Status.OK]
                state.there += len(copies) - len(lacking)
                state.done += len(copies) - len(lacking)
            for objects in reader.read({key: copies[key][0].size_ for key in lacking}):
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
                if to is not None and (intact := [found for found in objects if not found.reason]):
                    put = to.start_put(
                        [found.key for found in intact],
                        [found.slot for found in intact],
                        [found.size for found in intact],
                        timeout=patience,
                    )
                    outcomes = Counter(put.results())
                    state.copied += outcomes.pop(Status.OK, 0)
                    state.failed.update({outcome.value: count for outcome, count in outcomes.items()})
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
    status, report = cluster_status(target), survey(target)
    if leading_metrics(status) == leading_metrics(cluster_status(config)):
        raise PdCacheError("both files have the same pool: nothing to copy")
    there = {space.name: space.bytes or 0 for space in report.namespaces}
    lacking = sum(max(0, (space.bytes or 0) - there.get(space.name, 0)) for space in chosen)
    if lacking > (room := sum(segment.room for segment in report.segments)):
        raise PdCacheError(
            f"{shown_bytes(lacking)} are to be copied, but the other pool has room for {shown_bytes(room)}: give it more "
            "memory, or name what to copy"
        )
    with opened(target, status) as to:
        for space in chosen:
            if space.namespace is not None:
                manifest = msgspec.convert(space.namespace, Namespace).manifest()
                to.put_small(manifest_key(space.fingerprint), manifest, timeout=_CALL_S)
        yield from scan(config, chosen, rate=rate, stop=stop, to=to)


class _Object(NamedTuple):
    """An object in memory, or the reason why it cannot be used."""

    key: str
    slot: Slot
    size: int
    reason: str


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
        """Reads objects of these sizes until the stop. Yields as many together as memory and rate allow;
        their slots are valid until the next step."""
        keys, largest = list(sizes), max(sizes.values(), default=1)
        if self._memory is None or largest > self._memory.slot_bytes:
            size = 1 << (largest - 1).bit_length()  # so that there are few such memories
            self._memory = StagingPool(max(size, self._transfer.staging_size), size, prefaulted=False)
            for store in self._stores:
                store.attach(self._memory)
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
        results = self._stores[0].start_get(keys, slots, timeout=timeout).results()
        for key, slot, result in zip(keys, slots, results, strict=True):
            reason = "" if result.status is Status.OK else result.status.value
            if not reason:
                data = slot.view[: result.size]
                expected = inspect(key, data, result.size - TRAILER_BYTES)
                if expected != checksum(data[:-TRAILER_BYTES]):
                    reason = (expected if isinstance(expected, Damage) else Damage.CORRUPT).value
            objects.append(_Object(key, slot, result.size, reason))
        return objects
