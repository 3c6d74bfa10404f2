"""When a master is started anew because it and etcd differ on who leads. With a real etcd, and a clock that
is ours."""

from contextlib import closing

import pytest

from launch.discovery.etcd import DISAGREES_S, ElectionWatch
from tests.support.needs import needs_etcd
from tests.support.waiting import Clock

pytestmark = needs_etcd
KEY, OURS = "mooncake-store/elected/master_view", "10.0.0.1:50051"


def watched(etcd, leads):
    """The watch of a master that leads, or does not, and its clock."""
    clock = Clock()
    return ElectionWatch(etcd.settings(), "elected", OURS, lambda: leads, clock), clock


def name(etcd, leader):
    """What an election leaves in etcd."""
    with closing(etcd.client()) as client:
        client.delete(KEY) if leader is None else client.put(KEY, leader)


@pytest.mark.parametrize(
    "named, leads, expected",
    [
        pytest.param(OURS, True, False, id="leads and is named"),
        pytest.param("10.0.0.2:50051", False, False, id="stands by, another is named"),
        pytest.param(None, True, True, id="leads and is not named"),
        pytest.param(None, False, True, id="stands by, nobody is named"),
        pytest.param(OURS, False, True, id="is named and refuses to lead"),
        pytest.param("10.0.0.2:50051", True, True, id="leads, another is named"),
        pytest.param(None, None, False, id="does not answer"),
    ],
)
def test_a_master_is_started_anew_if_it_and_etcd_differ_for_long_enough(etcd, named, leads, expected):
    name(etcd, named)
    watch, clock = watched(etcd, leads)
    for clock.now in (0.0, 1.0):
        assert not watch.lost()
    clock.now = 1.0 + DISAGREES_S
    assert watch.lost() is expected
    assert not watch.lost(), "it counts anew"


def test_a_master_is_started_anew_if_others_take_turns_to_be_named_and_none_stays(etcd):
    watch, clock = watched(etcd, False)
    for clock.now in (0.0, DISAGREES_S / 2, DISAGREES_S):
        name(etcd, None)
        name(etcd, "10.0.0.2:50051")
        assert watch.lost() is (clock.now == DISAGREES_S)
    for _ in range(2):  # the last of them stays
        clock.now += DISAGREES_S
        assert not watch.lost()


def test_while_etcd_is_away_no_master_is_started_anew(make_etcd):
    etcd = make_etcd().start()
    watch, clock = watched(etcd, True)
    assert not watch.lost()
    etcd.stop()
    clock.now = DISAGREES_S
    assert not watch.lost()
