"""`python -m tests.soak --minutes 10 --seed 7`: one soak, from its beginning to its end. Exit status 1 if
anything was wrong.

1. `cluster` starts the nodes, each on a host of its own, while the answers of the model without a cache are
   computed here.
2. Engines and clients work undisturbed for a while; what every node holds then is noted.
3. The faults of the plan begin and end, while engines and clients work.
4. After the last fault, prompts must be found and loaded again and requests be answered, and no node may hold
   more than before.
5. Everything is ended in order; nothing may be left.
"""

import contextlib
import itertools
import os
import queue
import random
import re
import sched
import secrets
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import click
import torch

from launch.engines.reference.engine import ReferenceEngine
from launch.engines.reference.requests import GenerationRequest
from pd_cache.cluster import read_config
from tests.soak.books import OUTPUT_TOKENS, TICK_S, Books, Client, Span, complete, served_prompts
from tests.soak.cluster import ENGINES, FACES, Cluster, enter, grown, isolate
from tests.soak.faults import ACTIONS, SHORT_RUN_S, Stage, Weights, planned
from tests.soak.oracle import CHUNK, Prompt

_START_S, _BACK_S, _SETTLE_S = 180.0, 90.0, 60.0
_DAMAGED = re.compile(r"tier local: \d+ objects removed, to be stored again: damaged")


