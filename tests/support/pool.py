"""A real Mooncake pool for tests: a master and store nodes, each a process started as `pd-cache launch
ROLE`."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import psutil
import yaml

from launch.run.supervise import end, spawn_child
from pd_cache.config import CacheConfig, NodeSettings
from tests.support.waiting import wait_for
from transfer.settings import TransferSettings
from transfer.store import load_mooncake

ROOT = Path(__file__).resolve().parents[2]


PATIENT = {"exist_ms": 10_000, "get_ms": 20_000, "put_ms": 20_000}
"""Deadlines of transfers that are to succeed: no machine is so busy that it misses them. Outages in tests
have shorter ones."""
_PORTS = 2000
"""Of each worker of a parallel run, from 20000 on: those of six workers are below the kernel's own choices,
and above Mooncake's."""
_next_port = itertools.count()


def suspend(process):
    """Stops a process, and returns once none of its threads runs."""
    process.suspend()
    wait_for(lambda: _is_stopped(process.pid), f"{process} has stopped")


def _is_stopped(pid):
    """Returns whether no thread runs. After SIGSTOP, those that have work go on until one of them has taken
    the signal."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0]
            for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        return all(state in "TtZX" for state in states)
    return False


def free_port():
    """A port that nobody has, and that nobody else will be given: what was stopped finds it free when it is
    started again."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for _ in range(_PORTS):
        port = 20_000 + worker * _PORTS + next(_next_port) % _PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Process:
    """A program of ours, whose output is read."""

    def __init__(self, name, command):
        self.name = name
        self.process = spawn_child(
            command,
            death_signal=signal.SIGTERM,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "MC_LOG_LEVEL": "ERROR"},
        )
        self.errors = []
        """The last lines of stderr."""
        self.lines = []
        """All lines of stdout so far, without their ends."""
        self.said = threading.Event()
        """Set when there is the first, or will be none."""
        self.readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_out, self._read_errors)
        ]
        for reader in self.readers:
            reader.start()

    def _read_out(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode().rstrip("\n"))
            self.said.set()
        self.said.set()

    def _read_errors(self):
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.decode())
            del self.errors[:-200]

    def send(self, number):
        if number is signal.SIGSTOP:
            suspend(psutil.Process(self.process.pid))
        else:
            self.process.send_signal(number)

    @contextlib.contextmanager
    def stopped(self):
        """Stands still while the block runs."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def wait_for(self, condition, what):
        """Waits as the function of this name; AssertionError, too, if the process ends and it is not so."""
        wait_for(lambda: condition() or self.process.poll() is not None, what)
        if self.process.poll() is not None:
            for reader in self.readers:
                reader.join(60)  # what it said last counts
            assert condition(), f"{self.name} ended with {self.process.poll()}, not: {what}"

    def stop(self, number=signal.SIGTERM, timeout=90.0):
        """Send the signal, wait for the end, and return the exit status."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.send_signal(number)
        try:
            assert not end([self.process], timeout, ask=False), f"{self.name} did not end within {timeout} s"
        finally:
            for reader in self.readers:
                reader.join(60)
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()
        return self.process.returncode

    def kill(self):
        self.stop(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, _, error, __):
        """A test that fails shows what the process printed."""
        self.kill()
        if error is not None:
            error.add_note(f"{self.name} printed {self.lines}, and:\n{''.join(self.errors)[-4000:]}")


class Node(Process):
    """One role in a process of its own; ready when the constructor returns, or with `wait` false when
    `wait_ready` does."""

    def __init__(self, role, name, file, *, wait=True, host=None):
        self.role, self.address = role, ""
        # with it, a pool of another version of Mooncake
        python = os.environ.get("POOL_PYTHON", sys.executable)
        command = (python, "-m", "launch", "launch", role, "-c", str(file), "--node", name)
        super().__init__(name, command if host is None else host.inside(*command))
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout=180.0):
        """AssertionError, with the last lines that it printed, if it does not get ready."""
        self.said.wait(timeout)
        line = self.lines[0] if self.lines else ""
        if not line.startswith("ready "):
            self.kill()
            raise AssertionError(f"{self.role} {self.name} did not get ready: {''.join(self.errors)[-4000:]}")
        self.address = [*line.split(), ""][2]

    def __exit__(self, *raised):
        self.stop()
        super().__exit__(*raised)


