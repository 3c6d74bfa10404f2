"""`steps.py` in the classes that vLLM carries between the scheduler's process and the workers'.

vLLM pickles them itself, between processes that it started: nothing of it comes from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pd_cache.tokens import CacheMetadata
from pd_cache.vllm.steps import Step, StepReport


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler, with each step."""

    step: Step = field(default_factory=Step)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From a worker, with each step in which something ended."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Of all ranks together."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.report.together(other.report))


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker found out from its KV tensors, told to the scheduler once."""

    metadata: CacheMetadata
    pid: int
    instance: str
    """Under which name the worker's process knows the engine."""
    lookup_url: str | None = None
    """Where the worker answers lookups about its engine; None where the pool's master, or the cache server, knows as much."""
