"""Benches across hosts, each a network namespace with a 1 Gbit/s link, and what becomes of them when a host fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.process import spawn_child
from tests.support.etcd import Etcd
from tests.support.hosts import Host, Network, why_not
from tests.support.needs import needs_etcd
from tests.support.pool import ROOT
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow(seconds=120)
NAMES = ("a", "b", "c")
GBPS = 1 / 8


class Machine:
    """One participant on a host."""

    def __init__(self, host: Host, bench: str, *arguments: str) -> None:
        command = (sys.executable, "-m", "launch", "bench", bench, *arguments)
        self.process = spawn_child(
            host.inside(*command), death_signal=signal.SIGTERM, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._output = [b"", b""]
        self._readers = [threading.Thread(target=self._read, args=(index,), daemon=True) for index in (0, 1)]
        for reader in self._readers:
            reader.start()

    def _read(self, index: int) -> None:
        pipe = (self.process.stdout, self.process.stderr)[index]
        assert pipe is not None
        with pipe:
            for line in pipe:
                self._output[index] += line

    @property
    def errors(self) -> str:
        """What it has said on stderr so far."""
        return self._output[1].decode()

    def end(self, timeout: float) -> tuple[int, str, str]:
        """Status, stdout and stderr, when it has ended by itself."""
        status = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(60)
        return status, self._output[0].decode(), self.errors

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    if reason := why_not():
        pytest.skip(reason)
    with closing(Network(3)) as network:
        yield {name: network.host(name) for name in (*NAMES, "etcd")}


def cluster(folder: Path, hosts: dict[str, Host], names: tuple[str, ...] = NAMES, **changes: Any) -> Path:
    """A file with a store node on each host."""
    tree = {
        "name": "bench",
        "nodes": [
            {"name": "master", "role": "master", "host": hosts["a"].address, "port": 50051, "metrics_port": 9003},
            *({"name": n, "role": "store", "host": hosts[n].address, "segment_size": "16MiB"} for n in names),
        ],
        **changes,
    }
    folder.mkdir(exist_ok=True)
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture
def run(network: dict[str, Host]) -> Iterator[Any]:
    """Starts a bench on hosts; whatever still runs is killed afterwards."""
    started: list[Machine] = []

    def start(bench: str, files: dict[str, Path], *arguments: str) -> dict[str, Machine]:
        machines = {name: Machine(network[name], bench, "-c", str(file), *arguments) for name, file in files.items()}
        started.extend(machines.values())
        return machines

    try:
        yield start
    finally:
        for machine in started:
            machine.kill()


SMALL = ("--size", "1MiB", "--objects", "8", "--rounds", "2", "--link-gbit", "1")


def test_bandwidth_between_hosts_is_that_of_their_links_at_most(
    network: dict[str, Host], run: Any, tmp_path: Path
) -> None:
    file = cluster(tmp_path, network)
    page = tmp_path / "report.html"
    before = {name: (network[name].sent(), network[name].received()) for name in NAMES}
    machines = run("bandwidth", dict.fromkeys(NAMES, file), *SMALL, "--at-once", "--json", "--html", str(page))
    status, out, err = machines["a"].end(300)
    assert status == 0, err
    report = json.loads(out)
    rows = report["results"]
    assert {(row["from"], row["to"]) for row in rows} == {(begin, end) for begin in NAMES for end in NAMES}
    for row in [row for row in rows if row["from"] != row["to"]] + report["at_once"]:
        assert row["bytes_equal"]
        assert row["link_gbps"] == GBPS
        for part in ("put", "get", "raw_write", "raw_read"):
            assert 0 < row[f"{part}_gbps"] <= 1.1 * GBPS, (part, row)
    assert len(report["at_once"]) == 6
    for row in rows:
        if row["from"] == row["to"]:
            assert row["raw_read_gbps"] is None
            assert row["link_gbps"] is None
    # put, get, raw write, raw read, each 3 times to 2 others, one at a time and all at once; a get is answered by the other end
    payload = 8 * 2**20 * 3 * 2 * 2
    for name in NAMES:
        assert network[name].sent() - before[name][0] > 4 * payload
        assert network[name].received() - before[name][1] > 4 * payload
    assert "Bandwidth between nodes" in page.read_text()
    for name in ("b", "c"):
        assert machines[name].end(300)[:2] == (0, "")


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_participant_that_is_gone_in_the_middle_is_named_and_everybody_ends(
    network: dict[str, Host], run: Any, tmp_path: Path, how: str
) -> None:
    file = cluster(tmp_path, network)
    machines = run("bandwidth", dict.fromkeys(NAMES, file), "--rounds", "1000", "--size", "1MiB", "--link-gbit", "1")
    before = network["b"].received()
    wait_for(lambda: network["b"].received() - before > 20 << 20, 60, "transfers under way")
    if how == "killed":
        machines["b"].kill()
    else:
        network["b"].cut()
    try:
        status, out, err = machines["a"].end(300)
        assert (status, out) == (1, "")
        assert f"b ({network['b'].address})" in err
        status, _, err = machines["c"].end(300)
        assert status == 1
        assert f"b ({network['b'].address})" in err
    finally:
        network["b"].mend()


@needs_etcd
def test_hosts_that_know_only_themselves_find_one_another_in_etcd(
    network: dict[str, Host], run: Any, tmp_path: Path
) -> None:
    etcd = Etcd(tmp_path, host=network["etcd"]).start()
    try:
        discovery = {"kind": "etcd", "endpoints": [etcd.endpoint], "ttl_s": 2}
        files = {name: cluster(tmp_path / name, network, (name,), discovery=discovery) for name in NAMES}
        machines = run("bandwidth", files, "--nodes", "3", *SMALL, "--json")
        status, out, err = machines["a"].end(300)
        assert status == 0, err
        assert list(json.loads(out)["nodes"]) == list(NAMES)
    finally:
        etcd.stop()


def test_lookups_of_clients_on_all_hosts(network: dict[str, Host], run: Any, tmp_path: Path) -> None:
    file = cluster(tmp_path, network)
    small = ("--rounds", "5", "--clients", "1,2", "--tokens", "4096", "--seconds", "0.3")
    machines = run("lookup", dict.fromkeys(NAMES, file), "--coordinator", "b", *small, "--json")
    status, out, err = machines["b"].end(300)
    assert status == 0, err
    report = json.loads(out)
    assert report["coordinator"] == "b"
    assert [row["tokens"] for row in report["results"]] == [4096, 32768, 131072]
    assert [(row["clients_per_node"], row["clients"]) for row in report["clients"]] == [(1, 3), (2, 6)]
    for row in report["clients"]:
        for kind in ("raw", "lookup"):
            assert row[f"{kind}_per_s"] > 0
            assert 0 < row[f"{kind}_p50_ms"] <= row[f"{kind}_p99_ms"]
    for name in ("a", "c"):
        assert machines[name].end(300)[:2] == (0, "")
