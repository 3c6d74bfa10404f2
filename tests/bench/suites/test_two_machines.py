"""Benches across two machines, each a network namespace with a 1 Gbit/s link."""

import json
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest

from bench.lib.two_machines import Crew, Location, PeerError, Site
from tests.support.hosts import Network, why_not
from tests.support.pool import ROOT

GBPS = 1 / 8
SMALL = ("--size", "1MiB", "--rounds", "2", "--link-gbit", "1", "--at-once")


@pytest.fixture(scope="module")
def hosts():
    if reason := why_not():
        pytest.skip(reason)
    with closing(Network(3)) as network:
        yield {name: network.host(name) for name in "ab"}


IMPATIENT = """
from bench.lib import two_machines
from launch.cli import main
two_machines._HELLO_S = 5.0
main(prog_name="pd-cache")
"""


@contextmanager
def started(host, bench, *arguments, program=("-m", "launch")):
    command = host.inside(sys.executable, *program, "bench", bench, *arguments)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def report(host, bench, *arguments):
    """What a bench on this host prints."""
    with started(host, bench, "--json", *arguments) as leading:
        out, errors = leading.communicate(timeout=300)
    assert leading.returncode == 0, errors
    return json.loads(out)


@pytest.mark.slow(seconds=40)
def test_bandwidth_between_hosts_is_that_of_their_link_at_most(hosts):
    address = f"{hosts['b'].address}:50070"
    with started(hosts["b"], "bandwidth", "--serve", address, *SMALL) as serving:
        told = report(hosts["a"], "bandwidth", "--connect", address, *SMALL)
        serving.send_signal(signal.SIGINT)
        assert serving.communicate(timeout=60)[0] == ""
        assert serving.returncode == 0
    rows = {(row["from"], row["to"]): row for row in told["results"]}
    assert set(rows) == {(begin, end) for begin in ("node-0", "node-1") for end in ("node-0", "node-1")}
    for row in [rows["node-0", "node-1"], rows["node-1", "node-0"], *told["at_once"]]:
        assert row["bytes_equal"]
        for part in ("put", "get", "raw_write", "raw_read"):
            assert 0 < row[f"{part}_gbps"] <= 1.1 * GBPS, (part, row)


def test_a_machine_that_ends_in_the_middle_or_never_came_is_an_error_that_names_it(hosts):
    address = f"{hosts['b'].address}:50070"
    with started(hosts["a"], "bandwidth", "--connect", address, program=("-c", IMPATIENT)) as alone:
        _, errors = alone.communicate(timeout=120)
    assert alone.returncode == 1
    assert f"{address} does not answer; does it run, with --serve?" in errors
    with started(hosts["b"], "lookup", "--serve", address), started(hosts["a"], "bandwidth", "--connect", address) as leading:  # fmt: skip
        _, errors = leading.communicate(timeout=120)
    assert "here is LookupSite" in errors


# --- processes of one machine -------------------------------------------------------------------------------


class Adding(Site):
    """Adds up what comes. The types of its steps are those of the messages."""

    def __init__(self, location):
        super().__init__(location)
        self._sum = 0

    def add(self, job: int) -> int:
        """Fails for numbers below 0."""
        if job < 0:
            raise ValueError("below 0")
        self._sum += job
        return self._sum

    def sleep(self, job: None) -> None:
        """Longer than a test waits."""
        time.sleep(5.0)


def test_the_sites_of_a_crew_do_the_same_job_each_with_what_it_has_and_one_that_fails_or_is_late_is_an_error(
    monkeypatch,
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # its processes do not look for modules in this folder
    with closing(Crew(Adding, Location.here(), 2)) as crew:
        for added, total in ((1, 1), (2, 3)):
            assert list(crew.everywhere(Adding.add, added, timeout_s=30).values()) == [total] * 2
        with pytest.raises(PeerError, match="ValueError: below 0"):
            crew.everywhere(Adding.add, -1, timeout_s=30)
        with pytest.raises(PeerError, match="does not answer"):
            crew.everywhere(Adding.sleep, None, timeout_s=0.2)
