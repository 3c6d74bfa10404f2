"""A tiny engine, closed and checked for leaks after each test."""

import threading

import pytest
import torch

from launch.engines.reference.engine import ReferenceEngine
from launch.engines.reference.model import PagedModel
from launch.engines.reference.requests import GenerationRequest
from pd_cache.cluster import HandoffConfig, ModelConfig, RandomModel, ReferenceEngineConfig
from tests.support.waiting import PATIENCE_S, wait_for

TINY = RandomModel(vocab_size=300, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2)


def tiny_config(**changes):
    settings = {
        "num_blocks": 64,
        "max_model_len": 256,
        "step_tokens": 16,
        "block_size": 8,
        "threads": 1,
        **changes,
    }
    return ReferenceEngineConfig(
        model=settings.pop("model", ModelConfig(name="tiny", random=TINY)), **settings
    )


def prompt_of(length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, TINY.vocab_size, (length,), generator=generator).tolist())


def request_of(length, seed=1, **fields):
    return GenerationRequest(prompt=prompt_of(length, seed), **{"max_tokens": 6, **fields})


def tokens_of(generation):
    return [event.token for event in generation]


class SlowModel:
    """Computes as the model it wraps, but each step waits for `gate`, and a token in `poison` fails its
    step."""

    def __init__(self, model):
        self._model = model
        self.poison = set()
        self.gate = threading.Event()
        self.steps = []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def step(self, parts):
        assert self.gate.wait(PATIENCE_S)
        self.steps.append([(part.position, len(part.tokens)) for part in parts])
        if any(self.poison.intersection(part.tokens) for part in parts):
            raise RuntimeError("a poisoned token")
        return self._model.step(parts)


@pytest.fixture
def make_engine():
    """Builds engines, with `slow=True` of a SlowModel; afterwards every block is free and every thread
    gone."""
    engines = []

    def make(cache=None, *, wait_ms=0, slow=False, request_timeout_s=300.0, load_timeout_s=120.0, **changes):
        config = tiny_config(**changes)
        model = PagedModel(config)
        engine = ReferenceEngine(
            SlowModel(model) if slow else model,
            config,
            HandoffConfig(wait_ms=wait_ms),
            cache,
            request_timeout_s=request_timeout_s,
            load_timeout_s=load_timeout_s,
        )
        engines.append(engine)
        return engine

    before = set(threading.enumerate())
    yield make
    for engine in engines:
        engine.close()
        engine.pool.check_integrity()
        assert engine.pool.free == engine.config.num_blocks
    wait_for(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("pd-cache")])


@pytest.fixture(scope="session")
def expected():
    """What an engine without a cache answers to a request: the truth that every other way must give."""
    engine = ReferenceEngine.open(tiny_config())
    yield lambda request: tokens_of(engine.submit(request))
    engine.close()


@pytest.fixture(scope="session", autouse=True)
def _one_compute_thread():
    """Tiny matrices gain nothing from more, and lose much where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
