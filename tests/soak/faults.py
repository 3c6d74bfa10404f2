"""The faults of a soak: which there are, when they occur, and what they do. A new fault is a row of `KINDS`
and an action of `ACTIONS`."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from tests.soak.books import Client, Span
from tests.soak.cluster import BOTH, DISK_BYTES, ENGINES, FACES, HOSTS, LINK, NODES, SMALL_SEGMENT, STORES
from tests.soak.oracle import VOCABULARY
from tests.soak.vandal import damaged

SHORT_RUN_S = 120.0
"""Shorter runs have only quick faults, of a few seconds."""
_QUICK_S = 4.0
_PRESS_S = 8.0
"""Engines move much for so long before a store is stopped for long and before it goes on, and for as long
after each."""
_LOOK_S = 0.05
_FILES = 20
"""Most objects on disk that one fault damages."""


class Kind(NamedTuple):
    """A fault that can be drawn."""

    name: str
    targets: tuple
    shortest: float
    longest: float
    """Seconds between the fault and its end."""
    weight: float
    """How often it is drawn, relative to others, after every kind has been drawn once."""


class Fault(NamedTuple):
    """One fault, from `at` to `at + seconds`, in seconds from the moment when the faults begin."""

    at: float
    kind: str
    target: str
    seconds: float
    seed: int

    def touches(self):
        """Returns the nodes that it affects."""
        return {
            self.target,
            *HOSTS.get(self.target, ()),
            *(STORES if self.kind in ("small_pool", "drain") else ()),
            *(BOTH if self.kind == "turn" else ()),
        }

    def collides(self, other):
        """Returns whether both affect a node at the same time, or so soon after another that it has not come
        back yet."""
        apart = self.at > other.at + other.seconds + 3.0 or other.at > self.at + self.seconds + 3.0
        return not apart and bool(self.touches() & other.touches())


KINDS = (
    Kind("kill", NODES, 0.1, 5.0, 4.0),
    Kind("stop", NODES, 0.1, 55.0, 5.0),
    Kind("kill", tuple(FACES), 0.1, 5.0, 2.0),
    Kind("stop", tuple(FACES), 0.1, 30.0, 1.0),
    Kind("cut", tuple(HOSTS), 0.2, 30.0, 3.0),
    Kind("slow", tuple(HOSTS), 1.0, 20.0, 2.0),
    Kind("disk_full", ("engine-a",), 2.0, 20.0, 1.0),
    Kind("disk_refuses", ("engine-a",), 2.0, 20.0, 1.0),
    Kind("disk_damage", ("engine-a",), 0.2, 1.0, 2.0),
    Kind("pool_damage", ("master",), 4.0, 12.0, 2.0),
    Kind("drain", STORES, 10.0, 30.0, 1.0),
    Kind("small_pool", ("store-0",), 15.0, 40.0, 0.5),
    Kind("turn", ("proxy",), 3.0, 10.0, 2.0),
    Kind("crowd", tuple(FACES), 20.0, 40.0, 1.0),
    Kind("reset", ENGINES, 1.0, 3.0, 4.0),
    Kind("strange_client", tuple(FACES), 3.0, 10.0, 1.0),
    Kind("etcd_wiped", ("etcd",), 1.0, 30.0, 1.0),
)
"""Faults that follow one another."""
LONG_KINDS = (
    Kind(
        "stop", (*STORES, *STORES, "master", "cache", "engine-a", "both-2", "proxy", "envoy"), 69.0, 90.0, 3.0
    ),
    Kind("cut", STORES, 66.0, 90.0, 1.0),
)
"""Faults that outlast a minute, beside the others: Mooncake gives a transfer up after 60 s."""


def planned(seed, seconds):
    """Returns the faults of a run, by time. Every kind occurs once before one occurs again, as far as there
    is time."""
    rng = random.Random(f"{seed}/faults")
    short = seconds < SHORT_RUN_S

    def drawn(kind, now):
        longest = min(kind.longest, _QUICK_S) if short else kind.longest
        # as many short ones as long ones, by magnitude
        length = kind.shortest * (longest / kind.shortest) ** rng.random()
        length = min(length, max(0.1, seconds - now))
        return Fault(
            round(now, 3), kind.name, rng.choice(kind.targets), round(length, 3), rng.randrange(1 << 30)
        )

    long_ones = []
    now = 5.0
    while not short and now + 62.0 < seconds:
        fault = drawn(rng.choices(LONG_KINDS, [kind.weight for kind in LONG_KINDS])[0], now)
        if not long_ones:  # slots of staging memory have to outlive this one
            fault = fault._replace(kind="stop", target=rng.choice(STORES))
        long_ones.append(fault)
        now += fault.seconds + rng.uniform(5.0, 25.0)
    kinds = [kind for kind in KINDS if kind.shortest <= _QUICK_S or not short]
    todo, found = rng.sample(kinds, len(kinds)), []
    # all that follow happen to engines with a second version of weights
    todo.sort(key=lambda kind: kind.name != "reset")
    now = rng.uniform(0.2, 1.0)
    while now < seconds - 1.0:
        for kind in [*todo, *rng.choices(kinds, [kind.weight for kind in kinds], k=8)]:
            fault = drawn(kind, now)
            if not any(fault.collides(other) for other in long_ones):
                break
        else:
            now += 1.0
            continue
        if kind in todo:
            todo.remove(kind)
        found.append(fault)
        now += fault.seconds + (rng.uniform(0.1, 0.5) if short else rng.uniform(0.3, 4.0))
    return sorted(found + long_ones)


class Weights:
    """The weights of the engines: one change after the other, each on a thread of its own, whatever happens
    to the engines meanwhile."""

    def __init__(self, cluster, books):
        self._cluster, self._books = cluster, books
        self.number = 0
        """Of the newest weights: 0 until the first change."""
        self._lock = threading.Lock()
        self._running = False
        self._missed = False
        """Whether an engine has been started since the change under way began."""
        self._late = []
        """The commands of the change before."""

    def change(self):
        """Gives all engines new weights, and names them by two commands at once. Does nothing while a change
        is under way."""
        with self._lock:
            if not self._running:
                self.number += 1
                self._begin()

    def tell(self, engine):
        """Notes that an engine was started: it has the first weights, and gets the newest ones."""
        with self._lock:
            self._missed = bool(self.number)
            if self._missed and not self._running:
                self._begin()

    def _begin(self):
        self._running = True
        threading.Thread(target=self._run, args=(self.number,), name="weights", daemon=True).start()

    def _run(self, number):
        while self._running:
            self._missed = False
            self._change(number)
            with self._lock:
                self._running = self._missed

    def _change(self, number):
        ids = [self._ask(engine, do="weights", number=number)["id"] for engine in ENGINES]
        commands = [
            {"do": "name", "label": f"w{number}", "ids": ids},
            {"do": "name", "label": f"x{number}", "ids": ids},
        ]
        for engine, first in zip(ENGINES, (0, 1), strict=True):
            # commands of the change before come once more: they mean nothing now
            for command in (*self._late, commands[first], commands[1 - first]):
                self._ask(engine, **command)
        self._late = commands
        # each of the two commands was the first at one engine: another change, of the same weights, brings
        # them together
        ids = [self._ask(engine, do="weights", number=number)["id"] for engine in ENGINES]
        for engine in ENGINES:
            self._ask(engine, do="name", label=f"y{number}", ids=ids)

    def _ask(self, name, **command):
        """Returns an engine's answer, for which it asks each process of the engine once."""
        engine, starts = self._cluster[name], -1
        while (answer := self._books.answer(name, command["do"])) is None:
            if engine.starts != starts and engine.pid is not None:
                starts = engine.starts
                engine.tell(**command)
            time.sleep(_LOOK_S)
        return answer


