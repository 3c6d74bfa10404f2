"""What Mooncake's clients listen on, and whether `pd-cache doctor` says so."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch.doctor.probe import listening_finding, wide_ports
from launch.doctor.report import Finding, Verdict
from tests.support.cluster import cluster_file, examined
from tests.support.hosts import Network, why_not
from tests.support.pool import Node

TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 00000000000000000000000000000000:3B00 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 0 0
   1: 00000000000000000000000001000000:3B01 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 0 0
   2: 00000000000000000000000000000000:1F90 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 0 0
   3: 00000000000000000000000000000000:3B02 00000000000000000000000000000000:0000 01 00000000:00000000 00:00000000 0 0
"""


def test_where_no_client_runs_or_no_address_is_known_nothing_is_judged(tmp_path, monkeypatch):
    assert listening_finding((), tmp_path).found == "no Mooncake client runs here"
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "tcp6").write_text(TCP6)
    assert wide_ports(tmp_path) == {15104}
    monkeypatch.setenv("PATH", str(tmp_path))  # without `hostname`
    assert listening_finding((), tmp_path).verdict is Verdict.SKIPPED


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

        def findings() -> dict[str, Finding]:
            return {one.check: one for one in examined(file, *host.inside()).findings}

        found = findings()
        assert found["network.listening"].verdict is Verdict.WARNING
        assert "198.51.100.7" in found["network.listening"].found
        assert f"{{ 127.0.0.0/8, {host.address} }} drop" in found["network.listening"].repair
        assert found["transfer.segment"].verdict is not Verdict.BROKEN, (
            "the client minds no connection that says nothing"
        )
        subprocess.run(host.inside("ip", "addr", "del", "198.51.100.7/32", "dev", "eth0"), check=True)
        assert findings()["network.listening"].verdict is Verdict.OK
    finally:
        for node in reversed(started):
            node.stop()
        network.close()
