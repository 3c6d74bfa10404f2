"""Machines of a bench: how they find one another, work together, and end when one of them fails. Each is a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq

import pd_cache
from bench.lib.fleet import Fleet, FleetError, Location, Nothing
from bench.lib.fleet.children import start as start_child
from bench.lib.fleet.messages import (
    BEAT,
    MAX_MESSAGE,
    PROTOCOL,
    End,
    Message,
    ParticipantHello,
    close_socket,
    decode_message,
    encode_message,
    open_socket,
)
from bench.lib.fleet.participant import CoordinatorLink
from launch.process import end
from tests.support.echo_bench import Echo
from tests.support.etcd import Etcd
from tests.support.needs import needs_etcd
from tests.support.pool import ROOT, free_port
from tests.support.waiting import PATIENCE_S, wait_for


class Machine:
    """One participant of the bench `echo` (tests/support/echo_bench.py), running."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.echo_bench", *arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def end(self, timeout: float = 180.0) -> tuple[int, str, str]:
        """Status, stdout and stderr, when it has ended by itself."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err


Start = Callable[..., Machine]


@pytest.fixture
def start() -> Iterator[Start]:
    machines: list[Machine] = []

    def begin(*arguments: object) -> Machine:
        machines.append(Machine(*map(str, arguments)))
        return machines[-1]

    try:
        yield begin
    finally:
        for machine in machines:
            machine.process.kill()
            machine.process.communicate()


def cluster(folder: Path, *names: str, **changes: Any) -> Path:
    """A file whose nodes are all on this machine."""
    tree = {
        "name": "echo",
        "bench": {"port": free_port()},
        "nodes": [
            {"name": "master", "role": "master", "port": 0, "metrics_port": 0},
            *({"name": name, "role": "store", "segment_size": "16MiB"} for name in names),
        ],
        **changes,
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def everybody(start: Start, file: Path, names: str, *arguments: object) -> dict[str, Machine]:
    return {name: start("-c", file, "--node", name, "--nodes", names, *arguments) for name in names.split(",")}


def test_all_begin_together_and_only_the_first_by_name_reports(start: Start, tmp_path: Path) -> None:
    machines = everybody(start, cluster(tmp_path, "b", "a", "c"), "b,a,c")
    status, out, _ = machines["a"].end()
    assert status == 0
    report = json.loads(out)
    assert list(report["words"]) == ["a", "b", "c"]
    assert report["words"]["c"] == "hello c"
    for name in ("b", "c"):
        status, out, err = machines[name].end()
        assert (status, out) == (0, ""), err
        assert "closed" in err


def test_another_coordinator_can_be_named(start: Start, tmp_path: Path) -> None:
    machines = everybody(start, cluster(tmp_path, "a", "b"), "a,b", "--coordinator", "b")
    assert json.loads(machines["b"].end()[1])["words"] == {"a": "hello a", "b": "hello b"}
    assert machines["a"].end()[:2] == (0, "")


def test_without_a_file_participants_run_on_this_machine(start: Start) -> None:
    status, out, err = start("--local", 3).end()
    assert status == 0, err
    assert list(json.loads(out)["words"]) == ["node-0", "node-1", "node-2"]


def test_a_participant_killed_in_the_middle_is_named_and_all_end(start: Start, tmp_path: Path) -> None:
    machines = everybody(start, cluster(tmp_path, "a", "b", "c"), "a,b,c", "--hang", "b")
    wait_for(lambda: (tmp_path / "b.hangs").exists(), 20, "b being in its step")
    machines["b"].process.kill()
    status, out, err = machines["a"].end()
    assert (status, out) == (1, "")
    assert "b (127.0.0.1): its connection ended, in the middle of say" in err
    assert "closed" in err, "the coordinator closed its own site"
    status, _, err = machines["c"].end()
    assert status == 1
    assert "b (127.0.0.1)" in err, "the others are told why"
    assert "closed" in err


def test_a_step_that_takes_too_long_is_named(start: Start, tmp_path: Path) -> None:
    machines = everybody(start, cluster(tmp_path, "a", "b"), "a,b", "--hang", "b", "--step-timeout", 5)
    status, _, err = machines["a"].end()
    assert status == 1
    assert "b (127.0.0.1): did not finish say within 5 s" in err
    status, _, err = machines["b"].end()
    assert status == 1
    assert "closed" in err


def test_a_step_that_raises_is_told_with_its_node_and_its_error(start: Start, tmp_path: Path) -> None:
    machines = everybody(start, cluster(tmp_path, "a", "b"), "a,b", "--fail", "b")
    status, _, err = machines["a"].end()
    assert status == 1
    assert "b (127.0.0.1): say: RuntimeError: b cannot" in err
    assert machines["b"].end()[0] == 1


@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_one_ends_all(start: Start, tmp_path: Path, who: str, number: signal.Signals) -> None:
    machines = everybody(start, cluster(tmp_path, "a", "b"), "a,b", "--hang", "b")
    wait_for(lambda: (tmp_path / "b.hangs").exists(), 20, "b being in its step")
    machines[who].process.send_signal(number)
    for name, machine in machines.items():
        status, _, err = machine.end()
        assert status == 1
        assert "closed" in err
        if name != who:
            assert "interrupted" in err


def test_a_coordinator_that_is_killed_ends_the_others(start: Start, tmp_path: Path) -> None:
    machines = everybody(start, cluster(tmp_path, "a", "b"), "a,b", "--hang", "b")
    wait_for(lambda: (tmp_path / "b.hangs").exists(), 20, "b being in its step")
    machines["a"].process.kill()
    status, _, err = machines["b"].end()
    assert status == 1
    assert "the coordinator is gone" in err
    assert "closed" in err


def test_who_never_comes_is_named(start: Start, tmp_path: Path) -> None:
    file = cluster(tmp_path, "a", "b", "c")
    other = start("-c", file, "--node", "b", "--nodes", "a,b,c", "--wait", 120)
    assert other.process.stderr is not None
    assert other.process.stderr.readline() == "begun\n"  # and tries to reach the coordinator from now on
    coordinator = start("-c", file, "--node", "a", "--nodes", "a,b,c", "--wait", 5)
    status, _, err = coordinator.end()
    assert status == 1
    assert "c did not come within 5 s" in err
    status, _, err = other.end()
    assert status == 1
    assert "gave up" in err


def test_a_coordinator_that_never_comes_is_named(start: Start, tmp_path: Path) -> None:
    status, _, err = start("-c", cluster(tmp_path, "a", "b"), "--node", "b", "--nodes", "a,b", "--wait", 1).end()
    assert status == 1
    assert "the coordinator a was not reached within 1 s" in err


@needs_etcd
def test_with_etcd_a_number_of_participants_is_enough(start: Start, tmp_path: Path, etcd: Etcd) -> None:
    discovery = {"kind": "etcd", "endpoints": [etcd.endpoint], "ttl_s": 2}
    machines = {}
    for name in ("x", "y", "z"):
        folder = tmp_path / name
        folder.mkdir()
        file = cluster(folder, name, name=f"count-{os.getpid()}", discovery=discovery)  # it knows of no other
        machines[name] = start("-c", file, "--node", name, "--nodes", 3)
    ended = {name: machine.end() for name, machine in machines.items()}
    assert [status for status, _, _ in ended.values()] == [0, 0, 0], ended
    assert list(json.loads(ended["x"][1])["words"]) == ["x", "y", "z"]
    client = etcd.client()
    try:
        prefix = f"/pd-cache/count-{os.getpid()}/"
        wait_for(lambda: not list(client.get_prefix(prefix)), 5, "no record being left")
    finally:
        client.close()


@needs_etcd
def test_with_etcd_too_few_are_told_who_came(start: Start, tmp_path: Path, etcd: Etcd) -> None:
    discovery = {"kind": "etcd", "endpoints": [etcd.endpoint], "ttl_s": 2}
    file = cluster(tmp_path, "x", name=f"few-{os.getpid()}", discovery=discovery)
    status, _, err = start("-c", file, "--node", "x", "--nodes", 2, "--wait", 5).end()
    assert status == 1
    assert "1 nodes (x) registered" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--node", "nobody", "--nodes", "a,b"), "--node nobody: no such node in the file"),
        (("--node", "c", "--nodes", "a,b"), "none of the participants, which are a, b"),
        (("--nodes", "a,b"), "2 participants are on this machine (a, b); say which with --node"),
        (("--nodes", "far"), "no participant is on this machine"),
        (("--nodes", "a,a"), "each once"),
        (("--nodes", "a,q"), "q: no such node"),
        (("--node", "a", "--nodes", "3"), "--coordinator must be given"),
        (("--node", "a", "--nodes", "a,b", "--coordinator", "c"), "--coordinator c"),
        (("--node", "far", "--nodes", "a,far"), "198.51.100.7 is not an address of this machine"),
        (("--local", "2", "--node", "a"), "--local: goes without a file"),
    ],
)
def test_options_that_cannot_be_followed(
    start: Start, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = cluster(tmp_path, "a", "b", "c")
    tree = yaml.safe_load(file.read_text())
    tree["nodes"].append({"name": "far", "role": "store", "segment_size": "16MiB", "host": "198.51.100.7"})
    file.write_text(yaml.safe_dump(tree))
    status, out, err = start("-c", file, *arguments).end()
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_an_option_of_the_cluster_needs_its_file(start: Start) -> None:
    status, _, err = start("--node", "a").end()
    assert status == 2
    assert "--node: needs the cluster's file" in err


def test_a_port_that_is_taken_is_an_error_that_says_so(start: Start, tmp_path: Path) -> None:
    file = cluster(tmp_path, "a", "b")
    with socket.create_server(("127.0.0.1", yaml.safe_load(file.read_text())["bench"]["port"])):
        status, _, err = start("-c", file, "--node", "a", "--nodes", "a,b").end()
    assert status == 2
    assert "choose another `bench.port`" in err


@contextmanager
def connected(file: Path, hello: Message | bytes) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A peer of the coordinator that has said this, and what hears of its disconnection."""
    peer = open_socket(zmq.DEALER)
    events = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        peer.connect(f"tcp://127.0.0.1:{yaml.safe_load(file.read_text())['bench']['port']}")
        peer.send(hello if isinstance(hello, bytes) else encode_message(hello))
        yield peer, events
    finally:
        close_socket(peer)


