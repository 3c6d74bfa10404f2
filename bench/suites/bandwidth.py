"""How fast bytes move from each node to each node's memory, next to raw TransferEngine between the same two, and to the link.

    pd-cache bench bandwidth                           on one machine, between two processes
    pd-cache bench bandwidth --serve HOST:PORT         on one of two machines, and on the other --connect HOST:PORT

The pool is the bench's own: a master at the machine that connects, and of each a segment for as long as the bench runs. Put and get
go through `MooncakeStore`, as chunks do; raw is one batch of Mooncake's TransferEngine with as many pieces of the same size.
"""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from bench.lib.about import about, machine
from bench.lib.pool import bench_transfer, own_master
from bench.lib.report import Check, Report, Table, finish, option, progress, report_options, size
from bench.lib.two_machines import Location, MachineOptions, Machines, Site, conduct, machine_options, step
from pd_cache.cluster.machine import machine_memory
from transfer.errors import Status, TransferError
from transfer.settings import MIN_SEGMENT, ByteSize, Placement, Timeouts, TransferSettings
from transfer.staging import Slot, StagingPool
from transfer.store import MooncakeStore

_OPEN_S = 30.0
_MARGIN_S = 10.0
_RATIO = 0.9
"""The share of the raw engine's throughput, between the same two nodes, that put and get have to reach."""
PARTS = ("put", "get", "raw_write", "raw_read")


# --- at every node ---------------------------------------------------------------------------------------------------


class JoinPool(msgspec.Struct, frozen=True):
    """Join the pool of this master, with a segment of four batches."""

    master: str
    object_bytes: int
    objects: int


class NodeMemory(msgspec.Struct, frozen=True):
    """What the others need to reach this node's memory, and what it is."""

    node: str
    host: str
    segment: str
    engine: str
    address: int
    machine: str
    timeouts: Timeouts


class Transfer(msgspec.Struct, frozen=True):
    """Move one batch to, or from, a node's memory. `run` names the objects."""

    part: str
    run: str
    to: NodeMemory


class Timed(msgspec.Struct, frozen=True):
    """Seconds; for a get also whether the bytes were the ones that were put."""

    seconds: float
    equal: bool = True


class RawEngine:
    """Mooncake's TransferEngine itself, without keys, leases or a master: the raw thing."""

    def __init__(self, settings: TransferSettings, host: str) -> None:
        """`host`: the address at which peers reach this process. Raises TransferError if Mooncake refuses."""
        from mooncake.engine import TransferEngine  # needs what the store has loaded already

        # Mooncake takes no less than 5 s
        longest_s = max(5, max(settings.timeouts.get_ms, settings.timeouts.put_ms) // 1000)
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(longest_s))
        self._engine: Any = TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", settings.protocol, ",".join(settings.devices))
        if code != 0:
            raise TransferError(f"TransferEngine on {host} over {settings.protocol}: initialize() returned {code}")
        self.address = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        """Lets peers read and write this memory, which must stay mapped until `close`. Raises TransferError if Mooncake refuses."""
        if (code := self._engine.register_memory(address, nbytes)) != 0:
            raise TransferError(f"TransferEngine {self.address} refused to register {nbytes} bytes ({code})")
        self._registered.append(address)

    def write(self, peer: str, slots: Sequence[Slot], remote: Sequence[int]) -> Status:
        """Writes each slot to the address of the same index in the peer's memory. Returns OK when all are there."""
        addresses, sizes = [slot.address for slot in slots], [slot.size for slot in slots]
        code = self._engine.batch_transfer_sync_write(peer, addresses, list(remote), sizes)
        return Status.OK if code == 0 else Status.TRANSFER_FAILED

    def read(self, peer: str, slots: Sequence[Slot], remote: Sequence[int]) -> Status:
        """Fills each slot from the address of the same index in the peer's memory. Returns OK when all are full."""
        addresses, sizes = [slot.address for slot in slots], [slot.size for slot in slots]
        code = self._engine.batch_transfer_sync_read(peer, addresses, list(remote), sizes)
        return Status.OK if code == 0 else Status.TRANSFER_FAILED

    def close(self) -> None:
        """Takes the memory back."""
        while self._registered:
            self._engine.unregister_memory(self._registered.pop())


