"""Answers lookups. Those that wait at the same time become one request to each backend."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pd_cache.groups import LayerGroups
from pd_cache.lookup import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found
from pd_cache.server.models import Model
from pd_cache.server.protocol import Answer, Lookup, failed, split_names
from pd_cache.server.sessions import FoundChunks, Sessions
from pd_cache.tiers import StorageBackend
from transfer.errors import Status

log = logging.getLogger(__name__)

STEP_KEYS = 4096
"""The most keys that one lookup asks for before other lookups have their turn: a prompt of 128k tokens on eight ranks."""
MOST_KEYS = 1 << 18
"""The most keys that one lookup asks for in all. Keys behind these count as not found."""


class _BackendKeys(NamedTuple):
    backend: StorageBackend
    keys: list[str]


class Question:
    """A lookup, how far it has come, and the name of its session.

    A lookup proceeds in steps, so that a long one holds up the others for one step at most. It ends at the first missing chunk,
    or at `MOST_KEYS`.
    """

    __slots__ = (
        "_asked",
        "_behind",
        "_hole",
        "_statuses",
        "at_hand",
        "client",
        "epoch",
        "groups",
        "models",
        "names",
        "session",
    )

    def __init__(self, models: Sequence[Model], client: str, request: Lookup) -> None:
        """`models`: one for each group of layers."""
        self.models = models
        self.groups = LayerGroups([model.database for model in models])
        self.client = client
        self.session = request.session
        self.at_hand = at_hand = request.at_hand
        self.epoch = request.epoch
        names = split_names(request.names)
        self.names = names[: at_hand + max(1, MOST_KEYS // self.groups.keys_per_chunk)]
        self._behind = len(names) - len(self.names)
        """How many chunks at the end are never asked for."""
        self._asked = at_hand
        """How many of the first chunks are at hand or were asked for."""
        self._hole = False
        self._statuses: list[list[Status]] = [[] for _ in models]
        """What is known of each group's keys, chunk by chunk."""

    def next_keys(self) -> list[list[str]]:
        """Returns the keys to ask each model's backend for next: `STEP_KEYS`, or those of one chunk if a chunk has more."""
        step = max(1, STEP_KEYS // self.groups.keys_per_chunk)
        start, self._asked = self._asked, min(len(self.names), self._asked + step)
        names = self.names[start : self._asked]
        return [model.database.all_shard_keys(names, self.epoch) for model in self.models]

    def learn(self, statuses: Sequence[Sequence[Status]]) -> None:
        """Takes in the outcomes of the keys that were asked for."""
        for known, new, model in zip(self._statuses, statuses, self.models, strict=True):
            space = model.database.namespace
            # the first names, if chunks lie under those behind them
            unneeded = 0 if known else space.ahead * space.shards
            known += new
            # a prefix that lacks a chunk which it needs from its beginning on ends there
            self._hole |= not model.keeps_tail and any(status is not Status.OK for status in new[unneeded:])

    @property
    def ended(self) -> bool:
        """Whether the answer is known."""
        return self._hole or self._asked == len(self.names)

    def judge(self, metrics: CacheMetrics) -> Found:
        """Returns how many of the first chunks are at hand or were found. Counts their tokens in `metrics`."""
        unasked = len(self.names) - self._asked + self._behind
        metrics.tokens("lookup", "requested", unasked * self.groups.first.chunk_size)
        statuses = [status for known in self._statuses for status in known]
        lookup = PrefixLookup(self.groups, metrics, self.models[0].mover.history)
        return lookup.judge(self.names[: self._asked], self.at_hand, statuses, self.epoch)

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
    """Answers lookups, and pins what they found. Thread-safe."""

    def __init__(self, sessions: Sessions, metrics: CacheMetrics, session_s: float) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._session_s = session_s

    def step(self, questions: Sequence[Question]) -> Iterator[tuple[int, Answer | None]]:
        """Asks for the next keys of each question. Yields the question's index with its answer, or with None if there is more to ask.

        Yields in any order, as soon as an outcome is known. Never raises.
        """
        by_backends: dict[tuple[int, ...], list[int]] = {}
        for index, question in enumerate(questions):
            backends = tuple(id(model.mover.backend) for model in question.models)
            by_backends.setdefault(backends, []).append(index)
        for indices in by_backends.values():  # each backend once
            asked: dict[int, _BackendKeys] = {}
            answers: dict[int, Iterator[Status]] = {}
            try:
                keys_of = [questions[index].next_keys() for index in indices]
                for index, parts in zip(indices, keys_of, strict=True):
                    for model, keys in zip(questions[index].models, parts, strict=True):
                        backend = model.mover.backend
                        asked.setdefault(id(backend), _BackendKeys(backend, [])).keys.extend(keys)
                with self._metrics.timed("lookup"):
                    for place, one in asked.items():
                        answers[place] = iter(one.backend.batched_contains(one.keys))
            except Exception as error:  # an error of one backend must not stop the others
                log.exception("lookups failed")
                for index in indices:
                    yield index, failed(error)
                continue
            for index, parts in zip(indices, keys_of, strict=True):
                models = questions[index].models
                found = [
                    list(itertools.islice(answers[id(model.mover.backend)], len(keys)))
                    for model, keys in zip(models, parts, strict=True)
                ]
                yield index, self._learn(questions[index], found)

    def _learn(self, question: Question, found: Sequence[Sequence[Status]]) -> Answer | None:
        """Gives a question the outcomes of the keys that it asked for. Returns its answer, or None if there is more to ask."""
        try:
            question.learn(found)
            return self._judge(question) if question.ended else None
        except Exception as error:  # an error of one lookup must not stop the others
            log.exception("a lookup failed")
            return failed(error)

    def _judge(self, question: Question) -> Answer:
        """Returns what a lookup found, and pins it for the lookup's session."""
        reach = question.judge(self._metrics)
        end = reach.chunks
        client, session = question.client, question.session
        if session and end > question.at_hand:
            self._sessions.open(client, session, list(question.found(end)), self._session_s)
            if any(model.mover.closed for model in question.models):
                # a backend was released meanwhile, together with its sessions
                self._sessions.end(client, session)
        return reach
