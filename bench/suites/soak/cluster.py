"""The nodes of a run: their YAML files, their processes, and a supervisor that starts a node again when it ends.

All of this is for one thread, which must live as long as the run: for the kernel, the parent of a process ends with the thread
that started the process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from bench.suites.soak.hosts import Host, Hosts
from bench.suites.soak.kinds import ENGINES, ETCD, HOSTS, NODES
from bench.suites.soak.plan import CHUNK, VOCABULARY
from launch.process import spawn_child

CLUSTER = "soak"
SEGMENT, SMALL_SEGMENT = "192MiB", "24MiB"
DISK_CAPACITY = 24 << 20
DISK_BYTES = 32 << 20
"""Bytes of the disk tier's file system."""
LONGEST_MS = 20_000
"""The file's limit for a transfer, and the length of a lease. Operations have deadlines of their own, most of them shorter."""
REQUEST_S = 20.0
"""The proxy's `request_timeout_s`."""
_ROLES = {"master": "master", "store-0": "store", "store-1": "store", "cache": "cache-server", "prefill": "prefill", "decode": "decode", "proxy": "proxy"}  # fmt: skip
_READY_S = 90.0
_BACKOFF_S = 1.0
_KILLED_S = 15.0
"""How long a process may take to end after SIGKILL."""
_POOL = {"kind": "mooncake"}
_TIERS: Mapping[str, list[dict[str, Any]]] = {
    "engine-a": [
        {"kind": "local", "capacity": "32MiB"},
        {"kind": "disk", "capacity": DISK_CAPACITY, "retry_s": 3},
        _POOL,
    ],
    "cache": [{"kind": "local", "capacity": "32MiB"}, _POOL],
    "prefill": [{"kind": "local", "capacity": "8MiB"}, _POOL],
}
OnLine = Callable[[str, dict[str, Any]], None]
"""Called with each JSON line that a node prints, on a thread for that node."""


class SoakSite:
    """What a run has on disk, and where its nodes are reached."""

    def __init__(self, folder: Path, logs: Path, hosts: Hosts, seed: int, has_etcd: bool) -> None:
        """`folder` holds files, the socket and the disk tier; `logs` what the nodes print. Both exist."""
        self.folder, self.logs, self.hosts, self.seed, self.has_etcd = folder, logs, hosts, seed, has_etcd
        self.etcd_data = folder / "etcd"
        self.disk = folder / "disk"
        self.disk.mkdir(exist_ok=True)
        self.host_of = {node: hosts[host] for host, nodes in HOSTS.items() for node in nodes}
        self._ports = {node: hosts.port() for node in ("master", "metrics", "store-0", "store-1", "prefill", "decode", "proxy", "scraped", ETCD, "members")}  # fmt: skip
        self.url = f"ipc://{folder}/cache.sock"
        for node in NODES:
            self.write(node)

    @property
    def master(self) -> str:
        return f"{self.host_of['master'].address}:{self._ports['master']}"

    @property
    def metrics(self) -> str:
        return f"http://{self.host_of['master'].address}:{self._ports['metrics']}"

    @property
    def etcd(self) -> tuple[str, int]:
        return self.host_of[ETCD].address, self._ports[ETCD]

    @property
    def etcd_command(self) -> tuple[str, ...]:
        host, port = self.etcd
        return (
            sys.executable,
            "-m",
            "bench.suites.soak.etcd",
            str(self.etcd_data),
            host,
            str(port),
            str(self._ports["members"]),
        )

    @property
    def proxy(self) -> tuple[str, int]:
        return self.host_of["proxy"].address, self._ports["proxy"]

    def file(self, node: str) -> Path:
        """Returns the node's YAML: the same cluster in each, and the node's own tiers."""
        return self.folder / f"{node}.yaml"

    def write(self, node: str, segment: str = SEGMENT) -> None:
        """Writes the node's file; `segment` is what stores give to the pool."""
        self.file(node).write_text(yaml.safe_dump(self._tree(node, segment), sort_keys=False))

    def _tree(self, node: str, segment: str) -> dict[str, Any]:
        ports, address = self._ports, {name: host.address for name, host in self.host_of.items()}
        tiers = [{**tier, "path": str(self.disk)} if tier["kind"] == "disk" else tier for tier in _TIERS.get(node, [_POOL])]  # fmt: skip
        return {
            "name": CLUSTER,
            "discovery": {"kind": "etcd", "endpoints": ["{}:{}".format(*self.etcd)]} if self.has_etcd else {"kind": "static"},
            "transfer": {
                "staging_size": "64MiB" if node in (*ENGINES, "cache") else "8MiB",
                # generous: calls have their own deadlines, and the pool gets time to do harm
                "timeouts": {"get_ms": LONGEST_MS, "put_ms": LONGEST_MS},
            },
            "cache": {"chunk_size": CHUNK, "tiers": tiers},
            "engine": {
                "kind": "reference",
                "model": {"name": "tiny", "random": TINY_MODEL},
                "block_size": CHUNK,
                "num_blocks": 512,
                "max_model_len": 1024,
                "step_tokens": 64,
                "threads": 1,
            },
            "handoff": {"wait_ms": 1000},
            "proxy": {"request_timeout_s": REQUEST_S, "prefill_timeout_s": 8.0, "direct_tokens": 0},
            "supervisor": {"ready_timeout_s": _READY_S, "stop_grace_s": 10},
            "nodes": [
                {"name": "master", "role": "master", "host": address["master"], "port": ports["master"], "metrics_port": ports["metrics"], "lease_ttl_ms": LONGEST_MS},
                *({"name": name, "role": "store", "host": address[name], "port": ports[name], "segment_size": segment} for name in ("store-0", "store-1")),
                {"name": "cache", "role": "cache-server", "host": address["cache"], "url": self.url, "metrics_port": ports["scraped"], "idle_s": 10},
                *({"name": name, "role": name, "host": address[name], "port": ports[name]} for name in ("prefill", "decode")),
                {"name": "proxy", "role": "proxy", "host": address["proxy"], "port": ports["proxy"]},
            ],
        }  # fmt: skip


