"""When a master is started anew because it and etcd differ on who leads. With a real etcd, and a clock that is ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from launch.discovery.etcd import DISAGREES_S, ElectionWatch
from tests.support.etcd import Etcd

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian's etcd-server)")
KEY, OURS = "mooncake-store/elected/master_view", "10.0.0.1:50051"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def name(etcd: Etcd, leader: str | None) -> None:
    """What an election leaves in etcd."""
    client = etcd.client()
    try:
        client.delete(KEY) if leader is None else client.put(KEY, leader)
    finally:
        client.close()


def lost(etcd: Etcd, named: str | None, leads: bool | None) -> bool:
    """Whether an election counts as lost after it looked like this for long enough; never before."""
    name(etcd, named)
    clock = Clock()
    watch = ElectionWatch(etcd.settings(), "elected", OURS, lambda: leads, clock)
    for clock.now in (0.0, 1.0):
        watch.look()
        assert not watch.lost()
    clock.now = 1.0 + DISAGREES_S
    watch.look()
    found = watch.lost()
    assert not watch.lost(), "it counts anew"
    return found


@pytest.mark.parametrize(
    ("named", "leads", "expected"),
    [
        (OURS, True, False),
        ("10.0.0.2:50051", False, False),
        (None, True, True),
        (None, False, True),
        (OURS, False, True),
        ("10.0.0.2:50051", True, True),
        (None, None, False),
    ],
    ids=[
        "leads and is named",
        "stands by, another is named",
        "leads and is not named",
        "stands by, nobody is named",
        "is named and refuses to lead",
        "leads, another is named",
        "does not answer",
    ],
)
def test_a_master_is_started_anew_if_it_and_etcd_differ(
    etcd: Etcd, named: str | None, leads: bool | None, expected: bool
) -> None:
    assert lost(etcd, named, leads) is expected


def test_a_master_is_started_anew_if_others_take_turns_to_be_named_and_none_stays(etcd: Etcd) -> None:
    clock = Clock()
    watch = ElectionWatch(etcd.settings(), "elected", OURS, lambda: False, clock)
    for clock.now in (0.0, DISAGREES_S / 2, DISAGREES_S):
        name(etcd, None)
        name(etcd, "10.0.0.2:50051")
        watch.look()
    assert watch.lost()
    watch.look()  # the last of them stays
    clock.now += DISAGREES_S
    watch.look()
    assert not watch.lost()


def test_while_etcd_is_away_no_master_is_started_anew(make_etcd: Callable[..., Etcd]) -> None:
    etcd = make_etcd().start()
    clock = Clock()
    watch = ElectionWatch(etcd.settings(), "elected", OURS, lambda: True, clock)
    watch.look()
    etcd.stop()
    clock.now = DISAGREES_S
    watch.look()
    assert not watch.lost()
