"""The process that drives a cache engine: `python -m tests.soak.engine NAME FILE HOST SEED START`, started by
`cluster`.

`engine-a` has a `CacheEngine` of its own, `engine-b` a `RemoteCache` for each lane, over the cache server of
the file. Each lane is a thread with a paged buffer of its own; it does one operation of the plan after the
other. START counts the starts of this engine.

As in vLLM, `Costs` decides whether what was found is loaded. It measures the real loads. Computing takes
invented times: a prompt is computed at once, or behind a queue of others.

It prints a line of JSON when an operation begins and when it ends, and reads commands as lines of JSON from
stdin. Each command but `press` is answered with a line `{"e": NAME OF THE COMMAND, ...}`:

    {"do": "go"}, {"do": "pause"}                  lanes work, or rest once their operations have ended
    {"do": "press", "seconds": n, "loads": bool}   operations under pressure for a while (`oracle.pressed`)
    {"do": "check", "prompts": [...], "stores": bool, "seconds": n}    until each is loaded whole
    {"do": "settle", "seconds": n}                             what is held while nothing is under way
    {"do": "weights", "number": n}                             from now on compute with other weights
    {"do": "name", "label": l, "ids": [i]}                     give the weights a label
"""

import faulthandler
import functools
import itertools
import json
import logging
import math
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from pd_cache.cache import CacheEngineBuilder, PromptCache
from pd_cache.chunks import CacheMetadata
from pd_cache.cluster import read_config
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.layout import KVLayout
from pd_cache.reasons import TierChunks
from pd_cache.server.client import RemoteCache
from pd_cache.server.protocol import EngineIdentity
from pd_cache.tiers.hybrid import HybridBackend
from pd_cache.tiers.local import LocalBackend
from pd_cache.versions import Naming, WeightsVersion
from pd_cache.vllm.costs import Costs, LinkTime, StepWork
from tests.soak.cluster import MODEL
from tests.soak.oracle import (  # fmt: skip
    CHUNK,
    Operation,
    PagedBuffer,
    Prompt,
    operations,
    perform,
    pressed,
)
from tests.support.server import running_at

LANES = {"engine-a": 4, "engine-b": 3}
_COMPUTED_S = 1e6
"""Tokens that an engine would compute in a second: more than any link brings."""
_QUEUE_S = 5.0
"""How long two of three prompts would wait until they are computed."""


class Judge:
    """The costs of an engine, as vLLM's scheduler and its worker keep them. Thread-safe."""

    def __init__(self):
        self._lock, self._costs, self._link = threading.Lock(), Costs(), LinkTime()
        self._begun = {}
        for end in range(1, 4):
            self._costs.step_ended(StepWork(end - 1000 / _COMPUTED_S, 1000, 1000, 500_000.0), end)

    def declines(self, lane, tiers, position, queue_s):
        """Returns whether to compute these tokens instead of loading them; if not, their load begins."""
        now = time.monotonic()
        with self._lock:
            verdict = self._costs.not_worth(tiers, position, [(queue_s * _COMPUTED_S, 1.0)], now)
            if verdict is not None and not verdict.probe:
                return True
            self._costs.load_began(lane, tiers, now)
            self._begun[lane] = self._link.passed(now, 1)
        return False

    def ended(self, lane, whole):
        """Notes the end of a load: all of it came, or its deadline (None for another trouble)."""
        with self._lock:
            took = self._link.passed(time.monotonic(), -1) - self._begun.pop(lane)
            self._costs.load_ended(lane, took if whole is not None else None, whole=bool(whole))


class Choosing(PromptCache):
    """Loads what is worth loading. Belongs to one lane."""

    def __init__(self, cache, judge, lane):
        super().__init__(cache)
        self._judge, self._lane = judge, lane
        self.queue_s = math.inf
        """How long the next prompt would wait until it is computed."""
        self.declined = 0
        """Tokens that were found and not loaded, since a lane asked last."""

    def retrieve(self, tokens, mask, *, session, timeout, **options):
        end = time.monotonic() + timeout
        first = int((~mask).sum()) // CHUNK
        found = self.cache.find(
            self.cache.name_chunks(tokens), chunks_at_hand=first, session=session, timeout=timeout
        )
        wanted = found.chunks - first
        if wanted <= 0:
            return torch.zeros(len(tokens), dtype=torch.bool)
        memory = min(found.near.memory, wanted)
        disk = min(found.near.disk, wanted - memory)
        tiers = TierChunks(memory * CHUNK, disk * CHUNK, (wanted - memory - disk) * CHUNK)
        if self._judge.declines(self._lane, tiers, first * CHUNK, self.queue_s):
            self.declined += wanted * CHUNK
            self.cache.end(session)
            return torch.zeros(len(tokens), dtype=torch.bool)
        whole = None
        try:
            left = max(0.0, end - time.monotonic())
            answer = super().retrieve(tokens, mask, session=session, timeout=left, **options)
            if int(answer.sum()) >= wanted * CHUNK or time.monotonic() >= end:
                whole = time.monotonic() < end
            return answer
        finally:
            self._judge.ended(self._lane, whole)


