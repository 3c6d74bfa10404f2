"""CacheServer: the cache of one host, for any number of engines.

One thread receives requests and answers those that need no waiting. A second thread answers lookups, so that no transfer holds them up;
it takes all that are waiting at once. A pool of threads moves bytes, in turns that are fair between engines. One thread maps the memory
that engines lend. One keeps house: it renews leases, ends late sessions, refuses requests that have waited too long, and forgets
clients that are gone. One closes backends that no engine uses.

When a client goes, whether it says goodbye or is killed, the server gives up the client's tensors and its sessions.
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
from pd_cache.config import NodeSettings, ServerSettings
from pd_cache.errors import LayoutError
from pd_cache.metrics import CacheMetrics
from pd_cache.server.address import own_address
from pd_cache.server.answerer import Answerer, Question
from pd_cache.server.moves import MoveJob
from pd_cache.server.queueing import FairQueue, Item, Lane
from pd_cache.server.receiving import Receiver, failed
from pd_cache.server.registrations import Client, PendingRegistration, Worker
from pd_cache.server.served_models import OpenBackend, ServedModels
from pd_cache.server.sessions import Sessions
from pd_cache.wire.channel import Incoming, ServerChannel
from pd_cache.wire.fence import AbandonedError
from pd_cache.wire.lifeline import LifelineServer
from pd_cache.wire.messages import (
    Answer,
    Begun,
    Done,
    EndSession,
    Found,
    Hello,
    Lookup,
    Move,
    RefusalError,
    Refused,
    Register,
    Reset,
    Retrieve,
    StatusQuery,
    StatusReport,
    Store,
    Welcome,
    split_names,
)
from pd_cache.wire.sealed import SealError
from pd_cache.wire.sharing import SharingError

log = logging.getLogger(__name__)

_MAX_CLIENTS = 256
_TICK_S = 0.5
_IDLE_TICK_S = 10.0
_LEASE_BATCH = 1000
_MOST_QUESTIONS = 32
"""The most lookups that become one request to a backend."""


_DESCRIPTORS_S = 5.0
"""How long after a registration's message its file descriptors may come."""


class _QueuedWork(NamedTuple):
    incoming: Incoming
    client: Client
    job: Callable[[], Answer] | MoveJob | Question


