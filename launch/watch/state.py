"""The state of a cluster: its nodes, its masters, the pool's memory, and what does not work. `status`, `top`,
`doctor` and `/ui` print it. Pure.

`NodeStatus` is the state of a node at one moment, `ClusterStatus` the state of all nodes. `WatchedNodes`
makes both from the nodes' answers (`asker.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from launch.discovery import View
from launch.masters import LEADER, Segment
from launch.watch.figures import NodeHistory, NodeReading, Rates, hit_rate
from pd_cache.cluster import ENGINES, NodeRecord, Skew, differences, mooncake_skew
from pd_cache.cluster.machine import host_of, shown_bytes

NodeState = Literal["up", "degraded", "down", "asking", "not asked"]
"""`degraded`: it answers, but part of it does not work. `down`: it was asked and does not answer. `asking`:
its first answer has not come yet. `not asked`: it has no address for questions."""
_ROLES = ("proxy", *ENGINES, "cache-server", "store", "master")


def page_of(record: NodeRecord) -> str:
    """Returns the address at which a node answers `/health` and `/metrics`; empty if it takes no
    questions."""
    return record.address if record.address.startswith(("http://", "https://")) else record.metrics or ""


def shown_version(label: str) -> str:
    """Returns the version of an engine's weights as text for people."""
    return f"version {label}" if label else "weights of its files"


NO_READING = NodeReading(at=0.0)


class RoleShown(msgspec.Struct, frozen=True):
    """The work of a node of the role `both` for a proxy, since when, and why it changed last."""

    does: str = ""
    for_s: float = 0.0
    why: str = ""


class NodeStatus(msgspec.Struct, kw_only=True):
    """One node at one moment."""

    record: NodeRecord
    """The registered record, or the file's, completed by the node's own answers."""
    at: float = 0.0
    """When the node was asked, by `time.monotonic()`."""
    state: NodeState = "up"
    why: str = ""
    """Why it is not `up`; empty if it is."""
    reading: NodeReading = NO_READING
    """Its metrics; without figures if they were not read."""
    leads: str = ""
    """For a master: `leader`, `standby`, or another role that it reports; empty if it reports none."""
    roles: dict[str, RoleShown] = {}
    """For a proxy: what each node of the role `both` does, by address."""
    segments: tuple[Segment, ...] | None = None
    """The memory that the node gives to the pool, as the leading master reports it. For a master: all
    segments that it knows. None if unknown."""
    difference: str = ""
    """The difference between its namespace and that of most nodes; empty if there is none."""
    rates: Rates | None = None
    silent_s: float | None = None
    """Seconds since its last answer; None if it never answered."""

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def role(self) -> str:
        return self.record.role

    @property
    def answers(self) -> bool:
        """Whether it answers, even if it reports that a part of it does not work."""
        return self.state in ("up", "degraded")

    @property
    def well(self) -> bool:
        """Whether the node has no known problem."""
        return self.state in ("up", "not asked") and not self.difference

    @property
    def host(self) -> str:
        """The address of its machine; empty if that is unknown."""
        return host_of(page_of(self.record) or self.record.address)

    @property
    def memory(self) -> str:
        """`draining` or `drained` if the pool puts nothing into its memory any more (`pd-cache drain`);
        otherwise empty."""
        own = () if self.role == "master" else self.segments or ()
        return " ".join(sorted({segment.shown_status for segment in own} - {""}))

    @property
    def hit(self) -> float | None:
        """The hit rate; None without prompts."""
        return None if self.rates is None else self.rates.hit

    @property
    def in_flight(self) -> int | None:
        """Requests that wait or run; None if it does not report them."""
        known = [count for count in (self.reading.queued, self.reading.running) if count is not None]
        return int(sum(known)) if known else None

    def figures(self) -> dict[str, object]:
        """Returns its present figures for `top --json` and `/ui`: rates under the names of `Rates`, gauges
        under those of `NodeReading`."""
        reading, rates = self.reading, self.rates
        shown = dict.fromkeys(Rates.__struct_fields__) if rates is None else msgspec.to_builtins(rates)
        return {
            "name": self.name,
            "role": self.role,
            "state": self.state,
            "why": self.why,
            **shown,
            "queued": reading.queued,
            "running": reading.running,
            "staging": reading.staging,
            "staging_used": reading.staging_used,
        }


