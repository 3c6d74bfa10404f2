"""A second connection beside the messages, over a Unix socket, for the two things that ZMQ cannot do.

It carries file descriptors, so that shared memory needs no names and nothing is left over when a process is killed. And the
kernel closes it when its process ends, however it ends: that is how a server learns at once that an engine is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from pd_cache.server.channel import CacheServerError

log = logging.getLogger(__name__)

_TOKEN_BYTES = 32
_MAX_DESCRIPTORS = 250
"""The kernel takes 253 in a message."""
_MAX_CLIENTS = 256
_MAX_PARCELS = 4
"""Sets of descriptors that a client may have sent and not yet referred to."""


class LifelineClient:
    """A client's end. Closed with the process at the latest."""

    def __init__(self, path: str, client: str) -> None:
        """Connect and say who we are. OSError if there is nobody at `path`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(2.0)
            self._socket.connect(path)
            self._socket.sendall(client.encode())
            self._socket.settimeout(None)  # with a time-out, Python waits even where it is told not to
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Readable once the server is gone: it never sends anything."""
        return self._socket.fileno()

    def send(self, token: str, descriptors: list[int]) -> None:
        """Give the server duplicates of open files, under a token. OSError if it is gone."""
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


class LifelineServer:
    """A server's end: one thread that takes descriptors in and tells of clients that are gone."""

    def __init__(self, path: Path, gone: Callable[[str], None]) -> None:
        """Listen at `path`, replacing what a dead server left there. `gone(client)` is called on the thread."""
        self.path = path
        self._gone = gone
        self._lock = threading.Condition()
        self._parcels: dict[str, dict[str, list[int]]] = {}
        self._present: set[str] = set()
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
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="pd-cache-lifeline", daemon=True)
        self._thread.start()

    def take(self, client: str, token: str, timeout: float) -> list[int] | None:
        """The descriptors that a client sent under a token, which are the caller's to close; None if none came."""
        with self._lock:
            self._lock.wait_for(lambda: token in self._parcels.get(client, {}), timeout)
            return self._parcels.get(client, {}).pop(token, None)

    def has(self, client: str) -> bool:
        """Whether the client's end is open."""
        with self._lock:
            return client in self._present

    def close(self) -> None:
        """Stop listening and close what was not taken."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(5)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        os.close(self._stop)
        with self._lock:
            for parcels in self._parcels.values():
                _close_all(parcels)
            self._parcels.clear()

    def _run(self) -> None:
        names: dict[socket.socket, str] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while True:
                    for key, _ in selector.select():
                        if key.fileobj == self._stop:
                            return
                        if key.fileobj is self._listener:
                            self._accept(selector, names)
                            continue
                        assert isinstance(key.fileobj, socket.socket)
                        if not self._receive(key.fileobj, names):
                            selector.unregister(key.fileobj)
                            key.fileobj.close()
                            self._forget(names.pop(key.fileobj))
            finally:
                for connection in names:
                    connection.close()

    def _accept(self, selector: selectors.BaseSelector, names: dict[socket.socket, str]) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(names) >= _MAX_CLIENTS:
            connection.close()
            return
        connection.setblocking(False)
        names[connection] = ""
        selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket, names: dict[socket.socket, str]) -> bool:
        """Take one message; False if the client is gone, or talks nonsense."""
        descriptors: list[int] = []
        try:
            data, descriptors, flags, _ = socket.recv_fds(connection, _TOKEN_BYTES + 1, _MAX_DESCRIPTORS)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        client, token = names[connection], data.decode("ascii", "replace")
        if len(data) != _TOKEN_BYTES or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            if data:
                log.warning("a lifeline with a message that is none of ours was closed")
            _close_all({"": descriptors})
            return False
        with self._lock:
            if not client:
                names[connection] = token
                self._present.add(token)
                _close_all({"": descriptors})
            else:
                parcels = self._parcels.setdefault(client, {})
                _close_all({token: parcels.pop(token, [])})
                parcels[token] = descriptors
                while len(parcels) > _MAX_PARCELS:
                    oldest = next(iter(parcels))
                    _close_all({oldest: parcels.pop(oldest)})
            self._lock.notify_all()
        return True

    def _forget(self, client: str) -> None:
        if not client:
            return
        with self._lock:
            _close_all(self._parcels.pop(client, {}))
            self._present.discard(client)
        try:
            self._gone(client)
        except Exception:  # one client's end must not end the watch over the others
            log.exception("forgetting a client failed")


def _close_all(parcels: dict[str, list[int]]) -> None:
    for descriptors in parcels.values():
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
