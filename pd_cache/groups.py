"""Which chunks of each layer group a prefix needs. Pure.

A model has several layer groups if its layers do not all keep the KV of every token, or if it has a draft model or pipeline stages. Each
group has a namespace, and so keys, of its own. The names of chunks are the same in all groups. A group of full attention needs every chunk
of a prefix. A group of windows or states needs only the last ones, its *tail*: the chunks that the window reaches into, or the one chunk
whose object is the state at the prefix's end.

Some draft models compute a token's KV from the token after it, so the last KV of a chunk depends on the first token of the next chunk. The
group of such layers is *ahead*: the object of a chunk lies under the name of the chunk after it, which covers that token. So a prefix
cannot include the last whole chunk: no chunk after it names its object.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from pd_cache.chunks import ChunkedTokenDatabase
from pd_cache.reasons import Found

T = TypeVar("T")


class LayerGroups:
    """The layer groups of one model. The first one names the chunks."""

    def __init__(self, databases: Sequence[ChunkedTokenDatabase]) -> None:
        """Raises ValueError if there is no group, or if the groups' chunks are not of one size."""
        if len({database.chunk_size for database in databases}) != 1:
            raise ValueError(
                f"the groups of a model have chunks of one size, got {[one.namespace for one in databases]}"
            )
        self.databases = tuple(databases)
        self.first = databases[0]
        self._tails = tuple(database.namespace.tail for database in databases)
        self._aheads = tuple(database.namespace.ahead for database in databases)

    def keys(self, names: Sequence[bytes], label: str = "") -> list[str]:
        """Returns the keys of every shard of these chunks: group by group, and within a group chunk by chunk."""
        return [key for database in self.databases for key in database.all_shard_keys(names, label)]

    @property
    def ahead(self) -> int:
        """How many names behind a prefix's end the groups need: 1 if a group is ahead, otherwise 0."""
        return max(self._aheads)

    @property
    def need_all(self) -> bool:
        """Whether a prefix needs all of its chunks of some group."""
        return 0 in self._tails

    @property
    def keys_per_chunk(self) -> int:
        """How many objects a chunk has in all groups together."""
        return sum(database.namespace.shards for database in self.databases)

    def reach(self, present: Sequence[bool]) -> Found:
        """Returns how long a prefix can be. `present` says which objects exist, in the order of `keys`.

        The engine has the chunks before those that were asked for at hand, in every group that needs them.
        """
        by_group = self._whole_chunks(present)
        full = [chunks for chunks, tail in zip(by_group, self._tails, strict=True) if not tail]
        longest = min((_leading(chunks) for chunks in full), default=len(by_group[0]))
        tails = [(_runs(chunks), tail) for chunks, tail in zip(by_group, self._tails, strict=True) if tail]
        for end in range(longest, 0, -1):
            if all(runs[end - 1] >= min(tail, end) for runs, tail in tails):
                return Found(end, longest if full else end)
        return Found(0, longest if full else 0)

    def of_chunk(self, answers: Sequence[T], chunk: int) -> list[T]:
        """Returns the answers for the objects of one chunk, in the groups that need all chunks; in all groups if each has a tail.

        `answers` are in the order of `keys`. A group that is ahead has no answer for the last chunk.
        """
        count = len(answers) // self.keys_per_chunk
        found: list[T] = []
        start = 0
        for database, tail in zip(self.databases, self._tails, strict=True):
            space = database.namespace
            named = chunk + space.ahead
            if named < count and not (tail and self.need_all):
                found += answers[start + named * space.shards : start + (named + 1) * space.shards]
            start += count * space.shards
        return found

    def needed(self, start: int, end: int) -> list[range]:
        """Returns, for each group, which chunks a prefix up to `end` needs if those before `start` are at hand, as the numbers of their
        names."""
        return [
            range((max(start, end - tail) if tail else start) + ahead, end + ahead)
            for tail, ahead in zip(self._tails, self._aheads, strict=True)
        ]

    def _whole_chunks(self, present: Sequence[bool]) -> list[list[bool]]:
        """Returns, for each group and chunk, whether every shard is there."""
        chunks, found, start = len(present) // self.keys_per_chunk, [], 0
        for database in self.databases:
            shards = database.namespace.shards
            own = present[start : start + chunks * shards]
            start += chunks * shards
            named = [all(own[at : at + shards]) for at in range(0, len(own), shards)]
            ahead = database.namespace.ahead
            found.append(named[ahead:] + [False] * min(ahead, len(named)))
        return found


def _leading(chunks: Sequence[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, chunks))


def _runs(chunks: Sequence[bool]) -> list[int]:
    """Returns, for each chunk, how many chunks in a row are there, this one included and last."""
    runs, run = [], 0
    for there in chunks:
        run = run + 1 if there else 0
        runs.append(run)
    return runs
