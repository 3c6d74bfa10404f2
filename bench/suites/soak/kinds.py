"""The faults that can be drawn: their targets, how long they last, how often they occur. `faults.ACTIONS` has one action for each. Pure."""

from __future__ import annotations

from typing import NamedTuple

STORES = ("store-0", "store-1")
ENGINES = ("engine-a", "engine-b")
"""`engine-a` has a cache of its own with a local tier, a disk and the pool; `engine-b` goes through the cache server."""
NODES = ("master", *STORES, "cache", *ENGINES, "prefill", "decode", "proxy")
ETCD = "etcd"
"""One more node, on a machine that has etcd: all others register there."""

HOSTS = {
    "control": ("master", "proxy"),
    ETCD: (ETCD,),
    "store-0": ("store-0",),
    "store-1": ("store-1",),
    "cache": ("cache", "engine-b"),
    "engine-a": ("engine-a",),
    "prefill": ("prefill",),
    "decode": ("decode",),
}
"""Which nodes run on which host."""

NEEDS_LINKS, NEEDS_MOUNTS, NEEDS_CLOCKS, NEEDS_ETCD = "links", "mounts", "clocks", "etcd"
EVERYTHING = frozenset({NEEDS_LINKS, NEEDS_MOUNTS, NEEDS_CLOCKS, NEEDS_ETCD})
"""What a machine may lack: hosts with links of their own, file systems to mount, time namespaces, etcd."""


class Kind(NamedTuple):
    """A row of the table."""

    name: str
    targets: tuple[str, ...]
    """One of these is drawn; a name that is listed twice is drawn twice as often."""
    shortest: float
    longest: float
    """Seconds between the fault and its end."""
    weight: float
    """How often it is drawn, relative to other kinds, after every kind has been drawn once."""
    quick: bool = True
    """Whether it fits into a run of less than a minute, cut to a few seconds."""
    needs: frozenset[str] = frozenset()
    also: tuple[str, ...] = ()
    """Nodes that it affects in addition to its target: no two faults affect a node at the same time."""


KINDS = (
    Kind("kill", NODES, 0.1, 5.0, 4.0),
    Kind("stop", NODES, 0.1, 55.0, 5.0),
    Kind("cut", tuple(HOSTS), 0.2, 30.0, 3.0, needs=frozenset({NEEDS_LINKS})),
    Kind("disk_full", ("engine-a",), 2.0, 20.0, 1.0, needs=frozenset({NEEDS_MOUNTS})),
    Kind("disk_refuses", ("engine-a",), 2.0, 20.0, 1.0, needs=frozenset({NEEDS_MOUNTS})),
    Kind("disk_read_only", ("engine-a",), 5.0, 20.0, 0.5, quick=False, needs=frozenset({NEEDS_MOUNTS})),
    Kind("disk_gone", ("engine-a",), 1.0, 10.0, 0.5),
    Kind("disk_folders", ("engine-a",), 0.2, 1.0, 1.0),
    Kind("disk_damage", ("engine-a",), 0.2, 1.0, 2.0),
    Kind("pool_damage", ("master",), 4.0, 12.0, 2.0),
    Kind("small_pool", ("store-0",), 15.0, 40.0, 0.5, quick=False, also=("store-1",)),
    Kind("clock", NODES, 0.2, 1.0, 1.0, needs=frozenset({NEEDS_CLOCKS})),
    Kind("reset", ENGINES, 0.1, 1.0, 4.0),
    Kind("strange_client", ("proxy",), 3.0, 10.0, 1.0),
    Kind("strange_engine", ("cache",), 3.0, 10.0, 1.0),
    Kind("tricky_engine", ("cache",), 5.0, 20.0, 3.0),
    Kind("strange_record", (ETCD,), 3.0, 10.0, 1.0, needs=frozenset({NEEDS_ETCD})),
    Kind("etcd_down", (ETCD,), 1.0, 30.0, 1.0, needs=frozenset({NEEDS_ETCD})),
)
"""Faults that follow one another. A kind that is not `quick` is left out of short runs."""

LONG_KINDS = (
    Kind("stop", ("store-0", "store-1", "store-0", "store-1", "master", "cache", "engine-a", "decode", "proxy"),
         69.0, 90.0, 3.0, quick=False),
    Kind("cut", ("store-0", "store-1"), 66.0, 90.0, 1.0, quick=False, needs=frozenset({NEEDS_LINKS})),
)  # fmt: skip
"""Faults that outlast a minute, beside the others: Mooncake gives a transfer up after 60 s."""


def touched(kind: Kind, target: str) -> frozenset[str]:
    """Returns the nodes that a fault touches."""
    return frozenset((*HOSTS.get(target, (target,)), target, *kind.also))


def possible(kinds: tuple[Kind, ...], there: frozenset[str], short: bool) -> list[Kind]:
    """Returns the kinds that are possible on a machine with `there`, in a short run or a long one."""
    return [kind for kind in kinds if kind.needs <= there and (kind.quick or not short)]
