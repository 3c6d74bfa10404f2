"""The connections between engines and their cache server. No other module of the server uses ZMQ.

Requests and answers travel over ZMQ. Each engine also opens a Unix socket to its server, for two things that
ZMQ cannot do. First, it carries file descriptors, so that shared memory needs no name, and nothing is left
over when a process is killed. A request with descriptors goes over this socket, and its answer over ZMQ.
Second, the kernel closes the socket when a process ends, so the other side notices at once.

Only one thread at a time may use a ZMQ socket. If one thread owned it, each request would cost two thread
switches, and beside a spinning thread the owner would get the GIL milliseconds late. So no thread owns the
socket. Each thread that sends, or looks for answers, uses it under a lock, which no thread holds while it
waits. One thread at a time waits for the socket's file descriptor, outside the lock. That descriptor is
edge-triggered, and any use of the socket may swallow the edge. So a thread that has used the socket, and
finds frames left to read, wakes the waiting thread.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq import Context as Context

from pd_cache.errors import CacheServerError, NoAnswerError, ServerLostError, ServerRefusedError
from pd_cache.metrics import CacheMetrics
from pd_cache.server.memory import close_all
from pd_cache.server.protocol import (
    MAX_FRAME,
    Answer,
    FrameError,
    Message,
    RefusalError,
    Refused,
    Request,
    decode_answer,
    decode_request,
    encode,
    failed,
)
from transfer.deadlines import left

log = logging.getLogger(__name__)

_EVENTS, _READABLE, _NOW = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
"""ZMQ's events as plain integers: enumerations cost as much as the calls."""
_HIGH_WATER = 4096
_SERVER_INCOMING = 32
"""How many messages of a client ZMQ reads ahead. Each has up to `MAX_FRAME` bytes. Further messages stay with
the client."""
_WAIT_SLICE_S = 0.5
_MAX_DESCRIPTORS = 250  # of the 253 that the kernel takes in a message
_BESIDE_BYTES = 1 << 20
"""The largest message over the Unix socket, more than the kernel usually sends at once."""
_AWAKE_S = 0.0002
"""How long a thread polls for an answer before it sleeps. A lookup takes less time than this. Falling asleep
and waking up would take as long as all other steps of a lookup."""


def path_beside(url: str) -> Path:
    """Returns the path of the Unix socket of the server at `url`."""
    return Path(f"{url.removeprefix('ipc://')}.fds")


class _Wire:
    """A ZMQ socket that any thread may use while it holds the lock, and for which one thread at a time may
    wait."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.lock = threading.RLock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(socket.getsockopt(zmq.FD), select.POLLIN)  # type: ignore[arg-type]
        self._poll.register(self._wakeup, select.POLLIN)
        self.closed = False

    def wait(self, timeout: float, awake: float = 0.0) -> None:
        """Waits until a message may be there, until `wake`, or for `timeout` seconds. Only one thread may
        call it, without the lock.

        The thread does not sleep for the first `awake` seconds.
        """
        ready, asleep = self._poll.poll(0), time.monotonic() + min(awake, timeout)
        while not ready and time.monotonic() < asleep:
            ready = self._poll.poll(0)
        for descriptor, _ in ready or self._poll.poll(timeout * 1000):
            if descriptor == self._wakeup:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)

    def wake(self) -> None:
        """Makes `wait` return, now or at its next call."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Closes the socket. No thread may still be waiting."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self.socket.close(0)
                os.close(self._wakeup)


# --- a client's end -----------------------------------------------------------------------------------------


class Future:
    """An answer to come: `ClientLink.look` and `ClientLink.wait` look for it."""

    __slots__ = ("answer", "deadline", "number")

    def __init__(self, number: int, deadline: float) -> None:
        self.answer: Answer | CacheServerError | None = None
        """Set by the link, once, to the answer or the reason why there is none."""
        self.number = number
        self.deadline = deadline

    def result(self) -> Answer:
        """Returns the answer, once it is known. Raises a `CacheServerError` if there is none."""
        assert self.answer is not None
        if isinstance(self.answer, CacheServerError):
            raise self.answer
        return self.answer


