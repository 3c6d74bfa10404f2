"""`pd-cache status`: the nodes that discovery finds and what each is doing, asked of each, in one table.

Nodes are asked for `/health`, and then as `pd-cache top` asks them. A node that does not answer gets a row that says so. Beside the rows
there is what no node knows alone: whether discovery answers, which master leads, and which nodes will never share a hit with the others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launch.discovery import View, open_directory
from launch.figures import NodeReading, shown_age
from launch.http import NOBODY, Access, BadStatus, proxy_access
from launch.masters import LEADER, MasterHealth, Segment
from launch.versions import known_versions
from launch.watched import ask_node, get_text, page_of, why_not_asked
from pd_cache.cluster import ClusterConfig, NodeRecord, Skew, differences, mooncake_skew, read_about
from pd_cache.cluster.machine import host_of, shown_bytes
from pd_cache.decoding import decode_json, one_line

_SYNC_S = 5.0
_AT_A_TIME = 16
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
    reading: NodeReading = NodeReading(at=0.0)
    """What its metrics say; nothing if they were not read."""
    leads: str = ""
    """For a master: `leader`, `standby`, or another role that it reports; empty if it reports none."""
    segments: tuple[str, ...] = ()
    """The names of the segments that it gives to the pool, as far as they are known."""
    pool: list[Segment] | None = None
    """For a master: the segments that it knows, if it has said so."""
    memory: str = ""
    """`draining` or `drained` if the pool puts nothing into its segments any more (`pd-cache drain`); otherwise empty."""

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
    def answers(self) -> bool:
        """Whether its process runs, even if it says that not all of it works."""
        return self.asked and not self.silent

    @property
    def host(self) -> str:
        """The address of its machine; empty if that is unknown."""
        return host_of(page_of(self.record) or self.record.address)

    @property
    def hit_rate(self) -> float | None:
        """Tokens that were loaded of tokens that were asked for, since the start; None without prompts."""
        tokens = {source: count for (kind, source), count in self.reading.counts.items() if kind == "tokens"}
        asked = sum(tokens.values())
        return tokens.get("loaded", 0.0) / asked if asked else None

    @property
    def in_flight(self) -> int | None:
        """Requests that wait or run; None if it does not say."""
        told = [one for one in (self.reading.queued, self.reading.running) if one is not None]
        return int(sum(told)) if told else None

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
    weights: list[str] = []
    """Which version of each model's weights is current, if they have changed, and which processes have another one."""
    segments: list[Segment] | None = None
    """The pool's memory, as the leading master knows it; None if none says so."""
    elected: bool = False
    """Whether etcd elects one of several masters."""

    @property
    def view(self) -> View:
        """The nodes as discovery would show them, completed by their own answers."""
        return View(tuple(row.record for row in self.nodes))

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
        problems, leading, skew = list[str](), [node.name for node in self.leading], self.skew
        promised = sum(node.record.capacity.segment_bytes for node in self.nodes if not node.silent)
        mounted = sum(segment.size_bytes for segment in self.segments or ())
        if not leading and any(node.asked for node in self.masters):
            what = f"none of {len(self.masters)} masters leads" if self.elected else "the master does not lead"
            problems.append(f"{what}: there are no hits, and nothing is stored; {_NO_LEADER[self.elected]}")
        elif len(leading) > 1:
            what = f"{len(leading)} masters lead ({', '.join(leading)}): each knows only some of the keys"
            problems.append(f"{what}; {_TWO_LEADERS[self.elected]}")
        elif leading and self.segments is not None and mounted < promised:
            what = f"{leading[0]} has {shown_bytes(mounted)} of the {shown_bytes(promised)} that nodes give"
            problems.append(f"{what}; {_NO_MEMORY}")
        if skew is not None and skew.fails:
            problems.append(f"{skew.found}: {SKEW_FAILS}")
        return problems

    @property
    def skew(self) -> Skew | None:
        """How versions of Mooncake differ that do not work together, or were not tried together."""
        return mooncake_skew(row.record for row in self.nodes)

    @property
    def well(self) -> bool:
        """Whether discovery and all nodes answer, one master leads, and no namespace differs."""
        return self.fresh and all(node.well for node in self.nodes) and not self.problems


SKEW_FAILS = "every put between these fails, without a word in any log; install one version on all nodes"
SKEW_UNTRIED = "these have not been tried together, and Mooncake promises nothing; install one version on all nodes"
_NO_LEADER = {
    False: "start it, or see its row",
    True: "they elect one within 15 s after etcd answers (`etcdctl endpoint health`), and within a minute where it lost its data",
}
_TWO_LEADERS = {
    False: "end all but one, or have them elected: `master: {ha: true}`",
    True: "restart those whose address is not in etcd (`etcdctl get --prefix mooncake-store/`)",
}
_NO_MEMORY = (
    "start those that do not run; those that run and follow an earlier master find this one when they are restarted"
)


# --- asking ------------------------------------------------------------------------------------------------------------


def cluster_status(config: ClusterConfig) -> ClusterStatus:
    """Asks discovery, then every node, all at the same time; each has a few seconds to answer."""
    access = proxy_access(config)
    with open_directory(config) as directory:
        synced, view = directory.wait_synced(_SYNC_S), directory.view()
        with ThreadPoolExecutor(_AT_A_TIME, "pd-cache-status") as threads:
            rows = list(threads.map(lambda record: _ask(record, access), view.nodes))
    differing = differences(row.record for row in rows)
    for row in rows:
        row.difference = differing.get(row.name, "")
        if row.name in view.doubted:
            row.state += "; not registered again since discovery was away"
    fresh = synced and view.stale_since is None
    source = _source(config, view, synced)
    found = ClusterStatus(source, fresh, rows, elected=config.masters.ha)
    segments = next((row.pool for row in found.leading if row.pool is not None), None)
    for row in rows:
        mine = {segment.shown_status for segment in segments or () if segment.segment_name in row.segments}
        row.memory = " ".join(sorted(filter(None, mine)))
    return msgspec.structs.replace(found, segments=segments, weights=_weights(rows))


