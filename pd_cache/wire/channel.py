"""Sends and receives frames over ZMQ. No other module uses ZMQ.

Only one thread at a time may use a ZMQ socket. If a thread of ours owned it, each request would cost two thread switches, and beside a
thread that spins, the owner would get the GIL milliseconds late. So no thread owns the socket. Each thread that sends or looks for answers
uses it, under a lock that no thread holds while it waits. One thread at a time waits for the socket's file descriptor, outside the lock.
That descriptor is edge-triggered: any use of the socket may swallow the edge, so a thread that used it and finds frames left to read wakes
the waiting thread.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq
from zmq import Context
from zmq.utils.monitor import recv_monitor_message

from pd_cache.errors import PdCacheError
from pd_cache.wire.descriptors import next_descriptor, raise_limit
from pd_cache.wire.door import Door
from pd_cache.wire.freed_memory import give_memory_back
from pd_cache.wire.messages import (
    MAX_FRAME,
    Answer,
    FrameError,
    Message,
    Refused,
    Request,
    decode_answer,
    decode_request,
    encode,
)

__all__ = [
    "BusyError",
    "CacheServerError",
    "ClientChannel",
    "Context",
    "Future",
    "Incoming",
    "NoAnswerError",
    "RefusedError",
    "ServerChannel",
    "ServerLostError",
]

log = logging.getLogger(__name__)

_EVENTS, _READABLE, _NOW = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
"""ZMQ's events as plain integers: enumerations cost as much as the calls."""
_HIGH_WATER = 4096
_OUTSTANDING = 1024
"""The most requests of a client that wait for an answer. One more is refused as `busy`."""
_SERVER_INCOMING = 32
"""How many messages of one client ZMQ reads ahead. Each has up to `MAX_FRAME` bytes. Further messages stay with the client."""
_ROUND = 64
_ROUND_BYTES = 1 << 20
"""The most messages and bytes that are decoded before the first message is handled."""
_LARGE = 1 << 18
"""Bytes of a frame after which memory is given back to the kernel, once no more such frames come."""
_RESERVE = 16_384
"""How many file descriptors connections leave free, but at most half of all. As many connections may be accepted between two checks."""
_HEARTBEAT_MS = 500
_SILENCE_MS = 5_000
"""How long a server may be silent before ZMQ counts it as gone. A server that dies closes its sockets, and requests have deadlines, so
this matters only if the server or its host is stopped."""
_WAIT_SLICE_S = 0.5
_AWAKE_S = 0.0002
"""How long a thread that waits for an answer polls before it sleeps. A lookup takes less, and to fall asleep and wake up would take as
long as the rest of it."""


class CacheServerError(PdCacheError):
    """A request to a cache server did not succeed."""


class ServerLostError(CacheServerError):
    """The connection broke, or there was none."""


class NoAnswerError(CacheServerError):
    """No answer came by the deadline."""


