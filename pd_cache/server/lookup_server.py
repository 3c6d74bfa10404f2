"""RpcLookupServer: answers lookups about the engine of this process, for a scheduler in another process.

The client names the chunks, so that a lookup is a small message even for a long prompt. The server asks the engine.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pd_cache
from pd_cache.lookup.bypass import LooksUp
from pd_cache.metrics import CacheMetrics
from pd_cache.server.receiving import Receiver, failed
from pd_cache.wire.channel import Incoming, ServerChannel
from pd_cache.wire.messages import (
    Answer,
    Begun,
    Found,
    Hello,
    Lookup,
    RefusalError,
    Refused,
    Reset,
    Welcome,
    split_names,
)

_THREADS = 4
_IN_FLIGHT = 64
_CLIENTS = 256


class RpcLookupServer:
    """Answers lookups about one engine, from construction until `close`. The caller keeps ownership of the engine."""

    def __init__(self, engine: LooksUp, url: str, *, metrics: CacheMetrics | None = None) -> None:
        """Listens at `url`; a tcp:// port of 0 takes a free one. Raises CacheServerError if that is impossible."""
        self._engine = engine
        self._name = uuid.uuid4().hex
        self._channel = ServerChannel(url)
        self._receiver = Receiver(self._channel, self._handle, metrics or CacheMetrics(), "lookup")
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._places = threading.BoundedSemaphore(_IN_FLIGHT)
        self._threads = ThreadPoolExecutor(_THREADS, "pd-cache-rpc-lookup")
        self._closed = False
        self._receiver.start()

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return self._channel.url

    def close(self) -> None:
        """Answers what was received, then stops listening. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._receiver.stop()
        self._threads.shutdown()
        self._channel.close()

    def _handle(self, incoming: Incoming) -> Answer | None:
        request = incoming.request
        if isinstance(request, Hello):
            return self._hello(incoming.client, request)
        if not isinstance(request, Lookup | Reset):
            raise RefusalError("invalid", f"this server answers lookups, not {type(request).__name__}")
        if incoming.client not in self._known:
            raise RefusalError("unknown_client", "say hello first")
        if not self._places.acquire(blocking=False):
            raise RefusalError("busy", f"the server runs at most {_IN_FLIGHT} lookups at a time")
        self._threads.submit(self._answer, incoming, request)
        return None

    def _hello(self, client: bytes, hello: Hello) -> Answer:
        namespace = self._engine.database.namespace
        if hello.namespace != namespace.fingerprint():
            raise RefusalError("mismatch", f"the engine serves {namespace}, the client was made for another namespace")
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
            may_size=False,
            lifeline="",
        )

    def _answer(self, incoming: Incoming, request: Lookup | Reset) -> None:
        answer: Answer
        try:
            if isinstance(request, Lookup):
                answer = Found(*self._engine.survey(split_names(request.names), at_hand=request.at_hand))
            else:
                epoch = self._engine.reset()
                answer = Refused("failed", "the pool did not take the new epoch") if epoch is None else Begun(epoch)
        except Exception as error:  # noqa: BLE001 - the client receives and counts the error
            answer = failed(error)
        finally:
            self._places.release()
        self._receiver.answer(incoming, answer)
