"""The walk of docs/operations.md, "Change the master without a cold cache", with real nodes; and beside it the same without the second pool."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.versions import known_versions
from tests.support.cluster import CHUNK, cluster_file, complete, fetched, free_node
from tests.support.pool import Node, Pool, free_port
from tests.support.waiting import wait_for

ROLES = ("prefill", "decode", "proxy")
PROMPTS = [[random.Random(seed).randrange(512) for _ in range(3 * CHUNK + 1)] for seed in range(6)]


@contextmanager
def serving(folder: Path, pool: Pool, second: Pool | None = None) -> Iterator[str]:
    """A prefill node, a decode node and a proxy over a pool that is there, as they are after a restart; yields the proxy's address."""
    tiers: list[dict[str, Any]] = [{"kind": "mooncake"}]
    if second is not None:
        tiers.append({"kind": "mooncake", "master": second.address})
    nodes = [pool.master, *(free_node(role, port=free_port()) for role in ROLES)]
    file = cluster_file(folder, cache={"chunk_size": CHUNK, "tiers": tiers}, nodes=nodes)
    with contextlib.ExitStack() as stack:
        running = {}
        for role in ROLES:
            running[role] = Node(role, role, file)
            stack.callback(running[role].stop)
        wait_for(lambda: _with_weights(pool) >= {"prefill", "decode"}, what="both know which weights are current")
        for role in ("prefill", "decode"):
            wait_for(lambda at=running[role].address: second is None or _reaches_second(at), what="both pools reached")
        yield running["proxy"].address


def _with_weights(pool: Pool) -> set[str]:
    found = known_versions([pool.versions])
    return {name for one in found.values() for name, label in one.processes.values() if label is not None}


def _reaches_second(address: str) -> bool:
    return 'pd_cache_tier_off{tier="mooncake-1"} 0.0' in fetched(f"{address}/metrics").body


def hit_rate(proxy: str) -> float:
    """Asks for each prompt once; the share of their chunks that the prefill node loaded."""
    answers = [complete(proxy, prompt) for prompt in PROMPTS]
    assert {answer.status for answer in answers} == {200}
    return sum(answer.cached[0] for answer in answers) / (3 * CHUNK * len(PROMPTS))


@pytest.mark.slow(seconds=30)
def test_hits_go_on_while_the_master_is_changed(make_pool: Callable[..., Pool], tmp_path: Path) -> None:
    blue = make_pool().start()
    with serving(tmp_path, blue) as proxy:
        assert [hit_rate(proxy) for _ in range(2)] == [0, 1]
    green, cold = make_pool().start(), make_pool().start()
    with serving(tmp_path, cold) as proxy:
        assert hit_rate(proxy) == 0, "without the second pool"
    with serving(tmp_path, green, second=blue) as proxy:
        assert hit_rate(proxy) == 1, "from the first request on"
        wait_for(lambda: len(green.keys()) == 3 * len(PROMPTS), what="all of it in the new pool")
        blue.end()
        assert hit_rate(proxy) == 1, "the old master may go before its tier does"
    with serving(tmp_path, green) as proxy:
        assert hit_rate(proxy) == 1, "without the tier"