class RefusedError(CacheServerError):
    """The server refused the request. `reason` is that of `messages.Refused`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BusyError(RefusedError):
    """Too much is under way, at the server or from this client."""

    def __init__(self, message: str) -> None:
        super().__init__("busy", message)


class _Wire:
    """A ZMQ socket that any thread may use, and for which one thread at a time may wait."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(socket.getsockopt(zmq.FD), select.POLLIN)  # type: ignore[arg-type]
        self._poll.register(self._wakeup, select.POLLIN)
        self._closed = False

    def send(self, frames: list[bytes]) -> bool:
        """Sends without waiting. Returns False if the socket cannot take the message now. Call with the lock held."""
        if self._closed:
            return False
        try:
            self._socket.send_multipart(frames, _NOW)
        except zmq.ZMQError:  # full, not connected, or closed
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """Returns the next message, or None if there is none now. Call with the lock held."""
        if not self.readable():
            return None
        try:
            return self._socket.recv_multipart(_NOW)
        except zmq.ZMQError:
            return None

    def readable(self) -> bool:
        """Returns whether there is a message. Call with the lock held."""
        return not self._closed and bool(int(self._socket.getsockopt(_EVENTS)) & _READABLE)

    def wait(self, timeout: float, awake: float = 0.0) -> None:
        """Waits until a message may be there, until `wake`, or for `timeout` seconds. Only one thread may call it, without the lock.

        The thread does not sleep for the first `awake` seconds.
        """
        ready, asleep = self._poll.poll(0), time.monotonic() + min(awake, timeout)
        while not ready and time.monotonic() < asleep:
            ready = self._poll.poll(0)
        for descriptor, _ in ready or self._poll.poll(max(0.0, timeout) * 1000):
            if descriptor == self._wakeup:
                try:
                    os.eventfd_read(self._wakeup)
                except BlockingIOError:
                    pass

    def wake(self) -> None:
        """Makes `wait` return, now or at its next call."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Closes the socket. No thread may still be waiting."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self._socket.close(0)
                os.close(self._wakeup)


# --- a client's end --------------------------------------------------------------------------------------------------


class Future:
    """An answer to come. `query` is cheap, and runs on the calling thread."""

    __slots__ = ("_answer", "_channel", "_error", "deadline", "number")

    def __init__(self, channel: ClientChannel, number: int, deadline: float) -> None:
        self._channel = channel
        self._answer: Answer | None = None
        self._error: CacheServerError | None = None
        self.number = number
        self.deadline = deadline

    @property
    def done(self) -> bool:
        """Whether the future is settled. Does not look for new answers."""
        return self._answer is not None or self._error is not None

    @property
    def answered(self) -> bool:
        """Whether the server has answered, so that no part of the request is still under way."""
        return self._answer is not None

    def query(self) -> bool:
        """Looks for an answer without waiting. Returns True once there is one or it is clear that there will be none."""
        if not self.done:
            self._channel.look()
            if not self.done and time.monotonic() >= self.deadline:
                self._channel.give_up(self)
        return self.done

    def result(self) -> Answer:
        """Waits for the answer, at most until the deadline. Raises a `CacheServerError` if there is none."""
        if not self.done:
            self._channel.wait(self)
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        if isinstance(self._answer, Refused):
            if self._answer.reason == "busy":
                raise BusyError(self._answer.message)
            raise RefusedError(self._answer.reason, self._answer.message)
        return self._answer

    def settle(self, answer: Answer | None, error: CacheServerError | None = None) -> None:
        """Sets the outcome; called by the channel."""
        if not self.done:
            self._answer, self._error = answer, error


class ClientChannel:
    """Sends requests to one server. Thread-safe; has no thread of its own, and never waits to send.

    It reconnects by itself. `watch` reports connections and losses; the caller then fails all outstanding requests (`fail_all`).
    """

    def __init__(
        self,
        url: str,
        context: Context[zmq.Socket[bytes]] | None,
        name: str,
        forgotten: Callable[[], None],
        *,
        watched: bool = True,
    ) -> None:
        """`name` identifies this client to the server. `forgotten` is called if the server does not know the client; it must be quick.

        `watched`: whether a thread calls `watch` all the time. Raises ValueError if ZMQ does not understand `url`.
        """
        self._forgotten = forgotten
        self.url = url
        self._own_context = context is None
        self._context: Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, name.encode())
        socket.setsockopt(zmq.IMMEDIATE, 1)  # without a connection a request fails at once; it is not kept for later
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = socket.get_monitor_socket(events) if watched else None
        try:
            socket.connect(url)
        except zmq.ZMQError as error:
            self._unwatch(socket)
            socket.close(0)
            if self._own_context:
                self._context.term()
            raise ValueError(f"{url!r} is not the address of a cache server: {error}") from None
        self._socket = socket
        self._wire = _Wire(socket)
        self._changed = threading.Condition(self._wire.lock)
        self._futures: dict[int, Future] = {}
        self._next = 1
        self._waited_for: Future | None = None
        """The future of the one thread that waits at the socket. Other threads wait until that thread wakes them."""
        self._closed = False

    def request(self, message: Message, timeout: float) -> Future:
        """Sends a request. Returns a future, which gets the answer or, after `timeout` seconds, the reason why there is none."""
        with self._changed:
            future = Future(self, self._next, time.monotonic() + timeout)
            self._next += 1
            frame = encode(future.number, message)
            if self._closed:
                future.settle(None, ServerLostError("the connection is closed"))
            elif len(frame) > MAX_FRAME:  # the server would end the connection
                future.settle(
                    None,
                    RefusedError("invalid", f"a request may have at most {MAX_FRAME} bytes, this one has {len(frame)}"),
                )
            elif len(self._futures) >= _OUTSTANDING:
                future.settle(None, BusyError(f"{_OUTSTANDING} requests of this client already wait for answers"))
            elif not self._wire.send([frame]):
                future.settle(None, ServerLostError(f"no cache server answers at {self.url}"))
            else:
                self._futures[future.number] = future
                self._after_use()
        return future

    def lost(self, reason: str) -> Future:
        """Returns the failed future of a request that is not sent because there is no server to answer it."""
        future = Future(self, 0, 0.0)
        future.settle(None, ServerLostError(reason))
        return future

    def notify(self, message: Message) -> bool:
        """Sends a request that needs no answer. Returns False if it could not be sent."""
        with self._changed:
            sent = not self._closed and self._wire.send([encode(0, message)])
            self._after_use()
        return sent

    def look(self) -> None:
        """Reads the answers that have arrived, without waiting."""
        with self._changed:
            self._read()

    def give_up(self, future: Future) -> None:
        """Settles a future as unanswered. An answer that still comes is dropped."""
        with self._changed:
            if self._futures.pop(future.number, None) is not None:
                future.settle(None, NoAnswerError(f"no answer from {self.url} in time"))
                self._tell()

    def fail_all(self, reason: str) -> None:
        """Settles all outstanding futures as failed."""
        with self._changed:
            futures, self._futures = list(self._futures.values()), {}
            for future in futures:
                future.settle(None, ServerLostError(reason))
            self._tell()

    def wait(self, future: Future) -> None:
        """Waits until the future is settled, at most until its deadline."""
        while not future.done:
            remaining = future.deadline - time.monotonic()
            if remaining <= 0:
                self.give_up(future)
                return
            with self._changed:
                self._read()
                if future.done or self._closed:
                    continue
                if self._waited_for is not None:
                    self._changed.wait(min(remaining, _WAIT_SLICE_S))
                    continue
                self._waited_for = future
            try:
                self._wire.wait(min(remaining, _WAIT_SLICE_S), _AWAKE_S)
            finally:
                with self._changed:
                    self._waited_for = None
                    self._read()
                    self._changed.notify_all()

    def watch(self, timeout: float, descriptors: Sequence[int] = ()) -> bool | None:
        """Returns True if a connection was made, False if one was lost, None if neither happened within `timeout` seconds.

        Returns early if one of the descriptors becomes readable. Only one thread may call it.
        """
        assert self._monitor is not None
        if not self._monitor.poll(0):
            poll = select.poll()
            poll.register(self._monitor.getsockopt(zmq.FD), select.POLLIN)  # type: ignore[arg-type]
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            poll.poll(timeout * 1000)
        if not self._monitor.poll(0):
            return None
        return bool(recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def close(self) -> None:
        """Fails outstanding requests and disconnects. Idempotent. Must not be called while another thread is in `watch`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self.fail_all("the connection was closed")
        with self._changed:
            self._changed.wait_for(lambda: self._waited_for is None, 2 * _WAIT_SLICE_S)
        self._unwatch(self._socket)
        self._wire.close()
        if self._own_context:
            self._context.term()

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        if self._monitor is not None:
            socket.disable_monitor()
            self._monitor.close(0)

    def _read(self) -> None:
        """Settles the futures whose answers have arrived. Call with the lock held."""
        settled = False
        while self._futures and (frames := self._wire.receive()) is not None:
            try:
                number, answer = decode_answer(frames[-1])
            except FrameError as error:
                number = error.number or 0
                answer = Refused(error.reason, str(error))
            future = self._futures.pop(number, None)
            if isinstance(answer, Refused) and answer.reason == "unknown_client":
                self._forgotten()
            if future is not None:
                future.settle(answer)
                settled = True
        if settled:
            self._tell()

    def _after_use(self) -> None:
        """Reads the answers whose edge a send may have swallowed, if a thread waits for one. Call with the lock held."""
        if self._waited_for is not None:
            self._read()

    def _tell(self) -> None:
        """Wakes the threads whose futures were settled. Call with the lock held."""
        self._changed.notify_all()
        if self._waited_for is not None and self._waited_for.done:
            self._wire.wake()


