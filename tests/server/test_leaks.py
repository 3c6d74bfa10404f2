"""Twenty thousand requests leave nothing behind in the server."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.engines import CHUNK
from tests.support.pool import Pool
from tests.support.server import Engine, ServerProcess, status_of, store_surely

TOKENS = list(range(2 * CHUNK))


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
    """Lookups with sessions, every tenth with a retrieve and a store; half of the sessions are left to the retrieve."""
    for index in range(requests):
        request = f"request-{index}"
        engine.scheduler.maybe_submit_lookup_request(request, token_ids=TOKENS)
        while engine.scheduler.check_lookup_result(request) is None:
            time.sleep(0.0001)  # to spin would take a core from the server
        engine.scheduler.cleanup_lookup_result(request)
        if index % 10:
            engine.scheduler.end_session(request)
        else:
            engine.retrieve(request, TOKENS, 20)
            engine.worker.submit_store_request(request, engine.op(TOKENS))
            engine.finish_store(request)


@pytest.mark.slow
def test_twenty_thousand_requests_leave_memory_files_and_threads_as_they_were(server: ServerProcess) -> None:
    pid = server.process.pid
    with Engine(server.address) as engine:
        store_surely(engine, TOKENS)
        serve(engine, 2000)
        gc.collect()
        here, there = psutil.Process(), psutil.Process(pid)
        before = (own_memory(pid), there.num_fds(), there.num_threads(), here.num_fds())
        mine = own_memory(os.getpid())
        serve(engine, 20_000)
        gc.collect()
        after = (own_memory(pid), there.num_fds(), there.num_threads(), here.num_fds())
        assert after[0] - before[0] < 2 << 20, "the server grows"
        assert own_memory(os.getpid()) - mine < 2 << 20, "the adapters grow"
        assert after[2:] == before[2:]
        assert after[1] < before[1] + 20, "but for Mooncake's connections, the server opens no files"
        assert engine.worker._cache.connection.fence.taken == 0
        report = status_of(server.address)
        assert (report.sessions, report.pinned, report.in_flight) == (0, 0, 0)
