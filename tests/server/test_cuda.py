"""Engines whose KV lies on a GPU, over a cache server in a process of its own, which maps it by CUDA IPC."""

import uuid

import pytest
import torch

from pd_cache.server.memory import record_event
from tests.support.engines import BLOCK, CHUNK
from tests.support.kv import make_cache
from tests.support.needs import NO_GPU
from tests.support.server import PER_CHUNK, Engine, ServerProcess
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]

TOKENS = list(range(3 * CHUNK))
BLOCKS = 3 * PER_CHUNK
AWHILE = 1_000_000_000
"""Cycles for `torch.cuda._sleep`: half a second, so that a store that does not wait is sure to be early."""


@pytest.fixture(scope="module")
def url(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(pool, folder):
        yield f"ipc://{folder}/cache.sock"


def gpu_engine(url, model):
    """Its layers share one allocation, which is not the whole of what torch took from the device."""
    torch.zeros(1 << 20, device="cuda")
    return Engine(url, model, cache=list(torch.stack(make_cache(block_size=BLOCK)).to("cuda").unbind()))


def store(engine, first_block=0):
    """Stores the blocks as they are when the calling stream is done with them, again until they are there:
    the server's store opens in the background."""

    def there():
        written = record_event(engine.cache[0])
        engine.worker.submit_store_request("request", engine.op(TOKENS, first_block), written)
        engine.finish_store()
        found = engine.lookup(TOKENS)
        engine.scheduler.end_session("request")
        return found == len(TOKENS)

    wait_for(there, "the prompt being stored")


def pages(engine, first_block):
    return torch.stack(
        [layer[first_block : first_block + BLOCKS].view(torch.int16) for layer in engine.cache]
    ).cpu()


def test_gpu_engines_share_chunks_and_nothing_else_of_their_caches_changes(url):
    model = uuid.uuid4().hex
    with gpu_engine(url, model) as one, gpu_engine(url, model) as other:
        store(one)
        before = torch.stack(other.cache).view(torch.int16).cpu()
        assert other.retrieve(TOKENS, first_block=BLOCKS) == set()
        assert torch.equal(pages(other, BLOCKS), pages(one, 0))
        after = torch.stack(other.cache).view(torch.int16).cpu()
        assert torch.equal(after[:, :BLOCKS], before[:, :BLOCKS])
        assert torch.equal(after[:, 2 * BLOCKS :], before[:, 2 * BLOCKS :])


def test_gpu_a_store_takes_what_the_engines_stream_still_has_to_write(url):
    with gpu_engine(url, uuid.uuid4().hex) as engine:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(AWHILE)
            for layer in engine.cache:
                layer[:BLOCKS].fill_(9)
            engine.worker.submit_store_request("request", engine.op(TOKENS), record_event(engine.cache[0]))
        engine.finish_store()
        store(engine)  # in vain, if the first store was not refused for want of a store of the server's
        assert engine.retrieve(TOKENS, first_block=BLOCKS) == set()
        assert torch.equal(pages(engine, BLOCKS), pages(engine, 0))
        assert bool(
            (pages(engine, BLOCKS) == torch.full((1,), 9.0, dtype=torch.bfloat16).view(torch.int16)).all()
        )


def test_gpu_a_server_gives_the_memory_back_when_the_engine_leaves(url):
    """An engine that registers, stores and leaves, ten times: the device has as much free memory as after the
    first."""
    free = []
    for _ in range(10):
        with gpu_engine(url, uuid.uuid4().hex) as engine:
            store(engine)
        del engine
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[1] - (64 << 20)
