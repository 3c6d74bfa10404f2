"""The other kinds of metadata service: served by the master over HTTP, and a real etcd."""

import pytest

from tests.support.needs import needs_etcd
from tests.support.pool import free_port
from tests.transfer.test_store import FOUND, SLOT, get, leased, opened, put
from transfer.errors import Status


@needs_etcd
@pytest.mark.parametrize("kind", ["http", "etcd"])
def test_objects_move_through_each_kind_of_metadata_service(make_pool, etcd, kind):
    metadata = f"etcd://{etcd.endpoint}" if kind == "etcd" else f"http://127.0.0.1:{free_port()}/metadata"
    pool = make_pool(metadata=metadata).start()
    with opened(pool, metadata=metadata) as (store, staging):
        assert put(store, staging, ["k"], b"m") == [Status.OK]
        slots = leased(staging, 1)
        assert get(store, ["k"], slots) == [FOUND]

        assert bytes(slots[0].view) == b"m" * SLOT
