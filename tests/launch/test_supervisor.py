"""The supervisor: replayed histories on a fake clock first, then real processes."""

import itertools
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from launch.run.supervise import Program, StopFlag, Supervisor, SupervisorError, stop_on_signals
from pd_cache.cluster import SupervisorConfig
from tests.support.leaks import alive
from tests.support.pool import ROOT, Process
from tests.support.waiting import PATIENCE_S, wait_for


@pytest.fixture(autouse=True)
def no_file_left_open():
    files = psutil.Process().num_fds()
    yield
    wait_for(lambda: psutil.Process().num_fds() <= files, "file descriptors closed")


# --- replayed histories -------------------------------------------------------------------------------------


class FakeProcess:
    """`events` are (seconds after the start, what happens): a line of output, or an exit status."""

    def __init__(self, world, pid, name, on_line, events):
        self.world, self.pid, self.name, self.on_line = world, pid, name, on_line
        self.events = [(world.now + delay, what) for delay, what in events]
        self.status = None
        self.stubborn = False

    def run(self):
        while self.status is None and self.events and self.events[0][0] <= self.world.now:
            _, what = self.events.pop(0)
            if isinstance(what, int):
                self.status = what
            else:
                self.on_line("stdout", what)

    def poll(self):
        return self.status

    def terminate(self):
        self.world.log.append(f"TERM {self.name}")
        if not self.stubborn:
            self.status = -signal.SIGTERM

    def kill(self):
        self.world.log.append(f"KILL {self.name}")
        self.status = -signal.SIGKILL


class World:
    """Time, and the processes that live in it."""

    def __init__(self, **histories):
        self.now = 100.0
        self.histories = histories
        self.log = []
        self.starts = []
        self.processes = {}
        self.stubborn = set()

    def sleep(self, seconds):
        self.now += seconds
        for process in list(self.processes.values()):
            process.run()

    def spawn(self, program, on_line):
        self.starts.append((program.name, round(self.now - 100, 1)))
        self.log.append(f"start {program.name}")
        history = self.histories[program.name]
        events = history.pop(0) if len(history) > 1 else history[0]
        process = FakeProcess(self, 1000 + len(self.starts), program.name, on_line, events)
        process.stubborn = program.name in self.stubborn
        self.processes[program.name] = process
        return process

    def supervisor(self, ready_timeout_s=10.0, stop_grace_s=3.0):
        settings = SupervisorConfig(ready_timeout_s=ready_timeout_s, stop_grace_s=stop_grace_s)
        clock = {"clock": lambda: self.now, "sleep": self.sleep}
        return Supervisor(settings, sink=lambda line: None, spawn=self.spawn, **clock)

    def stop_after(self, seconds):
        return FakeStop(self, self.now + seconds)


class FakeStop(StopFlag):
    def __init__(self, world, at):
        self.world, self.at = world, at

    def is_set(self):
        return self.world.now >= self.at

    def wait(self, timeout=None):
        self.world.sleep(timeout)
        return self.is_set()


def fake(name):
    return Program(name, ("unused",))


def test_a_group_starts_together_once_all_of_the_group_before_are_ready():
    world = World(
        a=[[(2, "ready a http://a:1")]], b=[[(5, "ready b")]], c=[[(2, "ready c")]], d=[[(0, "ready d")]]
    )
    with world.supervisor() as supervisor:
        assert supervisor.start([fake("a"), [fake("b"), fake("c")], [fake("d")]])
        starts = dict(world.starts)
        assert starts["a"] + 2 <= starts["b"] == starts["c"] <= starts["d"] - 5 < 2.5
        assert supervisor.ready_urls == {"a": "http://a:1", "b": "", "c": "", "d": ""}
        assert supervisor.pids == {"a": 1001, "b": 1002, "c": 1003, "d": 1004}


def test_each_start_each_ready_program_and_each_group_that_stops_is_a_line(caplog):
    world = World(a=[[(1, "ready a http://a:1"), (5, 1)], [(1, "ready a http://a:2")]], b=[[(2, "ready b")]])
    said = []
    caplog.set_level("INFO", "launch.run.supervise")
    with Supervisor(
        SupervisorConfig(), sink=said.append, spawn=world.spawn, clock=lambda: world.now, sleep=world.sleep
    ) as supervisor:
        supervisor.start([fake("a"), fake("b")])
        supervisor.wait(world.stop_after(10))
    assert said == ["ready a http://a:1", "ready b", "ready a http://a:2"]
    starts = ["starting a", "starting b", "a ended: exit status 1; starting it again in 1 s", "starting a"]
    assert [record.getMessage() for record in caplog.records] == [*starts, "stopping b", "stopping a"]


