"""A participant's end: it does what the coordinator asks for until the coordinator says that the bench is over."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

import pd_cache
from bench.lib.fleet.messages import (
    BEAT,
    PROTOCOL,
    End,
    Failed,
    FleetError,
    Message,
    ParticipantHello,
    Run,
    StepDone,
    close_socket,
    decode_message,
    encode_message,
    open_socket,
)
from bench.lib.fleet.site import Location, Site
from pd_cache.errors import PdCacheError

_TRY_MS = 200
_STEP_END_S = 10.0
"""How long a step may take to end once its site is closed."""


class CoordinatorLink:
    """The way to the coordinator. Used on one thread, but for `finish`."""

    def __init__(self, bench: str, location: Location) -> None:
        self._hello = ParticipantHello(PROTOCOL, bench, location.node, location.host, pd_cache.__version__)
        self._outcomes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._open()

    def _open(self) -> None:
        self._socket = open_socket(zmq.DEALER)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def join(self, leader: str, find: Callable[[], str], wait_s: float, tell: Callable[[str], None]) -> None:
        """Connects to the address that `find` returns by then. Raises FleetError after `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        address = ""
        while True:
            if (found := find()) and found != address:
                if address:
                    close_socket(self._socket)
                    self._open()
                address = found
                self._socket.connect(address)
            if self._events.poll(_TRY_MS) and self._event() == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.send(self._hello)
                return
            tell(f"waiting for the coordinator {leader}")
            if time.monotonic() > deadline:
                why = f"{address}: nobody answers" if address else "it is not registered"
                raise FleetError(f"the coordinator {leader} was not reached within {wait_s:g} s: {why}")

    def _event(self) -> int:
        return int(recv_monitor_message(self._events)["event"])

    def send(self, message: Message) -> None:
        """Never waits: what cannot be sent is lost with the connection, which `receive` reports."""
        self._send(encode_message(message))

    def _send(self, encoded: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._socket.send(encoded, zmq.NOBLOCK)

    def finish(self, outcome: StepDone | Failed) -> None:
        """Has `receive` send it; for the thread of the step. Raises FleetError if it is too large."""
        self._outcomes.put(encode_message(outcome))
        with contextlib.suppress(OSError):  # closed: the coordinator waits no more
            self._ring.send(b"!")

    def receive(self) -> Run | End:
        """Returns the coordinator's next message, an End if it is gone. Sends the outcomes of steps meanwhile."""
        poller = zmq.Poller()
        for one in (self._socket, self._bell, self._events):
            poller.register(one, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())  # ZMQ's heartbeats are the deadline: silence ends the connection
            if self._bell.fileno() in ready:
                self._bell.recv(1)
                self._send(self._outcomes.get())
            if self._socket in ready:
                if (raw := self._socket.recv()) == BEAT:
                    continue
                message = decode_message(raw)
                if isinstance(message, Run | End):
                    return message
            elif self._events in ready and self._event() == zmq.EVENT_DISCONNECTED:
                return End("the coordinator is gone: its connection ended")

    def close(self) -> None:
        """Idempotent."""
        close_socket(self._socket)
        self._bell.close()
        self._ring.close()


def serve(make: Callable[[Location], Site], location: Location, link: CoordinatorLink) -> None:
    """Does steps until the coordinator says that it is over. Raises FleetError if it ends otherwise. Shuts the site and the link."""
    worker: threading.Thread | None = None
    site: Site | None = None
    why = "interrupted"
    try:
        site = make(location)
        while isinstance(message := link.receive(), Run):
            worker = threading.Thread(target=_work, args=(site, message, link), name="bench-step", daemon=True)
            worker.start()
        if message.why:
            raise FleetError(message.why)
        why = ""
    except Exception as error:  # of any kind: the coordinator learns the reason, and the caller gets it
        why = str(error)
        raise
    finally:
        if why == "interrupted":
            link.send(End(why))  # before the step under way ends because of it, and is taken for done
        if site is not None:
            site.shut()
        if worker is not None:
            worker.join(_STEP_END_S)
        link.send(End(why))  # a participant leaves when its site is closed
        link.close()


def _work(site: Site, run: Run, link: CoordinatorLink) -> None:
    """Does a step. Any failure is reported in words."""
    try:
        link.finish(StepDone(run.number, msgspec.Raw(site.run(run.step, bytes(run.job)))))
    except Exception as error:  # noqa: BLE001 - told to the coordinator, on another machine
        kind = "" if isinstance(error, PdCacheError) else f"{type(error).__name__}: "
        link.finish(Failed(run.number, f"{run.step}: {kind}{error}"))
