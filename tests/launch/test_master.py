"""The command of Mooncake's master."""

from __future__ import annotations

import pytest

from launch.roles import master
from pd_cache.cluster import ClusterConfig, MasterNode


@pytest.mark.parametrize(
    ("version", "flag"),
    [("0.3.13.post1", "--client_ttl=5"), ("0.3.14", "--client_active_ttl_sec=5"), ("", "--client_ttl=5")],
)
def test_the_flag_for_silent_clients_is_that_of_the_installed_version(version, flag, monkeypatch):
    monkeypatch.setattr(master, "mooncake_version", lambda: version)
    monkeypatch.setattr(master, "find_program", lambda name: f"/bin/{name}")
    node = MasterNode(name="m")
    given = master.master_command(ClusterConfig(nodes=(node,)), node)
    assert [one for one in given if one.startswith("--client")] == [flag]
