"""When a master is started anew because it and etcd differ on who leads. With a real etcd, and a clock that is ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from launch.discovery.election import DISAGREES_S, ElectionWatch
from tests.support.etcd import Etcd

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian's etcd-server)")
KEY, OURS = "mooncake-store/elected/master_view", "10.0.0.1:50051"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lost(etcd: Etcd, named: str | None, leads: bool | None) -> bool:
    """Whether an election counts as lost after it looked like this for long enough; never before."""
    client = etcd.client()
    try:
        client.delete(KEY) if named is None else client.put(KEY, named)
    finally:
        client.close()
    clock = Clock()
    watch = ElectionWatch(etcd.settings(), "elected", OURS, lambda: leads, clock)
    watch.look()
    assert not watch.lost
    clock.now = DISAGREES_S
    watch.look()
    found = watch.lost
    watch.begin_anew()
    assert not watch.lost
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


def test_while_etcd_is_away_no_master_is_started_anew(make_etcd: Callable[..., Etcd]) -> None:
    etcd = make_etcd().start()
    clock = Clock()
    watch = ElectionWatch(etcd.settings(), "elected", OURS, lambda: True, clock)
    watch.look()
    etcd.stop()
    clock.now = DISAGREES_S
    watch.look()
    assert not watch.lost
