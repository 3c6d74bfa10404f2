"""Reads `kv_connector_extra_config`: the cluster's file, and which of its nodes this vLLM is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from pd_cache.cluster import (
    ENGINES,
    CacheServerNode,
    ClusterConfig,
    ConnectorConfig,
    EngineNode,
    HandoffConfig,
    MasterNode,
    VllmEngineConfig,
    load_config,
)
from pd_cache.config import CacheConfig, NodeSettings, TracingConfig
from pd_cache.errors import CacheServerError, ConfigError
from pd_cache.server.connection import server_welcome

_CONNECT_S = 10.0
"""How long a cache server may take to answer, if there is no file."""
_ROLES = {"kv_producer": ("prefill",), "kv_consumer": ("decode",), "kv_both": ENGINES}


class ExtraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of `kv_connector_extra_config`."""

    config_file: str | None = None
    """The cluster's YAML file. With a `server_url` it may be left out: the server then decides how chunks are
    named and sized."""
    server_url: Annotated[str, msgspec.Meta(pattern=r"^ipc://.+$")] | None = None
    """The address of the cache server, e.g. `ipc:///run/pd-cache.sock`. By default, that of the node's
    `cache_server`; without either, each worker has a cache of its own."""
    node: str | None = None
    """The name of this vLLM's node in the file; needed if several nodes fit."""
    host: str = "127.0.0.1"
    """The address at which other nodes of the pool reach this vLLM, if it is no node of a file."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The connector's settings, after checks."""

    node: NodeSettings
    connector: ConnectorConfig = ConnectorConfig()
    handoff_wait_s: float = HandoffConfig().wait_ms / 1000
    shards: int = 0
    """How many parts a chunk's KV heads are cut into; 0 for as many as this engine has ranks."""
    server_url: str | None = None
    """The cache server that holds this engine's cache; None for a cache in each worker."""
    tracing: TracingConfig = TracingConfig()
    role: str = "vllm"
    name: str = ""
    """The node's role and name in the file; for a vLLM that is no node of a file, as here."""


def read_settings(extra: Mapping[str, Any], kv_role: str) -> Settings:
    """Reads and checks the settings. Raises ConfigError if the mapping, or the file that it names, is wrong.

    Without a file, the server is asked. Raises ConfigError if it does not answer within 10 seconds.
    """
    try:
        given = msgspec.convert(dict(extra), ExtraConfig)
    except msgspec.ValidationError as error:
        names = ", ".join(ExtraConfig.__struct_fields__)
        raise ConfigError(f"kv_connector_extra_config: {error} (allowed: {names})") from None
    if given.config_file is None:
        return _of_server(given)
    config = load_config(given.config_file)
    node = _node(config, given, kv_role)
    server_url = given.server_url
    if server_url is None and node is not None and node.cache_server is not None:
        server = config.node(node.cache_server)
        assert isinstance(server, CacheServerNode)  # the file's checks made sure of it
        server_url = config.server_url(server)
    known = any(isinstance(node, MasterNode) and node.port for node in config.nodes)
    if server_url is None and not config.masters.ha and not known:
        raise ConfigError(
            f"kv_connector_extra_config.config_file: {given.config_file} does not give the master's port; only "
            "`pd-cache launch` and `up` can find it"
        )
    cache = config.cache
    if cache.hash_mode == "auto":
        cache = msgspec.structs.replace(cache, hash_mode="blocks")
    own = NodeSettings(
        master=config.master_address,
        host=given.host,
        transfer=config.transfer,
        segment_size=0 if server_url is not None else int(config.transfer.segment_size),
    )
    if node is not None:
        own = config.settings_of(node)
    return Settings(
        node=msgspec.structs.replace(own, cache=cache),
        connector=config.connector,
        handoff_wait_s=config.handoff.wait_ms / 1000,
        shards=config.shards if isinstance(config.engine, VllmEngineConfig) else config.cache.shards,
        server_url=server_url,
        tracing=config.tracing,
        role="vllm" if node is None else node.role,
        name="" if node is None else node.name,
    )


def _of_server(given: ExtraConfig) -> Settings:
    """Returns settings for a vLLM without a file: the server's settings and, for all others, the defaults of
    a cluster's file."""
    if given.server_url is None:
        raise ConfigError("kv_connector_extra_config: needs a config_file or a server_url")
    if given.node is not None:
        raise ConfigError("kv_connector_extra_config.node: needs a config_file")
    try:
        welcome = server_welcome(given.server_url, _CONNECT_S)
    except (CacheServerError, ValueError) as error:
        raise ConfigError(f"kv_connector_extra_config.server_url: {given.server_url}: {error}") from None
    cache = CacheConfig(
        chunk_size="auto" if welcome.may_size else welcome.chunk_size,
        hash_mode="blocks" if welcome.may_choose else welcome.hash_mode,
        hash_seed=welcome.hash_seed,
    )
    return Settings(
        node=NodeSettings(master="", host=given.host, cache=cache),
        server_url=given.server_url,
    )


def _node(config: ClusterConfig, given: ExtraConfig, kv_role: str) -> EngineNode | None:
    nodes = [node for node in config.nodes if isinstance(node, EngineNode)]
    if given.node is not None:
        for node in nodes:
            if node.name == given.node:
                return node
        known = ", ".join(node.name for node in nodes) or "none"
        raise ConfigError(
            f"kv_connector_extra_config.node: {given.node!r}: no prefill, decode or both node of {given.config_file}; "
            f"there are: {known}"
        )
    fitting = [node for node in nodes if node.role in _ROLES[kv_role]]
    if len(fitting) > 1:
        names = ", ".join(node.name for node in fitting)
        raise ConfigError(
            f"kv_connector_extra_config.node: say which this is; {given.config_file} has {names}"
        )
    return fitting[0] if fitting else None
