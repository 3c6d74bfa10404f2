"""Lookups: those that wait at the same time are one question to each backend."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pd_cache.metrics import CacheMetrics
from pd_cache.server.messages import Answer, Found, Refused
from pd_cache.server.models import Model
from pd_cache.server.sessions import Sessions
from transfer.errors import Status

log = logging.getLogger(__name__)


class Question(NamedTuple):
    """A lookup, and what its session is known by."""

    model: Model
    client: str
    session: str
    held: int
    """Chunks, from the first, that need not be asked for."""
    names: list[bytes]


class Answerer:
    """Answers lookups, and pins what they found. Thread-safe."""

    def __init__(self, sessions: Sessions, metrics: CacheMetrics, session_s: float) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._session_s = session_s

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Answer]]:
        """An answer to each question, after its index, in any order and as soon as it is known. Never raises."""
        by_backend: dict[int, list[int]] = {}
        for index, question in enumerate(questions):
            by_backend.setdefault(id(question.model.mover.backend), []).append(index)
        for indices in by_backend.values():
            yield from self._ask(questions, indices)

    def _ask(self, questions: Sequence[Question], indices: list[int]) -> Iterator[tuple[int, Answer]]:
        """Those of one backend."""
        try:
            keys_of = [self._wanted(questions[index]) for index in indices]
            backend = questions[indices[0]].model.mover.backend
            with self._metrics.timed("lookup"):
                statuses = backend.batched_contains([key for keys in keys_of for key in keys])
        except Exception as error:  # whatever one backend does, the others are asked
            log.exception("lookups failed")
            for index in indices:
                yield index, _failed(error)
            return
        start = 0
        for index, keys in zip(indices, keys_of, strict=True):
            found = statuses[start : start + len(keys)]
            start += len(keys)
            try:
                answer = self._judge(questions[index], keys, found)
            except Exception as error:  # whatever one lookup does, the others are answered
                log.exception("a lookup failed")
                answer = _failed(error)
            yield index, answer

    def _wanted(self, question: Question) -> list[str]:
        return question.model.prefix.wanted(question.names, question.held * question.model.database.chunk_size)

    def _judge(self, question: Question, keys: list[str], statuses: Sequence[Status]) -> Answer:
        """What a lookup found; pinned for its session."""
        model = question.model
        size = model.database.chunk_size
        end = model.prefix.judge(question.names, question.held * size, statuses) // size
        found = end - question.held
        if question.session and found > 0:
            shards, names = model.database.namespace.shards, question.names[question.held : end]
            by_rank = [keys[:found]]
            if shards > 1:
                by_rank = [
                    [keys[chunk * shards + shard] for chunk in range(found) for shard in model.shards_of(rank)]
                    for rank in range(model.group.world_size)
                ]
            self._sessions.open(
                question.client, question.session, model.group, model.mover.backend, names, by_rank, self._session_s
            )
        return Found(end)


def _failed(error: Exception) -> Refused:
    return Refused("failed", f"{type(error).__name__}: {error}")
