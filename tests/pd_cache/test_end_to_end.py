"""Checksums are of what the engine has: bytes that somebody else puts into staging memory are never taken for
a prompt's.

A transfer that was given up may write to staging memory for as long as its peer is stopped. Here, something
writes at every step.
"""

import itertools
import sys
import uuid
from contextlib import contextmanager

import pytest

from pd_cache.layout import Digest
from pd_cache.paged.cpu import CpuPagedCopier
from tests.support.engines import BLOCK, CHUNK, host

PLANES = 2
PER_CHUNK = CHUNK // BLOCK
STEPS = PLANES * PER_CHUNK  # a page each
HERE, ELSEWHERE = list(range(CHUNK)), list(range(100, 100 + CHUNK))

_prompts = itertools.count()


class Vandal:
    """Overwrites one byte of a chunk in staging memory, just before one of the steps of its copy or just
    after the last."""

    def __init__(self, byte, copied_by, step):
        """`copied_by`: the step that copies this byte."""
        self._byte, self._step = byte, step
        self.comes_before, self.comes_just_before = step <= copied_by, step == copied_by
        self._struck = False
        self._payload = None

    @contextmanager
    def at_work(self, monkeypatch, copy, *, large_page=0, mends=False):
        """Strikes during the block. Pages of `large_page` bytes are hashed where they lie. With `mends`, the
        right byte comes back before the next bytes are hashed."""
        vandal, moved, steps = self, getattr(CpuPagedCopier, copy), CpuPagedCopier._steps

        def with_steps(copier, chunk, payload):
            for number, step in enumerate(steps(copier, chunk, payload)):
                self._strike(number, payload)
                yield step

        def with_copy(copier, chunk, payload):
            copied = moved(copier, chunk, payload)
            self._strike(STEPS, payload)
            return copied

        class Late:
            def __init__(self):
                self._digest = Digest()
                self.intdigest = self._digest.intdigest

            def update(self, data):
                vandal._mend()
                self._digest.update(data)

        with monkeypatch.context() as patch:
            patch.setattr("pd_cache.paged.cpu._STEP_BYTES", 1)
            patch.setattr("pd_cache.paged.cpu._LARGE_PAGE", large_page)
            patch.setattr(CpuPagedCopier, "_steps", with_steps)
            patch.setattr(CpuPagedCopier, copy, with_copy)
            if mends:
                patch.setattr("pd_cache.paged.cpu.Digest", Late)
            yield
        assert self._struck

    def _strike(self, step, payload):
        if step == self._step and not self._struck:
            payload[self._byte] ^= 0x5A
            self._struck, self._payload = True, payload

    def _mend(self):
        if self._payload is not None:
            self._payload[self._byte] ^= 0x5A
            self._payload = None


def vandals(node, steps=STEPS + 1):
    """Of the first and the last byte of each step's page, before each of so many steps."""
    page = node.layout.page_bytes
    assert node.layout.planes == PLANES
    for copied_by in range(STEPS):
        for byte in (copied_by * page, (copied_by + 1) * page - 1):
            yield from (Vandal(byte, copied_by, step) for step in range(steps))


@pytest.fixture(scope="module")
def reader(pool):
    with host(pool, model=uuid.uuid4().hex) as node:
        yield node


@pytest.fixture
def writer(reader, pool):
    with host(pool, model=reader.engine.metadata.model) as node:
        yield node


def stored(writer):
    """Stores a prompt of one chunk, which no other test uses, and returns it."""
    first = 1000 * next(_prompts)
    tokens = list(range(first, first + CHUNK))
    writer.compute(tokens, HERE)
    assert writer.store(tokens, HERE) == CHUNK
    return tokens


@pytest.mark.parametrize("large_page", [0, sys.maxsize])
def test_what_comes_into_staging_memory_during_a_store_is_never_loaded(
    writer, reader, monkeypatch, large_page
):
    for vandal in vandals(writer):
        with vandal.at_work(monkeypatch, "gather", large_page=large_page):
            tokens = stored(writer)
        mask = reader.retrieve(tokens, ELSEWHERE)
        if vandal.comes_before:
            assert all(mask), "the copy went over it"
            assert reader.holds(tokens, ELSEWHERE)
        else:
            assert not any(mask), vars(vandal)


@pytest.mark.parametrize("large_page, mends", [(0, False), (0, True), (sys.maxsize, True)])
def test_what_comes_into_staging_memory_during_a_load_is_not_loaded_also_if_it_goes_at_once(
    writer, reader, monkeypatch, large_page, mends
):
    """And the object in the pool, which is good, stays there."""
    tokens = stored(writer)
    for vandal in vandals(writer, STEPS + (not mends)):
        blank(reader)
        with vandal.at_work(monkeypatch, "scatter", large_page=large_page, mends=mends):
            mask = reader.retrieve(tokens, ELSEWHERE)
        seen = vandal.comes_just_before if mends else vandal.comes_before
        assert mask == [not seen] * CHUNK, vars(vandal)
        assert reader.holds(tokens, ELSEWHERE) or not any(mask)
    assert reader.lookup(tokens) == CHUNK


def blank(node):
    for tensor in node.cache:
        tensor.zero_()


def test_memory_that_changes_between_the_seal_and_the_transfer_is_damage(writer, reader, monkeypatch):
    backend = writer.engine.backend
    put = backend.batched_put

    def overwritten(keys, staged, *rest):
        for one in staged:
            one.payload[:] = bytes(len(one.payload))
        return put(keys, staged, *rest)

    monkeypatch.setattr(backend, "batched_put", overwritten)
    assert not any(reader.retrieve(stored(writer), ELSEWHERE))
    assert reader.troubles("retrieve")["corrupt"]