def test_stop_runs_through_the_groups_in_reverse_once_and_kills_who_ignores_it_after_the_grace():
    world = World(**{name: [[(0, f"ready {name}")]] for name in "abcd"})
    world.stubborn = {"c"}
    supervisor = world.supervisor(stop_grace_s=3.0)
    supervisor.start([[fake("a")], [fake("b"), fake("c")], [fake("d")]])
    world.log.clear()
    before = world.now
    supervisor.stop()
    supervisor.stop()
    assert world.log == ["TERM d", "TERM b", "TERM c", "KILL c", "TERM a"]
    assert 3 <= world.now - before < 3.3
    assert supervisor.pids == {}


LINES = [(1, f"line {n}") for n in range(30)]


@pytest.mark.parametrize(
    "a, b, why, tail, log",
    [
        ([(0, "ready a")], [(1, "loading")], "b: was not ready within 10 s", ["  b | loading"], ["TERM b", "TERM a"]),
        ([*LINES, (2, 3)], [], "a: ended before it was ready: exit status 3", [f"  a | line {n}" for n in range(10, 30)], []),
        ([(0, "ready a"), (2, -9)], [(5, "ready b")], "a: ended: killed by SIGKILL; it printed nothing", [], ["TERM b"]),
    ],
    ids=["not ready in time", "ended, with its last 20 lines", "a death in an earlier group"],
)  # fmt: skip
def test_a_start_that_fails_says_why_and_stops_what_was_started(a, b, why, tail, log):
    world = World(a=[a], b=[b])
    with pytest.raises(SupervisorError, match=why) as caught:
        world.supervisor(ready_timeout_s=10).start([fake("a"), fake("b"), fake("c")])
    assert str(caught.value).splitlines()[1:] == tail
    assert [line for line in world.log if not line.startswith("start")] == log


def test_start_gives_up_when_told_to_stop():
    world = World(a=[[(60, "ready a")]])
    with world.supervisor(ready_timeout_s=100) as supervisor:
        assert not supervisor.start([fake("a"), fake("b")], world.stop_after(1))
    assert world.log == ["start a", "TERM a"]


def test_restarts_back_off_up_to_30_s_and_begin_anew_after_a_steady_minute():
    crash = [(0, "ready a"), (0.1, 1)]
    world = World(
        a=[*[crash] * 7, [(0, "ready a"), (61, 1)], [(0, "ready a http://a:2")]], b=[[(0, "ready b")]]
    )
    with world.supervisor() as supervisor:
        supervisor.start([[fake("a"), fake("b")]])
        supervisor.wait(world.stop_after(0.5))
        assert (supervisor.ready_urls, set(supervisor.pids)) == ({"b": ""}, {"b"}), "the other one runs on"
        supervisor.wait(world.stop_after(300))
        assert supervisor.ready_urls == {"a": "http://a:2", "b": ""}
    starts = [at for name, at in world.starts if name == "a"]
    assert [round(after - before) for before, after in itertools.pairwise(starts)] == [
        1,
        2,
        4,
        8,
        16,
        30,
        30,
        62,
    ]


def test_a_restart_that_is_not_ready_in_time_is_killed_and_tried_again():
    world = World(a=[[(0, "ready a"), (1, 1)], [], [(0, "ready a")]])
    with world.supervisor(ready_timeout_s=10) as supervisor:
        supervisor.start([fake("a")])
        supervisor.wait(world.stop_after(20))
        assert supervisor.ready_urls == {"a": ""}
    assert world.log == ["start a", "start a", "KILL a", "start a", "TERM a"]


# --- real processes -----------------------------------------------------------------------------------------

NORMAL = "import signal\nprint('ready {name} http://127.0.0.1:1', flush=True)\nsignal.pause()"


def program(name, code, **env):
    return Program(name, (sys.executable, "-I", "-S", "-c", code.replace("{name}", name)), env or None)