class Stage:
    """What faults are done to, and what they leave for the report."""

    def __init__(self, cluster, books, weights, due):
        self.cluster, self.books, self.weights, self.due = cluster, books, weights, due
        self.disk = cluster.disk
        self.clients = []

    def press(self, seconds, loads=False):
        for engine in ENGINES:
            self.cluster[engine].tell(do="press", seconds=seconds, loads=loads)


def _kill(stage, fault, rng):
    stage.cluster[fault.target].kill(fault.seconds)


def _stop(stage, fault, rng):
    """A store's peers have large transfers under way when it stops, and when it goes on after a long time."""
    node = stage.cluster[fault.target]
    begun = []
    over = []

    def begin():
        if not over:
            begun.append(time.time())
            node.pause()

    def undo():
        over.append(True)
        if begun:
            node.resume()
            stage.books.stops.setdefault(node.name, []).append(Span(begun[0], time.time()))

    if fault.target in STORES:
        lead = min(_PRESS_S, fault.seconds / 4)
        stage.press(2 * lead + 2.0)
        stage.due.enter(lead, 0, begin)
        if fault.seconds > 60:
            stage.due.enter(fault.seconds - lead, 0, stage.press, (2 * lead,))
    else:
        begin()
    return undo


def _cut(stage, fault, rng):
    host, begin = stage.cluster.hosts[fault.target], time.time()
    host.cut()

    def undo():
        host.mend()
        stage.books.stops.setdefault(f"link of {fault.target}", []).append(Span(begin, time.time()))

    return undo