TINY_MODEL = {"seed": 3, "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2}  # fmt: skip


class SoakNode:
    """One node's process, and whether it should run."""

    def __init__(
        self, name: str, host: Host, command: Callable[[], tuple[str, ...]], log: Path, on_line: OnLine
    ) -> None:
        """Nothing is started yet. `command` is called at each start."""
        self.name, self.host = name, host
        self._command, self._log, self._on_line = command, log, on_line
        self.shift = 0.0
        """By how many seconds the clock of the next process is ahead."""
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.starts = 0
        self.failed_starts = 0
        self.died: list[str] = []
        """How it ended each time it ended by itself."""
        self._ready = threading.Event()
        self._reader: threading.Thread | None = None
        self._wanted = False
        self._start_at = 0.0
        self._started = 0.0

    @property
    def pid(self) -> int | None:
        return None if self.process is None or self.process.poll() is not None else self.process.pid

    @property
    def ready(self) -> bool:
        """Whether it runs and has announced that it can be used."""
        return self.pid is not None and not self.stopped and self._ready.is_set()

    def start(self) -> None:
        """Starts it; `ready` becomes true when it is."""
        self._wanted = True
        self._ready = threading.Event()
        shifted = ("unshare", "--time", "--monotonic", f"{self.shift:.0f}", "--boottime", f"{self.shift:.0f}") if self.shift else ()  # fmt: skip
        with self._log.open("ab") as log:
            log.write(f"--- started {time.time():.3f}, clock ahead by {self.shift:.0f} s\n".encode())
            log.flush()
            self.process = spawn_child(
                self.host.inside(*shifted, *self._command()),
                death_signal=signal.SIGKILL,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MC_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
            )
        self.starts += 1
        self._started = time.monotonic()
        assert self.process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout, self._ready), name=f"read-{self.name}", daemon=True
        )
        self._reader.start()

    def tell(self, command: Mapping[str, Any]) -> None:
        """Sends a line of JSON to its stdin. Does nothing if the process is gone."""
        if self.process is not None and self.process.stdin is not None:
            try:
                self.process.stdin.write(json.dumps(command).encode() + b"\n")
                self.process.stdin.flush()
            except (OSError, ValueError):
                pass

    def kill(self, down_s: float) -> None:
        """SIGKILL for it and its children; `tend` starts it again after `down_s` seconds."""
        self._send(signal.SIGKILL)
        self._end()
        self._start_at = time.monotonic() + down_s

    def pause(self) -> None:
        """SIGSTOP for it and its children."""
        self.stopped = True
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)
        self.stopped = False

    def tend(self) -> None:
        """Starts it again if it should run and does not, and notes if it ended by itself."""
        now = time.monotonic()
        if not self._wanted:
            return
        if self.process is None:
            if now >= self._start_at:
                self.start()
        elif (status := self.process.poll()) is not None:
            if self._ready.is_set():
                self.died.append(f"{self.name} ended by itself with status {status} at {time.time():.3f}")
            else:
                self.failed_starts += 1
            self._send(signal.SIGKILL)
            self._end()
            self._start_at = now + _BACKOFF_S
        elif not self._ready.is_set() and not self.stopped and now - self._started > _READY_S + 10:
            self.failed_starts += 1
            self.kill(_BACKOFF_S)

    def stop(self, grace_s: float) -> str:
        """Ends it in order. Returns why that went wrong, or an empty string."""
        self._wanted = False
        if self.process is None:
            return ""
        if self.process.poll() is not None:
            self._end()
            return f"{self.name} had ended already"
        self._send(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGKILL)
            self._end()
            return f"{self.name} did not end within {grace_s:g} s"
        self._send(signal.SIGKILL)  # children that it left behind
        self._end()
        return f"{self.name} ended with status {status}" if status else ""

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                pass

    def _end(self) -> None:
        """Reaps the process and closes its pipes. A process that SIGKILL does not end is noted, and `release` helps it to end."""
        assert self.process is not None
        try:
            self.process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            stuck = release(self.process.pid)
            self.died.append(f"{self.name} did not end within {_KILLED_S:g} s of SIGKILL at {time.time():.3f}: {stuck}")
            self.process.wait()
        self.stopped = False
        if self._reader is not None:
            self._reader.join(5.0)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        self.process = None

    def _read(self, lines: BinaryIO, ready: threading.Event) -> None:
        for line in lines:
            if line.startswith(b"ready "):
                ready.set()
            elif line.startswith(b"{"):
                try:
                    self._on_line(self.name, json.loads(line))
                except ValueError:
                    pass  # the half line of a process that was killed


