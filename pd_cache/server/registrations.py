"""Clients, and the tensors that workers have lent."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from pd_cache.mover import ChunkRun
from pd_cache.paged import leaving_out, plan
from pd_cache.server.served_models import EngineGroup, Model, ServedModels
from pd_cache.wire.channel import Incoming
from pd_cache.wire.fence import FenceView
from pd_cache.wire.lifeline import LifelineServer
from pd_cache.wire.messages import Answer, Done, Hello, Move, RefusalError, Register, Retrieve, split_names
from pd_cache.wire.sharing import FencedCopier, MappedTensors

log = logging.getLogger(__name__)

_UNMAP_S = 5.0


class Worker(NamedTuple):
    """A registration: mapped tensors, which may be touched as their fence allows."""

    model: Model
    rank: int
    tensors: MappedTensors

    def run(self, request: Move, until: float, epoch: str) -> ChunkRun:
        """Returns what a request is to move, in this epoch. No copy begins after `until`, by `time.monotonic()`.

        Raises RefusalError, before anything moves, if the request does not fit the layout.
        """
        layout, database = self.tensors.layout, self.model.database
        names = split_names(request.names)
        needed = len(names) * database.blocks_per_chunk
        if len(request.blocks) != needed:
            raise RefusalError("invalid", f"{len(names)} chunks need {needed} blocks, got {len(request.blocks)}")
        try:
            may_leave_out = leaving_out(loads=isinstance(request, Retrieve), keeps_tail=self.model.keeps_tail)
            chunks = plan(request.blocks, layout, database.chunk_size, may_leave_out=may_leave_out)
        except ValueError as error:
            raise RefusalError("invalid", str(error)) from None
        shards = self.model.shards_of(self.rank)
        copiers = [
            FencedCopier(self.tensors, index, request.slot, request.ticket, request.event, until)
            for index in range(len(shards))
        ]
        return ChunkRun(database.keys(names, shards, epoch), chunks, [*copiers], epoch)


class PendingRegistration(NamedTuple):
    """A registration whose file descriptors have not come yet."""

    incoming: Incoming
    request: Register
    until: float
    """By `time.monotonic()`."""


class Client:
    """A client that has said hello."""

    def __init__(self, hello: Hello, groups: Sequence[EngineGroup]) -> None:
        """`groups`: those of its tensors, or of its lookups."""
        self.hello = hello
        self.groups = tuple(groups)
        self.worker: Worker | None = None
        self.pending: PendingRegistration | None = None
        """At most one: a second registration replaces the first."""
        self.gone = False
        self.registering = threading.Lock()
        self.last_seen = time.monotonic()

    @property
    def registered(self) -> Worker:
        """The client's registration. Raises RefusalError if it has none."""
        worker = self.worker
        if worker is None:
            raise RefusalError("unknown_client", "register the KV tensors first")
        return worker

    def register(self, request: Register, models: ServedModels, lifeline: LifelineServer) -> Answer:
        """Maps the client's tensors, whose descriptors have come. Replaces an earlier registration.

        Raises RefusalError, SharingError, SealError or LayoutError, with nothing left open, if the tensors cannot be served.
        """
        descriptors = lifeline.take(self.hello.client, request.registration)
        if not descriptors:
            raise RefusalError("invalid", "a later registration's file descriptors replaced those of this one")
        try:
            with self.registering:
                self._map(request, descriptors, models)
        finally:
            lifeline.let_go(descriptors)
            if self.gone:  # it went while the lock was taken
                self.leave()
        return Done()

    def unregister(self) -> Answer:
        """Unmaps the client's tensors. Raises RefusalError if a copy outlives the wait for it."""
        with self.registering:
            if not self._unmap(_UNMAP_S):
                raise RefusalError("busy", "a copy is still running; the server unmaps the memory when it ends")
        return Done()

    def leave(self) -> None:
        """Makes the server begin none of the client's work and unmap its tensors as soon as nothing copies. Never waits.

        Called when the client is gone.
        """
        self.gone = True
        if self.registering.acquire(blocking=False):  # otherwise the thread that holds it calls this when it is done
            try:
                self._unmap(0.0)
            finally:
                self.registering.release()

    def _map(self, request: Register, descriptors: list[int], models: ServedModels) -> None:
        """Call with `registering` held."""
        self._unmap(_UNMAP_S)
        hello = self.hello
        fence = FenceView(descriptors[0])
        tensors = MappedTensors(request, descriptors[1:], fence, hello.shards_per_rank, hello.block_size)
        try:
            model = models.serve(self.groups[0], tensors.layout, hello.client, hello.object_sizes)
            self.worker = Worker(model, hello.rank, tensors)
        except BaseException:
            tensors.unmap(0.0)
            raise
        log.info("worker of %s registered: %s", self.hello.model, tensors.layout)

    def _unmap(self, timeout: float) -> bool:
        """Ends the registration. Returns False if a copy outlives the wait for it. Call with `registering` held."""
        worker, self.worker = self.worker, None
        if worker is None:
            return True
        worker.model.workers.discard(self.hello.client)
        return worker.tensors.unmap(timeout)
