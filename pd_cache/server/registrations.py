"""Clients, and what they have lent: a worker's tensors, mapped, and what may be done with them."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

import torch

from pd_cache.mover import ChunkRun
from pd_cache.paged import ChunkSlots
from pd_cache.server.fence import AbandonedError, FenceView
from pd_cache.server.lifeline import LifelineServer
from pd_cache.server.messages import Answer, Done, Hello, Move, RefusalError, Register, Retrieve, split_names
from pd_cache.server.models import Group, Model, Models
from pd_cache.server.sharing import FencedCopier, MappedTensors, close_all

log = logging.getLogger(__name__)

_UNMAP_S = 5.0
_DESCRIPTORS_S = 5.0
"""How long the descriptors of a registration may take longer than its message."""


class Worker(NamedTuple):
    """A registration: tensors that are mapped, and may be touched as their fence allows."""

    model: Model
    rank: int
    tensors: MappedTensors

    def run(self, request: Move) -> ChunkRun:
        """What is to be moved, checked before anything moves; RefusalError for what does not fit."""
        layout, database = self.tensors.layout, self.model.database
        names, blocks = split_names(request.names), request.blocks
        needed = len(names) * database.blocks_per_chunk
        if len(blocks) != needed:
            raise RefusalError("invalid", f"{len(names)} chunks lie in {needed} blocks, got {len(blocks)}")
        left_out = 0
        if isinstance(request, Retrieve):
            left_out = next((index for index, block in enumerate(blocks) if block >= 0), needed)
        moved = blocks[left_out:]
        if moved and not (min(moved) >= 0 and max(moved) < layout.blocks):
            raise RefusalError(
                "invalid", f"blocks must lie in [0, {layout.blocks}), got values from {min(moved)} to {max(moved)}"
            )
        if len(set(moved)) != len(moved):
            raise RefusalError("invalid", "a block is named twice: two places of a prompt cannot share one")
        shards = self.model.shards_of(self.rank)
        copiers = [
            FencedCopier(self.tensors, index, request.slot, request.ticket, request.event)
            for index in range(len(shards))
        ]
        rows = torch.tensor(blocks, dtype=torch.int64).view(len(names), database.blocks_per_chunk)
        return ChunkRun(database.keys(names, shards), [ChunkSlots(row, None) for row in rows], [*copiers])


class Client:
    """A connection that has said hello."""

    def __init__(self, hello: Hello, group: Group) -> None:
        self.hello = hello
        self.group = group
        self.worker: Worker | None = None
        self.gone = False
        self.registering = threading.Lock()
        self.last_seen = time.monotonic()

    @property
    def registered(self) -> Worker:
        """RefusalError before it has registered."""
        if self.worker is None:
            raise RefusalError("unknown_client", "register the KV tensors first")
        return self.worker

    def register(self, request: Register, models: Models, lifeline: LifelineServer) -> Answer:
        """Map its tensors, in place of what it had registered before.

        RefusalError, SharingError or LayoutError, with nothing left open, for what cannot be served.
        """
        if self.hello.kind != "worker":
            raise RefusalError("invalid", f"a {self.hello.kind} has no KV tensors to register")
        descriptors = lifeline.take(self.hello.client, request.registration, _DESCRIPTORS_S)
        if not descriptors:
            raise RefusalError(
                "invalid", "no file descriptors came over the lifeline; engines and their cache server share a host"
            )
        with self.registering:
            self._unmap()
            tensors: MappedTensors | None = None
            try:
                tensors = MappedTensors(request, descriptors[1:], FenceView(descriptors[0]), self.hello.held)
                model = models.serve(self.group, tensors.layout)
                if self.gone:
                    raise AbandonedError
                self.worker = Worker(model, self.hello.rank, tensors)
                model.workers.add(self.hello.client)
            except BaseException:
                if tensors is not None:
                    tensors.unmap(0.0)
                raise
            finally:
                close_all(descriptors)
        log.info("worker of %s registered: %s", self.hello.model, tensors.layout)
        return Done()

    def unregister(self) -> Answer:
        """Unmap its tensors; RefusalError where a copy outlives the wait for it."""
        with self.registering:
            if not self._unmap():
                raise RefusalError("busy", "a copy is still running; the memory is let go of when it ends")
        return Done()

    def leave(self) -> None:
        """It is gone: nothing of it is begun any more, and its tensors are unmapped."""
        self.gone = True
        with self.registering:
            self._unmap()

    def _unmap(self) -> bool:
        """Take back the registration; False if a copy outlives the wait for it. Call with `registering`."""
        worker, self.worker = self.worker, None
        if worker is None:
            return True
        worker.model.workers.discard(self.hello.client)
        return worker.tensors.unmap(_UNMAP_S)
