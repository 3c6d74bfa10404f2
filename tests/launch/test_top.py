"""`pd-cache top`: its table at any width, and the command in terminals, pipes and without either."""

import io
import os
import pty
import select
import signal
import termios
import time

import pytest
from rich.console import Console

from launch.discovery import View
from launch.masters import Segment
from launch.operate.top import plain, seconds, short
from launch.run.supervise import end, spawn_child
from launch.watch.figures import NodeReading
from launch.watch.state import NodeStatus, WatchedNodes
from pd_cache.cluster import NodeRecord
from tests.support.cli import cli, cli_json, program, run_program
from tests.support.cluster import cluster_file
from tests.support.pool import ROOT, free_port
from tests.support.waiting import PATIENCE_S

ROLES = ("proxy", "prefill", "decode", "cache-server", "store", "master")


def cluster(long=False):
    """A cluster with something in every column, and a node that is down."""
    watched = WatchedNodes()
    tail = "-with-a-name-that-is-longer-than-any-column" * long
    records = [
        NodeRecord(
            name=f"n{number}{tail}", role=ROLES[number % 6], address="http://h:1" if number % 6 < 4 else "h:1",
            metrics="http://h:2" if number % 6 == 5 else None,
        )
        for number in range(12)
    ]  # fmt: skip
    watched.update(View(tuple(records)))
    for at in (0.0, 2.0, 4.0):
        reading = NodeReading(
            at=at,
            counts={
                ("bytes", "retrieve"): 1e9 * at, ("bytes", "store"): 1e6 * at, ("lookups", ""): 1e5 * at,
                ("tokens", "at_hand"): 10 * at, ("tokens", "loaded"): 70 * at, ("tokens", "computed"): 20 * at,
                ("evictions", ""): 9 * at,
                ("missed", "never_stored"): 20 * at, ("missed", "lease_expired"): at,
                **{(timing, le): times * at for timing in ("lookup", "first token", "retrieve") for le, times in (("0.001", 5), ("inf", 6))},
            },
            queued=3, running=128, staging=1e9, staging_used=3e8, pool_up=True, tier_bytes={"memory": 1e9},
        )  # fmt: skip
        leading = {"leads": "leader", "segments": (Segment("h:1", 1 << 30, "", 1 << 29),)}
        watched.take(
            NodeStatus(
                record=record, at=at, reading=reading, **leading if record.name.startswith("n5") else {}
            )
            for record in records[:7] + records[8:]
        )
    watched.take(
        NodeStatus(record=one, at=4.0, state="down", why="Connection refused\\x1b[2J" + "x" * 300)
        for one in records[7:8]
    )
    return watched.status(5.0)


def shown(status, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(plain(status, "name", width))
    return captured.get().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [1, 80, 200])
def test_the_table_fits_any_terminal(width):
    assert all(len(line) <= width for line in shown(cluster(long=True), width))


def test_no_nodes_are_no_trouble():
    assert shown(WatchedNodes().status(0.0), 80)[0].startswith("0 nodes")


def test_at_80_columns_there_is_what_matters_most_and_at_200_everything():
    narrow, wide = (" ".join(shown(cluster(), width)) for width in (80, 200))
    for title in ("node", "state", "hit", "load/s", "store/s", "look/s", "p50   p99", "queue"):
        assert title in narrow
    for title in ("role", "staging", "evict/s", "why computed"):
        assert title in wide
        assert title not in narrow


def test_the_figures_of_a_node_are_in_its_row_and_why_it_is_down():
    rows = {line.split()[0]: line for line in shown(cluster(), 200) if line.strip()}
    for text in (
        "prefill",
        "up",
        "70%",
        "30%",
        "1.0G",
        "1.0M",
        "100k",
        "3+128",
        "never_stored",
    ):
        assert text in rows["n1"]
    assert "down: Connection refused" in rows["n7"]
    assert "\x1b[2J" not in rows["n7"]


