"""A connection of one engine process to its cache server, which outlives the server.

The calling thread sends requests (`link.py`). A thread of the connection keeps it up: it says hello, registers the KV tensors, notices
when the server is gone, and does it all again when one is back. Meanwhile every request fails immediately, with an error that adapters
turn into a miss.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from pd_cache.chunks import ChunkNamer, ExtraKey, Tokens, stride_hashes
from pd_cache.errors import CacheServerError, NoAnswerError, RefusedError, ServerLostError
from pd_cache.layout import PageKind
from pd_cache.server.fence import Fence
from pd_cache.server.link import ClientLink, Context
from pd_cache.server.memory import Shared, SharingError, close_all, share_tensors
from pd_cache.server.protocol import (
    NOBODY,
    Answer,
    Done,
    EngineIdentity,
    Register,
    StatusQuery,
    StatusReport,
    Unregister,
    Welcome,
)
from pd_cache.sparse_log import SparseLog

log = logging.getLogger(__name__)

_GREETING_S = 2.0
_REGISTER_S = 120.0
"""Mapping and touching a large cache, and opening the backend for it, take a while."""
_AGAIN_S = 0.2
_SOON_S = 0.02
_WATCH_S = 0.5
_MOST_STORAGES = 200


class ServerConnection:
    """One process's connection, for one engine rank. Thread-safe."""

    def __init__(
        self,
        url: str,
        context: Context[Any] | None,
        kind: Literal["scheduler", "worker", "observer"],
        identity: EngineIdentity | None = None,
        *,
        connect_timeout_s: float = 10.0,
    ) -> None:
        """Connects to the server at `url`, e.g. `ipc:///run/pd-cache.sock`. `context` is a ZMQ context; None to create one. An observer
        has no identity.

        If `identity` has a chunk size, this does not wait: a server that is not there yet is treated like one that comes back. Otherwise
        it waits up to `connect_timeout_s` for the server's chunk size. Raises RefusedError if the server does not take this engine,
        NoAnswerError if it does not answer, ValueError for a bad address.
        """
        self.client = uuid.uuid4().hex
        self.hello = (identity or NOBODY).hello(self.client, kind)
        self.fence = Fence()
        self.lost = 0
        """How often the server was lost."""
        self._welcome: Welcome | None = None
        self._expected = None if identity is None else identity.chunk_size
        self._kv_caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | None = None
        self._layout_kind: PageKind | None = None
        self._problem: CacheServerError | SharingError | None = None
        self._ready = False
        self._connected = False
        """Whether a server is there, as far as the keeper knows. It may not know this client yet."""
        self._registration = 0
        """Counts the sets of tensors that were to be lent: what the server has may be an earlier one's."""
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
        if self._expected is None:
            try:
                self.wait_ready(connect_timeout_s)
            except BaseException:
                self.close()
                raise

    # --- what is known -------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.link.url

    @property
    def ready(self) -> bool:
        """Whether the server is there and knows this client, tensors included."""
        return self._ready

    @property
    def welcome(self) -> Welcome | None:
        """The server's latest welcome; None before its first answer."""
        return self._welcome

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        if self._welcome is not None:
            return self._welcome.chunk_size
        assert self._expected is not None
        return self._expected

    @property
    def blocks_per_chunk(self) -> int:
        """The number of the engine's blocks in a chunk. It is a whole number, or the server would have refused the engine."""
        return self.chunk_size // self.hello.engine.block_size

    def name_chunks(
        self, tokens: Tokens | None, hashes: Sequence[bytes] | None, extra_keys: Iterable[ExtraKey] = ()
    ) -> list[bytes]:
        """Returns the names of a prompt's whole chunks, given as tokens or as block hashes, whichever the server names chunks by."""
        if (tokens is None) == (hashes is None):
            raise ValueError("exactly one of token_ids and block_hashes must be given")
        mode = "tokens" if hashes is None else "blocks"
        if self._welcome is not None and self._welcome.hash_mode != mode:
            raise ValueError(f"this server names chunks by {self._welcome.hash_mode}, not by {mode}")
        if hashes is not None:
            return stride_hashes(hashes, self.blocks_per_chunk)
        assert tokens is not None
        return self._namer.hash_tokens(tokens, extra_keys)

    @functools.cached_property
    def _namer(self) -> ChunkNamer:
        return ChunkNamer(self.chunk_size)  # which never changes once it is known

    # --- requests ------------------------------------------------------------------------------------------------

    def ask(self, request: Any, timeout: float, descriptors: Sequence[int] | None = None) -> Answer:
        """Sends any request and waits for its answer; see `ClientLink.request`. Raises CacheServerError if there is none."""
        return self.link.request(request, timeout, descriptors).result()

    # --- life ----------------------------------------------------------------------------------------------------

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
        layout_kind: PageKind | None = None,
        timeout: float | None = None,
    ) -> None:
        """Lends the server this worker's KV tensors, now and after each time the server was away.

        Does not wait for a server that is away: it gets the tensors when it comes back. Raises SharingError if they cannot be shared, and
        RefusedError, with the server's reason, if it does not take them.
        """
        share = share_tensors(kv_caches)
        close_all(share.descriptors)
        if len(share.storages) > _MOST_STORAGES:
            raise SharingError(f"the KV tensors lie in {len(share.storages)} storages; {_MOST_STORAGES} are the most")
        with self._changed:
            self._kv_caches, self._layout_kind = kv_caches, layout_kind
            self._registration += 1
            self._ready, self._problem = False, None
        self.link.nudge()
        with contextlib.suppress(NoAnswerError):
            self._wait_ready(_REGISTER_S if timeout is None else timeout, lambda: self._connected)

    def close(self) -> None:
        """Takes the tensors back and disconnects. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self.link.nudge()
        self.link.fail_all("the connection is being closed")  # also what the keeper asks
        self._keeper.join()
        if self._ready and self._kv_caches is not None:
            with contextlib.suppress(CacheServerError):
                self.ask(Unregister(), _GREETING_S, ())
        self._ready, self._kv_caches = False, None
        self.link.close()
        left = self.fence.close(_GREETING_S)
        if left:
            log.error(
                "cache server %s: it stands still in the middle of %d copies, and may end them later", self.url, left
            )

    def wait_ready(self, timeout: float) -> None:
        """Waits for the server. Raises NoAnswerError after `timeout` seconds, RefusedError if it does not take this engine."""
        self._wait_ready(timeout, lambda: True)

    def _wait_ready(self, timeout: float, worth_it: Callable[[], bool]) -> None:
        """As `wait_ready`, and raises NoAnswerError as soon as it is not worth it, or this is being closed."""

        def ended() -> bool:
            return self._ready or self._problem is not None or self._closing or not worth_it()

        with self._changed:
            self._changed.wait_for(ended, timeout)
            if self._problem is not None:
                raise self._problem
            if not self._ready:
                raise NoAnswerError(f"no cache server answered at {self.url} within {timeout:g} s")

    def _forgotten(self) -> None:
        """Called, with the channel's lock, if the server does not know us: it was restarted, or took us for dead."""
        self._ready = False
        self.link.nudge()

    # --- the keeper's thread -------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closing:
            again = self._connected and not self._ready
            event = self.link.watch(_AGAIN_S if again else _WATCH_S)
            if event is True:
                self._connected = True
            elif event is False:
                self._lose("the connection to the cache server broke")
            if self._connected and not self._ready and not self._closing:
                self._greet()

    def _lose(self, reason: str) -> None:
        with self._changed:
            was_ready, self._ready = self._ready, False
            self._connected, self._problem = False, None
            self._changed.notify_all()
        self.link.detach()
        self.link.fail_all(reason)
        if was_ready:
            self.lost += 1
            log.warning("cache server %s: lost; requests are computed until it is back", self.url)

    def _greet(self) -> None:
        """Says hello and registers. If that fails, logs it; the keeper tries again."""
        with self._changed:
            registration = self._registration
        try:
            self._introduce()
        except (CacheServerError, SharingError, OSError) as error:
            problem = error if isinstance(error, CacheServerError | SharingError) else ServerLostError(str(error))
            lasting = isinstance(problem, SharingError) or (
                isinstance(problem, RefusedError) and problem.reason not in ("busy", "unknown_client", "closing")
            )
            with self._changed:
                if registration != self._registration:  # it was about tensors that are not in use any more: again
                    self.link.nudge()
                    return
                if lasting:
                    self._problem = problem
                    self._changed.notify_all()
            log.debug("cache server %s: %s", self.url, problem)
            if lasting and self._errors_logged.admit() is not None:
                log.error("cache server %s does not take this engine: %s", self.url, problem)
            return
        with self._changed:
            if registration != self._registration:  # the server has tensors that are not in use any more: again
                self.link.nudge()
                return
            self._ready, self._problem = True, None
            self._changed.notify_all()
        log.info("cache server %s: connected", self.url)

    def _introduce(self) -> None:
        welcome = self.ask(self.hello, _GREETING_S)
        if not isinstance(welcome, Welcome):
            raise ServerLostError(f"the server answered hello with {type(welcome).__name__}")
        known = self.chunk_size if self._welcome is not None or self._expected is not None else welcome.chunk_size
        if welcome.chunk_size != known:
            raise RefusedError(
                "mismatch", f"the server's chunks have {welcome.chunk_size} tokens, this engine was made for {known}"
            )
        before = self._welcome
        if before is not None and (before.hash_mode, before.hash_seed) != (welcome.hash_mode, welcome.hash_seed):
            raise RefusedError(
                "mismatch",
                f"the server names chunks by {welcome.hash_mode} {welcome.hash_seed}, and named them by {before.hash_mode} "
                f"{before.hash_seed} when this engine started",
            )
        self._welcome = welcome
        if welcome.socket:
            self.link.attach(welcome.socket)  # in vain if the server is on another host: that is good for lookups
        with self._changed:
            tensors, kind = self._kv_caches, self._layout_kind
        if tensors is not None:
            self._register(share_tensors(tensors), kind)

    def _register(self, shared: Shared, kind: PageKind | None) -> None:
        request = Register(shared.storages, shared.tensors, "" if kind is None else kind.value)
        try:
            future = self.link.request(request, _REGISTER_S, [self.fence.descriptor, *shared.descriptors])
        finally:
            close_all(shared.descriptors)
        while not future.query():
            if self.link.watch(_SOON_S) is False:  # no other thread would notice that the server has ended meanwhile
                self._lose("the cache server ended while it mapped the KV tensors")
            if self._closing:  # after `close` has failed what was outstanding
                raise ServerLostError("the connection is being closed")
        done = future.result()
        if not isinstance(done, Done):
            raise ServerLostError(f"the server answered register with {type(done).__name__}")


def server_welcome(url: str, timeout: float) -> Welcome:
    """Returns how the server names and sizes chunks. Raises CacheServerError if it does not answer, ValueError for a bad address."""
    connection = ServerConnection(url, None, "observer", connect_timeout_s=timeout)
    try:
        welcome = connection.welcome
        assert welcome is not None  # the constructor has waited for it
        return welcome
    finally:
        connection.close()


def server_status(url: str, timeout: float) -> StatusReport:
    """Returns what the server is doing. Raises CacheServerError if it does not answer, ValueError for a bad address."""
    connection = ServerConnection(url, None, "observer", connect_timeout_s=timeout)
    try:
        report = connection.ask(StatusQuery(), timeout)
    finally:
        connection.close()
    if not isinstance(report, StatusReport):
        raise CacheServerError(f"a question for its status was answered with {type(report).__name__}")
    return report
