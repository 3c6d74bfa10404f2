"""The role `master`: Mooncake's master, as a child of this process."""

from __future__ import annotations

import contextlib
import subprocess
import urllib.parse
from collections.abc import Callable
from functools import partial

from launch.discovery import Member
from launch.http import fetch
from launch.masters import LEADER, MasterHealth
from launch.run.supervise import ForeignProgram, RoleError, spawn_child, stop_on_signals
from pd_cache.cluster import ClusterConfig, EtcdDiscovery, MasterNode
from pd_cache.cluster.machine import find_program
from pd_cache.decoding import decode_json


def master_command(config: ClusterConfig, node: MasterNode) -> list[str]:
    """Returns the command of Mooncake's master, with every flag that a cache depends on. Raises RoleError if
    the wheel is not installed.

    If `transfer.metadata` is an http address on the master's own host, the master serves it.
    """
    server = urllib.parse.urlsplit(config.transfer.metadata)
    serves_metadata = server.scheme == "http" and server.hostname == node.host
    program = find_program("mooncake_master")
    if program is None:
        raise RoleError("mooncake_master is not installed; run `pd-cache doctor`, which says what to install")
    return [
        program,
        f"--rpc_address={node.host}",
        f"--rpc_port={node.port}",
        f"--metrics_host={node.host}",
        f"--metrics_port={node.metrics_port}",
        f"--default_kv_lease_ttl={node.lease_ttl_ms}",
        f"--client_ttl={node.client_ttl_s}",  # 0.3.14 calls it client_active_ttl_sec, and takes both
        # the unfinished put of a dead writer blocks its key for this time
        "--put_start_discard_timeout_sec=5",
        f"--eviction_high_watermark_ratio={node.eviction_high_watermark}",
        f"--eviction_ratio={node.eviction_ratio}",
        "--enable_metric_reporting=false",  # a long log line every ten seconds; /metrics has it all
        *(
            (
                "--enable_http_metadata_server=true",
                f"--http_metadata_server_host={server.hostname}",
                f"--http_metadata_server_port={server.port or 80}",
            )
            if serves_metadata
            else ()
        ),
        *(
            (
                "--enable_ha=true",
                f"--etcd_endpoints={';'.join(config.discovery.endpoints)}",
                f"--cluster_id={config.name}",
                "--enable_oplog=true",  # otherwise all keys are lost with the leader
            )
            if config.masters.ha and isinstance(config.discovery, EtcdDiscovery)
            else ()
        ),
        "--logtostderr",
    ]


def run_master(config: ClusterConfig, node: MasterNode, ready: Callable[[str], None], member: Member) -> None:
    """Runs Mooncake's master as a child that dies with this process. With several masters, this one is ready
    as leader or as standby.

    Restarts it if etcd has lost data of the election, because masters do not notice this themselves.
    """
    command, settings = master_command(config, node), config.supervisor

    hint = f"are the ports {node.port} and {node.metrics_port} of {node.host} free, and does `pd-cache doctor` find its libraries?"
    spawn = partial(spawn_child, command, stdout=subprocess.DEVNULL)

    def serving() -> bool:
        health = _health(node)
        return health.service_ready or (config.masters.ha and health.role == "standby")

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        lost: Callable[[], bool] | None = None
        if config.masters.ha and isinstance(config.discovery, EtcdDiscovery):
            from launch.discovery.etcd import ElectionWatch

            def leads() -> bool | None:
                role = _health(node).role
                return role == LEADER if role else None

            lost = ElectionWatch(config.discovery, config.name, f"{node.host}:{node.port}", leads).lost
        master = stack.enter_context(
            ForeignProgram("mooncake_master", spawn, settings.stop_grace_s, lambda: hint)
        )
        try:
            if master.wait_serving(stop, serving, settings.ready_timeout_s):
                ready(f"{node.host}:{node.port}")
            master.watch(stop, lost)
        finally:
            member.leave()  # first, so that no process that starts now connects to it


def _health(node: MasterNode) -> MasterHealth:
    """Returns a master's report on its health; an empty one if it does not answer."""
    try:
        return decode_json(fetch(f"http://{node.host}:{node.metrics_port}/health", timeout=1), MasterHealth)
    except (OSError, ValueError):
        return MasterHealth()
