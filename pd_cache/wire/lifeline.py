"""The lifeline: a Unix socket beside the messages, for two things that ZMQ cannot do.

It carries file descriptors, so that shared memory needs no names and nothing is left over when a process is killed. And the kernel closes
it whenever its process ends, so a server learns immediately that an engine is gone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pd_cache.wire.channel import CacheServerError
from pd_cache.wire.closing import Closer

log = logging.getLogger(__name__)

_TOKEN_BYTES = 32
_MAX_DESCRIPTORS = 250
"""The kernel accepts up to 253 in a message."""
_MAX_CLIENTS = 256
_MAX_OF_A_PROCESS = 64
"""The most connections from one process, so that one process cannot keep others out."""
_MAX_UNNAMED = 32
"""The most connections that have not named their client. One more ends the oldest."""
_CREDENTIALS = struct.Struct("3i")
"""The result of SO_PEERCRED: process, user, group."""


class LifelineClient:
    """A client's end of the lifeline. It is closed at the latest when the process ends."""

    def __init__(self, path: str, client: str) -> None:
        """Connects and sends the client's name. Raises OSError if nothing listens at `path`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(2.0)
            self._socket.connect(path)
            self._socket.sendall(client.encode())
            self._socket.settimeout(None)  # with a timeout, Python would wait even in calls with MSG_DONTWAIT
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable once the server is gone. The server never sends anything."""
        return self._socket.fileno()

    def send(self, token: str, descriptors: list[int]) -> None:
        """Sends the server duplicates of the descriptors, under a token. Raises OSError if the server is gone."""
        socket.send_fds(self._socket, [token.encode()], descriptors, socket.MSG_DONTWAIT)

    @property
    def lost(self) -> bool:
        """Whether the server has gone."""
        try:
            return not self._socket.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


class _Parcel(NamedTuple):
    token: str
    descriptors: list[int]


class _Peer(NamedTuple):
    """A connection and its process."""

    socket: socket.socket
    process: int
    """0 if the kernel cannot name it here, because it is in another PID namespace."""


