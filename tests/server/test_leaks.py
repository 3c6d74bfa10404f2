"""Five thousand requests leave nothing behind in the server."""

import gc
import time

import psutil

from tests.support.engines import BLOCK, CHUNK
from tests.support.server import Engine, ServerProcess, running_at, store_surely

TOKENS = list(range(2 * CHUNK))
AT_ONCE = 100


def own_memory(process):
    """Bytes that are a process's alone: what engines lend it does not count."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def serve(engine, requests):
    """Lookups with sessions, a hundred at a time; every tenth with a retrieve and a store, and its session is
    left to the retrieve."""
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
            engine.worker.submit_store_request(name, engine.op(TOKENS))
        ended = []
        while len(ended) < 2 * len(moved):
            for some in engine.worker.get_finished(set(moved)):
                ended += some or ()
            time.sleep(0.001)


def test_five_thousand_requests_leave_memory_files_and_threads_as_they_were(pool, tmp_path):
    with ServerProcess(pool, tmp_path) as server, Engine(server.address) as engine:
        store_surely(engine, TOKENS)
        serve(engine, 1000)
        gc.collect()
        here, there = psutil.Process(), psutil.Process(server.process.pid)
        before = (there.num_fds(), there.num_threads(), here.num_fds())
        memory = own_memory(there), own_memory(here)
        serve(engine, 5_000)
        gc.collect()
        after = (there.num_fds(), there.num_threads(), here.num_fds())
        assert own_memory(there) - memory[0] < 2 << 20, "the server grows"
        assert own_memory(here) - memory[1] < 2 << 20, "the adapters grow"
        assert after[1:] == before[1:]
        assert after[0] < before[0] + 20, "but for Mooncake's connections, the server opens no files"
        assert engine.worker._cache.connection.fence._taken == {}
        assert running_at(server.metrics) == 0
