"""What each node's own cache holds, as the nodes' KV events say, and what the pool holds. Pure.

A block is known by 64 bits of its hash. A node's blocks are a set for each medium, so that to forget a node is to drop its sets. A set takes
about 100 bytes a block (`pd-cache bench events` measures it). All sets together have at most `most_blocks`: after that, further blocks are
counted and not noted, until others are removed. A hash is of the whole prefix, so the number of leading blocks that are in a set is how
much of a prompt a node has.

`apply` is called on the subscriber's thread and the rest on the event loop's. A set that is read while it grows gives an answer that was
true a moment ago.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from pd_cache.kv_events import (
    FULL_ATTENTION,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    ClearedEvent,
    EventBatch,
    Forget,
    RemovedEvent,
    Step,
    StoredEvent,
    short_hash,
)

NAME_BYTES = 16
"""The bytes of a block's hash that name a chunk in the pool."""
_MOST_MEDIA = 4
_MOST_GROUPS = 64
_MOST_UNDER_WAY = 1 << 20
_NO_TOKENS = b"\x90"


class NamedPrompt(NamedTuple):
    """A prompt by the hashes of its blocks and the names of its chunks."""

    fingerprint: str
    """That of the namespace in which this is so."""
    tokens: int
    blocks: Sequence[int] = ()
    """The short hashes of its whole blocks; empty if chunks are not named by the engine's blocks."""
    block_tokens: int = 1
    chunks: Sequence[int] = ()
    """The short hashes of the names of its whole chunks."""
    chunk_tokens: int = 1
    pool_tokens: int | None = None
    """How much of it the pool holds, in tokens; None if that is not known."""

    @classmethod
    def of(
        cls, fingerprint: str, tokens: int, block_hashes: Iterable[bytes], block_tokens: int, names: Iterable[bytes], chunk_tokens: int
    ) -> NamedPrompt:  # fmt: skip
        """Returns the prompt of `tokens` tokens with these hashes of blocks and names of chunks."""
        blocks = [int.from_bytes(value[-8:], "big") for value in block_hashes]
        chunks = [int.from_bytes(value[-8:], "big") for value in names]
        return cls(fingerprint, tokens, blocks, block_tokens, chunks, chunk_tokens)


class BlockBudget:
    """How many blocks all caches of an index may know of together."""

    def __init__(self, most_blocks: int) -> None:
        self.most = most_blocks
        self.refused = 0
        """How many blocks found no room."""
        self._spenders: dict[int, _Blocks] = {}

    @property
    def used(self) -> int:
        """How many blocks are known."""
        return sum(map(len, list(self._spenders.values())))

    def admit(self, spender: _Blocks) -> None:
        """Counts these blocks from now on."""
        self._spenders[id(spender)] = spender

    def dismiss(self, spender: _Blocks) -> None:
        """Counts them no more."""
        self._spenders.pop(id(spender), None)

    def grant(self, count: int) -> int:
        """Returns how many of `count` further blocks may be noted."""
        granted = max(0, min(count, self.most - self.used))
        self.refused += count - granted
        return granted


def leading(prefix: Sequence[int], known: Container[int]) -> int:
    """Returns how many of the first blocks of a prompt are known."""
    count = 0
    for block in prefix:
        if block not in known:
            break
        count += 1
    return count


class _Blocks:
    """Sets of blocks within a budget."""

    def __init__(self, budget: BlockBudget) -> None:
        self._budget = budget
        self.sets: dict[str, set[int]] = {}
        budget.admit(self)

    def add(self, label: str, blocks: list[int], most_sets: int) -> None:
        known = self.sets.get(label)
        if known is None:
            if len(self.sets) >= most_sets:
                return
            known = self.sets[label] = set()
        if len(blocks) > self._budget.most - self._budget.used:
            blocks = [block for block in blocks if block not in known]
            blocks = blocks[: self._budget.grant(len(blocks))]
        known.update(blocks)

    def discard(self, label: str, blocks: list[int]) -> None:
        known = self.sets.get(label)
        if known is not None:
            known.difference_update(blocks)

    def clear(self) -> None:
        self.sets = {}

    def leave(self) -> None:
        self.sets = {}
        self._budget.dismiss(self)

    def __len__(self) -> int:
        return sum(map(len, list(self.sets.values())))