class LifelineServer:
    """A server's end: one thread receives descriptors and reports clients that are gone.

    It keeps the last set of descriptors that each client sent, until the set is taken or the client goes.
    """

    def __init__(
        self,
        path: Path,
        gone: Callable[[str], None],
        arrived: Callable[[str], None],
        strange: Callable[[], None] = lambda: None,
    ) -> None:
        """Listens at `path`, replacing the socket that a dead server left there.

        The thread calls `gone(client)` when a client goes, `arrived(client)` when descriptors come, and `strange()` for a message that is
        not one of ours. They must not wait. Raises CacheServerError if it cannot listen.
        """
        self.path = path
        self._gone = gone
        self._arrived = arrived
        self._strange = strange
        self._lock = threading.Lock()
        self._parcels: dict[str, _Parcel] = {}
        self._named: dict[str, _Peer] = {}
        self._unnamed: dict[_Peer, None] = {}
        """Connections that have not named their client, oldest first."""
        self._names: dict[_Peer, str] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))
            path.chmod(0o600)
            self._listener.listen(64)
            self._listener.setblocking(False)
        except OSError as error:
            self._listener.close()
            raise CacheServerError(f"cannot listen at {path}: {error}") from None
        self._closer = Closer()
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._spare = os.dup(self._stop)
        """A descriptor to free when none is left for accepting a connection that is to be refused."""
        self._thread = threading.Thread(target=self._run, name="pd-cache-lifeline", daemon=True)
        self._thread.start()

    def holds(self, client: str, token: str) -> bool:
        """Returns whether there are descriptors that the client sent under this token."""
        with self._lock:
            parcel = self._parcels.get(client)
            return parcel is not None and parcel.token == token

    def take(self, client: str, token: str) -> list[int] | None:
        """Returns the descriptors that a client sent under a token, or None if there are none. The caller must pass them to `let_go`."""
        with self._lock:
            parcel = self._parcels.get(client)
            if parcel is None or parcel.token != token:
                return None
            return self._parcels.pop(client).descriptors

    def let_go(self, descriptors: Sequence[int]) -> None:
        """Closes descriptors of any kind that a client sent, without waiting."""
        self._closer.close_all(descriptors)

    def has(self, client: str) -> bool:
        """Returns whether the client's end is open."""
        with self._lock:
            return client in self._named

    def close(self) -> None:
        """Stops listening and closes the descriptors that were not taken."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(5)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        os.close(self._stop)
        os.close(self._spare)
        with self._lock:
            parcels = list(self._parcels.values())
            self._parcels.clear()
        for parcel in parcels:
            self.let_go(parcel.descriptors)
        self._closer.stop()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while True:
                    for key, _ in selector.select():
                        if key.fileobj == self._stop:
                            return
                        if key.fileobj is self._listener:
                            self._accept(selector)
                        elif key.data in self._names and not self._receive(key.data, selector):
                            self._hang_up(key.data, selector)
            finally:
                for peer in self._names:
                    peer.socket.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._refuse_one()
            return
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        peer = _Peer(connection, _CREDENTIALS.unpack(credentials)[0])
        if len(self._unnamed) >= _MAX_UNNAMED:
            self._hang_up(next(iter(self._unnamed)), selector)
        of_process = sum(one.process == peer.process for one in self._names) if peer.process else 0
        if len(self._names) >= _MAX_CLIENTS or of_process >= _MAX_OF_A_PROCESS:
            log.warning(
                "refused a connection of process %d: it, or all processes together, have too many", peer.process
            )
            connection.close()
            return
        self._names[peer] = ""
        self._unnamed[peer] = None
        selector.register(connection, selectors.EVENT_READ, peer)

    def _refuse_one(self) -> None:
        """Refuses one connection if no descriptor is left. Otherwise that connection would wake this thread again and again."""
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = os.dup(self._stop)

    def _hang_up(self, peer: _Peer, selector: selectors.BaseSelector) -> None:
        selector.unregister(peer.socket)
        peer.socket.close()
        self._unnamed.pop(peer, None)
        self._forget(self._names.pop(peer), peer)

    def _receive(self, peer: _Peer, selector: selectors.BaseSelector) -> bool:
        """Receives one message. Returns False if the client is gone or its message was not one of ours."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(peer.socket, _TOKEN_BYTES + 1, _MAX_DESCRIPTORS)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        client, token = self._names[peer], data.decode("ascii", "replace")
        if len(data) != _TOKEN_BYTES or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            if data:
                self._strange()
            self.let_go(descriptors)
            return False
        if not client:
            self.let_go(descriptors)
            self._name(peer, token, selector)
            return True
        with self._lock:
            before = self._parcels.get(client)
            self._parcels[client] = _Parcel(token, descriptors)
        if before is not None:
            self.let_go(before.descriptors)
        self._tell(self._arrived, client)
        return True

    def _name(self, peer: _Peer, client: str, selector: selectors.BaseSelector) -> None:
        """Records the peer's name. The peer replaces an earlier connection of the same name, whose end was not noticed yet."""
        with self._lock:
            before, self._named[client] = self._named.get(client), peer
        self._names[peer] = client
        self._unnamed.pop(peer, None)
        if before is not None:
            self._hang_up(before, selector)

    def _forget(self, client: str, peer: _Peer) -> None:
        with self._lock:
            if not client or self._named.get(client) is not peer:
                return
            del self._named[client]
            parcel = self._parcels.pop(client, None)
        if parcel is not None:
            self.let_go(parcel.descriptors)
        self._tell(self._gone, client)

    def _tell(self, listener: Callable[[str], None], client: str) -> None:
        try:
            listener(client)
        except Exception:  # an error that one client causes must not end the watch over the others
            log.exception("handling a client's end or its descriptors failed")
