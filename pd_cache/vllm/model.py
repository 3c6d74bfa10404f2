"""What a model is to the cache: which weights, whether its KV can be restored, and which part of it a rank holds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from pd_cache.errors import LayoutError, UnsupportedModelError
from pd_cache.layout import KVLayout
from pd_cache.tokens import CacheMetadata, LayerGroup
from pd_cache.weights import WeightsError, weights_digest

_VOLATILE = frozenset(("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"))
"""Keys of a model's configuration that may differ between two copies of one model."""
_NO_KV_DRAFTS = frozenset(("ngram", "ngram_gpu", "suffix"))
"""Methods of speculative decoding that have no KV cache of their own."""
_RESTORED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)
"""What vLLM keeps of a group of layers that `layers.py` knows how to restore. Kinds derived from these keep something else."""


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises UnsupportedModelError, with the model's name and the reason, for anything that could give a wrong token."""
    name = vllm_config.model_config.model
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise UnsupportedModelError(f"{name}: it keeps no KV")
    specs = [group.kv_cache_spec for group in groups]
    for spec in specs:
        if type(spec) not in _RESTORED:
            known = ", ".join(one.__name__.removesuffix("Spec") for one in _RESTORED)
            hint = "; --disable-hybrid-kv-cache-manager may keep all its layers in one group" if len(groups) > 1 else ""
            raise UnsupportedModelError(
                f"{name}: its KV cache has a {type(spec).__name__}; pd-cache restores {known}{hint}"
            )
    parallel, cache, speculative = (
        vllm_config.parallel_config,
        vllm_config.cache_config,
        vllm_config.speculative_config,
    )
    reasons = {
        f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; layers on several ranks are not supported": (
            parallel.pipeline_parallel_size > 1
        ),
        "context parallelism spreads a block's tokens over ranks": (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1
        ),
        "calculate_kv_scales: the scales are found at run time and are not part of the KV": (
            getattr(cache, "calculate_kv_scales", False)
        ),
        "a draft model keeps KV of its own, which depends on more than tokens": (
            speculative is not None and speculative.method not in _NO_KV_DRAFTS
        ),
        "its tokens attend to later tokens, so that their KV depends on more than what comes before them": any(
            getattr(spec, "non_causal", False) for spec in specs
        ),
        "mamba_cache_mode is not align, in which vLLM keeps the states at the ends of blocks": any(
            isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align" for spec in specs
        ),
        "some of its layers keep KV that vLLM does not share between requests": any(
            not group.enable_kv_transfer or not group.kv_cache_spec.prefix_cacheable or group.host_resident
            for group in groups
        ),
        "vLLM itself does not reuse prefixes of its prompts": not vllm_config.model_config.is_prefix_caching_supported,
        **_limits_on_cpus(vllm_config, len(groups)),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"{name}: {reason}")


def _limits_on_cpus(vllm_config: VllmConfig, groups: int) -> dict[str, bool]:
    """Returns what vLLM's CPU backend computes wrongly once KV was loaded, or in any case, and whether that applies."""
    model, on_cpus = vllm_config.model_config, current_platform.is_cpu()
    return {
        "without AMX, vLLM's MLA on CPUs ignores the KV of earlier steps, so that what was loaded would not be used": (
            on_cpus and model.use_mla and not vllm_config.scheduler_config.enable_chunked_prefill
        ),
        "on CPUs vLLM 0.32 gives wrong tokens for its attention sinks unless sliding windows have a group of their own": (
            on_cpus and model.hf_config.model_type == "gpt_oss" and groups == 1
        ),
    }


def keeps_latents(kv_cache_config: KVCacheConfig, group: int) -> bool:
    """Returns whether a group's layers keep latents. Shapes do not tell: vLLM's tensors of latents may look like one KV head."""
    return isinstance(kv_cache_config.kv_cache_groups[group].kv_cache_spec, MLAAttentionSpec)


def model_identity(vllm_config: VllmConfig, revision: str) -> str:
    """Returns an identifier of the weights and of what else changes KV values, e.g. `LlamaForCausalLM:0123…`; equal on every node that
    has them.

    Raises UnsupportedModelError if the weights cannot be identified and no `revision` is given.
    """
    model = vllm_config.model_config
    effective = model.hf_config.to_dict()
    described: dict[str, Any] = {
        "weights": f"revision {revision}" if revision else _weights(vllm_config),
        "config": {key: value for key, value in effective.items() if key not in _VOLATILE},
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }
    if any(kind in json.dumps(effective, default=str) for kind in ("longrope", "dynamic")):
        described["max_model_len"] = model.max_model_len  # it decides which of its rotary embeddings such a model uses
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return f"{'+'.join(model.architectures)}:{digest}"


def _weights(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    folder = Path(model.model)
    try:
        if not folder.exists():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
        return weights_digest(folder)
    except (WeightsError, OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"{model.model}: cannot tell its weights from those of other models ({error}); set connector.revision to a name "
            "that changes whenever they do"
        ) from error


class RankPart(NamedTuple):
    """Which part of each chunk a rank holds."""

    metadata: CacheMetadata
    stores: bool
    """False for a rank that holds the same as a rank before it."""


def place_of(
    model: str,
    layout: KVLayout,
    name: str,
    *,
    rank: int,
    ranks: int,
    replicas: int,
    shards: int,
    latent: bool = False,
    group: LayerGroup | None = None,
) -> RankPart:
    """Returns the place of tensor-parallel rank `rank` of `ranks`, of which `replicas` in a row hold the same KV.

    A model is `latent` if its KV are latents (MLA): all ranks hold the same ones, which are not cut. Otherwise raises
    UnsupportedModelError if chunks cannot be cut into `shards` parts (0: one for each rank).
    """
    distinct = ranks // replicas
    if latent:
        shards, distinct = 1, 1
        replicas = ranks
    shards = shards or distinct
    if shards % distinct:
        raise UnsupportedModelError(
            f"{name}: cache.shards is {shards}, which {distinct} ranks with KV heads of their own cannot share evenly; make it "
            "a common multiple of all nodes' tensor-parallel sizes"
        )
    try:
        metadata = CacheMetadata.of(
            model, layout, world_size=distinct, rank=rank // replicas, shards_per_rank=shards // distinct, group=group
        )
    except LayoutError as error:
        raise UnsupportedModelError(
            f"{name}: nodes of different tensor-parallel size are to share chunks of {shards} parts, but {error}. Give all "
            "nodes the same tensor-parallel size, or choose an attention backend with the KV cache layout LBHNC (HND)"
        ) from error
    return RankPart(metadata, stores=rank % replicas == 0)
