"""Lookups that ask a cache server, one after the other or at a rate from several processes, and what it remembers of them."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import psutil
import zmq

from bench.suites.engine import timed
from pd_cache.server.client import CacheClient
from pd_cache.server.scheduler_adapter import SchedulerAdapter

CLIENTS = 4
RATE = 1000
"""Lookups a second, of all clients together."""
LOOKUP_TOKENS = 4096


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def round_trips(url: str, count: int) -> list[float]:
    """Seconds of each of `count` lookups that ask for nothing, one after the other."""
    client = CacheClient(url, None, kind="scheduler", model="bench", block_size=16)
    try:
        for _ in range(200):
            client.lookup("", [], timeout=5).result()
        return [timed(lambda: client.lookup("", [], timeout=5).result()) for _ in range(count)]
    finally:
        client.close()


def _echo(url: str) -> None:
    """The other side of `raw_round_trips`: sends back what comes, until that is empty."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(url)
        while (frames := socket.recv_multipart())[1]:
            socket.send_multipart(frames)


def raw_round_trips(count: int) -> list[float]:
    """What ZMQ itself takes for frames of that size between two Python processes: the floor of `round_trips`."""
    with tempfile.TemporaryDirectory(prefix="pd-cache-bench-") as folder:
        url = f"ipc://{folder}/echo.sock"
        other = multiprocessing.get_context("spawn").Process(target=_echo, args=(url,))
        other.start()
        try:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.connect(url)

                def trip() -> None:
                    socket.send(b"x" * 32)
                    socket.recv()

                for _ in range(200):
                    trip()
                seconds = [timed(trip) for _ in range(count)]
                socket.send(b"")
            return seconds
        finally:
            other.join(10)
            other.kill()


def _ask_at_a_rate(url: str, model: str, rate: float, seconds: float, parent: Connection) -> None:
    """One of the clients of `lookups_at_a_rate`, in a process of its own: a scheduler that asks when its turn comes.

    Tells the parent that it is ready, is told when to start, and sends the latencies.
    """
    adapter = SchedulerAdapter(url, None, model, 1, 0, 16)
    prompt = list(range(LOOKUP_TOKENS))
    latencies = []
    try:
        parent.send("ready")
        start: float = parent.recv()
        for index in range(int(rate * seconds)):
            due = start + index / rate
            time.sleep(max(0.0, due - time.monotonic()))
            request = str(index)
            adapter.maybe_submit_lookup_request(request, token_ids=prompt)
            while adapter.check_lookup_result(request) is None:
                time.sleep(0.0001)
            latencies.append(time.monotonic() - due)  # of one that had to wait for the one before, too
            assert adapter.check_lookup_result(request) == LOOKUP_TOKENS, "a lookup missed what is there"
            adapter.end_session(request)
            adapter.cleanup_lookup_result(request)
        parent.send(latencies)
    finally:
        parent.close()
        adapter.shutdown()


def lookups_at_a_rate(url: str, model: str, seconds: float) -> list[float]:
    """Latencies, from when each was due, of `RATE` lookups a second that find 4096 tokens, from four processes."""
    spawn = multiprocessing.get_context("spawn")
    workers, ends = [], []
    for _ in range(CLIENTS):
        ours, theirs = spawn.Pipe()
        workers.append(spawn.Process(target=_ask_at_a_rate, args=(url, model, RATE / CLIENTS, seconds, theirs)))
        workers[-1].start()
        theirs.close()
        ends.append(ours)
    try:
        for end in ends:
            assert end.recv() == "ready"
        start = time.monotonic() + 0.5
        for index, end in enumerate(ends):
            end.send(start + index / RATE)
        return [latency for end in ends for latency in end.recv()]
    finally:
        for worker in workers:
            worker.join(30)
            worker.kill()


def resident(pid: int) -> int:
    """Bytes of a process's own memory: what it shares with engines does not count."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


def memory_growth(url: str, model: str, pid: int, requests: int) -> dict[str, float]:
    """The server's memory before and after many requests, each a lookup with a session that is ended, after a warm-up."""
    adapter = SchedulerAdapter(url, None, model, 1, 0, 16)
    prompt = list(range(LOOKUP_TOKENS // 4))

    def ask(count: int) -> None:
        for index in range(count):
            request = str(index)
            adapter.maybe_submit_lookup_request(request, token_ids=prompt)
            while adapter.check_lookup_result(request) is None:
                pass
            adapter.end_session(request)
            adapter.cleanup_lookup_result(request)

    try:
        ask(max(1000, requests // 10))
        before = resident(pid)
        seconds = timed(lambda: ask(requests))
        return {"mib_before": before / 2**20, "mib_after": resident(pid) / 2**20, "requests_per_s": requests / seconds}
    finally:
        adapter.shutdown()
