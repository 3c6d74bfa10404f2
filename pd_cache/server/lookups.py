"""Answers lookups, and keeps what they found. Lookups that wait at the same time become one request to each backend.

A *session* keeps what a lookup found until it is loaded, or until a deadline. It belongs to the client that made the lookup, and holds the
keys found, shard by shard. In local tiers a key is pinned by reference count. The server keeps the pool's objects by looking them up again
before their lease ends; that takes one `batch_is_exist` for all sessions together.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from pd_cache.groups import LayerGroups
from pd_cache.lookup import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.server.models import Model
from pd_cache.server.protocol import Answer, Lookup, Refused, failed, split_names
from pd_cache.tiers import StorageBackend
from transfer.errors import Status

log = logging.getLogger(__name__)

REQUEST_KEYS = 1 << 16
"""The most keys of one request to a backend."""
MOST_KEYS = 1 << 18
"""The most keys that one lookup asks for. Keys behind these count as not found."""

MAX_KEYS = 1 << 20
"""The most keys of all sessions. More keys end the oldest sessions."""


class FoundChunks(NamedTuple):
    """What a lookup found of one model: a group of an engine's layers."""

    model: Hashable
    backend: StorageBackend
    names: Sequence[bytes]
    shards: Sequence[Sequence[str]]
    """The chunks' keys, one list for each rank, which loads its own."""


class _Pins:
    """What a session holds of one model."""

    __slots__ = ("_pinned", "_shards", "backend", "names", "size")

    def __init__(self, found: FoundChunks) -> None:
        self.backend = found.backend
        self.names = frozenset(found.names)
        self._shards = dict(enumerate(found.shards))
        self.size = sum(len(keys) for keys in found.shards)
        """How many keys it was opened with."""
        self._pinned = set(found.backend.pin(self.keys))

    @property
    def keys(self) -> list[str]:
        """The keys that it holds, pinned or kept by a lease."""
        return [key for keys in self._shards.values() for key in keys]

    @property
    def pinned(self) -> int:
        """How many keys it holds."""
        return sum(len(keys) for keys in self._shards.values())

    @property
    def unpinned(self) -> list[str]:
        """The keys that no local tier has pinned for it."""
        return [key for key in self.keys if key not in self._pinned]

    def drop(self, rank: int | None = None) -> bool:
        """Unpins the keys of one rank, or of all. Returns True if none are left."""
        ranks = list(self._shards) if rank is None else [rank]
        for one in ranks:
            pinned = self._pinned.intersection(self._shards.pop(one, ()))
            if pinned:
                self._pinned -= pinned
                self.backend.unpin(list(pinned))
        return not self._shards


class Session:
    """One request's pins."""

    __slots__ = ("client", "deadline", "name", "pins", "size")

    def __init__(self, client: str, name: str, found: Sequence[FoundChunks], deadline: float) -> None:
        self.client = client
        self.name = name
        self.deadline = deadline
        self.pins = {one.model: _Pins(one) for one in found}
        self.size = sum(one.size for one in self.pins.values())
        """How many keys it was opened with."""

    @property
    def pinned(self) -> int:
        """How many keys it holds."""
        return sum(one.pinned for one in self.pins.values())

    def drop(self, model: Hashable, rank: int) -> bool:
        """Unpins the keys of one rank of a model. Returns True if none are left of any model."""
        if self.pins[model].drop(rank):
            del self.pins[model]
        return not self.pins

    def drop_all(self) -> None:
        """Unpins all keys."""
        for one in self.pins.values():
            one.drop()


class Sessions:
    """All sessions of a server. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._by_request: dict[tuple[Hashable, str], list[Session]] = {}
        self._keys = 0
        """How many keys the sessions were opened with."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def pinned(self) -> int:
        """How many keys all sessions hold. A key that several sessions hold counts several times."""
        with self._lock:
            return sum(session.pinned for session in self._sessions.values())

    def open(self, client: str, name: str, found: Sequence[FoundChunks], lifetime: float) -> None:
        """Pins what a lookup found. Ends the client's earlier session of this name."""
        session = Session(client, name, found, self._clock() + lifetime)
        with self._lock:
            self._end(client, name)  # only now, when the new one already holds the same keys
            self._sessions[client, name] = session
            for model in session.pins:
                self._by_request.setdefault((model, name), []).append(session)
            self._keys += session.size
            while self._keys > self._most_keys:
                self._end(*next(iter(self._sessions)))

    def loaded(self, name: str, model: Hashable, rank: int, names: Sequence[bytes]) -> None:
        """Releases what the request's session holds for a rank, which has loaded it.

        The client that looks up and the client that loads belong to one engine. If several engines of a model have requests of the
        same name, any session that holds these chunks will do, because it holds the same keys.
        """
        with self._lock:
            candidates = self._by_request.get((model, name), ())
            session = next((one for one in candidates if one.pins[model].names.issuperset(names)), None)
            if session is None:
                return
            ended = session.drop(model, rank)
            if model not in session.pins:
                self._forget(session, model)
            if ended:
                self._end(session.client, session.name)

    def end(self, client: str, name: str) -> None:
        """Ends one session; nothing happens if there is none."""
        with self._lock:
            self._end(client, name)

    def end_client(self, client: str) -> None:
        """Ends all sessions of a client that is gone."""
        with self._lock:
            for owner, name in list(self._sessions):
                if owner == client:
                    self._end(owner, name)

    def end_backend(self, backend: StorageBackend) -> None:
        """Ends all sessions over a backend that is about to be closed."""
        with self._lock:
            over = [
                key
                for key, session in self._sessions.items()
                if any(pins.backend is backend for pins in session.pins.values())
            ]
            for key in over:
                self._end(*key)

    def expire(self) -> int:
        """Ends the sessions whose deadline has passed. Returns how many."""
        now = self._clock()
        with self._lock:
            late = [key for key, session in self._sessions.items() if session.deadline <= now]
            for key in late:
                self._end(*key)
        return len(late)

    def leases(self) -> list[tuple[StorageBackend, list[str]]]:
        """Returns, for each backend, the keys that only a lease keeps, each once."""
        with self._lock:
            by_backend: dict[int, tuple[StorageBackend, dict[str, None]]] = {}
            for session in self._sessions.values():
                for pins in session.pins.values():
                    _, keys = by_backend.setdefault(id(pins.backend), (pins.backend, {}))
                    keys.update(dict.fromkeys(pins.unpinned))
        return [(backend, list(keys)) for backend, keys in by_backend.values()]

    def _end(self, client: str, name: str) -> None:
        session = self._sessions.pop((client, name), None)
        if session is None:
            return
        self._keys -= session.size
        for model in session.pins:
            self._forget(session, model)
        session.drop_all()

    def _forget(self, session: Session, model: Hashable) -> None:
        """Takes a session off the list of those that hold chunks of a model for its request."""
        same = self._by_request[model, session.name]
        same.remove(session)
        if not same:
            del self._by_request[model, session.name]


