"""An engine that misbehaves hurts itself only: every trick of `bench.suites.soak.engine_abuse` against a real server."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.suites.soak.engine_abuse import TRICKS
from pd_cache.wire.channel import RefusedError
from tests.support.engines import BLOCK, BLOCKS, CHUNK
from tests.support.kv import make_cache
from tests.support.pool import ROOT, Pool
from tests.support.server import Engine, ServerProcess, status_of, store_surely
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow(seconds=70)
TOKENS = list(range(4 * CHUNK))
GROWTH = 256 << 20
"""Bytes that a server may take on behalf of one engine: what ZMQ reads ahead, and what its answers wait in."""
GROWTH_OF = {"many_sizes": 512 << 20}
"""The same where it is more: four sizes of chunk are served at a time, each by a client of the pool."""
FILES_OF = {"many_sizes": 64}
FILES = 16
"""Descriptors of Mooncake's own connections, which come and go as they like."""


@pytest.fixture(scope="module")
def server(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(pool, tmp_path_factory.mktemp("abuse"), session_s=5)
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def neighbour(server: ServerProcess) -> Iterator[Engine]:
    """An engine that was there before, and has stored a prompt."""
    with Engine(server.address) as engine:
        store_surely(engine, TOKENS)
        yield engine


@contextlib.contextmanager
def abused(server: ServerProcess, trick: str, seconds: float = 600.0) -> Iterator[subprocess.Popen[str]]:
    """A process that plays a trick until the block ends."""
    command = [sys.executable, "-m", "bench.suites.soak.engine_abuse", server.address, trick, "--seconds", str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline().strip() == "begun"
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def serves(engine: Engine) -> bool:
    """Whether an engine has what it asks for, right to the last byte."""
    request = uuid.uuid4().hex
    if engine.lookup(request, TOKENS) != len(TOKENS):
        return False
    return engine.retrieve(request, TOKENS, 20) == set() and engine.holds(TOKENS, 20)


def joined(url: str, model: str) -> Engine:
    """An engine that the server has taken in, if not at its first try: then its prompts are computed, and it tries again."""
    found: list[Engine] = []

    def comes() -> bool:
        with contextlib.suppress(RefusedError):
            found.append(Engine(url, model))
        return bool(found)

    wait_for(comes, what="a newcomer being taken in")
    return found[0]


def private_bytes(pid: int) -> int:
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


@pytest.mark.parametrize("trick", sorted(TRICKS))
def test_an_engine_that_misbehaves_hurts_itself_only(server: ServerProcess, neighbour: Engine, trick: str) -> None:
    pid = server.process.pid
    wait_for(lambda: serves(neighbour), 30, "the neighbour being served before")
    files, memory = psutil.Process(pid).num_fds(), private_bytes(pid)
    most = 0
    with abused(server, trick) as process:
        for _ in range(10):
            wait_for(lambda: serves(neighbour), 10, "the neighbour being served meanwhile")
            most = max(most, private_bytes(pid))
        if trick != "connect_only":
            with joined(server.address, neighbour.model) as newcomer:
                wait_for(lambda: serves(newcomer), 10, "a newcomer being served meanwhile")
        assert process.poll() is None, "the trick ended by itself"
    assert server.process.poll() is None
    assert most - memory < GROWTH_OF.get(trick, GROWTH)
    wait_for(lambda: status_of(server.address).clients <= 3, 30, "what it left being forgotten")
    wait_for(
        lambda: psutil.Process(pid).num_fds() <= files + FILES_OF.get(trick, FILES), 30, "its descriptors being closed"
    )
    with Engine(server.address, neighbour.model) as newcomer:
        wait_for(lambda: serves(newcomer), 10, "a newcomer being served afterwards")
    with Engine(server.address, cache=make_cache(heads=5, blocks=BLOCKS, block_size=BLOCK)) as of_another_size:
        store_surely(of_another_size, TOKENS)
    assert neighbour.worker._cache.connection.lost == 0, "the neighbour never lost its server"


def test_what_the_largest_messages_took_goes_back_to_the_kernel(pool: Pool, tmp_path: Path) -> None:
    """On a server of its own: what earlier tricks have left would be used for these messages."""
    server = ServerProcess(pool, tmp_path)
    try:
        pid = server.process.pid
        before = private_bytes(pid)
        with abused(server, "large_messages"):
            wait_for(lambda: private_bytes(pid) > before + (96 << 20), 60, "the server needing memory for them")
        wait_for(lambda: private_bytes(pid) < before + (64 << 20), 60, "the memory being given back")
    finally:
        server.kill()
