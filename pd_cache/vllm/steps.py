"""What the scheduler and the workers tell each other with every step of the engine.

vLLM pickles it, between processes that it started: none of it comes from outside. Its own base classes for both are empty; without them,
scheduler and worker need no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_cache.reasons import Loaded, StoreOutcome
from pd_cache.versions import FIRST


@dataclass(frozen=True, slots=True)
class GroupChunks:
    """Chunks of one group of layers, and where they lie."""

    group: int
    """The group's place in `kept_layers`."""
    names: list[bytes]
    """Names of the chunks, in order."""
    blocks: list[int]
    """The blocks of those chunks. Blocks at the start that need not move are -1, and so are those behind a load's end."""


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Load chunks into a request's blocks."""

    request_id: str
    parts: list[GroupChunks]
    """A part for each group that has something to load; none for a load that has to fail."""
    blocks: list[int]
    """The blocks to report if the load fails; none if it then fails as a whole: of a model with several groups, a window or a state."""
    label: str | None = FIRST
    """That of the weights, as the chunks were found; None: the load has to fail."""
    streams: bool = False
    """A part of a stream: the request goes on waiting."""


@dataclass(frozen=True, slots=True)
class StoreOp:
    """Store chunks whose KV is complete after this step's forward pass. Each rank reports the job's end."""

    job: int
    chunks: GroupChunks
    label: str = FIRST
    """That of the weights with which they are computed."""


@dataclass
class Step:
    """Sent by the scheduler with each step."""

    loads: list[LoadOp] = field(default_factory=list)
    stores: list[StoreOp] = field(default_factory=list)
    nothing_to_compute: bool = False
    """No request computes in this step: the worker may wait a moment for a transfer instead of spinning."""
    label: str | None = FIRST
    """That of the engine's weights now; None while they have none."""
    expecting: bool = False
    """The scheduler waits for something besides transfers: chunks that another node announced."""


@dataclass
class StepReport:
    """Sent by a worker with each step in which something ended."""

    jobs: dict[int, tuple[int, list[StoreOutcome]]] = field(default_factory=dict)
    """Store jobs: how many ranks are done, and the outcome of each chunk."""
    loads: dict[str, Loaded] = field(default_factory=dict)
    """Loads that have ended: of the layer group that failed, or else of the first one, how many chunks came from where. One that failed has a
    reason other than `none`."""
    streams: dict[str, tuple[int, Loaded]] = field(default_factory=dict)
    """Parts of streams: how many ranks are done, and what the worst of them has loaded."""

    def aggregate(self, other: StepReport) -> StepReport:
        """Returns the report of two ranks together. vLLM calls this."""
        jobs, loads = dict(self.jobs), dict(self.loads)
        for job, (ranks, outcomes) in other.jobs.items():
            before, known = jobs.get(job, (0, outcomes))
            both = [StoreOutcome.together(pair) for pair in zip(known, outcomes, strict=True)]
            jobs[job] = (before + ranks, both)
        for request_id, loaded in other.loads.items():
            pair = (loads.get(request_id, loaded), loaded)
            loads[request_id] = min(pair, key=lambda one: (one.reason == "none", one.chunks))  # the worst
        streams = dict(self.streams)
        for request_id, (ranks, loaded) in other.streams.items():
            before, worst = streams.get(request_id, (0, loaded))
            streams[request_id] = (
                before + ranks,
                min(worst, loaded, key=lambda one: (one.reason == "none", one.chunks)),
            )
        return StepReport(jobs, loads, streams)
