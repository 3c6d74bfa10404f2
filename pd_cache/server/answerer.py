"""Answers lookups. Those that wait at the same time become one request to each backend."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from pd_cache.metrics import CacheMetrics
from pd_cache.server.receiving import failed
from pd_cache.server.served_models import Model
from pd_cache.server.sessions import Sessions
from pd_cache.wire.messages import Answer, Found
from transfer.errors import Status

log = logging.getLogger(__name__)

STEP_KEYS = 4096
"""The most keys that one lookup asks for before other lookups have their turn: a prompt of 128k tokens on eight ranks."""
MOST_KEYS = 1 << 18
"""The most keys that one lookup asks for in all. Keys behind these count as not found."""


class Question:
    """A lookup, how far it has come, and the name of its session.

    A lookup proceeds in steps, so that a long one holds up the others for one step at most. It ends at the first missing chunk,
    or at `MOST_KEYS`.
    """

    __slots__ = ("_asked", "_behind", "_hole", "_statuses", "at_hand", "client", "model", "names", "session")

    def __init__(self, model: Model, client: str, session: str, at_hand: int, names: list[bytes]) -> None:
        """The first `at_hand` chunks need not be asked for."""
        self.model = model
        self.client = client
        self.session = session
        self.at_hand = at_hand
        self.names = names[: at_hand + max(1, MOST_KEYS // model.database.namespace.shards)]
        self._behind = len(names) - len(self.names)
        """How many chunks at the end are never asked for."""
        self._asked = at_hand
        """How many of the first chunks are at hand or were asked for."""
        self._hole = False
        self._statuses: list[Status] = []

    def next_keys(self) -> list[str]:
        """Returns the keys to ask for next: `STEP_KEYS`, or those of one chunk if a chunk has more."""
        shards = self.model.database.namespace.shards
        start, self._asked = self._asked, min(len(self.names), self._asked + max(1, STEP_KEYS // shards))
        return self.model.database.all_shard_keys(self.names[start : self._asked])

    def learn(self, statuses: Sequence[Status]) -> None:
        """Takes in the outcomes of the keys that were asked for."""
        self._hole = statuses.count(Status.OK) < len(statuses)
        self._statuses += statuses

    @property
    def ended(self) -> bool:
        """Whether the answer is known."""
        return self._hole or self._asked == len(self.names)

    def judge(self, metrics: CacheMetrics) -> int:
        """Returns how many of the first chunks are at hand or were found with every shard. Counts their tokens in `metrics`."""
        unasked = len(self.names) - self._asked + self._behind
        metrics.tokens("lookup", "requested", unasked * self.model.database.chunk_size)
        return self.model.prefix.judge(self._asked, self.at_hand, self._statuses)

    def found_by_rank(self, end: int) -> list[list[str]]:
        """Returns the keys of the chunks from `at_hand` to `end`, in one list for each rank."""
        database, shards = self.model.database, self.model.database.namespace.shards
        keys = database.all_shard_keys(self.names[self.at_hand : end])
        if shards == 1:
            return [keys]
        return [
            [keys[chunk + shard] for chunk in range(0, len(keys), shards) for shard in self.model.shards_of(rank)]
            for rank in range(self.model.group.world_size)
        ]


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
        by_backend: dict[int, list[int]] = {}
        for index, question in enumerate(questions):
            by_backend.setdefault(id(question.model.mover.backend), []).append(index)
        for indices in by_backend.values():
            yield from self._ask(questions, indices)

    def _ask(self, questions: Sequence[Question], indices: list[int]) -> Iterator[tuple[int, Answer | None]]:
        """Asks one backend the questions at `indices`."""
        try:
            keys_of = [questions[index].next_keys() for index in indices]
            backend = questions[indices[0]].model.mover.backend
            with self._metrics.timed("lookup"):
                statuses = backend.batched_contains([key for keys in keys_of for key in keys])
        except Exception as error:  # an error of one backend must not stop the others
            log.exception("lookups failed")
            for index in indices:
                yield index, failed(error)
            return
        start = 0
        for index, keys in zip(indices, keys_of, strict=True):
            question, found = questions[index], statuses[start : start + len(keys)]
            start += len(keys)
            answer: Answer | None = None
            try:
                question.learn(found)
                if question.ended:
                    answer = self._judge(question)
            except Exception as error:  # an error of one lookup must not stop the others
                log.exception("a lookup failed")
                answer = failed(error)
            yield index, answer

    def _judge(self, question: Question) -> Answer:
        """Returns what a lookup found, and pins it for the lookup's session."""
        model, end = question.model, question.judge(self._metrics)
        if question.session and end > question.at_hand:
            names, backend = question.names[question.at_hand : end], model.mover.backend
            by_rank, client, session = question.found_by_rank(end), question.client, question.session
            self._sessions.open(client, session, model.group, backend, names, by_rank, self._session_s)
            if model.mover.closed:  # the backend was released meanwhile, together with its sessions
                self._sessions.end(client, session)
        return Found(end)
