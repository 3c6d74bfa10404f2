"""A request in the scheduler: its state, and how each event changes it.

Events come in this order; after a preemption, they begin again:

1. vLLM asks what can be loaded (`asked`). The prompt is looked up, perhaps several times (`needs_lookup`,
   `looked_up`), and a load of the found chunks is proposed (`propose`).
2. vLLM allocates blocks for the load (`begin_load`), and the workers load into them (`load_ended`).
3. vLLM computes tokens, in several steps (`computes`). After each step, chunks may be complete (`to_store`).
4. The request ends (`report`, `announceable`).

Times, answers to lookups, and blocks are arguments: `scheduler.py` asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_cache.chunks import ChunkedTokenDatabase, ExtraKey, MediaItem, fold_names, stride_hashes
from pd_cache.handoff import BadParams, Handoff, next_pause, read_params
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found, Loaded, MissReason, RequestReport, TierChunks
from pd_cache.tracing import UNTRACED, Attribute, TraceSpan, Tracing
from pd_cache.vllm.layers import KeptLayers
from pd_cache.vllm.lora import Adapter
from pd_cache.vllm.plan import ChunkPlan
from pd_cache.vllm.steps import GroupChunks

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.request import Request

NO_SPAN = UNTRACED.begin("")


def request_span(tracing: Tracing, name: str, request: Request, **attributes: Attribute) -> TraceSpan:
    """Begins a span under the trace context that vLLM took from the request. vLLM takes one only with
    `--otlp-traces-endpoint`."""
    if tracing is UNTRACED:
        return NO_SPAN
    headers = getattr(request, "trace_headers", None)
    return tracing.begin(name, headers, kind="internal", request_id=request.request_id, **attributes)


class TrackedRequest:
    """A request, from its arrival in vLLM until its end."""

    def __init__(
        self,
        request: Request,
        adapter: Adapter | None,
        plan: ChunkPlan,
        database: ChunkedTokenDatabase,
        metrics: CacheMetrics,
        now: float,
    ) -> None:
        """`adapter`: the request's LoRA adapter, if it has one. `database` names chunks by their tokens."""
        try:
            self.handoff = read_params(request.kv_transfer_params)
        except BadParams as error:
            metrics.trouble("lookup", "bad_handoff", detail=str(error))
            self.handoff = Handoff()
        self.request = request
        self.id: str = request.request_id
        self.streams = self.handoff.announced is not None and self.handoff.announced.stream
        """Whether the request is a stream, which only loads chunks as they appear; see `streams.py`."""
        self.names = PromptNames(request, adapter, plan, database, self.handoff)
        self._plan = plan
        self._chunk = plan.chunk
        self._metrics = metrics
        self.arrived = now
        self.may_load = not request.skip_reading_prefix_cache and plan.settings.connector.load != "never"
        self.decided = plan.settings.connector.load != "auto"
        """Whether it is already decided how many tokens may be loaded. This is decided once."""
        self.declined = False
        """Whether the prefix is not worth loading."""
        self._limit = self.handoff.max_load_tokens
        """The most tokens to load beyond those at hand; None for all."""
        self.at_hand = 0
        """Tokens that vLLM's own cache had when vLLM asked last."""
        self.awaited = 0
        """How many chunks the request waits for, because a prefill node is storing them."""
        self._found: Found | None = None
        """The answer to the request's lookup."""
        self._next_poll = self._poll_s = 0.0
        """When to look up an announced prefix again, and the last pause between lookups."""
        self._foreign = False
        """Whether the announced prefix is in namespaces that this node does not read."""
        self.proposed = 0
        """How many tokens were proposed for a load when vLLM last asked."""
        self._no_room_since: float | None = None
        """When other loads first left too few blocks for its load."""
        self.span = NO_SPAN
        """The span of the load under way, or of the lookup while the request waits for chunks."""
        self.drafted = True
        """Whether the draft model ran in all steps of the request."""
        self._planned = [0] * len(plan.layers)
        """For each layer group, how many chunks need no further store: their stores are planned, or they are
        in the pool."""
        self.outcome = PromptOutcome()

    # --- lookups --------------------------------------------------------------------------------------------

    def asked(self, computed: int) -> None:
        """Notes that vLLM asks what can be loaded beyond the first `computed` tokens, which vLLM's own cache
        has."""
        if computed // self._chunk < self.at_hand // self._chunk:
            self._found = None  # vLLM has evicted chunks that were at hand, so they were not looked up
        self.at_hand, self.awaited, self.proposed = computed, 0, 0

    def begin_report(self) -> None:
        """At the first call, notes for the report what is at hand, and why the prompt cannot be named."""
        if self.outcome.at_hand is not None:
            return
        self.outcome.at_hand = self.at_hand
        if not self.names.identified:
            self.outcome.note_reason("media_unidentified")
        adapter = self.names.adapter
        if adapter is not None and not adapter.digest:
            detail = f"adapter {adapter.name!r}: {adapter.detail or 'its files are still being read'}"
            self._metrics.trouble("lookup", adapter.why, detail=detail)

    @property
    def most(self) -> int:
        """How many chunks to look up: no more than may be loaded."""
        most, limit = self._plan.most(self.request), self._limit
        return most if limit is None else min(most, (self.at_hand + limit) // self._chunk + self._plan.ahead)

    def wait_for_announced(self, own: Sequence[str], now: float) -> None:
        """Begins to wait for the announced chunks, or goes on. `own`: the namespaces that this node reads, as
        in keys."""
        announced = self.handoff.announced
        if announced is None or self._foreign or now >= self.arrived + self._plan.settings.handoff_wait_s:
            return
        if announced.serves(own):
            self.awaited = max(0, min(announced.prefix_tokens // self._chunk, self.most - self._plan.ahead))
            return
        self._foreign = True
        theirs = ", ".join((announced.namespace, *announced.further))
        detail = f"a prefill node stores in {theirs}, this node reads {', '.join(own)}"
        self._metrics.trouble("lookup", "other_namespace", detail=detail)

    def needs_lookup(self, now: float) -> bool:
        """Returns whether to look the prompt up: for the first time, or again for the awaited chunks."""
        return self._found is None or (self.lacks_chunks and now >= self._next_poll)

    def looked_up(self, found: Found, streamed: int, now: float) -> None:
        """Takes in the answer to a lookup. `streamed`: how many of the chunks at hand came by a stream."""
        self._found = found
        self.outcome.streamed += streamed * self._chunk
        self.outcome.note_found(found.chunks * self._chunk, self._reason(found))
        if found.chunks < self.awaited:
            self._poll_s = next_pause(self._poll_s)
            self._next_poll = now + self._poll_s
        else:
            self.span.note(found=found.chunks * self._chunk, reason=found.reason)

    @property
    def lacks_chunks(self) -> bool:
        """Whether the request has to wait: it has no answer to its lookup, or neither the answer nor vLLM's
        own cache has all awaited chunks. It waits only for chunks that may be loaded."""
        if self._found is None:
            return True
        there = max(self._found.chunks, self.at_hand // self._chunk)
        return there < self.awaited and there < self.most - self._plan.ahead

    def by_tier(self, external: int) -> TierChunks:
        """Returns where the lookup found `external` tokens to load. Counts tokens."""
        near = TierChunks() if self._found is None else self._found.near
        memory = min(near.memory * self._chunk, external)
        disk = min(near.disk * self._chunk, external - memory)
        return TierChunks(memory, disk, external - memory - disk)

    def _reason(self, found: Found) -> MissReason:
        """Returns why the lookup found no longer prefix."""
        announced = self.handoff.announced
        if self.declined:
            return "not_worth"
        limited = self._limit is not None and self._plan.most(self.request) > self.most
        if limited and self.most <= found.chunks + self._plan.ahead:
            return "limited"
        if announced is None or found.reason not in ("missing", "never_stored"):
            return found.reason
        if found.chunks >= min(announced.prefix_tokens // self._chunk, self.most):
            return found.reason
        return "other_namespace" if self._foreign else "deadline"

    # --- loads ----------------------------------------------------------------------------------------------

    def propose(self) -> int:
        """Proposes to load the chunks that were found or are awaited, within the request's limits and before
        its last token. Returns the number of tokens; 0 if there is nothing to load."""
        request, found = self.request, self._found
        if found is None:
            return 0
        if found.leading > found.chunks:  # prompts diverge after the found prefix
            # vLLM then ends a step there, so that states can be stored. It resets the field whenever it asks
            boundary = found.leading * self._chunk
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, boundary)
        chunks = max(found.chunks, self.awaited)
        if self._limit is not None:
            chunks = min(chunks, self.most - self._plan.ahead)
        self.proposed = max(0, min(chunks * self._chunk, self._plan.loadable(request)) - self.at_hand)
        if not self.handoff.allows(self.by_tier(self.proposed)):
            self.proposed = 0
            self.outcome.note_reason("limited")
        return self.proposed

    def decline(self, detail: str, most: int) -> None:
        """Notes that the proposed tokens are not worth loading, except for `most` tokens."""
        self.declined, self._limit, self.outcome.detail = True, min(most, self._limit or most), detail
        self.outcome.note_reason("not_worth")

    @property
    def needed_blocks(self) -> int:
        """The most blocks that the request will hold until all of its tokens are computed, if the proposed
        load takes place."""
        return self._plan.needed_blocks(self.request, self.at_hand + self.proposed)

    def wait_for_room(self, now: float) -> int | None:
        """Returns the answer to vLLM when other loads leave too few blocks: None while the request waits for
        blocks. Once it has waited as long as a load may take, returns 0, so that vLLM computes the prompt.
        Otherwise smaller, later loads could always take the blocks.
        """
        if self._no_room_since is None:
            self._no_room_since = now
        if now - self._no_room_since < self._plan.settings.connector.load_timeout_ms / 1000:
            return None
        self._metrics.trouble("retrieve", "no_blocks")
        self.outcome.note_reason("no_blocks")
        self.may_load = False
        return 0

    def begin_load(self, external: int, ids: Sequence[Sequence[int]], null: int) -> list[GroupChunks]:
        """Notes that vLLM has allocated blocks for `external` of the proposed tokens. Returns what each layer
        group has to load.

        `ids` are the request's blocks in each of vLLM's groups. The block `null` stands for each block that
        vLLM has freed.
        """
        self.outcome.load_began(external)
        first, last = self.at_hand // self._chunk, -(-(self.at_hand + self.proposed) // self._chunk)
        parts = [self.to_load(place, first, last, ids, null) for place in range(len(self._plan.layers))]
        self._planned = [max(planned, last) if first <= planned else planned for planned in self._planned]
        return parts

    def to_load(
        self, place: int, first: int, last: int, ids: Sequence[Sequence[int]], null: int | None = None
    ) -> GroupChunks:
        """Returns which of the chunks from `first` to before `last` a layer group has to load. Leaves out
        blocks that are at hand or not allocated."""
        group, tail = self._plan.layers[place], self._plan.tails[place]
        per_chunk = self._chunk // group.block_size
        if tail:
            first = max(first, last - tail)
        needed = -(-(self.at_hand + self.proposed) // group.block_size)
        blocks = list(ids[group.number][first * per_chunk : min(last * per_chunk, needed)])
        at_hand = min(len(blocks), max(0, self.at_hand // group.block_size - first * per_chunk))
        while at_hand < len(blocks) and tail and blocks[at_hand] == null:
            at_hand += 1
        skipped = at_hand // per_chunk
        blocks = [-1] * (at_hand - skipped * per_chunk) + blocks[at_hand:]
        blocks += [-1] * (last * per_chunk - needed)
        return GroupChunks(place, self.names.of(group, first + skipped, last), blocks)

    def load_ended(self, loaded: Loaded) -> None:
        """Takes in the end of the load, on all ranks together."""
        failed = loaded.reason != "none"
        self.outcome.load_ended(loaded)
        self.span.note(loaded=loaded.chunks * self._chunk, reason=loaded.reason)
        self.end_span("failed" if failed else "")
        if failed:  # chunks that the pool had are gone: vLLM computes them, and they are stored again
            self.may_load = False
            self.forget_pool()

    def forget_pool(self) -> None:
        """Forgets which chunks the pool has, because a load has failed, or the weights have changed."""
        self._found = None
        self._planned = [0] * len(self._planned)

    def end_span(self, error: str = "") -> None:
        """Ends the span of the lookup or load under way, if there is one. `error`: why it failed."""
        self.span.end(error)
        self.span = NO_SPAN

    # --- stores ---------------------------------------------------------------------------------------------

    def computes(self) -> None:
        """Notes that vLLM computes tokens of the request."""
        self._found = None  # after a preemption, a new lookup also finds chunks that the request has stored
        self.outcome.over = True

    def storable(self, tokens: int) -> int:
        """Returns how many of its first `tokens` tokens may be stored."""
        most = self.handoff.max_offload_tokens
        return tokens if most is None else min(tokens, most)

    def to_store(self, computed: int, undrafted: bool) -> list[tuple[int, range]]:
        """Returns the chunks that are complete with the first `computed` tokens and that were neither loaded
        nor returned before: runs of chunks, each with the index of its layer group. `undrafted`: whether
        blocks of vLLM's own cache may lack the draft model's KV."""
        # vLLM's count includes drafted tokens, which may be rejected
        complete = self.storable(min(computed, self.request.num_tokens)) // self._chunk
        found: list[tuple[int, range]] = []
        for place, group in enumerate(self._plan.layers):
            first, last = self._planned[place], complete - group.ahead
            if group.drafts and undrafted:
                first = max(first, -(-self.at_hand // self._chunk)) if self.drafted else last
            if last <= first:
                continue
            self._planned[place] = last = min(last, len(self.names.first(complete)) - group.ahead)
            if group.kind != "state":  # vLLM hands states over
                found += [(place, run) for run in self._needed(place, first, last) if run]
        return found

    def _needed(self, place: int, first: int, last: int) -> list[range]:
        """Returns the layer group's chunks that a load could need, from `first` to before `last`."""
        request, plan, tail = self.request, self._plan, self._plan.tails[place]
        prompt = request.num_prompt_tokens // self._chunk
        if not plan.settings.connector.store_generated:
            last = min(last, prompt - plan.layers[place].ahead)
        if not tail or plan.dense:
            return [range(first, last)]
        # a load of the same prompt ends before its last token; a load of a longer prompt ends somewhere after
        # it
        end = prompt - 1 if plan.ahead else (request.num_prompt_tokens - 1) // self._chunk
        ends = max(first, end - tail)
        junction = request.shared_prefix_boundary // self._chunk
        return [range(max(first, junction - tail), min(last, junction, ends)), range(ends, last)]

    # --- the end --------------------------------------------------------------------------------------------

    def announceable(self, computed: int) -> int:
        """Returns how long a prefix of the prompt, in tokens, the pool holds or will hold when vLLM has
        computed `computed` tokens."""
        whole = self.storable(min(computed, self.request.num_prompt_tokens)) // self._chunk
        # if an adapter was identified only after the last step, nothing was stored
        return max(0, min(whole - self._plan.ahead, self._planned[0])) * self._chunk

    def report(self, computed: int) -> RequestReport | None:
        """Returns the report on the prompt; None if vLLM has not asked about the prompt, or has not computed
        all of it."""
        if computed < self.request.num_prompt_tokens:
            return None
        return self.outcome.report(self.request.num_prompt_tokens, self._plan)


class PromptOutcome:
    """Collects the figures for the report on a prompt, in tokens. Events count only until vLLM first computes
    the request, except for the end of a load."""

    def __init__(self) -> None:
        self.at_hand: int | None = None
        """Tokens that vLLM's own cache had when vLLM asked first; None before that."""
        self.streamed = 0
        """How many of the tokens at hand came by a stream."""
        self.over = False
        """Whether vLLM has begun to compute the request."""
        self.detail = ""
        """The figures behind `not_worth`."""
        self._found = 0
        self._reason: MissReason = "not_asked"
        self._begun = 0
        self._restored: Loaded | None = None

    def note_found(self, end: int, reason: MissReason) -> None:
        """Notes the end of the found prefix, and why the prefix is not longer."""
        if not self._begun and not self.over:
            self._found, self._reason = end, reason

    def note_reason(self, reason: MissReason) -> None:
        """Notes why the found prefix is not loaded."""
        self.note_found(self._found, reason)

    def load_began(self, tokens: int) -> None:
        """Notes that a load has begun."""
        if not self._begun and not self.over:
            self._begun = tokens

    def load_ended(self, restored: Loaded) -> None:
        """Notes how the load has ended."""
        if self._restored is None and self._begun:
            self._restored = restored

    def report(self, prompt: int, plan: ChunkPlan) -> RequestReport | None:
        """Returns the report on a prompt of `prompt` tokens; None if vLLM has never asked about it."""
        if self.at_hand is None:
            return None
        loaded, reason, ended = self._begun, self._reason, self._restored or Loaded(0)
        if ended.reason != "none":
            reason = ended.reason
            # vLLM can use the first chunks of a failed load only if there is no window or state
            loaded = min(loaded, ended.chunks * plan.chunk) if plan.plain else 0
        return RequestReport.of(
            prompt,
            plan.chunk,
            at_hand=self.at_hand,
            found=max(0, self._found - self.at_hand // plan.chunk * plan.chunk),
            loaded=loaded,
            tiers=ended.tiers,
            reason=reason,
            streamed=self.streamed,
            detail=self.detail if reason == "not_worth" else "",
        )


class PromptNames:
    """The names of a prompt's chunks, the same for all layer groups."""

    def __init__(
        self,
        request: Request,
        adapter: Adapter | None,
        plan: ChunkPlan,
        database: ChunkedTokenDatabase,
        handoff: Handoff,
    ) -> None:
        self._request = request
        self.adapter = adapter
        self._plan = plan
        self._database = database
        self._by_tokens = plan.settings.node.cache.hash_mode == "tokens"
        own = request.cache_salt or handoff.media_hashed or plan.settings.connector.trust_media_ids
        self.identified = not request.mm_features or (plan.hashes_media and bool(own))
        """Whether the names of the request's images, audio and video identify their content.

        A client may name its items, and its names cannot be distinguished from vLLM's hashes: it may send
        anything that looks like a hash, and vLLM hashes names together with `mm_processor_kwargs`. So names
        count only within the client's salt, or if a proxy has removed the client's names, or if the operator
        trusts all clients. vLLM's numbers never count, because each process begins with 0.
        """
        self._digest = b""
        """The adapter's digest, as `possible` found it last: names depend on it."""
        self._names: list[bytes] = []
        """The names of the request's whole chunks so far; grows with the request."""

    @property
    def possible(self) -> bool:
        """Whether the chunks can be named now. A prompt of embeddings has no tokens to hash, and an adapter
        without a digest cannot be identified."""
        if self.adapter is not None:
            digest = self.adapter.digest
            if not digest:
                return False
            self._digest = digest  # names use this copy: another thread may take the digest away meanwhile
        return self.identified and not (self._by_tokens and self._request.prompt_embeds is not None)

    def first(self, count: int) -> list[bytes]:
        """Returns the names of the first `count` chunks, or of fewer if the request has fewer whole
        chunks."""
        if len(self._names) < count:
            request = self._request
            if self._by_tokens:
                isolation: list[ExtraKey] = ["salt", request.cache_salt] if request.cache_salt else []
                if self._digest:
                    isolation += ["lora", self._digest]
                media = [
                    MediaItem(
                        item.mm_hash or item.identifier, item.mm_position.offset, item.mm_position.length
                    )
                    for item in request.mm_features  # ordered by their places
                ]
                self._names = self._database.name_media_chunks(request.all_token_ids, isolation, media)
            else:
                stride = self._plan.chunk // self._plan.hash_block_size
                hashes = request.block_hashes[len(self._names) * stride : count * stride]
                further = stride_hashes(hashes, stride)
                # vLLM's hashes depend on the adapter's name and path, but not on its weights
                self._names += fold_names(further, self._digest) if self._digest else further
        return self._names[:count]

    def of(self, group: KeptLayers, first: int, last: int) -> list[bytes]:
        """Returns the names under which the pool has a group's chunks from `first` to before `last`."""
        return self.first(last + group.ahead)[first + group.ahead :]
