"""The options of all adapters: the pool, and the namespace of their values. A user writes them as keys into
the peer's JSON or YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from pd_cache.cluster import tier_problems
from pd_cache.config import (
    CacheConfig,
    LineOrEmpty,
    MasterAddress,
    MooncakeTier,
    NodeSettings,
    Seconds,
    StorageTier,
)
from pd_cache.errors import ConfigError
from pd_cache.weights import WeightsError, weights_digest
from transfer.settings import Bytes, ByteSize, Checked, TransferSettings, decode_custom


class AdapterOptions(Checked, frozen=True, kw_only=True):
    """The options that all adapters have. Only `master` is required."""

    master: MasterAddress
    """`host:port` of Mooncake's master, or `etcd://host:port;…` of elected ones."""
    host: str = "127.0.0.1"
    """The address at which the pool's other nodes reach this one."""
    transfer: TransferSettings = TransferSettings()
    """As in the cluster's file."""
    tiers: Annotated[tuple[StorageTier, ...], msgspec.Meta(min_length=1, max_length=8)] = (MooncakeTier(),)
    """As `cache.tiers` in the file."""
    namespace: LineOrEmpty = ""
    """Adapters share values only within a namespace. Other weights under the same model name need another
    namespace."""
    timeout_s: Seconds = 10.0
    """How long one task may take. After that, a load is a miss, and a store has failed."""


Options = TypeVar("Options", bound=AdapterOptions)


def read_options(given: Mapping[str, Any], kind: type[Options], where: str) -> Options:
    """Returns the options that a peer passes. Raises ConfigError for wrong options. `where` is for its
    message."""
    try:
        options = msgspec.convert(dict(given), kind, dec_hook=decode_custom)
    except msgspec.ValidationError as error:
        names = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"{where}: {error} (allowed: {names})") from None
    for path, message in tier_problems(options.tiers):
        key = f".{path[3]}" if len(path) > 3 else ""
        raise ConfigError(f"{where}.tiers[{path[2]}]{key}: {message}")
    return options


def settings_of(options: AdapterOptions) -> NodeSettings:
    """Returns the settings of a cache."""
    return NodeSettings(
        master=options.master,
        host=options.host,
        cache=CacheConfig(tiers=options.tiers),
        transfer=options.transfer,
        segment_size=int(options.transfer.segment_size),
    )


def weights_of(model: str, revision: str, where: str, *further: str) -> str | list[str]:
    """Returns what identifies a model's weights: its name and `revision`, with what is `further` known; or,
    without a revision, a digest of the weights in its folder. Raises ConfigError if there are none; the
    message suggests a `revision` in `where`."""
    if revision:
        return [model, *further, revision]
    try:
        return weights_digest(Path(model))
    except (WeightsError, OSError) as error:
        raise ConfigError(
            f"{model}: its weights cannot be identified ({error}); put a `revision` into {where}, "
            "which changes whenever they do"
        ) from error


class LMCacheOptions(AdapterOptions, frozen=True, kw_only=True):
    """`adapter_params` of the L2 adapter's JSON (`lmcache`)."""

    part_size: Bytes | None = None
    """The most bytes of an object in the pool, the same for all adapters of a namespace. A larger object of
    LMCache is cut into parts."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """How many stores, and how many loads, run at the same time."""
    capacity: Bytes = ByteSize(0)
    """How many bytes LMCache may keep in the pool before it evicts some itself, if it has an eviction policy
    for L2. 0 leaves eviction to the pool."""