class SoakCluster:
    """All nodes of a run."""

    def __init__(self, site: SoakSite, on_line: OnLine, first_of: Callable[[str], Mapping[str, int]]) -> None:
        """`first_of`: for an engine, the operation at which each of its lanes goes on."""
        self.site = site

        def command(name: str) -> tuple[str, ...]:
            if name == ETCD:
                return site.etcd_command
            if name in ENGINES:
                first = json.dumps(dict(first_of(name)))
                where = (str(site.file(name)), site.host_of[name].address)
                return (sys.executable, "-m", "bench.suites.soak.driver", name, *where, str(site.seed), first)
            role = _ROLES[name]
            return (sys.executable, "-m", "launch", "launch", role, "-c", str(site.file(name)), "--node", name)

        def node(name: str) -> SoakNode:
            return SoakNode(name, site.host_of[name], lambda: command(name), site.logs / f"{name}.log", on_line)

        self.nodes = {name: node(name) for name in ((ETCD,) if site.has_etcd else ()) + NODES}

    def __getitem__(self, name: str) -> SoakNode:
        return self.nodes[name]

    def start(self) -> None:
        """Starts all of them at the same time: each waits for those that it needs."""
        for node in self.nodes.values():
            node.start()

    def tend(self) -> None:
        for node in self.nodes.values():
            node.tend()

    @property
    def ready(self) -> bool:
        return all(node.ready for node in self.nodes.values())

    def stop(self, grace_s: float = 30.0) -> list[str]:
        """Ends all in order, the last first. Returns what went wrong."""
        return [trouble for name in reversed(self.nodes) if (trouble := self[name].stop(grace_s))]

    def kill(self) -> None:
        """Ends all at the same time."""
        for node in self.nodes.values():
            if node.process is not None:
                node.kill(1e9)


def release(pid: int) -> str:
    """Gives all threads of a process the ordinary scheduling policy: the kernel may not run them under theirs. Returns what they were."""
    found = []
    for entry in os.listdir(f"/proc/{pid}/task"):
        try:
            policy = os.sched_getscheduler(int(entry))
            state = Path(f"/proc/{pid}/task/{entry}/stat").read_text().rpartition(")")[2].split()[0]
            os.sched_setscheduler(int(entry), os.SCHED_OTHER, os.sched_param(0))
        except OSError:
            continue
        found.append(f"thread {entry} in state {state} under scheduling policy {policy}")
    return "; ".join(found)