# --- the cluster --------------------------------------------------------------------------------------------


class Trouble(NamedTuple):
    """A problem that no single node shows."""

    found: str
    repair: str


class ClusterStatus(msgspec.Struct, frozen=True):
    """The cluster at one moment."""

    source: str
    """The source of the list of nodes, and whether it still answers."""
    fresh: bool
    """Whether discovery answers. If not, the list may lack nodes, and may have nodes that are gone."""
    nodes: list[NodeStatus]
    """The nodes, in the order in which a request passes them."""
    weights: list[str] = []
    """Advice about nodes whose weights are not those of their files, or that have been out for a minute."""
    segments: tuple[Segment, ...] | None = None
    """The pool's memory, as the leading master reports it; None if no master reports it."""
    elected: bool = False
    """Whether etcd elects one of several masters."""
    hit: float | None = None
    """The hit rate of prefill nodes, or of decode nodes if the prefill nodes had no prompts."""

    @property
    def view(self) -> View:
        """The nodes as discovery would show them, completed by their own answers."""
        return View(tuple(node.record for node in self.nodes))

    @property
    def masters(self) -> list[NodeStatus]:
        return [node for node in self.nodes if node.role == "master"]

    @property
    def leading(self) -> list[NodeStatus]:
        """The masters that report that they lead: exactly one, if all is well."""
        return [node for node in self.masters if node.leads == LEADER]

    @property
    def skew(self) -> Skew | None:
        """The difference between nodes' versions of Mooncake, if these fail together or were never tried
        together."""
        return mooncake_skew(node.record for node in self.nodes)

    @property
    def troubles(self) -> list[Trouble]:
        """What is wrong with the pool."""
        leading, elected = [node.name for node in self.leading], self.elected
        promised = sum(node.record.capacity.segment_bytes for node in self.nodes if node.state != "down")
        mounted = sum(segment.size_bytes for segment in self.segments or ())
        if not leading and any(node.state not in ("asking", "not asked") for node in self.masters):
            what = f"none of {len(self.masters)} masters leads" if elected else "the master does not lead"
            return [Trouble(f"{what}: the pool gives no hits, and takes no chunks", _NO_LEADER[elected])]
        if len(leading) > 1:
            what = f"{len(leading)} masters lead ({', '.join(leading)}): each knows only some of the keys"
            return [Trouble(what, _TWO_LEADERS[elected])]
        if leading and self.segments is not None and mounted < promised:
            what = f"{leading[0]} has {shown_bytes(mounted)} of the {shown_bytes(promised)} that nodes give"
            return [Trouble(what, _NO_MEMORY)]
        return []

    @property
    def problems(self) -> list[str]:
        """Problems that no single node shows, and what to do about them."""
        skew = [f"{self.skew.found}: {SKEW[True]}"] if self.skew is not None and self.skew.fails else []
        return [f"{trouble.found}; {trouble.repair}" for trouble in self.troubles] + skew

    @property
    def well(self) -> bool:
        """Whether discovery and all nodes answer, one master leads, and no namespace differs."""
        return self.fresh and all(node.well for node in self.nodes) and not self.problems


SKEW = {
    False: "these versions have not been tried together, and Mooncake promises nothing; install one version on all nodes",
    True: "every put between these nodes fails, and no log says why; install one version on all nodes",
}
"""What different versions of Mooncake mean, by whether they are known to fail together."""
_NO_LEADER = {
    False: "start it, or see its row",
    True: "they elect one within 15 s after etcd answers (`etcdctl endpoint health`), and within a minute where it lost its data",
}
_TWO_LEADERS = {
    False: "end all but one, or have them elected: `master: {ha: true}`",
    True: "restart those whose address is not in etcd (`etcdctl get --prefix mooncake-store/`)",
}
_NO_PORTS = "no node is known, because the file gives no port"
_NO_MEMORY = "start the nodes that do not run, and restart those that follow an earlier master"


# --- over time ----------------------------------------------------------------------------------------------


class _Watched(msgspec.Struct):
    """One node and its history."""

    record: NodeRecord
    history: NodeHistory
    last: NodeStatus | None = None
    """Its last answer, or its failure to answer."""
    answered: float | None = None
    """When the node last answered."""