class KnownCache:
    """What one node's own cache holds, and what requests under way are about to put there."""

    def __init__(self, budget: BlockBudget) -> None:
        self._blocks = _Blocks(budget)
        self._partial: set[int] = set()
        """Groups of layers that do not keep every token of a prefix. Their blocks say nothing about prefixes."""
        self._under_way: dict[int, int] = {}
        """Blocks of prompts that were sent to the node and are not answered yet, and of how many."""
        self.fingerprint: str | None = None
        """That of the namespace in which the node names its blocks, if that is known."""
        self.ready = False
        """Whether anything has come from the node since its blocks were last forgotten. Until then nothing is known of its cache."""

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, steps: Iterable[Step]) -> None:
        """Takes in what the node has published, in order."""
        for step in steps:
            if isinstance(step, Forget):
                self._blocks.clear()
            else:
                self._apply(step)
            self.ready = not isinstance(step, Forget)

    def _apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, StoredEvent):
                if event.medium == MEDIUM_STORAGE or not self._counts(event.group_idx, event.kv_cache_spec_kind):
                    continue
                self._blocks.add(event.medium or MEDIUM_GPU, _short(event.block_hashes), _MOST_MEDIA)
            elif isinstance(event, RemovedEvent):
                if event.medium != MEDIUM_STORAGE and event.group_idx not in self._partial:
                    self._blocks.discard(event.medium or MEDIUM_GPU, _short(event.block_hashes))
            else:
                self._blocks.clear()

    def _counts(self, group: int | None, kind: str | None) -> bool:
        if kind in FULL_ATTENTION or group is None:
            return group not in self._partial
        if len(self._partial) < _MOST_GROUPS:
            self._partial.add(group)
        return False

    def knows(self, prompt: NamedPrompt | None) -> bool:
        """Returns whether the node's events say how much of the prompt it has."""
        return self.ready and prompt is not None and bool(prompt.blocks) and prompt.fingerprint == self.fingerprint

    def media(self, prompt: NamedPrompt) -> dict[str, int]:
        """Returns how many tokens of the prompt's beginning the node has, by medium."""
        return {
            medium: leading(prompt.blocks, known) * prompt.block_tokens
            for medium, known in list(self._blocks.sets.items())  # the subscriber's thread may add one
        }

    def tokens(self, prompt: NamedPrompt) -> int:
        """Returns how many tokens of the prompt's beginning the node has, in any medium, or will have when the requests under way are
        done."""
        sets, under_way = list(self._blocks.sets.values()), self._under_way
        if len(sets) == 1 and not under_way:
            return leading(prompt.blocks, sets[0]) * prompt.block_tokens
        count = 0
        for block in prompt.blocks:
            if block not in under_way and not any(block in known for known in sets):
                break
            count += 1
        return count * prompt.block_tokens

    def begin(self, prompt: NamedPrompt) -> Sequence[int]:
        """Notes that the node is about to compute this prompt. Returns what `end` needs."""
        under_way = self._under_way
        if len(under_way) + len(prompt.blocks) > _MOST_UNDER_WAY:
            return ()
        for block in prompt.blocks:
            under_way[block] = under_way.get(block, 0) + 1
        return prompt.blocks

    def end(self, begun: Sequence[int]) -> None:
        """Notes that it has done so, or failed to. What it then has, its events say."""
        under_way = self._under_way
        for block in begun:
            left = under_way[block] - 1
            if left:
                under_way[block] = left
            else:
                del under_way[block]

    def forget(self) -> None:
        """Gives back what the cache takes of the budget, for good."""
        self._blocks.leave()
        self.ready = False


class KnownPool:
    """Which chunks the pool holds, by namespace."""

    def __init__(self, budget: BlockBudget, most_namespaces: int = 256) -> None:
        self._blocks = _Blocks(budget)
        self._most_namespaces = most_namespaces

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, steps: Iterable[Step]) -> None:
        """Takes in what the pool's publisher has published, in order."""
        for step in steps:
            if isinstance(step, Forget):
                self._blocks.clear()
                continue
            for event in step.events:
                if isinstance(event, ClearedEvent):
                    self._blocks.clear()
                    continue
                if not event.ownership:
                    continue
                # an event with tokens is about the blocks of one chunk, the last of which names the chunk
                whole = isinstance(event, StoredEvent) and bytes(event.token_ids) != _NO_TOKENS
                hashes = event.block_hashes[-1:] if whole else event.block_hashes
                names = [short_hash(value[:NAME_BYTES]) for value in hashes if isinstance(value, bytes)]
                if isinstance(event, StoredEvent):
                    self._blocks.add(event.ownership, names, self._most_namespaces)
                else:
                    self._blocks.discard(event.ownership, names)

    def tokens(self, prompt: NamedPrompt) -> int:
        """Returns how many tokens of the prompt's beginning the pool holds."""
        return leading(prompt.chunks, self._blocks.sets.get(prompt.fingerprint, ())) * prompt.chunk_tokens

    def believed(self, prompt: NamedPrompt, first: int) -> int:
        """Returns how many of the prompt's chunks in a row, from the one with the number `first` on, are there according to the events."""
        return leading(prompt.chunks[first:], self._blocks.sets.get(prompt.fingerprint, ()))

    def forget(self) -> None:
        """Gives back what this takes of the budget, for good."""
        self._blocks.leave()


def _short(hashes: Sequence[int | bytes]) -> list[int]:
    return [value if type(value) is int else short_hash(value) for value in hashes]
