"""The process that drives a cache engine: `python -m bench.suites.soak.driver NAME FILE HOST SEED FIRST`, started by `cluster`.

`engine-a` has a `CacheEngine` of its own, `engine-b` a `ServerCache` for each lane, over the cache server of the file. Each lane is
a thread with a paged buffer of its own. It does one operation of the plan after the other, and compares the whole buffer after each.

It prints a line of JSON when an operation begins and when it ends, and reads commands as lines of JSON from stdin:

    {"do": "go"}, {"do": "pause"}            lanes work, or rest once their operations have ended ("paused")
    {"do": "press", "seconds": n}            operations under pressure for a while (`plan.pressed`)
    {"do": "check", "prompts": [...], "mode": "store" | "load", "seconds": n}     see `_check`
    {"do": "settle", "seconds": n}           what is held while nothing is under way ("settled")
    {"do": "weights", "number": n}           from now on compute with other weights ("weights")
    {"do": "reset", "number": n}             tell all nodes that weights have changed ("reset", and whether the pool took it)
    {"do": "end"}, or the end of stdin       close and exit
"""

from __future__ import annotations

import faulthandler
import json
import logging
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bench.suites.soak.oracle import TOKEN_BYTES, PagedBuffer, Wrong, places, prefixes
from bench.suites.soak.plan import CHUNK, Operation, OperationKind, PlannedPrompt, operations, pressed, tokens_of
from pd_cache.cluster import CacheServerNode, read_config
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.engine import CacheEngine, CacheEngineBuilder
from pd_cache.layout import KVLayout
from pd_cache.prompts import PromptCache
from pd_cache.tokens import CacheMetadata

MODEL = "soak@1"
LANES = {"engine-a": 4, "engine-b": 3}
REMOTE_LOOKUP_S, REMOTE_MOVE_S = 1.0, 8.0
_CLOSE_S = 30.0


class Cache(Protocol):
    """What a lane calls, in both kinds of engine."""

    removes: bool

    def lookup(self, tokens: list[int], timeout: float) -> int: ...
    def retrieve(self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, timeout: float) -> torch.Tensor: ...
    def store(self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, epoch: str, timeout: float) -> int: ...
    def remove(self, tokens: list[int], timeout: float) -> None: ...
    def bound(self, kind: OperationKind, chunks: int, timeout: float) -> float:
        """Returns the seconds within which an operation has to be answered."""

    def epoch(self) -> str | None:
        """Returns the epoch of the weights, as last known."""

    def reset(self) -> bool:
        """Begins a new epoch. Returns whether the pool took it."""


class OwnCache:
    """A lane's view of the process's `CacheEngine`."""

    removes = True

    def __init__(self, engine: CacheEngine, buffer: PagedBuffer) -> None:
        self._engine, self._kv = engine, buffer.tensors
        self._prompts = PromptCache(engine)

    def lookup(self, tokens: list[int], timeout: float) -> int:
        return self._prompts.lookup(tokens, timeout=timeout)

    def retrieve(self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, timeout: float) -> torch.Tensor:
        return self._prompts.retrieve(tokens, mask, kv_caches=self._kv, slot_mapping=slots, timeout=timeout)

    def store(self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, epoch: str, timeout: float) -> int:
        return self._prompts.store(tokens, mask, kv_caches=self._kv, slot_mapping=slots, epoch=epoch, timeout=timeout)

    def remove(self, tokens: list[int], timeout: float) -> None:
        database = self._engine.database
        self._engine.backend.batched_remove(database.keys(database.hash_tokens(tokens)), timeout=timeout)

    def bound(self, kind: OperationKind, chunks: int, timeout: float) -> float:
        return timeout

    def epoch(self) -> str | None:
        return self._engine.epoch

    def reset(self) -> bool:
        return self._engine.reset() is not None