class WatchedNodes:
    """The nodes, and their answers so far. The time comes from the caller."""

    def __init__(
        self,
        discovery: str = "static",
        *,
        elected: bool = False,
        stale_s: float = 10.0,
        since_start: bool = False,
    ) -> None:
        """`discovery` is its kind; `elected` says whether masters are elected. A node that has not answered
        for `stale_s` seconds is down, even if it was not asked since. With `since_start`, shares and
        quantiles count from the nodes' start, otherwise over the last minute."""
        self._discovery = discovery
        self._elected = elected
        self._stale_s = stale_s
        self._since_start = since_start
        self._view, self._synced = View(()), True
        self._nodes: dict[str, _Watched] = {}
        self._compared: list[NodeRecord] = []
        self._differences: dict[str, str] = {}

    @property
    def asked(self) -> list[NodeRecord]:
        return [record for record in self._view.nodes if page_of(record)]

    def update(self, view: View, synced: bool = True) -> None:
        """Uses the nodes of this view from now on. A node that was restarted keeps its history. `synced`
        is what `Directory.wait_synced` returned."""
        self._view, self._synced, before = view, synced, self._nodes
        self._nodes = {}
        for record in view.nodes:
            node = before.get(record.name) or _Watched(record, NodeHistory(self._since_start))
            if node.record != record:
                node.record, node.last = record, None
            self._nodes[record.name] = node

    def take(self, answers: Iterable[NodeStatus]) -> None:
        """Takes in nodes' answers and failures. Ignores nodes that are gone."""
        for answer in answers:
            if (node := self._nodes.get(answer.name)) is None:
                continue
            node.last = answer
            if answer.answers:
                node.answered = answer.at
            if answer.reading is not NO_READING:
                node.history.add(answer.reading)

    def status(self, now: float) -> ClusterStatus:
        """Returns the cluster's state at `now`."""
        nodes = [self._node(node, now) for node in self._nodes.values()]
        nodes.sort(
            key=lambda node: (_ROLES.index(node.role) if node.role in _ROLES else len(_ROLES), node.name)
        )
        if (records := [node.record for node in nodes]) != self._compared:
            self._compared, self._differences = records, differences(records)
        leading = (node.segments for node in nodes if node.leads == LEADER)
        segments = next((known for known in leading if known is not None), None)
        for node in nodes:
            node.difference = self._differences.get(node.name, "")
            if node.role != "master" and segments is not None:
                last = self._nodes[node.name].history.last or NO_READING
                names = (node.record.address,) if node.role == "store" else last.segments
                node.segments = tuple(segment for segment in segments if segment.segment_name in names)
        source, stale = self._discovery, self._view.stale_since
        if not self._synced:
            known = "these are the nodes of the file"
            source += f", which does not answer: {known if nodes else _NO_PORTS}"
        elif stale is not None:
            source += f", which has not answered for {now - stale:.0f} s: these are the nodes that were there before"
        return ClusterStatus(
            source,
            self._synced and stale is None,
            nodes,
            segments=segments,
            elected=self._elected,
            hit=self._hit(now),
        )

    def _hit(self, now: float) -> float | None:
        for role in ("prefill", "both", "decode"):
            histories = (node.history for node in self._nodes.values() if node.record.role == role)
            hit = hit_rate(step for history in histories for step in history.recent(now))
            if hit is not None:
                return hit
        return None

    def _node(self, node: _Watched, now: float) -> NodeStatus:
        record = node.record
        if not page_of(record):
            more = "; the master shows its memory" if record.role == "store" else ""
            return NodeStatus(record=record, state="not asked", why=f"it has no metrics_port{more}")
        if node.last is None:
            return NodeStatus(record=record, state="asking")
        silent_s = None if node.answered is None else now - node.answered
        found = msgspec.structs.replace(node.last, silent_s=silent_s)
        if not found.answers:
            return found
        if now - found.at > self._stale_s:
            return NodeStatus(record=record, state="down", why="no answer yet", silent_s=silent_s)
        if found.reading is not NO_READING:
            found.rates = node.history.rates(now)
        if record.name in self._view.doubted:
            whys = found.why, "not registered again since discovery was away"
            found.state, found.why = "degraded", "; ".join(filter(None, whys))
        return found