class ClientLink:
    """Sends requests to a server. Thread-safe. Has no thread of its own, and never waits to send.

    ZMQ reconnects by itself. The Unix socket shows whether a server is there: the caller opens it (`attach`),
    waits for its end (`watch`), and then fails all outstanding requests (`fail_all`).
    """

    def __init__(
        self, url: str, context: Context[zmq.Socket[bytes]] | None, name: str, forgotten: Callable[[], None]
    ) -> None:
        """`name` identifies this client to the server. `forgotten` is called if the server does not know the
        client; the call must be quick.

        Raises ValueError if ZMQ does not understand `url`.
        """
        self._forgotten = forgotten
        self.url = url
        self._name = name
        self._own_context = context is None
        self._context: Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        requests = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),  # without a connection a request fails at once; it is not kept for later
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _HIGH_WATER),
            (zmq.MAXMSGSIZE, MAX_FRAME),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 500),
            (zmq.HEARTBEAT_IVL, 500),
            # only a stopped server is silent; a server that dies closes its sockets
            (zmq.HEARTBEAT_TIMEOUT, 5000),
        ):
            requests.setsockopt(option, value)
        requests.setsockopt(zmq.IDENTITY, name.encode())
        self._wire = _Wire(requests)
        self._changed = threading.Condition(self._wire.lock)
        self._futures: dict[int, Future] = {}
        self._next = 1
        self._waited_for: Future | None = None
        """The future of the thread that waits at the socket. Other threads wait until that thread wakes
        them."""
        self._closed = False
        self._nudged = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._unix: socket.socket | None = None
        """The Unix socket. The thread that calls `watch` opens and closes it."""
        try:
            requests.connect(url)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{url!r} is not the address of a cache server: {error}") from None

    def request(self, message: Message, timeout: float, descriptors: Sequence[int] | None = None) -> Future:
        """Sends a request. Returns a future, which gets the answer or, after `timeout` seconds, the reason
        why there is none.

        A request with `descriptors`, even an empty sequence, goes over the Unix socket; the server gets
        duplicates of them.
        """
        with self._changed:
            future = Future(self._next, time.monotonic() + timeout)
            self._next += 1
            frame = encode(future.number, message)
            if self._closed or (descriptors is not None and self._unix is None):
                future.answer = ServerLostError("the connection is closed")
            elif len(frame) > MAX_FRAME:  # the server would end the connection
                future.answer = ServerRefusedError(
                    "invalid", f"a request may have at most {MAX_FRAME} bytes, this one has {len(frame)}"
                )
            else:
                try:
                    if descriptors is not None and self._unix is not None:
                        socket.send_fds(self._unix, [frame], list(descriptors), socket.MSG_DONTWAIT)
                    else:
                        self._wire.socket.send(frame, _NOW)
                except (zmq.ZMQError, OSError) as error:  # full, or not connected
                    future.answer = ServerLostError(f"no cache server answers at {self.url}: {error}")
            if future.answer is None:
                self._futures[future.number] = future
                if self._waited_for is not None:  # the send may have swallowed the edge of an answer
                    self._read()
        return future

    def notify(self, message: Message) -> None:
        """Sends a request that needs no answer, unless there is no connection."""
        with self._changed:
            with suppress(zmq.ZMQError):  # full, not connected, or closed
                self._wire.socket.send(encode(0, message), _NOW)
            if self._waited_for is not None:
                self._read()

    def look(self, future: Future) -> bool:
        """Reads the answers that have arrived, without waiting. Returns whether the future is settled: the
        answer has come, or the deadline has passed."""
        with self._changed:
            self._read()
            if future.answer is None and time.monotonic() >= future.deadline:
                self._futures.pop(future.number, None)  # a later answer is dropped
                future.answer = NoAnswerError(f"no answer from {self.url} in time")
                self._tell()
            return future.answer is not None

    def fail_all(self, reason: str) -> None:
        """Settles all outstanding futures as failed."""
        with self._changed:
            futures, self._futures = list(self._futures.values()), {}
            for future in futures:
                future.answer = ServerLostError(reason)
            self._tell()

    def wait(self, future: Future) -> None:
        """Waits until the future is settled, at most until its deadline."""
        while future.answer is None:
            with self._changed:
                if self.look(future):
                    return
                slice_s = min(left(future.deadline), _WAIT_SLICE_S)
                if self._waited_for is not None:
                    self._changed.wait(slice_s)
                    continue
                self._waited_for = future
            try:
                self._wire.wait(slice_s, _AWAKE_S)
            finally:
                with self._changed:
                    self._waited_for = None
                    self._read()
                    self._changed.notify_all()

    # --- for the thread that keeps the connection up --------------------------------------------------------

    def watch(self, timeout: float) -> bool:
        """Waits until the server ends, until `nudge`, or for `timeout` seconds. Returns whether the Unix
        socket is open at both ends."""
        poll = select.poll()
        poll.register(self._nudged, select.POLLIN)
        if self._unix is not None:
            poll.register(self._unix, select.POLLIN)
        poll.poll(timeout * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._nudged)
        if self._unix is None:
            return False
        try:
            return bool(self._unix.recv(1, socket.MSG_DONTWAIT))  # the server never sends anything there
        except BlockingIOError:
            return True
        except OSError:
            return False

    def nudge(self) -> None:
        """Makes `watch` return, now or at its next call. Any thread may call it."""
        if not self._closed:
            os.eventfd_write(self._nudged, 1)

    def attach(self) -> bool:
        """Opens the Unix socket. Returns False if no server listens there."""
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            unix.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BESIDE_BYTES)
            unix.settimeout(2.0)
            unix.connect(str(path_beside(self.url)))
            unix.sendall(self._name.encode())
            unix.settimeout(None)  # with a timeout, Python would wait even in calls with MSG_DONTWAIT
        except OSError:
            unix.close()
            return False
        self._unix = unix
        return True

    def detach(self) -> None:
        """Closes the Unix socket."""
        if self._unix is not None:
            self._unix.close()
            self._unix = None

    def close(self) -> None:
        """Fails outstanding requests and disconnects. Idempotent. Must not be called while another thread is
        in `watch`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self.fail_all("the connection was closed")
        with self._changed:
            self._changed.wait_for(lambda: self._waited_for is None, 2 * _WAIT_SLICE_S)
        self._wire.close()
        if self._own_context:
            self._context.term()
        self.detach()
        os.close(self._nudged)

    # --- inside ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Settles the futures whose answers have arrived. Call with the lock held."""
        answer: Answer | CacheServerError
        with suppress(zmq.ZMQError):  # no message has come, or the socket is closed
            while self._futures:
                frames = self._wire.socket.recv_multipart(_NOW)
                try:
                    number, answer = decode_answer(frames[-1])
                except FrameError as error:
                    number, answer = error.number, error.refused
                if isinstance(answer, Refused):
                    answer = ServerRefusedError(answer.reason, answer.message)
                    if answer.reason == "unknown_client":
                        self._forgotten()
                if (future := self._futures.pop(number, None)) is not None:
                    future.answer = answer
                    self._tell()

    def _tell(self) -> None:
        """Wakes the threads whose futures were settled. Call with the lock held."""
        self._changed.notify_all()
        if self._waited_for is not None and self._waited_for.answer is not None:
            self._wire.wake()