class ServedCache:
    """A lane's own connection to the cache server."""

    removes = False

    def __init__(self, url: str, metadata: CacheMetadata, layout: KVLayout, buffer: PagedBuffer) -> None:
        from pd_cache.client.identity import EngineIdentity
        from pd_cache.client.server_cache import ServerCache

        self._kv = buffer.tensors
        identity = EngineIdentity.of(metadata, CacheConfig(chunk_size=CHUNK))
        self.remote = ServerCache(url, identity, lookup_timeout_s=REMOTE_LOOKUP_S, move_timeout_s=REMOTE_MOVE_S)
        try:
            self.remote.register_kv_caches(self._kv, layout.kind)
        except BaseException:
            self.remote.close()
            raise
        self._prompts = PromptCache(self.remote)

    def lookup(self, tokens: list[int], timeout: float) -> int:
        return self._prompts.lookup(tokens, session=threading.current_thread().name)

    def retrieve(self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, timeout: float) -> torch.Tensor:
        return self._prompts.retrieve(
            tokens, mask, kv_caches=self._kv, slot_mapping=slots, session=threading.current_thread().name
        )

    def store(self, tokens: list[int], mask: torch.Tensor, slots: torch.Tensor, epoch: str, timeout: float) -> int:
        return self._prompts.store(tokens, mask, kv_caches=self._kv, slot_mapping=slots, epoch=epoch)

    def remove(self, tokens: list[int], timeout: float) -> None:
        raise NotImplementedError("a cache server's clients remove nothing")

    def bound(self, kind: OperationKind, chunks: int, timeout: float) -> float:
        return REMOTE_MOVE_S if kind in ("store", "retrieve") else REMOTE_LOOKUP_S

    def epoch(self) -> str | None:
        return self.remote.epoch

    def reset(self) -> bool:
        return self.remote.reset() is not None


class Performed:
    """The outcome of an operation."""

    def __init__(self) -> None:
        self.hit = 0
        """Tokens found, loaded or newly stored."""
        self.compared = 0
        """Bytes of the paged buffer that were compared."""
        self.tokens = 0
        """Loaded tokens among them, each checked against what its prefix makes it."""
        self.weights = 0
        """The earliest weights that computed any of them."""
        self.wrong = 0
        self.first: list[Wrong] = []
        self.complaint = ""
        """An answer that cannot be right, or the exception that was raised."""
        self.raised = False


def perform(cache: Cache, buffer: PagedBuffer, operation: Operation, seed: int, canary: int, weights: Callable[[], int] = lambda: 0) -> Callable[[Callable[[], None]], Performed]:  # fmt: skip
    """Prepares an operation. Returns a function that calls the cache between two calls of its argument, then compares. `weights` returns the
    number of the weights that the engine computes with."""
    tokens = tokens_of(seed, operation.prompt)
    # the epoch first: weights change before it does, so that the KV of a store is never older than the epoch that the store bears
    epoch = cache.epoch()
    if operation.kind == "store" and epoch is None:
        operation = operation._replace(kind="lookup")  # the first lookup tells
    names = prefixes(tokens, weights())
    buffer.know(names, f"{operation.prompt}")
    slots = places(random.Random(operation.places), len(tokens), operation.scattered)
    mapping = torch.from_numpy(slots.copy())
    mask = torch.arange(len(tokens)) >= operation.first * CHUNK
    end = len(tokens) // CHUNK * CHUNK
    buffer.fill(canary)
    if operation.kind == "store":
        buffer.put(slots, names)

    def run(mark: Callable[[], None]) -> Performed:
        done = Performed()
        loaded, may_differ = np.zeros(0, np.int64), np.zeros(0, np.int64)
        first = operation.first * CHUNK
        mark()
        try:
            if operation.kind == "store":
                assert epoch is not None
                done.hit = cache.store(tokens, mask, mapping, epoch, operation.timeout)
            elif operation.kind == "retrieve":
                answer = cache.retrieve(tokens, mask, mapping, operation.timeout)
            elif operation.kind == "remove":
                cache.remove(tokens, operation.timeout)
            else:
                done.hit = cache.lookup(tokens, operation.timeout)
        except Exception:  # noqa: BLE001 - no exception of any kind may be raised into an engine
            done.complaint, done.raised = traceback.format_exc(), True
            mark()
            return done
        mark()
        if operation.kind == "store":
            loaded = np.arange(len(tokens))  # a store reads the buffer, and leaves it as it is
            if done.hit > end - first or done.hit < 0 or done.hit % CHUNK:
                done.complaint = f"store answered {done.hit} of {end - first} tokens"
        elif operation.kind == "retrieve":
            done.hit = int(answer.sum())
            whole = done.hit % CHUNK == 0 and first + done.hit <= end
            if not whole or len(answer) != len(tokens) or not bool(answer[first : first + done.hit].all()):
                done.complaint = f"retrieve answered {done.hit} tokens that are no run of whole chunks from {first} on"
            loaded = np.arange(first, first + done.hit)
            may_differ = slots[first + done.hit : end]  # wanted and not loaded: they may have been overwritten
        elif operation.kind in ("lookup", "unknown"):
            if done.hit > end or done.hit % CHUNK or done.hit < 0:
                done.complaint = f"lookup answered {done.hit} of {end} tokens"
            elif operation.kind == "unknown" and done.hit:
                done.complaint = f"lookup found {done.hit} tokens of a prompt that nobody stored"
        expected = names[loaded]
        if operation.kind == "retrieve" and done.hit and not done.complaint:
            # the other engine may have its next weights before this one hears of them
            expected, done.weights = buffer.recognise(
                slots[loaded], lambda number: prefixes(tokens, number)[loaded], weights() + 1
            )
        done.wrong, done.first = buffer.compare(slots[loaded], expected, may_differ, canary)
        done.compared = buffer.words.nbytes - len(may_differ) * TOKEN_BYTES
        done.tokens = done.hit if operation.kind == "retrieve" else 0
        return done

    return run


