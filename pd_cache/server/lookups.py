"""Answers lookups, and protects the found chunks. All lookups that wait at the same time share one request to
each backend.

A *session* protects the chunks that a lookup found, until they are loaded or until a deadline. It belongs to
the client that made the lookup, and holds the keys, shard by shard. Local tiers pin a key by a reference
count. In the pool, a lookup's lease protects an object, so the server looks it up again before its lease
ends: each object once for all sessions, 1,000 in a `batch_is_exist`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from pd_cache.chunks import Names
from pd_cache.lookup import PrefixLookup, count_found
from pd_cache.metrics import CacheMetrics
from pd_cache.server.models import Model
from pd_cache.server.protocol import Answer, Lookup, failed
from pd_cache.tiers import StorageBackend
from transfer.errors import Status

log = logging.getLogger(__name__)

REQUEST_KEYS = 1 << 16
"""The most keys of a request to a backend."""
MOST_KEYS = 1 << 18
"""The most keys that a lookup asks for. Further keys count as not found."""

MAX_KEYS = 1 << 20
"""The most keys of all sessions. Beyond it, the oldest sessions end."""


class FoundChunks(NamedTuple):
    """The chunks that a lookup found for one model, that is, for one layer group of an engine."""

    model: Hashable
    backend: StorageBackend
    names: Names
    shards: Sequence[Sequence[str]]
    """The chunks' keys: a list for each rank, because each rank loads its own shards."""


class _Pins(NamedTuple):
    """The keys that a session holds for a rank of a model."""

    backend: StorageBackend
    names: frozenset[bytes]
    pinned: Sequence[str]
    """The keys that a local tier has pinned."""
    leased: Sequence[str]
    """The other keys, which only a lease protects."""


class Session(NamedTuple):
    """A request's pins."""

    client: str
    name: str
    deadline: float
    pins: dict[tuple[Hashable, int], _Pins]
    """The pins of chunks that are not loaded yet, by model and rank."""
    size: int
    """How many keys the session was opened with."""


class Sessions:
    """All sessions of a server. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        """The sessions, by client and name."""
        self._keys = 0
        """How many keys the sessions were opened with."""

    def open(self, client: str, name: str, found: Sequence[FoundChunks], lifetime: float) -> None:
        """Pins the chunks that a lookup found. Ends the client's earlier session of this name."""
        pins, size = {}, 0
        for model, backend, names, shards in found:
            for rank, keys in enumerate(shards):
                pinned = backend.pin(keys)
                leased = sorted(set(keys).difference(pinned))
                pins[model, rank] = _Pins(backend, frozenset(names), pinned, leased)
                size += len(keys)
        session = Session(client, name, self._clock() + lifetime, pins, size)
        with self._lock:
            self._end(client, name)  # only after the new session holds the keys
            self._sessions[client, name] = session
            self._keys += size
            while self._keys > self._most_keys:
                self._end(*next(iter(self._sessions)))

    def loaded(self, name: str, model: Hashable, rank: int, names: Names) -> None:
        """Releases the chunks that the request's session holds for a rank, after the rank has loaded them.

        The client that loads is not the client that looked up, but belongs to the same engine. If several
        engines of a model have requests of the same name, this releases any session that holds the chunks,
        because all hold the same keys.
        """
        with self._lock:
            for session in self._sessions.values():
                pins = session.pins.get((model, rank)) if session.name == name else None
                if pins is not None and pins.names.issuperset(names):
                    del session.pins[model, rank]
                    pins.backend.unpin(pins.pinned)
                    if not session.pins:
                        self._end(session.client, name)
                    return

    def end(self, client: str, name: str) -> None:
        """Ends a session. Does nothing if there is none."""
        with self._lock:
            self._end(client, name)

    def end_client(self, client: str) -> None:
        """Ends all sessions of a client that is gone."""
        self._end_all(lambda session: session.client == client)

    def end_backend(self, backend: StorageBackend) -> None:
        """Ends all sessions over a backend that is about to be closed."""
        self._end_all(lambda session: any(pins.backend is backend for pins in session.pins.values()))

    def expire(self) -> int:
        """Ends the sessions whose deadline has passed. Returns their number."""
        now = self._clock()
        return self._end_all(lambda session: session.deadline <= now)

    def leases(self) -> list[tuple[StorageBackend, list[str]]]:
        """Returns, for each backend, the keys that only a lease protects, each once."""
        by_backend: dict[StorageBackend, dict[str, None]] = {}
        with self._lock:
            for session in self._sessions.values():
                for pins in session.pins.values():
                    by_backend.setdefault(pins.backend, {}).update(dict.fromkeys(pins.leased))
        return [(backend, list(keys)) for backend, keys in by_backend.items()]

    def _end_all(self, unwanted: Callable[[Session], bool]) -> int:
        with self._lock:
            ending = [session for session in self._sessions.values() if unwanted(session)]
            for session in ending:
                self._end(session.client, session.name)
            return len(ending)

    def _end(self, client: str, name: str) -> None:
        session = self._sessions.pop((client, name), None)
        if session is not None:
            self._keys -= session.size
            for pins in session.pins.values():
                pins.backend.unpin(pins.pinned)


