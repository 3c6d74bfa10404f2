"""The pool in simulation: which node's memory holds which chunk, and what the master evicts when memory is short."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pd_cache.backends.eviction import make_policy
from pd_cache.cluster import MasterNode
from transfer.errors import Status

_USUAL = MasterNode(name="master")


def _never(key: str) -> bool:
    return False


class SimulatedPool:
    """Chunks by name. The master evicts as Mooncake's does: those used longest ago, a share of all, when little room is left."""

    def __init__(
        self,
        capacity: int,
        *,
        watermark: float = _USUAL.eviction_high_watermark,
        ratio: float = _USUAL.eviction_ratio,
    ) -> None:
        """`capacity` in chunks. `watermark`, `ratio`: as in the master's section of a cluster's file."""
        self._most = max(1, int(capacity * watermark))
        self._batch = max(1, int(capacity * ratio))
        self._owner: dict[bytes, int] = {}
        self._keys: dict[bytes, str] = {}
        """The same names as the policy knows them."""
        self._order = make_policy("lru", capacity)
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._owner)

    def exists(self, names: Sequence[bytes]) -> list[Status]:
        """Looks names up, which counts as a use: Mooncake's master leases what it is asked for."""
        answers = []
        for name in names:
            key = self._keys.get(name)
            if key is not None:
                self._order.used(key)
            answers.append(Status.MISSING if key is None else Status.OK)
        return answers

    def owner(self, name: bytes) -> int | None:
        """Returns the number of the node whose memory holds a chunk; None if it is gone."""
        return self._owner.get(name)

    def missing(self, names: Sequence[bytes]) -> list[bytes]:
        """Returns the names that are not there, in order, each once."""
        return [name for name in dict.fromkeys(names) if name not in self._owner]

    def put(self, name: bytes, owner: int) -> None:
        """Keeps a chunk, unless it is there."""
        if name in self._owner:
            return
        self._owner[name] = owner
        key = self._keys[name] = name.hex()
        self._order.added(key)
        if len(self._owner) > self._most:
            for _ in range(min(self._batch, len(self._owner))):
                gone = bytes.fromhex(self._order.evict(_never))
                del self._owner[gone], self._keys[gone]
                self.evicted += 1


def placed(nodes: Sequence[int], seed: int) -> Callable[[int], int]:
    """Returns a function that says in whose memory an object of a node lies: its own (`preferred_segment: own`) if the node is one of
    `nodes`, those that give memory; else a random one of them."""
    rng, giving = random.Random(seed), set(nodes)
    return lambda node: node if node in giving else rng.choice(nodes)
