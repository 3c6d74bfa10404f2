"""What is known of each node, and of the cluster as a whole."""

from __future__ import annotations

import msgspec

from launch.masters import LEADER, Segment
from pd_cache.cluster import NodeRecord
from pd_cache.cluster.addresses import host_of
from pd_cache.cluster.memory import shown_bytes

NOT_ASKED = "not asked"
NO_ANSWER = "no answer"


class NodeStatus(msgspec.Struct, kw_only=True):
    """One row."""

    record: NodeRecord
    """As registered, or as the file says, completed by the node's own answers."""
    state: str = "up"
    """`up`, `degraded` (it answers, but not all of it works), `not asked`, or why nothing is known."""
    difference: str = ""
    """How its namespace differs from that of most nodes; empty if it does not."""
    up_since: float | None = None
    """Seconds since 1970."""
    hit_rate: float | None = None
    """Tokens found, and tokens asked for, since the start."""
    bytes_by_tier: dict[str, float] = {}
    in_flight: int | None = None
    errors: dict[str, float] = {}
    """Errors by operation and reason, since the start."""
    leads: str = ""
    """For a master: `leader`, `standby`, or another role that it reports; empty if it reports none."""
    mounted: int | None = None
    """For the leading master: bytes of memory that nodes have given to the pool, as far as it knows."""

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def asked(self) -> bool:
        """Whether there is a way to ask it."""
        return not self.state.startswith(NOT_ASKED)

    @property
    def silent(self) -> bool:
        """Whether it was asked and did not answer."""
        return self.state.startswith(NO_ANSWER)

    @property
    def up(self) -> bool:
        """Whether it answered, and was well."""
        return self.state.startswith("up")

    @property
    def url(self) -> str:
        """The address at which it speaks HTTP; empty if it does not."""
        return self.record.address if self.record.address.startswith("http") else self.record.metrics or ""

    @property
    def host(self) -> str:
        """The address of its machine; empty if that is unknown."""
        return host_of(self.url or self.record.address)

    @property
    def well(self) -> bool:
        """Whether it has no known problem."""
        return (self.state == "up" or self.state.startswith(NOT_ASKED)) and not self.difference


class ClusterStatus(msgspec.Struct, frozen=True):
    """The cluster at one moment."""

    source: str
    """The source of the list of nodes, and whether it still answers."""
    fresh: bool
    """Whether discovery answers. If not, the list may lack nodes, and may have nodes that are gone."""
    nodes: list[NodeStatus]
    unreadable: dict[str, str] = {}
    """Why a record in discovery cannot be read, by the name under which it stands."""
    segments: list[Segment] | None = None
    """The pool's memory, as the leading master knows it; None if none says so."""

    @property
    def masters(self) -> list[NodeStatus]:
        return [node for node in self.nodes if node.record.role == "master"]

    @property
    def leading(self) -> list[NodeStatus]:
        """The masters that say that they lead: exactly one, if all is well."""
        return [node for node in self.masters if node.leads == LEADER]

    @property
    def problems(self) -> list[str]:
        """Problems that no single row shows, and what to do about them."""
        leading = [node.name for node in self.leading]
        if not any(node.asked for node in self.masters):
            return []
        if not leading:
            return [
                f"none of {len(self.masters)} masters leads: there are no hits, and nothing is stored; {_NO_LEADER}"
            ]
        if len(leading) > 1:
            names = ", ".join(leading)
            return [f"{len(leading)} masters lead ({names}): each knows only some of the keys; {_TWO_LEADERS}"]
        promised = sum(node.record.capacity.segment_bytes for node in self.nodes)
        mounted = self.leading[0].mounted
        if mounted is not None and mounted < promised:
            return [
                f"{leading[0]} has {shown_bytes(mounted)} of the {shown_bytes(promised)} that nodes give; {_NO_MEMORY}"
            ]
        return []

    @property
    def well(self) -> bool:
        """Whether discovery and all nodes answer, one master leads, no namespace differs, and every record can be read."""
        return self.fresh and not self.unreadable and all(node.well for node in self.nodes) and not self.problems


_NO_LEADER = (
    "a master that runs alone needs a start (its row says more); elected ones lead again 15 s after etcd "
    "answers (`etcdctl endpoint health`), and within a minute where it lost its data"
)
_NO_MEMORY = "nodes that follow another master, as after a loss of etcd's data, find this one when they are restarted"
_TWO_LEADERS = "restart those whose address is not in etcd (`etcdctl get --prefix mooncake-store/`)"