def _slow(stage, fault, rng):
    host = stage.cluster.hosts[fault.target]
    host.limit("20mbit")
    return lambda: host.limit(LINK)


def _turn(stage, fault, rng):
    """The nodes of the rarer kind are killed, and another takes their place."""
    stage.books.look(stage.cluster.faces["proxy"])
    kinds = {"prefill": [], "decode": []}
    for node, does in stage.books.roles.items():
        kinds[does] += [name for name in BOTH if f"//{stage.cluster.hosts[name].address}:" in node]
    for name in min(kinds.values(), key=len):
        stage.cluster[name].kill(fault.seconds)


def _crowd(stage, fault, rng):
    """Many clients at once ask for what must be computed: more than a prefill node can."""
    crowd = [Client(at, fault.seed, stage.cluster.faces, stage.books, crowd=True) for at in range(10, 18)]
    stage.clients += crowd
    for client in crowd:
        client.go.set()
        client.start()

    def undo():
        for client in crowd:
            client.closing.set()

    return undo


def _small_pool(stage, fault, rng):
    def again(*segment):
        stage.cluster.write(*segment)
        for store in STORES:
            stage.cluster[store].kill(0.1)

    again(SMALL_SEGMENT)
    return again


def _disk_full(stage, fault, rng):
    filler = stage.disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for _ in range(DISK_BYTES >> 12):
            file.write(bytes(4096))
    return lambda: filler.unlink(missing_ok=True)


def _disk_refuses(stage, fault, rng):
    """Nothing can be created, written or deleted, not even by root (EPERM)."""

    def change(how):
        subprocess.run(("chattr", "-R", how, str(stage.disk)), check=False, capture_output=True, timeout=20)

    change("+i")
    return lambda: change("-i")


def _disk_damage(stage, fault, rng):
    """Changes files of the disk tier in place: a bit, the length, or the contents for those of another."""
    found = [file for file in stage.disk.glob("*/*/[0-9a-f][0-9a-f]/*") if file.is_file()]
    for file in rng.sample(found, min(_FILES, len(found))):
        with contextlib.suppress(OSError):  # evicted meanwhile
            how, changed = damaged(file.read_bytes(), rng.choice(found).read_bytes(), rng)
            # in place, so that a file that was deleted meanwhile does not come back
            with file.open("r+b") as opened:
                opened.write(changed)
                opened.truncate()
            stage.books.counts[f"damaged on disk, {how}"] += 1


def _pool_damage(stage, fault, rng):
    cluster, host = stage.cluster, stage.cluster.hosts["control"]
    command = [sys.executable, "-m", "tests.soak.vandal", cluster.master, cluster.metrics, host.address, str(fault.seed)]  # fmt: skip
    out = cluster.logs / f"damage-{fault.seed}.log"
    with out.open("wb") as lines:
        vandal = subprocess.Popen(host.inside(*command), stdout=lines, stderr=lines, start_new_session=True)

    def undo():
        os.killpg(vandal.pid, signal.SIGKILL)
        vandal.wait()
        for line in out.read_text(errors="replace").splitlines():
            if line.startswith("put into the "):
                stage.books.counts[line] += 1

    return undo


