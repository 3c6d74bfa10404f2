"""What every adapter's own options say about the cache: a cluster's file and node, or the master's address and a few sizes. They come from JSON
on a command line, so each key and value is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pd_cache.cluster import decode_custom, load_config
from pd_cache.config import CacheConfig, NodeSettings
from pd_cache.errors import ConfigError
from transfer.settings import TransferSettings


class AdapterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options. Either `config_file` or `master`."""

    config_file: str = ""
    """A cluster's YAML file."""
    node: str = ""
    """Which of the file's nodes this is; without one, a client that gives the pool no memory."""
    master: str = ""
    """`host:port` of Mooncake's master, or `etcd://…` for elected masters."""
    host: str = "127.0.0.1"
    """The address at which the pool's other nodes reach this one."""
    transfer: TransferSettings = TransferSettings()
    """As the `transfer` section of a cluster's file."""
    cache: CacheConfig = CacheConfig()
    """As the `cache` section of a cluster's file; only its `tiers` matter here."""


def read_adapter_settings(options: Mapping[str, Any]) -> NodeSettings:
    """Returns what a cache needs to know. Raises ConfigError, which says what was given and what is allowed."""
    try:
        given = msgspec.convert(dict(options), AdapterOptions, dec_hook=decode_custom)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise ConfigError(
            f"options of the adapter: {error} (allowed: {', '.join(AdapterOptions.__struct_fields__)})"
        ) from None
    if bool(given.config_file) == bool(given.master):
        raise ConfigError("options of the adapter: give either config_file or master")
    if given.master:
        if given.node:
            raise ConfigError("options of the adapter: `node` names a node of a config_file, and there is none")
        return NodeSettings(
            master=given.master,
            host=given.host,
            cache=given.cache,
            transfer=given.transfer,
            segment_size=int(given.transfer.segment_size),
        )
    config = load_config(given.config_file)
    if given.node:
        for node in config.nodes:
            if node.name == given.node:
                return config.settings_of(node)
        known = ", ".join(node.name for node in config.nodes)
        raise ConfigError(
            f"options of the adapter: node: {given.node!r} is not in {given.config_file}; there are: {known}"
        )
    return NodeSettings(
        master=config.master_address,
        host=given.host,
        cache=config.cache,
        transfer=msgspec.structs.replace(config.transfer, segment_size=0),
    )
