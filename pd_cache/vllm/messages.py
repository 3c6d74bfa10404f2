"""What scheduler and workers tell each other with every step.

These are pickled by vLLM itself, between processes that it started: nothing of it comes from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pd_cache.mover import Stored
from pd_cache.tokens import CacheMetadata


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Load chunks into a request's blocks."""

    request_id: str
    names: list[bytes]
    """Hashes of the chunks, in order; none for a load that shall fail."""
    blocks: list[int]
    """The blocks of those chunks; those at the start that the engine holds already are -1."""


@dataclass(frozen=True, slots=True)
class StoreOp:
    """Store chunks whose KV is complete when this step's forward pass is. Each rank reports the job's end."""

    job: int
    names: list[bytes]
    blocks: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler, with each step."""

    loads: list[LoadOp] = field(default_factory=list)
    stores: list[StoreOp] = field(default_factory=list)
    nothing_to_compute: bool = False
    """No request computes in this step: the worker may wait a moment for a transfer instead of spinning."""
    expecting: bool = False
    """The scheduler waits for something besides transfers: chunks that another node announced."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From a worker, with each step in which something ended."""

    jobs: dict[int, tuple[int, list[Stored]]] = field(default_factory=dict)
    """Store jobs: how many ranks are done, and what became of each chunk."""
    failed_loads: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Of all ranks together."""
        assert isinstance(other, WorkerReport)
        jobs = dict(self.jobs)
        for job, (ranks, outcomes) in other.jobs.items():
            if job in jobs:
                before, known = jobs[job]
                both = [Stored.together(pair) for pair in zip(known, outcomes, strict=True)]
                jobs[job] = (before + ranks, both)
            else:
                jobs[job] = (ranks, outcomes)
        return WorkerReport(jobs, self.failed_loads | other.failed_loads)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker found out from its KV tensors, told to the scheduler once."""

    metadata: CacheMetadata
    pid: int
    instance: str
    """Under which name the worker's process knows the engine."""
    lookup_url: str | None = None
    """Where the worker answers lookups about its engine; None where the pool's master, or the cache server, knows as much."""