@pytest.mark.parametrize(
    "show, value, text",
    [
        (short, 0, "0"), (short, 0.25, "0.2"), (short, 999, "999"), (short, 123456, "123k"), (short, 1e30, "huge"),
        (seconds, 0.00095, "950µs"), (seconds, 0.0123, "12ms"), (seconds, 0.9996, "1.0s"), (seconds, 3000.0, "3000s"),
    ],
)  # fmt: skip
def test_numbers_and_durations_are_short(show, value, text):
    assert show(value) == text


# --- the command ---


@pytest.fixture
def file(tmp_path, well, mute):
    nodes = [
        {
            "name": "master",
            "role": "master",
            "host": "127.0.0.1",
            "port": free_port(),
            "metrics_port": free_port(),
        },
        {"name": "prefill-0", "role": "prefill", "host": "127.0.0.1", "port": well},
        {"name": "decode-0", "role": "decode", "host": "127.0.0.1", "port": mute},
        {"name": "decode-1", "role": "decode", "host": "127.0.0.1", "port": free_port()},
    ]
    return cluster_file(tmp_path, nodes=nodes)


def test_where_the_output_is_no_terminal_one_plain_table_is_printed(file):
    done = run_program("top", "-c", file, "--interval", "0.5", COLUMNS="200")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("4 nodes, 3 down, the master does not lead ")
    rows = {line.split()[0]: line for line in lines[1:]}
    assert "up" in rows["prefill-0"].split()
    assert rows["prefill-0"].split()[3][-1] in "kM", "its rate"
    assert "down: " in rows["decode-0"]
    assert "refused" in rows["decode-1"]
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    nodes = {node["name"]: node for node in cli_json("top", "-c", file, "--interval", "0.5")["nodes"]}
    assert (nodes["prefill-0"]["state"], nodes["decode-0"]["state"]) == ("up", "down")
    assert nodes["prefill-0"]["load"] > 0


@pytest.mark.parametrize("seconds", ["0.1", "60"])
def test_an_interval_that_shows_no_rates_of_a_minute_is_refused(file, seconds):
    assert "--interval" in cli("top", "-c", file, "--once", "--interval", seconds, code=2).output


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, file, **environment):
        self.ours, theirs = pty.openpty()
        self.mode = termios.tcgetattr(theirs)
        self.process = spawn_child(
            program("top", "-c", file, "--interval", "0.5"), death_signal=signal.SIGKILL, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
            env={**os.environ, "COLUMNS": "100", "LINES": "30", **environment},
        )  # fmt: skip
        self.theirs = theirs
        self.shown = b""

    def __enter__(self):
        return self

    def until(self, over):
        """Reads what is shown until something is so, and then the rest."""
        deadline = time.monotonic() + PATIENCE_S
        while select.select([self.ours], [], [], 0.1)[0] or not over():
            assert time.monotonic() < deadline, self.shown[-2000:]
            if select.select([self.ours], [], [], 0.1)[0]:
                self.shown += os.read(self.ours, 65536)

    def __exit__(self, *_):
        end([self.process], 5.0)
        os.close(self.ours)
        os.close(self.theirs)


def test_a_terminal_that_cannot_move_its_cursor_or_has_no_bars_gets_one_table(file):
    with Terminal(file, TERM="dumb", PYTHONIOENCODING="ascii:strict") as terminal:
        terminal.until(lambda: terminal.process.poll() is not None)
        assert terminal.process.returncode == 0, terminal.shown
    assert b"prefill-0" in terminal.shown
    assert b"\x1b" not in terminal.shown


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, b"xq"])
def test_in_a_terminal_it_follows_until_it_is_told_to_end_and_restores_the_terminal(file, ending):
    with Terminal(file, TERM="xterm-256color") as terminal:
        terminal.until(lambda: b"decode-0" in terminal.shown and b"MB/s" in terminal.shown)
        if isinstance(ending, bytes):
            os.write(terminal.ours, ending)
        else:
            terminal.process.send_signal(ending)
        terminal.until(lambda: terminal.process.poll() is not None)
        assert terminal.process.returncode == 0, terminal.shown[-2000:]
        assert termios.tcgetattr(terminal.theirs) == terminal.mode
    assert b"\x1b[?1049l" in terminal.shown, "the screen from before is back"
    assert b"Traceback" not in terminal.shown
