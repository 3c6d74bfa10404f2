"""What a peer hands over is checked at the edge."""

import pytest

from pd_cache.adapters.options import AdapterOptions, LMCacheOptions, read_options, settings_of
from pd_cache.config import LocalTier, MooncakeTier
from pd_cache.errors import ConfigError


def read(**given):
    return read_options(given, LMCacheOptions, "adapter_params")


def test_a_master_and_sections_become_settings():
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


@pytest.mark.parametrize(
    "given, complaint",
    [
        ({}, "missing required field `master`"),
        ({"master": "a:1", "thread": 2}, r"thread.*allowed: master, host"),
        ({"master": "a:1", "threads": 0}, "threads"),
        ({"master": "a:1", "timeout_s": 0}, "timeout_s"),
        ({"master": "a:1", "part_size": "much"}, "much"),
        ({"master": "a:1", "transfer": {"protocol": "smoke"}}, "protocol"),
        (
            {"master": "a:1", "tiers": [{"kind": "mooncake"}, {"kind": "mooncake"}]},
            r"tiers\[1\]: stands after {kind: mooncake}",
        ),
        ({"master": 5}, "master"),
        ({"master": ""}, "master"),
        ({"master": "nonsense"}, "master"),
        ({"master": "a b:1"}, "master"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_is_allowed(given, complaint):
    with pytest.raises(ConfigError, match=complaint) as raised:
        read(**given)
    assert str(raised.value).startswith("adapter_params")


def test_options_of_all_adapters_have_the_same_names():
    assert set(AdapterOptions.__struct_fields__) < set(LMCacheOptions.__struct_fields__)
