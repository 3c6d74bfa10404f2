"""What Mooncake's clients listen on, and whether `pd-cache doctor` says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.doctor.probe import listening_finding, listening_verdict, wide_ports
from launch.doctor.report import Verdict
from launch.reachability import PeerAddress, Reach
from tests.support.cluster import cluster_file
from tests.support.hosts import Network, why_not
from tests.support.pool import ROOT, Node

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:3AF8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:3AF9 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 3 1 0 100 0 0 10 0
   3: 00000000:3AFA 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0        0 4 1 0 100 0 0 10 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 00000000000000000000000000000000:3B00 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 0 0
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's /proc."""
    folder = tmp_path / "proc" / "net"
    folder.mkdir(parents=True)
    for name, text in (("tcp", TCP), ("tcp6", TCP6)):
        (folder / name).write_text(text)
    return tmp_path


def test_ports_that_are_bound_to_all_addresses_are_found_in_mooncakes_range(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wide_ports(root) == {15096, 15104}
    monkeypatch.setenv("MC_MIN_RPC_PORT", "15100")
    assert wide_ports(root) == {15104}


def test_what_takes_connections_is_a_warning_with_the_rule_that_ends_it() -> None:
    target = PeerAddress("mooncake", "segment", "198.51.100.7:15096")
    open_there = listening_verdict([Reach(target)], ["10.0.0.7"])
    assert open_there.verdict is Verdict.WARNING
    assert "198.51.100.7" in open_there.found
    assert "tcp dport 15000-17000 ip daddr != { 127.0.0.0/8, 10.0.0.7 } drop" in open_there.repair
    assert listening_verdict([Reach(target, "no answer within 1 s")], ["10.0.0.7"]).verdict is Verdict.OK


def test_where_no_client_runs_or_no_address_is_known_nothing_is_judged(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    assert listening_finding((), tmp_path / "bin").verdict is Verdict.SKIPPED
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # without `hostname`
    assert listening_finding((), root).verdict is Verdict.SKIPPED


@pytest.mark.slow
@pytest.mark.skipif((reason := why_not()) is not None, reason=reason or "")
def test_a_real_client_is_found_at_the_address_that_the_file_does_not_name(tmp_path: Path) -> None:
    network = Network()
    started: list[Node] = []
    try:
        host = network.host("one")
        subprocess.run(host.inside("ip", "addr", "add", "198.51.100.7/32", "dev", "eth0"), check=True)
        nodes = [
            {"name": "master", "role": "master", "host": host.address, "port": 50051, "metrics_port": 9003},
            {"name": "store-0", "role": "store", "host": host.address, "segment_size": "16MiB"},
        ]
        file = cluster_file(tmp_path, nodes=nodes)
        for role, name in (("master", "master"), ("store", "store-0")):
            started.append(Node(role, name, file, host=host))
        command = host.inside(sys.executable, "-m", "launch", "doctor", "--json", "-c", str(file))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120)
        findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
        assert findings["network.listening"]["verdict"] == "warning"
        assert "198.51.100.7" in findings["network.listening"]["found"]
        assert f"{{ 127.0.0.0/8, {host.address} }} drop" in findings["network.listening"]["repair"]
        assert findings["transfer.segment"]["verdict"] != "broken", "the client minds no connection that says nothing"
        subprocess.run(host.inside("ip", "addr", "del", "198.51.100.7/32", "dev", "eth0"), check=True)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120)
        findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
        assert findings["network.listening"]["verdict"] == "ok"
    finally:
        for node in reversed(started):
            node.stop()
        network.close()
