"""Which chunks of each layer group a prefix needs. Pure.

A model has several layer groups if its layers do not all keep the KV of every token, or if it has a draft
model or pipeline stages. Each group has its own namespace, and so its own keys. The names of chunks are the
same in all groups. A group of full attention needs every chunk of a prefix. A group of windows or states
needs only the last ones, its *tail*: the chunks that the window reaches into, or the one chunk whose object
is the state at the prefix's end.

Some draft models compute a token's KV from this token and the next. In the group of such layers, the KV of
chunk 0 depends on the first token of chunk 1. So the object of chunk 0 has the name of chunk 1, which covers
that token. Such a group is *ahead* by one name. Of a prompt with the whole chunks 0, 1 and 2, it has objects
for chunks 0 and 1, under the names of chunks 1 and 2. A prefix then ends before the last whole chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_cache.chunks import ChunkedTokenDatabase, Names
from pd_cache.reasons import Found, worst_reason
from transfer.errors import Status


class LayerGroups:
    """The layer groups of one model. The first one names the chunks."""

    def __init__(self, databases: Sequence[ChunkedTokenDatabase]) -> None:
        """Raises ValueError if there is no group, or if the groups' chunks are not of one size."""
        if len({database.chunk_size for database in databases}) != 1:
            raise ValueError(
                f"the groups of a model have chunks of one size, got {[database.namespace for database in databases]}"
            )
        self.databases = tuple(databases)
        self.first = databases[0]
        spaces = [database.namespace for database in databases]
        self._tails = [(space.tail, space.ahead) for space in spaces]
        self.ahead = max(space.ahead for space in spaces)
        """How many names after a prefix's end the groups need: 1 if a group is ahead, otherwise 0."""
        self.need_all = any(not space.tail for space in spaces)
        """Whether a group needs all chunks of a prefix."""
        self.keys_per_chunk = sum(space.shards for space in spaces)
        """How many objects a chunk has in all groups together."""

    def keys(self, names: Names, label: str = "") -> list[str]:
        """Returns the keys of every shard of these chunks: group by group, and within a group chunk by
        chunk."""
        keys: list[str] = []
        for database in self.databases:
            keys += database.keys(names, label=label)
        return keys

    def needed(self, start: int, end: int) -> list[range]:
        """Returns, for each group, which chunks a prefix up to `end` needs if the chunks before `start` are
        at hand. Chunks are given by the indices of their names."""
        return [
            range((max(start, end - tail) if tail else start) + ahead, end + ahead)
            for tail, ahead in self._tails
        ]


def _by_group(
    groups: LayerGroups, statuses: Sequence[Status], count: int
) -> list[tuple[int, list[Sequence[Status]], list[int]]]:
    """Returns for each group: its tail; the statuses of each chunk's shards; and for each chunk, how many
    chunks in a row are there up to it."""
    found, start = [], 0
    for database in groups.databases:
        space = database.namespace
        end = start + count * space.shards
        first = start + space.ahead * space.shards
        chunks = [statuses[at : at + space.shards] for at in range(first, end, space.shards)]
        runs, run, start = [], 0, end
        for shards in chunks:
            run = run + 1 if shards.count(Status.OK) == len(shards) else 0
            runs.append(run)
        found.append((space.tail, chunks, runs))
    return found


def longest_prefix(groups: LayerGroups, statuses: Sequence[Status]) -> Found:
    """Returns how long a prefix can be, and why it is not longer. Groups without a tail need all of its
    chunks, other groups their tails before its end. A chunk is there if all of its shards are.

    `statuses` are those of the objects, in the order of `LayerGroups.keys`. Earlier chunks are at hand.
    """
    count = len(statuses) // groups.keys_per_chunk
    if not groups.ahead and statuses.count(Status.OK) == len(statuses):
        return Found(count, count)
    by_group = _by_group(groups, statuses, count)
    leading = min(([*runs, 0].index(0) for tail, _, runs in by_group if not tail), default=count)
    reach = leading
    while reach and not all(
        reach <= len(runs) and runs[reach - 1] >= min(tail, reach) for tail, _, runs in by_group if tail
    ):
        reach -= 1
    if groups.need_all and leading > reach:
        reason = worst_reason(statuses)
        return Found(reach, leading, "no_tail" if reason == "missing" else reason)
    next_chunk = [
        status
        for tail, chunks, _ in by_group
        if reach < len(chunks) and not (tail and groups.need_all)
        for status in chunks[reach]
    ]
    return Found(reach, reach, worst_reason(next_chunk))