class BandwidthSite(Site):
    """A store client, a segment and a raw engine, with the same batch of bytes for both."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._store: MooncakeStore | None = None
        self._engine: RawEngine | None = None
        self._source: list[Slot] = []
        self._target: list[Slot] = []

    @step
    def open(self, job: JoinPool) -> NodeMemory:
        """Mounts the segment, and registers memory for raw transfers."""
        batch = job.objects * job.object_bytes
        needed, memory = 7 * batch, machine_memory().total
        if needed > memory // 2:
            raise TransferError(
                f"7 batches, {needed >> 20} MiB, are more than half of this machine's {memory >> 20} MiB; make --size or --objects smaller"
            )
        stride = StagingPool.stride_of(job.object_bytes)
        settings = msgspec.structs.replace(
            bench_transfer(self.location.config), staging_size=ByteSize(2 * job.objects * stride)
        )
        self._timeouts = settings.timeouts
        self._store = store = MooncakeStore(
            settings, master=job.master, host=self.location.host, segment_size=max(MIN_SEGMENT, 4 * batch)
        )
        self._staging = staging = store.staging(job.object_bytes)
        store.wait_open(_OPEN_S)
        slots = [
            slot for _ in range(2 * job.objects) if (slot := staging.lease(time.monotonic() + _OPEN_S)) is not None
        ]
        self._source, self._target = slots[: job.objects], slots[job.objects :]
        for slot in self._source:
            slot.view[:] = os.urandom(slot.size)
        self._engine = engine = RawEngine(settings, self.location.host)
        self._memory = StagingPool(job.objects * stride, job.object_bytes)
        for pool in (staging, self._memory):
            engine.register(pool.address, pool.nbytes)
        self._stride = stride
        return NodeMemory(
            self.location.node,
            self.location.host,
            store.hostname,
            engine.address,
            self._memory.address,
            machine(),
            settings.timeouts,
        )

    @step
    def transfer(self, job: Transfer) -> Timed:
        """Moves one batch and returns its timing. Raises TransferError if part of it did not arrive."""
        keys = [f"pdc1/bench/{job.run}/{self.location.node}/{index}" for index in range(len(self._source))]
        what = f"{job.part} {'to' if job.part in ('put', 'raw_write') else 'from'} {job.to.node} ({job.to.host})"
        if job.part == "get":
            for slot in self._target:
                slot.view[:64] = bytes(64)
        begin = time.perf_counter()
        statuses = self._do(job, keys)
        seconds = time.perf_counter() - begin
        if bad := [status for status in statuses if status is not Status.OK]:
            raise TransferError(f"{what}: {bad[0].value} for {len(bad)} of {len(statuses)}")
        equal = job.part != "get" or all(a.view == b.view for a, b in zip(self._source, self._target, strict=True))
        return Timed(seconds, equal)

    def _do(self, job: Transfer, keys: list[str]) -> Sequence[Status]:
        store, engine = self._store, self._engine
        assert store is not None, "not open"
        assert engine is not None
        get_s, put_s = self._timeouts.get_ms / 1000, self._timeouts.put_ms / 1000
        remote = [job.to.address + index * self._stride for index in range(len(keys))]
        if job.part == "put":
            placement = Placement(preferred_segment=job.to.segment)
            sizes = [slot.size for slot in self._source]
            return store.start_put(keys, self._source, sizes, timeout=put_s, placement=placement).results()
        if job.part == "get":
            return [one.status for one in store.start_get(keys, self._target, timeout=get_s).results()]
        if job.part == "remove":
            return store.remove(keys, timeout=put_s, force=True)
        if job.part == "raw_write":
            return [engine.write(job.to.engine, self._source, remote)]
        if job.part == "raw_read":
            return [engine.read(job.to.engine, self._target, remote)]
        raise ValueError(f"no part {job.part!r}")

    def close(self) -> None:
        """The objects go with the segments that they are in."""
        if self._engine is not None:
            self._engine.close()
        if self._store is not None:
            for slot in (*self._source, *self._target):
                slot.release()
            self._store.close()


# --- at the machine that leads ----------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """What was measured from one node to another's memory; GB/s, a value a round."""

    begin: str
    end: str
    rates: dict[str, list[float]]
    equal: bool = True

    def median(self, part: str) -> float | None:
        values = self.rates[part]
        return statistics.median(values) if values else None


