"""What a peer hands over is checked at the edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pd_cache.adapters.options import AdapterOptions, LMCacheOptions, read_options, settings_of
from pd_cache.config import LocalTier, MooncakeTier
from pd_cache.errors import ConfigError


def read(**given: Any) -> LMCacheOptions:
    return read_options(given, LMCacheOptions, "adapter_params")


def test_a_master_and_sections_become_settings() -> None:
    options = read(
        master="10.0.0.1:50051",
        host="10.0.0.2",
        transfer={"staging_size": "64MiB", "segment_size": "1GiB"},
        tiers=[{"kind": "local", "capacity": "1GiB"}, {"kind": "mooncake"}],
        part_size="32MiB",
        threads=4,
    )
    settings = settings_of(options)
    assert (settings.master, settings.host, settings.segment_size) == ("10.0.0.1:50051", "10.0.0.2", 1 << 30)
    assert settings.transfer.staging_size == 64 << 20
    assert [type(tier) for tier in settings.cache.tiers] == [LocalTier, MooncakeTier]
    assert (options.part_size, options.threads) == (32 << 20, 4)


def test_a_file_and_a_node_become_settings(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "transfer: {staging_size: 48MiB}\nnodes:\n- {name: m, role: master, host: 10.0.0.1, port: 50051}\n"
        "- {name: s, role: store, host: 10.0.0.3, segment_size: 1GiB}\n"
    )
    settings = settings_of(read(config_file=str(file)))
    assert (settings.master, settings.segment_size) == ("10.0.0.1:50051", 0)
    assert settings.transfer.staging_size == 48 << 20
    settings = settings_of(read(config_file=str(file), node="s"))
    assert (settings.host, settings.segment_size) == ("10.0.0.3", 1 << 30)
    with pytest.raises(ConfigError, match=r"has no node 'x'; it has m, s"):
        settings_of(read(config_file=str(file), node="x"))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "either a config_file or a master"),
        ({"master": "a:1", "config_file": "f"}, "got both or neither"),
        ({"master": "a:1", "node": "n"}, "names a node of a config_file"),
        ({"config_file": "f", "tiers": [{"kind": "mooncake"}]}, "go with master"),
        ({"master": "a:1", "thread": 2}, r"thread.*allowed: config_file, node, master"),
        ({"master": "a:1", "threads": 0}, "threads"),
        ({"master": "a:1", "timeout_s": 0}, "timeout_s"),
        ({"master": "a:1", "part_size": "much"}, "much"),
        ({"master": "a:1", "transfer": {"protocol": "smoke"}}, "protocol"),
        (
            {"master": "a:1", "tiers": [{"kind": "mooncake"}, {"kind": "mooncake"}]},
            r"tiers\[1\]: is the second pool; say whose",
        ),
        (
            {"master": "a:1", "tiers": [{"kind": "mooncake"}, {"kind": "mooncake", "master": "a:1"}]},
            r"tiers\[1\].master: is the master of the first",
        ),
        ({"master": 5}, "master"),
        ({"master": ""}, "master"),
        ({"master": "nonsense"}, "master"),
        ({"master": "a b:1"}, "master"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_is_allowed(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        read(**given)
    assert str(raised.value).startswith("adapter_params")


def test_options_of_all_adapters_have_the_same_names() -> None:
    assert set(AdapterOptions.__struct_fields__) < set(LMCacheOptions.__struct_fields__)
