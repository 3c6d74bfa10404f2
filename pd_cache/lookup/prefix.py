"""PrefixLookup: finds the longest contiguous prefix in a backend or a pool. Used by the engine, the cache server and lookup clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_cache.deadline import Deadline
from pd_cache.epochs import Epochs
from pd_cache.groups import LayerGroups, Surveyed
from pd_cache.metrics import CacheMetrics
from pd_cache.misses import ChunkHistory, MissReason, worst_reason
from transfer.errors import Status


class PrefixLookup:
    """Asks once for all chunks of a prompt, in all groups of layers, and counts requested and found tokens."""

    def __init__(self, groups: LayerGroups, metrics: CacheMetrics, history: ChunkHistory | None = None) -> None:
        """`history` learns what is found, and says of what is missing whether it was there before. Without it, no lookup knows."""
        self.groups = groups
        self.metrics = metrics
        self._history = history

    def find(
        self,
        names: Sequence[bytes],
        at_hand: int,
        exists: Callable[[list[str], float | None], list[Status]],
        epochs: Epochs,
        timeout: float | None = None,
    ) -> Surveyed:
        """Returns how many of the first chunks a load could restore. The first `at_hand` count as found.

        `exists` looks up a list of keys with one request, within the seconds that are left of `timeout`, which bounds the whole. The same
        request asks whether the model's epoch is still current. If a new one has begun, the chunks are looked up again, in that one; if it is
        unknown, none of them is found.
        """
        if at_hand == len(names):
            return Surveyed(len(names), len(names))
        statuses: list[Status] = []
        deadline = Deadline(timeout)
        for _ in range(2):
            check = epochs.check()
            keys = self.groups.keys(names[at_hand:], check.label)
            with self.metrics.timed("lookup"):
                statuses = exists([*keys, *check.keys], deadline.left())
            epoch = epochs.confirm(check, statuses[len(keys) :], timeout=deadline)
            if epoch == check.label:
                return self.judge(names, at_hand, statuses[: len(keys)], epoch)
            if epoch is None:
                break
        return self.unknown(len(names), at_hand, statuses)

    def unknown(self, chunks: int, at_hand: int, statuses: Sequence[Status]) -> Surveyed:
        """Returns the answer to a lookup while the model's epoch is unknown: nothing but what is at hand. Counts it."""
        self.metrics.tokens("lookup", "requested", (chunks - at_hand) * self.groups.first.chunk_size)
        self.metrics.outages("lookup", statuses)
        reason = worst_reason(statuses)
        if reason in ("none", "missing"):  # otherwise the reason is counted already
            reason = "epoch_unknown"
            self.metrics.trouble("lookup", "epoch_unknown")
        return Surveyed(at_hand, at_hand, reason)

    def judge(self, names: Sequence[bytes], at_hand: int, statuses: Sequence[Status], epoch: str) -> Surveyed:
        """Returns how many of the first chunks were found, and why not more. Counts their tokens.

        `statuses` are those of the chunks after the first `at_hand`, in the order of `LayerGroups.keys`, in the current epoch, `epoch`.
        """
        chunks, size, metrics = len(names), self.groups.first.chunk_size, self.metrics
        metrics.tokens("lookup", "requested", (chunks - at_hand) * size)
        if statuses.count(Status.OK) == len(statuses) and not self.groups.ahead:
            found = Surveyed(chunks - at_hand, chunks - at_hand)
        else:
            found = self.groups.reach([status is Status.OK for status in statuses])
            metrics.outages("lookup", statuses)
        metrics.tokens("lookup", "hit", found.chunks * size)
        if self._history is not None:
            self._history.follow(epoch)
        reason = self._reason(names[at_hand:], found, statuses)
        if self._history is not None:
            # of groups that all have a tail, only the end of a prefix is known to be there
            first = 0 if self.groups.need_all else max(0, found.leading - 1)
            self._history.note(names[at_hand + first : at_hand + found.leading])
        return Surveyed(at_hand + found.chunks, at_hand + found.leading, reason, epoch)

    def _reason(self, names: Sequence[bytes], found: Surveyed, statuses: Sequence[Status]) -> MissReason:
        """Returns why the first chunk that was not found was not there."""
        if found.leading > found.chunks:
            worst = worst_reason(statuses)
            return "no_tail" if worst == "missing" else worst
        if found.chunks == len(names):
            return "none"
        reason = worst_reason(self.groups.of_chunk(statuses, found.chunks))
        return reason if self._history is None else self._history.explain(reason, names[found.chunks])
