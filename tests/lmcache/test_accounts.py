"""What LMCache counts as stored, when the pool has evicted some of it."""

from __future__ import annotations

import uuid

from tests.support.adapters import KINDS, PAGE, end_subject
from tests.support.pool import Pool


def test_what_the_pool_has_lost_leaves_lmcaches_accounts_when_it_is_looked_up_or_deleted(pool: Pool) -> None:
    subject = KINDS["lmcache"](pool.settings(), uuid.uuid4().hex)
    try:
        subject.wait_available()
        adapter, names, before = subject.adapter, [f"{n}" for n in range(4)], pool.keys()
        assert subject.store({name: bytes(PAGE) for name in names}) == [True] * 4
        assert adapter.get_usage().total_bytes_used == 4 * PAGE
        pool.remove(*pool.keys() - before)
        assert subject.has(names[:2]) == [False] * 2
        assert adapter.get_usage().total_bytes_used == 2 * PAGE
        adapter.delete(subject._keys(names))
        assert adapter.get_usage().total_bytes_used == 0
        assert subject.store({names[0]: bytes(PAGE)}) == [True]
        assert adapter.get_usage().total_bytes_used == PAGE
    finally:
        end_subject(subject)