def supervising(sink):
    return Supervisor(SupervisorConfig(ready_timeout_s=PATIENCE_S, stop_grace_s=20.0), sink=sink)


def test_stdout_and_stderr_are_passed_on_line_by_line_with_the_name():
    code = (
        "import os, sys\n"
        "print('to out'); print('to err', file=sys.stderr); sys.stdout.buffer.write(b'not utf-8 \\xff\\r\\n')\n"
        "print('ready a http://stderr', file=sys.stderr)\n"
        "for line in ('ready b', 'ready', 'ready a http://x extra', 'not ready a', 'readya', 'READY a'): print(line)\n"
        "print('x' * 70000)\n"
        "print(os.environ['PDC_TEST'], os.environ.get('PATH') is not None)\n"
        "print('ready a', flush=True); sys.stdin.read(); print('no end of line', end='', flush=True); import signal; signal.pause()"
    )
    lines = []
    with supervising(lines.append) as supervisor:
        supervisor.start([program("a", code, PDC_TEST="from env")])
        wait_for(lambda: "a | from env True" in lines, "output")
        assert supervisor.ready_urls == {"a": ""}
    similar = ("ready b", "ready", "ready a http://x extra", "not ready a", "readya", "READY a")
    expected = ("to out", "to err", "not utf-8 \N{REPLACEMENT CHARACTER}", "ready a http://stderr", *similar)
    assert {f"a | {line}" for line in expected} <= set(lines)  # on stderr a ready line is just a line
    assert sum(line.count("x") for line in lines if set(line[4:]) == {"x"}) == 70000
    assert lines[-1] == "a | no end of line"


def test_what_mooncake_prints_at_every_start_is_left_out_and_its_other_errors_are_not():
    said = []
    lines = (
        "WARNING: Logging before InitGoogleLogging() is written to STDERR",
        "W1 x.cpp:3] segment_name=127.0.0.1:1, warn=segment_already_exists",
        "I1 x.cpp:4] Master service started on port 1, max_threads=2, enable_metric_reporting=0",
        "E1 x.cpp:2] real",
    )
    with supervising(said.append) as supervisor:
        supervisor.start([program("a", f"print({chr(10).join(lines)!r})\n{NORMAL}")])
    assert said == ["a | E1 x.cpp:2] real", "ready a http://127.0.0.1:1"]


def test_a_program_that_does_not_exist_stops_the_others():
    for argv in ("/no/such/program", "no-such-program-in-path", str(ROOT / "pyproject.toml")):
        with pytest.raises(SupervisorError, match="b: cannot be started"):
            supervising(lambda line: None).start([program("a", NORMAL), Program("b", (argv,))])


def test_a_sink_that_fails_does_not_block_the_program():
    def sink(line):
        raise BrokenPipeError

    code = f"for n in range(20000): print('a long line of output', n)\n{NORMAL}"
    with supervising(sink) as supervisor:
        assert supervisor.start([program("a", code)])


def test_a_killed_program_is_started_again_and_what_it_leaves_behind_in_its_group_is_killed():
    lines = []
    code = "import subprocess\nprint('pid', subprocess.Popen(['sleep', '600']).pid)\n"
    with supervising(lines.append) as supervisor:
        supervisor.start([program("a", code + NORMAL)])
        first, grandchild = supervisor.pids["a"], int(lines[0].split()[-1])
        os.kill(first, signal.SIGKILL)
        stop = StopFlag()

        def noticed():
            return supervisor.pids.get("a", first) != first and "a" in supervisor.ready_urls

        watching = threading.Thread(target=lambda: (wait_for(noticed, "ready again"), stop.set()))
        watching.start()
        supervisor.wait(stop)
        watching.join()
        wait_for(lambda: not alive(grandchild), "grandchild gone")


def test_a_descendant_that_escaped_with_the_pipes_does_not_hang_the_stop():
    lines = []
    code = "import subprocess\nprint('pid', subprocess.Popen(['sleep', '600'], start_new_session=True).pid)\n"
    with supervising(lines.append) as supervisor:
        supervisor.start([program("a", code + NORMAL)])
    escaped = psutil.Process(int(lines[0].split()[-1]))
    escaped.kill()
    wait_for(lambda: not alive(escaped.pid), "escaped process gone")


