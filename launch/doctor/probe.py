"""Checks of the cluster: what its nodes report, and a real put and get to each segment.

The test objects have keys that no namespace uses, `pdc1/doctor/…`, and are always removed. They are
not pinned: if a doctor is killed, the next eviction removes them. A segment with little room gets fewer
objects, so that no cached chunk is evicted for a test.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

import pd_cache
from launch.doctor.report import Finding, broken, ok, skipped, warning
from launch.masters import Segment, copies_at
from launch.watch.state import SKEW, ClusterStatus
from pd_cache.cluster import ClusterConfig, MasterNode
from pd_cache.cluster.machine import host_of, own_host, port_of, shown_bytes
from transfer import MooncakeStore, PoolUnavailableError, Slot, StagingPool, Status
from transfer.deadlines import end_in
from transfer.errors import TransferError
from transfer.settings import BreakerSettings, Placement, Timeouts

# --- what nodes report --------------------------------------------------------------------------------------


def cluster_findings(status: ClusterStatus) -> Iterator[Finding]:
    """Judges the state that `pd-cache status` shows: discovery, nodes, the pool, versions and namespaces. If
    no node answers, the last finding reports it."""
    nodes, ours, up = status.nodes, pd_cache.__version__, "pd-cache up -c FILE"
    check = "cluster.discovery"
    if status.fresh:
        yield ok(check, f"{status.source}: {len(nodes)} nodes")
    else:
        yield broken(
            check, status.source, why="new nodes are not found, and nodes that left still get requests",
            repair="etcdctl endpoint health; discovery.endpoints, user, tls in the file",
        )  # fmt: skip
    check = "cluster.node"
    if not any(node.answers for node in nodes):
        asked = sum(node.state != "not asked" for node in nodes)
        yield broken(
            check, f"no node of this cluster answers: {asked} of {len(nodes)} can be asked",
            why="the cluster does not run, or this machine cannot reach it",
            repair=f"start it: {up}; to see each node's state: pd-cache status -c FILE",
        )  # fmt: skip
        return
    for node in nodes:
        found = f"{node.state}: {node.why}"
        if node.state == "down":
            yield broken(
                check, found, node.name, why=f"a {node.role} node is missing",
                repair=f"on {node.host}: {up}; or pd-cache launch {node.role} -c FILE --node {node.name}",
            )  # fmt: skip
        elif node.state == "degraded":
            yield broken(
                check, found, node.name, why="it answers, but reports that something does not work",
                repair="look at its log, and at the other findings about it",
            )  # fmt: skip
        elif node.answers:
            yield ok(check, node.state, node.name)
    for trouble in status.troubles:
        yield broken(
            "cluster.pool", trouble.found, why="chunks are not found, or have no room", repair=trouble.repair
        )
    if not status.troubles:
        yield ok("cluster.pool", f"{len(status.leading)} master leads, and has the memory that nodes give")
    check = "cluster.version"
    if same := [node.name for node in nodes if node.record.version == ours]:
        yield ok(check, f"{ours} on {', '.join(same)}")
    for node in nodes:
        if node.record.version not in ("", ours):
            yield warning(
                check, f"{node.record.version}, and {ours} here", node.name,
                why="versions may name chunks differently, and a cache server refuses engines of another version",
                repair=f"on {node.host}: install the wheel of pd-cache {ours}, as README.md says",
            )  # fmt: skip
    check, repair = (
        "cluster.mooncake",
        "pip install the same version of Mooncake's wheel on all of them, the master first",
    )
    versions = sorted({node.record.mooncake for node in nodes} - {""})
    if (skew := status.skew) is not None:
        make = broken if skew.fails else warning
        yield make(check, skew.found, why=SKEW[skew.fails], repair=repair)
    else:
        yield (
            ok(check, ", ".join(versions))
            if versions
            else skipped(check, "no node reports its version of Mooncake")
        )
    check, known = "cluster.fingerprint", [node for node in nodes if node.record.fingerprint]
    if known and not any(node.difference for node in known):
        yield ok(check, f"{', '.join(node.name for node in known)}: one namespace, so they share hits")
    usual = {node.record.model for node in known if not node.difference}
    for node in known:
        if node.difference:  # nodes that serve another model are not meant to share hits
            make = broken if node.record.model in usual else warning
            yield make(
                check, node.difference, node.name, why="each node computes again what the other has stored",
                repair="give both nodes the same cache and engine in the file, and the same model folder",
            )  # fmt: skip


def advertised_findings(hosts: Collection[str], segments: Iterable[Segment]) -> Iterator[Finding]:
    """Finds segments that only their own host can reach, in a cluster of several `hosts`."""
    if len({host for host in hosts if not _only_here(host)}) < 2:
        return
    for segment in segments:
        unreachable = [
            address for address in (segment.segment_name, segment.te_endpoint) if _only_here(host_of(address))
        ]
        if unreachable:
            yield broken(
                "network.advertised", f"is given out as {unreachable[0]}, which other machines cannot reach", segment.segment_name,
                why="only its own machine can read the chunks in it",
                repair="set the node's host to the address at which the others reach it",
            )  # fmt: skip


def _only_here(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def metadata_finding(server: str) -> Finding:
    """Returns whether the server of `transfer.metadata` takes connections. Without it no client of the pool
    opens, and the client's error blames the master."""
    check, usual = "transfer.metadata", {"http": 80, "https": 443}
    port = port_of(server) or usual.get(server.partition(":")[0], 2379)
    try:
        socket.create_connection((host_of(server), port), _CONTROL_S).close()
    except (OSError, ValueError) as error:  # ValueError: not a valid name
        return broken(
            check, f"it accepts no connections: {error}", server, why="no node can join the pool, and no engine can open a client",
            repair="start it; the master serves it if its host is that of transfer.metadata; else let its port through the firewall",
        )  # fmt: skip
    return ok(check, "it takes connections", server)


