"""The walk of docs/operations.md, "Change the master without a cold cache", with real nodes; and beside it the same without the second pool."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.support.cluster import CHUNK, cluster_file, complete, fetched, free_node
from tests.support.pool import Node, Pool, free_port
from tests.support.waiting import wait_for

ROLES = ("prefill", "decode", "proxy")


@contextmanager
def serving(folder: Path, pool: Pool, second: Pool | None = None) -> Iterator[str]:
    """A prefill node, a decode node and a proxy over a pool that is there, as they are after a restart; yields the proxy's address."""
    tiers: list[dict[str, Any]] = [{"kind": "mooncake"}]
    if second is not None:
        tiers.append({"kind": "mooncake", "master": second.address})
    nodes = [pool.master, *(free_node(role, port=free_port()) for role in ROLES)]
    file = cluster_file(folder, cache={"chunk_size": CHUNK, "tiers": tiers}, nodes=nodes)
    with contextlib.ExitStack() as stack:
        running = {role: stack.enter_context(Node(role, role, file)) for role in ROLES}
        for role in ("prefill", "decode"):
            wait_for(lambda at=running[role].address: second is None or _reaches_second(at), what="both pools reached")
        yield running["proxy"].address


def _reaches_second(address: str) -> bool:
    return 'pd_cache_tier_off{tier="mooncake-1"} 0.0' in fetched(f"{address}/metrics").body


def rates(proxy: str, when: str, requests: int = 300, together: int = 50) -> list[float]:
    """One client that asks for one of 100 prompts after the other, at random. Prints and returns the hit rate of so many answers together."""
    rng, found, begun = random.Random(0), [], time.monotonic()
    for _ in range(requests):
        prompt = random.Random(1000 + rng.randrange(100))
        answer = complete(proxy, [prompt.randrange(512) for _ in range(3 * CHUNK + 1)])
        assert answer.status == 200
        found.append((time.monotonic() - begun, answer.cached[0] / (3 * CHUNK)))
    parts = [found[at : at + together] for at in range(0, requests, together)]
    print(
        f"{when:26}", *(f"{fmean(hit for _, hit in part):.2f} until {part[-1][0]:.1f} s" for part in parts), sep="   "
    )
    return [fmean(hit for _, hit in part) for part in parts]


@pytest.mark.slow(seconds=60)
def test_nine_tenths_of_the_hits_are_there_at_once_if_the_old_pool_is_read_as_a_second_one(make_pool, tmp_path):
    """`pytest -s` prints the hit rates over time for docs/operations.md."""
    blue, green, cold = (make_pool().start() for _ in range(3))
    with serving(tmp_path, blue) as proxy:
        rates(proxy, "a new pool")
        assert min(rates(proxy, "before")) > 0.9
    with serving(tmp_path, cold) as proxy:
        without = rates(proxy, "restart without the tier")
    with serving(tmp_path, green, second=blue) as proxy:
        assert min(rates(proxy, "during: with the tier")) > 0.9 > without[0]
        wait_for(lambda: len(green.keys()) == len(blue.keys()), what="all of it in the new pool")
        blue.end()  # it may go before its tier does
        assert min(rates(proxy, "the old master is gone")) > 0.9
    with serving(tmp_path, green) as proxy:
        assert min(rates(proxy, "after: without the tier")) > 0.9
