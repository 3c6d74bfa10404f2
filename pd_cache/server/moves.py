"""MoveJob: a store or retrieve under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from pd_cache.blocks import StoreOutcome, TierChunks
from pd_cache.mover import ChunkRun
from pd_cache.server.registrations import Client, Worker
from pd_cache.wire.messages import Answer, Loaded, Move, RefusalError, Retrieve, Stored, count_names, split_names

TURN_BYTES = 1 << 30
"""The bytes that one store or retrieve moves before others have their turn: about a second's work."""


class _BegunJob(NamedTuple):
    worker: Worker
    run: ChunkRun


class MoveJob:
    """A store or retrieve, done in turns. For one thread at a time."""

    def __init__(self, client: Client, request: Move, loaded: Callable[[Move, Worker], None]) -> None:
        """`loaded` is called when a retrieve has ended."""
        self._client = client
        self._request = request
        self._loaded = loaded
        self._begun: _BegunJob | None = None
        worker = client.worker
        self._epoch = request.epoch
        """None if the client has not said it, and the worker's model was not known when the request came."""
        if self._epoch is None and worker is not None:
            self._epoch = worker.model.mover.epochs.last
        self._done = 0
        """How many chunks have moved."""
        self._tiers = TierChunks()
        """Where the chunks that were loaded came from."""
        self._outcomes = bytearray()
        self.until = time.monotonic() + request.patience_ms / 1000
        """When the engine gives it up, by `time.monotonic()`."""

    @property
    def cost(self) -> int:
        """How many chunks the next turn moves."""
        left = count_names(self._request.names) - self._done
        worker = self._client.worker if self._begun is None else self._begun.worker
        if worker is None:
            return left
        model = worker.model
        return min(left, max(1, TURN_BYTES // (model.mover.backend.payload_bytes * len(model.shards_of(worker.rank)))))

    def turn(self) -> Answer | None:
        """Does the next turn. Returns the answer after the last turn, otherwise None.

        Raises RefusalError if the request does not fit or is late, AbandonedError if the engine has given it up, or what the memory raises.
        """
        if time.monotonic() > self.until:
            raise RefusalError("late", "its turn came after its deadline")
        if self._begun is None:
            worker = self._client.registered
            epoch = worker.model.mover.epochs.last if self._epoch is None else self._epoch
            self._begun = _BegunJob(worker, worker.run(self._request, self.until, epoch))
        worker, run = self._begun
        first, self._done = self._done, self._done + self.cost
        part = run.part(first, self._done)
        if isinstance(self._request, Retrieve):
            restored = worker.model.mover.load(part)
            self._tiers = TierChunks(*map(sum, zip(self._tiers, restored.tiers, strict=True)))
            if restored.chunks == len(part.chunks) and self._done < len(run.chunks):
                return None
            self._loaded(self._request, worker)
            # what earlier turns have loaded was computed with weights that may have changed since
            if first and (outdated := worker.model.mover.outdated(run)):
                return Loaded(0, outdated)
            restored = restored.explained(worker.model.history, split_names(self._request.names)[first:])
            return Loaded(first + restored.chunks, restored.reason, *self._tiers)
        outcomes = worker.model.mover.store(part)
        names = split_names(self._request.names)[first : self._done]
        worker.model.history.note(
            [name for name, outcome in zip(names, outcomes, strict=True) if outcome is not StoreOutcome.NOT]
        )
        self._outcomes += bytes(outcomes)
        return None if self._done < len(run.chunks) else Stored(bytes(self._outcomes))
