"""The nodes of a soak: hosts with links of their own, the YAML file, the processes, and what they hold.

A soak runs as the first process of namespaces of its own (`isolate`). However it ends, the kernel ends what
it has started and removes its links, mounts and shared memory. What is found there at its end was left by the
soak.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.soak.oracle import CHUNK, VOCABULARY
from tests.support.gateway import command as envoy
from tests.support.gateway import picker_at
from tests.support.hosts import Network

STORES = ("store-0", "store-1")
MODEL = "soak@1"
"""What identifies the weights of the engines."""
ENGINES = ("engine-a", "engine-b")
"""`engine-a` has a cache of its own with a local tier, a disk and the pool; `engine-b` goes through the cache
server."""
BOTH = ("both-0", "both-1", "both-2")
"""They prefill and decode by turns (`proxy.roles.auto`)."""
HOSTS = {
    "control": ("master", "proxy"),
    "gateway": ("envoy",),
    "cache": ("cache", "engine-b"),
    **{name: (name,) for name in ("etcd", *STORES, "engine-a", *BOTH)},
}
"""Which nodes run on which host."""
NODES = ("etcd", "master", *STORES, "cache", *ENGINES, *BOTH, "proxy", "envoy")
"""In the order in which they are ended, from the last to the first."""
LINK = "20gbit"
"""The rate of each host's link in each direction."""
SEGMENT, SMALL_SEGMENT = "192MiB", "24MiB"
DISK_CAPACITY, DISK_BYTES = 24 << 20, 32 << 20
"""Of the disk tier, and of its file system."""
REQUEST_S = 20.0
"""The proxy's `request_timeout_s`."""
FACES = {"proxy": ("control", REQUEST_S), "envoy": ("gateway", REQUEST_S + 5.0)}
"""What clients talk to, by node: its host, and how long an answer may take. Envoy asks the proxy's picker,
and ends a request whose picker hangs."""
LONGEST_MS = 20_000
"""The file's limit for a transfer, and the length of a lease. Operations have deadlines of their own, most of
them shorter."""
_READY_S, _BACKOFF_S, _KILLED_S = 90.0, 1.0, 15.0
_PORTS = {name: 21_001 + index for index, name in enumerate(("master", *STORES, *BOTH, "proxy", "envoy", "picker", "etcd", "metrics", "scraped", "members"))}  # fmt: skip
_RUNTIME = Path("/run")
_SHARED_MEMORY = Path("/dev/shm")
_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child=SIGKILL", "--mount-proc")


def isolate(module, *arguments):
    """Replaces this process by one that runs `python -m MODULE ARGUMENTS` in namespaces of its own, and ends
    it when it ends."""
    os.execvp("unshare", [*_UNSHARE, sys.executable, "-m", module, *arguments])


def enter():
    """Makes the new namespaces fit for a soak. Returns an empty folder in memory, which holds an empty file
    system `disk`."""
    for folder, mode in ((_RUNTIME, "0700"), (_SHARED_MEMORY, "1777")):
        _run("mount", "-t", "tmpfs", "-o", f"mode={mode}", "pd-cache-soak", str(folder))
    # ports are those of the run before, whose sockets and notes would be taken for this run's
    os.environ["XDG_RUNTIME_DIR"] = str(_RUNTIME)
    _run("ip", "link", "set", "lo", "up")
    folder = _SHARED_MEMORY / "soak"
    (folder / "disk").mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "pd-cache-soak-disk", str(folder / "disk"))
    return folder


