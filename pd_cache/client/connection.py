"""A connection of one engine process to its cache server, which outlives the server.

The calling thread sends requests (`channel`). A thread of the connection keeps it up: it says hello, registers the KV tensors, notices
when the server is gone, and does it all again when one is back. Meanwhile every request fails immediately, with an error that adapters
turn into a miss.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

import pd_cache
from pd_cache.client.identity import EngineIdentity
from pd_cache.layout import PageKind
from pd_cache.sparse_log import SparseLog
from pd_cache.tokens import ChunkNamer, ExtraKey, Tokens, stride_hashes
from pd_cache.wire.channel import (
    CacheServerError,
    ClientChannel,
    Context,
    Future,
    NoAnswerError,
    RefusedError,
    ServerLostError,
)
from pd_cache.wire.fence import Fence
from pd_cache.wire.lifeline import LifelineClient
from pd_cache.wire.messages import (
    REFUSALS,
    Answer,
    Begun,
    Done,
    EndSession,
    Hello,
    Lookup,
    Register,
    Reset,
    Retrieve,
    Store,
    Unregister,
    Welcome,
    join_names,
)
from pd_cache.wire.sharing import Shared, SharingError, close_all, event_handle, share_tensors
from transfer.locks import Condition

log = logging.getLogger(__name__)

_GREETING_S = 2.0
_GIVE_UP_S = 5.0
_REGISTER_S = 120.0
"""Mapping and touching a large cache, and opening the backend for it, take a while."""
_AGAIN_S = 0.2
_WATCH_S = 0.5
_MOST_STORAGES = 200


class PendingMove:
    """A store or retrieve under way. The server may touch its blocks until `query` returns True."""

    __slots__ = ("__weakref__", "_connection", "_event", "_place", "failure", "future")

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._place: tuple[int, int] | None = None
        """Its slot and ticket of the fence."""
        self._event: object = None  # the server opens it by its handle
        self.future: Future | None = None
        self.failure = ""
        """Why there is no answer, in a word; empty while it is under way, and after an answer."""

    def began(self, place: tuple[int, int], event: object) -> None:
        """For the connection: from now on the server may touch the blocks."""
        self._place, self._event = place, event

    def query(self) -> bool:
        """Looks without waiting. Returns True once it has ended and its blocks are the engine's again."""
        if self._place is None or self.future is None:
            return True
        if not self.future.query():
            return False
        if not self._connection.fence.revoke(*self._place):
            return False  # the connection was lost while a chunk was being copied into the blocks
        self._place = None
        self._event = None
        if not self.failure:
            self.failure = failure_of(self.future)
        return True

    def wait(self) -> None:
        """Waits until `query` returns True."""
        if self.future is not None:
            with contextlib.suppress(CacheServerError):
                self.future.result()
        while not self.query():
            time.sleep(0.001)

    def give_up(self) -> None:
        """Returns when the server touches the blocks no more, whatever has become of the move.

        Waits, for a load, for as long as one chunk is copied. If the server stands still in the middle of that, the fence goes on trying.
        """
        end = time.monotonic() + _GIVE_UP_S
        while self._place is not None and time.monotonic() < end:
            if self._connection.fence.revoke(*self._place):
                self._place = None
            else:
                time.sleep(0.001)
        self.failure = self.failure or "abandoned"

    @property
    def answer(self) -> Answer | None:
        """The server's answer, once the move has ended; None if it failed."""
        if self.failure or self.future is None:
            return None
        return self.future.result()


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
        if identity is None or kind == "observer":
            self.hello = Hello(self.client, "observer", pd_cache.__version__)
        else:
            self.hello = identity.hello(self.client, kind)
        self.fence = Fence()
        self.lost = 0
        """How often the server was lost."""
        self._welcome: Welcome | None = None
        self._expected = None if identity is None else identity.chunk_size
        self._kv_caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | None = None
        self._layout_kind: PageKind | None = None
        self._lifeline: LifelineClient | None = None
        self._problem: CacheServerError | SharingError | None = None
        self._ready = False
        self._connected = False
        """Whether a server is there, as far as the keeper knows. It may not know this client yet."""
        self._registration = 0
        """Counts the sets of tensors that were to be lent: what the server has may be an earlier one's."""
        self._changed = Condition()
        self._closing = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Set to wake the keeper."""
        self._errors_logged = SparseLog()
        try:
            self._channel = ClientChannel(url, context, self.client, self._forgotten)
        except BaseException:
            self.fence.close()
            os.close(self._wakeup)
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
        return self._channel.url

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
        return self.chunk_size // self.hello.block_size

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

    def lookup(self, session: str, names: Sequence[bytes], at_hand: int, timeout: float) -> Future:
        """Asks how many of the chunks, from the first, are there. The answer is a `Found`. A session protects them from eviction."""
        if not self._ready:  # a server that does not know us yet would answer only once it does
            return self._channel.lost(f"no cache server at {self.url} is ready for this engine")
        return self._channel.request(Lookup(session, join_names(names), at_hand), timeout)

    def end_session(self, session: str) -> None:
        """Releases what a session protects. If the server is gone, there is nothing to release."""
        self._channel.notify(EndSession(session))

    def reset(self, timeout: float) -> str | None:
        """Begins a new epoch of the model's weights. Returns its label; None if the server or the pool did not take it."""
        try:
            answer = self.ask(Reset(), timeout)
        except CacheServerError as error:
            log.warning("cache server %s: no new epoch has begun: %s", self.url, error)
            return None
        return answer.epoch if isinstance(answer, Begun) else None

    def ask(self, request: Any, timeout: float) -> Answer:
        """Sends any request and wait for its answer. Raises CacheServerError if there is none."""
        return self._channel.request(request, timeout).result()

    def move(
        self,
        kind: type[Store] | type[Retrieve],
        session: str,
        names: Sequence[bytes],
        blocks: Sequence[int],
        event: Any,
        timeout: float,
        epoch: str | None = None,
    ) -> PendingMove:
        """Begins a store or retrieve of blocks. The server may touch them until the move has ended."""
        move = PendingMove(self)
        if not self._ready:
            move.failure = "server_lost"
            return move
        # the move holds the ticket: if an interrupt comes in between, the fence takes it away again
        place = self.fence.admit(move, loads=kind is Retrieve)
        if place is None:
            move.failure = "busy"
            return move
        slot, ticket = place
        try:
            move.began(place, event)
            patience = max(1, int(timeout * 1000))
            handle = event_handle(event)
            request = kind(session, join_names(names), tuple(blocks), slot, ticket, patience, handle, epoch)
            move.future = self._channel.request(request, timeout)
        except BaseException:
            move.give_up()
            raise
        return move

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
        os.eventfd_write(self._wakeup, 1)
        with contextlib.suppress(NoAnswerError):
            self._wait_ready(_REGISTER_S if timeout is None else timeout, lambda: self._connected)

    def close(self) -> None:
        """Takes the tensors back and disconnects. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        os.eventfd_write(self._wakeup, 1)
        self._channel.fail_all("the connection is being closed")  # also what the keeper asks
        self._keeper.join()
        if self._ready and self._kv_caches is not None:
            with contextlib.suppress(CacheServerError):
                self.ask(Unregister(), _GREETING_S)
        self._ready, self._kv_caches = False, None
        self._channel.close()
        if self._lifeline is not None:
            self._lifeline.close()
        os.close(self._wakeup)
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
        os.eventfd_write(self._wakeup, 1)

    # --- the keeper's thread -------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closing:
            again = self._connected and not self._ready
            event = self._channel.watch(_AGAIN_S if again else _WATCH_S, self._descriptors())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
            if event is True:
                self._connected = True
            elif event is False or (self._lifeline is not None and self._lifeline.lost):
                self._lose("the connection to the cache server broke")
            if self._connected and not self._ready and not self._closing:
                self._greet()

    def _descriptors(self) -> list[int]:
        return [self._wakeup, *([] if self._lifeline is None else [self._lifeline.fileno()])]

    def _lose(self, reason: str) -> None:
        with self._changed:
            was_ready, self._ready = self._ready, False
            self._connected, self._problem = False, None
            self._changed.notify_all()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        self._channel.fail_all(reason)
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
                    os.eventfd_write(self._wakeup, 1)
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
                os.eventfd_write(self._wakeup, 1)
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
        if self._lifeline is None or self._lifeline.lost:
            self._lifeline = None
            with contextlib.suppress(OSError):  # a server on another host, or one without a lifeline: good for lookups
                self._lifeline = LifelineClient(welcome.lifeline, self.client)
        with self._changed:
            tensors, kind = self._kv_caches, self._layout_kind
        if tensors is not None:
            self._register(share_tensors(tensors), kind)

    def _register(self, shared: Shared, kind: PageKind | None) -> None:
        try:
            if self._lifeline is None:
                raise RefusedError(
                    "mismatch", "no file descriptor reaches the server: engines and their cache server share a host"
                )
            registration = uuid.uuid4().hex
            self._lifeline.send(registration, [self.fence.descriptor, *shared.descriptors])
        finally:
            close_all(shared.descriptors)
        done = self.ask(
            Register(registration, shared.storages, shared.tensors, "" if kind is None else kind.value), _REGISTER_S
        )
        if not isinstance(done, Done):
            raise ServerLostError(f"the server answered register with {type(done).__name__}")


def failure_of(future: Future) -> str:
    """Returns why a future that is done has no proper answer, in a word for a counter; empty if it has one."""
    try:
        future.result()
    except RefusedError as error:
        return error.reason if error.reason in REFUSALS else "refused"  # it names a counter
    except NoAnswerError:
        return "timeout"
    except CacheServerError:
        return "server_lost"
    return ""
