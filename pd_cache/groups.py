"""Which chunks of which layers a prefix needs, for models whose layers do not all keep the KV of every token. Pure.

Such a model's layers form groups. Each group has a namespace, and so keys, of its own; the names of chunks are the same in all. A group of
full attention needs every chunk of a prefix. Any other needs only the last ones, its *tail*: the chunks that its window reaches into, or
the one whose object is the state at the prefix's end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pd_cache.tokens import ChunkedTokenDatabase


class Surveyed(NamedTuple):
    """How far a prefix goes, in chunks."""

    chunks: int
    """A load can restore this many."""
    leading: int
    """The layers that need every chunk have this many. If it is more than `chunks`, then only the ends of such a prefix were not stored."""


class LayerGroups:
    """The groups of one model, the first of which names its chunks."""

    def __init__(self, databases: Sequence[ChunkedTokenDatabase]) -> None:
        """Raises ValueError if there is no group, or if the groups' chunks are not of one size."""
        if len({database.chunk_size for database in databases}) != 1:
            raise ValueError(
                f"the groups of a model have chunks of one size, got {[one.namespace for one in databases]}"
            )
        self.databases = tuple(databases)
        self.first = databases[0]
        self._tails = tuple(database.namespace.tail for database in databases)

    def keys(self, names: Sequence[bytes]) -> list[str]:
        """Returns the keys of every shard of these chunks: group by group, and within a group chunk by chunk."""
        return [key for database in self.databases for key in database.all_shard_keys(names)]

    @property
    def keys_per_chunk(self) -> int:
        """How many objects a chunk has in all groups together."""
        return sum(database.namespace.shards for database in self.databases)

    def reach(self, present: Sequence[bool]) -> Surveyed:
        """Returns how long a prefix can be, given which objects exist, in the order of `keys`.

        Chunks before those that were asked for are at hand, in every group that needs them.
        """
        by_group = self._whole_chunks(present)
        full = [chunks for chunks, tail in zip(by_group, self._tails, strict=True) if not tail]
        longest = min((_leading(chunks) for chunks in full), default=len(by_group[0]))
        tails = [(_runs(chunks), tail) for chunks, tail in zip(by_group, self._tails, strict=True) if tail]
        for end in range(longest, 0, -1):
            if all(runs[end - 1] >= min(tail, end) for runs, tail in tails):
                return Surveyed(end, longest if full else end)
        return Surveyed(0, longest if full else 0)

    def needed(self, start: int, end: int) -> list[range]:
        """Returns, for each group, the numbers of the chunks that a prefix up to `end` needs, if those before `start` are at hand."""
        return [range(max(start, end - tail) if tail else start, end) for tail in self._tails]

    def _whole_chunks(self, present: Sequence[bool]) -> list[list[bool]]:
        """Returns, for each group, whether each chunk is there with every shard."""
        chunks, rest = divmod(len(present), self.keys_per_chunk)
        if rest:
            raise ValueError(f"{len(present)} answers are no whole number of chunks of {self.keys_per_chunk} objects")
        found, start = [], 0
        for database in self.databases:
            shards = database.namespace.shards
            own = present[start : start + chunks * shards]
            start += chunks * shards
            found.append([all(own[at : at + shards]) for at in range(0, len(own), shards)])
        return found


def _leading(chunks: Sequence[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, chunks))


def _runs(chunks: Sequence[bool]) -> list[int]:
    """Returns, for each chunk, how many chunks in a row are there, up to and with this one."""
    runs, run = [], 0
    for there in chunks:
        run = run + 1 if there else 0
        runs.append(run)
    return runs