class Node:
    """One node's process, which is started again when it ends. For the thread that made it."""

    def __init__(self, name, host, command, log, events):
        """Nothing is started yet. `command` returns the command of the n-th start; `events` takes the JSON
        lines that it prints."""
        self.name, self.host, self.starts = name, host, 0
        self._command, self._log, self._events = command, log, events
        self.process = None
        self.stopped = False
        self.died = []
        """How it ended each time it ended by itself."""
        self.failed_starts = 0
        self._ready = threading.Event()
        self._reader = None
        self._start_at = self._started = 0.0

    @property
    def pid(self):
        process = self.process
        return None if process is None or process.poll() is not None else process.pid

    @property
    def ready(self):
        """Whether it runs and has announced that it can be used."""
        if self.name in ("etcd", "envoy") and not self._ready.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self.host.address, _PORTS[self.name]), 0.2),
            ):
                self._ready.set()
        return self.pid is not None and not self.stopped and self._ready.is_set()

    def start(self):
        self._ready = threading.Event()
        with self._log.open("ab") as log:
            log.write(f"--- started {time.time():.3f}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                self.host.inside(*self._command(self.starts)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env={**os.environ, "MC_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
            )  # fmt: skip
        self.starts += 1
        self._started = time.monotonic()
        arguments = (self.process.stdout, self._ready)
        self._reader = threading.Thread(
            target=self._read, args=arguments, name=f"read-{self.name}", daemon=True
        )
        self._reader.start()

    def tell(self, **command):
        """Sends a line of JSON to its stdin. Does nothing if the process is gone."""
        if (process := self.process) is not None:
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write(json.dumps(command).encode() + b"\n")
                process.stdin.flush()

    def kill(self, seconds):
        """SIGKILL; it is started again after this time."""
        if self.process is not None:
            self._send(signal.SIGKILL)
            self._end()
        self._start_at = time.monotonic() + seconds

    def pause(self):
        self.stopped = True
        self._send(signal.SIGSTOP)

    def resume(self):
        self._send(signal.SIGCONT)
        self.stopped = False

    def tend(self):
        """Starts it if it does not run, and notes if it ended by itself."""
        now = time.monotonic()
        if self.process is None:
            if now >= self._start_at:
                self.start()
        elif (status := self.process.poll()) is not None:
            if self._ready.is_set():
                self.died.append(f"{self.name} ended by itself with status {status} at {time.time():.3f}")
            else:
                self.failed_starts += 1
            self.kill(_BACKOFF_S)
        # `ready` and not `_ready`: etcd and Envoy announce nothing and must be asked
        elif not self.ready and not self.stopped and now - self._started > _READY_S:
            self.failed_starts += 1
            self.kill(_BACKOFF_S)

    def stop(self, grace_s):
        """Ends it in order. Returns why that went wrong, or an empty string."""
        if self.process is None or self.process.poll() is not None:
            return f"{self.name} had ended already"
        self._send(signal.SIGCONT)
        self.process.terminate()
        try:
            status = self.process.wait(grace_s)
            asked = -signal.SIGTERM if self.name == "etcd" else 0
            trouble = f"{self.name} ended with status {status}" if status != asked else ""
        except subprocess.TimeoutExpired:
            trouble = f"{self.name} did not end within {grace_s:g} s"
        self.kill(float("inf"))
        return trouble

    def _send(self, number):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _end(self):
        try:
            self.process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            self.died.append(
                f"{self.name} did not end within {_KILLED_S:g} s of SIGKILL at {time.time():.3f}"
            )
        self.stopped = False
        self._reader.join(5.0)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self.process = None

    def _read(self, lines, ready):
        for line in lines:
            if line.startswith(b"ready "):
                ready.set()
            elif line.startswith(b"{"):
                with contextlib.suppress(ValueError):  # the half line of a process that was killed
                    self._events.put((self.name, json.loads(line)))


