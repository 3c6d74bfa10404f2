"""A real put and get of 64 MiB to each segment of the pool, with the bytes compared and the bandwidth measured.

The objects have keys of their own, `pdc1/doctor/…`, which no namespace uses, and are removed whatever happens. They are not pinned, so
what a killed doctor leaves behind goes with the first eviction. A segment with little room gets less: no cached chunk is evicted for a
test.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from launch.doctor.finding import Finding, broken, ok, skipped, warning
from launch.doctor.network import MOONCAKE_PORTS
from launch.masters import Segment, places_at
from pd_cache.cluster import ClusterConfig, MasterNode
from pd_cache.cluster.memory import shown_bytes
from transfer import ByteSize, MooncakeStore, PoolUnavailableError, Slot, StagingPool, Status
from transfer.errors import TransferError
from transfer.settings import BreakerSettings, Placement, Timeouts

PREFIX = "pdc1/doctor"
_OBJECT = 4 << 20
_OBJECTS = 16
_DEADLINE_S = 15.0
"""Seconds of a put and of a get."""
_OPEN_S = 10.0
_CONTROL_S = 2.0
_MOST_HUNG = 3
"""How many segments may hang; each holds 64 MiB until its call returns. After so many, the others are not tried."""
_SLOW = {"tcp": 0.1e9, "rdma": 1e9}
_CHECK = "transfer.segment"
_WHY = "chunks that lie there cannot be used, and those that land there are lost"


class _Probed(NamedTuple):
    finding: Finding
    hung: bool


def probe_findings(
    config: ClusterConfig, segments: Sequence[Segment], master_metrics: str, host: str
) -> Iterator[Finding]:
    """Probe one segment after the other, so that each has the network for itself.

    `host`: the address at which this machine is reached. Objects are removed also if the caller is interrupted.
    """
    hung = 0
    store: MooncakeStore | None = None
    watermark = min(
        (node.eviction_high_watermark for node in config.nodes if isinstance(node, MasterNode)), default=0.9
    )
    try:
        for segment in sorted(segments, key=lambda segment: segment.segment_name):
            if hung == _MOST_HUNG:
                yield skipped(_CHECK, f"not tried: {hung} segments did not answer", segment.segment_name)
                continue
            room = int(segment.size_bytes * watermark) - segment.allocator_used_bytes
            objects = min(_OBJECTS, room // _OBJECT)
            if objects < 1:
                yield _full(segment, "it has no room for a test")
                continue
            try:
                if store is None:
                    store, pool = _open(config, host)
            except (TransferError, PoolUnavailableError) as error:
                yield broken(
                    "transfer.pool", f"a client of the pool cannot be opened: {error}", why="no engine could either",
                    repair="the findings about the master and the libraries, first",
                )  # fmt: skip
                return
            outcome = _Probe(store, pool, segment, objects, master_metrics).run()
            yield outcome.finding
            if outcome.hung:  # its thread and memory are held until Mooncake gives up
                hung += 1
                store.close()
                store = None
    finally:
        if store is not None:
            store.close()


def _open(config: ClusterConfig, host: str) -> tuple[MooncakeStore, StagingPool]:
    """Returns a full client, even if engines share one: a segment out of its reach is out of reach for other machines' clients, too."""
    deadline = int(_DEADLINE_S * 1000)
    settings = msgspec.structs.replace(
        config.transfer,
        client="embedded",
        client_address="",
        segment_size=ByteSize(0),
        staging_size=ByteSize(_OBJECT * _OBJECTS),
        prefault=True,
        timeouts=Timeouts(exist_ms=2000, get_ms=deadline, put_ms=deadline, close_ms=1000),
        breaker=BreakerSettings(failures=1_000_000),  # one segment's failure says nothing about the next
    )
    store = MooncakeStore(settings, master=config.master_address, host=host, segment_size=0)
    try:
        store.wait_open(_OPEN_S)
        return store, store.staging(_OBJECT)
    except BaseException:  # even for a Ctrl-C: no caller has the store yet to close it
        store.close()
        raise