class LookupJob(NamedTuple):
    """A lookup, and the client that asks."""

    models: Sequence[Model]
    """The models of the layer groups in `prefix`."""
    prefix: PrefixLookup
    client: str
    request: Lookup

    def found(self, keys: Sequence[Sequence[str]], end: int) -> list[FoundChunks]:
        """Returns, for each layer group, the chunks that a load up to `end` needs. `keys` has, for each layer
        group, the keys of the chunks that are not at hand."""
        found, first = [], self.request.chunks_at_hand
        for model, own, needed in zip(self.models, keys, self.prefix.groups.needed(first, end), strict=True):
            shards, names = model.database.namespace.shards, self.request.names[needed.start : needed.stop]
            chunks = range(needed.start - first, needed.stop - first)
            by_rank = [
                [own[chunk * shards + shard] for chunk in chunks for shard in held] for held in model.shards
            ]
            found.append(FoundChunks(model.group, model.mover.backend, names, by_rank))
        return found


def answer_lookups(
    jobs: Sequence[LookupJob], sessions: Sessions, metrics: CacheMetrics, session_s: float
) -> list[Answer]:
    """Returns the answer to each job. Asks each backend for the keys of all jobs together. Never raises.

    The chunks that a job found are pinned for its session, for `session_s` seconds.
    """
    asked: list[list[list[str]]] = []
    """For each job, the keys that are wanted of each model."""
    wanted: dict[StorageBackend, list[str]] = {}
    for job in jobs:
        first = job.request.chunks_at_hand
        names = job.request.names[first : first + max(1, MOST_KEYS // job.prefix.groups.keys_per_chunk)]
        asked.append([model.database.keys(names, label=job.request.label) for model in job.models])
        for model, keys in zip(job.models, asked[-1], strict=True):
            wanted.setdefault(model.mover.backend, []).extend(keys)
    known: dict[StorageBackend, Iterator[Status]] = {}
    begun = time.perf_counter()
    for backend, keys in wanted.items():
        found: list[Status] = []
        try:
            for start in range(0, len(keys), REQUEST_KEYS):
                found += backend.batched_contains(keys[start : start + REQUEST_KEYS])
        except Exception:  # an error of one backend must not stop the others
            log.exception("lookups failed")
            found = [Status.INTERNAL] * len(keys)
        known[backend] = iter(found)
    metrics.counts.took("lookup", time.perf_counter() - begun)
    answers: list[Answer] = []
    for job, by_model in zip(jobs, asked, strict=True):
        statuses: list[Status] = []
        for model, keys in zip(job.models, by_model, strict=True):
            statuses += itertools.islice(known[model.mover.backend], len(keys))
        client, request = job.client, job.request
        try:
            answer = count_found(job.prefix, request.names, request.chunks_at_hand, statuses, request.label)
            if request.session and answer.chunks > request.chunks_at_hand:
                sessions.open(client, request.session, job.found(by_model, answer.chunks), session_s)
                for model in job.models:
                    if model.mover.closed:  # closed meanwhile, with its sessions
                        sessions.end(client, request.session)
            answers.append(answer)
        except Exception as error:  # an error of one lookup must not stop the others
            log.exception("a lookup failed")
            answers.append(failed(error))
    return answers