def measure(
    machines: Machines,
    opened: dict[str, NodeMemory],
    groups: Iterable[Sequence[tuple[str, str]]],
    batch: int,
    rounds: int,
) -> Iterator[list[Pair]]:
    """Yields the pairs of each group, all of a group at the same time. The first round of each is not counted."""
    timeout = _MARGIN_S + max(max(one.timeouts.get_ms, one.timeouts.put_ms) for one in opened.values()) / 1000
    for group in groups:
        pairs = [Pair(begin, end, {part: [] for part in PARTS}) for begin, end in group]
        for turn in range(rounds + 1):
            run = uuid.uuid4().hex[:12]
            for part in ("put", "get", "remove", "raw_write", "raw_read"):
                if part.startswith("raw") and pairs[0].begin == pairs[0].end:
                    continue  # the store copies within a node; the engine would take the way over the network
                jobs = {pair.begin: Transfer(part, run, opened[pair.end]) for pair in pairs}
                done = machines.run(BandwidthSite.transfer, jobs, timeout_s=timeout)
                for pair in pairs:
                    pair.equal &= done[pair.begin].equal
                    if turn and part in PARTS:
                        pair.rates[part].append(batch / done[pair.begin].seconds / 1e9)
        yield pairs


def lead(
    machines: Machines, object_bytes: int, objects: int, rounds: int, at_once: bool, link_gbit: float | None
) -> dict[str, Any]:
    """Opens, measures and closes at all nodes. Returns the figures."""
    batch, hosts, config = object_bytes * objects, machines.hosts, machines.location.config
    with own_master(config, hosts[machines.own]) as master, machines.closing_sites(), progress() as bar:
        job = JoinPool(master, object_bytes, objects)
        opened = machines.everywhere(BandwidthSite.open, job, timeout_s=_OPEN_S + _MARGIN_S)
        groups = [[(begin, end)] for begin in machines.nodes for end in machines.nodes]
        begin, end = machines.nodes
        together = [[(begin, end), (end, begin)]] if at_once else []
        task = bar.add_task("pairs", total=len(groups) + len(together))

        def run(groups: list[list[tuple[str, str]]]) -> list[dict[str, Any]]:
            rows = []
            for pairs in measure(machines, opened, groups, batch, rounds):
                bar.advance(task)
                for pair in pairs:
                    figures = {f"{part}_gbps": pair.median(part) for part in PARTS}
                    link = None if link_gbit is None or pair.begin == pair.end else link_gbit / 8
                    rows.append({"from": pair.begin, "to": pair.end, **figures, "link_gbps": link, "bytes_equal": pair.equal})  # fmt: skip
            return rows

        results, results_at_once = run(groups), run(together)
    nodes = {node: {"host": hosts[node], "machine": one.machine} for node, one in opened.items()}
    return {
        "about": about(config),
        "nodes": nodes,
        "object_bytes": object_bytes,
        "objects": objects,
        "rounds": rounds,
        "results": results,
        "at_once": results_at_once,
    }


# --- the report ------------------------------------------------------------------------------------------------------


def ratios(rows: Sequence[dict[str, Any]], ours: str, limit: str) -> list[float]:
    """`ours / limit` of each pair that has both."""
    return [row[ours] / row[limit] for row in rows if row[ours] is not None and row[limit] is not None]


