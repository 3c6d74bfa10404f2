"""CacheServer: the cache of one host, for any number of engines.

One thread receives requests and answers what needs no waiting. A pool of threads does the rest, in an order that is fair
between engines; one of them is kept for lookups, so that no transfer holds those up. A third kind of thread keeps house: it
renews leases, ends sessions that are late, and forgets clients that are gone.

What a client lent (its tensors) and what it holds (its sessions) go with it, whether it says goodbye or is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from prometheus_client import generate_latest

import pd_cache
from pd_cache.backends import StorageBackend, open_backend
from pd_cache.config import CacheConfig, CacheServerNode, NodeSettings
from pd_cache.engine import ChunkMover, ChunkRun
from pd_cache.errors import LayoutError, PdCacheError
from pd_cache.layout import KVLayout
from pd_cache.lookup.prefix import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.paged import ChunkSlots, host_pin
from pd_cache.server.channel import CacheServerError, Incoming, ServerChannel
from pd_cache.server.fence import AbandonedError, FenceView
from pd_cache.server.lifeline import LifelineServer
from pd_cache.server.messages import (
    Answer,
    Done,
    EndSession,
    Found,
    Hello,
    Loaded,
    Lookup,
    Move,
    Refused,
    Register,
    Retrieve,
    StatusQuery,
    StatusReport,
    Store,
    Stored,
    Unregister,
    Welcome,
    count_names,
    split_names,
)
from pd_cache.server.queueing import FairQueue, Item, Lane
from pd_cache.server.sessions import Sessions
from pd_cache.server.sharing import FencedCopier, MappedTensors, SharingError, close_all
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase
from transfer.errors import Status

log = logging.getLogger(__name__)

OpenBackend = Callable[[NodeSettings, int], StorageBackend]

_MAX_CLIENTS = 256
_MAX_BACKENDS = 4
"""Sizes of payload, each with a backend of its own."""
_TICK_S = 0.5
_UNMAP_S = 5.0
_DESCRIPTORS_S = 5.0
"""How long the descriptors of a registration may take longer than its message."""
_LEASE_BATCH = 1000
_MOST_QUESTIONS = 16
"""Lookups that are asked together."""


class _RefusalError(Exception):
    """A request that is not done, with what its sender is told."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.refused = Refused(reason, message)


class _Group(NamedTuple):
    """Engines that say these same things share chunks, or should: what their tensors are decides."""

    model: str
    world_size: int
    block_size: int
    hash_mode: Literal["tokens", "blocks"]
    hash_seed: str


class _Model:
    """What is known of a group once one of its workers has registered."""

    def __init__(self, group: _Group, metadata: CacheMetadata, cache: CacheConfig) -> None:
        self.group = group
        self.metadata = metadata
        named = msgspec.structs.replace(cache, hash_mode=group.hash_mode, hash_seed=group.hash_seed)
        self.database = ChunkedTokenDatabase(metadata.namespace(named))
        self.workers: set[str] = set()
        self.mover: ChunkMover
        self.prefix: PrefixLookup


class _Worker(NamedTuple):
    """A registration: tensors that are mapped, and may be touched as their fence allows."""

    model: _Model
    rank: int
    tensors: MappedTensors


class _Client:
    """A connection that has said hello."""

    def __init__(self, hello: Hello, group: _Group) -> None:
        self.hello = hello
        self.group = group
        self.worker: _Worker | None = None
        self.gone = False
        self.registering = threading.Lock()
        self.last_seen = time.monotonic()


class _Question(NamedTuple):
    """A lookup."""

    model: _Model
    session: str
    held: int
    """Tokens."""
    names: list[bytes]


class _Work(NamedTuple):
    incoming: Incoming
    client: _Client
    job: Callable[[], Answer] | _Question
    begin_by: float


