"""Servers that nodes' addresses lead to, one that answers and one that hangs; and an engine by itself."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest

from launch.run import health_server
from launch.run.health_server import Response
from pd_cache.cluster import ReferenceEngineConfig
from tests.support.cluster import ENGINE


@contextmanager
def serving(page: Callable[[str], bytes | None]) -> Iterator[int]:
    """The port of a server that answers each path with a page, or with 404 where there is none."""

    def respond(path: str) -> Response:
        found = page(path)
        return Response(404 if found is None else 200, found or b"")

    with health_server.serving("127.0.0.1", 0, respond, 64) as (_, port):
        yield port


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[list[int]], list[int]]]:
    """What an engine without any cache answers to a prompt of `cluster_file`'s model."""
    from launch.engines.reference import GenerationRequest, ReferenceEngine  # torch, which most tests here do not need

    config = msgspec.convert(ENGINE, ReferenceEngineConfig)
    with closing(ReferenceEngine.open(config)) as engine:

        def answer(prompt: list[int]) -> list[int]:
            request = GenerationRequest(prompt=tuple(prompt), max_tokens=8)
            return [event.token for event in engine.submit(request)]

        yield answer


@pytest.fixture
def well() -> Iterator[int]:
    """Answers with metrics of a node that loads."""
    asked = itertools.count()
    with serving(lambda _: f'pd_cache_bytes_total{{op="retrieve"}} {next(asked) * 1_000_000}\n'.encode()) as port:
        yield port


@pytest.fixture
def mute() -> Iterator[int]:
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield server.getsockname()[1]
