"""Publishes what the pool gets and loses, as KV events. Runs beside the master, in its role's process.

Every `events_interval_ms` it lists the pool's keys at the master, over loopback or the master's own address, and publishes what changed since
the last list. The list gives no key a lease, so asking keeps nothing from eviction. The master spends at most a fifth of its time on it, and
this process at most a third: if a list takes long, the next one comes later. So a removal is published at most an interval after the master has
dropped the key, or five times as long as a list takes. For the keys of a node that died the master does that after `client_ttl_s`.

A read that did not find a chunk is reported sooner: by an engine's `BlockRemoved` with the medium STORAGE, or by a subscriber
(`EventSubscriber.report_missing`). Then the master is asked for just these chunks, again without leases, at most ten times a second.

Only the leading master publishes chunks. The memory is bounded by `events_chunks`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

from launch.masters import LEADER, keys_at, master_health, missing_at
from pd_cache.cluster import NodeRecord
from pd_cache.kv_events import MEDIUM_STORAGE, EventBatch, KvEvent, RemovedEvent, Step, StoredEvent
from pd_cache.pool_contents import Chunk, PoolContents, PoolListing, describes_chunk, slim
from pd_cache.sparse_log import SparseLog
from pd_cache.tokens import HASH_BYTES, Namespace
from pd_cache.wire.event_streams import EventEndpoints, EventPublisher, EventSubscriber, OnSteps

log = logging.getLogger(__name__)

_MASTERS_SHARE, _OWN_SHARE = 5, 3
"""To list keys takes at most one part in so many of the master's time, and to compare them of this process's."""
_RECENT_LISTS = 8
"""The quickest of the last so many lists says how long a list keeps the master busy. The others waited for the machine."""
_CHECK_PAUSE_S = 0.1
_CHECKED_AT_ONCE = 256
_MOST_REPORTED = 4096
"""How many chunks that a read did not find may wait for a check."""
_KEY_BYTES = 96
"""More than a key has: of one shard of a chunk, in an epoch with a long label."""
_LIST_S = 60.0
_MOST_LEARNED = 4096
_TRIES = 4
"""How many namespaces are looked up per list."""

ReadNamespace = Callable[[str], Namespace | None]
"""Returns the namespace of a fingerprint; None if it cannot be read now."""


class PoolWatch:
    """Looks at the pool from time to time and publishes what changed."""

    def __init__(
        self,
        metrics: str,
        endpoints: EventEndpoints,
        *,
        interval_s: float,
        most_chunks: int,
        read_namespace: ReadNamespace = lambda fingerprint: None,
        elected: bool = False,
    ) -> None:
        """`metrics`: the base URL of the master's HTTP. `elected`: whether there may be another master that leads.

        Raises OSError if an address cannot be bound.
        """
        self._metrics = metrics
        self._interval_s = interval_s
        self._elected = elected
        self._read_namespace = read_namespace
        self._contents = PoolContents(most_chunks)
        self._namespaces: dict[str, Namespace] = {}
        self._unreadable: set[str] = set()
        """Fingerprints that were tried in vain, and are tried again when all others have been."""
        self._learned: deque[StoredEvent] = deque(maxlen=_MOST_LEARNED)
        self._reported: deque[tuple[str | None, bytes]] = deque(maxlen=_MOST_REPORTED)
        """The namespace, if it is known, and the name of chunks that reads did not find."""
        self._listed: deque[float] = deque(maxlen=_RECENT_LISTS)
        self._largest = _KEY_BYTES * max(1 << 16, 8 * most_chunks)
        self._subscriber = EventSubscriber()
        self._sparse = SparseLog()
        self._stop = threading.Event()
        self._woken = threading.Event()
        """Set when there is something to do before the next list."""
        self.lists = 0
        """How many lists were compared."""
        self.list_s = 0.0
        """How long the master took for the last one."""
        self.own_s = 0.0
        """How much of the processor's time this process took for it and all that followed."""
        self._publisher = EventPublisher(
            endpoints, lambda: self._contents.everything(self._namespaces), on_missing=self._missed
        )
        self._thread = threading.Thread(target=self._run, name="pool-events", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def follow(self, records: Iterable[NodeRecord]) -> None:
        """Learns, from now on, from these nodes' events which tokens the chunks have that they store."""
        wanted: dict[Hashable, tuple[EventEndpoints, OnSteps]] = {
            (one.address, one.instance): (EventEndpoints(one.events, one.replays or ""), self._learn)
            for one in records
            if one.events is not None and one.role != "master"
        }
        self._subscriber.follow(wanted)

    def close(self) -> None:
        """Stops looking. Waits for a list under way."""
        self._stop.set()
        self._woken.set()
        self._subscriber.close()
        if self._thread.is_alive():
            self._thread.join()
        self._publisher.close()

    def look(self) -> None:
        """Lists the keys once, and publishes what changed. Raises OSError or ValueError if the master does not answer."""
        begun, own = time.monotonic(), time.thread_time()
        keys: Sequence[bytes] = ()
        if not self._elected or master_health(self._metrics, 2.0).role == LEADER:
            keys = keys_at(self._metrics, _LIST_S, self._largest)
        self.list_s = time.monotonic() - begun
        self._listed.append(self.list_s)
        while self._learned:
            self._contents.learn(self._learned.popleft())
        listing = PoolListing(keys, self._contents.most_chunks)
        self._learn_namespaces(listing)
        change = self._contents.compare(listing, self._namespaces)
        if change.events:
            # with the first batch: a subscriber that asks for everything between two batches gets what the later ones say, and hears it twice
            commit: Callable[[], object] = functools.partial(self._contents.commit, change)
            for events in _batches(change.events):
                self._publisher.publish(events, commit)
                commit = int  # nothing more
        else:
            self._contents.commit(change)
        if listing.left_out and self._sparse.admit("left out") is not None:
            log.warning(
                "the pool has %d chunks more than `events_chunks`: nothing is published about them", listing.left_out
            )
        self.lists += 1
        self.own_s = time.thread_time() - own

    def check(self) -> None:
        """Asks the master for the chunks that reads did not find, up to 256, and publishes the removal of those that are gone. Raises OSError or
        ValueError if it does not answer.
        """
        wanted: dict[Chunk, list[str]] = {}
        while self._reported and len(wanted) < _CHECKED_AT_ONCE:
            fingerprint, name = self._reported.popleft()
            for chunk in self._contents.named(name) if fingerprint is None else [(fingerprint, name)]:
                wanted[chunk] = self._contents.keys(chunk, self._namespaces)
        asked = [key for keys in wanted.values() for key in keys]
        missing: set[str] = set()
        for start in range(0, len(asked), _CHECKED_AT_ONCE):
            missing |= missing_at(self._metrics, asked[start : start + _CHECKED_AT_ONCE])
        gone = [chunk for chunk, keys in wanted.items() if not missing.isdisjoint(keys)]
        change = self._contents.without(gone)
        if change.events:
            self._publisher.publish(change.events, functools.partial(self._contents.commit, change))

    def _run(self) -> None:
        while not self._stop.is_set():
            self._tried(self.look)
            masters = min(self._listed, default=0.0)
            pause = max((_MASTERS_SHARE - 1) * masters, (_OWN_SHARE - 1) * self.own_s)
            ends = time.monotonic() + max(self._interval_s, pause)
            while (left := ends - time.monotonic()) > 0 and not self._stop.is_set():
                if self._woken.wait(left):
                    self._woken.clear()
                    self._tried(self.check)
                    if self._reported:
                        self._woken.set()
                    self._stop.wait(_CHECK_PAUSE_S)

    def _tried(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, ValueError) as error:
            if self._sparse.admit("no list") is not None:
                log.warning("no KV events of the pool: its master does not say which keys it has: %s", error)
        except Exception:
            if self._sparse.admit("error") is not None:
                log.exception("no KV events of the pool")

    def _missed(self, ownership: str, hashes: Sequence[bytes]) -> None:
        self._reported.extend((ownership, name) for name in hashes if len(name) == HASH_BYTES)
        self._woken.set()

    def _learn(self, steps: Sequence[Step]) -> None:
        for step in steps:
            for event in step.events if isinstance(step, EventBatch) else ():
                if isinstance(event, StoredEvent) and describes_chunk(event):
                    self._learned.append(slim(event))
                elif isinstance(event, RemovedEvent) and event.medium == MEDIUM_STORAGE:
                    self._reported.extend(
                        (None, value[:HASH_BYTES]) for value in event.block_hashes if isinstance(value, bytes)
                    )
                    self._woken.set()

    def _learn_namespaces(self, listing: PoolListing) -> None:
        unknown = listing.manifests - self._namespaces.keys()
        if unknown <= self._unreadable:
            self._unreadable = set()
        for fingerprint in sorted(unknown - self._unreadable)[:_TRIES]:
            if (space := self._read_namespace(fingerprint)) is not None and space.fingerprint() == fingerprint:
                self._namespaces[fingerprint] = space
            else:
                self._unreadable.add(fingerprint)
        self._unreadable &= unknown
        self._namespaces = (
            {fingerprint: space for fingerprint, space in self._namespaces.items() if fingerprint in listing.manifests}
            if len(self._namespaces) > 256
            else self._namespaces
        )


def _batches(events: Sequence[KvEvent]) -> Iterable[Sequence[KvEvent]]:
    """Yields events in batches of up to about a megabyte."""
    size, start = 0, 0
    for index, event in enumerate(events):
        if isinstance(event, StoredEvent):
            size += 20 * len(event.block_hashes) + len(memoryview(event.token_ids)) + 100
        else:
            size += 20 * len(getattr(event, "block_hashes", ()))
        if size > 1 << 20:
            yield events[start : index + 1]
            size, start = 0, index + 1
    if start < len(events):
        yield events[start:]
