"""A participant's end: it finds the coordinator, and does what that asks for until it says that it is over."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable

import pd_cache
from bench.lib.fleet.coordinator import perform
from bench.lib.fleet.errors import FleetError
from bench.lib.fleet.rendezvous import Meeting
from bench.lib.fleet.site import Place, Site
from bench.lib.fleet.wire import PROTOCOL, Connection, Disconnected, End, Hello, Message, Run

_CONNECT_S = 2.0
_PAUSE_S = 0.2
_STEP_END_S = 10.0
"""How long a step may take to end once its site is closed."""


def join(meeting: Meeting, bench: str, place: Place, wait_s: float, tell: Callable[[str], None]) -> Connection:
    """A connection to the coordinator, which knows by now who this is. FleetError after `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    why = "it is not registered"
    while True:
        if address := meeting.find():
            host, _, port = address.rpartition(":")
            try:
                connection = Connection(socket.create_connection((host, int(port)), timeout=_CONNECT_S))
            except OSError as error:
                why = f"{address}: {error.strerror or error}"
            else:
                try:
                    connection.send(Hello(PROTOCOL, bench, place.node, place.host, pd_cache.__version__))
                    return connection
                except Disconnected as error:
                    connection.close()
                    why = f"{address}: {error}"
        tell(f"waiting for the coordinator {meeting.leader}")
        if time.monotonic() > deadline:
            raise FleetError(f"the coordinator {meeting.leader} was not reached within {wait_s:g} s: {why}")
        time.sleep(_PAUSE_S)


def serve(site: Site, connection: Connection) -> None:
    """Do steps until the coordinator says that it is over. FleetError if it ends otherwise. Shuts the site."""
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    connection.follow(inbox.put, lambda why: inbox.put(End(f"the coordinator is gone: {why}")))
    worker: threading.Thread | None = None
    try:
        while not isinstance(message := inbox.get(), End):
            if isinstance(message, Run):
                worker = threading.Thread(
                    target=_work, args=(site, connection, message), name="bench-step", daemon=True
                )
                worker.start()
        if message.why:
            raise FleetError(message.why)
    except KeyboardInterrupt:
        connection.close("interrupted")  # before the step under way ends because of it, and is taken for done
        raise
    finally:
        site.shut()
        if worker is not None:
            worker.join(_STEP_END_S)


def _work(site: Site, connection: Connection, run: Run) -> None:
    outcome = perform(site, run)
    try:
        connection.send(outcome)
    except Disconnected:
        return  # whoever follows the connection hears of it, too
    except FleetError as error:
        connection.close(f"{run.step}: {error}")
