"""A run from its beginning to its end, on one thread: it starts what the plan needs, does the faults in time, and judges."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.suites.soak.clients import CompletionClient, complete
from bench.suites.soak.cluster import DISK_BYTES, DISK_CAPACITY, SoakCluster, SoakSite
from bench.suites.soak.faults import ACTIONS, Stage, Undo
from bench.suites.soak.hosts import Hosts
from bench.suites.soak.isolate import SHARED_MEMORY
from bench.suites.soak.judge import TICK_S, Ticker
from bench.suites.soak.kinds import ENGINES, NEEDS_ETCD, NEEDS_LINKS, NEEDS_MOUNTS, NODES
from bench.suites.soak.leaks import Footprint, disk_troubles, files_left, footprint_of, grown, strangers_left
from bench.suites.soak.ledger import Ledger
from bench.suites.soak.plan import SHORT_RUN_S, Fault, check_prompts, coverage, faults, served_prompts
from bench.suites.soak.resets import Resets
from bench.suites.soak.verdict import SoakOutcome
from launch.process import spawn_child
from pd_cache.errors import PdCacheError

_CLIENTS = 2
_START_S = 180.0
_BACK_S = 90.0
"""Seconds of storing and loading again after which all prompts must be found and loaded."""
_GONE_S = 10.0
"""How long a process may outlive the node that had started it."""


class SoakError(PdCacheError):
    """The run itself could not go on; the message says why."""


class Soak:
    """One run."""

    def __init__(self, seed: int, minutes: float, there: frozenset[str], folder: Path, evidence: Path, only: list[Fault] | None = None) -> None:  # fmt: skip
        """`there`: what this machine has (`kinds.EVERYTHING` or less). `folder` is empty, `evidence` keeps the logs.

        `only`: these faults in place of the plan's.
        """
        self.seconds = minutes * 60
        short = self.seconds < SHORT_RUN_S
        self.seed, self.there, self.folder, self.evidence = seed, there, folder, evidence
        self.faults = faults(seed, self.seconds, there) if only is None else only
        self.warm_s = 4.0 if short else 20.0
        self.settle_s = 20.0 if short else 90.0
        self.outcome = SoakOutcome(seed, minutes)
        self.ledger = Ledger()
        self.ticker = Ticker()
        self._prompts = served_prompts(seed, 8 if short else 24)
        self._checked = check_prompts(seed, 3 if short else 6)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._undos: dict[int, Undo] = {}
        self._done: Counter[str] = Counter()
        self._said = 0.0
        self._working = False

    def run(self) -> SoakOutcome:
        """Does the whole run. Returns the outcome, also if something is wrong. Raises SoakError if the run itself cannot go on."""
        begin = time.monotonic()
        if NEEDS_MOUNTS in self.there:
            (self.folder / "disk").mkdir()
            _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "pd-cache-soak-disk", str(self.folder / "disk"))
        self.hosts = Hosts(NEEDS_LINKS in self.there)
        self.site = SoakSite(self.folder, self.evidence, self.hosts, self.seed, NEEDS_ETCD in self.there)
        self.cluster = SoakCluster(self.site, self.ledger.event, self.ledger.next_of)
        self.resets = Resets(self.cluster, self.ledger, self._later)
        self.stage = Stage(self.cluster, self.resets, self._later)
        self.clients: list[CompletionClient] = []
        self._write_plan()
        over = threading.Event()
        threading.Thread(target=self._watch_clock, args=(over,), name="soak-ticker", daemon=True).start()
        try:
            self._work()
            self.outcome.leaked = [*self.outcome.leaked, *self._end()]
        finally:
            over.set()
            for client in self.clients:
                client.close()
            self._undo_all()
            self.cluster.kill()
            self.hosts.close()
        self._count(time.monotonic() - begin)
        return self.outcome

    # --- the parts of a run --------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self._expecting() as answers:
            self.cluster.start()
            self._wait(lambda: self.cluster.ready, _START_S, "all nodes to be ready", failures=2)
            self._wait(lambda: answers.poll() is not None, _START_S, "the answers without a cache")
            expected = self._expected(answers)
        self.clients = [
            CompletionClient(number, self.seed, self.site.proxy, self._prompts, expected, self.ledger.reply)
            for number in range(_CLIENTS)
        ]
        for client in self.clients:
            client.start()
        self._go()
        self._watch(self.warm_s)
        before = self._calm()
        self._say(f"calm; {len(self.faults)} faults follow")
        self._go()
        zero = time.monotonic()
        for fault in self.faults:
            self._at(zero + fault.at, functools.partial(self._begin, fault, zero + fault.at + fault.seconds))
        self._watch(self.seconds)
        self._undo_all()
        last = time.monotonic()
        self._wait(lambda: self.cluster.ready, 150.0, "all nodes to be ready after the last fault")
        self._pause()
        self._come_back(expected)
        self.outcome.recovery_s = time.monotonic() - last
        self._compare(before)

    @contextlib.contextmanager
    def _expecting(self) -> Iterator[subprocess.Popen[bytes]]:
        """Yields a process of its own that computes the answers without a cache."""
        count = str(len(self._prompts))
        command = [
            sys.executable,
            "-m",
            "bench.suites.soak.expected",
            str(self.site.file("decode")),
            str(self.seed),
            count,
        ]
        with (self.evidence / "expected.log").open("wb") as log, (self.folder / "expected.json").open("wb") as out:
            process = spawn_child(command, death_signal=signal.SIGKILL, stdout=out, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _expected(self, process: subprocess.Popen[bytes]) -> list[list[int]]:
        file = self.folder / "expected.json"
        if process.returncode:
            raise SoakError(f"the answers without a cache could not be computed: see {self.evidence}/expected.log")
        answers = msgspec.json.decode(file.read_bytes().splitlines()[-1], type=list[list[int]])
        file.unlink()
        return answers

    def _go(self) -> None:
        for name in ENGINES:
            self.cluster[name].tell({"do": "go"})
        for client in self.clients:
            client.go.set()
        self._working = True

    def _pause(self) -> None:
        """Lets all lanes and clients come to rest. Work that is still under way on return is noted as late."""
        self._working = False
        for client in self.clients:
            client.go.clear()
        late = []
        for name in ENGINES:
            self.cluster[name].tell({"do": "pause"})
        for name in ENGINES:
            answer = self.ledger.wait_reply(name, "paused", 110.0)
            late += [f"{name} did not come to rest"] if answer is None else [f"{lane} did not come to rest" for lane in answer["busy"]]  # fmt: skip
        for client in self.clients:
            if not client.resting.wait(60.0):
                late.append(f"{client.label} did not come to rest")
        if late:
            late += self.ledger.overdue(time.time(), 0.0, self.stage.stops)
        self.outcome.late = [*self.outcome.late, *late]

    def _calm(self) -> dict[str, Footprint]:
        """Returns what each node holds while nothing is under way."""
        self._pause()
        time.sleep(1.0)
        return self._footprints()

    def _come_back(self, expected: list[list[int]]) -> None:
        """After the last fault: check that prompts are stored, found and loaded, and that requests are answered."""
        lost = self._lost_prompts()
        end = time.monotonic() + 60.0
        todo = list(range(len(self._prompts)))
        trouble = ""
        while todo and time.monotonic() < end:
            reply = complete(self.site.proxy, self._prompts[todo[0]], False, expected[todo[0]])
            if reply.wrong:
                self.ledger.wrong.append(f"after the last fault, prompt {todo[0]}: got {reply.got}")
                todo.pop(0)
            elif reply.outcome == "answered":
                todo.pop(0)
            else:
                trouble = reply.outcome
                time.sleep(0.5)
        if todo:
            lost.append(
                f"{len(todo)} of {len(self._prompts)} requests were not answered after the last fault: {trouble}"
            )
        self.outcome.lost = lost

    def _lost_prompts(self) -> list[str]:
        """Returns the prompts that are not found and loaded whole by both engines, however often they are stored again."""
        prompts = [prompt._asdict() for prompt in self._checked]
        end = time.monotonic() + _BACK_S
        lost: list[str] = []
        while not lost or time.monotonic() < end:
            lost = []
            # engine-b must find what engine-a has stored; then it stores, too
            for name, mode, seconds in (("engine-a", "store", 20.0), ("engine-b", "load", 5.0), ("engine-b", "store", 20.0)):  # fmt: skip
                self.cluster[name].tell({"do": "check", "prompts": prompts, "mode": mode, "seconds": seconds})
                answer = self.ledger.wait_reply(name, "checked", seconds + 60.0)
                self._say(f"{name} {mode}: {answer}")
                if answer is None:
                    return [f"{name} did not answer whether prompts can be found"]
                lost += [f"{name} {mode} after {answer['seconds']:.0f} s: {one}" for one in answer["missing"]]
            if not lost:
                break
        return lost

    def _compare(self, before: dict[str, Footprint]) -> None:
        """Notes what is held now that was not held before the first fault."""
        leaked: list[str] = []
        for name in ENGINES:
            self.cluster[name].tell({"do": "settle", "seconds": self.settle_s})
            answer = self.ledger.wait_reply(name, "settled", self.settle_s + 60.0)
            if answer is None:
                leaked.append(f"{name} did not say what it holds")
                continue
            if answer["slots"]:
                leaked.append(f"{name} holds {answer['slots']} slots of staging memory")
            if answer["integrity"]:
                leaked.append(f"{name}: {answer['integrity']}")
            if server := answer["server"]:
                leaked += [f"the cache server has {server[what]} {what}" for what in ("in_flight",) if server[what]]
        end = time.monotonic() + self.settle_s
        while (more := grown(before, self._footprints())) and time.monotonic() < end:
            time.sleep(0.5)
        if NEEDS_MOUNTS in self.there or self.site.disk.exists():
            more += disk_troubles(self.site.disk, DISK_CAPACITY)
        self.outcome.leaked = [*leaked, *more]
        footprints = {name: one._asdict() for name, one in self._footprints().items()}
        self._keep(
            "footprints.json", {"before": {name: one._asdict() for name, one in before.items()}, "after": footprints}
        )

    def _end(self) -> list[str]:
        """Stops everything in order. Returns what is left then."""
        for client in self.clients:
            client.close()
        for client in self.clients:
            client.join(40.0)
        left = self.cluster.stop()
        if NEEDS_LINKS in self.there:  # namespaces of its own: everything there belongs to this run
            end = time.monotonic() + _GONE_S
            while (alive := strangers_left()) and time.monotonic() < end:
                time.sleep(0.1)
            left += alive
            left += files_left(SHARED_MEMORY, {self.folder.name})
        known = {f"{name}.yaml" for name in NODES} | {"disk", "etcd"}
        left += files_left(self.folder, known)
        if NEEDS_MOUNTS in self.there:
            _run("umount", str(self.site.disk))
        self.hosts.close()
        return left + self.hosts.left()

    def _watch_clock(self, over: threading.Event) -> None:
        """On a thread of its own, so that this program's own work does not look like a machine that stands still."""
        while not over.is_set():
            self.ticker.tick(time.time())
            time.sleep(TICK_S)

    # --- time ----------------------------------------------------------------------------------------------------

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), action))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(time.monotonic() + seconds, action)

    def _watch(self, seconds: float) -> None:
        """Does what is due, start what has ended, watch the clock."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._tick()

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str, failures: int = 1 << 30) -> None:
        """Raises SoakError if the condition does not come true in time, or if a node fails to start so many times."""
        end = time.monotonic() + seconds
        while not condition():
            self._tick()
            hopeless = [name for name, node in self.cluster.nodes.items() if node.failed_starts >= failures]
            if hopeless:
                raise SoakError(f"{', '.join(hopeless)} cannot be started: see {self.evidence}")
            if time.monotonic() > end:
                down = [name for name, node in self.cluster.nodes.items() if not node.ready]
                raise SoakError(f"waited {seconds:g} s for {what}; not ready: {', '.join(down)}")

    def _tick(self) -> None:
        if self.ledger.broken:
            raise SoakError(f"the run itself is broken: {self.ledger.broken[0]}")
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for name in ENGINES:
            node = self.cluster[name]
            starts, down = node.starts, node.pid is None
            node.tend()
            if down or node.starts != starts:
                self.ledger.forget(name)
            if node.starts != starts:
                self.resets.tell(name)
                if self._working:
                    node.tell({"do": "go"})
        self.cluster.tend()
        if time.monotonic() - self._said > 30:
            self._said = time.monotonic()
            self._say(f"{sum(self.ledger.counts.values())} answers, {len(self.ledger.wrong)} wrong, {sum(self._done.values())} faults")  # fmt: skip
        time.sleep(TICK_S)

    # --- faults --------------------------------------------------------------------------------------------------

    def _begin(self, fault: Fault, end: float) -> None:
        """`end` is the planned end, even if the fault begins late, so that it ends before the next one begins."""
        undo = ACTIONS[fault.kind](self.stage, fault)
        number = next(self._numbers)
        self._undos[number] = undo
        self._done[f"{fault.kind}>60" if fault.seconds > 60 else fault.kind] += 1
        with (self.evidence / "faults.log").open("a") as log:
            log.write(f"{time.time():.3f} {fault}\n")
        self._at(end, lambda: self._undo(number))

    def _undo(self, number: int) -> None:
        if (undo := self._undos.pop(number, None)) is not None:
            undo()

    def _undo_all(self) -> None:
        for number in list(self._undos):
            self._undo(number)

    # --- books ---------------------------------------------------------------------------------------------------

    def _footprints(self) -> dict[str, Footprint]:
        return {name: footprint_of(pid) for name, node in self.cluster.nodes.items() if (pid := node.pid) is not None}

    def _count(self, seconds: float) -> None:
        ledger, outcome, stage = self.ledger, self.outcome, self.stage
        outcome.seconds = round(seconds, 1)
        outcome.operations, outcome.hit_tokens = dict(ledger.counts), dict(ledger.hits)
        outcome.completions = dict(ledger.outcomes)
        outcome.bytes_compared, outcome.tokens_loaded = ledger.compared, ledger.tokens
        outcome.faults, outcome.damaged, outcome.strange_acts = dict(sorted(self._done.items())), stage.damaged, stage.acts  # fmt: skip
        outcome.resets, outcome.latest_old_s = len(ledger.resets), round(ledger.latest_old_s, 2)
        outcome.wrong, outcome.wrong_slots = ledger.wrong, ledger.wrong_slots
        outcome.late = [*outcome.late, *ledger.late(stage.stops, self.ticker.late)]
        outcome.raised = [*ledger.raised, *ledger.broken]
        outcome.died = [death for node in self.cluster.nodes.values() for death in node.died]
        outcome.slowest = ledger.slowest()
        outcome.ticker_latest_s, outcome.ticker_late_s = round(self.ticker.latest, 3), round(self.ticker.total, 3)

    def _write_plan(self) -> None:
        self._keep("plan.json", {"seed": self.seed, "there": sorted(self.there), "coverage": coverage(self.faults), "faults": [fault._asdict() for fault in self.faults]})  # fmt: skip

    def _keep(self, name: str, what: Any) -> None:
        (self.evidence / name).write_text(json.dumps(what, indent=1), encoding="utf-8")

    def _say(self, what: str) -> None:
        print(f"soak {self.seed}: {what}", file=sys.stderr, flush=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
