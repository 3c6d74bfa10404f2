"""The walks of docs/operations.md, "Change the master without a cold cache", with real nodes.

`python -m tests.launch.test_change_of_master` measures the hits of each second, for docs/performance.md.
"""

import contextlib
import random
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import pytest

from launch.masters import segments_at
from tests.support.cli import cli
from tests.support.cluster import CHUNK, cluster_file, complete, free_node
from tests.support.pool import Node, Pool, free_port
from tests.support.waiting import beside, wait_for

ROLES = ("prefill", "decode", "proxy")
PROMPTS, ANOTHER = range(6), 6


@contextmanager
def serving(folder, pool, **changes):
    """A prefill node, a decode node and a proxy over a pool that is there, as they are after a restart;
    yields the proxy's address."""
    nodes = [pool.master, *(free_node(role, port=free_port()) for role in ROLES)]
    file = cluster_file(folder, nodes=nodes, **changes)
    with contextlib.ExitStack() as stack:
        running = {role: stack.enter_context(Node(role, role, file)) for role in ROLES}
        yield running["proxy"].address


def rate(proxy, *numbers):
    """Asks for these prompts, and returns the share of their tokens that was found."""
    found = []
    for number in numbers:
        answer = complete(proxy, random.Random(number).choices(range(512), k=3 * CHUNK + 1))
        assert answer.status == 200
        found.append(answer.cached[0] / (3 * CHUNK))
    return fmean(found)


def copy(pool, other):
    cli("pool", "copy", "-c", pool.file, "--to", other.file)


def restart(pool):
    pool.stop("master")
    pool.start("master")
    wait_for(lambda: segments_at(pool.metrics), "the store is back")


@pytest.mark.slow(seconds=30)
def test_all_hits_are_there_at_once_in_the_pool_of_another_master_and_after_its_own_came_back(
    make_pool, tmp_path
):
    blue, green = (make_pool().start() for _ in range(2))
    with serving(tmp_path, blue) as proxy:
        assert rate(proxy, *PROMPTS) < 0.1
        assert rate(proxy, *PROMPTS) == 1.0
        copy(blue, green)
        # the same nodes, and at the same address a master that knows nothing
        restart(blue)
        assert not blue.keys()
        copy(green, blue)
        wait_for(lambda: rate(proxy, ANOTHER) == 1.0, "the nodes have their pool again")
        assert rate(proxy, *PROMPTS) == 1.0
    with serving(tmp_path, green) as proxy:
        assert rate(proxy, *PROMPTS) == 1.0


# --- figures ------------------------------------------------------------------------------------------------

MANY, BEFORE_S = range(200), 10.0


def measure(folder, change):
    """Asks for prompts at random while `change` runs, and until the hits are back; prints the hit rate of
    each second."""
    blue, green = (Pool(folder, client_ttl_s=60).start() for _ in range(2))
    hits, marks, end = defaultdict(list), {}, threading.Event()

    def ask():
        prompts = random.Random(0)
        while not end.is_set():
            hit = rate(proxy, prompts.choice(MANY))
            hits[int(time.monotonic() - begin)].append(hit)

    def back():
        """The seconds since the master is there again in which hits were as before."""
        last = int(time.monotonic() - begin)
        return [second for second in range(marks["back"] + 1, last) if fmean(hits[second] or [0]) >= 0.95]

    try:
        with serving(folder, blue, handoff={"wait_ms": 500}) as proxy:
            rate(proxy, *MANY)
            begin = time.monotonic()
            with beside(ask):
                time.sleep(BEFORE_S)
                change(blue, green, lambda name: marks.setdefault(name, int(time.monotonic() - begin)))
                wait_for(back)
                time.sleep(BEFORE_S)
                end.set()
    finally:
        for pool in (blue, green):
            pool.end()
    print(
        f"{change.__name__}: {marks}, 95 % from second {back()[0]} on, {sum(map(len, hits.values()))} requests"
    )
    print(" ".join(f"{fmean(hits[second]):.2f}" if hits[second] else "-" for second in range(max(hits) + 1)))


def plainly(blue, green, mark):
    mark("restart")
    restart(blue)
    mark("back")


def copied(blue, green, mark):
    mark("copy")
    copy(blue, green)
    mark("restart")
    restart(blue)
    mark("back")
    copy(green, blue)
    mark("copied")


if __name__ == "__main__":
    for change in (plainly, copied):
        with tempfile.TemporaryDirectory() as made:
            measure(Path(made), change)
