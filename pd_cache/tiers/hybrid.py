"""HybridBackend: several tiers as one. A put writes through to all of them. A get reads through, and
promotes.

1. All tiers share one memory, so an object is gathered once, written everywhere from there, and promoted
   without a copy.
2. A key is read from the first tier that has it. The last tier, usually the pool, is asked only for keys
   that all other tiers lack. If a tier has lost a key meanwhile, that is counted, and the next tier is asked.
   Damage of a payload is found only after its use; its tier then forgets the object.
3. A reader that waits for memory holds none itself. So only one tier at a time reads ahead for it.
4. A put waits for the *blocking* tiers, and has the outcome of the last of them. The other tiers are written
   in the background, with at most half of the staging memory. Objects that a tier does not take are counted;
   only those of the last blocking tier change the outcome.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from itertools import groupby
from typing import NamedTuple

from pd_cache.chunks import Keys
from pd_cache.config import PromotionName
from pd_cache.metrics import TierMetrics
from pd_cache.reasons import TierChunks
from pd_cache.tiers.base import PutOutcome, Settled, StorageBackend
from pd_cache.tiers.memory import Fetched, Staged
from transfer.deadlines import End, left
from transfer.errors import PoolUnavailableError, Status

log = logging.getLogger(__name__)

_REMEMBERED = 1 << 16
"""How many keys with one read a tier remembers, for promotion on the second hit."""


class Tier(NamedTuple):
    """One of the tiers, fastest first."""

    backend: StorageBackend
    metrics: TierMetrics
    blocking: bool = True
    """Whether a put waits for this tier."""
    promote: PromotionName = "always"
    """When to put a chunk that was read from a later tier into this one."""


class HybridBackend(StorageBackend):
    """Joins tiers into one backend, which owns them."""

    def __init__(self, tiers: Sequence[Tier], *, backlog: int | None = None, close_s: float = 5.0) -> None:
        """`tiers`: at least one; all share one memory. `backlog`: how many chunks may be written behind at
        the same time, by default half of the memory's slots."""
        first = tiers[0].backend
        self.tiers = tuple(tiers)
        self.memory = first.memory
        self.payload_bytes = first.payload_bytes
        self.batch_size = min(tier.backend.batch_size for tier in tiers)
        self._seen = [_SecondHit() if tier.promote == "second_hit" else None for tier in tiers]
        self._behind = _WriteBehind(
            max(1, self.memory.pool.slots // 2 if backlog is None else backlog), close_s
        )
        self._closed = False

    @property
    def available(self) -> bool:
        return any(tier.backend.available for tier in self.tiers)

    def wait_available(self, timeout: float) -> None:
        """Waits until every tier is open. Raises PoolUnavailableError if the last tier is not open after
        `timeout` seconds.

        Other tiers may fail; the cache works without them.
        """
        end = time.monotonic() + timeout
        for tier in self.tiers[:-1]:
            with contextlib.suppress(PoolUnavailableError):
                tier.backend.wait_available(left(end))
        self.tiers[-1].backend.wait_available(left(end))

    def batched_contains(self, keys: Keys, end: End = None) -> list[Status]:
        statuses = [Status.MISSING] * len(keys)
        for tier in self.tiers:
            lacking = [index for index, status in enumerate(statuses) if status is not Status.OK]
            if not lacking:
                break
            answers = tier.backend.batched_contains([keys[index] for index in lacking], end)
            for index, answer in zip(lacking, answers, strict=True):
                # a tier that could not answer might have the key, so this is not a plain miss
                if answer is not Status.MISSING:
                    statuses[index] = answer
        return statuses

    def near(self, keys: Keys) -> TierChunks:
        counts = Counter[str]()
        for tier in self.tiers:
            if (kind := tier.backend.kind) != "pool":
                there = tier.backend.batched_contains(keys)
                counts[kind] += there.count(Status.OK)
                keys = [key for key, status in zip(keys, there, strict=True) if status is not Status.OK]
        return TierChunks(**counts)

    def batched_wants(self, keys: Keys, end: End = None) -> list[Status]:
        """Returns MISSING for a key that the last tier lacks. If the last tier cannot find out, but another
        tier is available, returns MISSING if no available tier has the key."""
        *before, last = self.tiers
        statuses = last.backend.batched_wants(keys, end)
        unsure = [index for index, status in enumerate(statuses) if status not in (Status.OK, Status.MISSING)]
        others = [tier.backend for tier in before if tier.backend.available]
        if unsure and others:
            asked = [keys[index] for index in unsure]
            answers = [other.batched_contains(asked, end) for other in others]
            for index, found in zip(unsure, zip(*answers, strict=True), strict=True):
                if Status.OK not in found:
                    statuses[index] = Status.MISSING
        return statuses

    def batched_fetch(
        self, keys: Keys, *, payload_bytes: int | None = None, end: End = None
    ) -> Generator[list[Fetched], None, None]:
        return self._read(keys, self.memory.read_size(payload_bytes), 0, end)

    def stage(self, *, payload_bytes: int | None = None, end: End = None) -> Staged | None:
        """Waits until no blocking tier has too much to write. Then stages as the last tier does."""
        if not self.wait_room(end) and end == 0.0:
            return None  # the caller already holds memory; it puts that first
        return self.tiers[-1].backend.stage(payload_bytes=payload_bytes, end=end)

    def wait_room(self, end: End = None) -> bool:
        return all(tier.backend.wait_room(end) for tier in self.tiers if tier.blocking)

    def batched_put(self, keys: Keys, staged: Sequence[Staged], end: End = None) -> PutOutcome:
        items = self.memory.own(staged, keys)
        try:
            if self._closed:
                return Settled([Status.CLOSED] * len(keys))
            for key, item in zip(keys, items, strict=True):
                item.seal(key)  # before any tier reads the bytes
            begun: list[_TierWrite] = []
            for tier in self.tiers:
                if tier.blocking:
                    begun.append(_begin(tier, keys, items, end))
                else:
                    self._behind.put(tier, keys, items, end)
            return _Through(begun) if begun else Settled([Status.OK] * len(keys))
        finally:
            for item in items:
                item.release()

    def batched_remove(self, keys: Keys, end: End = None, *, force: bool = False) -> list[Status]:
        statuses = [Status.MISSING] * len(keys)
        for tier in self.tiers:
            for index, answer in enumerate(tier.backend.batched_remove(keys, end, force=force)):
                # a key removed from one tier is gone, unless another tier still has it or cannot find out
                if answer is not Status.MISSING and statuses[index] in (Status.MISSING, Status.OK):
                    statuses[index] = answer
        return statuses

    def pin(self, keys: Keys) -> Keys:
        """Pins in the first tier only, so that it is clear which tier has the pin."""
        return self.tiers[0].backend.pin(keys)

    def unpin(self, keys: Keys) -> None:
        self.tiers[0].backend.unpin(keys)

    def annotate(self, key: str, value: bytes, end: End = None) -> Status:
        answers = [tier.backend.annotate(key, value, end) for tier in self.tiers]
        return answers[-1]

    def close(self) -> None:
        self._closed = True
        self._behind.close()
        for tier in reversed(self.tiers):
            tier.backend.close()

    # --- reading --------------------------------------------------------------------------------------------

    def _read(self, keys: Keys, size: int, floor: int, end: End) -> Generator[list[Fetched], None, None]:
        """Yields each key's outcome from the first tier that has it, beginning with tier number `floor`.

        Adjacent keys of one tier are fetched together. If the tier lacks some of them after all, adjacent
        misses are read from the later tiers. Then the tier is asked for the rest, because it may be the only
        tier that has it: for one key, then for two, then for four. If it were asked for the whole rest each
        time, the work could grow with the square of the keys.
        """
        start = 0
        for level, run in groupby(self._levels(keys, floor, end)):
            tier, together = self.tiers[level], len(list(run))
            stop = start + together
            while start < stop:
                first, asked, lacking = start, keys[start : min(start + together, stop)], 0
                fetches = tier.backend.batched_fetch(asked, payload_bytes=size, end=end)
                with contextlib.closing(fetches):
                    for outcomes in fetches:
                        ready: list[Fetched] = []
                        for place, fetched in enumerate(outcomes):
                            if fetched.payload is None and level + 1 < len(self.tiers):
                                tier.metrics.missed(fetched.reason)
                                lacking += 1
                            elif lacking:
                                # to be read again later: the next tier may have to wait for memory, and a
                                # waiting reader must hold none
                                for unused in outcomes[place:]:
                                    unused.release()
                                fetches.close()
                                break
                            else:
                                if fetched.payload is not None:
                                    fetched.level = level, keys[start + place]
                                ready.append(fetched)
                        start += len(ready)
                        if ready:
                            yield ready
                if start == first and not lacking:
                    raise ValueError(f"tier {tier.metrics.tier} gave no outcome for {len(asked)} keys")
                together = 1 if lacking else 2 * together
                yield from self._read(keys[start : start + lacking], size, level + 1, end)
                start += lacking

    def _levels(self, keys: Keys, floor: int, end: End) -> list[int]:
        """Returns, for each key, the number of the first tier from `floor` on that has it, or the last
        tier's number if no other has it."""
        last = len(self.tiers) - 1
        levels = [last] * len(keys)
        unknown = list(range(len(keys)))
        for level, tier in enumerate(self.tiers[floor:-1], floor):
            if not unknown or not tier.backend.available:
                continue
            answers = tier.backend.batched_contains([keys[index] for index in unknown], end)
            for index, answer in zip(unknown, answers, strict=True):
                if answer is Status.OK:
                    levels[index] = level
            unknown = [index for index in unknown if levels[index] == last]
        return levels

    def check(self, fetched: Fetched, payload_checksum: int | None = None) -> str:
        """As `StorageBackend.check`. Also counts the outcome once, and puts an intact object into the tiers
        before its own if their policies say so."""
        if fetched.level is None or fetched.payload is None:
            return super().check(fetched, payload_checksum)
        (level, key), fetched.level = fetched.level, None
        reason = self.tiers[level].backend.check(fetched, payload_checksum)
        if reason:
            if level + 1 < len(self.tiers):
                self.tiers[level].metrics.missed(reason)
            return reason
        self.tiers[level].metrics.hit()
        for tier, seen in zip(self.tiers[:level], self._seen, strict=False):
            if tier.promote == "never" or (seen is not None and not seen.again(key)):
                continue
            if (staged := fetched.share()) is not None:
                try:
                    self._behind.put(tier, [key], [staged], None)
                finally:
                    staged.release()
        return ""


class _SecondHit:
    """Remembers keys with one read."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def again(self, key: str) -> bool:
        """Notes a read. Returns whether it is the key's second. After that, the next read counts as the first
        again."""
        with self._lock:
            if key in self._keys:
                del self._keys[key]
                return True
            self._keys[key] = None
            if len(self._keys) > _REMEMBERED:
                self._keys.popitem(last=False)
            return False


class _TierWrite(NamedTuple):
    """A write to one tier."""

    tier: Tier
    outcome: PutOutcome
    chunks: int

    def results(self) -> list[Status]:
        """Returns one status for each key, and counts what was dropped."""
        statuses = self.outcome.results()
        for status, chunks in Counter(statuses).items():
            if status is not Status.OK:
                self.tier.metrics.dropped(status.value, chunks)
        return statuses


def _begin(tier: Tier, keys: Keys, items: Sequence[Staged], end: End) -> _TierWrite:
    shares = [item.share() for item in items]
    return _TierWrite(tier, tier.backend.batched_put(keys, shares, end), len(keys))


class _Through(NamedTuple):
    """A put to one or more blocking tiers."""

    begun: list[_TierWrite]

    def results(self) -> list[Status]:
        return [write.results() for write in self.begun][-1]


class _WriteBehind:
    """Writes for which no caller waits. A write begins at once, if no more than `limit` chunks are then under
    way.

    A thread waits for the outcomes, each of which has a deadline, and counts what was dropped.
    """

    def __init__(self, limit: int, close_s: float) -> None:
        self._limit = limit
        self._close_s = close_s
        self._under_way = 0
        """How many chunks are being written."""
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[_TierWrite | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="write-behind", daemon=True)
        self._thread.start()

    def put(self, tier: Tier, keys: Keys, items: Sequence[Staged], end: End) -> None:
        """Begins to write the chunks that fit, and counts the others as dropped. A write into memory ends at
        once, so it always fits."""
        if tier.backend.kind == "memory":
            _begin(tier, keys, items, end).results()
            return
        with self._lock:
            fits = 0 if self._closed else min(len(keys), self._limit - self._under_way)
            if fits:
                self._jobs.put(_begin(tier, keys[:fits], items[:fits], end))
                self._under_way += fits
        tier.metrics.dropped((Status.CLOSED if self._closed else Status.OVERLOADED).value, len(keys) - fits)
        for item in items[fits:] if tier.backend.kind == "pool" else ():
            item.slot.settle()  # a local tier may keep it

    def close(self) -> None:
        """Waits up to `close_s` seconds for the writes under way. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join(self._close_s)

    def _run(self) -> None:
        while (write := self._jobs.get()) is not None:
            try:
                write.results()
            except Exception:  # an error of one write must not end the thread
                log.exception("tier %s: a write behind failed", write.tier.metrics.tier)
            finally:
                with self._lock:
                    self._under_way -= write.chunks