class SoakLane(threading.Thread):
    """One thread that calls the cache."""

    def __init__(self, driver: Driver, number: int, first: int) -> None:
        super().__init__(name=f"lane-{number}", daemon=True)
        self.label = f"{driver.name}/{number}"
        self._driver = driver
        self.buffer = PagedBuffer()
        self.cache = driver.open(self.buffer)
        self.resting = threading.Event()
        self._first = first
        self._serial = random.Random(self.label).randrange(1 << 62)

    def run(self) -> None:
        driver = self._driver
        endless = operations(driver.seed, self.label, self.cache.removes)
        for operation in dropwhile(lambda one: one.number < self._first, endless):
            if not driver.go.is_set():
                self.resting.set()
                driver.go.wait()
                self.resting.clear()
            if time.monotonic() < driver.pressed_until:
                operation = pressed(operation, self.label)
            if driver.closing.wait(operation.pause):
                return
            try:
                self.do(operation)
            except Exception:  # noqa: BLE001 - a fault of this program itself ends the run, not a lane in silence
                driver.say(e="broken", lane=self.label, what=traceback.format_exc())
                self.resting.set()
                return

    def do(self, operation: Operation) -> Performed:
        """Does one operation and reports it."""
        self._serial += 1
        canary = (self._serial * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        prepared = perform(self.cache, self.buffer, operation, self._driver.seed, canary, lambda: self._driver.weights)
        bound = self.cache.bound(operation.kind, operation.prompt.chunks, operation.timeout)
        times: list[tuple[float, float]] = []

        def mark() -> None:
            times.append((time.time(), _starved_s()))
            if len(times) == 1:
                self._driver.say(
                    e="begin", lane=self.label, n=operation.number, kind=operation.kind, bound=bound, t=times[0][0]
                )

        done = prepared(mark)
        self._driver.say(
            e="end", lane=self.label, n=operation.number, kind=operation.kind, bound=bound, begin=times[0][0], end=times[1][0],
            starved=times[1][1] - times[0][1], hit=done.hit, compared=done.compared, tokens=done.tokens, weights=done.weights, wrong=done.wrong,
            first=[one._asdict() for one in done.first], complaint=done.complaint, raised=done.raised,
            prompt=operation.prompt._asdict() if done.wrong or done.complaint else None,
        )  # fmt: skip
        return done


class Driver:
    """The process."""

    def __init__(self, name: str, file: Path, host: str, seed: int, first: Mapping[str, int]) -> None:
        self.name, self.host, self.seed = name, host, seed
        self.go, self.closing = threading.Event(), threading.Event()
        self._printing = threading.Lock()
        self.pressed_until = 0.0
        self.weights = 0
        """The number of the weights that it computes with."""
        self._config, _ = read_config(file)
        self.engine: CacheEngine | None = None
        self.lanes = [SoakLane(self, number, first.get(f"{name}/{number}", 0)) for number in range(LANES[name])]

    def say(self, **fields: Any) -> None:
        """Prints a line of JSON on stdout."""
        with self._printing:
            sys.stdout.write(json.dumps(fields) + "\n")
            sys.stdout.flush()

    @property
    def _url(self) -> str:
        """Where the cache server listens."""
        server = self._config.node("cache")
        assert isinstance(server, CacheServerNode)
        return self._config.server_url(server)

    def open(self, buffer: PagedBuffer) -> Cache:
        """Returns the cache of one more lane."""
        config = self._config
        layout = KVLayout.from_tensors(buffer.tensors)
        metadata = CacheMetadata.of(MODEL, layout)
        if self.name == "engine-b":
            return ServedCache(self._url, metadata, layout, buffer)
        settings = NodeSettings(
            master=config.master_address, host=self.host, cache=config.cache, transfer=config.transfer
        )
        self.engine = CacheEngineBuilder.get_or_create(self.name, settings, metadata, layout)
        return OwnCache(self.engine, buffer)

    def run(self) -> None:
        """Runs until stdin ends or says so."""
        for lane in self.lanes:
            lane.start()
        print(f"ready {self.name}", flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            what = command["do"]
            if what == "go":
                self.go.set()
            elif what == "pause":
                self.go.clear()
                self.say(e="paused", busy=[lane.label for lane in self.lanes if not lane.resting.wait(100.0)])
            elif what == "press":
                self.pressed_until = time.monotonic() + command["seconds"]
            elif what == "check":
                self._check([PlannedPrompt(**one) for one in command["prompts"]], command["mode"], command["seconds"])
            elif what == "settle":
                self.say(e="settled", **self._slots_left(command["seconds"]))
            elif what == "weights":
                self.weights = command["number"]
                self.say(e="weights", number=self.weights)
            elif what == "reset":
                self._reset(command["number"])
            elif what == "end":
                break
        self.close()

    def close(self) -> None:
        self.closing.set()
        self.go.set()
        for lane in self.lanes:
            lane.join(_CLOSE_S)
        for lane in self.lanes:
            if isinstance(lane.cache, ServedCache):
                lane.cache.remote.close()
        CacheEngineBuilder.destroy(self.name)

    def _reset(self, number: int) -> None:
        taken, complaint = False, ""
        try:
            taken = self.lanes[0].cache.reset()
        except Exception:  # noqa: BLE001 - no exception of any kind may be raised into an engine
            complaint = traceback.format_exc()
        self.say(e="reset", number=number, taken=taken, complaint=complaint, end=time.time())

    def _check(self, prompts: Sequence[PlannedPrompt], mode: str, seconds: float) -> None:
        """Tries until every prompt is found and loaded whole; with `store`, stores it first.

        Done on this thread with the first lane's buffer, whose thread rests.
        """
        lane, left, begin = self.lanes[0], list(prompts), time.monotonic()
        number = -1
        missing: list[str] = []
        while left and time.monotonic() - begin < seconds:
            missing = []
            for prompt in list(left):
                whole = prompt.chunks * CHUNK
                kinds: tuple[OperationKind, ...] = ("store", "lookup", "retrieve") if mode == "store" else ("lookup", "retrieve")  # fmt: skip
                hits = {}
                for kind in kinds:
                    hits[kind] = lane.do(Operation(number, kind, prompt, 0, False, number & 0xFFFF, 5.0, 0.0)).hit
                    number -= 1
                if hits["lookup"] == whole and hits["retrieve"] == whole:
                    left.remove(prompt)
                else:
                    missing.append(f"{prompt}: {hits} of {whole}")
            if left:
                time.sleep(0.5)
        self.say(e="checked", mode=mode, seconds=time.monotonic() - begin, prompts=len(prompts), missing=missing if left else [])  # fmt: skip

    def _slots_left(self, seconds: float) -> dict[str, Any]:
        """Returns how many slots are held that should not be, a failed assertion of the memory, and the server's report."""
        end = time.monotonic() + seconds
        if self.engine is None:
            return {"slots": 0, "integrity": "", "server": _server_report(self._url)}
        while (slots := _slots_in_use(self.engine)) and time.monotonic() < end:
            time.sleep(0.1)
        try:
            self.engine.backend.memory.pool.check_integrity()
            integrity = ""
        except AssertionError as error:
            integrity = str(error) or "an assertion of check_integrity failed"
        return {"slots": slots, "integrity": integrity, "server": {}}


def _slots_in_use(engine: CacheEngine) -> int:
    """Returns how many slots are in use, not counting those in which the local tier keeps its entries."""
    from pd_cache.backends.hybrid import HybridBackend
    from pd_cache.backends.local import LocalBackend

    backend = engine.backend
    kept = 0
    if isinstance(backend, HybridBackend):
        backend.flush(0.5)
        kept = sum(len(tier.backend.index) for tier in backend.tiers if isinstance(tier.backend, LocalBackend))
    return backend.memory.pool.in_use - kept


def _server_report(url: str) -> dict[str, Any]:
    """Returns what the cache server says about itself; empty if it does not answer."""
    from pd_cache.client.observer import server_status
    from pd_cache.errors import PdCacheError

    try:
        report = server_status(url, 5.0)
    except PdCacheError:
        return {}
    return {name: getattr(report, name) for name in ("clients", "workers", "sessions", "pinned", "in_flight")}


def _starved_s() -> float:
    """Returns for how many seconds the kernel has let this thread wait for a processor so far."""
    try:
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def main(name: str, file: str, host: str, seed: str, first: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    torch.set_num_threads(1)
    driver = Driver(name, Path(file), host, int(seed), json.loads(first))

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        driver.run()
    except SystemExit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        driver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
