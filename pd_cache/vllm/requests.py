"""TrackedRequest: what the scheduler's side knows of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd_cache.handoff import Handoff
from pd_cache.tracing import Attribute, TraceSpan, Tracing
from pd_cache.vllm.adapters import Adapter
from pd_cache.vllm.hiding import HiddenBlocks
from pd_cache.vllm.outcome import PromptOutcome

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.request import Request


class FoundPrefix(NamedTuple):
    """The answer to a request's lookup. Numbers are tokens."""

    start: int
    """Tokens before this were not looked up: the engine had them at hand."""
    end: int
    parting: int = 0
    """Where prompts part, if that is behind the end; otherwise 0."""


class ProposedLoad(NamedTuple):
    """A load that was proposed to vLLM and that vLLM has not accepted yet. Numbers are tokens."""

    start: int
    """Tokens that the engine has at hand."""
    end: int
    """The end of the last chunk that is loaded, whole or in part."""
    tokens: int
    """The number of tokens reported to vLLM."""
    in_step: bool
    """Whether the request computes in the step that begins the load."""


class TrackedRequest:
    """One request, from when vLLM takes it in until it ends."""

    def __init__(
        self, request: Request, handoff: Handoff, arrived: float, adapter: Adapter | None, first_poll_s: float
    ) -> None:
        self.request = request
        self.adapter = adapter
        """Its LoRA adapter, if it has one."""
        self.identity = b""
        """The digest of its adapter, once it is known: the names of its chunks depend on it."""
        self.refused = False
        """Whether it was counted that the adapter cannot be identified."""
        self.handoff = handoff
        self.announced = handoff.announced
        self.arrived = arrived
        self.names: list[bytes] = []
        """Names of the whole chunks so far; grows with the request."""
        self.found: FoundPrefix | None = None
        self.looked_up = False
        self.next_poll = 0.0
        self.poll_s = first_poll_s
        """The pause before the next lookup of an announced prefix."""
        self.load: ProposedLoad | None = None
        self.in_step = False
        """Whether it has a load in the step under way, whose end is not reported yet."""
        self.hidden: HiddenBlocks | None = None
        self.no_room_since: float | None = None
        """When other loads first left too few blocks for its load; None if there are enough."""
        self.loaded = 0
        """Tokens that were loaded, for the hand-off."""
        self.may_load = True
        self.at_hand = 0
        """Tokens that vLLM's own cache had."""
        self.outcome = PromptOutcome()
        self.looking: TraceSpan | None = None
        """The span of the lookup, while the request waits for what it finds."""
        self.loading: TraceSpan | None = None
        """The span of the load under way."""
        self.undrafted: int | None = None
        """Tokens from this one on were computed without the draft model."""
        self.planned: dict[int, int] = {}
        """For each layer group, how many chunks need not be stored any more: those that are planned, and those in the pool."""

    @property
    def id(self) -> str:
        """vLLM's id of the request."""
        request_id: str = self.request.request_id
        return request_id


def request_span(tracing: Tracing, name: str, request: Request, **attributes: Attribute) -> TraceSpan:
    """Begins a span under the trace context that vLLM has taken from the request. vLLM hands it on only with `--otlp-traces-endpoint`."""
    span = tracing.begin(name, getattr(request, "trace_headers", None), request_id=request.request_id)
    span.note(**attributes)
    return span