class Pool:
    """A master and its store nodes, on ports of their own."""

    def __init__(
        self,
        folder,
        *,
        segment="64MiB",
        client_ttl_s=2,
        metadata="P2PHANDSHAKE",
        lease_ttl_ms=30000,
        **master,
    ):
        """Nothing is started yet. Further options are keys of the master."""
        self.port = free_port()
        self.metrics_port = free_port()
        self.file = folder / f"pool-{self.port}.yaml"
        self.master = {
            "name": "master", "role": "master", "port": self.port, "metrics_port": self.metrics_port,
            "client_ttl_s": client_ttl_s, "lease_ttl_ms": lease_ttl_ms, **master,
        }  # fmt: skip
        """As the files of other nodes have it."""
        self.store_ports = [free_port(), free_port()]
        stores = [
            {"name": f"store-{index}", "role": "store", "segment_size": segment, "port": port}
            for index, port in enumerate(self.store_ports)
        ]
        transfer = {"metadata": metadata, "timeouts": {"get_ms": lease_ttl_ms, "put_ms": lease_ttl_ms}}
        self.file.write_text(yaml.safe_dump({"transfer": transfer, "nodes": [self.master, *stores]}))
        self.nodes = {}

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def metrics(self):
        """Where the master's HTTP service is."""
        return f"http://127.0.0.1:{self.metrics_port}"

    def segment(self, store):
        """The name of a store node's segment."""
        return f"127.0.0.1:{self.store_ports[store]}"

    def ask(self, path):
        """What the master's HTTP service answers."""
        with urllib.request.urlopen(self.metrics + path, timeout=60) as page:
            return page.read().decode()

    def keys(self):
        """The keys of all chunks in the pool."""
        return {key for key in self.ask("/get_all_keys").split() if not key.endswith("/manifest")}

    @contextlib.contextmanager
    def bare_client(self):
        """Mooncake itself: what plants bad data, and takes away good, behind pd-cache's back."""
        client = load_mooncake().MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", self.address) == 0
        try:
            yield client
        finally:
            client.close()

    def damage(self, *keys):
        """Flips a bit in the middle of each of these objects."""
        with self.bare_client() as client:
            for key in keys:
                value = bytearray(client.get(key))
                value[len(value) // 2] ^= 1
                assert (client.remove(key, True), client.put(key, bytes(value))) == (0, 0)

    def remove(self, *keys):
        """Takes objects away, leased or not."""
        with self.bare_client() as client:
            assert not any(client.remove(key, True) for key in keys)

    @property
    def evicted(self):
        """How many objects the master has evicted since it started."""
        match = re.search(r"^master_evicted_key_count (\d+)", self.ask("/metrics"), re.MULTILINE)
        assert match is not None
        return int(match[1])

    def used(self, store):
        """Bytes that objects take of a store node's segment."""
        match = re.search(
            r"Used\(bytes\)\s*:\s*(\d+)", self.ask(f"/query_segment?segment={self.segment(store)}")
        )
        assert match is not None
        return int(match[1])

    def start(self, *names):
        """Start the named nodes; `master` and `store-0` if none is named."""
        for name in names or ("master", "store-0"):
            self.nodes[name] = Node(name.split("-")[0], name, self.file)
        return self

    def stop(self, *names):
        for name in names or tuple(reversed(self.nodes)):
            self.nodes.pop(name).stop()

    def kill(self, name):
        self.nodes.pop(name).kill()

    def end(self):
        """Kill whatever still runs, children too: nobody tidies up."""
        for node in self.nodes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(node.process.pid).children():
                    child.kill()
            node.kill()
        self.nodes.clear()

    def settings(self, cache=None, transfer=None, segment_size=0):
        """What a client of this pool needs, with small buffers, and with `PATIENT` deadlines unless told
        otherwise."""
        import msgspec

        from transfer.settings import decode_custom

        options = {"staging_size": "16MiB", "prefault": False, "timeouts": PATIENT, **(transfer or {})}
        return NodeSettings(
            master=self.address,
            cache=cache or CacheConfig(),
            transfer=msgspec.convert(options, TransferSettings, dec_hook=decode_custom),
            segment_size=segment_size,
        )