class Cluster:
    """All nodes of a soak, on hosts with links of their own."""

    def __init__(self, folder, logs, seed):
        """`folder` holds files, the socket and the disk tier; `logs` takes what the nodes print."""
        self.folder, self.logs, self.disk, self.etcd_data = folder, logs, folder / "disk", folder / "etcd"
        self.events = queue.Queue()
        self.network = Network()
        self.hosts = {}
        for name in HOSTS:
            self.hosts[name] = self.network.host(name)
            self.hosts[name].limit(LINK)
        on = {node: self.hosts[host] for host, nodes in HOSTS.items() for node in nodes}
        self._address = {node: host.address for node, host in on.items()}
        self._seed = seed
        self.write()
        self.nodes = {name: self._node(name, on[name]) for name in NODES}

    def _node(self, name, host):
        return Node(
            name, host, lambda start: self._command(name, start), self.logs / f"{name}.log", self.events
        )

    def __getitem__(self, name):
        return self.nodes[name]

    @property
    def master(self):
        return f"{self._address['master']}:{_PORTS['master']}"

    @property
    def metrics(self):
        return f"http://{self._address['master']}:{_PORTS['metrics']}"

    @property
    def faces(self):
        """The addresses for clients."""
        return {name: (self._address[name], _PORTS[name]) for name in FACES}

    def file(self, node):
        """Returns the node's YAML: the same cluster in each, and the node's own tiers."""
        return self.folder / f"{node}.yaml"

    def write(self, segment=SEGMENT):
        """Writes the nodes' files; `segment` is what stores give to the pool."""
        for node in NODES:
            self.file(node).write_text(self._text(node, segment))

    @property
    def ready(self):
        return all(node.ready for node in self.nodes.values())

    def tend(self):
        for node in self.nodes.values():
            node.tend()

    def stop(self):
        """Ends all in order, and the network. Returns what went wrong, and what is left."""
        left = [trouble for name in reversed(self.nodes) if (trouble := self[name].stop(30.0))]
        end = time.monotonic() + 10.0
        while (alive := _others()) and time.monotonic() < end:
            time.sleep(0.1)
        known = {f"{name}.yaml" for name in NODES} | {"disk", "etcd", "envoy"}
        left += alive + _files_left(_SHARED_MEMORY, {self.folder.name}) + _files_left(self.folder, known)
        self.network.close()
        return left

    def kill(self):
        """Ends all at the same time."""
        for node in self.nodes.values():
            node.kill(float("inf"))

    def footprints(self):
        return {name: footprint(node.pid) for name, node in self.nodes.items() if node.pid is not None}

    def disk_troubles(self):
        """Returns what is wrong with the disk tier's folder when nothing is being written."""
        total = sum(
            file.stat().st_size for file in self.disk.glob("*/*/[0-9a-f][0-9a-f]/*") if file.is_file()
        )
        found = [f"{file} was never finished" for file in self.disk.glob("*/*/tmp/*")]
        return found + [f"{total} bytes in the disk tier, which has room for {DISK_CAPACITY}"] * (
            total > DISK_CAPACITY
        )

    def _command(self, name, start):
        if name == "etcd":
            client, peer = (
                f"http://{self._address['etcd']}:{_PORTS['etcd']}",
                f"http://127.0.0.1:{_PORTS['members']}",
            )
            return (
                "etcd", f"--data-dir={self.etcd_data}", f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync", "--log-level=error",
            )  # fmt: skip
        if name == "envoy":
            (folder := self.folder / "envoy").mkdir(exist_ok=True)
            picker = picker_at(folder, self._address["proxy"], _PORTS["picker"])
            return envoy(folder, *self.faces["envoy"], [picker], request_timeout_s=REQUEST_S)
        file = str(self.file(name))
        if name in ENGINES:
            where = (file, self._address[name], str(self._seed), str(start))
            return (sys.executable, "-m", "tests.soak.engine", name, *where)
        role = {"cache": "cache-server"}.get(name, name.split("-")[0])
        return (sys.executable, "-m", "launch", "launch", role, "-c", file, "--node", name)

    def _text(self, node, segment):
        tiers = {
            "engine-a": f"{{kind: local, capacity: 32MiB}}, {{kind: disk, path: {self.disk}, capacity: {DISK_CAPACITY}, retry_s: 3}}, ",
            "cache": "{kind: local, capacity: 32MiB}, ",
            "both-0": "{kind: local, capacity: 8MiB}, ",
        }  # fmt: skip
        nodes = {
            "master": f"role: master, metrics_port: {_PORTS['metrics']}, lease_ttl_ms: {LONGEST_MS}",
            **dict.fromkeys(STORES, f"role: store, segment_size: {segment}"),
            "cache": f"role: cache-server, url: 'ipc://{self.folder}/cache.sock', metrics_port: {_PORTS['scraped']}",
            **dict.fromkeys(BOTH, "role: both"),
            "proxy": f"role: proxy, picker_port: {_PORTS['picker']}",
        }
        lines = []
        for name, fields in nodes.items():
            port = f", port: {_PORTS[name]}" if name in _PORTS else ""
            lines.append(f"  - {{name: {name}, {fields}, host: {self._address[name]}{port}}}")
        # calls have their own deadlines, and the pool gets time to do harm: time-outs are generous
        return f"""
name: soak
discovery:
  kind: etcd
  endpoints: ['{self._address["etcd"]}:{_PORTS["etcd"]}']
transfer:
  staging_size: {"64MiB" if node in (*ENGINES, "cache") else "8MiB"}
  timeouts:
    get_ms: {LONGEST_MS}
    put_ms: {LONGEST_MS}
cache:
  chunk_size: {CHUNK}
  tiers: [{tiers.get(node, "")}{{kind: mooncake}}]
engine:
  kind: reference
  model:
    name: tiny
    random: {{seed: 3, vocab_size: {VOCABULARY}, hidden_size: 64, intermediate_size: 128, layers: 2, heads: 4, kv_heads: 2}}
  block_size: {CHUNK}
  num_blocks: 512
  max_model_len: 1024
  step_tokens: 16
  threads: 1
handoff: {{wait_ms: 1000, stream: always}}
proxy: {{request_timeout_s: {REQUEST_S}, prefill_timeout_s: 8.0, direct_tokens: 1, roles: {{auto: true}}}}
supervisor: {{ready_timeout_s: {_READY_S}, stop_grace_s: 10}}
nodes:
""" + "\n".join(lines)


