"""The walks of docs/operations.md, "Change the master without a cold cache", with real nodes; and beside them
a new master without them."""

import contextlib
import random
from contextlib import contextmanager
from statistics import fmean

import pytest

from launch.masters import segments_at
from tests.support.cli import cli
from tests.support.cluster import CHUNK, cluster_file, complete, free_node
from tests.support.pool import Node, free_port
from tests.support.waiting import wait_for

ROLES = ("prefill", "decode", "proxy")
PROMPTS, ANOTHER = range(20), 20


@contextmanager
def serving(folder, pool):
    """A prefill node, a decode node and a proxy over a pool that is there, as they are after a restart;
    yields the proxy's address."""
    nodes = [pool.master, *(free_node(role, port=free_port()) for role in ROLES)]
    file = cluster_file(folder, nodes=nodes)
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
        blue.stop("master")
        blue.start("master")
        wait_for(lambda: segments_at(blue.metrics), "the store is back")
        assert not blue.keys()
        copy(green, blue)
        wait_for(lambda: rate(proxy, ANOTHER) == 1.0, "the nodes have their pool again")
        assert rate(proxy, *PROMPTS) == 1.0
    with serving(tmp_path, green) as proxy:
        assert rate(proxy, *PROMPTS) == 1.0
