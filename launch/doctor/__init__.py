"""`pd-cache doctor`: checks this machine and the cluster, explains what it finds, and names the repair.

`checks` looks at the machine, `probe` at the cluster; `report` has the findings and shows them.
docs/troubleshooting.md explains the checks. The doctor changes nothing, and removes the objects that it puts
into the pool.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

import pd_cache
from launch.doctor import checks, probe
from launch.doctor.report import DoctorReport, Finding, Verdict, skipped
from launch.watch.asker import cluster_status, leading_master, leading_metrics
from launch.watch.state import ClusterStatus
from pd_cache.cluster import ClusterConfig
from pd_cache.cluster.machine import local_nodes
from transfer.settings import rdma_devices


def examine(config: ClusterConfig | None, file: Path | None) -> DoctorReport:
    """Checks everything that can be checked. Takes seconds; if segments hang, up to about a minute."""
    findings = list(_findings(config))
    name = None if file is None else str(file)
    if name is not None:
        given = f"-c {shlex.quote(name)}"
        findings = [
            msgspec.structs.replace(finding, repair=finding.repair.replace("-c FILE", given))
            for finding in findings
        ]
    return DoctorReport(
        version=pd_cache.__version__,
        host=socket.gethostname(),
        file=name,
        broken=sum(finding.verdict is Verdict.BROKEN for finding in findings),
        warnings=sum(finding.verdict is Verdict.WARNING for finding in findings),
        findings=findings,
    )


def _findings(config: ClusterConfig | None) -> Iterator[Finding]:
    yield from checks.library_findings()
    yield from checks.rdma_findings(None if config is None else config.transfer)
    if config is None:
        yield checks.memory_finding(None, (), ())
        yield skipped("cluster", "not looked at", repair="pd-cache doctor -c FILE")
        return
    status = cluster_status(config)
    mine = local_nodes(config)
    segments, running = status.segments or (), {row.name for row in status.nodes if row.answers}
    # a store without a metrics_port answers nothing, and has its memory if the pool has that
    for node in mine:
        mounted = sum(segment.size_bytes for segment in segments if segment.host == node.host)
        if node.role == "store" and mounted >= sum(
            config.segment_size(other) for other in config.nodes if other.host == node.host
        ):
            running.add(node.name)
    yield checks.memory_finding(config, mine, running)
    yield from probe.cluster_findings(status)
    if not any(row.answers for row in status.nodes):
        return
    hosts = {row.host for row in status.nodes if row.host} | {node.host for node in config.nodes}
    yield from probe.advertised_findings(hosts, segments)
    if "://" in config.transfer.metadata:
        yield probe.metadata_finding(config.transfer.metadata)
    yield from _transfers(config, status)


def _transfers(config: ClusterConfig, status: ClusterStatus) -> Iterator[Finding]:
    if not status.segments:
        yield skipped("transfer.segment", "not tried: there is no segment to put anything into")
        return
    if config.transfer.protocol == "rdma" and not rdma_devices():
        yield skipped(
            "transfer.segment", "not tried: without an RDMA device Mooncake would silently run over TCP"
        )
        return
    master, metrics = leading_master(config, status), leading_metrics(status)
    yield from probe.probe_findings(config, status.segments, master, metrics)
