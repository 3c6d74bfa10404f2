"""A connection of an engine process to its cache server, which outlives the server.

The calling thread sends requests (`link.py`). The connection has a thread of its own, the keeper. The keeper
says hello, registers the KV tensors, and notices when the server is gone. When a server is back, it does this
again. Meanwhile every request fails at once, with an error that adapters turn into a miss.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pd_cache.errors import CacheServerError, NoAnswerError, ServerLostError, ServerRefusedError
from pd_cache.layout import KVCaches, PageKind
from pd_cache.server.fence import Fence
from pd_cache.server.link import ClientLink, Context
from pd_cache.server.memory import SharingError, close_all, share_tensors
from pd_cache.server.protocol import (
    NOBODY,
    Answer,
    Done,
    EngineIdentity,
    Hello,
    Register,
    Request,
    Unregister,
    Welcome,
)
from pd_cache.sparse_log import SparseLog

log = logging.getLogger(__name__)

_GREETING_S = 2.0
_REGISTER_S = 120.0
"""How long a registration may take: the server maps and touches a large cache, and opens a backend for it."""
_SOON_S, _AGAIN_S = 0.02, 0.2
"""The first and the longest pause between attempts to connect or to say hello. The first pause is short,
because ZMQ connects only a moment after the Unix socket."""
_WATCH_S = 0.5
_MOST_STORAGES = 200


class ServerConnection:
    """A process's connection, for an engine rank. Thread-safe."""

    def __init__(
        self,
        url: str,
        context: Context[Any] | None,
        kind: Literal["scheduler", "worker", "observer"],
        identity: EngineIdentity | None = None,
        *,
        connect_timeout_s: float = 10.0,
    ) -> None:
        """Connects to the server at `url`, e.g. `ipc:///run/pd-cache.sock`. `context` is a ZMQ context; None
        to create one. An observer has no identity.

        If `identity` has a chunk size, this does not wait: the keeper connects when a server appears.
        Otherwise it waits up to `connect_timeout_s` for the server's chunk size. Raises ServerRefusedError if
        the server does not take this engine, NoAnswerError if it does not answer, ValueError for a bad
        address.
        """
        self.url = url
        self.client = uuid.uuid4().hex
        self.hello = Hello(self.client, kind, identity or NOBODY)
        self.fence = Fence()
        self.welcome: Welcome | None = None
        """The server's latest welcome; None before its first answer."""
        self.ready = False
        """Whether the server is connected, and knows this client and its tensors."""
        self._lent: tuple[KVCaches, PageKind | None] | None = None
        """The KV tensors that the server has, or will have."""
        self._problem: CacheServerError | SharingError | None = None
        self._connected = False
        """Whether the keeper knows that a server is there. The server may not know this client yet."""
        self._changed = threading.Condition()
        self._closing = False
        self._errors_logged = SparseLog()
        try:
            self.link = ClientLink(url, context, self.client, self._forgotten)
        except BaseException:
            self.fence.close()
            raise
        self._keeper = threading.Thread(target=self._keep, name="pd-cache-client", daemon=True)
        self._keeper.start()
        if self.hello.engine.chunk_size is None:
            try:
                self.wait_ready(connect_timeout_s)
            except BaseException:
                self.close()
                raise

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        size = self.hello.engine.chunk_size if self.welcome is None else self.welcome.chunk_size
        assert size is not None  # otherwise the constructor has waited for the welcome
        return size

    def ask(self, request: Request, timeout: float, descriptors: Sequence[int] | None = None) -> Answer:
        """Sends any request and waits for its answer; see `ClientLink.request`. Raises CacheServerError if
        there is none."""
        future = self.link.request(request, timeout, descriptors)
        self.link.wait(future)
        return future.result()

    def register(self, kv_caches: KVCaches, layout_kind: PageKind | None = None) -> None:
        """Lends the server this worker's KV tensors, now and after each time the server was away.

        Does not wait for a server that is away; the server gets the tensors when it is back. Raises
        SharingError if they cannot be shared, and ServerRefusedError, with the server's reason, if the server
        does not take them.
        """
        share = share_tensors(kv_caches)
        close_all(share.descriptors)
        if len(share.storages) > _MOST_STORAGES:
            raise SharingError(
                f"the KV tensors lie in {len(share.storages)} storages; at most {_MOST_STORAGES} are allowed"
            )
        with self._changed:
            self._lent = kv_caches, layout_kind
            self.ready, self._problem = False, None
        self.link.nudge()
        with contextlib.suppress(NoAnswerError):
            self.wait_ready(_REGISTER_S, only_connected=True)

    def close(self) -> None:
        """Takes the tensors back and disconnects. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self.link.nudge()
        self.link.fail_all("the connection is being closed")  # including the keeper's own requests
        self._keeper.join()
        if self.ready and self._lent is not None:
            with contextlib.suppress(CacheServerError):
                self.ask(Unregister(), _GREETING_S, ())
        self.ready, self._lent = False, None
        self.link.close()
        left = self.fence.close(_GREETING_S)
        if left:
            log.error(
                "cache server %s: it has stopped in the middle of %d copies, and may finish them later",
                self.url,
                left,
            )

    def wait_ready(self, timeout: float, *, only_connected: bool = False) -> None:
        """Waits until the server is ready. Raises NoAnswerError after `timeout` seconds, ServerRefusedError
        if the server does not take this engine.

        With `only_connected`, raises NoAnswerError as soon as no server is there.
        """

        def ended() -> bool:
            away = only_connected and not self._connected
            return self.ready or self._problem is not None or self._closing or away

        with self._changed:
            self._changed.wait_for(ended, timeout)
            if self._problem is not None:
                raise self._problem
            if not self.ready:
                raise NoAnswerError(f"no cache server answered at {self.url} within {timeout:g} s")

    def _forgotten(self) -> None:
        """Called, with the link's lock held, if the server does not know this client: the server was
        restarted, or took the client for dead."""
        self.ready = False
        self.link.nudge()

    # --- the keeper's thread --------------------------------------------------------------------------------

    def _keep(self) -> None:
        pause = _SOON_S
        while not self._closing:
            if not self._connected and self.link.attach():
                self._connected, pause = True, _SOON_S
            if self._connected and not self.ready:
                self._greet()
            if not self.link.watch(_WATCH_S if self.ready else pause) and self._connected:
                self._lose("the connection to the cache server broke")
            pause = min(2 * pause, _AGAIN_S)

    def _lose(self, reason: str) -> None:
        with self._changed:
            was_ready, self.ready = self.ready, False
            self._connected, self._problem = False, None
            self._changed.notify_all()
        self.link.detach()
        self.link.fail_all(reason)
        if was_ready:
            log.warning("cache server %s: lost; requests are computed until it is back", self.url)

    def _greet(self) -> None:
        """Says hello and registers. If that fails, logs it; the keeper tries again."""
        with self._changed:
            lent, problem = self._lent, None
        try:
            self._introduce()
            if lent is not None:
                self._register(*lent)
        except (CacheServerError, SharingError) as error:
            problem = error
        except OSError as error:
            problem = ServerLostError(str(error))
        passes = problem is None or getattr(problem, "reason", "") in ("busy", "unknown_client", "closing")
        lasts = isinstance(problem, SharingError | ServerRefusedError) and not passes
        with self._changed:
            # the tensors were replaced meanwhile: register again
            if lent is not self._lent:
                self.link.nudge()
                return
            self.ready = problem is None
            self._problem = problem if lasts else None
            self._changed.notify_all()
        if problem is None:
            log.info("cache server %s: connected", self.url)
        elif lasts and self._errors_logged.admit() is not None:
            log.error("cache server %s refuses this engine: %s", self.url, problem)
        else:
            log.debug("cache server %s: %s", self.url, problem)

    def _introduce(self) -> None:
        """Says hello. Raises CacheServerError if the server does not take this engine, or names or sizes
        chunks in another way than before."""
        welcome = self.ask(self.hello, _GREETING_S)
        if not isinstance(welcome, Welcome):
            raise ServerLostError(f"the server answered hello with {type(welcome).__name__}")
        before = self.welcome
        known = self.hello.engine.chunk_size if before is None else before.chunk_size
        if welcome.chunk_size != (known or welcome.chunk_size):
            raise ServerRefusedError(
                "mismatch",
                f"the server's chunks have {welcome.chunk_size} tokens, this engine was made for {known}",
            )
        if before is not None and (before.hash_mode, before.hash_seed) != (
            welcome.hash_mode,
            welcome.hash_seed,
        ):
            raise ServerRefusedError(
                "mismatch",
                f"the server names chunks by {welcome.hash_mode} {welcome.hash_seed}, and named them by {before.hash_mode} "
                f"{before.hash_seed} when this engine started",
            )
        self.welcome = welcome

    def _register(self, kv_caches: KVCaches, kind: PageKind | None) -> None:
        shared = share_tensors(kv_caches)
        request = Register(shared.storages, shared.tensors, "" if kind is None else kind.value)
        try:
            future = self.link.request(request, _REGISTER_S, [self.fence.descriptor, *shared.descriptors])
        finally:
            close_all(shared.descriptors)
        while not self.link.look(future):
            # no other thread would notice if the server has ended meanwhile
            if not self.link.watch(_SOON_S):
                self._lose("the cache server ended while it mapped the KV tensors")
            if self._closing:  # `close` has already failed the outstanding requests
                raise ServerLostError("the connection is being closed")
        done = future.result()
        if not isinstance(done, Done):
            raise ServerLostError(f"the server answered register with {type(done).__name__}")


def server_welcome(url: str, timeout: float) -> Welcome:
    """Returns how the server names and sizes chunks. Raises CacheServerError if it does not answer,
    ValueError for a bad address."""
    with contextlib.closing(ServerConnection(url, None, "observer", connect_timeout_s=timeout)) as connection:
        assert connection.welcome is not None  # the constructor has waited for it
        return connection.welcome
