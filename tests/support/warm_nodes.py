"""Nodes without the seconds of processor time that importing torch takes: forks of one process, the nursery,
that has imported it.

That import, in each prefill node, decode node and cache server, would be a quarter of what the test suite
costs. `warm_nodes` makes `launch.run.supervise` fork these nodes if a test starts them from its own process.
A `pd-cache up` in a process of its own starts its nodes as usual. Other roles, which start in half a second,
are forked only if there is a nursery already. A forked node is a child of the test like any other: it has a
pid of its own, which can be stopped, killed and waited for, it ends with the test, and its streams,
environment, folder, session and signals are what they would be.
"""

import contextlib
import gc
import importlib
import inspect
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import launch.run.supervise
from launch.run import _tethered

ROOT = Path(__file__).resolve().parents[2]
_TETHER = [sys.executable, "-I", "-S", str(Path(_tethered.__file__).resolve())]
_NODE = [sys.executable, "-m", "launch", "launch"]
_ON_HOST = ["ip", "netns", "exec"]
_NEED_TORCH = ("prefill", "decode", "both", "cache-server")
_START_S = 300.0
_SET_CHILD_SUBREAPER = 36
_NEW_NETWORK = 0x4000_0000
_signature = inspect.signature(subprocess.Popen._execute_child)


class _Nursery:
    """The process that has imported torch, started when the first node is."""

    def __init__(self):
        self._lock = threading.Lock()
        self._ours = None
        self._process = None

    @property
    def pid(self):
        """None if it has not been started."""
        return self._process and self._process.pid

    def fork(self, job, streams):
        """Returns the pid of a new child of this process. RuntimeError if the nursery is gone."""
        with self._lock, self._connected() as connection, _adopting():
            message = json.dumps(job).encode()
            socket.send_fds(connection, [len(message).to_bytes(4, "big")], list(streams))
            connection.sendall(message)
            answer = connection.recv(4, socket.MSG_WAITALL)
            if len(answer) < 4:
                raise RuntimeError("the process that nodes are forks of is gone")
            return int.from_bytes(answer, "big")

    @contextlib.contextmanager
    def _connected(self):
        if self._ours is None:
            self._ours, theirs = socket.socketpair()
            self._ours.settimeout(_START_S)
            with theirs:
                self._process = subprocess.Popen(  # ends when our side is closed, at the latest with us
                    [sys.executable, "-m", "tests.support.warm_nodes", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        yield self._ours

    def close(self):
        if self._ours is not None and self._process is not None:
            self._ours.close()
            self._process.wait(60)
            self._ours = self._process = None


nursery = _Nursery()


@contextlib.contextmanager
def _adopting():
    """In this block, a descendant of this process that loses its parent becomes its child."""
    prctl = _tethered.ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class _Popen(subprocess.Popen[bytes]):
    """The same as its base, but a node is forked."""

    def _execute_child(self, *args, **kwargs):
        given = _signature.bind(self, *args, **kwargs).arguments
        words = list(given["args"])
        # PYTHON -I -S TETHER PARENT SIGNAL FILE [ip netns exec HOST] PYTHON -m launch launch ROLE …
        host, command = ("", words[7:]) if words[7:10] != _ON_HOST else (words[10], words[11:])
        if words[:4] != _TETHER or command[:4] != _NODE or not (command[4] in _NEED_TORCH or nursery.pid):
            super()._execute_child(*args, **kwargs)
            return
        env = os.environ if given["env"] is None else given["env"]
        job = {
            "argv": command[3:],
            "host": host,
            "parent": os.getpid(),
            "death_signal": int(words[5]),
            "env": dict(env),
            "cwd": str(given["cwd"] or os.getcwd()),
            "session": given["start_new_session"],
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        pipes = [
            given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        streams = [
            number if theirs == -1 else theirs for number, theirs in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        try:
            self.pid = nursery.fork(job, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)


@contextlib.contextmanager
def warm_nodes():
    """Within this block, nodes are forks, where the kernel and Python's `subprocess` are as this file expects
    them."""
    if sys.platform != "linux":
        yield
        return
    usual = launch.run.supervise.subprocess
    launch.run.supervise.subprocess = SimpleNamespace(**{**vars(usual), "Popen": _Popen})
    try:
        yield
    finally:
        launch.run.supervise.subprocess = usual
        nursery.close()


# --- in the process that has imported torch -----------------------------------------------------------------


def _next_job(connection):
    """Forks a node for each job. Returns only in a node's process: its job."""
    while True:
        head, streams, _, _ = socket.recv_fds(connection, 4, 3)
        if len(head) < 4:
            os._exit(0)  # the tests are over
        job = json.loads(connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        if (between := os.fork()) == 0:
            if os.fork():
                os._exit(0)  # so that the node is an orphan, and the tests adopt it
            become(job, streams)
            connection.sendall(os.getpid().to_bytes(4, "big"))
            connection.close()
            return job
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)


def become(job, streams):
    """Does what the kernel and `launch/run/_tethered.py` do for a new program, in a fork that is to be a
    child of `parent`."""
    while os.getppid() != job["parent"]:
        time.sleep(0.0005)  # the process between is not gone yet
    _tethered.set_death_signal(job["death_signal"])
    if os.getppid() != job["parent"]:
        os._exit(1)
    if job.get("host"):
        with open(f"/run/netns/{job['host']}") as namespace:
            if _tethered.ctypes.CDLL(None).setns(namespace.fileno(), _NEW_NETWORK):
                os._exit(1)
    if job.get("session"):
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, job.get("blocked", ()))
    # new ones: those of the nursery remember whether its own streams could seek
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.stdout.reconfigure(write_through=bool(job["env"].get("PYTHONUNBUFFERED")))
    sys.stderr.reconfigure(write_through=True)
    random.seed()


_IMPORTED = (
    "launch.proxy.app",
    "launch.run.roles.cache_server",
    "launch.run.roles.master",
    "launch.run.roles.proxy",
    "launch.run.roles.reference",
    "launch.run.roles.store",
    "pd_cache.server.server",
)


def _serve(number):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the tests
    from launch.cli import main

    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a node would copy all pages that it shares with the others
    job = _next_job(socket.socket(fileno=number))
    main(job["argv"], prog_name="pd-cache")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