# --- a server's end --------------------------------------------------------------------------------------------------


class Incoming(NamedTuple):
    """A request, and the client that gets its answer."""

    client: bytes
    number: int
    request: Request


class ServerChannel:
    """Receives requests from any number of clients, on one thread. Any thread may answer."""

    def __init__(self, url: str) -> None:
        """Binds to `url`, and raises this process's limit on open files as far as allowed. Raises CacheServerError if it cannot bind."""
        self._context: Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that comes back takes over its old name
        socket.setsockopt(zmq.SNDHWM, _OUTSTANDING)
        socket.setsockopt(zmq.RCVHWM, _SERVER_INCOMING)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED)
        try:
            socket.bind(url)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            self._monitor.close(0)
            socket.close(0)
            self._context.term()
            raise CacheServerError(f"cannot listen at {url}: {error}") from None
        self.url = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._socket = socket
        self._wire = _Wire(socket)
        self._waiting = False
        """Whether the receiving thread found nothing to read and waits, or is about to."""
        self._closing = False
        self._large = 0
        """How many frames were larger than `_LARGE`."""
        limit = raise_limit()
        self._last_descriptor = limit - min(_RESERVE, limit // 2)
        self._doorman = threading.Thread(target=self._keep_door, name="pd-cache-door", daemon=True)
        self._doorman.start()

    def receive(self, timeout: float, bad_frame: Callable[[str], None]) -> list[Incoming]:
        """Returns the requests that have arrived, after waiting up to `timeout` seconds. Answers unreadable ones with `Refused`."""
        found = self._read(bad_frame)
        if self._waiting:
            self._wire.wait(timeout)
            self._waiting = False
            found = self._read(bad_frame)
        return found

    def answer(self, incoming: Incoming, answer: Answer) -> None:
        """Sends an answer. A client that is gone, or that does not read, gets no answer."""
        if incoming.number:
            self._send(incoming.client, incoming.number, answer)

    def wake(self) -> None:
        """Makes `receive` return."""
        self._wire.wake()

    def close(self) -> None:
        """Stops listening. The receiving thread must have ended."""
        self._closing = True
        self._doorman.join()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._wire.close()
        self._context.term()

    def _keep_door(self) -> None:
        """Keeps new clients out while too many are connected, and gives memory back after large frames. Runs on its own thread.

        ZMQ ends the process if there is no file descriptor for a new connection. The kernel hands out the lowest free number, so a
        connection's number shows how many are taken.
        """
        door, listener, is_open, given_back, seen = Door(self.url), -1, True, 0, 0
        while not self._closing:
            if not self._monitor.poll(int(_WAIT_SLICE_S * 1000)):
                if self._large == seen != given_back:
                    give_memory_back()
                    given_back = seen
                seen = self._large
                if not is_open and next_descriptor() < self._last_descriptor:
                    is_open = self._move(door.open, listener)
                continue
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_LISTENING:
                listener = event["value"]
            elif event["value"] >= self._last_descriptor and is_open and self._move(door.shut, listener):
                is_open = False
                log.error("%s: too many connections; refusing new ones until some have ended", self.url)
        if not is_open:
            self._move(door.open, listener)  # so that the path is removed with the address

    def _move(self, turn: Callable[[int], None], listener: int) -> bool:
        """Opens or shuts the door. Returns whether that succeeded."""
        try:
            turn(listener)
        except OSError as error:  # it will be tried again
            log.error("%s: could not change whether new clients are let in: %s", self.url, error)
            return False
        return True

    def _send(self, client: bytes, number: int, answer: Answer) -> None:
        with self._wire.lock:
            self._wire.send([client, encode(number, answer)])
            if self._waiting and self._wire.readable():
                self._wire.wake()

    def _read(self, bad_frame: Callable[[str], None]) -> list[Incoming]:
        found: list[Incoming] = []
        with self._wire.lock:
            room = _ROUND_BYTES
            while len(found) < _ROUND and room > 0 and (frames := self._wire.receive()) is not None:
                room -= (size := sum(map(len, frames)))
                self._large += size > _LARGE
                client = frames[0]
                try:
                    if len(frames) != 2:
                        raise FrameError("malformed", f"expected a message of one frame, got {len(frames) - 1}", None)
                    number, request = decode_request(frames[1])
                    found.append(Incoming(client, number, request))
                except FrameError as error:
                    bad_frame(error.reason)
                    self._wire.send([client, encode(error.number or 0, Refused(error.reason, str(error)))])
            self._waiting = not found and room > 0
        return found