def _weights(rows: Iterable[NodeStatus]) -> list[str]:
    lines = []
    for model, one in known_versions(row.record.versions for row in rows if row.record.versions).items():
        current, others = one.current.label, one.lagging()
        if current or others:
            lines.append(f"weights of {one_line(model)}: version {current or '(first)'} is current")
        if others:
            lines[-1] += (
                f"; {one_line(', '.join(others))} does not have it and loads nothing: run `pd-cache reset` when all nodes have the "
                f"same weights{f', with --version {current} if it is these' if current else ''}"
            )
    return lines


def _source(config: ClusterConfig, view: View, synced: bool) -> str:
    kind = str(config.discovery.__struct_config__.tag)
    if not synced:
        return f"{kind}, which does not answer: these are the nodes of the file"
    if view.stale_since is not None:
        silent = time.monotonic() - view.stale_since
        return f"{kind}, which has not answered for {silent:.0f} s: these are the nodes that were there before"
    return kind


def _ask(record: NodeRecord, access: Access) -> NodeStatus:
    """`access`: key and certificates for proxies."""
    row = NodeStatus(record=record)
    if record.role == "store" and not record.address.endswith(":0"):
        row.segments = (record.address,)
    if not (url := page_of(record)):
        row.state = f"{NOT_ASKED}: {why_not_asked(record)}"
        return row
    try:
        if record.role == "master":
            health = decode_json(get_text(f"{url}/health"), MasterHealth)
            waits = health.role == LEADER and not health.service_ready
            row.leads = "leads, but does not serve yet" if waits else health.role
            with contextlib.suppress(OSError, ValueError):  # the process that has started it says its versions
                row.record = record.telling(read_about(get_text(f"{record.versions}/health")))
        else:
            told = read_about(get_text(f"{url}/health", access if record.role == "proxy" else NOBODY))
            row.record = msgspec.structs.replace(record, version=told.version or record.version).telling(told)
    except BadStatus as error:
        if error.status >= 500:
            row.state = f"degraded: /health answers {error.status}"
    except (OSError, ValueError) as error:
        row.state = f"{NO_ANSWER}: {error}"
        return row
    if record.role == "proxy" and access.guarded and not access.key:  # this machine has no readable key for its metrics
        return row
    answer = ask_node(record, access)
    if answer.reading is None:
        row.state = f"degraded: its metrics: {answer.why}"
        return row
    row.reading, row.pool = answer.reading, answer.segments
    row.segments = answer.reading.segments or row.segments
    if answer.reading.pool_up is False:
        row.state = "degraded: its pool does not answer"
    return row


# --- showing -----------------------------------------------------------------------------------------------------------


def status_table(status: ClusterStatus) -> Group:
    """Returns the cluster's state as text for people, to be read in 80 columns: what may be long stands below the table."""
    table = Table(box=None, pad_edge=False)
    for column in ("node", "role"):
        table.add_column(column, no_wrap=True)
    for column in ("state", "up for", "hit", "holds", "in flight"):
        table.add_column(column, overflow="fold")
    details = []
    for row in status.nodes:
        state = row.state.partition(":")[0].partition(";")[0]
        reading = row.reading
        held = [f"{tier} {shown_bytes(size)}" for tier, size in reading.tier_bytes.items() if size]
        table.add_row(
            row.name,
            row.record.role,
            escape(", ".join(filter(None, (state, row.leads, row.memory)))),
            "" if reading.started is None else shown_age(max(0.0, time.time() - reading.started)),
            "" if row.hit_rate is None else f"{row.hit_rate:.1%}",
            escape("\n".join(held)),
            "" if row.in_flight is None else str(row.in_flight),
        )
        if state != row.state:
            details.append(Text(f"{row.name}: {row.state}", "" if row.well else "red"))
        if reading.errors:
            errors = ", ".join(f"{reason} {count:.0f}" for reason, count in reading.errors.items())
            details.append(Text(f"{row.name}: errors since its start: {errors}", "yellow"))
    differing = [Text(f"{row.name}: {row.difference}", "yellow") for row in status.nodes if row.difference]
    problems = [Text(problem, "red") for problem in status.problems]
    weights = [Text(line) for line in status.weights]
    if (skew := status.skew) is not None and not skew.fails:
        differing.append(Text(f"{skew.found}: {SKEW_UNTRIED}", "yellow"))
    return Group(Text(f"discovery: {status.source}"), table, *details, *weights, *problems, *differing)


def as_dict(status: ClusterStatus) -> dict[str, object]:
    """Returns the cluster's state for scripts: a node's record and its row are one."""
    nodes = [
        {
            **msgspec.to_builtins(row.record),
            "state": row.state,
            "difference": row.difference,
            "up_since": row.reading.started,
            "hit_rate": row.hit_rate,
            "bytes_by_tier": row.reading.tier_bytes,
            "in_flight": row.in_flight,
            "errors": row.reading.errors,
            "leads": row.leads,
            "segments": row.segments,
            "tenants": row.reading.tenants,
            "memory": row.memory,
        }
        for row in status.nodes
    ]
    return {
        "discovery": status.source,
        "well": status.well,
        "problems": status.problems,
        "weights": status.weights,
        "nodes": nodes,
    }
