"""`kv_connector_extra_config`: which file, and which node of it, a vLLM belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pd_cache.config import (
    ClusterConfig,
    ConnectorConfig,
    DecodeNode,
    MasterNode,
    NodeSettings,
    PrefillNode,
    VllmEngineConfig,
    load_config,
)
from pd_cache.errors import ConfigError

_ROLES = {"kv_producer": ("prefill",), "kv_consumer": ("decode",), "kv_both": ("prefill", "decode")}


class ExtraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The mapping itself."""

    config_file: str
    """The cluster's YAML file."""
    node: str | None = None
    """Which of its nodes this is; needed where several could be meant."""
    host: str = "127.0.0.1"
    """Without a node: the address that the pool's other nodes reach this one at."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the connector works by."""

    node: NodeSettings
    connector: ConnectorConfig
    handoff_wait_s: float
    shards: int
    """Into how many parts a chunk's KV heads are cut; 0 for as many as this engine's ranks."""


def read_settings(extra: Mapping[str, Any], kv_role: str) -> Settings:
    """Check and read. ConfigError says what is wrong with the mapping, or with the file that it names."""
    try:
        given = msgspec.convert(dict(extra), ExtraConfig)
    except msgspec.ValidationError as error:
        names = ", ".join(ExtraConfig.__struct_fields__)
        raise ConfigError(f"kv_connector_extra_config: {error} (allowed: {names})") from None
    config = load_config(given.config_file)
    if not config.masters.ha and not any(isinstance(node, MasterNode) and node.port for node in config.nodes):
        raise ConfigError(
            f"kv_connector_extra_config.config_file: {given.config_file} does not tell the master's host and port; only "
            "`pd-cache launch` and `up` find them by themselves"
        )
    is_vllm = isinstance(config.engine, VllmEngineConfig)
    node = _node(config, given, kv_role)
    cache = config.cache
    if cache.hash_mode == "auto":
        cache = msgspec.structs.replace(cache, hash_mode="blocks")
    own = (
        NodeSettings.of(config, node)
        if node is not None
        else NodeSettings(
            master=config.master_address,
            host=given.host,
            transfer=config.transfer,
            segment_size=int(config.transfer.segment_size),
        )
    )
    return Settings(
        node=msgspec.structs.replace(own, cache=cache),
        connector=config.connector,
        handoff_wait_s=config.handoff.wait_ms / 1000,
        shards=config.shards if is_vllm else config.cache.shards,
    )


def _node(config: ClusterConfig, given: ExtraConfig, kv_role: str) -> PrefillNode | DecodeNode | None:
    nodes = [node for node in config.nodes if isinstance(node, PrefillNode | DecodeNode)]
    if given.node is not None:
        for node in nodes:
            if node.name == given.node:
                return node
        known = ", ".join(node.name for node in nodes) or "none"
        raise ConfigError(
            f"kv_connector_extra_config.node: {given.node!r}: no prefill or decode node of {given.config_file}; "
            f"there are: {known}"
        )
    fitting = [node for node in nodes if node.role in _ROLES[kv_role]]
    if len(fitting) > 1:
        names = ", ".join(node.name for node in fitting)
        raise ConfigError(f"kv_connector_extra_config.node: say which this is; {given.config_file} has {names}")
    return fitting[0] if fitting else None
