"""One run of the doctor: this machine, and with a file its cluster, too."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

import pd_cache
from launch.access import proxy_access
from launch.discovery import View, find_master
from launch.doctor.clock import clock_finding, skew_findings
from launch.doctor.cluster import (
    discovery_finding,
    fingerprint_findings,
    master_findings,
    node_findings,
    record_findings,
    segment_findings,
    unknown_segments,
    version_findings,
)
from launch.doctor.files import file_findings
from launch.doctor.finding import DoctorReport, Finding, Verdict, skipped
from launch.doctor.libraries import library_findings
from launch.doctor.listening import listening_findings
from launch.doctor.memory import memory_findings
from launch.doctor.network import (
    advertised_findings,
    peer_findings,
    peer_report,
    port_findings,
    reach_findings,
    reach_from_here,
)
from launch.doctor.open_files import descriptor_finding
from launch.doctor.peers import installed_findings
from launch.doctor.probe import probe_findings
from launch.doctor.rdma import rdma_findings
from launch.masters import Segment
from launch.reachability import targets_of
from launch.status import ClusterStatus, cluster_status
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.addresses import is_local, local_nodes
from pd_cache.errors import ConfigError

_AT_A_TIME = 16
_MASTER_S = 5.0


def examine(config: ClusterConfig | None, file: Path | None, root: Path = Path("/")) -> DoctorReport:
    """Checks everything that can be checked. Takes seconds; if segments hang, up to about a minute."""
    findings = list(_findings(config, root))
    if file is not None:
        given = f"-c {shlex.quote(str(file))}"
        findings = [
            msgspec.structs.replace(finding, repair=finding.repair.replace("-c FILE", given)) for finding in findings
        ]
    return DoctorReport(
        version=pd_cache.__version__,
        host=socket.gethostname(),
        file=None if file is None else str(file),
        broken=sum(finding.verdict is Verdict.BROKEN for finding in findings),
        warnings=sum(finding.verdict is Verdict.WARNING for finding in findings),
        findings=findings,
    )


def _findings(config: ClusterConfig | None, root: Path) -> Iterator[Finding]:
    yield from library_findings(root)
    yield from installed_findings()
    yield from rdma_findings(None if config is None else config.transfer, root)
    yield clock_finding()
    yield descriptor_finding(config, () if config is None else local_nodes(config))
    if config is None:
        yield from memory_findings(None, (), (), root)
        yield skipped("cluster", "not looked at", repair="pd-cache doctor -c FILE")
        return
    status = cluster_status(config)
    segments, leading = status.segments, next(iter(status.leading), None)
    mine = local_nodes(config)
    in_use = _addresses_in_use(status, segments)
    running = {row.name for row in status.nodes if row.up} | {
        node.name for node in mine if node.role == "store" and _mounted(config, node.host, segments)
    }
    yield from memory_findings(config, mine, running, root)
    yield from file_findings(config, mine)
    yield from port_findings(mine, in_use)
    yield from listening_findings(mine, root)
    yield from _cluster(config, status, segments)
    yield from _network(config, status, segments, None if leading is None else leading.name)
    if segments and leading is not None:
        yield from _transfers(config, segments, leading.record.metrics or "")
    else:
        yield skipped("transfer.segment", "not tried: there is no segment to put anything into")


def _cluster(config: ClusterConfig, status: ClusterStatus, segments: list[Segment] | None) -> Iterator[Finding]:
    yield discovery_finding(config, status)
    yield from record_findings(status)
    yield from node_findings(status)
    yield from master_findings(config, status)
    yield from version_findings(status.nodes)
    yield from fingerprint_findings(status.nodes)
    if segments is None:
        yield unknown_segments("no leading master tells which segments there are")
    else:
        yield from segment_findings(status.nodes, segments)
    answering = {row.name: row.url for row in status.nodes if row.up and row.url and not is_local(row.host)}
    yield from skew_findings(answering)


def _network(
    config: ClusterConfig, status: ClusterStatus, segments: list[Segment] | None, leading: str | None
) -> Iterator[Finding]:
    rows = status.nodes
    hosts = {row.host for row in rows if row.host} | {node.host for node in config.nodes}
    view = View(tuple(row.record for row in rows))
    reached = reach_from_here(targets_of(config, view, segments or (), leading))
    yield from reach_findings(reached)
    yield from advertised_findings(hosts, segments or ())
    with ThreadPoolExecutor(_AT_A_TIME, "pd-cache-doctor") as threads:
        access = proxy_access(config)
        told = zip(rows, threads.map(lambda row: peer_report(row, access), rows), strict=True)
        reports = {row.name: report for row, report in told if report is not None}
    yield from peer_findings(rows, reports, reached, {host for host in hosts if is_local(host)})


def _transfers(config: ClusterConfig, segments: list[Segment], metrics: str) -> Iterator[Finding]:
    from transfer.settings import rdma_devices

    if config.transfer.protocol == "rdma" and not rdma_devices():
        yield skipped("transfer.segment", "not tried: without an RDMA device Mooncake would silently run over TCP")
        return
    try:
        config = find_master(config, _MASTER_S)
    except ConfigError as error:
        yield skipped("transfer.segment", f"not tried: {error}")
        return
    yield from probe_findings(config, segments, metrics, _own_host(config))


def _mounted(config: ClusterConfig, host: str, segments: list[Segment] | None) -> bool:
    """Returns whether the pool has all the memory that a host's nodes promise."""
    promised = sum(config.segment_size(node) for node in config.nodes if node.host == host)
    return sum(segment.size_bytes for segment in segments or () if segment.host == host) >= promised


def _addresses_in_use(status: ClusterStatus, segments: list[Segment] | None) -> set[str]:
    """Addresses at which the node answered that the file has there."""
    in_use = {segment.segment_name for segment in segments or ()}
    for row in status.nodes:
        if row.up:
            in_use |= {url.rpartition("//")[2] for url in (row.record.address, row.record.metrics) if url}
    return in_use


def _own_host(config: ClusterConfig) -> str:
    """Returns the address by which the cluster knows this machine, or else the one from which packets to the master come."""
    mine = local_nodes(config)
    if mine:
        return mine[0].host
    address = next((node.host for node in config.nodes), "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect((address, 9))  # nothing is sent
            return str(sender.getsockname()[0])
        except OSError:
            return "127.0.0.1"
