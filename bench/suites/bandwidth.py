"""How fast do bytes move between two nodes' memories? Reports `put_ratio` and `get_ratio`, in comparison with
Mooncake's raw TransferEngine.

    pd-cache bench bandwidth                       on one machine, between two processes
    pd-cache bench bandwidth --serve HOST:PORT     on one of two machines; on the other --connect HOST:PORT

The pool is the bench's own: a master at the machine that connects, and a segment of each node. Put and get go
through `MooncakeStore`, as chunks do; raw is one batch of Mooncake's TransferEngine with as many pieces of
the same size.
"""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import click
import msgspec

from bench.lib.pool import bench_transfer, local_pool
from bench.lib.report import Check, Rows, at_least, option, output_options, tracked
from bench.lib.two_machines import Crew, Site, conduct, machine_options
from transfer.deadlines import end_in
from transfer.errors import Status, TransferError
from transfer.settings import MIN_SEGMENT, ByteSize, Placement, TransferSettings
from transfer.staging import Slot, StagingPool
from transfer.store import MooncakeStore

_OBJECTS = 16
"""The number of objects in a batch."""
_OPEN_S = 30.0
_MARGIN_S = 10.0
_RATIO = 0.9
"""The target: the throughput of put and get, as a share of the raw engine's between the same two nodes."""
Part = Literal["put", "get", "remove", "raw_write", "raw_read"]
PARTS: tuple[Part, ...] = ("put", "get", "raw_write", "raw_read")
"""The kinds of transfers that are timed."""


# --- at every node ------------------------------------------------------------------------------------------


class JoinPool(NamedTuple):
    """The job to join the pool of this master, with a segment of four batches."""

    master: str
    object_bytes: int


class NodeMemory(NamedTuple):
    """A node's memory, as other nodes reach it."""

    node: str
    host: str
    segment: str
    engine: str
    address: int
    timeout_s: float
    """The time-out of its transfers."""


class Transfer(NamedTuple):
    """The job to move one batch to, or from, a node's memory. `run` names the objects."""

    part: Part
    run: str
    to: NodeMemory


class BandwidthSite(Site):
    """A store client, a segment and a raw engine, with the same batch of bytes for both."""

    def open(self, job: JoinPool) -> NodeMemory:
        """Mounts the segment, and registers memory for raw transfers."""
        host, stride = self.location.host, StagingPool.stride_of(job.object_bytes)
        settings = msgspec.structs.replace(
            bench_transfer(self.location.config), staging_size=2 * _OBJECTS * stride
        )
        self._timeout_s = max(settings.timeouts.get_ms, settings.timeouts.put_ms) / 1000
        # the objects go with the segments that they are in
        segment_size = max(MIN_SEGMENT, 4 * _OBJECTS * job.object_bytes)
        self._store = store = MooncakeStore(settings, master=job.master, host=host, segment_size=segment_size)
        self.held.callback(store.close)
        staging = store.staging(job.object_bytes)
        store.wait_open(_OPEN_S)
        slots: list[Slot] = []
        for _ in range(2 * _OBJECTS):
            slot = staging.lease(time.monotonic() + _OPEN_S)
            assert slot is not None
            self.held.callback(slot.release)
            slots.append(slot)
        self._source, self._target = slots[:_OBJECTS], slots[_OBJECTS:]
        for slot in self._source:
            slot.view[:] = os.urandom(slot.size)
        self._sizes = [slot.size for slot in self._source]
        self._memory = StagingPool(_OBJECTS * stride, job.object_bytes)
        self._remote = [index * stride for index in range(_OBJECTS)]
        self._engine = _raw_engine(settings, host)
        for pool in (staging, self._memory):
            if (code := self._engine.register_memory(pool.address, pool.nbytes)) != 0:
                raise TransferError(f"TransferEngine refused to register {pool.nbytes} bytes ({code})")
            self.held.callback(self._engine.unregister_memory, pool.address)
        engine = f"{host}:{self._engine.get_rpc_port()}"
        return NodeMemory(
            self.location.node, host, store.hostname, engine, self._memory.address, self._timeout_s
        )

    def transfer(self, job: Transfer) -> tuple[float, bool]:
        """Moves one batch. Returns the seconds, and for a get whether it returned the bytes that were put.
        Raises TransferError if part of it did not arrive."""
        keys = [f"pdc1/bench/{job.run}/{self.location.node}/{index}" for index in range(len(self._source))]
        if job.part == "get":
            for slot in self._target:
                slot.view[:] = bytes(slot.size)
        begin = time.perf_counter()
        statuses = self._do(job, keys)
        seconds = time.perf_counter() - begin
        if bad := [status for status in statuses if status is not Status.OK]:
            what = f"{job.part} {'to' if job.part in ('put', 'raw_write') else 'from'} {job.to.node} ({job.to.host})"
            raise TransferError(f"{what}: {bad[0].value} for {len(bad)} of {len(statuses)}")
        equal = job.part != "get" or all(
            a.view == b.view for a, b in zip(self._source, self._target, strict=True)
        )
        return seconds, equal

    def _do(self, job: Transfer, keys: list[str]) -> Sequence[Status]:
        store, timeout = self._store, self._timeout_s
        if job.part == "put":
            placement = Placement(preferred_segment=job.to.segment)
            return store.start_put(
                keys, self._source, self._sizes, end_in(timeout), placement=placement
            ).results()
        if job.part == "get":
            return [moved.status for moved in store.start_get(keys, self._target, end_in(timeout)).results()]
        if job.part == "remove":
            return store.remove(keys, end_in(timeout), force=True)
        write = job.part == "raw_write"
        own = [slot.address for slot in (self._source if write else self._target)]
        move = self._engine.batch_transfer_sync_write if write else self._engine.batch_transfer_sync_read
        code = move(job.to.engine, own, [job.to.address + offset for offset in self._remote], self._sizes)
        return [Status.OK if code == 0 else Status.TRANSFER_FAILED]


