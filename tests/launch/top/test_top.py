"""`pd-cache top` asks real servers: one that answers, one that hangs, one that is not there."""

from __future__ import annotations

import http.server
import itertools
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from launch.access import NOBODY
from launch.cli import main
from launch.process import end, spawn_child
from launch.top.asker import Asker, NodeAnswer, ask_node, is_asked
from pd_cache.cluster import NodeRecord
from tests.support.pool import free_port
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


class _Answers(http.server.BaseHTTPRequestHandler):
    asked = itertools.count()

    def do_GET(self) -> None:
        number = next(self.asked)
        body = f'pd_cache_bytes_total{{op="retrieve"}} {number * 1_000_000}\n'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def well() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def mute() -> Iterator[int]:
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield server.getsockname()[1]


def record(name: str, port: int) -> NodeRecord:
    return NodeRecord(name=name, role="decode", address=f"http://127.0.0.1:{port}")


def test_an_answer_is_read_and_a_missing_one_says_why(well: int) -> None:
    answer = ask_node(record("a", well), NOBODY, lambda: 7.0)
    assert answer.reading is not None
    assert answer.reading.at == 7.0
    assert ask_node(record("b", free_port()), NOBODY).why == "Connection refused"
    assert "chosen by `up`" in ask_node(record("c", 0), NOBODY).why


def test_a_store_is_asked_where_it_answers(well: int) -> None:
    store = NodeRecord(name="s", role="store", address="127.0.0.1:12345")
    assert not is_asked(store)
    store = msgspec.structs.replace(store, metrics=f"http://127.0.0.1:{well}")
    assert is_asked(store)
    assert ask_node(store, NOBODY).reading is not None


def test_many_nodes_that_hang_delay_none_that_answers(well: int, mute: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first round the silent ones have threads of their own: forty of them take all of these, again and again."""
    monkeypatch.setattr("launch.top.asker.TIMEOUT_S", 0.2)
    monkeypatch.setattr("launch.top.asker._LONGEST_PAUSE_S", 0.0)
    records = [record("well", well), *(record(f"mute{number}", mute) for number in range(40))]
    asker = Asker(NOBODY, 0.05)
    answers: list[NodeAnswer] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while sum(one.name == "well" for one in answers) < 20:
            assert time.monotonic() < deadline
            answers += asker.poll(records, time.monotonic())
            time.sleep(0.01)
    finally:
        asker.close()
    assert all(one.reading is not None for one in answers if one.name == "well")
    assert {one.why for one in answers if one.name != "well"} <= {"no whole answer within 0.2 s", "timed out"}


def test_a_node_that_is_asked_is_not_asked_again_meanwhile_and_a_silent_one_less_often() -> None:
    asker = Asker(NOBODY, 2.0)
    asked: list[str] = []
    asker._ask = lambda record: asked.append(record.name)  # type: ignore[method-assign]
    nodes = [record("a", 1)]
    try:
        for now in (0.0, 1.0, 50.0):
            asker.poll(nodes, now)
        for threads in (asker._well, asker._silent):
            threads.submit(lambda: None).result()
        assert asked == ["a"]
        for now, expected in ((50.0, 1), (53.9, 1), (54.0, 2), (54.0, 2)):
            if now == 50.0:
                asker._answers.put(NodeAnswer("a", now, None, "refused"))
            asker.poll(nodes, now)
            for threads in (asker._well, asker._silent):
                threads.submit(lambda: None).result()
            assert len(asked) == expected
    finally:
        asker.close()


@pytest.fixture
def file(tmp_path: Path, well: int, mute: int) -> Path:
    nodes = [
        {"name": "master", "role": "master", "host": "127.0.0.1", "port": free_port(), "metrics_port": free_port()},
        {"name": "prefill-0", "role": "prefill", "host": "127.0.0.1", "port": well},
        {"name": "decode-0", "role": "decode", "host": "127.0.0.1", "port": mute},
        {"name": "decode-1", "role": "decode", "host": "127.0.0.1", "port": free_port()},
    ]
    engine = {"kind": "reference", "model": {"name": "tiny", "random": {"seed": 1}}}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"name": "watched", "engine": engine, "nodes": nodes}))
    return path


def command(file: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "launch", "top", "-c", str(file), "--interval", "0.5", *options]


def test_where_the_output_is_no_terminal_one_plain_table_is_printed(file: Path) -> None:
    done = subprocess.run(command(file), capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("4 nodes, 3 silent")
    rows = {line.split()[0]: line for line in lines[2:]}
    assert "up" in rows["prefill-0"].split()
    assert "M" in rows["prefill-0"], "its rate"
    assert "silent" in rows["decode-0"].split()
    assert "refused" in rows["decode-1"]
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("seconds", ["nan", "0.1", "60"])
def test_an_interval_that_shows_no_rates_of_a_minute_is_refused(file: Path, seconds: str) -> None:
    done = CliRunner().invoke(main, ["top", "-c", str(file), "--once", "--interval", seconds])
    assert done.exit_code == 2
    assert "--interval" in done.output


def test_a_terminal_that_cannot_move_its_cursor_or_has_no_bars_gets_one_table(file: Path) -> None:
    ours, theirs = pty.openpty()
    odd = {"TERM": "dumb", "COLUMNS": "100", "PYTHONIOENCODING": "ascii:strict"}
    process = spawn_child(
        command(file), death_signal=signal.SIGKILL, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env={**os.environ, **odd}
    )  # fmt: skip
    shown = b""
    try:
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None or select.select([ours], [], [], 0.1)[0]:
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536)
        assert process.returncode == 0, shown
        assert b"prefill-0" in shown
        assert b"?" in shown, "its trend"
        assert b"\x1b" not in shown
    finally:
        end([process], 5.0)
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("ending", ["q", "ctrl-c", "sigterm"])
def test_in_a_terminal_it_follows_until_it_is_told_to_end_and_restores_the_terminal(file: Path, ending: str) -> None:
    ours, theirs = pty.openpty()

    mode = termios.tcgetattr(theirs)
    process = spawn_child(
        command(file), death_signal=signal.SIGKILL, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )  # fmt: skip
    shown = b""
    try:
        deadline = time.monotonic() + PATIENCE_S
        while b"decode-0" not in shown or b"MB/s" not in shown:
            assert time.monotonic() < deadline, shown[-2000:]
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536)
        if ending == "sigterm":
            process.send_signal(signal.SIGTERM)
        elif ending == "ctrl-c":
            process.send_signal(signal.SIGINT)
        else:
            os.write(ours, b"jsq")
        while process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536)
        while select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 65536)
        assert process.returncode == (128 + signal.SIGTERM if ending == "sigterm" else 0), shown[-2000:]
        assert termios.tcgetattr(theirs) == mode
        assert b"\x1b[?1049l" in shown, "the screen from before is back"
        assert b"Traceback" not in shown

    finally:
        end([process], 5.0)
        os.close(ours)
        os.close(theirs)
