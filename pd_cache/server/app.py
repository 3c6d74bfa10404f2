"""CacheServer: the cache of one host, for any number of engines.

One thread receives requests and answers what needs no waiting. A second answers lookups, those that came meanwhile
together, so that no transfer holds them up. A pool of threads moves bytes, in an order that is fair between engines. One
more keeps house: it renews leases, ends sessions that are late, and forgets clients that are gone.

What a client lent (its tensors) and what it holds (its sessions) go with it, whether it says goodbye or is killed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import generate_latest

import pd_cache
from pd_cache.config import CacheServerNode, NodeSettings
from pd_cache.errors import LayoutError
from pd_cache.metrics import CacheMetrics
from pd_cache.mover import Stored as Outcome
from pd_cache.server.address import own_address
from pd_cache.server.channel import Incoming, ServerChannel
from pd_cache.server.fence import AbandonedError
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
    RefusalError,
    Refused,
    Register,
    Retrieve,
    StatusQuery,
    StatusReport,
    Store,
    Stored,
    Welcome,
    count_names,
    split_names,
)
from pd_cache.server.models import Models, OpenBackend
from pd_cache.server.questions import Answerer, Question
from pd_cache.server.queueing import FairQueue, Item, Lane
from pd_cache.server.registrations import Client
from pd_cache.server.sealed import SealError
from pd_cache.server.sessions import Sessions
from pd_cache.server.sharing import SharingError

log = logging.getLogger(__name__)

_MAX_CLIENTS = 256
_TICK_S = 0.5
_LEASE_BATCH = 1000
_MOST_QUESTIONS = 32
"""Lookups that are asked together."""


class _Work(NamedTuple):
    incoming: Incoming
    client: Client
    job: Callable[[], Answer] | Question
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
        self.models = Models(settings, self.metrics, backend)
        self._answerer = Answerer(self.sessions, self.metrics, node.session_s)
        self._renew_s = max(0.1, lease_s / 3)
        self._server = uuid.uuid4().hex
        self._up_since = time.time()
        self._clients: dict[bytes, Client] = {}
        self._lock = threading.Lock()
        self._queue: FairQueue[_Work] = FairQueue(node.max_in_flight)
        self._stop = threading.Event()
        self._closed = False
        with contextlib.ExitStack() as stack:
            lifeline = own_address(url, stack)
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
            work, name = (self._move, f"pd-cache-move-{index}") if index else (self._find, "pd-cache-find")
            self._threads.append(threading.Thread(target=work, name=name, daemon=True))
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
        return StatusReport(
            software=pd_cache.__version__,
            pid=os.getpid(),
            up_since=self._up_since,
            clients=len(clients),
            workers=sum(client.worker is not None for client in clients),
            sessions=len(self.sessions),
            pinned=self.sessions.pinned,
            in_flight=self._queue.in_flight,
            available=any(backend.available for backend in self.models.backends),
            metrics=generate_latest(self.metrics.registry).decode(),
        )

    def close(self) -> None:
        """Refuse what waits, finish or abandon what runs, unmap, close the backends. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        for item in self._queue.close():
            self.channel.answer(item.work.incoming, Refused("closing", "the cache server is closing"))
        end = time.monotonic() + self.settings.transfer.timeouts.close_ms / 1000
        for model in self.models:
            model.mover.close(max(0.0, end - time.monotonic()))
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            self._forget(client)
        self.channel.wake()
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
        self._resources.close()
        self.models.close()

    # --- receiving -----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        def bad_frame(reason: str) -> None:
            self.metrics.trouble("server", f"{reason}_frame")

        while not self._stop.is_set():
            for incoming in self.channel.receive(_TICK_S, bad_frame):
                try:
                    answer = self._handle(incoming)
                except RefusalError as refusal:
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
            raise RefusalError("unknown_client", "say hello first")
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
        job: Callable[[], Answer] = client.unregister
        if isinstance(request, Register):
            job = functools.partial(client.register, request, self.models, self._lifeline)
        self._submit(incoming, client, Lane.BULK, 0, job)  # both wait for others
        return None

    def _submit(
        self,
        incoming: Incoming,
        client: Client,
        lane: Lane,
        cost: int,
        job: Callable[[], Answer] | Question,
        patience: float = float("inf"),
    ) -> None:
        work = _Work(incoming, client, job, time.monotonic() + patience)
        if not self._queue.put(Item(client.hello.client, lane, cost, work)):
            self.metrics.trouble("server", "busy")
            raise RefusalError("busy", f"{self.node.max_in_flight} operations are the most at a time")

    def _answer(self, incoming: Incoming, answer: Answer) -> None:
        if isinstance(answer, Refused) and answer.reason != "busy":
            self.metrics.trouble("server", f"refused_{answer.reason}", detail=answer.message)
        self.channel.answer(incoming, answer)

    def _hello(self, identity: bytes, hello: Hello) -> Answer:
        cache = self.settings.cache
        group = self.models.group(hello)
        if hello.kind != "observer":
            if cache.chunk_size % hello.block_size:
                raise RefusalError(
                    "mismatch",
                    f"this server's chunks have {cache.chunk_size} tokens, which is no multiple of the engine's block size "
                    f"{hello.block_size}",
                )
            model = self.models.get(group)
            known = "" if model is None else model.database.namespace.fingerprint()
            if hello.namespace and known and hello.namespace != known:
                assert model is not None
                raise RefusalError("mismatch", f"this server serves {model.database.namespace}, the client another")
        with self._lock:
            if len(self._clients) >= _MAX_CLIENTS and identity not in self._clients:
                raise RefusalError("busy", f"{_MAX_CLIENTS} clients are the most at a time")
            before = self._clients.get(identity)
            if before is None or before.hello != hello:
                self._clients[identity] = Client(hello, group)
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

    def _handle_lookup(self, incoming: Incoming, client: Client, request: Lookup) -> Answer | None:
        names = split_names(request.names)
        model = self.models.get(client.group)
        if model is None or request.held >= len(names):
            return Found(min(request.held, len(names)))
        question = Question(model, client.hello.client, request.session, request.held, names)
        self._submit(incoming, client, Lane.QUICK, 1, question)
        return None

    # --- the threads that work -------------------------------------------------------------------------------------

    def _find(self) -> None:
        """The thread that answers lookups: what has come while it waited for the last answers is one question."""
        while (item := self._queue.take((Lane.QUICK,))) is not None:
            items = [item, *self._queue.take_more(Lane.QUICK, _MOST_QUESTIONS - 1)]
            try:
                self._answer_questions([one.work for one in items if not one.work.client.gone])
            finally:
                for one in items:
                    self._queue.finished(one)

    def _move(self) -> None:
        """A thread that stores, retrieves and registers."""
        while (item := self._queue.take((Lane.BULK,))) is not None:
            try:
                if not item.work.client.gone:
                    self._do(item.work)
            finally:
                self._queue.finished(item)

    def _do(self, work: _Work) -> None:
        """One store, retrieve or registration. Always answered."""
        assert not isinstance(work.job, Question)
        try:
            if time.monotonic() > work.begin_by:
                raise RefusalError("late", "its turn came after its deadline")
            answer = work.job()
        except RefusalError as refusal:
            answer = refusal.refused
        except AbandonedError:
            answer = Refused("abandoned", "the engine has given it up")
        except (SharingError, SealError, LayoutError) as error:
            answer = Refused("mismatch", str(error))
        except Exception as error:  # whatever one operation does, the thread goes on
            log.exception("an operation failed")
            answer = Refused("failed", f"{type(error).__name__}: {error}")
        self._answer(work.incoming, answer)

    def _answer_questions(self, works: list[_Work]) -> None:
        """Lookups that wait at the same time. Always answered."""
        questions = [work.job for work in works if isinstance(work.job, Question)]
        for index, answer in self._answerer.answers(questions):
            client = works[index].client
            if client.gone:  # it went while we looked: nobody else would end the session of this one
                self.sessions.end_client(client.hello.client)
            self._answer(works[index].incoming, answer)

    def _store(self, client: Client, request: Move) -> Answer:
        worker = client.registered
        objects = worker.model.mover.store(worker.run(request))
        held = worker.model.group.held
        return Stored(bytes(Outcome.together(objects[at : at + held]) for at in range(0, len(objects), held)))

    def _retrieve(self, client: Client, request: Move) -> Answer:
        worker = client.registered
        loaded = worker.model.mover.load(worker.run(request))
        if request.session:
            self.sessions.loaded(request.session, worker.model.group, worker.rank, split_names(request.names))
        return Loaded(loaded)

    # --- clients that go, and house keeping ----------------------------------------------------------------------

    def _gone(self, name: str) -> None:
        """A lifeline has ended."""
        with self._lock:
            identity = next((key for key, client in self._clients.items() if client.hello.client == name), None)
            client = None if identity is None else self._clients.pop(identity)
        if client is not None:
            log.info("a %s of %s is gone", client.hello.kind, client.hello.model or "no model")
            self._forget(client)

    def _forget(self, client: Client) -> None:
        client.gone = True
        self._queue.discard(client.hello.client)
        self.sessions.end_client(client.hello.client)
        client.leave()

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
