"""A pool behind a link of a given rate, between network namespaces."""

from __future__ import annotations

import subprocess
import time

import click
import pytest

from bench.lib.pool import raw_client
from bench.lib.slow_link import pool_behind
from tests.support.hosts import why_not
from transfer.settings import TransferSettings
from transfer.staging import StagingPool

SIZE = 4 << 20

if (_reason := why_not()) is not None:
    pytest.skip(_reason, allow_module_level=True)


def namespaces() -> str:
    return subprocess.run(("ip", "netns", "list"), check=True, capture_output=True, text=True, timeout=60).stdout


def test_objects_of_a_pool_behind_a_link_come_no_faster_than_the_link_and_nothing_of_it_stays() -> None:
    before = "pdbench" in namespaces()
    with pool_behind("100mbit", 64 << 20, TransferSettings()) as pool, raw_client(pool.master, pool.here) as client:
        memory = StagingPool(SIZE, SIZE)
        assert memory.register_with(client) == 0
        slot = memory.try_lease()
        assert slot is not None
        slot.view[:] = bytes(range(256)) * (SIZE // 256)
        assert client.batch_put_from(["key"], [slot.address], [SIZE]) == [0]
        slot.view[:] = bytes(SIZE)
        start = time.monotonic()
        assert client.batch_get_into(["key"], [slot.address], [SIZE]) == [SIZE]
        # what the shaper lets through at once does not count; a busy machine can only make it slower
        assert time.monotonic() - start > 0.8 * (SIZE - (1 << 20)) * 8 / 100e6
        assert slot.view == bytes(range(256)) * (SIZE // 256)
    assert ("pdbench" in namespaces()) == before


def test_a_rate_that_tc_does_not_know_is_an_error_that_says_so_and_nothing_stays() -> None:
    before = namespaces()
    with pytest.raises(click.ClickException, match="tc qdisc"), pool_behind("fast", 64 << 20, TransferSettings()):
        pass
    assert namespaces() == before
