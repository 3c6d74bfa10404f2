"""`pd-cache status`: who is in the cluster, who answers, and who will never share a hit with the others."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from launch.discovery import Namespaced, NodeRecord, differences, open_directory
from pd_cache.config import ClusterConfig

_SYNC_S = 5.0
_ASK_S = 2.0
_AT_A_TIME = 16
_MAX_ANSWER = 64 << 10


class NodeStatus(NamedTuple):
    """One node."""

    record: NodeRecord
    """As registered, or as the file says, completed by what the node says itself."""
    state: str
    """`well`, why it is not, or `not asked` where it speaks no HTTP."""
    difference: str
    """In what its namespace differs from that of most; empty where it does not."""


class ClusterStatus(NamedTuple):
    """The cluster at one moment."""

    source: str
    """Where the list of nodes is from."""
    nodes: list[NodeStatus]

    @property
    def well(self) -> bool:
        """Whether everybody answers and nobody differs."""
        return all(node.state in ("well", "not asked") and not node.difference for node in self.nodes)


def cluster_status(config: ClusterConfig) -> ClusterStatus:
    """Ask discovery, then each node. Takes a few seconds at most where something is away."""
    with open_directory(config) as directory:
        synced = directory.wait_synced(_SYNC_S)
        view = directory.view()
    kind = config.discovery.__struct_config__.tag
    source = str(kind) if synced else f"{kind}, which does not answer: these are the nodes of the file"
    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        asked = list(threads.map(_ask, view.nodes))
    differing = differences(record for record, _ in asked)
    return ClusterStatus(source, [NodeStatus(record, state, differing.get(record.name, "")) for record, state in asked])


def print_status(status: ClusterStatus, *, as_json: bool) -> None:
    """A table, or one JSON object."""
    if as_json:
        nodes = [{**msgspec.to_builtins(n.record), "state": n.state, "difference": n.difference} for n in status.nodes]
        print(msgspec.json.encode({"discovery": status.source, "well": status.well, "nodes": nodes}).decode())
        return
    console = Console()
    console.print(f"discovery: {status.source}")
    table = Table("name", "role", "address", "state", "model", "version", "namespace")
    for node in status.nodes:
        record = node.record
        table.add_row(
            record.name,
            record.role,
            record.address,
            node.state,
            record.model or "",
            record.version,
            record.fingerprint or "",
        )
    console.print(table)
    for node in status.nodes:
        if node.difference:
            console.print(f"[yellow]{node.record.name}: {node.difference}[/]")


def _ask(record: NodeRecord) -> tuple[NodeRecord, str]:
    if not record.address.startswith("http"):
        return record, "not asked"
    try:
        with urllib.request.urlopen(f"{record.address}/health", timeout=_ASK_S) as answer:
            body = answer.read(_MAX_ANSWER)
    except urllib.error.HTTPError as error:
        with error:
            return record, f"status {error.code}" if error.code >= 500 else "well"
    except (OSError, ValueError) as error:
        return record, f"no answer: {getattr(error, 'reason', error)}"
    if record.fingerprint is None:
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            told = msgspec.json.decode(body, type=Namespaced)
            record = msgspec.structs.replace(record, fingerprint=told.fingerprint, namespace=told.namespace)
    return record, "well"
