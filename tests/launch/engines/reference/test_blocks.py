"""Blocks are free or held, and return when the last holder lets go."""

from __future__ import annotations

import pytest

from launch.engines.reference.cache import BlockPool


def test_blocks_return_only_when_the_last_holder_lets_go():
    pool = BlockPool(4)
    lease = pool.allocate(3)
    assert lease is not None
    assert lease.blocks == (0, 1, 2)
    lease.hold()
    lease.release()
    assert pool.free == 1
    pool.check_integrity()
    lease.release()
    assert pool.free == 4
    pool.check_integrity()


def test_more_blocks_than_are_free_are_not_given_in_part():
    pool = BlockPool(4)
    assert pool.allocate(3) is not None
    assert pool.allocate(2) is None
    assert pool.free == 1
    pool.check_integrity()


def test_letting_go_twice_is_an_error():
    lease = BlockPool(4).allocate(1)
    assert lease is not None
    lease.release()
    with pytest.raises(AssertionError, match="more often"):
        lease.release()
    with pytest.raises(AssertionError, match="given back"):
        lease.hold()
