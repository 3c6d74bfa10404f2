"""The messages between the scheduler and the workers in every step of the engine.

vLLM pickles these messages between processes that it started, so no message comes from outside. vLLM has base
classes for them. They are empty, and are not used here, so that scheduler and worker need no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_cache.reasons import Loaded, StoreOutcome
from pd_cache.versions import FIRST
from pd_cache.vllm.costs import StepWork


@dataclass(frozen=True, slots=True)
class GroupChunks:
    """Chunks of one layer group, and their blocks."""

    group: int
    """The group's index in `kept_layers`."""
    names: list[bytes]
    """Names of the chunks, in order."""
    blocks: list[int]
    """The blocks of these chunks; -1 for blocks that do not move: those at hand, before a window, or after a
    load's end."""


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Load chunks into a request's blocks."""

    request_id: str
    parts: list[GroupChunks]
    """A part for each layer group that has something to load; none for a load that has to fail."""
    blocks: list[int]
    """The blocks to report if the load fails. Empty if the load can only fail as a whole: with several layer
    groups, a window or a state."""
    label: str | None = FIRST
    """The label of the weights when the chunks were found; None for a load that has to fail."""
    streams: bool = False
    """Whether this is a part of a stream, so that the request goes on waiting."""


@dataclass(frozen=True, slots=True)
class StoreOp:
    """Store chunks whose KV is complete after this step's forward pass. Each rank reports the job's end."""

    job: int
    chunks: GroupChunks
    label: str = FIRST
    """The label of the weights that compute them."""


@dataclass
class Step:
    """Sent by the scheduler with each step."""

    loads: list[LoadOp] = field(default_factory=list)
    stores: list[StoreOp] = field(default_factory=list)
    nothing_to_compute: bool = False
    """Whether no request computes in this step. The worker may then wait a moment for a transfer instead of
    spinning."""
    label: str | None = FIRST
    """The label of the engine's weights now; None while they have none."""
    expecting: bool = False
    """Whether the scheduler also waits for chunks of another node, or for blocks."""
    work: StepWork | None = None
    """What the step computes, if it computes."""


@dataclass
class StepReport:
    """Sent by a worker with each step in which something ended."""

    jobs: dict[int, tuple[int, list[StoreOutcome]]] = field(default_factory=dict)
    """Store jobs: how many ranks are done, and the outcome of each chunk."""
    loads: dict[str, tuple[float, Loaded]] = field(default_factory=dict)
    """Loads that have ended: the seconds of `LinkTime`, and the result of the layer group that failed or, if
    none failed, of the first group. A failed load has another reason than `none`."""
    streams: dict[str, tuple[int, Loaded]] = field(default_factory=dict)
    """Parts of streams: how many ranks are done, and the worst of their results."""
    work: StepWork | None = None
    """The work of the step with which the report is sent."""

    def aggregate(self, other: StepReport) -> StepReport:
        """Returns the joint report of two ranks. vLLM calls this."""
        jobs, loads = dict(self.jobs), dict(self.loads)
        for job, (ranks, outcomes) in other.jobs.items():
            before, known = jobs.get(job, (0, outcomes))
            both = [StoreOutcome.together(pair) for pair in zip(known, outcomes, strict=True)]
            jobs[job] = (before + ranks, both)
        for request_id, (seconds, loaded) in other.loads.items():
            longest, worst = loads.get(request_id, (seconds, loaded))
            loads[request_id] = (max(longest, seconds), _worst(worst, loaded))
        streams = dict(self.streams)
        for request_id, (ranks, loaded) in other.streams.items():
            before, worst = streams.get(request_id, (0, loaded))
            streams[request_id] = (before + ranks, _worst(worst, loaded))
        return StepReport(jobs, loads, streams, self.work or other.work)


def _worst(*ends: Loaded) -> Loaded:
    return min(ends, key=lambda loaded: (loaded.reason == "none", loaded.chunks))