def _raw_engine(settings: TransferSettings, host: str) -> Any:
    """Returns Mooncake's raw TransferEngine, without keys, leases or a master. `host`: the address at which
    peers reach this process. Raises TransferError if Mooncake refuses."""
    from mooncake.engine import TransferEngine  # needs what the store has loaded already

    # Mooncake takes no less than 5 s
    longest_s = max(5, max(settings.timeouts.get_ms, settings.timeouts.put_ms) // 1000)
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(longest_s))
    engine = TransferEngine()
    code = engine.initialize(host, "P2PHANDSHAKE", settings.protocol, ",".join(settings.devices))
    if code != 0:
        raise TransferError(
            f"TransferEngine on {host} over {settings.protocol}: initialize() returned {code}"
        )
    return engine


# --- at the machine that leads ------------------------------------------------------------------------------


def measure(
    machines: Crew, opened: dict[str, NodeMemory], pairs: Sequence[tuple[str, str]], batch: int, rounds: int
) -> Rows:
    """Returns a row for each pair. All pairs move bytes at the same time, from the first node's memory to the
    second's. The first round does not count."""
    timeout = _MARGIN_S + max(memory.timeout_s for memory in opened.values())
    rates: dict[str, dict[Part, list[float]]] = {begin: {part: [] for part in PARTS} for begin, _ in pairs}
    equal = dict.fromkeys(rates, True)
    for turn in range(rounds + 1):
        run = uuid.uuid4().hex[:12]
        for part in get_args(Part):
            if part.startswith("raw") and pairs[0][0] == pairs[0][1]:
                continue  # within a node, the store copies, but the engine would use the network
            jobs = {begin: Transfer(part, run, opened[end]) for begin, end in pairs}
            done = machines.run(BandwidthSite.transfer, jobs, timeout_s=timeout)
            for begin, (seconds, same) in done.items():
                equal[begin] &= same
                if turn and part in PARTS:
                    rates[begin][part].append(batch / seconds / 1e9)
    rows = []
    for begin, end in pairs:
        median = {part: statistics.median(some) if some else None for part, some in rates[begin].items()}
        rows.append(
            {
                "from": begin,
                "to": end,
                **{f"{part}_gbps": value for part, value in median.items()},
                "put_ratio": _ratio(median["put"], median["raw_write"]),
                "get_ratio": _ratio(median["get"], median["raw_read"]),
                "bytes_equal": equal[begin],
            }
        )
    return rows


def _ratio(value: float | None, limit: float | None) -> float | None:
    return value / limit if value is not None and limit else None


def lead(
    machines: Crew, object_bytes: int, rounds: int, at_once: bool, link_gbit: float | None
) -> dict[str, Any]:
    """Opens, measures and closes at both nodes. Returns the figures."""
    here = machines.location
    pool = local_pool(0, host=here.host, transfer=bench_transfer(here.config))
    master = machines.later.enter_context(pool)
    job = JoinPool(master, object_bytes)
    opened = machines.everywhere(BandwidthSite.open, job, timeout_s=_OPEN_S + _MARGIN_S)
    node, other = machines.nodes
    turns = [[(begin, end)] for begin in machines.nodes for end in machines.nodes]
    turns += [[(node, other), (other, node)]] if at_once else []
    rows = [
        row
        for pairs in tracked(turns, "pairs")
        for row in measure(machines, opened, pairs, object_bytes * _OBJECTS, rounds)
    ]
    if link_gbit is not None:
        for row in rows:
            row["get_of_link"] = None if row["from"] == row["to"] else 8 * row["get_gbps"] / link_gbit
    return {"results": rows[:4], "at_once": rows[4:]}


# --- the report ---------------------------------------------------------------------------------------------


def checks_of(figures: dict[str, Any]) -> list[Check]:
    """Returns the checks of bytes, and those against the raw engine, which does not run within a node."""
    everything = [*figures["results"], *figures["at_once"]]
    equal = sum(row["bytes_equal"] for row in everything)
    found = [at_least("pairs whose bytes came back as they were", equal, len(everything))]
    for rows, when in ((figures["results"], ""), (figures["at_once"], ", all at once")):
        for ours, limit in (("put", "raw_write"), ("get", "raw_read")):
            if values := [row[f"{ours}_ratio"] for row in rows if row[f"{ours}_ratio"] is not None]:
                name = f"{ours} / {limit}{when}, median of {len(values)} pairs"
                found.append(at_least(name, statistics.median(values), _RATIO))
    return found


@click.command()
@machine_options
@option("--size", default="4MiB", type=ByteSize, help="Bytes of an object.")
@option("--rounds", default=5, type=click.IntRange(1, 1000), help="Batches of each kind for each pair.")
@option("--at-once", is_flag=True, help="Afterwards, also measure both directions at the same time.")
@option("--link-gbit", type=click.FloatRange(0.001), help="The link's rate, to compare with.")
@output_options
def main(size: ByteSize, rounds: int, at_once: bool, link_gbit: float | None, **options: Any) -> None:
    """Put and get between all nodes, next to the raw engine and the link."""
    led = partial(lead, object_bytes=int(size), rounds=rounds, at_once=at_once, link_gbit=link_gbit)
    conduct(BandwidthSite, led, checks_of, local=2, **options)
