"""Streams: prompts whose chunks are loaded while a prefill node computes them.

Before a prompt is computed, a proxy sends it to a decode node, in a request that only holds blocks. To vLLM,
this is a request with a long load. Each chunk that appears in the pool is loaded into these blocks, and put
into vLLM's own prefix cache. When the prompt has been computed, the proxy sends the real request, which finds
the chunks there. A stream may end at any moment: the real request then loads the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from pd_cache.lookup import LookupClient
from pd_cache.reasons import Loaded
from pd_cache.tracing import Tracing
from pd_cache.vllm.plan import ChunkPlan
from pd_cache.vllm.steps import LoadOp
from pd_cache.vllm.tracked import TrackedRequest, request_span

if TYPE_CHECKING:  # so that tests can replay histories without vLLM
    from vllm.v1.core.kv_cache_manager import KVCacheManager

_SHARE, _OF_FREE = 4, 2
"""All streams together hold at most a quarter of the blocks. A new stream gets at most half of the free
blocks."""
_APART_S = 0.01
"""The least time between two lookups, of all streams together."""
_REMEMBERED = 1 << 14


@dataclass(eq=False)
class Stream:
    """The stream of a prompt, from when it has blocks."""

    tracked: TrackedRequest
    names: Sequence[bytes]
    """The names of its whole chunks. The real request loads the rest."""
    blocks: Sequence[int]
    """The blocks of all tokens of the prompt."""
    done: int
    """How many chunks were at hand or are loaded."""
    until: float
    over: bool = False
    """Whether the stream has ended, so that it loads nothing more."""
    outdated: bool = False
    """Whether the weights have changed since it began, so that its blocks may not get into vLLM's own
    cache."""
    left: bool = False
    """Whether the request has ended, so that vLLM waits for its blocks."""
    ranks: int = 0
    """How many ranks still load a part of it. The next part begins when all have ended."""
    worst: Loaded = Loaded(0)  # noqa: RUF009 - immutable
    """The worst result of the ranks that have ended."""
    asked: float = 0.0
    """When the prompt was last looked up."""


class Streams:
    """The streams of an engine. Runs on the scheduler's thread."""

    def __init__(self, plan: ChunkPlan, manager: KVCacheManager, tracing: Tracing) -> None:
        self.longest_s = 600.0
        """A stream that nobody cancels ends after this time. vLLM then computes its prompt like any other."""
        self._plan = plan
        self._manager = manager
        self._tracing = tracing
        self._streams: dict[str, Stream] = {}
        self._ops: list[LoadOp] = []
        self._reserved: dict[str, int] = {}
        """For each stream that has given way, how many blocks it had. Until its request ends, vLLM gives that
        many blocks to no other load, but only to requests that compute."""
        self.block_loads = False
        """Whether nothing may be loaded in the next step: vLLM has no blocks for a load, no request computes,
        and only streams that have given way have blocks reserved."""
        self._next_poll = 0.0
        self._came: OrderedDict[bytes, None] = OrderedDict()
        """The names of the chunks that arrived last."""

    @property
    def possible(self) -> bool:
        """Whether this engine can have streams: a load can restore any prefix, and vLLM's own cache is on."""
        return self._plan.plain and self._manager.enable_caching

    @property
    def under_way(self) -> bool:
        return bool(self._streams)

    @property
    def leaving(self) -> bool:
        """Whether blocks of ended requests are not given back yet. The engine has to keep stepping until they
        are."""
        return any(stream.left for stream in self._streams.values())

    # --- a stream's way -------------------------------------------------------------------------------------

    def propose(self, tracked: TrackedRequest) -> int:
        """Returns how many tokens to propose to vLLM; 0 if there is no room, or nothing to load."""
        plan, pool = self._plan, self._manager.block_pool
        end = plan.loadable(tracked.request)
        # blocks at hand count, too, because they are among the free blocks
        needed, free = -(-end // plan.layers[0].block_size), pool.get_num_free_blocks()
        held = sum(len(stream.blocks) for stream in self._streams.values()) + sum(self._reserved.values())
        room = held + needed <= pool.num_gpu_blocks // _SHARE and needed <= free // _OF_FREE
        if not (self.possible and room) or self.block_loads or end <= tracked.at_hand:
            return 0
        # naming may raise, so it comes before vLLM allocates blocks
        tracked.names.first(plan.most(tracked.request))
        return end - tracked.at_hand

    def begin(self, tracked: TrackedRequest, blocks: Sequence[int]) -> None:
        """Takes the blocks that vLLM has allocated for the proposed load."""
        chunk, whole = self._plan.chunk, len(blocks) * self._plan.layers[0].block_size // self._plan.chunk
        names = tracked.names.first(min(self._plan.most(tracked.request), whole))
        done, until = min(len(names), tracked.at_hand // chunk), tracked.arrived + self.longest_s
        self._streams[tracked.id] = Stream(tracked, names, blocks, done, until)
        tracked.span = request_span(self._tracing, "pd_cache.stream", tracked.request, asked=tracked.proposed)

    def look_up(self, lookup: LookupClient, label: str | None, now: float) -> None:
        """If it is time, looks up the next chunks of a stream, and loads the found chunks."""
        streams = self._streams.values()
        waiting = (
            stream
            for stream in streams
            if not (stream.over or stream.ranks) and stream.done < len(stream.names)
        )
        stream = min(waiting, key=attrgetter("asked"), default=None)
        if stream is None or now < self._next_poll:
            return
        stream.asked, self._next_poll = now, now + _APART_S
        found = lookup.find(stream.names, stream.tracked.id, chunks_at_hand=stream.done).chunks
        if found > stream.done:
            part = stream.tracked.to_load(0, stream.done, found, [stream.blocks])
            stream.ranks, stream.worst = self._plan.ranks, Loaded(found - stream.done)
            self._ops.append(LoadOp(stream.tracked.id, [part], [], label, streams=True))

    def advance(self, request_id: str, ranks: int, loaded: Loaded) -> None:
        """Notes that `ranks` more ranks have loaded a part. When all have, puts the part into vLLM's own
        cache."""
        stream = self._streams[request_id]
        stream.ranks -= ranks
        stream.worst = min(stream.worst, loaded, key=attrgetter("chunks"))
        if stream.ranks > 0:
            return
        came = stream.names[stream.done : stream.done + stream.worst.chunks]
        stream.over |= loaded.reason != "none"
        stream.done += len(came)
        if came and not stream.outdated:
            self._manager.cache_blocks(stream.tracked.request, stream.done * self._plan.chunk)
            self._came.update(dict.fromkeys(came))
        while len(self._came) > _REMEMBERED:
            self._came.popitem(last=False)
        if stream.left:
            self._end(stream, "")

    def give_way(self, now: float, *, needed: bool) -> None:
        """Ends outdated streams, and streams whose time is over. If there are none and another request
        `needed` blocks, ends the newest stream. A stream for which a rank loads cannot end now.

        Loaded chunks stay in vLLM's own cache.
        """
        able = [stream for stream in self._streams.values() if not stream.ranks and not stream.left]
        ending = [stream for stream in able if stream.outdated or now >= stream.until] or (
            able[-1:] if needed else []
        )
        self.block_loads = needed and not ending and bool(self._reserved)
        for stream in ending:
            self._reserved[stream.tracked.id] = len(stream.blocks)
            self._end(stream, "given up")

    def leave(self, request_id: str) -> None:
        """Notes that the request has ended. vLLM gets its blocks back when no rank loads into them any
        more."""
        self._reserved.pop(request_id, None)
        if (stream := self._streams.get(request_id)) is not None:
            stream.left = stream.over = True
            if not stream.ranks:
                self._end(stream, "")

    def take_ops(self) -> list[LoadOp]:
        """Returns the loads for the next step."""
        ops, self._ops = self._ops, []
        return ops

    def stop(self) -> None:
        """Stops further loads of the streams under way, because the weights have changed."""
        for stream in self._streams.values():
            stream.over = stream.outdated = True

    # --- the request that is to be answered -----------------------------------------------------------------

    def take_over(self, tracked: TrackedRequest) -> int:
        """Stops further loads of the streams of this prompt, which a prefill node has announced. Returns how
        many of its tokens are still being loaded."""
        if not self._streams or not tracked.names.possible:
            return 0
        names = tracked.names.first(self._plan.most(tracked.request))
        loading = 0
        for stream in self._streams.values():
            count = len(stream.names)
            if count and names[count - 1 : count] == stream.names[-1:]:
                stream.over = True
                if stream.ranks:
                    loading += stream.worst.chunks * self._plan.chunk
        return loading

    def came(self, names: Sequence[bytes]) -> int:
        """Returns how many of these chunks arrived by a stream. Each chunk counts once."""
        count = 0
        for name in names:
            if name in self._came:
                del self._came[name]
                count += 1
        return count

    # --- inside ---------------------------------------------------------------------------------------------

    def _end(self, stream: Stream, why: str) -> None:
        """Ends a stream for which no rank loads. Its load then fails, so that vLLM frees all of its
        blocks."""
        tracked = stream.tracked
        del self._streams[tracked.id]
        tracked.may_load = False
        tracked.span.note(loaded=max(0, stream.done * self._plan.chunk - tracked.at_hand))
        tracked.end_span(why)
        self._ops.append(LoadOp(tracked.id, [], []))
