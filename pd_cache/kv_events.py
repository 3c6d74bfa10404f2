"""KV events in vLLM's format, without vLLM: what a block stream says, and in which order it is believed. Pure.

The format is that of vLLM 0.32 (`vllm/distributed/kv_events.py`): a batch is a msgpack array of a time, events and a rank; an event is a
map with a `type`. A publisher numbers its batches from 0. It keeps the last ones, and sends them again to a subscriber that asks for all
from a number on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from pd_cache.decoding import msgpack_decoder

MEDIUM_GPU = "GPU"
MEDIUM_STORAGE = "STORAGE"
REMOTE = "REMOTE"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The number after the last batch of a replay."""
FULL_ATTENTION = frozenset((None, "full_attention", "mla_attention"))
"""The kinds of layer groups that keep the KV of every token of a prefix."""

BlockHash = int | bytes
_MASK = (1 << 64) - 1
_Words = Annotated[str, msgspec.Meta(max_length=256)] | None


class StoredEvent(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks that are there now. The fields are vLLM's, in its order."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    token_ids: msgspec.Raw = msgspec.Raw(b"\x90")
    """A list of integers in msgpack, which is decoded only by those that need it; empty if the publisher does not know the tokens."""
    block_size: int = 0
    """Tokens of each block; 0 if the publisher does not say."""
    lora_id: int | None = None
    medium: _Words = None
    lora_name: _Words = None
    extra_keys: msgspec.Raw = msgspec.Raw(b"\xc0")
    group_idx: int | None = None
    kv_cache_spec_kind: _Words = None
    kv_cache_spec_sliding_window: int | None = None
    locality: _Words = None
    ownership: _Words = None
    session_id: str | None = None


class RemovedEvent(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks that are not there any more."""

    block_hashes: list[BlockHash]
    medium: _Words = None
    group_idx: int | None = None
    locality: _Words = None
    ownership: _Words = None


class ClearedEvent(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """No block of this publisher is there any more."""


KvEvent = StoredEvent | RemovedEvent | ClearedEvent


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one number."""

    ts: float
    """When it was published: seconds of the publisher's wall clock."""
    events: list[KvEvent]
    data_parallel_rank: int | None = None


read_batch = msgpack_decoder(EventBatch)
"""Returns the `EventBatch` of a message. Raises UndecodableError for anything else."""
_to_wire = msgspec.msgpack.Encoder()


class _StoredFields(msgspec.Struct, tag="BlockStored", gc=False):
    """What vLLM's decoder requires of a stored event: these fields have no default there."""

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None
    locality: str | None
    ownership: str | None


class _RemovedFields(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: Sequence[BlockHash]
    medium: str | None
    group_idx: int | None
    locality: str | None
    ownership: str | None


def encode_batch(batch: EventBatch) -> bytes:
    """Returns a batch as vLLM's own decoder reads it: with every field that has no default there."""
    return _to_wire.encode((batch.ts, [_fields(event) for event in batch.events], batch.data_parallel_rank))


def _fields(event: KvEvent) -> Any:
    if isinstance(event, StoredEvent):
        return _StoredFields(*(getattr(event, name) for name in _StoredFields.__struct_fields__))
    if isinstance(event, RemovedEvent):
        return _RemovedFields(*(getattr(event, name) for name in _RemovedFields.__struct_fields__))
    return event


def short_hash(value: BlockHash) -> int:
    """Returns the 64 bits by which a block is known here. vLLM publishes the last 64 bits of a hash, or all of it if
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0."""
    return value & _MASK if isinstance(value, int) else int.from_bytes(value[-8:], "big")


# --- order -----------------------------------------------------------------------------------------------------------


class Forget(enum.Enum):
    """Takes the place of a batch where events are lost: what the subscriber knows of the publisher is no longer true."""

    ALL = "all"


class Numbered(NamedTuple):
    """A batch and its number."""

    number: int
    batch: EventBatch


Step = EventBatch | Forget


class StreamOrder:
    """Puts the batches of one publisher in order: finds gaps, asks for replays, and notices that the publisher began anew.

    Batches come from a live stream, in order but with gaps, and from replays. `live` and `replayed` return what to apply now, each batch
    once and in order, with `Forget.ALL` wherever batches are lost for good. A publisher begins anew only behind a lost connection.
    """

    def __init__(self, most_waiting: int = 4096) -> None:
        """`most_waiting`: how many batches may wait for a replay. If there are more, the oldest go, and the replay has to bring them."""
        self._next = 0
        self._last_ts = float("-inf")
        self._waiting: dict[int, EventBatch] = {}
        self._most_waiting = most_waiting
        self._joined = False
        self._last_live, self._last_live_ts = -1, float("-inf")
        """The number and the time of the last batch of the live stream."""
        self.gaps = 0
        """How often batches were missing."""
        self.losses = 0
        """How often missing batches were lost for good."""

    @property
    def in_order(self) -> bool:
        """Whether no batch is known to be missing."""
        return self._joined and not self._waiting

    @property
    def ask_from(self) -> int:
        """The number from which to ask for a replay. It is one that is known already, if there is one: if the publisher has another batch of that number, or
        none, it began anew."""
        return max(0, self._next - 1)

    def live(self, number: int, batch: EventBatch) -> list[Step]:
        """Takes in a batch of the live stream. If it does not follow the last one, it waits for `replayed`."""
        if (
            number <= self._last_live and batch.ts > self._last_live_ts
        ):  # the stream of one publisher has no number twice
            steps = self._begin_anew() if self._next else []
            self._joined, self._waiting, self._last_live = False, {}, -1
            return [*steps, *self.live(number, batch)]
        self._last_live, self._last_live_ts = max(number, self._last_live), max(batch.ts, self._last_live_ts)
        if number < self._next:
            if batch.ts <= self._last_ts:
                return []  # a replay has brought it
            steps = self._begin_anew()
            self._last_live = -1
            return [*steps, *self.live(number, batch)]
        if self._joined and number == self._next and not self._waiting:
            return [self._apply(number, batch)]
        if not self._waiting and self._joined:
            self.gaps += 1
        self._waiting[number] = batch
        while len(self._waiting) > self._most_waiting:
            del self._waiting[min(self._waiting)]
        return []

    def replayed(self, answers: Sequence[Numbered]) -> list[Step]:
        """Takes in the answer to a replay from `ask_from` on. The answer may lack batches at its end or in its middle: as long as the stream is not
        `in_order` then, ask again."""
        if answers:
            # what waits is of the same publisher only if it is younger where its number is higher
            last = answers[-1]
            self._waiting = {
                number: batch
                for number, batch in self._waiting.items()
                if number > last.number and batch.ts > last.batch.ts
            }
        elif not self._next:
            self._waiting = {}  # a publisher that has nothing has not sent these
        if self._next and not self._is_known(answers):
            # the batches in between are gone, or another publisher has this address now: everything that it still has is wanted
            waiting = self._waiting if answers else {}
            steps = self._begin_anew()
            self._waiting = waiting
            return steps
        steps = []
        numbered = {one.number: one.batch for one in answers}
        merged, self._waiting, self._joined = {**self._waiting, **numbered}, {}, True
        if not self._next and answers and answers[0].number > 0:  # what came before is gone
            self._next = answers[0].number
            self._count_loss(merged[self._next])
        for number in sorted(merged):
            if number > self._next:
                self._waiting = {later: batch for later, batch in merged.items() if later >= number}
                break
            if number >= self._next:
                steps.append(self._apply(number, merged[number]))
        return steps

    def disconnected(self) -> None:
        """Notes that the connection was lost. Its other end may be another publisher from now on, whose numbers may happen to go on where
        those of the last one ended. So batches wait until a replay has told."""
        self._joined = False

    def lost(self) -> list[Step]:
        """Gives up on missing batches, because the publisher does not answer replays. Returns what to apply instead."""
        if self._joined and not self._waiting:
            return []
        waiting = self._waiting
        steps: list[Step] = self._begin_anew() if self._next else []
        self._joined, self._waiting = True, {}
        self.losses += 1
        # what waits may have holes of its own: each of them makes everything before it useless
        for number in sorted(waiting):
            if self._next and number > self._next:
                steps.append(Forget.ALL)
            steps.append(self._apply(number, waiting[number]))
        return steps

    def _is_known(self, answers: Sequence[Numbered]) -> bool:
        """Returns whether an answer begins with the batch that was applied last."""
        first = answers[0] if answers else None
        return first is not None and first.number == self._next - 1 and first.batch.ts == self._last_ts

    def _count_loss(self, first: EventBatch) -> None:
        """Notes that a replay begins in the middle. Nothing is lost if its first batch says all that is there."""
        if not first.events or not isinstance(first.events[0], ClearedEvent):
            self.losses += 1

    def _apply(self, number: int, batch: EventBatch) -> EventBatch:
        self._next = number + 1
        self._last_ts = batch.ts
        return batch

    def _begin_anew(self) -> list[Step]:
        self._next, self._last_ts, self._joined, self._waiting = 0, float("-inf"), False, {}
        return [Forget.ALL]