def test_strangers_are_refused_and_the_bench_goes_on(start: Start, tmp_path: Path) -> None:
    file = cluster(tmp_path, "a", "b")
    coordinator = start("-c", file, "--node", "a", "--nodes", "a,b")
    version = pd_cache.__version__
    for said, reason in (
        (b"\xc1\xc1\xc1", "no message of a bench"),
        (End("nonsense"), "did not say who it is"),
        (ParticipantHello(PROTOCOL + 1, "echo", "b", "127.0.0.1", "9.9"), "same version"),
        (ParticipantHello(PROTOCOL, "lookup", "b", "127.0.0.1", version), "runs the bench lookup"),
        (ParticipantHello(PROTOCOL, "echo", "q", "127.0.0.1", version), "none of the participants"),
        (ParticipantHello(PROTOCOL, "echo", "a", "127.0.0.1", version), "here already"),
    ):
        with connected(file, said) as (peer, _):
            assert peer.poll(60_000)
            answer = decode_message(peer.recv())
            assert isinstance(answer, End)
            assert reason in answer.why
    with socket.create_connection(("127.0.0.1", yaml.safe_load(file.read_text())["bench"]["port"])) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        sock.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1000):  # ZMQ's greeting, and then it hangs up
                pass
    with connected(file, bytes(MAX_MESSAGE + 1)) as (_, events):
        assert events.poll(60_000), "what is too large is hung up on"
    assert start("-c", file, "--node", "b", "--nodes", "a,b").end()[0] == 0
    assert coordinator.end()[0] == 0


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """A coordinator in this process, which takes silence of half a second for the end of a participant."""
    listener = open_socket(zmq.ROUTER)
    try:
        listener.setsockopt(zmq.HEARTBEAT_IVL, 100)
        listener.setsockopt(zmq.HEARTBEAT_TIMEOUT, 500)
        listener.bind("tcp://127.0.0.1:*")
        address = str(listener.getsockopt_string(zmq.LAST_ENDPOINT))
        yield Fleet(listener, "echo", replace(Location.here(), host=address), frozenset({"a"}))
    finally:
        close_socket(listener)


def test_a_participant_that_is_stopped_is_found_out_though_its_connection_stands(fleet: Fleet, tmp_path: Path) -> None:
    file = cluster(tmp_path, "a")
    process = start_child("echo", Echo, fleet.location.host, file, "a", "127.0.0.1")
    try:
        fleet.gather(PATIENCE_S)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(FleetError, match=r"a \(127.0.0.1\): its connection ended, in the middle of leave"):
            fleet.everywhere(Echo.leave, Nothing(), timeout_s=PATIENCE_S)
    finally:
        end([process], 0, ask=False)


def test_a_participant_that_is_slow_to_read_is_not_taken_for_one_that_is_gone(fleet: Fleet) -> None:
    """What it has not read may not keep ZMQ from hearing its heartbeats."""
    location = Location("a", "127.0.0.1", fleet.location.config)
    with closing(CoordinatorLink("echo", location)) as link:
        link.join("a", lambda: fleet.location.host, PATIENCE_S, lambda _: None)
        fleet.gather(PATIENCE_S)
        (member,) = fleet._members.values()
        for _ in range(300):
            fleet._send(member, BEAT)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            fleet._turn(until)
        assert not member.lost