class CacheServer:
    """Serves engines from construction until `close`. Thread-safe."""

    def __init__(
        self,
        settings: NodeSettings,
        node: CacheServerNode,
        url: str,
        *,
        metrics: CacheMetrics | None = None,
        lease_s: float = 10.0,
        backend: OpenBackend | None = None,
    ) -> None:
        """Listen at `url`. CacheServerError if that cannot be, or if another server does already.

        `lease_s` is for how long the pool's master protects a key that was asked for. `backend` replaces the configured
        tiers.
        """
        self.settings = settings
        self.node = node
        self.metrics = metrics or CacheMetrics()
        self.sessions = Sessions()
        self._open_backend = backend
        self._renew_s = max(0.1, lease_s / 3)
        self._server = uuid.uuid4().hex
        self._up_since = time.time()
        self._clients: dict[bytes, _Client] = {}
        self._models: dict[_Group, _Model] = {}
        self._backends: dict[int, StorageBackend] = {}
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._queue: FairQueue[_Work] = FairQueue(node.max_in_flight)
        self._stop = threading.Event()
        self._closed = False
        with contextlib.ExitStack() as stack:
            lifeline = _own_address(url, stack)
            self.channel = ServerChannel(url)
            stack.callback(self.channel.close)
            self._lifeline = LifelineServer(lifeline, self._gone)
            stack.callback(self._lifeline.close)
            self._resources = stack.pop_all()
        self._threads = [
            threading.Thread(target=self._receive, name="pd-cache-receive", daemon=True),
            threading.Thread(target=self._keep_house, name="pd-cache-house", daemon=True),
        ]
        for index in range(node.threads):
            lanes = (Lane.QUICK,) if index == 0 else (Lane.QUICK, Lane.BULK)
            self._threads.append(
                threading.Thread(target=self._work, args=(lanes,), name=f"pd-cache-work-{index}", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.channel.url

    def status(self) -> StatusReport:
        """What it is doing."""
        with self._lock:
            clients = list(self._clients.values())
            backends = list(self._backends.values())
        return StatusReport(
            software=pd_cache.__version__,
            pid=os.getpid(),
            up_since=self._up_since,
            clients=len(clients),
            workers=sum(client.worker is not None for client in clients),
            sessions=len(self.sessions),
            pinned=self.sessions.pinned,
            in_flight=self._queue.in_flight,
            available=any(backend.available for backend in backends),
            metrics=generate_latest(self.metrics.registry).decode(),
        )

    def close(self) -> None:
        """Refuse what waits, finish or abandon what runs, unmap, close the backends. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            movers = [model.mover for model in self._models.values()]
        self._stop.set()
        for item in self._queue.close():
            self.channel.answer(item.work.incoming, Refused("closing", "the cache server is closing"))
        end = time.monotonic() + self.settings.transfer.timeouts.close_ms / 1000
        for mover in movers:
            mover.close(max(0.0, end - time.monotonic()))
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            self._forget(client)
        self.channel.wake()
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
        self._resources.close()
        for backend in self._backends.values():
            backend.close()

    # --- receiving -----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        def bad_frame(reason: str) -> None:
            self.metrics.trouble("server", f"{reason}_frame")

        while not self._stop.is_set():
            for incoming in self.channel.receive(_TICK_S, bad_frame):
                try:
                    answer = self._handle(incoming)
                except _RefusalError as refusal:
                    answer = refusal.refused
                except Exception as error:  # whatever one request does, the others are answered
                    log.exception("a request failed")
                    answer = Refused("failed", f"{type(error).__name__}: {error}")
                if answer is not None:
                    self._answer(incoming, answer)

    def _handle(self, incoming: Incoming) -> Answer | None:
        """The answer to what can be answered at once; None where a thread of the pool will answer."""
        request = incoming.request
        if isinstance(request, Hello):
            return self._hello(incoming.client, request)
        with self._lock:
            client = self._clients.get(incoming.client)
        if client is None:
            raise _RefusalError("unknown_client", "say hello first")
        client.last_seen = time.monotonic()
        if isinstance(request, Lookup):
            return self._handle_lookup(incoming, client, request)
        if isinstance(request, Store | Retrieve):
            cost = count_names(request.names)
            move = self._store if isinstance(request, Store) else self._retrieve
            self._submit(incoming, client, Lane.BULK, cost, lambda: move(client, request), request.patience_ms / 1000)
            return None
        if isinstance(request, EndSession):
            self.sessions.end(client.hello.client, request.session)
            return Done()
        if isinstance(request, StatusQuery):
            return self.status()
        # mapping, and unmapping, wait for others
        run = self._register if isinstance(request, Register) else self._unregister
        self._submit(incoming, client, Lane.BULK, 0, lambda: run(client, request))  # type: ignore[arg-type]
        return None

    def _submit(
        self,
        incoming: Incoming,
        client: _Client,
        lane: Lane,
        cost: int,
        job: Callable[[], Answer] | _Question,
        patience: float = float("inf"),
    ) -> None:
        work = _Work(incoming, client, job, time.monotonic() + patience)
        if not self._queue.put(Item(client.hello.client, lane, cost, work)):
            self.metrics.trouble("server", "busy")
            raise _RefusalError("busy", f"{self.node.max_in_flight} operations are the most at a time")

    def _answer(self, incoming: Incoming, answer: Answer) -> None:
        if isinstance(answer, Refused) and answer.reason != "busy":
            self.metrics.trouble("server", f"refused_{answer.reason}", detail=answer.message)
        self.channel.answer(incoming, answer)

    def _hello(self, identity: bytes, hello: Hello) -> Answer:
        cache = self.settings.cache
        group = self._group(hello)
        if hello.kind != "observer":
            if cache.chunk_size % hello.block_size:
                raise _RefusalError(
                    "mismatch",
                    f"this server's chunks have {cache.chunk_size} tokens, which is no multiple of the engine's block size "
                    f"{hello.block_size}",
                )
            model = self._models.get(group)
            known = "" if model is None else model.database.namespace.fingerprint()
            if hello.namespace and known and hello.namespace != known:
                assert model is not None
                raise _RefusalError("mismatch", f"this server serves {model.database.namespace}, the client another")
        with self._lock:
            if len(self._clients) >= _MAX_CLIENTS and identity not in self._clients:
                raise _RefusalError("busy", f"{_MAX_CLIENTS} clients are the most at a time")
            before = self._clients.get(identity)
            if before is None or before.hello != hello:
                self._clients[identity] = _Client(hello, group)
        if before is not None and before.hello != hello:
            self._forget(before)
        return Welcome(
            server=self._server,
            software=pd_cache.__version__,
            chunk_size=cache.chunk_size,
            hash_mode=group.hash_mode,
            hash_seed=group.hash_seed,
            may_choose=cache.hash_mode == "auto",
            lifeline=str(self._lifeline.path),
        )

    def _group(self, hello: Hello) -> _Group:
        """Whom this engine shares chunks with: it may name them in its own way where the file leaves that open."""
        cache = self.settings.cache
        mode = hello.hash_mode or cache.named_by
        if cache.hash_mode not in ("auto", mode):
            raise _RefusalError(
                "mismatch", f"this server names chunks by {cache.hash_mode} (cache.hash_mode), the engine by {mode}"
            )
        return _Group(hello.model, hello.world_size, hello.block_size, mode, hello.hash_seed or cache.hash_seed)

    def _handle_lookup(self, incoming: Incoming, client: _Client, request: Lookup) -> Answer | None:
        names = split_names(request.names)
        model = self._models.get(client.group)
        if model is None or request.held >= len(names):
            return Found(min(request.held, len(names)))
        question = _Question(model, request.session, request.held * model.database.chunk_size, names)
        self._submit(incoming, client, Lane.QUICK, 1, question)
        return None

    # --- the pool of threads -------------------------------------------------------------------------------------

    def _work(self, lanes: tuple[Lane, ...]) -> None:
        while (item := self._queue.take(lanes)) is not None:
            items = [item]
            if item.lane is Lane.QUICK:
                items += self._queue.take_more(Lane.QUICK, _MOST_QUESTIONS - 1)
            try:
                if item.lane is Lane.QUICK:
                    self._answer_questions([one.work for one in items if not one.work.client.gone])
                elif not item.work.client.gone:
                    self._do(item.work)
            finally:
                for one in items:
                    self._queue.finished(one)

    def _do(self, work: _Work) -> None:
        """One store, retrieve or registration. Always answered."""
        assert not isinstance(work.job, _Question)
        try:
            if time.monotonic() > work.begin_by:
                raise _RefusalError("late", "its turn came after its deadline")
            answer = work.job()
        except _RefusalError as refusal:
            answer = refusal.refused
        except AbandonedError:
            answer = Refused("abandoned", "the engine has given it up")
        except (SharingError, LayoutError) as error:
            answer = Refused("mismatch", str(error))
        except Exception as error:  # whatever one operation does, the thread goes on
            log.exception("an operation failed")
            answer = Refused("failed", f"{type(error).__name__}: {error}")
        self._answer(work.incoming, answer)

    def _answer_questions(self, works: list[_Work]) -> None:
        """Lookups that wait at the same time are one question to each backend. Always answered."""
        by_backend: dict[int, list[tuple[_Work, _Question]]] = {}
        for work in works:
            assert isinstance(work.job, _Question)
            by_backend.setdefault(id(work.job.model.mover.backend), []).append((work, work.job))
        for group in by_backend.values():
            try:
                wanted = [question.model.prefix.wanted(question.names, question.held) for _, question in group]
                backend = group[0][1].model.mover.backend
                with self.metrics.timed("lookup"):
                    statuses = backend.batched_contains([key for keys in wanted for key in keys])
                start = 0
                for (work, question), keys in zip(group, wanted, strict=True):
                    answer = self._judge(work.client, question, statuses[start : start + len(keys)])
                    start += len(keys)
                    self._answer(work.incoming, answer)
            except Exception as error:  # whatever one backend does, the thread goes on
                log.exception("a lookup failed")
                for work, _ in group:  # an answer that comes twice is dropped
                    self._answer(work.incoming, Refused("failed", f"{type(error).__name__}: {error}"))

    def _judge(self, client: _Client, question: _Question, statuses: list[Status]) -> Answer:
        """What a lookup found; pinned for its session."""
        model, names = question.model, question.names
        size = model.database.chunk_size
        held, found = question.held // size, model.prefix.judge(names, question.held, statuses) // size
        if question.session and found > held:
            wanted = names[held:found]
            shards = [model.database.keys(wanted, (rank,)) for rank in range(model.group.world_size)]
            backend, owner = model.mover.backend, client.hello.client
            self.sessions.open(owner, question.session, model.group, backend, wanted, shards, self.node.session_s)
            if client.gone:  # it went while we looked: nobody else would end this one
                self.sessions.end_client(owner)
        return Found(found)

    def _store(self, client: _Client, request: Move) -> Answer:
        worker = self._worker(client)
        outcomes = worker.model.mover.store(self._run(worker, request))
        return Stored(bytes(outcomes))

    def _retrieve(self, client: _Client, request: Move) -> Answer:
        worker = self._worker(client)
        loaded = worker.model.mover.load(self._run(worker, request))
        if request.session:
            self.sessions.loaded(request.session, worker.model.group, worker.rank, split_names(request.names))
        return Loaded(loaded)

    def _run(self, worker: _Worker, request: Move) -> ChunkRun:
        """What is to be moved, checked before anything moves."""
        layout, database = worker.tensors.layout, worker.model.database
        names, blocks = split_names(request.names), request.blocks
        needed = len(names) * database.blocks_per_chunk
        if len(blocks) != needed:
            raise _RefusalError("invalid", f"{len(names)} chunks lie in {needed} blocks, got {len(blocks)}")
        left_out = 0
        if isinstance(request, Retrieve):
            left_out = next((index for index, block in enumerate(blocks) if block >= 0), needed)
        moved = blocks[left_out:]
        if moved and not (min(moved) >= 0 and max(moved) < layout.blocks):
            raise _RefusalError(
                "invalid", f"blocks must lie in [0, {layout.blocks}), got values from {min(moved)} to {max(moved)}"
            )
        if len(set(moved)) != len(moved):
            raise _RefusalError("invalid", "a block is named twice: two places of a prompt cannot share one")
        copier = FencedCopier(worker.tensors, request.slot, request.ticket, request.event)
        rows = torch.tensor(blocks, dtype=torch.int64).view(len(names), database.blocks_per_chunk)
        return ChunkRun(database.keys(names, (worker.rank,)), [ChunkSlots(row, None) for row in rows], [copier])

    def _worker(self, client: _Client) -> _Worker:
        if client.worker is None:
            raise _RefusalError("unknown_client", "register the KV tensors first")
        return client.worker

    # --- registering ---------------------------------------------------------------------------------------------

    def _register(self, client: _Client, request: Register) -> Answer:
        if client.hello.kind != "worker":
            raise _RefusalError("invalid", f"a {client.hello.kind} has no KV tensors to register")
        descriptors = self._lifeline.take(client.hello.client, request.registration, _DESCRIPTORS_S)
        if not descriptors:
            raise _RefusalError(
                "invalid", "no file descriptors came over the lifeline; engines and their cache server share a host"
            )
        with client.registering:
            self._unmap(client)
            tensors: MappedTensors | None = None
            try:
                tensors = MappedTensors(request, descriptors[1:], FenceView(descriptors[0]))
                model = self._model(client, tensors.layout)
                with self._lock:
                    if client.gone or self._closed:
                        raise AbandonedError
                    client.worker = _Worker(model, client.hello.rank, tensors)
                    model.workers.add(client.hello.client)
            except BaseException:
                if tensors is not None:
                    tensors.unmap(0.0)
                raise
            finally:
                close_all(descriptors)
        log.info("worker of %s registered: %s", client.hello.model, tensors.layout)
        return Done()

    def _unregister(self, client: _Client, request: Unregister) -> Answer:
        with client.registering:
            if not self._unmap(client):
                raise _RefusalError("busy", "a copy is still running; the memory is let go of when it ends")
        return Done()

    def _model(self, client: _Client, layout: KVLayout) -> _Model:
        """The group's model, made by its first worker; refused for a worker that does not fit the others."""
        hello = client.hello
        if layout.block_size != hello.block_size:
            raise _RefusalError(
                "mismatch",
                f"the KV tensors have blocks of {layout.block_size} tokens, the engine said {hello.block_size}",
            )
        metadata = CacheMetadata.of(hello.model, layout, world_size=hello.world_size)
        with self._opening:
            model = self._models.get(client.group)
            if model is not None and model.metadata != metadata and model.workers:
                raise _RefusalError(
                    "mismatch",
                    f"{hello.model} is served already by workers whose KV tensors are {model.metadata}; these are {metadata}: "
                    "their chunks are not interchangeable",
                )
            if model is None or model.metadata != metadata:
                model = _Model(client.group, metadata, self.settings.cache)
                backend = self._backend(layout.chunk_bytes(self.settings.cache.chunk_size))
                model.mover = ChunkMover(backend, model.database, self.metrics)
                model.prefix = PrefixLookup(model.database, backend.batched_contains, self.metrics)
                with self._lock:
                    self._models[client.group] = model
            return model

    def _backend(self, payload_bytes: int) -> StorageBackend:
        backend = self._backends.get(payload_bytes)
        if backend is not None:
            return backend
        if len(self._backends) >= _MAX_BACKENDS:
            raise _RefusalError(
                "mismatch",
                f"chunks of {payload_bytes} bytes would be the {_MAX_BACKENDS + 1}th size at this server, which serves "
                f"{sorted(self._backends)}",
            )
        # the segment is given to the pool once, whatever the number of sizes
        settings = self.settings
        if self._backends:
            settings = msgspec.structs.replace(settings, segment_size=0)
        try:
            opened = (
                self._open_backend(settings, payload_bytes)
                if self._open_backend
                else open_backend(settings, payload_bytes, pin=host_pin(), metrics=self.metrics)
            )
        except (ValueError, PdCacheError) as error:
            raise _RefusalError("mismatch", f"no room for chunks of {payload_bytes} bytes: {error}") from None
        with self._lock:
            self._backends[payload_bytes] = opened
        return opened

    def _unmap(self, client: _Client) -> bool:
        """Take back a client's registration; False if a copy outlives the wait for it."""
        with self._lock:
            worker, client.worker = client.worker, None
            if worker is not None:
                worker.model.workers.discard(client.hello.client)
        if worker is None:
            return True
        return worker.tensors.unmap(_UNMAP_S)

    # --- clients that go, and house keeping ----------------------------------------------------------------------

    def _gone(self, name: str) -> None:
        """A lifeline has ended."""
        with self._lock:
            identity = next((key for key, client in self._clients.items() if client.hello.client == name), None)
            client = None if identity is None else self._clients.pop(identity)
        if client is not None:
            log.info("a %s of %s is gone", client.hello.kind, client.hello.model or "no model")
            self._forget(client)

    def _forget(self, client: _Client) -> None:
        client.gone = True
        self._queue.discard(client.hello.client)
        self.sessions.end_client(client.hello.client)
        with client.registering:
            self._unmap(client)

    def _keep_house(self) -> None:
        renew_at = time.monotonic() + self._renew_s
        while not self._stop.wait(min(_TICK_S, self._renew_s)):
            try:
                late = self.sessions.expire()
                if late:
                    self.metrics.trouble("server", "session_expired", late)
                now = time.monotonic()
                self._forget_silent(now)
                if now >= renew_at:
                    renew_at = now + self._renew_s
                    for backend, keys in self.sessions.held():
                        for start in range(0, len(keys), _LEASE_BATCH):
                            backend.batched_contains(keys[start : start + _LEASE_BATCH])
            except Exception:  # the house is kept as long as the server lives
                log.exception("house keeping failed")

    def _forget_silent(self, now: float) -> None:
        """Clients without a lifeline, those of other hosts, are gone when they have said nothing for a session's length."""
        with self._lock:
            silent = [
                (identity, client)
                for identity, client in self._clients.items()
                if now - client.last_seen > self.node.session_s and not self._lifeline.has(client.hello.client)
            ]
            for identity, _ in silent:
                del self._clients[identity]
        for _, client in silent:
            self._forget(client)


def _own_address(url: str, stack: contextlib.ExitStack) -> Path:
    """Make sure that nobody else listens at `url`, or can; where the lifeline's socket goes."""
    if not url.startswith("ipc://"):
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-cache-"))) / "lifeline"
    path = Path(url.removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if path.parent.parent == Path("/tmp") and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022):
        raise CacheServerError(f"{path.parent} belongs to somebody else, or others may write to it; choose another url")
    lock = stack.enter_context(path.with_name(f"{path.name}.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CacheServerError(f"another cache server listens at {url}") from None
    stack.callback(path.unlink, missing_ok=True)
    return path.with_name(f"{path.name}.fds")