# --- a supervisor in a process of its own -------------------------------------------------------------------

UP = """
import signal, sys
from launch.run.supervise import Program, Supervisor, stop_on_signals
from pd_cache.cluster import SupervisorConfig

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a parent may have left it
programs = [Program(name, (sys.executable, "-c", code)) for name, code in zip(sys.argv[1::2], sys.argv[2::2])]
with stop_on_signals() as stop, Supervisor(SupervisorConfig(stop_grace_s=30)) as supervisor:
    supervisor.start(programs, stop)
    print("up", *supervisor.pids.values(), flush=True)
    supervisor.wait(stop)
print("down", flush=True)
"""

ORDERLY = """
from launch.run.supervise import spawn_child, stop_on_signals
with stop_on_signals() as stop:
    child = spawn_child(["sleep", "600"])
    print("pid", child.pid, flush=True)
    print("ready {name}", flush=True)
    stop.wait()
    child.terminate(); child.wait()
    print("orderly", flush=True)
"""


class Up(Process):
    """`UP` as a process. What its programs print comes on stderr."""

    def __init__(self, programs):
        argv = [part for name, code in programs.items() for part in (name, code.replace("{name}", name))]
        super().__init__("up", [sys.executable, "-c", UP, *argv])

    def __enter__(self):
        self.said.wait(PATIENCE_S)
        assert self.lines[0].startswith("up "), self.errors
        return self

    def __exit__(self, *raised):
        super().__exit__(*raised)
        for pid in self.pids():
            wait_for(lambda pid=pid: not alive(pid), f"{pid} gone")

    def pids(self):
        """Children and grandchildren."""
        told = [line.split("| pid ")[1] for line in self.errors if "| pid " in line]
        up = [line.split()[1:] for line in self.lines if line.startswith("up ")]
        return [int(pid) for pid in [*told, *(pid for pids in up for pid in pids)]]


@pytest.mark.parametrize("end", ["SIGHUP", "Ctrl-C at the terminal", "SIGKILL"])
def test_however_a_supervisor_ends_its_programs_end_in_order_and_nothing_is_left(end):
    with Up({"a": ORDERLY, "b": ORDERLY}) as up:
        everyone = psutil.Process(up.process.pid).children(recursive=True)
        assert len(everyone) == 4  # two programs and their children
        if end.startswith("Ctrl"):
            os.killpg(up.process.pid, signal.SIGINT)  # it reaches the supervisor alone
        else:
            up.process.send_signal(signal.Signals[end])
        status = up.process.wait(PATIENCE_S)
        wait_for(lambda: not any(alive(one.pid) for one in everyone), "everyone gone")
        if end != "SIGKILL":  # then the kernel asks the programs to stop
            assert status == 0
            wait_for(lambda: "down" in up.lines, "its last line")
            up.kill()  # so that all of its output has been read
            assert [line.strip() for line in up.errors if "orderly" in line] == ["b | orderly", "a | orderly"]
            assert not any("KeyboardInterrupt" in line for line in up.errors)


# --- children and signals -----------------------------------------------------------------------------------


def test_a_parent_that_died_before_the_tether_held_means_no_start(tmp_path):
    script = ROOT / "launch" / "run" / "_tethered.py"
    stranger = "1" if os.getpid() != 1 else "2"
    command = [
        sys.executable,
        "-I",
        "-S",
        str(script),
        stranger,
        "15",
        "/bin/touch",
        "touch",
        str(tmp_path / "ran"),
    ]
    assert subprocess.run(command, timeout=PATIENCE_S).returncode == 128 + 15
    assert not (tmp_path / "ran").exists()


def test_stop_on_signals_gives_the_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert not stop.wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(PATIENCE_S)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_does_not_end_the_wait_of_the_main_thread_is_noticed_all_the_same():
    """As when it comes just before the wait begins: Python's handler runs only after the wait."""
    code = (
        "import signal, threading\n"
        "from launch.run.supervise import stop_on_signals\n"
        "def elsewhere(): signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "with stop_on_signals() as stop:\n"
        "    threading.Timer(0.1, elsewhere).start()\n"
        "    assert stop.wait()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE_S, check=True)
