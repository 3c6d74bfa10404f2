"""A cluster's configuration: the schema of its YAML file, the file's reader, the checks of the whole file,
and nodes' records."""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from pd_cache.cluster.checks import Problem, tier_problems
from pd_cache.cluster.reader import (
    Source,
    dump_config,
    load_config,
    parse_config,
    read_config,
    read_tenants,
)
from pd_cache.cluster.records import (
    About,
    Capacity,
    NodeRecord,
    RecordError,
    Skew,
    decode_record,
    differences,
    different_lengths,
    mooncake_skew,
    read_about,
)
from pd_cache.cluster.schema import (
    ENGINES,
    LARGEST_BODY,
    ROLES,
    SECRET_VARIABLES,
    Argument,
    CacheServerNode,
    ClusterConfig,
    ConnectorConfig,
    DecodeNode,
    EngineNode,
    EtcdDiscovery,
    HandoffConfig,
    HintsConfig,
    LimitsConfig,
    MasterNode,
    MastersConfig,
    ModelConfig,
    Node,
    PrefillNode,
    ProxyConfig,
    ProxyNode,
    RandomModel,
    ReferenceEngineConfig,
    RolesConfig,
    ServerTlsConfig,
    StoreNode,
    SupervisorConfig,
    TenantConfig,
    TlsConfig,
    VllmEngineConfig,
)
