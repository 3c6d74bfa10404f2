"""Answers lookups. Those that wait at the same time become one request to each backend."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence

from pd_cache.groups import LayerGroups
from pd_cache.lookup import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.server.models import Model
from pd_cache.server.protocol import Answer, Lookup, Refused, failed, split_names
from pd_cache.server.sessions import FoundChunks, Sessions
from pd_cache.tiers import StorageBackend
from transfer.errors import Status

log = logging.getLogger(__name__)

REQUEST_KEYS = 1 << 16
"""The most keys of one request to a backend."""
MOST_KEYS = 1 << 18
"""The most keys that one lookup asks for. Keys behind these count as not found."""


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
