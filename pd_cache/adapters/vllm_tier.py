"""pd-cache as a secondary tier of vLLM's KV offloading: `{"type": "PdCacheTierManager", "module_path": "pd_cache.adapters.vllm_tier"}`.

vLLM's `OffloadingConnector` with its `TieringOffloadingSpec` keeps chunks in the host's memory, its primary tier, and hands them to secondary
tiers. It groups layers and gathers the shares of the tensor-parallel ranks itself. docs/vllm-tiering.md shows the settings.

Here is what needs no vLLM: what distinguishes two tiers that must not share. The class itself is loaded when vLLM asks for it by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from pd_cache.adapters.options import AdapterOptions
from pd_cache.config import LineOrEmpty
from pd_cache.errors import ConfigError
from pd_cache.weights import WeightsError, weights_digest

if TYPE_CHECKING:
    from pd_cache.adapters.vllm_tier_manager import PdCacheTierManager as PdCacheTierManager


class TierOptions(AdapterOptions, frozen=True, kw_only=True):
    """The keys of the tier's entry in `secondary_tiers`, besides vLLM's own."""

    revision: LineOrEmpty = ""
    """Stands, with the model's name, for the weights, instead of a digest of the model's files. It has to change whenever they do."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """How many jobs run at the same time in each direction."""
    locality: Literal["LOCAL", "REMOTE"] | None = "REMOTE"
    """Where requests that choose their tiers by vLLM's `load_tier_filter` find it."""


FORMAT = 1
"""The version of what a tier stores under a name. Tiers of other versions never find it."""


def __getattr__(name: str) -> object:
    if name == "PdCacheTierManager":
        from pd_cache.adapters.vllm_tier_manager import PdCacheTierManager

        return PdCacheTierManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def namespace_of(config: Any, *, row_bytes: int, blocks_per_chunk: int, revision: str, salt: str) -> str:
    """Returns a text that two tiers share exactly if a row of one may be used by the other.

    `config` is vLLM's `OffloadingConfig`, `row_bytes` what a chunk takes in the primary tier. Raises ConfigError if the model's weights cannot
    be told from others' and there is no `revision`.
    """
    parallel = config.parallel
    # in vLLM's direct layout the shares of the ranks lie one after another, each with all layers: other bytes for each number of ranks, although
    # vLLM calls them the same (is_parallelism_agnostic)
    alike = bool(config.replicated_layout or (config.canonical_layout and parallel.is_parallelism_agnostic))
    said = {
        "format": FORMAT,
        "engine": "vllm-tiering",
        "weights": [config.model.name, revision] if revision else _weights(config.model.name),
        "dtype": str(config.model.dtype),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": blocks_per_chunk,
        "row_bytes": row_bytes,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "ranks": [1] * 4 if alike else [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "replicated": bool(config.replicated_layout),
        "layout": str(config.kv_cache_layout),
        "canonical": bool(config.canonical_layout),
        "salt": salt,
    }
    return json.dumps(said, sort_keys=True)


def _weights(model: str) -> str:
    folder = Path(model)
    try:
        return weights_digest(folder)
    except (WeightsError, OSError) as error:
        raise ConfigError(
            f"{model}: cannot tell its weights from those of other models ({error}); give the tier a `revision`, "
            "which changes whenever they do"
        ) from error
