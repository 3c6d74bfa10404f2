"""What the scheduler's side goes by, and what it knows of one request: its chunks, its blocks, and what became of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pd_cache.chunks import ChunkedTokenDatabase, ExtraKey, fold_names, stride_hashes
from pd_cache.handoff import Handoff
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Loaded, MissReason, RequestReport
from pd_cache.tracing import UNTRACED, Attribute, TraceSpan, Tracing
from pd_cache.vllm.layers import KeptLayers, own_hit
from pd_cache.vllm.lora import Adapter
from pd_cache.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class ChunkPlan:
    """What is loaded and stored of a prompt: it follows from the settings and the model, and is the same for all requests."""

    settings: Settings
    layers: Sequence[KeptLayers]
    """What `kept_layers` returns."""
    hash_block_size: int
    """Tokens of each of a request's block hashes."""
    stores: bool = True
    """False for a consumer."""
    ranks: int = 1
    """Of all pipeline stages."""
    dense: bool = False
    """Whether to store all of a window: vLLM keeps more of windows than the ends of prompts, by its `prefix_cache_retention_interval`."""
    drafted_up_to: int | None = None
    """The most tokens that any request of a step may have if the draft model is to run in that step; None without a draft model."""
    hashes_media: bool = False
    """Whether vLLM names an image by a hash of its content, unless the client names it. Otherwise vLLM numbers images."""

    @cached_property
    def chunk(self) -> int:
        """Tokens per chunk."""
        return self.settings.node.cache.chunk_tokens

    @cached_property
    def tails(self) -> list[int]:
        """For each layer group, how many of the last chunks a load needs; 0 for all."""
        return [group.tail(self.chunk) for group in self.layers]

    @cached_property
    def ahead(self) -> int:
        """1 if a layer group is ahead, so that a load leaves the last whole chunk to compute; otherwise 0."""
        return max(group.ahead for group in self.layers)

    @cached_property
    def plain(self) -> bool:
        """Whether there is one layer group, of which a load needs every chunk."""
        return len(self.layers) == 1 and not self.tails[0]

    @cached_property
    def _divisible(self) -> bool:
        return all(group.divisible for group in self.layers)

    def most(self, request: Request) -> int:
        """Returns how many chunks are looked up. vLLM has to compute the last token, and some layers can be loaded only up to a chunk's
        end. If a group is ahead, a load leaves the last of these chunks to compute."""
        length: int = request.num_tokens
        if self.settings.connector.recompute == "block":
            return min(length // self.chunk, -(-self.loadable(request) // self.chunk) + self.ahead)
        return (length if self._divisible or self.ahead else length - 1) // self.chunk

    def loadable(self, request: Request) -> int:
        """Returns how many of a request's tokens may be loaded at most. vLLM has to compute the last one: its logits are needed."""
        length: int = request.num_tokens
        if self.settings.connector.recompute == "token":
            return length - 1
        end = own_hit(length, self.layers)
        # a window or a state can be restored only at a chunk's end
        return end // self.chunk * self.chunk if any(self.tails) else end

    def needed_blocks(self, request: Request, end: int) -> int:
        """Returns the most blocks that the request holds until all of its tokens are computed, if the tokens before `end` are loaded."""
        total = 0
        # by number, because a draft model's group may be over the same blocks as another group
        for group in {group.number: group for group in self.layers}.values():
            blocks = -(-request.num_tokens // group.block_size)
            if group.kind == "window":
                blocks -= max(0, end - group.window + 1) // group.block_size
            elif group.kind == "state":
                # one block for the state that was loaded, one for the state that is computed, and one for a boundary between them
                blocks = min(blocks, 3)
            total += blocks
        return total


class FoundPrefix(NamedTuple):
    """The answer to a request's lookup. Numbers are tokens."""

    start: int
    """Tokens before this were not looked up: the engine had them at hand."""
    end: int
    parting: int = 0
    """Where prompts part, if that is behind the end; otherwise 0."""
    memory: int = 0
    """How many of them lay in this host's memory, and how many on its disk; the others are in the pool."""
    disk: int = 0


class ProposedLoad(NamedTuple):
    """A load that was proposed to vLLM and that vLLM has not accepted yet. Numbers are tokens."""

    start: int
    """Tokens that the engine has at hand."""
    end: int
    """The end of the last chunk that is loaded, whole or in part."""
    tokens: int
    """The number of tokens reported to vLLM."""


class TrackedRequest:
    """One request, from when vLLM takes it in until it ends."""

    def __init__(self, request: Request, handoff: Handoff, arrived: float, adapter: Adapter | None) -> None:
        self.request = request
        self.adapter = adapter
        """Its LoRA adapter, if it has one."""
        self.identity = b""
        """The digest of its adapter, once it is known: the names of its chunks depend on it."""
        self.refused = False
        """Whether it was counted that the adapter cannot be identified."""
        self.handoff = handoff
        self.foreign = False
        """Whether what a prefill node has announced is stored in other namespaces than those of this node."""
        self.arrived = arrived
        self.names: list[bytes] = []
        """Names of the whole chunks so far; grows with the request."""
        self.found: FoundPrefix | None = None
        self.looked_up = False
        self.next_poll = self.poll_s = 0.0
        """When to look up an announced prefix again, and the pause before that."""
        self.load: ProposedLoad | None = None
        self.no_room_since: float | None = None
        """When other loads first left too few blocks for its load; None if there are enough."""
        self.loaded = 0
        """Tokens that were loaded, for the hand-off."""
        self.has_streamed = False
        """Whether it was a stream with blocks, and has given them back."""
        self.may_load = True
        self.at_hand = 0
        """Tokens that vLLM's own cache had."""
        self.outcome = PromptOutcome()
        self.looking = self.loading = NO_SPAN
        """The span of the lookup, while the request waits for what it finds, and of the load under way."""
        self.drafted = True
        """Whether the draft model ran in each of its steps."""
        self.planned: dict[int, int] = {}
        """For each layer group, how many chunks need not be stored any more: those that are planned, and those in the pool."""

    @property
    def streams(self) -> bool:
        """Whether it only has its prompt's chunks loaded as they appear; see `streams.py`."""
        return self.handoff.announced is not None and self.handoff.announced.stream

    def stored_of(self, tokens: int) -> int:
        """Returns how many of its first `tokens` tokens may be stored."""
        most = self.handoff.max_offload_tokens
        return tokens if most is None else min(tokens, most)

    @property
    def id(self) -> str:
        """vLLM's id of the request."""
        request_id: str = self.request.request_id
        return request_id


NO_SPAN = UNTRACED.begin("")


def request_span(tracing: Tracing, name: str, request: Request, **attributes: Attribute) -> TraceSpan:
    """Begins a span under the trace context that vLLM has taken from the request. vLLM hands it on only with `--otlp-traces-endpoint`."""
    span = tracing.begin(name, getattr(request, "trace_headers", None), request_id=request.request_id)
    span.note(**attributes)
    return span


class PromptOutcome:
    """One request's. All numbers are tokens unless stated otherwise. If vLLM preempts the request, its first way counts."""

    def __init__(self) -> None:
        self._at_hand: int | None = None
        self.streamed = 0
        """How many of those at hand came by a stream."""
        self._found = 0
        self._reason: MissReason = "not_asked"
        self._begun = 0
        self._keeps_part = False
        self._restored: Loaded | None = None
        self.over = False
        """Whether vLLM has begun to compute the request. What is found or loaded later, after a preemption, does not count."""

    def asked(self, at_hand: int) -> None:
        """Notes that vLLM asked what can be loaded. `at_hand`: tokens that vLLM's own cache has."""
        if self._at_hand is None:
            self._at_hand = at_hand

    def looked_up(self, end: int, reason: MissReason) -> None:
        """Notes the end of the prefix that was found, and why it is not loaded further."""
        if not self._begun and not self.over:
            self._found, self._reason = end, reason

    def began_load(self, tokens: int, *, keeps_part: bool) -> None:
        """Notes that a load of so many tokens has begun. `keeps_part`: whether vLLM uses what a load that failed has brought."""
        if not self._begun and not self.over:
            self._begun, self._keeps_part = tokens, keeps_part

    def loaded(self, restored: Loaded) -> None:
        """Notes how the load has ended, on all ranks together."""
        if self._restored is None and self._begun:
            self._restored = restored

    def report(self, prompt: int, chunk_size: int) -> RequestReport | None:
        """Returns the report on a prompt of `prompt` tokens; None if vLLM has never asked about it."""
        if self._at_hand is None:
            return None
        loaded, reason, ended = self._begun, self._reason, self._restored or Loaded(0)
        if ended.reason != "none":
            reason = ended.reason
            loaded = min(loaded, ended.chunks * chunk_size) if self._keeps_part else 0
        return RequestReport.of(
            prompt,
            chunk_size,
            at_hand=self._at_hand,
            found=max(0, self._found - self._at_hand // chunk_size * chunk_size),
            loaded=loaded,
            tiers=ended.tiers,
            reason=reason,
            streamed=self.streamed,
        )


class PromptChunks:
    """The names of prompts' chunks. One per engine, for all layer groups. Chunks cannot be named before `database` is set."""

    def __init__(self, plan: ChunkPlan, metrics: CacheMetrics) -> None:
        self._plan = plan
        self._metrics = metrics
        self._by_tokens = plan.settings.node.cache.hash_mode == "tokens"
        self.database: ChunkedTokenDatabase | None = None

    def nameable(self, tracked: TrackedRequest) -> bool:
        """Returns whether the request's chunks can be named. A prompt of embeddings has no tokens to hash, and without its digest an adapter
        could be taken for another. Counts a request without a digest once."""
        adapter = tracked.adapter
        if not self.identified(tracked):
            return False
        if adapter is not None and not (digest := adapter.digest):
            if not tracked.refused:
                tracked.refused = True
                detail = f"adapter {adapter.name!r}: {adapter.detail or 'its files are still being read'}"
                self._metrics.trouble("lookup", adapter.why, detail=detail)
            return False
        if adapter is not None:
            tracked.identity = digest
        return not self._by_tokens or tracked.request.prompt_embeds is None

    def identified(self, tracked: TrackedRequest) -> bool:
        """Returns whether the content of the request's images, audio and video decides about their names.

        A client may name them, too, and nothing tells its names from vLLM's hashes: it may send what looks like a hash, and vLLM hashes its
        names together with `mm_processor_kwargs`. So a name counts only within the client's salt, or if a proxy has removed the client's
        names, or if the operator trusts all clients. A number of vLLM's own never counts: each process begins with 0.
        """
        request = tracked.request
        if not request.mm_features:
            return True
        own = request.cache_salt or tracked.handoff.media_hashed or self._plan.settings.connector.trust_media_ids
        return self._plan.hashes_media and bool(own)

    def names(self, tracked: TrackedRequest, count: int) -> list[bytes]:
        """Returns the names of the request's first `count` chunks, or of fewer if it has fewer whole chunks."""
        assert self.database is not None
        names, request = tracked.names, tracked.request
        if len(names) < count:
            if self._by_tokens:
                tracked.names = names = self._hashed(tracked, self.database)
            else:
                stride = self._plan.chunk // self._plan.hash_block_size
                further = stride_hashes(request.block_hashes[len(names) * stride : count * stride], stride)
                # vLLM's hashes take in the adapter's name and path, and not its weights
                names += fold_names(further, tracked.identity) if tracked.identity else further
        return names[:count]

    def names_of(self, tracked: TrackedRequest, group: KeptLayers, first: int, last: int) -> list[bytes]:
        """Returns the names under which the pool has a group's chunks from `first` to before `last`."""
        return self.names(tracked, last + group.ahead)[first + group.ahead :]

    def _hashed(self, tracked: TrackedRequest, database: ChunkedTokenDatabase) -> list[bytes]:
        """Returns the names of all whole chunks, in token mode. An image isolates the chunk in which it begins and all chunks after it, so that
        prompts share the text before it."""
        request, chunk = tracked.request, self._plan.chunk
        isolation: list[ExtraKey] = ["salt", request.cache_salt] if request.cache_salt else []
        if tracked.identity:
            isolation += ["lora", tracked.identity]
        names: list[bytes] = []
        for feature in request.mm_features:  # ordered by their places
            offset = feature.mm_position.offset
            if (begins := offset // chunk) > len(names):
                before = request.all_token_ids[len(names) * chunk : begins * chunk]
                names += database.name_chunks(before, None, isolation)
                isolation = [names[-1]]
            isolation += ["mm", feature.mm_hash or feature.identifier, offset]
        return names + database.name_chunks(request.all_token_ids[len(names) * chunk :], None, isolation)
