"""Servers that nodes' addresses lead to, one that answers and one that hangs; and an engine by itself."""

import itertools
import socket
from contextlib import closing

import msgspec
import pytest

from pd_cache.cluster import ReferenceEngineConfig
from tests.support.cluster import ENGINE
from tests.support.pages import serving


@pytest.fixture(scope="module")
def alone():
    """What an engine without any cache answers to a prompt of `cluster_file`'s model."""
    # torch, which most tests here do not need
    from launch.engines.reference.engine import ReferenceEngine
    from launch.engines.reference.requests import GenerationRequest

    config = msgspec.convert(ENGINE, ReferenceEngineConfig)
    with closing(ReferenceEngine.open(config)) as engine:

        def answer(prompt):
            request = GenerationRequest(prompt=tuple(prompt), max_tokens=8)
            return [event.token for event in engine.submit(request)]

        yield answer


@pytest.fixture
def well():
    """Answers with metrics of a node that loads."""
    asked = itertools.count()
    with serving(
        lambda _: f'pd_cache_bytes_total{{op="retrieve"}} {next(asked) * 1_000_000}\n'.encode()
    ) as port:
        yield port


@pytest.fixture
def mute():
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield server.getsockname()[1]
