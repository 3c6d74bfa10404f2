"""`steps.py` in the classes that vLLM carries between the scheduler's process and the workers'.

vLLM itself pickles them, between processes that it started: none of it comes from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pd_cache.chunks import CacheMetadata
from pd_cache.vllm.steps import Step, StepReport


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Sent by the scheduler with each step."""

    step: Step = field(default_factory=Step)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Sent by a worker with each step in which something ended."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Returns the report of both together."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.report.together(other.report))


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker found out from its KV tensors, sent to the scheduler once."""

    metadata: list[CacheMetadata]
    """One for each group of layers."""
    pid: int
    instance: str
    """The name under which the worker's process knows the engine."""
    lookup_url: str | None = None
    """Where the worker answers lookups about its engine; None if the pool's master or the cache server knows as much."""
