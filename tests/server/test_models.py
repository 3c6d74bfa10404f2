"""Which models a server serves, and the backend for each size of chunk. The backends here only say whether
they are closed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.layout import KVLayout
from pd_cache.metrics import CacheMetrics
from pd_cache.server import models
from pd_cache.server.models import ServedModels, memory_size
from pd_cache.server.protocol import EngineIdentity, RefusalError
from tests.support.engines import BLOCK, CHUNK
from tests.support.kv import make_cache


class FakeBackend:
    def __init__(self, settings, payload_bytes):
        self.payload_bytes = payload_bytes
        self.segment_size = settings.segment_size
        self.closed = False

    def close(self):
        self.closed = True


class Served:
    """The models of a server, and what closes."""

    def __init__(self, segment_size=16 << 20):
        settings = NodeSettings(master="", segment_size=segment_size, cache=CacheConfig(chunk_size=CHUNK))
        self.released = []
        self.models = ServedModels(settings, CacheMetrics(), self.released.append)

    def come(self, heads, client="a"):
        """An engine registers whose chunks are as large as it has heads."""
        engine = EngineIdentity(model=f"model of {heads}", block_size=BLOCK)
        layout = KVLayout.from_tensors(make_cache(heads=heads, block_size=BLOCK))
        return self.models.serve(self.models.groups(engine)[0], layout, client)

    def closed(self, *models):
        closed = [one.mover.backend.closed for one in models]
        assert closed == [one.mover.backend in self.released for one in models], (
            "sessions end before a backend closes"
        )
        assert closed == [one.mover.closed for one in models]
        assert closed == [self.models.by_group.get(one.group) is not one for one in models]
        return closed


@pytest.fixture(autouse=True)
def fake_backends(monkeypatch):
    monkeypatch.setattr(models, "open_backend", lambda settings, size, **_: FakeBackend(settings, size))


@pytest.fixture
def served():
    return Served()


def test_the_backend_of_engines_that_have_left_makes_room_for_another_size(served):
    everyone = [served.come(heads, "b") for heads in range(1, 9)]
    with pytest.raises(RefusalError, match="would be size number 9"):
        served.come(9)
    everyone[2].workers.discard("b")
    assert not any(served.closed(*everyone)), "an engine that comes back finds its chunks"
    served.come(9)
    assert served.closed(*everyone) == [one is everyone[2] for one in everyone]
    assert served.come(2, "d") is everyone[1], "those that are there go on"
    with pytest.raises(RefusalError, match="would be size number 9"):
        served.come(3)


def test_the_backend_with_the_segment_goes_last_and_the_next_one_has_it(served):
    everyone = [served.come(heads) for heads in range(1, 9)]
    assert [bool(one.mover.backend.segment_size) for one in everyone] == [True, *[False] * 7]
    for one in everyone:
        one.workers.clear()
    for heads in range(9, 16):
        served.come(heads, "b")
        assert served.closed(*everyone) == [False, *[True] * 7], "engines of another size need their memory"
    assert served.come(16, "b").mover.backend.segment_size
    assert all(served.closed(*everyone))


def test_where_the_server_gives_no_segment_the_first_size_makes_room_like_any_other():
    served = Served(segment_size=0)
    first = served.come(1)
    first.workers.clear()
    served.come(2)
    assert served.closed(first) == [True]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_groups_of_layers_of_similar_size_share_memory_whatever_the_order_in_which_they_come(sizes, rng):
    shuffled = rng.sample(sizes, len(sizes))
    slots = {size: memory_size(size, sizes) for size in sizes}
    assert slots == {size: memory_size(size, shuffled) for size in sizes}
    assert all(size <= slot <= 2 * size for size, slot in slots.items())
    assert all(slots[slot] == slot for slot in slots.values()), (
        "a slot is as large as the largest payload in it"
    )
    assert memory_size(max(sizes), ()) == max(sizes), "engines with one group share no memory of another size"