class Question:
    """A lookup, and the name of its session."""

    __slots__ = ("at_hand", "client", "epoch", "groups", "models", "names", "session")

    def __init__(self, models: Sequence[Model], client: str, request: Lookup) -> None:
        """`models`: one for each group of layers."""
        self.models = models
        self.groups = LayerGroups([model.database for model in models])
        self.client = client
        self.session = request.session
        self.at_hand = request.at_hand
        self.epoch = request.epoch
        most = max(1, MOST_KEYS // self.groups.keys_per_chunk)
        self.names = split_names(request.names)[: request.at_hand + most]

    def keys(self) -> list[list[str]]:
        """Returns the keys to ask each model's backend for."""
        names = self.names[self.at_hand :]
        return [model.database.all_shard_keys(names, self.epoch) for model in self.models]

    def found(self, end: int) -> Iterator[FoundChunks]:
        """Yields, for each group of layers, the chunks that a load up to `end` needs."""
        for model, needed in zip(self.models, self.groups.needed(self.at_hand, end), strict=True):
            names = self.names[needed.start : needed.stop]
            database, shards = model.database, model.database.namespace.shards
            keys = database.all_shard_keys(names, self.epoch)
            by_rank = [
                [keys[chunk + shard] for chunk in range(0, len(keys), shards) for shard in model.shards_of(rank)]
                for rank in range(model.group.world_size)
            ]
            yield FoundChunks(model.group, model.mover.backend, names, by_rank)


class Answerer:
    """Answers lookups, and pins what they found."""

    def __init__(self, sessions: Sessions, metrics: CacheMetrics, session_s: float) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._session_s = session_s

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Returns the answer to each question. Asks each backend for the keys of all of them together. Never raises."""
        keys_of = [question.keys() for question in questions]
        wanted: dict[StorageBackend, list[str]] = {}
        for question, parts in zip(questions, keys_of, strict=True):
            for model, keys in zip(question.models, parts, strict=True):
                wanted.setdefault(model.mover.backend, []).extend(keys)
        with self._metrics.timed("lookup"):
            known = {backend: self._ask(backend, keys) for backend, keys in wanted.items()}
        answers = []
        for question, parts in zip(questions, keys_of, strict=True):
            statuses: list[Status] = []
            answer: Answer | None = None
            for model, keys in zip(question.models, parts, strict=True):
                one = known[model.mover.backend]
                if isinstance(one, Refused):
                    answer = one
                else:
                    statuses += itertools.islice(one, len(keys))
            answers.append(answer or self._judge(question, statuses))
        return answers

    def _ask(self, backend: StorageBackend, keys: list[str]) -> Iterator[Status] | Refused:
        try:
            statuses: list[Status] = []
            for start in range(0, len(keys), REQUEST_KEYS):
                statuses += backend.batched_contains(keys[start : start + REQUEST_KEYS])
            return iter(statuses)
        except Exception as error:  # an error of one backend must not stop the others
            log.exception("lookups failed")
            return failed(error)

    def _judge(self, question: Question, statuses: list[Status]) -> Answer:
        """Returns what a lookup found, and pins it for the lookup's session."""
        try:
            prefix = PrefixLookup(question.groups, self._metrics, question.models[0].mover.history)
            reach = prefix.judge(question.names, question.at_hand, statuses, question.epoch)
            client, session = question.client, question.session
            if session and reach.chunks > question.at_hand:
                self._sessions.open(client, session, list(question.found(reach.chunks)), self._session_s)
                if any(model.mover.closed for model in question.models):
                    # a backend was released meanwhile, together with its sessions
                    self._sessions.end(client, session)
            return reach
        except Exception as error:  # an error of one lookup must not stop the others
            log.exception("a lookup failed")
            return failed(error)
