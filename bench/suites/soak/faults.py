"""What the faults of `kinds` do. Each action begins a fault and returns a function that ends it. All run on the cluster's thread."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.suites.soak.cluster import CLUSTER, DISK_BYTES, SMALL_SEGMENT, SoakCluster
from bench.suites.soak.engine_abuse import TRICKS
from bench.suites.soak.judge import Span
from bench.suites.soak.kinds import ENGINES, STORES
from bench.suites.soak.plan import Fault
from bench.suites.soak.resets import Resets
from bench.suites.soak.strangers import StrangeClient, StrangeEngine, Stranger, StrangeWriter
from launch.process import spawn_child

Undo = Callable[[], None]
_KEY_FOLDER = "*/*/[0-9a-f][0-9a-f]"
_PRESS_S = 8.0
"""Engines are pressed for so long before a store is stopped for long and before it goes on, and equally long after each."""
_FILES = 20
"""Most objects on disk that one fault damages."""


class Stage:
    """What faults are done to, and what they leave for the report."""

    def __init__(
        self, cluster: SoakCluster, resets: Resets, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        """`later(seconds, action)` runs an action later, on the same thread."""
        self.cluster = cluster
        self.resets = resets
        self.later = later
        self.site = cluster.site
        self.stops: dict[str, list[Span]] = {}
        """When each node was stopped, or its host cut off."""
        self.damaged: dict[str, int] = {}
        """Objects damaged, by what was done to them."""
        self.acts = 0
        """Acts of strangers."""

    def damage(self, how: str, count: int = 1) -> None:
        self.damaged[how] = self.damaged.get(how, 0) + count

    def press(self, seconds: float) -> None:
        """Makes the engines move as much as they can for a while."""
        for engine in ENGINES:
            self.cluster[engine].tell({"do": "press", "seconds": seconds})

    def objects(self) -> list[Path]:
        """Files of the disk tier."""
        return [file for file in self.site.disk.glob(f"{_KEY_FOLDER}/*") if file.is_file()]


def _kill(stage: Stage, fault: Fault) -> Undo:
    stage.cluster[fault.target].kill(fault.seconds)
    return _nothing


def _stop(stage: Stage, fault: Fault) -> Undo:
    """If a store is stopped for long, its peers have large transfers under way when it stops and when it goes on."""
    node = stage.cluster[fault.target]
    begun: list[float] = []
    over = False

    def begin() -> None:
        if not over:
            begun.append(time.time())
            node.pause()

    def undo() -> None:
        nonlocal over
        over = True
        if begun:
            node.resume()
            stage.stops.setdefault(node.name, []).append(Span(begun[0], time.time()))

    if fault.target in STORES and fault.seconds > 60:
        stage.press(2 * _PRESS_S)
        stage.later(_PRESS_S, begin)
        stage.later(fault.seconds - _PRESS_S, functools.partial(stage.press, 2 * _PRESS_S))
    else:
        begin()
    return undo


def _cut(stage: Stage, fault: Fault) -> Undo:
    host = stage.site.hosts[fault.target]
    begin = time.time()
    host.cut()

    def undo() -> None:
        host.mend()
        stage.stops.setdefault(f"link of {host.name}", []).append(Span(begin, time.time()))

    return undo


def _clock(stage: Stage, fault: Fault) -> Undo:
    """Brings a node back with another clock: no message between processes may depend on clocks."""
    node = stage.cluster[fault.target]
    node.shift = float(random.Random(fault.seed).choice((100, 10_000, 1_000_000, 100_000_000)))
    node.kill(fault.seconds)
    return _nothing


def _small_pool(stage: Stage, fault: Fault) -> Undo:
    stores = (fault.target, "store-1" if fault.target == "store-0" else "store-0")

    def again(**size: str) -> None:
        for store in stores:
            stage.site.write(store, **size)
            stage.cluster[store].kill(0.1)

    again(segment=SMALL_SEGMENT)
    return again


def _disk_full(stage: Stage, fault: Fault) -> Undo:
    filler = stage.site.disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for _ in range(DISK_BYTES >> 12):
                file.write(bytes(4096))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    return lambda: filler.unlink(missing_ok=True)


def _disk_refuses(stage: Stage, fault: Fault) -> Undo:
    """Nothing can be created, written or deleted, not even by root (EPERM)."""
    _chattr("+i", stage.site.disk)
    return lambda: _chattr("-i", stage.site.disk)


def _disk_read_only(stage: Stage, fault: Fault) -> Undo:
    """Brings a process back to a file system that is mounted read-only."""
    stage.cluster[fault.target].kill(0.1)
    _remount(stage.site.disk, "ro")
    return lambda: _remount(stage.site.disk, "rw")


def _disk_gone(stage: Stage, fault: Fault) -> Undo:
    """Removes the folder with all its contents while it is in use."""
    gone = []
    for folder in stage.site.disk.iterdir():
        if folder.is_dir() and folder.name.isdigit():
            away = folder.with_name(f"gone-{folder.name}")
            folder.rename(away)
            gone.append(away)

    def undo() -> None:
        for away in gone:
            shutil.rmtree(away, ignore_errors=True)

    return undo


def _disk_folders(stage: Stage, fault: Fault) -> Undo:
    """Some objects become folders, and a file lies where a fan-out folder would."""
    rng = random.Random(fault.seed)
    planted: list[Path] = []
    found = stage.objects()
    for file in rng.sample(found, min(5, len(found))):
        with contextlib.suppress(OSError):
            file.unlink()
            file.mkdir()
            planted.append(file)
    for root in stage.site.disk.glob("*/*/tmp"):
        stray = root.parent / f"{rng.randrange(256):02x}"
        with contextlib.suppress(OSError):
            stray.touch(exist_ok=False)
            planted.append(stray)
    stage.damage("folder in place of a file", len(planted))

    def undo() -> None:
        for path in planted:
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()

    return undo


def _disk_damage(stage: Stage, fault: Fault) -> Undo:
    rng = random.Random(fault.seed)
    found = stage.objects()
    for file in rng.sample(found, min(_FILES, len(found))):
        how = rng.choice(("flipped", "resized", "swapped"))
        with contextlib.suppress(OSError):  # evicted meanwhile
            if how == "swapped":  # in place, so that a file that was deleted meanwhile does not come back
                one, other = file.read_bytes(), rng.choice(found)
                with file.open("r+b") as opened, other.open("r+b") as second:
                    opened.write(second.read())
                    second.seek(0)
                    second.write(one)
            elif how == "flipped":
                with file.open("r+b") as opened:
                    place = rng.randrange(file.stat().st_size)
                    opened.seek(place)
                    byte = opened.read(1)[0]
                    opened.seek(place)
                    opened.write(bytes([byte ^ (1 << rng.randrange(8))]))
            else:
                os.truncate(file, rng.randrange(100_000))
            stage.damage(f"on disk, {how}")
    return _nothing


def _pool_damage(stage: Stage, fault: Fault) -> Undo:
    site = stage.site
    host = site.host_of["master"]
    command = (
        sys.executable,
        "-m",
        "bench.suites.soak.vandal",
        site.master,
        site.metrics,
        host.address,
        str(fault.seed),
    )
    log = site.logs / "vandal.log"
    out = site.folder / f"vandal-{fault.seed}.jsonl"
    with log.open("ab") as errors, out.open("wb") as lines:
        vandal = spawn_child(
            host.inside(*command), death_signal=signal.SIGKILL, stdout=lines, stderr=errors, start_new_session=True
        )

    def undo() -> None:
        vandal.kill()
        vandal.wait()
        for line in out.read_text().splitlines():
            with contextlib.suppress(ValueError):
                done = json.loads(line)
                stage.damage(f"in the pool, {done['how']}" if done["code"] == 0 else "in the pool, not put back")
        out.unlink()

    return undo


def _strange_client(stage: Stage, fault: Fault) -> Undo:
    return _stranger(stage, StrangeClient(stage.site.proxy, fault.seed))


def _strange_engine(stage: Stage, fault: Fault) -> Undo:
    return _stranger(stage, StrangeEngine(stage.site.url, fault.seed))


def _tricky_engine(stage: Stage, fault: Fault) -> Undo:
    """Starts an engine that plays one of the tricks of `engine_abuse`: with lent memory, messages, lifelines or connections."""
    site, trick = stage.site, random.Random(fault.seed).choice(sorted(TRICKS))
    command = (sys.executable, "-m", "bench.suites.soak.engine_abuse", site.url, trick, "--seconds", str(fault.seconds))
    with (site.logs / "tricks.log").open("ab") as log:
        engine = spawn_child(
            command, death_signal=signal.SIGKILL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    stage.acts += 1

    def undo() -> None:
        engine.kill()
        engine.wait()

    return undo


def _strange_record(stage: Stage, fault: Fault) -> Undo:
    return _stranger(stage, StrangeWriter(stage.site.etcd, CLUSTER, fault.seed))


def _etcd_down(stage: Stage, fault: Fault) -> Undo:
    """etcd is stopped, or killed, or comes back with an empty disk."""
    how = random.Random(fault.seed).choice(("stopped", "killed", "wiped"))
    if how == "stopped":
        return _stop(stage, fault)
    stage.cluster[fault.target].kill(fault.seconds)
    if how == "wiped":
        shutil.rmtree(stage.site.etcd_data)
    return _nothing


def _stranger(stage: Stage, stranger: Stranger) -> Undo:
    stranger.start()

    def undo() -> None:
        stranger.leave()
        stage.acts += stranger.acts

    return undo


def _reset(stage: Stage, fault: Fault) -> Undo:
    """All engines get other weights, and one of them tells the others."""
    stage.resets.begin(fault.target)
    return _nothing


def _nothing() -> None:
    return


def _chattr(change: str, folder: Path) -> None:
    subprocess.run(("chattr", "-R", change, str(folder)), check=False, capture_output=True, timeout=20)


def _remount(folder: Path, how: str) -> None:
    subprocess.run(("mount", "-o", f"remount,{how}", str(folder)), check=True, capture_output=True, timeout=20)


ACTIONS: Mapping[str, Callable[[Stage, Fault], Undo]] = {
    "kill": _kill,
    "stop": _stop,
    "cut": _cut,
    "clock": _clock,
    "small_pool": _small_pool,
    "disk_full": _disk_full,
    "disk_refuses": _disk_refuses,
    "disk_read_only": _disk_read_only,
    "disk_gone": _disk_gone,
    "disk_folders": _disk_folders,
    "disk_damage": _disk_damage,
    "pool_damage": _pool_damage,
    "reset": _reset,
    "strange_client": _strange_client,
    "strange_engine": _strange_engine,
    "tricky_engine": _tricky_engine,
    "strange_record": _strange_record,
    "etcd_down": _etcd_down,
}
"""By the names of `kinds`; a kind and an action are all that a new fault needs."""
