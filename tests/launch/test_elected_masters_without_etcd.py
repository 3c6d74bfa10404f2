"""Two masters of which etcd elects one, and etcd dies or forgets."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.status import cluster_status
from tests.launch.test_elected_masters import role, sections
from tests.support.cluster import CHUNK, complete, started
from tests.support.etcd import Etcd
from tests.support.needs import needs_etcd
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.slow(seconds=170),  # nearly all of it waits for leases that Mooncake and etcd let run out
    needs_etcd,
]


def test_hits_come_back_by_themselves_after_each_way_in_which_etcd_fails_and_while_it_is_dead_status_says_why_there_are_none(
    make_etcd: Callable[..., Etcd], tmp_path: Path
) -> None:
    """One cluster, which loses etcd, then what etcd had on its disk: an outage is followed by the next."""
    etcd = make_etcd().start()
    rng = random.Random(2)
    prompt = [rng.randrange(512) for _ in range(5 * CHUNK + 3)]
    with started(tmp_path, name="elected", **sections(etcd)) as cluster:

        def hit() -> bool:
            answer = complete(cluster.urls["proxy"], prompt)
            return answer.status == 200 and answer.cached == (5 * CHUNK, 5 * CHUNK)

        def led() -> bool:
            return "leader" in {role(cluster, f"master-{n}") for n in range(2)}

        wait_for(hit, 20, "hits")
        etcd.stop()
        wait_for(lambda: not hit(), 20, "no hit")
        wait_for(lambda: not led(), 20, "no leader")
        status = cluster_status(cluster.config)
        assert not status.well
        assert "none of 2 masters leads" in status.problems[0]
        assert "etcdctl endpoint health" in status.problems[0]
        etcd.start()
        wait_for(led, 120, "a leader again")  # before that, no prompt is worth being computed
        wait_for(hit, 120, "hits again")
        wait_for(lambda: cluster_status(cluster.config).well, 30, "the cluster being well again")
        # both masters have followed the other's log by now: neither would want to lead without it
        etcd.stop()
        etcd.wipe()
        etcd.start()
        wait_for(lambda: not hit(), 20, "no hit")
        wait_for(hit, 120, "hits although etcd knows nothing any more")
        wait_for(lambda: cluster_status(cluster.config).well, 30, "the cluster being well again")
