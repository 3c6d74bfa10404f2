"""Lookups that ask a cache server, one after the other or at a rate from several processes, and what it remembers of them."""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import ExitStack, closing

import msgspec
import psutil
import zmq

from bench.lib.kv import timed
from bench.lib.two_machines import Crew, Location, Nothing, Site, step
from pd_cache.server.adapters import SchedulerAdapter
from pd_cache.server.connection import ServerConnection
from pd_cache.server.protocol import EngineIdentity, Lookup

CLIENTS = 4
RATE = 1000
"""Lookups a second, of all clients together."""
LOOKUP_TOKENS = 4096
_PROMPT = list(range(LOOKUP_TOKENS))
_PATIENCE_S = 60.0


def round_trips(url: str, count: int) -> list[float]:
    """Returns the seconds of each of `count` lookups that ask for nothing, one after the other."""
    client = ServerConnection(url, None, "scheduler", EngineIdentity(model="bench", block_size=16))
    try:
        client.wait_ready(_PATIENCE_S)
        for _ in range(200):
            client.ask(Lookup("", b""), 5)
        return [timed(lambda: client.ask(Lookup("", b""), 5)) for _ in range(count)]
    finally:
        client.close()


class Url(msgspec.Struct, frozen=True):
    """Where a server is, or is to be."""

    url: str


class Echo(Site):
    """The other side of `raw_round_trips`: sends back what comes."""

    @step
    def open(self, job: Url) -> Nothing:
        """Echo on a thread until the process ends."""
        socket = zmq.Context().socket(zmq.ROUTER)
        socket.bind(job.url)

        def echo() -> None:
            while True:
                socket.send_multipart(socket.recv_multipart())

        threading.Thread(target=echo, daemon=True).start()
        return Nothing()


def raw_round_trips(count: int) -> list[float]:
    """Returns what ZMQ itself takes for frames of that size between two Python processes: the floor of `round_trips`."""
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder, closing(Crew(Echo, Location.here())) as crew:
        url = f"ipc://{folder}/echo.sock"
        crew.grow(1)
        crew.run(Echo.open, Url(url), timeout_s=_PATIENCE_S)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.rcvtimeo = int(1000 * _PATIENCE_S)
            socket.connect(url)

            def trip() -> None:
                socket.send(b"x" * 32)
                socket.recv()

            for _ in range(200):
                trip()
            return [timed(trip) for _ in range(count)]


class AskServer(msgspec.Struct, frozen=True):
    """Ask this server for a prompt of `model` that it holds, `RATE` times a second with the others."""

    url: str
    model: str
    seconds: float


class Latencies(msgspec.Struct, frozen=True):
    """The seconds of each lookup, from when it was due."""

    seconds: list[float]


class AskingScheduler(Site):
    """One of the clients of `lookups_at_a_rate`: a scheduler that asks when its turn comes."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._open = ExitStack()

    @step
    def connect(self, job: AskServer) -> Nothing:
        """Be ready to ask."""
        self._adapter = SchedulerAdapter(job.url, None, EngineIdentity(model=job.model, block_size=16))
        self._open.callback(self._adapter.shutdown)
        return Nothing()

    @step
    def ask(self, job: AskServer) -> Latencies:
        """Half a second from now, and then at the rate; each client at a time of its own."""
        start = time.monotonic() + 0.5 + int(self.location.node.rpartition("-")[2]) / RATE
        latencies = []
        for index in range(int(RATE / CLIENTS * job.seconds)):
            due = start + index * CLIENTS / RATE
            time.sleep(max(0.0, due - time.monotonic()))
            assert _look_up(self._adapter, str(index), _PROMPT, 0.0001) == LOOKUP_TOKENS, (
                "a lookup missed what is there"
            )
            latencies.append(time.monotonic() - due)  # includes the wait of a lookup that was delayed by the one before
        return Latencies(latencies)

    def close(self) -> None:
        self._open.close()


def _look_up(adapter: SchedulerAdapter, request: str, prompt: list[int], pause_s: float) -> int | None:
    """Looks up in a session, ends it, and returns the tokens found."""
    adapter.maybe_submit_lookup_request(request, token_ids=prompt)
    while (found := adapter.check_lookup_result(request)) is None:
        if pause_s:
            time.sleep(pause_s)
    adapter.end_session(request)
    adapter.cleanup_lookup_result(request)
    return found


def lookups_at_a_rate(url: str, model: str, seconds: float) -> list[float]:
    """Latencies, from when each was due, of `RATE` lookups a second that find 4096 tokens, from four processes."""
    job = AskServer(url, model, seconds)
    with closing(Crew(AskingScheduler, Location.here())) as crew:
        crew.grow(CLIENTS)
        crew.run(AskingScheduler.connect, job, timeout_s=_PATIENCE_S)
        found = crew.run(AskingScheduler.ask, job, timeout_s=seconds + _PATIENCE_S)
        return [latency for one in found for latency in one.seconds]


def resident(pid: int) -> int:
    """Returns the bytes of a process's own memory: what it shares with engines does not count."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


def memory_growth(url: str, model: str, pid: int, requests: int) -> dict[str, float]:
    """Returns the server's memory before and after many requests, each a lookup with a session that is ended, after a warm-up."""
    adapter = SchedulerAdapter(url, None, EngineIdentity(model=model, block_size=16))
    prompt = list(range(LOOKUP_TOKENS // 4))

    def ask(count: int) -> None:
        for index in range(count):
            _look_up(adapter, str(index), prompt, 0.0)

    try:
        ask(max(1000, requests // 10))
        before = resident(pid)
        seconds = timed(lambda: ask(requests))
        return {"mib_before": before / 2**20, "mib_after": resident(pid) / 2**20, "requests_per_s": requests / seconds}
    finally:
        adapter.shutdown()
