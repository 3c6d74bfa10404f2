"""TransferEngine between two engines: bytes arrive, and what goes wrong is a status by the deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from transfer.engine import DirectEngine
from transfer.errors import Status
from transfer.settings import TransferSettings
from transfer.staging import Slot, StagingPool

SLOT, COUNT = 64 << 10, 8


class End(NamedTuple):
    engine: DirectEngine
    memory: StagingPool
    slots: list[Slot]

    @property
    def addresses(self) -> list[int]:
        return [slot.address for slot in self.slots]


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            engine = DirectEngine(TransferSettings(), "127.0.0.1")
            stack.callback(engine.close, 5.0)
            memory = StagingPool(COUNT * SLOT, SLOT)
            engine.register(memory.address, memory.nbytes)
            slots = [slot for _ in range(COUNT) if (slot := memory.try_lease()) is not None]
            made.append(End(engine, memory, slots))
        yield made[0], made[1]


def test_what_is_written_arrives_and_what_is_read_is_what_lies_there(ends: tuple[End, End]) -> None:
    here, there = ends
    for slot in here.slots:
        slot.view[:] = os.urandom(SLOT)
    sent = [bytes(slot.view) for slot in here.slots]
    assert here.engine.write(there.engine.address, here.slots, there.addresses, timeout=10) is Status.OK
    assert [bytes(slot.view) for slot in there.slots] == sent
    for slot in there.slots:
        slot.view[:] = os.urandom(SLOT)
    assert here.engine.read(there.engine.address, here.slots, there.addresses, timeout=10) is Status.OK
    assert [bytes(slot.view) for slot in here.slots] == [bytes(slot.view) for slot in there.slots]


def test_a_peer_that_nobody_is_fails_in_time_and_holds_no_slot(ends: tuple[End, End]) -> None:
    here, there = ends
    begin = time.monotonic()
    assert here.engine.write("127.0.0.1:9", here.slots, there.addresses, timeout=20) is Status.TRANSFER_FAILED
    assert time.monotonic() - begin < 60, "a bound, not a measurement"
    for slot in here.slots:
        slot.release()
    assert here.memory.in_use == 0
    here.memory.check_integrity()


def test_memory_that_was_not_registered_is_refused(ends: tuple[End, End]) -> None:
    here, there = ends
    beyond = [address + there.memory.nbytes for address in there.addresses]
    assert here.engine.read(there.engine.address, here.slots, beyond, timeout=20) is Status.TRANSFER_FAILED


def test_after_a_call_that_failed_at_once_its_slots_are_used_by_nobody_else(ends: tuple[End, End]) -> None:
    """Mooncake returns when the first transfer of a batch has failed, and may still carry the others out."""
    here, there = ends
    given = set(here.addresses)
    one_bad = [there.memory.address + there.memory.nbytes, *there.addresses[1:]]
    assert here.engine.read(there.engine.address, here.slots, one_bad, timeout=20) is Status.TRANSFER_FAILED
    for slot in here.slots:
        slot.release()
    again = [slot for _ in range(COUNT) if (slot := here.memory.try_lease()) is not None]
    assert again, "other memory takes their place"
    assert given.isdisjoint(slot.address for slot in again)
    assert here.memory.forfeited_bytes
    for slot in again:
        slot.release()
    here.memory.check_integrity()


def test_a_closed_engine_begins_nothing(ends: tuple[End, End]) -> None:
    here, there = ends
    assert here.engine.close(5.0)
    assert here.engine.write(there.engine.address, here.slots, there.addresses, timeout=1) is Status.OVERLOADED


@pytest.mark.parametrize("count", [0, COUNT - 1])
def test_slots_and_addresses_that_do_not_match_are_the_callers_mistake(ends: tuple[End, End], count: int) -> None:
    here, there = ends
    with pytest.raises(ValueError, match="one address for each slot"):
        here.engine.write(there.engine.address, here.slots[:count], there.addresses, timeout=1)
