"""`pd-cache drain`: moves the objects of a node to the memory of other nodes, so that nothing is lost when
the node stops.

A drain job of Mooncake's master moves them (docs/mooncake.md, "Drain jobs"). The job skips leased objects,
and therefore the objects that are looked up again and again. When only these are left, we ask for their
moves, key by key. The master does not list its jobs. So if another command already drains the node, this
command follows the segment's status.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from launch.masters import Segment, begin_drain, cancel_drain, drain_job, keys_in, segments_at
from launch.operate.pool import open_store
from launch.run.supervise import StopFlag
from launch.watch.asker import cluster_status, leading_metrics, no_leader
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.machine import shown_bytes
from pd_cache.errors import ConfigError, PdCacheError
from transfer.deadlines import end_in
from transfer.errors import Status
from transfer.store import MooncakeStore

log = logging.getLogger(__name__)

_PER_S = 16
"""How many moves a node begins in a second, whatever the objects' size."""
_AT_A_TIME = 2 * _PER_S
"""How many moves wait or are under way: enough for a node to find some whenever it looks."""
_LEASED_AT_A_TIME = 64
"""How many leased objects move at a time: few enough to move before their leases end (by default, after ten
seconds)."""
_POLL_S = 0.5
_CALL_S = 10.0
_CANCEL_S = 20.0
_LISTING_S = 300.0
"""Enough time for a list of 15 million keys; `_CANCEL_S` is enough for a million."""


class Drain(msgspec.Struct, kw_only=True):
    """The progress of a drain, or its outcome."""

    node: str
    segment: str
    outcome: Literal["drained", "failed", "canceled", "goes on"] = "goes on"
    """`failed`: the master has given up the remaining objects. `canceled`: by a signal or the deadline. After
    both, the node takes objects again. `goes on`: the master still moves objects; another `drain` can follow
    it."""
    moved: int = 0
    """Objects that were moved."""
    failed: int = 0
    """Attempts to move an object that failed; the master makes up to three for each."""
    in_use: int = 0
    """Objects that the job leaves alone for now, because they are leased or still being written."""
    left: int = 0
    """Objects that are still in the node's memory after the end."""
    bytes: int = 0
    """The bytes in the node's memory when this command began; 0 if the node was already being drained."""
    moved_bytes: int = 0
    """The bytes that the job has moved, without objects in use."""
    seconds: float = 0.0


def drain(
    config: ClusterConfig, name: str, *, timeout_s: float, report: Callable[[Drain], None], stop: StopFlag
) -> Drain:
    """Moves the objects of a node to the other nodes, and returns the outcome. If another command already
    drains the node, helps and follows that drain. After `timeout_s` seconds, or when `stop` is set, cancels
    the drain that it has begun; this takes up to another minute.

    Calls `report` twice a second. Raises ConfigError if the node does not exist or gives no memory,
    PdCacheError if it cannot be drained, or if the master no longer answers.
    """
    status = cluster_status(config)
    row = next((row for row in status.nodes if row.name == name), None)
    giving = [row.name for row in status.nodes if row.record.capacity.segment_bytes]
    if row is None or name not in giving:
        what = (
            "no node of that name"
            if row is None
            else f"that {row.record.role} node gives no memory to the pool"
        )
        there = ", ".join(giving) or "there is none"
        raise ConfigError(f"expected a node that gives memory to the pool ({there}), got {name}: {what}")
    if not status.leading or status.segments is None:
        raise no_leader(status)
    own = next(iter(row.segments or ()), None)
    if own is None:
        unknown = row.state == "not asked" and row.record.address.endswith(":0")
        hint = " If it does, give it a `port` or a `metrics_port`" if unknown else ""
        raise PdCacheError(f"the master knows no segment of {name}: does {name} run?{hint}")
    state = Drain(node=name, segment=own.segment_name, bytes=own.allocator_used_bytes)
    if own.status == "DRAINED":
        return msgspec.structs.replace(state, outcome="drained")
    metrics = leading_metrics(status)
    if own.status == "OK":
        _check_room(name, own, status.segments)
    with open_store(config, status) as store:
        try:
            job = begin_drain(metrics, [own.segment_name], _AT_A_TIME)
            return _Follower(store, metrics, own, job, state).follow(timeout_s, report, stop)
        except (OSError, ValueError) as error:
            raise PdCacheError(f"the master did not answer: {error}; {_again(name)}") from error


def _again(name: str) -> str:
    return f"moved objects stay moved: `pd-cache drain {name}` goes on from there"


