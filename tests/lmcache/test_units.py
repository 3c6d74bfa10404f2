"""What LMCache counts as stored, and its lookup client, in a real pool."""

import uuid

import pytest

from bench.lib.pool import raw_client
from bench.suites.lookup import lmcache_client, put
from tests.support.adapters import KINDS, PAGE, end_subject

# what LMCache's imports deprecate is not ours
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_what_the_pool_has_lost_leaves_lmcaches_accounts_when_it_is_looked_up_or_deleted(pool):
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


def test_the_lookup_client_of_lmcache_that_the_bench_measures_finds_what_is_under_its_keys(pool):
    with raw_client(pool.address, transfer=pool.settings().transfer) as raw:
        peer, tokens = lmcache_client(raw), [uuid.uuid4().int % 1000 for _ in range(512)]
        keys = [key.to_string() for _, _, key in peer.token_database.process_tokens(tokens)]
        assert peer.lookup(tokens) == 0
        put(raw, keys)
        assert (len(keys), peer.lookup(tokens)) == (2, 512)
        pool.remove(*keys)