def _drain(stage, fault, rng):
    """The pool is emptied, because a full one has no room. The command cancels in the middle, and is killed
    at the end. What is drained takes objects again when it is started again."""
    cluster, out = stage.cluster, stage.cluster.logs / f"drain-{fault.seed}.log"
    tool, file = f"{sys.executable} -m launch", f"-c {cluster.file('proxy')}"
    draining_s = max(1.0, fault.seconds / 2)
    command = f"{tool} pool rm '*' --yes {file}; exec {tool} drain {fault.target} --timeout {draining_s:g} --json {file}"
    with out.open("wb") as lines:
        inside = cluster.hosts["control"].inside("sh", "-c", command)
        draining = subprocess.Popen(inside, stdout=lines, stderr=lines, start_new_session=True)

    def undo():
        if draining.poll() is None:
            os.killpg(draining.pid, signal.SIGKILL)
        draining.wait()
        said = out.read_text(errors="replace")
        if "Traceback" in said:
            stage.books.add("raised", f"a command: {said[-1000:]}")
        ended = re.search('"outcome":"([a-z ]+)"', said)
        stage.books.counts[f"drains, {ended[1] if ended else 'refused or killed'}"] += 1
        cluster[fault.target].kill(0.1)

    return undo


def _reset(stage, fault, rng):
    """All engines get other weights, and two commands at once name them, while all lanes load."""
    stage.press(fault.seconds + 2.0, loads=True)
    stage.weights.change()


def _etcd_wiped(stage, fault, rng):
    """etcd comes back with an empty disk."""
    stage.cluster[fault.target].kill(fault.seconds)
    shutil.rmtree(stage.cluster.etcd_data, ignore_errors=True)


def _strange_client(stage, fault, rng):
    """A client: bodies cut off, headers that come slowly, nonsense, huge numbers, connections
    that end in the middle."""
    gone = threading.Event()

    def misbehave():
        with contextlib.ExitStack() as stack:
            unfinished = []
            while not gone.wait(0.02):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(stage.cluster.faces[fault.target], 1.0)
                    connection.settimeout(0.3)
                    connection.sendall(_nonsense(rng))
                    if rng.random() < 0.3 and len(unfinished) < 24:
                        unfinished.append(stack.enter_context(connection))  # never read
                        continue
                    with connection:
                        if rng.random() < 0.7:
                            connection.recv(rng.choice((1, 65536)))
                for slow in unfinished:
                    with contextlib.suppress(OSError):
                        slow.sendall(b"x")  # a byte at a time

    thread = threading.Thread(target=misbehave, name="strange-client", daemon=True)
    thread.start()

    def undo():
        gone.set()
        thread.join(10.0)

    return undo


def _nonsense(rng):
    usual = {"model": "tiny", "prompt": rng.choices(range(VOCABULARY), k=rng.randint(1, 200)), "max_tokens": 8, "stream": True}  # fmt: skip
    odd = (
        {"max_tokens": 10**30}, {"temperature": 1e308, "seed": 2**80}, {"prompt": [2**63] * 4}, {"prompt": {"a": [None] * 100}},
        {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [7, {}] * 4}}, {"kv_hints": [[]]}, {"cache_salt": "\x00" * 5000}, {"kv_transfer_params": {"do_remote_decode": True, "prefix": "x"}}, {},
    )  # fmt: skip
    # the last is valid; its answer may never be read
    bodies = [json.dumps({**usual, **one}).encode() for one in odd]
    body = rng.choice(
        [*bodies, b"[" * 100_000, b'{"prompt": NaN, "model": "\xff\xfe"}', rng.randbytes(3000), b""]
    )
    length = rng.choice((len(body), len(body), len(body) + 1000, 10**12))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    whole = head.encode() + b"\r\n" + body
    return rng.choice((
        whole,
        whole,
        whole[: rng.randrange(1, len(whole))],
        head.encode() + b"X: " + b"y" * rng.choice((10, 20_000)),
        b"GET " + b"/" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFF\r\nx",
        rng.randbytes(200),
    ))  # fmt: skip


ACTIONS = {  # each returns what ends the fault; None if it ends by itself
    "kill": _kill,
    "stop": _stop,
    "cut": _cut,
    "slow": _slow,
    "small_pool": _small_pool,
    "turn": _turn,
    "crowd": _crowd,
    "disk_full": _disk_full,
    "disk_refuses": _disk_refuses,
    "disk_damage": _disk_damage,
    "pool_damage": _pool_damage,
    "drain": _drain,
    "reset": _reset,
    "strange_client": _strange_client,
    "etcd_wiped": _etcd_wiped,
}
