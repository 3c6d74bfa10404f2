"""The other kinds of metadata service: served by the master over HTTP, and a real etcd."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.pool import Pool, free_port
from tests.transfer.test_store import SLOT, leased, opened, put
from transfer.errors import Status
from transfer.store import GetResult


@pytest.mark.parametrize("kind", ["http", "etcd"])
def test_objects_move_through_each_kind_of_metadata_service(
    make_pool: Callable[..., Pool], request: pytest.FixtureRequest, kind: str
) -> None:
    metadata = f"http://127.0.0.1:{free_port()}/metadata"
    if kind == "etcd":
        metadata = f"etcd://{request.getfixturevalue('etcd').endpoint}"
    pool = make_pool(metadata=metadata).start()
    with opened(pool, metadata=metadata) as (store, staging):
        assert put(store, staging, ["k"], b"m") == [Status.OK]
        slots = leased(staging, 1)
        assert store.start_get(["k"], slots, timeout=20).results() == [GetResult(Status.OK, SLOT)]
        assert bytes(slots[0].view) == b"m" * SLOT
        slots[0].release()
