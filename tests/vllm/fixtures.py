"""What the tests share: a pool that they may break and mend, a plain vLLM, and a pair of nodes with the
connector."""

import itertools
import random
from typing import NamedTuple

import pytest

from bench.lib.small_models import VOCABULARY, write_model
from tests.support.collector import collecting
from tests.support.leaks import no_leaks
from tests.support.pool import Pool, free_port
from tests.vllm.servers import ENV, PROGRAM, PdCacheServer, Reference, begun, by_hand, cluster_file, running
from tests.vllm.warm import warm_program

ROOM = "512MiB"
"""Of the pool. Its memory is taken when it is written to."""


def pytest_collection_modifyitems(items):
    """What needs no server comes first: it computes on one core while the servers that most tests share start
    on the other."""
    items.sort(
        key=lambda item: bool({"pair", "new_prompt", "model"}.intersection(getattr(item, "fixturenames", ())))
    )


class Pair(NamedTuple):
    """A stores, B decodes; each in processes of its own."""

    a: PdCacheServer
    b: PdCacheServer


@pytest.fixture(scope="session", autouse=True)
def warm_vllm(tmp_path_factory):
    """Servers are forks of a process that has imported vLLM."""
    with warm_program(tmp_path_factory.mktemp("warm"), ENV) as program:
        PROGRAM[0] = str(program)
        yield
        PROGRAM[0] = "vllm"


@pytest.fixture(scope="session")
def vllm_pool(tmp_path_factory):
    """A pool that a test may break, if it mends it before it ends. It has room for what all tests store: a
    full one refuses what is put into it while leases of 30 s protect the rest."""
    pool = Pool(tmp_path_factory.mktemp("pool"), segment=ROOM, client_ttl_s=5, lease_ttl_ms=30_000)
    try:
        yield pool.start()
        assert not pool.evicted, "the pool has become too small for the tests"
    finally:
        pool.stop()


@pytest.fixture(autouse=True)
def nothing_left_behind(request, vllm_pool):
    """As everywhere, but tests may start the shared pool's nodes anew."""
    if "plain" in request.fixturenames:
        request.getfixturevalue("plain").server()
    with no_leaks(lambda: [vllm_pool]):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def plain(model):
    """What a vLLM without a cache answers. It gets ready beside the first pair."""
    with begun(by_hand(model)) as server:
        yield Reference(server)


@pytest.fixture(scope="session")
def collector():
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def begun_pair(model, vllm_pool, plain, collector, tmp_path_factory):
    """A with a cache in its worker, vLLM's prefix cache, asynchronous scheduling and KV events; B with
    none of these, and a cache server. Requests with a trace context are traced. `plain` starts at the same
    time."""
    events_port, _ = free_port(), free_port()  # the next one is that of replays
    nodes = {
        "prefill-0": {"args": {"async-scheduling": True}, "events_port": events_port},
        "decode-0": {"args": {"async-scheduling": False, "enable-prefix-caching": False}},
    }
    tracing = {"endpoint": collector.endpoint, "sample_ratio": 0}
    listed = {**nodes, "store-0": {"segment_size": ROOM}}  # of the pool, so that its size is known
    file = cluster_file(
        tmp_path_factory.mktemp("pair"), vllm_pool, model, listed, mode="mixed", tracing=tracing
    )
    with running(file, wait=False) as (a, b):
        yield Pair(a, b)


@pytest.fixture(scope="session")
def pair(begun_pair):
    for server in begun_pair:
        server.wait_ready()
    return begun_pair


@pytest.fixture(scope="session", autouse=True)
def early_servers(request):
    """Has the servers that most tests share get ready while tests run that need none."""
    if any("pair" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("begun_pair")


_numbers = itertools.count()


@pytest.fixture
def new_prompt():
    """Prompts that no other test has used."""
    rng = random.Random(f"prompt {next(_numbers)}")

    def make(length):
        return [rng.randrange(10, VOCABULARY) for _ in range(length)]

    return make
