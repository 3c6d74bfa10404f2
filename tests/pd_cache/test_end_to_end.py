"""Checksums are of what the engine has: bytes that somebody else puts into staging memory are never taken for a prompt's.

A transfer that was given up may write to staging memory for as long as its peer is stopped. Here, something writes at every step.
"""

from __future__ import annotations

import itertools
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pd_cache.layout import Digest
from pd_cache.paged.base import PendingCopy
from pd_cache.paged.cpu import CpuPagedCopier
from tests.support.engines import BLOCK, CHUNK, Host, host
from tests.support.pool import Pool

PLANES = 2
PER_CHUNK = CHUNK // BLOCK
STEPS = PLANES * PER_CHUNK  # a page each
HERE, ELSEWHERE = list(range(CHUNK)), list(range(100, 100 + CHUNK))

_prompts = itertools.count()


class Vandal:
    """Overwrites one byte of a chunk in staging memory, just before one of the steps of its copy or just after the last."""

    def __init__(self, byte: int, step: int, copy: str, large_page: int = 0) -> None:
        """Pages of `large_page` bytes are hashed where they lie."""
        self._byte, self._step, self._copy, self._large_page = byte, step, copy, large_page
        self.struck = False
        self._payload: torch.Tensor | None = None

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        moved = getattr(CpuPagedCopier, self._copy)
        steps = CpuPagedCopier._steps

        def with_steps(copier: CpuPagedCopier, chunk: torch.Tensor, payload: torch.Tensor) -> Iterator[Any]:
            for number, step in enumerate(steps(copier, chunk, payload)):
                self._strike(number, payload)
                yield step

        def with_copy(copier: CpuPagedCopier, chunk: torch.Tensor, payload: torch.Tensor) -> PendingCopy:
            copied: PendingCopy = moved(copier, chunk, payload)
            self._strike(STEPS, payload)
            return copied

        monkeypatch.setattr("pd_cache.paged.cpu._STEP_BYTES", 1)
        monkeypatch.setattr("pd_cache.paged.cpu._LARGE_PAGE", self._large_page)
        monkeypatch.setattr(CpuPagedCopier, "_steps", with_steps)
        monkeypatch.setattr(CpuPagedCopier, self._copy, with_copy)

    def mend_before_checksums(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The right byte comes back before the next bytes are hashed."""
        vandal = self

        class Late:
            def __init__(self) -> None:
                self._digest = Digest()
                self.intdigest = self._digest.intdigest

            def update(self, data: memoryview) -> None:
                vandal._mend()
                self._digest.update(data)

        monkeypatch.setattr("pd_cache.paged.cpu.Digest", Late)

    def _strike(self, step: int, payload: torch.Tensor) -> None:
        if step == self._step and not self.struck:
            payload[self._byte] ^= 0x5A
            self.struck, self._payload = True, payload

    def _mend(self) -> None:
        if self._payload is not None:
            self._payload[self._byte] ^= 0x5A
            self._payload = None

    def before(self, payload_bytes: int) -> bool:
        """Whether it strikes before the step that copies its byte."""
        return self._step <= self._byte * STEPS // payload_bytes


@pytest.fixture(scope="module")
def reader(pool: Pool) -> Iterator[Host]:
    with host(pool, model=uuid.uuid4().hex) as node:
        yield node


@pytest.fixture
def writer(reader: Host, pool: Pool) -> Iterator[Host]:
    with host(pool, model=reader.engine.metadata.model) as node:
        yield node


def stored(writer: Host) -> list[int]:
    """Stores a prompt of one chunk, which no other test uses, and returns it."""
    first = 1000 * next(_prompts)
    tokens = list(range(first, first + CHUNK))
    writer.compute(tokens, HERE)
    assert writer.store(tokens, HERE) == CHUNK
    return tokens


def bytes_to_hit(node: Host) -> list[int]:
    """The first and the last byte of each step."""
    page = node.layout.page_bytes
    assert node.layout.planes == PLANES
    return [place for step in range(STEPS) for place in (step * page, (step + 1) * page - 1)]


@pytest.mark.parametrize("large_page", [0, sys.maxsize])
def test_what_comes_into_staging_memory_during_a_store_is_never_loaded(writer, reader, monkeypatch, large_page):
    size = writer.layout.chunk_bytes(CHUNK)
    for byte in bytes_to_hit(writer):
        for step in range(STEPS + 1):
            vandal = Vandal(byte, step, "gather", large_page)
            with monkeypatch.context() as patch:
                vandal.watch(patch)
                tokens = stored(writer)
            assert vandal.struck
            mask = reader.retrieve(tokens, ELSEWHERE)
            if vandal.before(size):
                assert all(mask), "the copy went over it"
                assert reader.holds(tokens, ELSEWHERE)
            else:
                assert not any(mask), (byte, step)


@pytest.mark.parametrize("reads", [1, 2])
def test_what_comes_into_staging_memory_during_a_load_is_not_loaded(writer, reader, monkeypatch, reads):
    """And the object in the pool, which is good, stays there and is read again."""
    tokens = stored(writer)
    monkeypatch.setattr("pd_cache.mover._RETRIES", reads - 1)
    size = writer.layout.chunk_bytes(CHUNK)
    for byte in bytes_to_hit(writer):
        for step in range(STEPS + 1):
            blank(reader)
            vandal = Vandal(byte, step, "scatter")
            with monkeypatch.context() as patch:
                vandal.watch(patch)
                mask = reader.retrieve(tokens, ELSEWHERE)
            assert vandal.struck
            if reads == 1 and vandal.before(size):
                assert not any(mask), (byte, step)
            else:
                assert all(mask), (byte, step)
                assert reader.holds(tokens, ELSEWHERE)
    assert reader.lookup(tokens) == CHUNK


@pytest.mark.parametrize("large_page", [0, sys.maxsize])
def test_bytes_that_are_wrong_only_while_they_are_copied_are_not_loaded(writer, reader, monkeypatch, large_page):
    tokens = stored(writer)
    monkeypatch.setattr("pd_cache.mover._RETRIES", 0)
    size = writer.layout.chunk_bytes(CHUNK)
    for byte in bytes_to_hit(writer):
        for step in range(STEPS):
            blank(reader)
            vandal = Vandal(byte, step, "scatter", large_page)
            with monkeypatch.context() as patch:
                vandal.watch(patch)
                vandal.mend_before_checksums(patch)
                mask = reader.retrieve(tokens, ELSEWHERE)
            assert vandal.struck
            assert any(mask) == (step != byte * STEPS // size)
            assert reader.holds(tokens, ELSEWHERE) or not any(mask)


def blank(node: Host) -> None:
    for tensor in node.cache:
        tensor.zero_()


def test_memory_that_changes_between_the_seal_and_the_transfer_is_damage(writer, reader, monkeypatch):
    backend: Any = writer.engine.backend
    put: Callable[..., Any] = backend.batched_put

    def overwritten(keys: Any, staged: Any, **options: Any) -> Any:
        for one in staged:
            one.payload[:] = bytes(len(one.payload))
        return put(keys, staged, **options)

    monkeypatch.setattr(backend, "batched_put", overwritten)
    assert not any(reader.retrieve(stored(writer), ELSEWHERE))
    assert reader.troubles("retrieve")["corrupt"]