# --- a server's end -----------------------------------------------------------------------------------------


class Incoming(NamedTuple):
    """A request, and the client that gets its answer."""

    client: bytes
    number: int
    request: Request
    descriptors: Sequence[int] | None = None
    """The descriptors that came with it over the Unix socket; None if it came over ZMQ. They are closed when
    its handler returns."""


class ServerLink:
    """Receives requests from any number of clients, and answers them. An error of one request does not stop
    the others.

    One thread reads ZMQ's socket. Another thread accepts connections of the Unix socket. Each connection has
    a thread, which also handles the requests that come over it: mapping an engine's memory takes seconds, and
    delays only this engine.
    """

    def __init__(
        self,
        url: str,
        handle: Callable[[Incoming], Answer | None],
        gone: Callable[[bytes], None],
        metrics: CacheMetrics,
    ) -> None:
        """Binds to `url`, and begins to receive with `start`. Raises CacheServerError if it cannot listen.

        Args:
            handle: returns the answer, or None if another thread will call `answer`. It may raise
                RefusalError. It must not wait, except for requests that came over the Unix socket.
            gone: called when a client's Unix socket has ended. It must not wait.
            metrics: counts refusals and unreadable frames.
        """
        self._handle = handle
        self._metrics = metrics
        self._gone = gone
        self.path = path_beside(url)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._context: Context[zmq.Socket[bytes]] = zmq.Context()
        requests = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),  # a client that comes back takes over its old name
            (zmq.SNDHWM, _HIGH_WATER),
            (zmq.RCVHWM, _SERVER_INCOMING),
            (zmq.MAXMSGSIZE, MAX_FRAME),
        ):
            requests.setsockopt(option, value)
        try:
            requests.bind(url)
            self.path.unlink(missing_ok=True)  # a dead server's socket
            self._listener.bind(str(self.path))
            self.path.chmod(0o600)
            self._listener.listen(64)
        except (zmq.ZMQError, OSError) as error:
            requests.close(0)
            self._context.term()
            self._listener.close()
            raise CacheServerError(f"cannot listen at {url}: {error}") from None
        self.url = bytes(requests.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._wire = _Wire(requests)
        self._waiting = False
        """Whether the receiving thread has found nothing to read, and now waits or is about to wait."""
        self._stopping = False
        self._attached: dict[bytes, socket.socket] = {}
        """The Unix socket of each client that has one."""
        self._connections: dict[socket.socket, threading.Thread] = {}
        """All connections of the Unix socket, with the threads that read them."""
        self._lock = threading.Lock()
        self._receiver = threading.Thread(target=self._receive, name="pd-cache-server-receive", daemon=True)
        self._acceptor = threading.Thread(target=self._accept, name="pd-cache-server-accept", daemon=True)

    def start(self) -> None:
        """Begins to receive."""
        self._receiver.start()
        self._acceptor.start()

    def answer(self, client: bytes, number: int, answer: Answer) -> None:
        """Answers a request. A client that is gone, or that does not read, gets no answer. Thread-safe."""
        if isinstance(answer, Refused) and answer.reason != "busy":
            self._metrics.trouble("server", f"refused_{answer.reason}", detail=answer.message)
        if number:
            frame, wire = encode(number, answer), self._wire
            with wire.lock:
                with suppress(zmq.ZMQError):  # full, not connected, or closed
                    wire.socket.send_multipart([client, frame], _NOW)
                # the send may have swallowed the edge of a request
                if self._waiting and not wire.closed and int(wire.socket.getsockopt(_EVENTS)) & _READABLE:
                    wire.wake()

    def stop(self, timeout: float) -> None:
        """Stops receiving, and waits up to `timeout` seconds for the requests that are being handled."""
        end = time.monotonic() + timeout
        self._stopping = True
        self._wire.wake()
        with self._lock:
            connections = dict(self._connections)
        for unix in (self._listener, *connections):
            with suppress(OSError):  # not connected any more
                unix.shutdown(socket.SHUT_RDWR)
        for thread in (self._receiver, self._acceptor, *connections.values()):
            thread.join(left(end))

    def close(self) -> None:
        """Stops listening, after `stop`."""
        self._listener.close()
        self.path.unlink(missing_ok=True)
        self._receiver.join()  # the receiving thread must not use a closed socket
        self._wire.close()
        self._context.term()

    # --- messages over ZMQ ----------------------------------------------------------------------------------

    def _receive(self) -> None:
        while not self._stopping:
            with self._wire.lock:
                frames: list[bytes] = []
                with suppress(zmq.ZMQError):  # no message has come, or the socket is closed
                    frames = self._wire.socket.recv_multipart(_NOW)
                self._waiting = not frames
            if frames:
                self._serve(frames[0], frames[-1])
            else:
                self._wire.wait(_WAIT_SLICE_S)

    def _serve(self, client: bytes, frame: bytes, descriptors: Sequence[int] | None = None) -> None:
        """Handles a request, and answers it unless another thread will."""
        number = 0
        try:
            number, request = decode_request(frame)
            answer = self._handle(Incoming(client, number, request, descriptors))
        except RefusalError as refusal:
            number, answer = number or refusal.number, refusal.refused
        except Exception as error:  # an error of one request must not stop the others
            log.exception("a request failed")
            answer = failed(error)
        if answer is not None:
            self.answer(client, number, answer)

    # --- the Unix socket ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed, or no descriptor is left
                time.sleep(0.0 if self._stopping else 0.1)
                continue
            thread = threading.Thread(
                target=self._attend, args=(connection,), name="pd-cache-attend", daemon=True
            )
            with self._lock:
                self._connections[connection] = thread
            thread.start()

    def _attend(self, connection: socket.socket) -> None:
        """Handles what comes over one connection of the Unix socket: the client's name, then requests with
        descriptors."""
        client = b""
        try:
            client = connection.recv(_BESIDE_BYTES)
            with self._lock:
                self._attached[client] = connection
            data = client
            while data and not self._stopping:
                data, descriptors, _, _ = socket.recv_fds(
                    connection, _BESIDE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                try:
                    if data:
                        self._serve(client, data, descriptors)
                finally:
                    close_all(descriptors)
        except OSError:  # the connection has ended
            pass
        finally:
            with self._lock:
                del self._connections[connection]
                current = self._attached.get(client) is connection
                if current:
                    del self._attached[client]
            connection.close()
            if current:
                self._gone(client)