# --- a put and a get of up to 64 MiB to each segment --------------------------------------------------------


PREFIX = "pdc1/doctor"
_OBJECT = 4 << 20
_OBJECTS = 16
_DEADLINE_S = 15.0
"""How many seconds a put or a get may take."""
_OPEN_S = 10.0
_CONTROL_S = 2.0
_MOST_HUNG = 3
"""After this many segments that hang, the others are not tried, because each holds up to 64 MiB until its
call returns."""
_SLOW = {"tcp": 0.1e9, "rdma": 1e9}
_SEGMENT = "transfer.segment"
_WHY_SEGMENT = "its chunks cannot be read, and new chunks in it are lost"


def probe_findings(
    config: ClusterConfig, segments: Sequence[Segment], master: str, master_metrics: str
) -> Iterator[Finding]:
    """Writes and reads objects in one segment after the other, so that each has the network for itself.

    `master` is the address for Mooncake's clients. The objects are removed even if the caller is interrupted.
    """
    hung = 0
    store: MooncakeStore | None = None
    watermark = min(
        (node.eviction_high_watermark for node in config.nodes if isinstance(node, MasterNode)), default=0.9
    )
    with contextlib.ExitStack() as opened:
        for segment in sorted(segments, key=lambda segment: segment.segment_name):
            if hung == _MOST_HUNG:
                yield skipped(_SEGMENT, f"not tried: {hung} segments did not answer", segment.segment_name)
                continue
            room = int(segment.size_bytes * watermark) - segment.allocator_used_bytes
            objects = min(_OBJECTS, room // _OBJECT)
            if objects < 1:
                yield _full(segment, "it has no room for a test")
                continue
            try:
                if store is None:
                    store = opened.enter_context(_new_store(config, master))
                    store.wait_open(_OPEN_S)
                    pool = store.staging(_OBJECT)
            except (TransferError, PoolUnavailableError) as error:
                yield broken(
                    "transfer.pool", f"a client of the pool cannot be opened: {error}", why="engines cannot open a client either",
                    repair="see the findings about the master and the libraries first",
                )  # fmt: skip
                return
            finding, hangs = _probe(store, pool, segment, objects, master_metrics)
            yield finding
            if hangs:  # its thread and memory are held until Mooncake gives up
                hung += 1
                opened.close()
                store = None


def _new_store(config: ClusterConfig, master: str) -> MooncakeStore:
    deadline = int(_DEADLINE_S * 1000)
    settings = msgspec.structs.replace(
        config.transfer,
        segment_size=0,
        staging_size=_OBJECT * _OBJECTS,
        prefault=True,
        timeouts=Timeouts(exist_ms=2000, get_ms=deadline, put_ms=deadline, close_ms=1000),
        breaker=BreakerSettings(failures=1_000_000),  # the failure of a segment does not concern the next
    )
    return MooncakeStore(settings, master=master, host=own_host(config), segment_size=0)


def _probe(
    store: MooncakeStore, pool: StagingPool, segment: Segment, objects: int, master_metrics: str
) -> tuple[Finding, bool]:
    """Returns the finding on a segment, and whether it hangs. `pool`: has `_OBJECTS` slots, all of them
    free."""
    run = f"{PREFIX}/{int(time.time()):x}-{uuid.uuid4().hex[:12]}"
    keys = [f"{run}/{index}" for index in range(objects)]
    slots: list[Slot] = []
    try:
        for _ in keys:
            slot = pool.lease(time.monotonic() + _CONTROL_S)
            assert slot is not None, "the pool holds as many slots as a probe takes"
            slots.append(slot)
        return _transfer(store, segment, keys, slots, master_metrics)
    finally:
        store.remove(keys, end_in(_CONTROL_S), force=True)
        for slot in slots:
            slot.release()


def _transfer(
    store: MooncakeStore, segment: Segment, keys: list[str], slots: list[Slot], master_metrics: str
) -> tuple[Finding, bool]:
    name, total = segment.segment_name, len(slots) * _OBJECT
    contents = os.urandom(_OBJECT)
    for index, slot in enumerate(slots):
        slot.view[:] = contents
        slot.view[:8] = index.to_bytes(8, "little")
    started = time.perf_counter()
    putting = store.start_put(
        keys, slots, [_OBJECT] * len(slots), end_in(_DEADLINE_S), placement=Placement(preferred_segment=name)
    )
    try:
        put = putting.results()
    finally:  # even after a Ctrl-C: an object that arrives after the removal would stay
        putting.results()
    put_s = time.perf_counter() - started
    if failed := {status for status in put if status is not Status.OK}:
        if failed == {Status.NO_SPACE}:
            return _full(segment, f"{put.count(Status.NO_SPACE)} of {len(put)} objects found no room"), False
        return _failed(segment, "put", failed)
    elsewhere = 0
    with contextlib.suppress(OSError, ValueError):  # the master does not say
        copies = copies_at(master_metrics, keys)
        elsewhere = sum(
            copy.transport_endpoint_ != segment.te_endpoint
            for key in keys
            for copy in copies.get(key, ())[:1]
        )
    if elsewhere:
        return _full(segment, f"{elsewhere} of {len(put)} objects landed in other segments"), False
    for slot in slots:
        slot.view[:] = bytes(_OBJECT)
    started = time.perf_counter()
    got = store.start_get(keys, slots, end_in(_DEADLINE_S)).results()
    get_s = time.perf_counter() - started
    if missed := [result.status for result in got if result.status is not Status.OK]:
        if set(missed) == {Status.MISSING}:
            return _full(segment, f"{len(missed)} of {len(got)} objects were evicted at once"), False
        return _failed(segment, "get", set(missed))
    if any(
        result.size != _OBJECT
        or slot.view[:8] != index.to_bytes(8, "little")
        or slot.view[8:] != contents[8:]
        for index, (result, slot) in enumerate(zip(got, slots, strict=True))
    ):
        damaged = broken(
            _SEGMENT, "returns other bytes than were written", name,
            why="every chunk from there fails its checksum, and is computed again",
            repair="memtest of that machine, the NIC's counters: ethtool -S DEV | grep -i err",
        )  # fmt: skip
        return damaged, False
    return _measured(segment, total, total / put_s, total / get_s), False


def _failed(segment: Segment, what: str, statuses: Collection[Status]) -> tuple[Finding, bool]:
    hung = Status.TIMEOUT in statuses or Status.OVERLOADED in statuses
    reasons = ", ".join(sorted(status.value for status in statuses))
    found = f"a {what} did not end within {_DEADLINE_S:g} s" if hung else f"a {what} failed: {reasons}"
    repair = (
        f"on {segment.host}: is its process running, not stopped (ps -o stat)? Else open its ports: those of Mooncake's clients are "
        "15000 to 17000, or MC_MIN_RPC_PORT to MC_MAX_RPC_PORT"
    )
    return broken(_SEGMENT, found, segment.segment_name, why=_WHY_SEGMENT, repair=repair), hung


def _measured(segment: Segment, total: int, put: float, get: float) -> Finding:
    found = f"{shown_bytes(total)}: put {put / 1e9:.2f} GB/s, get {get / 1e9:.2f} GB/s, every byte right"
    slow = _SLOW.get(segment.protocol, _SLOW["tcp"])
    if min(put, get) >= slow:
        return ok(_SEGMENT, found, segment.segment_name)
    return warning(
        _SEGMENT, found, segment.segment_name, why=f"below {slow / 1e9:g} GB/s it may be quicker to compute chunks again",
        repair=f"iperf3 to {segment.host}; its link's speed (ethtool DEV) and load",
    )  # fmt: skip


def _full(segment: Segment, found: str) -> Finding:
    used = f"{shown_bytes(segment.size_bytes - segment.free)} of {shown_bytes(segment.size_bytes)} were taken"
    return warning(
        _SEGMENT, f"not measured: {found}; {used}", segment.segment_name, why="a pool that is full evicts with every store",
        repair="a larger segment_size, one more store node, or a lower eviction_high_watermark of the master",
    )  # fmt: skip
