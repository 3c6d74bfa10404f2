"""The walk of docs/operations.md, "Change the master without a cold cache", with real nodes; and beside it
the same without the second pool."""

import contextlib
import random
from contextlib import contextmanager
from statistics import fmean

import pytest

from tests.support.cluster import CHUNK, cluster_file, complete, fetched, free_node
from tests.support.pool import Node, free_port
from tests.support.waiting import wait_for

ROLES = ("prefill", "decode", "proxy")
PROMPTS = 20


@contextmanager
def serving(folder, pool, second=None):
    """A prefill node, a decode node and a proxy over a pool that is there, as they are after a restart;
    yields the proxy's address."""
    tiers = [{"kind": "mooncake"}]
    if second is not None:
        tiers.append({"kind": "mooncake", "master": second.address})
    nodes = [pool.master, *(free_node(role, port=free_port()) for role in ROLES)]
    file = cluster_file(folder, cache={"chunk_size": CHUNK, "tiers": tiers}, nodes=nodes)
    with contextlib.ExitStack() as stack:
        running = {role: stack.enter_context(Node(role, role, file)) for role in ROLES}
        for role in ("prefill", "decode"):
            wait_for(
                lambda at=running[role].address: second is None or _reaches_second(at), "both pools reached"
            )
        yield running["proxy"].address


def _reaches_second(address):
    return 'pd_cache_tier_off{tier="mooncake-1"} 0.0' in fetched(f"{address}/metrics").body


def rates(proxy):
    """Returns the hit rates of two rounds, each of which asks for every prompt once."""
    found = []
    for _ in range(2):
        for number in range(PROMPTS):
            answer = complete(proxy, random.Random(number).choices(range(512), k=3 * CHUNK + 1))
            assert answer.status == 200
            found.append(answer.cached[0] / (3 * CHUNK))
    return [fmean(found[:PROMPTS]), fmean(found[PROMPTS:])]


@pytest.mark.slow(seconds=30)
def test_nine_tenths_of_the_hits_are_there_at_once_if_the_old_pool_is_read_as_a_second_one(
    make_pool, tmp_path
):
    blue, green, cold = (make_pool().start() for _ in range(3))
    with serving(tmp_path, blue) as proxy:
        rates(proxy)
        assert min(rates(proxy)) > 0.9
    with serving(tmp_path, cold) as proxy:
        without = rates(proxy)
    with serving(tmp_path, green, second=blue) as proxy:
        assert min(rates(proxy)) > 0.9 > without[0]
        wait_for(lambda: len(green.keys()) == len(blue.keys()), "all of it in the new pool")
        blue.end()  # it may go before its tier does
        assert min(rates(proxy)) > 0.9
    with serving(tmp_path, green) as proxy:
        assert min(rates(proxy)) > 0.9
