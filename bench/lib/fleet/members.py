"""The participants as the coordinator sees them, and the door by which they come in."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pd_cache
from bench.lib.fleet.errors import FleetError
from bench.lib.fleet.wire import PROTOCOL, Connection, Disconnected, Done, End, Failed, Hello, Message

_HELLO_S = 5.0
"""How long a new connection has to say who it is."""
_STRANGERS = 64
"""Connections that have not said so yet; one more is closed."""
_REFUSED = 10
"""Refused connections that an error tells of."""


class Member:
    """One participant. What it says wakes whoever waits for `changed`, which guards the fields."""

    def __init__(
        self, node: str, host: str, changed: threading.Condition, connection: Connection | None = None
    ) -> None:
        """Without a connection it is the coordinator itself."""
        self.node = node
        self.host = host
        self.lost = ""
        """Why nothing more comes from it; empty while it is there."""
        self.doing = ""
        """The step under way."""
        self.number = 0
        """Of the last step: an outcome with another one comes too late for somebody who gave up."""
        self.outcome: Done | Failed | None = None
        """Of the last step."""
        self._changed = changed
        self.connection = connection

    def __str__(self) -> str:
        return f"{self.node} ({self.host})"

    def take(self, message: Message) -> None:
        """What it said."""
        with self._changed:
            if isinstance(message, Done | Failed) and message.number == self.number:
                self.outcome, self.doing = message, ""
                self._changed.notify_all()
        if isinstance(message, End):
            self.gone(f"it left: {message.why}" if message.why else "it left")

    def gone(self, why: str) -> None:
        """Nothing more comes from it."""
        with self._changed:
            self.lost = self.lost or (f"{why}, in the middle of {self.doing}" if self.doing else why)
            self._changed.notify_all()


class Door:
    """Takes in participants until everybody is there."""

    def __init__(self, listener: socket.socket, bench: str, expected: frozenset[str] | int, own: str) -> None:
        """Takes the listening socket over. `expected`: the names of all participants, `own` included, or how many they are."""
        self.changed = threading.Condition()
        self._listener = listener
        self._bench = bench
        self._expected = expected
        self._own = own
        self._here: dict[str, Member] = {}
        self._refused: list[str] = []
        self._closed = False
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._thread = threading.Thread(target=self._accept, name="bench-door", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float, tell: Callable[[str], None]) -> list[Member]:
        """Everybody but the coordinator; `tell` hears who is missing. FleetError, which names those, after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while missing := self._missing():
                tell(f"waiting for {missing}")
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    refused = f"; refused were: {'; '.join(self._refused)}" if self._refused else ""
                    raise FleetError(f"{missing} did not come within {timeout_s:g} s{refused}")
                self.changed.wait(remaining)
            members, self._here, self._closed = list(self._here.values()), {}, True
            return members

    def close(self) -> None:
        """Let nobody in any more, and send away those who came in vain."""
        with self.changed:
            self._closed = True
            waiting, self._here = list(self._here.values()), {}
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for member in waiting:
            assert member.connection is not None
            member.connection.close("the coordinator gave up before everybody was there")
        self._thread.join()

    def _missing(self) -> str:
        """Who, in words; empty when everybody is there. Call with the lock."""
        for node in [node for node, member in self._here.items() if member.lost]:
            del self._here[node]  # it may come again
        if isinstance(self._expected, int):
            here = sorted((*self._here, self._own))
            left = self._expected - len(here)
            return f"{left} of {self._expected} nodes (here: {', '.join(here)})" if left > 0 else ""
        return ", ".join(sorted(self._expected - self._here.keys() - {self._own}))

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, (address, *_) = self._listener.accept()
            except OSError:
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(sock, address), name="bench-hello", daemon=True).start()
            else:
                sock.close()

    def _admit(self, sock: socket.socket, address: str) -> None:
        connection = Connection(sock)
        try:
            hello = connection.receive(_HELLO_S)
            with self.changed:
                self._refuse(hello)
                assert isinstance(hello, Hello)
                member = Member(hello.node, hello.host, self.changed, connection)
                self._here[hello.node] = member
                connection.follow(member.take, member.gone)
                self.changed.notify_all()
        except FleetError as error:
            with self.changed:
                self._refused = [*self._refused, f"{address}: {error}"][-_REFUSED:]
            connection.close(None if isinstance(error, Disconnected) else str(error))
        finally:
            self._strangers.release()

    def _refuse(self, hello: Message) -> None:
        """FleetError for one who has no place here. Call with the lock."""
        if not isinstance(hello, Hello):
            raise FleetError("it did not say who it is")
        if hello.protocol != PROTOCOL or hello.version != pd_cache.__version__:
            raise FleetError(
                f"{hello.node} runs pd-cache {hello.version} (protocol {hello.protocol}), the coordinator "
                f"{pd_cache.__version__} ({PROTOCOL}); use the same version on all machines"
            )
        if hello.bench != self._bench:
            raise FleetError(f"{hello.node} runs the bench {hello.bench}, the coordinator {self._bench}")
        here = self._here.get(hello.node)
        if hello.node == self._own or (here is not None and not here.lost):
            raise FleetError(f"{hello.node} is here already: a name belongs to one machine")
        if isinstance(self._expected, frozenset) and hello.node not in self._expected:
            names = ", ".join(sorted(self._expected))
            raise FleetError(f"{hello.node} is none of the participants, which are {names}")
        if self._closed or (isinstance(self._expected, int) and not self._missing()):
            raise FleetError(f"{hello.node} came when everybody was there")