class CacheServer:
    """Serves engines from construction until `close`. Thread-safe."""

    def __init__(
        self,
        settings: NodeSettings,
        node: ServerSettings,
        url: str,
        *,
        metrics: CacheMetrics | None = None,
        lease_s: float = 10.0,
        backend: OpenBackend | None = None,
    ) -> None:
        """Listens at `url`. Raises CacheServerError if that is impossible, or if another server already listens there.

        `lease_s` says how long the pool's master protects a key that was looked up. `backend` replaces the configured tiers.
        """
        self.settings = settings
        self.node = node
        self.metrics = metrics or CacheMetrics()
        self.sessions = Sessions()
        self.models = ServedModels(settings, self.metrics, backend, self.sessions.end_backend)
        self._answerer = Answerer(self.sessions, self.metrics, node.session_s)
        self._renew_s = max(0.1, lease_s / 3)
        self._server = uuid.uuid4().hex
        self._up_since = time.time()
        self._clients: dict[bytes, Client] = {}
        self._lock = threading.Lock()
        self._queue: FairQueue[_QueuedWork] = FairQueue(node.max_in_flight)
        self._stop = threading.Event()
        self._closed = False
        with contextlib.ExitStack() as stack:
            lifeline = own_address(url, stack)
            self.channel = ServerChannel(url)
            stack.callback(self.channel.close)
            self._receiver = Receiver(self.channel, self._handle, self.metrics, "server")
            self._lifeline = LifelineServer(lifeline, self._gone, self._arrived, self._strange)
            stack.callback(self._lifeline.close)
            self._resources = stack.pop_all()
        self._threads = [
            threading.Thread(target=self._keep_house, name="pd-cache-house", daemon=True),
            threading.Thread(target=self._lend, name="pd-cache-lend", daemon=True),
            threading.Thread(target=self._let_go, name="pd-cache-idle", daemon=True),
        ]
        for index in range(node.threads):
            work, name = (self._move, f"pd-cache-move-{index}") if index else (self._find, "pd-cache-find")
            self._threads.append(threading.Thread(target=work, name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        self._receiver.start()

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return self.channel.url

    @property
    def available(self) -> bool:
        """False while the pool of an engine's chunks is known to be down. True as long as no engine has registered."""
        return all(backend.available for backend in self.models.backends)

    def status(self) -> StatusReport:
        """Returns what the server is doing."""
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
        """Refuses waiting requests, finishes or abandons running ones, unmaps all tensors and closes the backends. Idempotent."""
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
        self._receiver.stop(max(0.1, end - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
        self._resources.close()
        self.models.close()

    # --- receiving -----------------------------------------------------------------------------------------------

    def _handle(self, incoming: Incoming) -> Answer | None:
        """Returns the answer to a request that can be answered at once, or None if another thread will answer."""
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
            move = MoveJob(client, request, self._retrieved)
            self._submit(
                Item(client.hello.client, Lane.BULK, move.cost, _QueuedWork(incoming, client, move), move.until)
            )
            return None
        if isinstance(request, Reset):
            reset = functools.partial(self._reset, client)
            self._submit(Item(client.hello.client, Lane.LEND, 0, _QueuedWork(incoming, client, reset)))
            return None
        if isinstance(request, EndSession):
            self.sessions.end(client.hello.client, request.session)
            return Done()
        if isinstance(request, StatusQuery):
            return self.status()
        if isinstance(request, Register):
            self._expect(incoming, client, request)
        else:
            self._submit(Item(client.hello.client, Lane.LEND, 0, _QueuedWork(incoming, client, client.unregister)))
        return None

    def _submit(self, item: Item[_QueuedWork]) -> None:
        """Queues an item, which may take the place of another client's item. Raises RefusalError if there is no place for it."""
        turned_away = self._queue.put(item)
        if turned_away is None:
            return
        self.metrics.trouble("server", "busy")
        busy = RefusalError("busy", f"the server runs at most {self.node.max_in_flight} operations at a time")
        if turned_away is item:
            raise busy
        self._receiver.answer(turned_away.work.incoming, busy.refused)

    def _reset(self, client: Client) -> Answer:
        """Begins a new epoch of an engine's model. Raises RefusalError if that is impossible."""
        model, hello = self.models.get(client.groups[0]), client.hello
        if model is None or (hello.kind != "scheduler" and hello.client not in model.workers):
            raise RefusalError(
                "invalid",
                f"only a worker that has registered KV tensors, or the scheduler of such workers, resets a model; this {hello.kind} is neither",
            )
        epoch = model.mover.epochs.begin()
        if epoch is None:
            raise RefusalError("failed", "the pool did not take the new epoch")
        return Begun(epoch)

    # --- registrations -------------------------------------------------------------------------------------------

    def _expect(self, incoming: Incoming, client: Client, request: Register) -> None:
        """Begins a registration once its descriptors have come over the lifeline. No thread waits for them."""
        if client.hello.kind != "worker":
            raise RefusalError("invalid", f"only a worker registers KV tensors; this client is a {client.hello.kind}")
        with self._lock:
            before = client.pending
            client.pending = PendingRegistration(incoming, request, time.monotonic() + _DESCRIPTORS_S)
        if before is not None:
            self._receiver.answer(
                before.incoming, Refused("invalid", "another registration came before this one's file descriptors")
            )
        self._begin_registration(client)

    def _arrived(self, name: str) -> None:
        """Called when descriptors have come over a client's lifeline."""
        with self._lock:
            client = self._clients.get(name.encode())
        if client is not None:
            self._begin_registration(client)

    def _strange(self) -> None:
        self.metrics.trouble("server", "strange_lifeline")

    def _begin_registration(self, client: Client) -> None:
        with self._lock:
            pending = client.pending
            if pending is None or not self._lifeline.holds(client.hello.client, pending.request.registration):
                return
            client.pending = None
        job = functools.partial(client.register, pending.request, self.models, self._lifeline)
        try:
            self._submit(Item(client.hello.client, Lane.LEND, 0, _QueuedWork(pending.incoming, client, job)))
        except RefusalError as refusal:
            self._receiver.answer(pending.incoming, refusal.refused)

    def _refuse_unaccompanied(self, now: float) -> None:
        """Refuses registrations whose descriptors have not come in time."""
        late: list[PendingRegistration] = []
        with self._lock:
            for client in self._clients.values():
                if client.pending is not None and client.pending.until <= now:
                    late.append(client.pending)
                    client.pending = None
        for pending in late:
            reason = "no file descriptors came over the lifeline; run the engine on the cache server's host"
            self._receiver.answer(pending.incoming, Refused("invalid", reason))

    # --- answering -----------------------------------------------------------------------------------------------

    def _hello(self, identity: bytes, hello: Hello) -> Answer:
        if identity != hello.client.encode():
            raise RefusalError("invalid", "a client's name must be the same on its connection and in its hello")
        cache = self.settings.cache
        groups = self.models.groups(hello)
        group = groups[0]
        if hello.kind != "observer":
            for one in groups:
                if one.chunk_size % one.block_size:
                    raise RefusalError(
                        "mismatch",
                        f"this server's chunks have {one.chunk_size} tokens, which is not a multiple of the engine's block size "
                        f"{one.block_size}",
                    )
            model = self.models.get(group)
            known = "" if model is None else model.database.namespace.fingerprint()
            if hello.namespace and known and hello.namespace != known:
                assert model is not None
                raise RefusalError(
                    "mismatch", f"this server serves {model.database.namespace}, the client uses another namespace"
                )
        displaced = None
        with self._lock:
            if len(self._clients) >= _MAX_CLIENTS and identity not in self._clients:
                displaced = self._displace()
            before = self._clients.get(identity)
            if before is None or before.hello != hello:
                self._clients[identity] = Client(hello, groups)
        if displaced is not None:
            self._forget(displaced)
        if before is not None and before.hello != hello:
            self._forget(before)
        return Welcome(
            server=self._server,
            software=pd_cache.__version__,
            chunk_size=group.chunk_size,
            hash_mode=group.hash_mode,
            hash_seed=group.hash_seed,
            may_choose=cache.hash_mode == "auto",
            may_size=cache.chunk_size == "auto",
            lifeline=str(self._lifeline.path),
        )

    def _displace(self) -> Client:
        """Removes and returns the client without a lifeline that has been silent for longest. Call with the lock held.

        Raises RefusalError if every client has a lifeline.
        """
        guests = [one for one in self._clients.values() if not self._lifeline.has(one.hello.client)]
        if not guests:
            raise RefusalError("busy", f"the server serves at most {_MAX_CLIENTS} clients at a time")
        return self._clients.pop(min(guests, key=lambda one: one.last_seen).hello.client.encode())

    def _handle_lookup(self, incoming: Incoming, client: Client, request: Lookup) -> Answer | None:
        names = split_names(request.names)
        models = [model for group in client.groups if (model := self.models.get(group)) is not None]
        if len(models) < len(client.groups) or request.at_hand >= len(names):
            at_hand = min(request.at_hand, len(names))
            return Found(at_hand, at_hand, "none" if at_hand == len(names) else "not_asked")
        question = Question(models, client.hello.client, request.session, request.at_hand, names)
        self._submit(Item(client.hello.client, Lane.QUICK, 1, _QueuedWork(incoming, client, question)))
        return None

    # --- the threads that work -------------------------------------------------------------------------------------

    def _find(self) -> None:
        """The thread that answers lookups. It takes all lookups that came during its last step together."""
        while (item := self._queue.take((Lane.QUICK,))) is not None:
            items = [item, *self._queue.take_more(Lane.QUICK, _MOST_QUESTIONS - 1)]
            wanted = [one for one in items if not one.work.client.gone]
            unfinished: list[Item[_QueuedWork]] = []
            try:
                unfinished = self._ask_questions(wanted)
            finally:
                going_on = {id(one) for one in unfinished}
                for one in items:
                    if id(one) not in going_on or not self._go_on(one):
                        self._queue.finished(one)

    def _ask_questions(self, items: list[Item[_QueuedWork]]) -> list[Item[_QueuedWork]]:
        """Does one step of each lookup, and answers those that have ended. Returns the others."""
        unfinished: list[Item[_QueuedWork]] = []
        questions = [item.work.job for item in items if isinstance(item.work.job, Question)]
        for index, answer in self._answerer.step(questions):
            if answer is None:
                unfinished.append(items[index])
                continue
            incoming, client, _ = items[index].work
            if client.gone:  # it went during the lookup: nothing else would end its session
                self.sessions.end_client(client.hello.client)
            self._receiver.answer(incoming, answer)
        return unfinished

    def _move(self) -> None:
        """A thread that stores and retrieves."""
        while (item := self._queue.take((Lane.BULK,))) is not None:
            goes_on = False
            try:
                if not item.work.client.gone and not self._do(item.work):
                    assert isinstance(item.work.job, MoveJob)
                    goes_on = self._go_on(item._replace(cost=item.work.job.cost))
            finally:
                if not goes_on:
                    self._queue.finished(item)

    def _lend(self) -> None:
        """The thread that maps and unmaps the memory that engines lend."""
        while (item := self._queue.take((Lane.LEND,))) is not None:
            try:
                if not item.work.client.gone:
                    self._do(item.work)
            finally:
                self._queue.finished(item)

    def _go_on(self, item: Item[_QueuedWork]) -> bool:
        """Queues the rest of an item. Returns False, after refusing it, if the server is closing."""
        if not self._queue.put_back(item):
            self._receiver.answer(item.work.incoming, Refused("closing", "the cache server is closing"))
            return False
        return True

    def _do(self, work: _QueuedWork) -> bool:
        """Does one turn of a store or retrieve, or one registration. Answers after the last turn. Returns False if more turns follow."""
        assert not isinstance(work.job, Question)
        answer: Answer | None
        try:
            answer = work.job.turn() if isinstance(work.job, MoveJob) else work.job()
        except RefusalError as refusal:
            answer = refusal.refused
        except AbandonedError:
            answer = Refused("abandoned", "the engine has given up the operation")
        except (SharingError, SealError, LayoutError) as error:
            answer = Refused("mismatch", str(error))
        except Exception as error:  # an error of one operation must not end the thread
            log.exception("an operation failed")
            answer = failed(error)
        if answer is None:
            return False
        self._receiver.answer(work.incoming, answer)
        return True

    def _retrieved(self, request: Move, worker: Worker) -> None:
        if request.session:
            self.sessions.loaded(request.session, worker.model.group, worker.rank, split_names(request.names))

    # --- clients that go, and house keeping ----------------------------------------------------------------------

    def _gone(self, name: str) -> None:
        """Called when a lifeline has ended."""
        with self._lock:
            client = self._clients.pop(name.encode(), None)
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
                self._refuse_unaccompanied(now)
                for item in self._queue.expire(now):
                    self._receiver.answer(item.work.incoming, Refused("late", "its turn came after its deadline"))
                if now >= renew_at:
                    renew_at = now + self._renew_s
                    for backend, keys in self.sessions.leases():
                        for start in range(0, len(keys), _LEASE_BATCH):
                            backend.batched_contains(keys[start : start + _LEASE_BATCH])
            except Exception:  # this thread runs as long as the server
                log.exception("house keeping failed")

    def _let_go(self) -> None:
        """The thread that closes idle backends. Closing one takes a while, and leases must be renewed meanwhile."""
        while not self._stop.wait(min(_IDLE_TICK_S, self.node.idle_s / 2)):
            try:
                self.models.release_idle(self.node.idle_s, time.monotonic())
            except Exception:  # this thread runs as long as the server
                log.exception("could not free the memory of a backend that no engine uses")

    def _forget_silent(self, now: float) -> None:
        """Forgets clients without a lifeline (those of other hosts) that have been silent for `session_s`."""
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