class _Probe:
    def __init__(
        self, store: MooncakeStore, pool: StagingPool, segment: Segment, objects: int, master_metrics: str
    ) -> None:
        """`pool`: has `_OBJECTS` slots, all of them free."""
        self._store = store
        self._pool = pool
        self._segment = segment
        self._metrics = master_metrics
        run = f"{PREFIX}/{int(time.time()):x}-{uuid.uuid4().hex[:12]}"
        self._keys = [f"{run}/{index}" for index in range(objects)]

    def run(self) -> _Probed:
        slots: list[Slot] = []
        try:
            for _ in self._keys:
                slot = self._pool.lease(time.monotonic() + _CONTROL_S)
                assert slot is not None, "the pool holds as many slots as a probe takes"
                slots.append(slot)
            return self._transfer(slots)
        finally:
            self._store.remove(self._keys, timeout=_CONTROL_S, force=True)
            for slot in slots:
                slot.release()

    def _transfer(self, slots: list[Slot]) -> _Probed:
        name, total = self._segment.segment_name, len(slots) * _OBJECT
        contents = os.urandom(_OBJECT)
        for index, slot in enumerate(slots):
            slot.view[:] = contents
            slot.view[:8] = index.to_bytes(8, "little")
        started = time.perf_counter()
        put = self._store.start_put(
            self._keys, slots, [_OBJECT] * len(slots), timeout=_DEADLINE_S, placement=Placement(preferred_segment=name)
        ).results()
        put_s = time.perf_counter() - started
        if failed := [status for status in put if status is not Status.OK]:
            if all(status is Status.NO_SPACE for status in failed):
                return _Probed(_full(self._segment, f"{len(failed)} of {len(put)} objects found no room"), False)
            return self._failed("put", failed)
        elsewhere = self._elsewhere()
        if elsewhere:
            return _Probed(_full(self._segment, f"{elsewhere} of {len(put)} objects were put elsewhere"), False)
        for slot in slots:
            slot.view[:] = bytes(_OBJECT)
        started = time.perf_counter()
        got = self._store.start_get(self._keys, slots, timeout=_DEADLINE_S).results()
        get_s = time.perf_counter() - started
        if missed := [result.status for result in got if result.status is not Status.OK]:
            if all(status is Status.MISSING for status in missed):
                return _Probed(_full(self._segment, f"{len(missed)} of {len(got)} objects were evicted at once"), False)
            return self._failed("get", missed)
        if any(
            result.size != _OBJECT or slot.view[:8] != index.to_bytes(8, "little") or slot.view[8:] != contents[8:]
            for index, (result, slot) in enumerate(zip(got, slots, strict=True))
        ):
            return _Probed(
                broken(
                    _CHECK, "gives back other bytes than were put there", name,
                    why="every chunk from there fails its checksum, and is computed again",
                    repair="memtest of that machine, the NIC's counters: ethtool -S DEV | grep -i err",
                ),
                False,
            )  # fmt: skip
        return _Probed(_judged(self._segment, total, total / put_s, total / get_s), False)

    def _elsewhere(self) -> int:
        """Returns how many objects landed in another segment; 0 if the master does not say."""
        try:
            found = places_at(self._metrics, self._keys)
        except (OSError, ValueError):
            return 0
        return sum(endpoint != self._segment.te_endpoint for endpoint in found)

    def _failed(self, what: str, statuses: Sequence[Status]) -> _Probed:
        hung = any(status in (Status.TIMEOUT, Status.OVERLOADED) for status in statuses)
        reasons = ", ".join(sorted({status.value for status in statuses}))
        name, host = self._segment.segment_name, self._segment.host
        found = f"a {what} did not end within {_DEADLINE_S:g} s" if hung else f"a {what} failed: {reasons}"
        repair = f"on {host}: is its process running, not stopped (ps -o stat)? Else open its ports: {MOONCAKE_PORTS}"
        return _Probed(broken(_CHECK, found, name, why=_WHY, repair=repair), hung)


def _judged(segment: Segment, total: int, put: float, get: float) -> Finding:
    found = f"{shown_bytes(total)}: put {put / 1e9:.2f} GB/s, get {get / 1e9:.2f} GB/s, every byte right"
    slow = _SLOW.get(segment.protocol, _SLOW["tcp"])
    if min(put, get) >= slow:
        return ok(_CHECK, found, segment.segment_name)
    return warning(
        _CHECK, found, segment.segment_name, why=f"below {slow / 1e9:g} GB/s it may be quicker to compute chunks again",
        repair=f"iperf3 to {segment.host}; its link's speed (ethtool DEV) and load",
    )  # fmt: skip


def _full(segment: Segment, found: str) -> Finding:
    used = f"{shown_bytes(segment.size_bytes - segment.free)} of {shown_bytes(segment.size_bytes)} were taken"
    return warning(
        _CHECK, f"not measured: {found}; {used}", segment.segment_name, why="a pool that is full evicts with every store",
        repair="a larger segment_size, one more store node, or a lower eviction_high_watermark of the master",
    )  # fmt: skip