class Lane(threading.Thread):
    """One thread that calls the cache."""

    def __init__(self, driver, number):
        super().__init__(name=f"lane-{number}", daemon=True)
        self.label = f"{driver.name}/{number}"
        self._driver = driver
        self._serial = itertools.count(random.Random(f"{self.label}/{driver.start}").randrange(1 << 62))
        self.buffer = PagedBuffer()
        self.cache = Choosing(driver.open(self.buffer), driver.judge, self.label)
        self.in_copy = False
        """Whether the operation found the cache server in the middle of a copy into the buffer."""
        if isinstance(self.cache.cache, RemoteCache):
            fence = self.cache.cache.connection.fence
            fence.revoke = functools.partial(self._revoke, fence.revoke)
        self.resting = threading.Event()

    def run(self):
        driver = self._driver
        plan = operations(driver.seed, f"{self.label}/{driver.start}", driver.engine is not None)
        for number, planned in enumerate(plan):
            if not driver.go.is_set():
                self.resting.set()
                driver.go.wait()
                self.resting.clear()
            operation = planned
            if time.monotonic() < driver.pressed_until:
                operation = pressed(planned, number, f"{self.label}/{driver.start}", driver.pressed_by_loads)
            if driver.closing.wait(operation.pause):
                return
            self.cache.queue_s = _QUEUE_S if operation.places % 3 else 0.0
            try:
                self.do(operation)
            except Exception:  # noqa: BLE001 - a fault of this program itself ends the run, not a lane in silence
                driver.say("broken", what=f"{self.label}: {traceback.format_exc()}")
                self.resting.set()
                return

    def do(self, operation):
        """Does one operation and reports it."""
        driver, bound = self._driver, operation.timeout
        self.in_copy = False
        canary = (next(self._serial) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        times = []

        def mark():
            times.append((time.time(), _starved_s()))
            if len(times) == 1:
                driver.say("begin", lane=self.label, kind=operation.kind, bound=bound, begin=times[0][0])

        done = perform(self.cache, self.buffer, operation, driver.seed, canary, lambda: driver.weights, mark)
        (begin, before), (end, after) = times
        driver.say(
            "end", lane=self.label, kind=operation.kind, bound=bound, begin=begin, end=end, starved=after - before,
            prompt=str(operation.prompt), declined=self.cache.declined, in_copy=self.in_copy, **vars(done),
        )  # fmt: skip
        self.cache.declined = 0
        return done

    def _revoke(self, revoke, slot, ticket):
        removed = revoke(slot, ticket)
        self.in_copy |= not removed
        return removed


class Driver:
    """The process."""

    def __init__(self, name, file, host, seed, start):
        self.name, self.host, self.seed, self.start = name, host, seed, start
        self.go, self.closing, self._printing = threading.Event(), threading.Event(), threading.Lock()
        self.pressed_until, self.pressed_by_loads = 0.0, False
        self.weights = 0
        """The number of the weights that it computes with."""
        self._config = read_config(file)[0]
        server = self._config.node("cache")
        self._url = self._config.server_url(server)
        self._metrics = f"http://{server.host}:{server.metrics_port}"
        self.engine = None
        self.judge = Judge()
        self.version = WeightsVersion()
        """That of the weights of all lanes."""
        self.lanes = [Lane(self, number) for number in range(LANES[name])]

    def say(self, event, **fields):
        """Prints a line of JSON on stdout."""
        with self._printing:
            print(json.dumps({"e": event, **fields}), flush=True)

    def open(self, buffer):
        """Returns the cache of one more lane."""
        config, layout = self._config, KVLayout.from_tensors(buffer.tensors)
        metadata = CacheMetadata.of(MODEL, layout)
        if self.name == "engine-b":
            identity = EngineIdentity.of(metadata, CacheConfig(chunk_size=CHUNK))
            remote = RemoteCache(
                self._url, identity, lookup_timeout_s=1.0, move_timeout_s=8.0, version=self.version
            )
            remote.register_kv_caches(buffer.tensors, layout.kind)
            return remote
        settings = NodeSettings(
            master=config.master_address,
            host=self.host,
            cache=config.cache,
            transfer=config.transfer,
        )
        self.engine = CacheEngineBuilder.get_or_create(
            self.name, settings, metadata, layout, version=self.version
        )
        return self.engine

    def run(self):
        """Runs until stdin ends."""
        for lane in self.lanes:
            lane.start()
        print(f"ready {self.name}", flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(self, f"_{command.pop('do')}")(**command)
            if answer is not None:
                self.say(json.loads(line)["do"], **answer)

    def close(self):
        self.closing.set()
        self.go.set()
        for lane in self.lanes:
            lane.join(30.0)
        for lane in self.lanes:
            lane.cache.cache.close()
        CacheEngineBuilder.destroy(self.name)

    # --- commands -------------------------------------------------------------------------------------------

    def _go(self):
        self.go.set()
        return {}

    def _pause(self):
        self.go.clear()
        return {"busy": [lane.label for lane in self.lanes if not lane.resting.wait(60.0)]}

    def _press(self, seconds, loads):
        self.pressed_by_loads = loads
        self.pressed_until = time.monotonic() + seconds

    def _weights(self, number):
        """Changes the weights as an engine does that pauses for it: what was computed before is stored or
        loaded before."""
        self.version.reset()
        self.weights = number
        return {"number": number, "id": self.version.state.id, "end": time.time()}

    def _name(self, label, ids):
        return {"label": self.version.name(Naming(label=label, ids=tuple(ids))).label}

    def _check(self, prompts, stores, seconds):
        """Tries until every prompt is found and loaded whole; with `stores`, stores it first. The first lane,
        whose thread rests, does it. It declines no load until all were loaded."""
        self.lanes[0].cache.queue_s = math.inf
        kinds = ("store", "lookup", "retrieve") if stores else ("lookup", "retrieve")
        left, end, missing = [Prompt(*one) for one in prompts], time.monotonic() + seconds, ["not tried"]
        while left and time.monotonic() < end:
            missing = []
            for prompt in list(left):
                hits = {kind: self.lanes[0].do(Operation(kind, prompt, 0, 0, 5.0, 0.0)).hit for kind in kinds}
                if hits["lookup"] == hits["retrieve"] == prompt.chunks * CHUNK:
                    left.remove(prompt)
                else:
                    missing.append(f"{prompt}: {hits} of {prompt.chunks * CHUNK}")
            if left:
                time.sleep(0.5)
        self.lanes[0].cache.queue_s = 0.0
        for one in prompts:
            self.lanes[0].do(Operation("retrieve", Prompt(*one), 0, 0, 5.0, 0.0))
        return {"missing": missing if left else []}

    def _settle(self, seconds):
        """Returns what is held that should not be: slots of staging memory, or the cache server's moves."""
        held = []
        end = time.monotonic() + seconds
        while (held := self._held()) and time.monotonic() < end:
            time.sleep(0.1)
        return {"held": held}

    def _held(self):
        if self.engine is None:
            try:
                moves = running_at(self._metrics)
            except (OSError, ValueError) as error:
                return [f"the cache server does not answer: {error}"]
            return [f"the cache server has {moves:.0f} moves in flight"] if moves else []
        backend, kept = self.engine.backend, 0
        if isinstance(backend, HybridBackend):
            kept = sum(
                len(tier.backend.index) for tier in backend.tiers if isinstance(tier.backend, LocalBackend)
            )
        pool = backend.memory.pool
        try:
            pool.check_integrity()
        except AssertionError as error:
            return [f"{self.name}'s staging memory: {error}"]
        return (
            [f"{self.name} holds {pool.in_use - kept} slots of staging memory"] if pool.in_use > kept else []
        )


def _starved_s():
    """Returns for how many seconds the kernel has let this thread wait for a processor so far."""
    try:
        return (
            int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9
        )
    except (OSError, IndexError, ValueError):
        return 0.0


def main(name, file, host, seed, start):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    torch.set_num_threads(1)
    driver = Driver(name, Path(file), host, int(seed), int(start))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        driver.run()
    except SystemExit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    driver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
