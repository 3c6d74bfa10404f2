"""Five thousand requests leave nothing behind in the server."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.engines import BLOCK, CHUNK
from tests.support.pool import Pool
from tests.support.server import Engine, ServerProcess, status_of, store_surely
from tests.support.waiting import wait_for

TOKENS = list(range(2 * CHUNK))
AT_ONCE = 100


@pytest.fixture
def server(pool: Pool, tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(pool, tmp_path)
    try:
        yield process
    finally:
        process.kill()


def own_memory(pid: int) -> int:
    """Bytes that are this process's alone: what engines lend it does not count."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


def serve(engine: Engine, requests: int) -> None:
    """Lookups with sessions, a hundred at a time; every tenth with a retrieve and a store, and its session is left to the retrieve."""
    for first in range(0, requests, AT_ONCE):
        names = [f"request-{first + index}" for index in range(AT_ONCE)]
        for name in names:
            engine.scheduler.maybe_submit_lookup_request(name, token_ids=TOKENS)
        for name in names:
            while engine.scheduler.check_lookup_result(name) is None:
                time.sleep(0.001)  # to spin would take a core from the server
            engine.scheduler.cleanup_lookup_result(name)
        moved = names[::10]
        for name in set(names).difference(moved):
            engine.scheduler.end_session(name)
        for index, name in enumerate(moved):
            engine.worker.submit_retrieve_request(name, engine.op(TOKENS, 20 + index * len(TOKENS) // BLOCK))
        for name in moved:
            engine.worker.submit_store_request(name, engine.op(TOKENS))
        wait_for(functools.partial(all_moved, engine, set(moved), set(moved)), what="what is moved")


def all_moved(engine: Engine, loads: set[str], stores: set[str]) -> bool:
    """Whether these loads and stores have ended; those that have are taken out."""
    stored, loaded = engine.worker.get_finished(stores)
    stores -= stored or set()
    loads -= loaded or set()
    return not loads and not stores


def test_five_thousand_requests_leave_memory_files_and_threads_as_they_were(server: ServerProcess) -> None:
    pid = server.process.pid
    with Engine(server.address) as engine:
        store_surely(engine, TOKENS)
        serve(engine, 1000)
        gc.collect()
        here, there = psutil.Process(), psutil.Process(pid)
        before = (own_memory(pid), there.num_fds(), there.num_threads(), here.num_fds())
        mine = own_memory(os.getpid())
        serve(engine, 5_000)
        gc.collect()
        after = (own_memory(pid), there.num_fds(), there.num_threads(), here.num_fds())
        assert after[0] - before[0] < 2 << 20, "the server grows"
        assert own_memory(os.getpid()) - mine < 2 << 20, "the adapters grow"
        assert after[2:] == before[2:]
        assert after[1] < before[1] + 20, "but for Mooncake's connections, the server opens no files"
        assert engine.worker._cache.connection.fence.taken == 0
        report = status_of(server.address)
        assert (report.sessions, report.pinned, report.in_flight) == (0, 0, 0)