class Soak:
    """One run."""

    def __init__(self, seed, seconds, folder, logs, faults):
        """`folder` is empty but for the disk tier's file system; `logs` takes what nodes print."""
        self.seed, self.seconds, self.logs, self.faults = seed, seconds, logs, faults
        self.short = seconds < SHORT_RUN_S
        self.books = Books()
        self.cluster = Cluster(folder, logs, seed)
        self.weights = Weights(self.cluster, self.books)
        self._due = sched.scheduler(time.monotonic)
        self.stage = Stage(self.cluster, self.books, self.weights, self._due)
        self.clients = self.stage.clients
        self._numbers = itertools.count()
        self._undos = {}
        self._working = False

    def run(self):
        """Does the whole run. Raises RuntimeError if the run itself cannot go on."""
        over = threading.Event()
        threading.Thread(target=self._watch_clock, args=(over,), name="soak-clock", daemon=True).start()
        try:
            self._work()
            left = self.cluster.stop()
        finally:
            over.set()
            self._undo_all()
            self.cluster.kill()
        for trouble in left:
            self.books.add("left", trouble)
        for node in self.cluster.nodes.values():
            for death in node.died:
                self.books.add("ended", death)
        for file in self.logs.glob("*.log"):
            # no fault touches memory: what is damaged there was overwritten, although a checksum kept it from
            # being loaded
            for line in sorted(set(_DAMAGED.findall(file.read_text(errors="replace")))):
                self.books.add("wrong", f"{file.stem}: {line}")
        self.books.judge()
        return self.books

    def _work(self):
        cluster = self.cluster
        cluster.tend()
        self.books.answers = self._answers(6 if self.short else 24)
        self._wait(lambda: cluster.ready, _START_S, "all nodes to be ready")
        self.clients += [Client(number, self.seed, cluster.faces, self.books) for number in range(2)]
        for client in self.clients:
            client.start()
        self._go()
        self._watch(2.0 if self.short else 20.0)
        self._pause()
        self._come_back([])  # an engine that has not loaded yet has no connections
        before = cluster.footprints()
        self._say(f"{len(self.faults)} faults follow")
        self._go()
        zero = time.monotonic()
        for fault in self.faults:
            self._due.enterabs(zero + fault.at, 0, self._begin, (fault, zero + fault.at + fault.seconds))
        self._watch(self.seconds)
        self._undo_all()
        last = time.monotonic()
        self._wait(lambda: cluster.ready, 150.0, "all nodes to be ready after the last fault")
        self._pause()
        self._come_back(self.books.answers)
        self._say(f"all was back {time.monotonic() - last:.1f} s after the last fault")
        for name in ENGINES:
            for held in self._ask(name, "settle", seconds=_SETTLE_S)["held"]:
                self.books.add("left", held)
        end = time.monotonic() + _SETTLE_S
        while (more := grown(before, cluster.footprints())) and time.monotonic() < end:
            time.sleep(0.5)
        for trouble in more + cluster.disk_troubles():
            self.books.add("left", trouble)
        for client in self.clients:
            client.closing.set()
            client.go.set()
        for client in self.clients:
            client.join(40.0)
        turns = [fault for fault in self.faults if fault.kind == "turn"]
        if turns and not self.books.counts["roles changed"]:
            self.books.add("lost", "no node changed its role")

    def _answers(self, count):
        """Returns prompts, and what the model says to each without a cache."""
        config, _ = read_config(self.cluster.file("both-0"))
        torch.set_num_threads(1)
        answers = []
        with contextlib.closing(ReferenceEngine.open(config.engine)) as alone:
            for prompt in served_prompts(self.seed, count):
                request = GenerationRequest(prompt=tuple(prompt), max_tokens=OUTPUT_TOKENS)
                answers.append((prompt, [event.token for event in alone.submit(request)]))
        return answers

    def _go(self):
        self._working = True
        for name in ENGINES:
            self.cluster[name].tell(do="go")
        for client in self.clients:
            client.go.set()

    def _pause(self):
        """Lets all lanes and clients come to rest. Work that is still under way then is late."""
        self._working = False
        for client in self.clients:
            client.go.clear()
        for name in ENGINES:
            if self._ask(name, "pause")["busy"]:
                for one in self.books.overdue():
                    self.books.add("late", f"not answered: {one}")
        for client in self.clients:
            if not client.resting.wait(60.0):
                self.books.add("late", f"{client.name} did not come to rest")

    def _come_back(self, answers):
        """Notes as lost what is not stored, found and loaded again, and requests that are not answered."""
        rng = random.Random(f"{self.seed}/check")
        prompts = [Prompt(rng.randrange(12), rng.randint(4, 40) * CHUNK) for _ in range(6)]
        end = time.monotonic() + _BACK_S
        lost = []
        while not lost or time.monotonic() < end:
            lost = []
            # engine-b must find what engine-a has stored; then it stores, too
            for name, stores, seconds in (
                ("engine-a", True, 20.0),
                ("engine-b", False, 5.0),
                ("engine-b", True, 20.0),
            ):
                lost += self._ask(name, "check", prompts=prompts, stores=stores, seconds=seconds)["missing"]
            if not lost:
                break
        todo = [(face, *answer) for answer in answers for face in FACES]
        end = time.monotonic() + 60.0
        while todo and time.monotonic() < end:
            face, prompt, expected = todo[0]
            reply = complete(self.cluster.faces[face], prompt, expected)
            self.books.request(face, "after the last fault", reply)
            if reply.outcome == "answered":
                todo.pop(0)
            else:
                time.sleep(0.5)
        for one in lost + [
            f"no answer from {face} to a prompt of {len(prompt)} tokens" for face, prompt, _ in todo
        ]:
            self.books.add("lost", one)

    def _ask(self, name, command, **arguments):
        """Returns an engine's answer to a command."""
        self.cluster[name].tell(do=command, **arguments)
        seconds = 60.0 + arguments.get("seconds", 60.0)
        return self._wait(lambda: self.books.answer(name, command), seconds, f"{name} to {command}")

    # --- time -----------------------------------------------------------------------------------------------

    def _watch(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._tick()

    def _wait(self, condition, seconds, what):
        end = time.monotonic() + seconds
        while not (found := condition()):
            self._tick()
            if time.monotonic() > end:
                down = [name for name, node in self.cluster.nodes.items() if not node.ready]
                raise RuntimeError(f"waited {seconds:g} s for {what}; not ready: {', '.join(down) or 'none'}")
        return found

    def _tick(self):
        """Does what is due, starts what has ended, takes in what engines say."""
        self._due.run(blocking=False)
        for name, node in self.cluster.nodes.items():
            starts, down = node.starts, node.pid is None
            node.tend()
            if node.failed_starts > 3:
                raise RuntimeError(f"{name} cannot be started")
            if name in ENGINES and down:
                self.books.forget(name)
            if name in ENGINES and node.starts != starts:
                self.weights.tell(name)
                if self._working:
                    node.tell(do="go")
        with contextlib.suppress(queue.Empty):
            while True:
                self.books.event(*self.cluster.events.get(timeout=TICK_S))

    def _watch_clock(self, over):
        """On a thread of its own, so that this program's own work does not look like a machine that stands
        still."""
        last = time.time()
        while not over.wait(TICK_S):
            now = time.time()
            if now - last - TICK_S > 0.1:
                self.books.standstills.append(Span(last, now))
            last = now

    # --- faults ---------------------------------------------------------------------------------------------

    def _begin(self, fault, end):
        """`end` is the planned end, even if the fault begins late, so that it ends before the next one
        begins."""
        number = next(self._numbers)
        self.books.counts[f"faults, {fault.kind}{' of more than a minute' * (fault.seconds > 60)}"] += 1
        with (self.logs / "faults.log").open("a") as log:
            log.write(f"{time.time():.3f} {fault}\n")
        self._undos[number] = ACTIONS[fault.kind](self.stage, fault, random.Random(fault.seed))
        self._due.enterabs(end, 0, self._undo, (number,))

    def _undo(self, number):
        if (undo := self._undos.pop(number, None)) is not None:
            undo()

    def _undo_all(self):
        for number in list(self._undos):
            self._undo(number)

    def _say(self, what):
        print(f"soak, seed {self.seed}: {what}", flush=True)


@click.command()
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(0.1), help="Of operations and faults; starting and checking come on top.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), help="Replays the plan of an earlier run; by default a new one, which is printed.")  # fmt: skip
@click.option("--logs", default="/tmp/pd-cache-soak", show_default=True, type=click.Path(path_type=Path, file_okay=False), help="For the logs; a run empties it.")  # fmt: skip
@click.option("--inside", hidden=True, is_flag=True)
def main(minutes, seed, logs, inside):
    """Random operations and random faults on a cluster of real processes, every byte compared. Needs root,
    etcd, Envoy and iproute2."""
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    if not inside:
        isolate("tests.soak", "--inside", "--minutes", str(minutes), "--seed", str(seed), "--logs", str(logs))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    os.environ["TMPDIR"] = "/dev/shm"
    faults = planned(seed, minutes * 60)
    books = Soak(seed, minutes * 60, enter(), logs, faults).run()
    report = f"{books.report()}\nseed {seed}, {minutes:g} minutes; logs are in {logs}"
    (logs / "report.txt").write_text(report)
    print(report)
    sys.exit(any(books.troubles.values()))


if __name__ == "__main__":
    main()
