"""What a machine's kernel says of its links."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lib.link import link_of
from transfer.settings import TransferSettings


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """With the interface that 127.0.0.1 is on, `lo`, as of yet without anything under it."""
    (tmp_path / "net" / "lo").mkdir(parents=True)
    (tmp_path / "net" / "lo" / "speed").write_text("25000\n")
    return tmp_path


def test_a_device_tells_its_speed(sysfs: Path) -> None:
    (sysfs / "net" / "lo" / "device").mkdir()
    assert link_of("127.0.0.1", TransferSettings(), sysfs) == ("lo", 25.0)


def test_a_virtual_interface_is_not_believed(sysfs: Path) -> None:
    assert link_of("127.0.0.1", TransferSettings(), sysfs) == ("lo", None)


def test_a_bond_of_devices_is_believed(sysfs: Path) -> None:
    (sysfs / "net" / "eth7" / "device").mkdir(parents=True)
    (sysfs / "net" / "lo" / "lower_eth7").symlink_to("../eth7")
    assert link_of("127.0.0.1", TransferSettings(), sysfs) == ("lo", 25.0)


@pytest.mark.parametrize("speed", ["-1\n", "", "fast\n"])
def test_a_device_that_does_not_know_its_speed(sysfs: Path, speed: str) -> None:
    (sysfs / "net" / "lo" / "device").mkdir()
    (sysfs / "net" / "lo" / "speed").write_text(speed)
    assert link_of("127.0.0.1", TransferSettings(), sysfs).gbit is None


def test_an_address_that_no_interface_has(sysfs: Path) -> None:
    assert link_of("198.51.100.7", TransferSettings(), sysfs) == ("198.51.100.7", None)


def _device(sysfs: Path, name: str, **ports: str) -> None:
    for port, rate in ports.items():
        folder = sysfs / "infiniband" / name / "ports" / port[1:]
        folder.mkdir(parents=True)
        (folder / "rate").write_text(f"{rate}\n")
        (folder / "state").write_text("4: ACTIVE\n" if rate[0] != "0" else "1: DOWN\n")


def test_rdma_devices_add_up_over_their_ports_that_are_up(sysfs: Path) -> None:
    _device(sysfs, "mlx5_0", p1="100 Gb/sec (4X EDR)")
    _device(sysfs, "mlx5_1", p1="400 Gb/sec (4X NDR)", p2="0 Gb/sec")
    _device(sysfs, "mlx5_2", p1="200 Gb/sec (4X HDR)")
    chosen = TransferSettings(protocol="rdma", devices=("mlx5_0", "mlx5_1"))
    assert link_of("127.0.0.1", chosen, sysfs) == ("mlx5_0, mlx5_1", 500.0)
    assert link_of("127.0.0.1", TransferSettings(protocol="rdma"), sysfs).gbit == 700.0


def test_an_rdma_device_that_is_not_there_leaves_the_rate_open(sysfs: Path) -> None:
    _device(sysfs, "mlx5_0", p1="100 Gb/sec (4X EDR)")
    chosen = TransferSettings(protocol="rdma", devices=("mlx5_0", "mlx5_9"))
    assert link_of("127.0.0.1", chosen, sysfs).gbit is None
