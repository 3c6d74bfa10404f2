"""The one YAML file that describes a cluster: its schema, the checks over all of it, and its reader."""

from __future__ import annotations

from pd_cache.config.checks import KeyPath, Problem, consistency_problems
from pd_cache.config.reader import Source, decode_custom, dump_config, load_config, read_config
from pd_cache.config.schema import (
    ROLES,
    CacheConfig,
    CacheServerNode,
    ClusterConfig,
    DecodeNode,
    EngineConfig,
    EngineNode,
    HandoffConfig,
    MasterNode,
    ModelConfig,
    MooncakeTier,
    Node,
    NodeSettings,
    PrefillNode,
    ProxyConfig,
    ProxyNode,
    RandomModel,
    ReferenceEngineConfig,
    StoreNode,
    SupervisorConfig,
)

__all__ = [
    "ROLES",
    "CacheConfig",
    "CacheServerNode",
    "ClusterConfig",
    "DecodeNode",
    "EngineConfig",
    "EngineNode",
    "HandoffConfig",
    "KeyPath",
    "MasterNode",
    "ModelConfig",
    "MooncakeTier",
    "Node",
    "NodeSettings",
    "PrefillNode",
    "Problem",
    "ProxyConfig",
    "ProxyNode",
    "RandomModel",
    "ReferenceEngineConfig",
    "Source",
    "StoreNode",
    "SupervisorConfig",
    "consistency_problems",
    "decode_custom",
    "dump_config",
    "load_config",
    "read_config",
]
