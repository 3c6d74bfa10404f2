"""RpcLookupClient and its server: for a scheduler in another process than the worker that owns the engine.

The client names the chunks, so that a lookup is a small message however long the prompt; the server asks the engine.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pd_cache
from pd_cache.config import NodeSettings
from pd_cache.lookup.base import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.server.channel import CacheServerError, ClientChannel, Context, Incoming, RefusedError, ServerChannel
from pd_cache.server.messages import (
    Answer,
    Found,
    Hello,
    Lookup,
    Refused,
    Welcome,
    join_names,
    split_names,
)
from pd_cache.tokens import CacheMetadata, ChunkedTokenDatabase, ExtraKey, Namespace, Tokens

_THREADS = 4
_IN_FLIGHT = 64
_CLIENTS = 256
_TICK_S = 0.5


class LooksUpNamed(Protocol):
    """What is needed of a `CacheEngine`, which this layer does not import."""

    @property
    def namespace(self) -> Namespace: ...

    def lookup_named(self, names: Sequence[bytes], *, held: int = 0) -> int: ...


class RpcLookupServer:
    """Answers lookups about one engine, which stays its owner's. From construction until `close`."""

    def __init__(self, engine: LooksUpNamed, url: str, *, metrics: CacheMetrics | None = None) -> None:
        """Listen at `url`; a tcp:// port of 0 takes a free one. CacheServerError if that cannot be."""
        self.metrics = metrics or CacheMetrics()
        self._engine = engine
        self._name = uuid.uuid4().hex
        self._channel = ServerChannel(url)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._places = threading.BoundedSemaphore(_IN_FLIGHT)
        self._threads = ThreadPoolExecutor(_THREADS, "pd-cache-rpc-lookup")
        self._stopping = False
        self._receiver = threading.Thread(target=self._receive, name="pd-cache-rpc-receive", daemon=True)
        self._receiver.start()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return self._channel.url

    def close(self) -> None:
        """Answer what was received, then stop listening. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._channel.wake()
        self._receiver.join()
        self._threads.shutdown()
        self._channel.close()

    def _receive(self) -> None:
        while not self._stopping:
            for incoming in self._channel.receive(_TICK_S, lambda reason: self.metrics.trouble("lookup", reason)):
                answer = self._handle(incoming)
                if answer is not None:
                    self._channel.answer(incoming, answer)

    def _handle(self, incoming: Incoming) -> Answer | None:
        request = incoming.request
        if isinstance(request, Hello):
            return self._hello(incoming.client, request)
        if not isinstance(request, Lookup):
            return Refused("invalid", f"this server answers lookups, not {type(request).__name__}")
        if incoming.client not in self._known:
            return Refused("unknown_client", "say hello first")
        if not self._places.acquire(blocking=False):
            return Refused("busy", f"{_IN_FLIGHT} lookups are the most at a time")
        self._threads.submit(self._lookup, incoming, request)
        return None

    def _hello(self, client: bytes, hello: Hello) -> Answer:
        namespace = self._engine.namespace
        if hello.namespace != namespace.fingerprint():
            return Refused("mismatch", f"the engine serves {namespace}, the client was made for another namespace")
        self._known[client] = None
        while len(self._known) > _CLIENTS:
            self._known.popitem(last=False)
        return Welcome(
            server=self._name,
            software=pd_cache.__version__,
            chunk_size=namespace.chunk_size,
            hash_mode=namespace.hash_mode,
            hash_seed=namespace.hash_seed,
            may_choose=False,
            lifeline="",
        )

    def _lookup(self, incoming: Incoming, request: Lookup) -> None:
        try:
            size = self._engine.namespace.chunk_size
            found = self._engine.lookup_named(split_names(request.names), held=request.held * size)
            answer: Answer = Found(found // size)
        except Exception as error:  # noqa: BLE001 - the client is told, and counts it
            answer = Refused("failed", f"{type(error).__name__}: {error}")
        finally:
            self._places.release()
        self._channel.answer(incoming, answer)


class RpcLookupClient(LookupClient):
    """Asks an `RpcLookupServer`. An answer is waited for twice as long as the engine may wait for its pool."""

    def __init__(
        self,
        config: NodeSettings,
        metadata: CacheMetadata,
        url: str,
        *,
        context: Context[Any] | None = None,
        metrics: CacheMetrics | None = None,
    ) -> None:
        """Begin to connect; lookups are 0 until the server answers. ValueError for a bad address."""
        super().__init__(metrics)
        self._database = ChunkedTokenDatabase(metadata.namespace(config.cache))
        self._timeout = 2 * config.transfer.timeouts.exist_ms / 1000
        self._greeted = False
        name = uuid.uuid4().hex
        self._hello = Hello(
            name,
            "scheduler",
            pd_cache.__version__,
            metadata.model,
            metadata.world_size,
            metadata.rank,
            metadata.block_size,
            self._database.namespace.fingerprint(),
        )
        self._channel = ClientChannel(url, context, name, self._forgotten, watched=False)

    def wait_connected(self, timeout: float) -> None:
        """Wait for the server. ServerLostError after `timeout` seconds, RefusedError if it serves another namespace."""
        end = time.monotonic() + timeout
        while not self._greeted:
            try:
                self._greet()
            except RefusedError:
                raise
            except CacheServerError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.01)

    def _lookup(
        self,
        token_ids: Tokens | None,
        block_hashes: Sequence[bytes] | None,
        held: int,
        extra_keys: Sequence[ExtraKey],
        lookup_id: str | None,
    ) -> int:
        database = self._database
        names = database.name_chunks(token_ids, block_hashes, extra_keys)
        skip = min(max(held, 0) // database.chunk_size, len(names))
        if skip == len(names):
            return skip * database.chunk_size
        try:
            found = self._ask(names, skip)
        except RefusedError as error:
            if error.reason != "unknown_client":
                raise
            found = self._ask(names, skip)  # the server has started again
        self.metrics.tokens("lookup", "requested", (len(names) - skip) * database.chunk_size)
        self.metrics.tokens("lookup", "hit", (found - skip) * database.chunk_size)
        return found * database.chunk_size

    def _ask(self, names: Sequence[bytes], skip: int) -> int:
        if not self._greeted:
            self._greet()
        answer = self._channel.request(Lookup("", join_names(names), skip), self._timeout).result()
        if not isinstance(answer, Found):
            raise CacheServerError(f"a lookup was answered with {type(answer).__name__}")
        return answer.chunks

    def _greet(self) -> None:
        self._channel.request(self._hello, self._timeout).result()
        self._greeted = True

    def _forgotten(self) -> None:
        self._greeted = False

    def close(self) -> None:
        self._channel.close()