def _check_room(name: str, own: Segment, segments: Sequence[Segment]) -> None:
    """Raises PdCacheError if the other segments have no room for the objects of this segment."""
    others = [
        segment for segment in segments if segment.status == "OK" and segment.segment_name != own.segment_name
    ]
    if not others:
        raise PdCacheError(
            f"{name} has the only memory that takes objects: there is nowhere to move what it holds"
        )
    # the allocator reserves up to an eighth more than an object's size (docs/mooncake.md)
    room = sum(max(0, segment.free - segment.size_bytes // 8) for segment in others)
    if own.allocator_used_bytes > room:
        raise PdCacheError(
            f"{name} holds {shown_bytes(own.allocator_used_bytes)}, and the others have room for {shown_bytes(room)}: add a node first, or "
            f"stop {name} as it is; its chunks are then computed again"
        )


class _Follower:
    """Follows a drain to its end."""

    def __init__(
        self, store: MooncakeStore, metrics: str, own: Segment, job: str | None, state: Drain
    ) -> None:
        """`job`: the id of the master's job; None if another command has begun it."""
        self._store = store
        self._metrics = metrics
        self._own = own
        self._job = job
        self._state = state
        self._targets: list[str] = []
        """The segments that take objects; the segment with the most room is first."""
        self._moving = False
        """Whether the job goes on without help: it has moves under way, or leaves no object alone."""
        self._asked_for: set[str] = set()
        """Keys whose moves we have asked for."""
        self._listed: list[str] = []
        """The keys of the last listing that were not moved yet. They are kept because listing a million keys
        takes longer than moving some."""
        self._ask_again = 0.0
        self._begin = time.monotonic()

    def follow(self, timeout_s: float, report: Callable[[Drain], None], stop: StopFlag) -> Drain:
        state, canceled = self._state, False
        while (status := self._look()) == "DRAINING":
            report(state)
            if not self._targets or state.seconds > timeout_s or stop.is_set():
                canceled, status = True, self._cancel(status)
                break
            if not self._moving and time.monotonic() > self._ask_again:
                self._move_leased()
            stop.wait(_POLL_S)
        if status == "DRAINED":
            state.outcome = "drained"
        elif status != "DRAINING":
            state.outcome = "canceled" if canceled else "failed"
        left, limit_s = set[str](), _CANCEL_S if canceled else _LISTING_S
        if state.outcome != "drained":
            left.update(keys_in(self._metrics, self._own.te_endpoint, limit_s))
        state.left = len(left)
        state.moved += len(self._asked_for - left)
        if not self._targets and state.outcome != "drained":
            raise PdCacheError(
                f"no other node takes objects any more: {state.left} objects are still on {state.node}; {_again(state.node)}"
            )
        return state

    def _look(self) -> str:
        """Returns the segment's status, and notes the job's progress. Raises PdCacheError if the master does
        not answer in time."""
        state, deadline = self._state, time.monotonic() + _CALL_S
        while True:
            try:
                # asked before the job, because the job releases its segment when it ends
                segments = segments_at(self._metrics)
                job = None if self._job is None else drain_job(self._metrics, self._job)
                break
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    why = f"the master has not answered for {_CALL_S:g} s ({error})"
                    raise PdCacheError(f"{why}; {_again(state.node)}") from error
                time.sleep(_POLL_S)
        if job is None and self._job is not None:
            raise PdCacheError(
                f"the master no longer knows the job, because it was restarted; {_again(state.node)}"
            )
        there = (segment for segment in segments if segment.segment_name == state.segment)
        own = next((segment for segment in there if segment.status in ("OK", "DRAINING", "DRAINED")), None)
        if own is None or (own.status == "OK" and job is not None and not job.ended):
            # the master continues to wait for the node's moves
            raise PdCacheError(
                f"{state.node} has stopped or was restarted: objects that had not moved yet are lost"
            )
        if job is not None:
            state.moved, state.failed, state.in_use = job.succeeded_units, job.failed_units, job.blocked_units
            state.moved_bytes = job.migrated_bytes
            self._moving = job.active_units > 0 or not job.blocked_units
        others = (segment for segment in segments if segment.status == "OK" and segment is not own)
        self._targets = [
            segment.segment_name for segment in sorted(others, key=lambda segment: segment.free, reverse=True)
        ]
        state.seconds = time.monotonic() - self._begin
        return own.status

    def _move_leased(self) -> None:
        """Moves some objects that the job leaves alone. A reader that has just looked an object up still
        finds its bytes at the old place, because nothing new is put there."""
        store = self._store
        listed = self._listed or keys_in(self._metrics, self._own.te_endpoint, _LISTING_S)
        store.wait_open(_CALL_S)
        keys, self._listed = listed[:_LEASED_AT_A_TIME], listed[_LEASED_AT_A_TIME:]
        store.batched_contains(keys, end_in(_CALL_S))  # a lease keeps the job from moving them
        for key, target in zip(keys, itertools.cycle(self._targets), strict=False):
            if store.move(key, self._own.segment_name, target, end_in(_CALL_S)) is Status.OK:
                self._asked_for.add(key)
        self._ask_again = time.monotonic() + 2.0 + len(keys) / _PER_S

    def _cancel(self, status: str) -> str:
        """Cancels the job, and returns the segment's status, which was `status`. A job of another command
        goes on."""
        if self._job is None:
            return status
        deadline = time.monotonic() + _CANCEL_S
        keys = keys_in(self._metrics, self._own.te_endpoint, _CANCEL_S)
        self._store.wait_open(_CALL_S)
        while status == "DRAINING" and time.monotonic() < deadline:
            # the master cancels only while no move is under way, and begins no move of a leased object
            self._store.batched_contains(keys, end_in(_CALL_S))
            cancel_drain(self._metrics, self._job)
            time.sleep(_POLL_S)
            status = self._look()
        return status


def text_of(found: Drain, file: str) -> str:
    """Returns the outcome of a drain and the next step, as text for people."""
    node, again = found.node, f"`pd-cache drain {found.node} -c {file}`"
    counted = f"{found.moved} objects moved in {found.seconds:.0f} s, {found.failed} attempts failed, {found.left} objects left"
    return {
        "drained": f"{node} is drained ({counted if found.seconds else 'it was before'}). Stop it now: `systemctl stop`, or SIGTERM to its `pd-cache "
        "launch` or `up`. When it is started again, it takes objects again",
        "failed": f"{node} is not drained ({counted}): the master gave up the objects that are left, and {node} takes objects again. Try again with {again}",
        "canceled": f"{node} is not drained ({counted}): canceled, and {node} takes objects again. Go on with {again}",
        "goes on": f"{node} is not drained yet ({counted}): the master goes on. Follow it with {again}",
    }[found.outcome]