class Footprint(NamedTuple):
    """What a process and its children hold."""

    processes: int
    descriptors: int
    threads: int
    mebibytes: int

    def beyond(self, before):
        """Returns in words what is held beyond what was held before and what is allowed.

        Connections to peers come and go, and threads are started when they are first needed.
        """
        allowed = Footprint(before.processes, before.descriptors + 24, before.threads + 6, before.mebibytes * 5 // 4 + 96)  # fmt: skip
        rows = zip(self._fields, before, self, allowed, strict=True)
        return [f"{now} {what} instead of {was}" for what, was, now, limit in rows if now > limit]


def grown(before, after):
    """Returns, as text, which nodes hold more than before."""
    lost = [f"{name} does not run" for name in before if name not in after]
    return lost + [
        f"{name}: {more}" for name, now in after.items() for more in now.beyond(before.get(name, now))
    ]


def footprint(pid):
    """Returns what a process and its children hold now."""
    held = Footprint(0, 0, 0, 0)
    with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
        node = psutil.Process(pid)
        for one in (node, *node.children(recursive=True)):
            # Mooncake never closes its connections to peers that have died (docs/mooncake.md)
            holds = (
                1,
                one.num_fds() - _left_by_peers(one.pid),
                one.num_threads(),
                one.memory_info().rss >> 20,
            )
            held = Footprint(*map(sum, zip(held, holds, strict=True)))
    return held


def _left_by_peers(pid):
    """Returns how many connections of a process only its peers have closed. psutil knows no network namespace
    but its own."""
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()]
    waiting = {f"socket:[{line[9]}]" for line in lines if line[3] == "08"}
    return sum(os.readlink(entry.path) in waiting for entry in os.scandir(f"/proc/{pid}/fd"))


def _others():
    """Returns the processes besides this one in its namespace."""
    alive = [
        one
        for one in psutil.process_iter(["cmdline", "status"])
        if one.info["status"] != psutil.STATUS_ZOMBIE
    ]
    return [
        f"process {one.pid}: {' '.join(one.info['cmdline'])[:120]}" for one in alive if one.pid != os.getpid()
    ]


def _files_left(folder, known):
    return sorted(f"{folder}/{entry.name}" for entry in folder.iterdir() if entry.name not in known)


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, timeout=20)
