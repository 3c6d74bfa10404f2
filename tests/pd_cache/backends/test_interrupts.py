"""A user's Ctrl-C in the middle of a put, a get or a removal costs that call, and no place, pin, slot or file of the tiers."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from pd_cache.backends.disk import LocalDiskBackend
from pd_cache.backends.hybrid import HybridBackend
from pd_cache.backends.local import DeviceShelf, LocalBackend
from pd_cache.backends.pipelined import PipelinedBackend
from tests.support.backends import Subject, make_subject
from tests.support.interrupts import FEWEST, interrupted_at
from tests.support.waiting import wait_for
from transfer.errors import Status

PAYLOAD = 5000
OBJECTS = 6
KINDS = ("local", "device", "disk", "hybrid(local+disk)", "behind", "pipelined(device)")


def value(key: str) -> bytes:
    return random.Random(key).randbytes(PAYLOAD)


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    behind = request.param == "behind"
    kind = "hybrid(disk+local)" if behind else request.param
    one = make_subject(kind, PAYLOAD, tmp_path, None, objects=OBJECTS, slots=8, blocking=not behind)
    try:
        yield one
    finally:
        one.backend.close()


def what_is_held(subject: Subject) -> list[str]:
    """Names what is still taken although no call is under way."""
    held: dict[str, int] = {}
    kept = 0
    for name, base in subject.bases.items():
        assert isinstance(base, LocalBackend | LocalDiskBackend)
        base.index.check_integrity()
        held[f"pins of {name}"] = len(base.index._pins)
        held[f"reserved places of {name}"] = len(base.index._reserved)
        if isinstance(base, LocalDiskBackend):
            held["read places"], held["write places"] = len(base._read_slots), len(base.writer.slots)
            held["writes under way"] = len(base.writer._under_way)
        elif isinstance(shelf := base._shelf, DeviceShelf):
            rows = [number for number in shelf._taken if shelf._holder(number) is not None]
            held["rows"] = len(rows) - len(base.index)
        else:
            kept = len(base.index)
    inner = subject.backend.inner if isinstance(subject.backend, PipelinedBackend) else subject.backend
    if isinstance(inner, HybridBackend):
        held["backlog"] = len(inner._behind._under_way)
    held["slots"] = subject.backend.memory.pool.in_use - kept
    return [name for name, number in held.items() if number]


def check_nothing_is_held(subject: Subject) -> None:
    looks = count(1)

    def none() -> bool:
        if next(looks) % 20 == 0:
            gc.collect()  # a traceback in a cycle holds frames, and these hold places; usually there is none
        return not what_is_held(subject)

    try:
        wait_for(none)
    except AssertionError:
        raise AssertionError(f"still held: {what_is_held(subject)}") from None


def sweep(subject: Subject, prepare: Callable[[], None], call: Callable[[], object]) -> None:
    """Interrupt a call at each of its points, one after another; nothing may be held after any of them."""
    for point in count():
        prepare()
        if not interrupted_at(point, call):
            break
        check_nothing_is_held(subject)
    assert point > FEWEST
    check_nothing_is_held(subject)
    # every place of the budget is still there
    keys = [f"last {n}" for n in range(OBJECTS)]
    for key in keys:
        assert subject.put({key: value(key)}) == [Status.OK]
    assert subject.get(keys) == [value(key) for key in keys]
    check_nothing_is_held(subject)
    for base in subject.bases.values():
        if isinstance(base, LocalDiskBackend):
            wait_for(lambda disk=base: len(list(disk.folder.root.glob("??/*"))) == len(disk.index), what="no file lost")


def test_an_interrupted_put_loses_nothing(subject: Subject) -> None:
    numbers = count()
    sweep(subject, lambda: None, lambda: subject.put({key: value(key) for key in (f"k{next(numbers)}", "again")}))


def test_an_interrupted_get_loses_nothing(subject: Subject) -> None:
    keys = ["a", "b", "none", "c"]

    def put() -> None:
        missing = [key for key in ("a", "b", "c") if not subject.has(key)]
        assert subject.put({key: value(key) for key in missing}) == [Status.OK] * len(missing)

    def get() -> None:
        outcomes = subject.get(keys)
        assert outcomes == [value("a"), value("b"), "missing", value("c")]

    sweep(subject, put, get)


def test_an_interrupted_get_that_ends_early_loses_nothing(subject: Subject) -> None:
    keys = ["a", "b", "c"]

    def get() -> None:
        fetches = subject.backend.batched_get(keys)
        next(fetches).release()
        fetches.close()

    subject.put({key: value(key) for key in keys})
    sweep(subject, lambda: None, get)


def test_an_interrupted_removal_loses_nothing(subject: Subject) -> None:
    def put() -> None:
        assert subject.put({"a": value("a")}) == [Status.OK]

    def remove() -> None:
        subject.backend.batched_remove(["a", "none"])

    sweep(subject, put, remove)