def checks_of(figures: dict[str, Any]) -> list[Check]:
    """Against the raw engine; there is none within a node, so that with one node only the bytes are checked."""
    everything = [*figures["results"], *figures["at_once"]]
    equal = sum(row["bytes_equal"] for row in everything)
    found = [Check("pairs whose bytes came back as they were", equal, len(everything), at_least=True)]
    for rows, when in ((figures["results"], ""), (figures["at_once"], ", all at once")):
        for ours, limit in (("put", "raw_write"), ("get", "raw_read")):
            if values := ratios(rows, f"{ours}_gbps", f"{limit}_gbps"):
                name = f"{ours} / {limit}{when}, median of {len(values)} pairs"
                found.append(Check(name, statistics.median(values), _RATIO, at_least=True))
    return found


def report_of(figures: dict[str, Any]) -> Report:
    """Returns the figures for people."""
    nodes, rows, at_once = figures["nodes"], figures["results"], figures["at_once"]
    size = ByteSize(figures["object_bytes"])
    batch = f"{figures['objects']} objects of {size}"
    note = f"Medians of {figures['rounds']} rounds of {batch}. GB/s are of 10^9 bytes. Within a node it is a copy in memory."
    parts = [_table("One pair at a time", rows, note)]
    if at_once:
        parts.append(
            _table("Both at once", at_once, "Each node moves bytes to or from the other one at the same time.")
        )
    parts.append(
        Table(
            "Nodes", ("node", "host", "machine"), [[node, one["host"], one["machine"]] for node, one in nodes.items()]
        )
    )
    summary = (
        f"{batch} a batch, put into and got from each node's memory through MooncakeStore, and moved by the "
        "raw TransferEngine between the same two."
    )
    return Report("Bandwidth between nodes", summary, parts, figures["about"])


def _table(title: str, rows: Sequence[dict[str, Any]], note: str) -> Table:
    linked = any(row["link_gbps"] is not None for row in rows)
    columns = ["from", "to", "put", "get", "raw write", "raw read", "put / raw", "get / raw"]
    cells = []
    for row in rows:
        put, get, raw_write, raw_read = rates = [row[f"{part}_gbps"] for part in PARTS]
        cells.append([row["from"], row["to"], *rates, _ratio(put, raw_write), _ratio(get, raw_read)])
        if linked:
            cells[-1] += [row["link_gbps"], _ratio(get, row["link_gbps"])]
    return Table(title, [*columns, "link", "get / link"] if linked else columns, cells, note)


def _ratio(value: float | None, limit: float | None) -> float | None:
    return value / limit if value is not None and limit else None


def _size(context: click.Context, parameter: click.Parameter, text: str) -> ByteSize:
    parsed = size(context, parameter, text)
    if not 4096 <= parsed <= 1 << 30:
        raise click.BadParameter(f"{parsed}: 4KiB to 1GiB are allowed", context, parameter)
    return parsed


@click.command()
@machine_options
@option("--size", default="4MiB", callback=_size, help="Bytes of an object.")
@option("--objects", default=16, type=click.IntRange(1, 512), help="Objects a batch.")
@option("--rounds", default=5, type=click.IntRange(1, 1000), help="Batches of each kind for each pair.")
@option("--at-once", is_flag=True, help="Then also both directions at the same time.")
@option("--link-gbit", type=click.FloatRange(0.001), help="The link's rate, to compare with.")
@report_options
def main(
    where: MachineOptions,
    size: ByteSize,
    objects: int,
    rounds: int,
    at_once: bool,
    link_gbit: float | None,
    **output: Any,
) -> None:
    """Put and get between all nodes, next to the raw engine and the link."""
    figures = conduct(
        where, BandwidthSite, lambda machines: lead(machines, size, objects, rounds, at_once, link_gbit), local=2
    )
    if figures is not None:
        finish(figures, checks_of(figures), report=report_of(figures), **output)


if __name__ == "__main__":
    main()
