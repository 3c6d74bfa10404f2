"""CacheServer: the cache of one host, for any number of engines.

The link's threads receive requests, and answer those that need no waiting. The thread of an engine's
connection maps the memory that the engine lends. One thread answers lookups, all waiting lookups at once, so
that no transfer delays them. A pool of threads moves bytes, in turns, so that a long store lets others in
between. One thread keeps house: it renews leases and ends late sessions.

    lookup           ->  _handle  ->  queue  ->  _find, on a thread  ->  answer_lookups (lookups.py)
    store, retrieve  ->  _handle  ->  queue  ->  _copy, on a thread  ->  turns (clients.py)  ->  ChunkMover

When a client disconnects or is killed, the server gives up the client's tensors and its sessions.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import Gauge

from pd_cache.config import NodeSettings, ServerSettings
from pd_cache.errors import CacheServerError
from pd_cache.groups import LayerGroups
from pd_cache.lookup import PrefixLookup
from pd_cache.metrics import CacheMetrics
from pd_cache.reasons import Found
from pd_cache.runtime import RuntimeFolderError, lock_file, own_folder, runtime_folder
from pd_cache.server.clients import EngineClient, turns
from pd_cache.server.fence import AbandonedError
from pd_cache.server.link import Incoming, ServerLink
from pd_cache.server.lookups import LookupJob, Sessions, answer_lookups
from pd_cache.server.models import ServedModels
from pd_cache.server.protocol import (
    Answer,
    Done,
    EndSession,
    Hello,
    Lookup,
    RefusalError,
    Refused,
    Register,
    Retrieve,
    Store,
    Welcome,
    failed,
)
from transfer.deadlines import left

T = TypeVar("T")

log = logging.getLogger(__name__)

_CLOSING = Refused("closing", "the cache server is closing")
MAX_IN_FLIGHT = 256
"""The most lookups that are queued or running; and, counted separately, the most stores and retrieves. The
answer to one more is `busy`, which engines treat as a miss."""
_TICK_S = 0.5
_LEASE_BATCH = 1000
_MOST_QUESTIONS = 32
"""The most lookups in a request to a backend."""

_SHARED = Path("/tmp")


def own_address(url: str, stack: contextlib.ExitStack) -> None:
    """Makes sure that no other server can listen at `url` until `stack` is closed.

    Raises CacheServerError if another server listens there, or if other users can write beside the socket.
    """
    try:
        path = Path(url.removeprefix("ipc://"))
        if path.parent == runtime_folder() or path.parent.parent == _SHARED:
            with own_folder(path.parent):
                pass  # no other user can replace the folder later
        else:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not stack.enter_context(lock_file(path.with_name(f"{path.name}.lock"))):
            raise CacheServerError(f"another cache server already listens at {url}")
    except (RuntimeFolderError, OSError) as error:
        raise CacheServerError(f"{url}: {error}; or choose another url") from None
    stack.callback(path.unlink, missing_ok=True)


class Item(NamedTuple, Generic[T]):
    """A request that waits or runs."""

    incoming: Incoming
    client: EngineClient
    work: T


class WorkQueue(Generic[T]):
    """Holds items that wait, and counts those that run. Thread-safe.

    At most `limit` items wait or run. A client may have as many items as places remain free, so a single
    client gets at most half of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Item[T]] = deque()
        self._held: Counter[EngineClient] = Counter()
        """How many items of each client wait or run."""
        self._something = threading.Condition()
        self._closed = False
        self.in_flight = 0
        """How many items wait or run."""

    def put(self, item: Item[T]) -> bool:
        """Queues an item. Returns False if there is no place for it."""
        with self._something:
            if self._closed or self._held[item.client] >= self._limit - self.in_flight:
                return False
            self._held[item.client] += 1
            self.in_flight += 1
            self._waiting.append(item)
            self._something.notify()
            return True

    def put_back(self, item: Item[T]) -> bool:
        """Queues an item again after `take`, behind all others. Returns False if the queue is closed.

        If it returns True, the item keeps its place, and the caller must not pass it to `finished`.
        """
        with self._something:
            if not self._closed:
                self._waiting.append(item)
                self._something.notify()
            return not self._closed

    def take(self, most: int = 1) -> list[Item[T]]:
        """Waits for an item, and returns up to `most` waiting items. Returns an empty list once the queue is
        closed.

        The caller must pass each of them to `finished` in the end.
        """
        with self._something:
            while not self._waiting and not self._closed:
                self._something.wait()
            if self._closed:
                return []
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def finished(self, item: Item[T]) -> None:
        """Frees the place of an item that was taken."""
        with self._something:
            self.in_flight -= 1
            self._held[item.client] -= 1
            if not self._held[item.client]:
                del self._held[item.client]

    def discard(self, client: EngineClient) -> None:
        """Removes a client's waiting items."""
        with self._something:
            for item in [item for item in self._waiting if item.client is client]:
                self._waiting.remove(item)
                self.finished(item)

    def close(self) -> list[Item[T]]:
        """Closes the queue, so that `take` returns nothing from now on. Returns the items that still
        waited."""
        with self._something:
            self._closed = True
            self._something.notify_all()
            return list(self._waiting)


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
    ) -> None:
        """Listens at `url`. Raises CacheServerError if that is impossible, or if another server already
        listens there.

        `lease_s` says how long the pool's master protects a key that was looked up.
        """
        self.settings = settings
        self.node = node
        self.metrics = metrics or CacheMetrics()
        self.sessions = Sessions()
        self.models = ServedModels(settings, self.metrics, self.sessions.end_backend)
        self._renew_s = max(0.1, lease_s / 3)
        self._clients: dict[bytes, EngineClient] = {}
        self._lock = threading.Lock()
        self._lookups: WorkQueue[LookupJob] = WorkQueue(MAX_IN_FLIGHT)
        self._copies: WorkQueue[Iterator[Answer | None]] = WorkQueue(MAX_IN_FLIGHT)
        running = Gauge(
            "pd_cache_server_running", "Operations that wait or run", registry=self.metrics.registry
        )
        running.set_function(lambda: self._lookups.in_flight + self._copies.in_flight)
        self._stop = threading.Event()
        self._closed = False
        with contextlib.ExitStack() as stack:
            own_address(url, stack)
            self._link = ServerLink(url, self._handle, self._gone, self.metrics)
            stack.callback(self._link.close)
            self._resources = stack.pop_all()
        self._threads = [threading.Thread(target=self._keep_house, name="pd-cache-house", daemon=True)]
        for index in range(node.threads):
            work, name = (self._copy, f"pd-cache-copy-{index}") if index else (self._find, "pd-cache-find")
            self._threads.append(threading.Thread(target=work, name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        self._link.start()

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return self._link.url

    @property
    def available(self) -> bool:
        """False while the pool behind any engine's chunks is known to be down. True as long as no engine has
        registered."""
        return all(backend.available for backend in self.models.backends)

    def close(self) -> None:
        """Refuses waiting requests, finishes or abandons running ones, unmaps all tensors and closes the
        backends. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        for incoming in [item.incoming for item in self._lookups.close()] + [
            item.incoming for item in self._copies.close()
        ]:
            self._link.answer(incoming.client, incoming.number, _CLOSING)
        end = time.monotonic() + self.settings.transfer.timeouts.close_ms / 1000
        for model in self.models:
            model.mover.close(left(end))
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            self._forget(client)
        self._link.stop(max(0.1, end - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.1, end - time.monotonic()))
        self._resources.close()
        self.models.close()

    # --- receiving ------------------------------------------------------------------------------------------

    def _handle(self, incoming: Incoming) -> Answer | None:
        """Returns the answer to a request that can be answered at once, or None if another thread will
        answer."""
        request = incoming.request
        if isinstance(request, Hello):
            return self._hello(incoming.client, request)
        with self._lock:
            client = self._clients.get(incoming.client)
        if client is None:
            raise RefusalError("unknown_client", "say hello first")
        if isinstance(request, Lookup):
            models = [
                model for group in client.groups if (model := self.models.by_group.get(group)) is not None
            ]
            if len(models) < len(client.groups):  # no worker of a layer group has registered yet
                return Found(request.chunks_at_hand, request.chunks_at_hand, "not_asked")
            if client.prefix is None or models != client.models:
                mover, groups = models[0].mover, LayerGroups([model.database for model in models])
                client.prefix = PrefixLookup(groups, mover.backend, None, self.metrics, mover.history)
                client.models = models
            job = LookupJob(models, client.prefix, client.hello.client, request)
            if not self._lookups.put(Item(incoming, client, job)):
                raise self._busy()
            return None
        if isinstance(request, Store | Retrieve):
            end = time.monotonic() + request.patience_ms / 1000
            if not self._copies.put(Item(incoming, client, turns(client, request, self.sessions, end))):
                raise self._busy()
            return None
        if isinstance(request, EndSession):
            self.sessions.end(client.hello.client, request.session)
            return Done()
        if incoming.descriptors is None:
            raise RefusalError("invalid", f"{type(request).__name__} must come over the Unix socket")
        if isinstance(request, Register):
            return client.register(request, incoming.descriptors, self.models)
        return client.unregister()

    def _busy(self) -> RefusalError:
        self.metrics.trouble("server", "busy")
        return RefusalError("busy", f"the server runs at most {MAX_IN_FLIGHT} operations at a time")

    # --- answering ------------------------------------------------------------------------------------------

    def _hello(self, identity: bytes, hello: Hello) -> Answer:
        cache = self.settings.cache
        groups = self.models.groups(hello.engine)
        group = groups[0]
        for layers in groups:
            if layers.chunk_size % layers.block_size:
                raise RefusalError(
                    "mismatch",
                    f"this server's chunks have {layers.chunk_size} tokens, which is not a multiple of the engine's block size "
                    f"{layers.block_size}",
                )
        with self._lock:
            self._clients.setdefault(identity, EngineClient(hello, groups))
        return Welcome(
            chunk_size=group.chunk_size,
            hash_mode=group.hash_mode,
            hash_seed=group.hash_seed,
            may_choose=cache.hash_mode == "auto",
            may_size=cache.chunk_size == "auto",
        )

    # --- the threads that work ------------------------------------------------------------------------------

    def _find(self) -> None:
        """The thread that answers lookups. It answers all lookups together that came while it was busy."""
        while items := self._lookups.take(_MOST_QUESTIONS):
            wanted = [item for item in items if not item.client.gone]
            answers = answer_lookups(
                [item.work for item in wanted], self.sessions, self.metrics, self.node.session_s
            )
            for item, answer in zip(wanted, answers, strict=True):
                if item.client.gone:  # the client left during the lookup; nothing else would end its session
                    self.sessions.end_client(item.client.hello.client)
                self._link.answer(item.incoming.client, item.incoming.number, answer)
            for item in items:
                self._lookups.finished(item)

    def _copy(self) -> None:
        """A thread that stores and retrieves."""
        while items := self._copies.take():
            incoming, client, job = items[0]
            answer: Answer | None = None
            try:
                if not client.gone:
                    answer = next(job)
                    if answer is None and self._copies.put_back(items[0]):
                        continue
                    answer = answer or _CLOSING
            except RefusalError as refusal:
                answer = refusal.refused
            except AbandonedError:
                answer = Refused("abandoned", "the engine has given up the operation")
            except Exception as error:  # an error of one operation must not end the thread
                log.exception("an operation failed")
                answer = failed(error)
            self._copies.finished(items[0])
            if answer is not None:
                self._link.answer(incoming.client, incoming.number, answer)

    # --- clients that go, and house keeping -----------------------------------------------------------------

    def _gone(self, name: bytes) -> None:
        """Called when a client's Unix socket has ended."""
        with self._lock:
            client = self._clients.pop(name, None)
        if client is not None:
            log.info("a %s of %s is gone", client.hello.kind, client.hello.engine.model or "no model")
            self._forget(client)

    def _forget(self, client: EngineClient) -> None:
        client.gone = True
        self._lookups.discard(client)
        self._copies.discard(client)
        self.sessions.end_client(client.hello.client)
        client.leave()

    def _keep_house(self) -> None:
        renew_at = time.monotonic() + self._renew_s
        while not self._stop.wait(min(_TICK_S, self._renew_s)):
            try:
                late = self.sessions.expire()
                if late:
                    self.metrics.trouble("server", "session_expired", late)
                if (now := time.monotonic()) >= renew_at:
                    renew_at = now + self._renew_s
                    for backend, keys in self.sessions.leases():
                        for start in range(0, len(keys), _LEASE_BATCH):
                            backend.batched_contains(keys[start : start + _LEASE_BATCH])
            except Exception:  # this thread runs as long as the server
                log.exception("house keeping failed")
