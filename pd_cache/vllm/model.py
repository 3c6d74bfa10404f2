"""Answers the cache's questions about a model: which weights it has, whether its KV can be restored, which
part of the KV a rank has, and which settings fit."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from pd_cache.chunks import CacheMetadata, LayerGroup, describe_hashes
from pd_cache.errors import ConfigError, LayoutError, UnsupportedModelError
from pd_cache.layout import KVLayout, PageKind
from pd_cache.vllm.layers import NO_DRAFT, DraftLayers, KeptLayers, fitting_chunk, specs_of
from pd_cache.vllm.settings import Settings
from pd_cache.weights import WeightsError, weights_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_VOLATILE = frozenset(("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"))
"""Keys of a model's configuration that may differ between two copies of the same model."""
_NO_KV_DRAFTS = frozenset(("ngram", "ngram_gpu", "suffix"))
"""Methods of speculative decoding that have no KV cache of their own."""
_READS_NEXT = frozenset(("eagle", "eagle3", "mtp", "dflash", "dspark"))
"""Methods whose draft model computes a token's KV from the model's hidden state of this token and, except for
DFlash and DSpark, from the token after it."""
_READS_SAME = frozenset(("draft_model",))
"""Methods whose draft model is a language model like any other."""
_RESTORED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec, MambaSpec)
"""vLLM's kinds of KV cache that `layers.py` can restore. Classes derived from these keep something else, and
are refused."""


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises UnsupportedModelError, with the model's name and the reason, if anything about the model could
    give a wrong token."""
    model, name = vllm_config.model_config, vllm_config.model_config.model
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise UnsupportedModelError(f"{name}: it keeps no KV")
    specs = {layer: spec for group in groups for layer, spec in specs_of(group).items()}
    for layer, spec in specs.items():
        if type(spec) not in _RESTORED:
            known = ", ".join(kind.__name__.removesuffix("Spec") for kind in _RESTORED)
            every = (
                "; with --disable-hybrid-kv-cache-manager, the layer keeps every token, and can be restored"
            )
            hint = every if isinstance(spec, ChunkedLocalAttentionSpec) else ""
            raise UnsupportedModelError(
                f"{name}: its layer {layer} has a {type(spec).__name__}; pd-cache restores {known}{hint}"
            )
    parallel = vllm_config.parallel_config
    unshared = [
        layer
        for group in groups
        if not group.enable_kv_transfer or not group.kv_cache_spec.prefix_cacheable or group.host_resident
        for layer in group.layer_names
    ]
    reasons = {
        "context parallelism spreads a block's tokens over ranks": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "enable_fault_tolerance: vLLM goes on without the outputs of failed steps, which report the stores that have ended": (
            parallel.enable_fault_tolerance
        ),
        "enable_sleep_mode: loads and stores would go on while vLLM sleeps": model.enable_sleep_mode,
        "its tokens attend to later tokens, so that their KV depends on more than what comes before them": any(
            getattr(spec, "non_causal", False) for spec in specs.values()
        ),
        "mamba_cache_mode is not align, in which vLLM keeps the states at the ends of blocks": any(
            isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align" for spec in specs.values()
        ),
        "with prefix_match_unit, vLLM shares states of this kind under the names of longer prefixes; leave it out": any(
            isinstance(spec, MambaSpec)
            and spec.num_prefill_checkpoint_blocks > 0
            and (kv_cache_config.hash_block_size or spec.block_size) < spec.block_size
            for spec in specs.values()
        ),
        f"its layer {''.join(unshared[:1])} keeps KV that vLLM does not share between requests": bool(
            unshared
        ),
        "vLLM itself does not reuse prefixes of its prompts": (
            not model.is_prefix_caching_supported
            # with states alone (Mamba-2), vLLM does so if --enable-prefix-caching says so
            and not (model.is_attention_free and model.pooler_config is None)
        ),
        "without AMX, vLLM's MLA on CPUs ignores the KV of earlier steps, and would ignore loaded KV": (
            current_platform.is_cpu()
            and model.use_mla
            and not vllm_config.scheduler_config.enable_chunked_prefill
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"{name}: {reason}")
    draft_layers(vllm_config, kv_cache_config)


def draft_layers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> DraftLayers:
    """Returns the layers of the draft model; `NO_DRAFT` if there is no draft model, or if it keeps no KV.

    Raises UnsupportedModelError if the KV of the draft model cannot be restored, or if its layers look like
    the model's.
    """
    speculative, name = vllm_config.speculative_config, vllm_config.model_config.model
    if speculative is None or speculative.method in _NO_KV_DRAFTS:
        return NO_DRAFT
    method = speculative.method
    reasons = {
        f"speculative decoding by {method}: pd-cache does not know what its KV depends on; it restores that of "
        f"{', '.join(sorted(_READS_NEXT | _READS_SAME))}": method not in _READS_NEXT | _READS_SAME,
        "its MTP layers read the KV of the model itself, or positions of their own": (
            speculative.use_gemma4_mtp() or speculative.use_step3p5_mtp()
        ),
        "a draft model with pipeline stages: only the last stage has its layers": (
            vllm_config.parallel_config.pipeline_parallel_size > 1
        ),
        "states with a draft model: vLLM keeps the KV and the states up to different places": any(
            isinstance(spec, MambaSpec)
            for group in kv_cache_config.kv_cache_groups
            for spec in specs_of(group).values()
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModelError(f"{name}: {reason}")
    layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    names = [layer for group in kv_cache_config.kv_cache_groups for layer in group.layer_names]
    drafted = frozenset(layer for layer in names if _drafts(layer, method, layers))
    # vLLM numbers a draft model's layers after those of the model, or gives their names a prefix of their own
    if not drafted or not 0 < len(names) - len(drafted) <= layers:
        raise UnsupportedModelError(
            f"{name}: the layers of its draft model ({method}) look like its own {layers} layers: {', '.join(sorted(names))}"
        )
    return DraftLayers(drafted, "next" if method in _READS_NEXT else "same")


def drafted_up_to(vllm_config: VllmConfig) -> int | None:
    """Returns the most tokens that a request may have in a step with the draft model. If a request has more,
    vLLM skips the draft model in that step. None without a draft model."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return None
    longest = min(speculative.draft_model_config.max_model_len, vllm_config.model_config.max_model_len)
    return int(longest - speculative.num_speculative_tokens)


def _drafts(layer: str, method: str, layers: int) -> bool:
    """Returns whether this is a layer of the draft model. The model itself has `layers` layers."""
    if method in _READS_SAME:
        return layer.startswith("draft_model.")
    number = re.search(r"\blayers\.(\d+)\b", layer)
    return layer.startswith("mtp.") or (number is not None and int(number[1]) >= layers)


def model_identity(vllm_config: VllmConfig, revision: str) -> str:
    """Returns an identifier of the weights, and of everything else that changes KV values, e.g.
    `LlamaForCausalLM:0123…`.

    Nodes with the same weights and settings get the same identifier. Raises UnsupportedModelError if the
    weights cannot be identified and no `revision` is given.
    """
    model = vllm_config.model_config
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE}
    media = model.multimodal_config
    prepared = {} if media is None or not media.mm_processor_kwargs else {"media": media.mm_processor_kwargs}
    return _identity(model, revision, vllm_config.cache_config.cache_dtype, config=config, **prepared)


def drafter_identity(vllm_config: VllmConfig, revision: str) -> str:
    """Returns an identifier of the draft model's weights, and of everything else that changes its KV.

    Two settings are left out. The number of drafted tokens does not change the stored KV. vLLM raises the
    number of positions in the configuration to the length that the node serves. Raises UnsupportedModelError
    for the same reason as `model_identity`.
    """
    speculative = vllm_config.speculative_config
    kv_cache_dtype = speculative.kv_cache_dtype or vllm_config.cache_config.cache_dtype
    return _identity(speculative.draft_model_config, revision, kv_cache_dtype, method=speculative.method)


def hashes_media(vllm_config: VllmConfig) -> bool:
    """Returns whether vLLM names images by a hash of their content, unless the client names them. If both
    caches that need such names are off, vLLM numbers images (`_process_mm_uuids` in its
    `renderers/base.py`)."""
    media = vllm_config.model_config.multimodal_config
    return vllm_config.cache_config.enable_prefix_caching or (
        media is not None and media.mm_processor_cache_gb > 0
    )


def adapter_settings(vllm_config: VllmConfig) -> str:
    """Returns the engine's settings that change the KV that it computes with a LoRA adapter."""
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    described = {
        "dtype": str(lora.lora_dtype),
        "modules": sorted(lora.target_modules or ()),
        "towers": lora.enable_tower_connector_lora,
    }
    return json.dumps(described, sort_keys=True)


def _identity(model: ModelConfig, revision: str, kv_cache_dtype: object, **more: object) -> str:
    described: dict[str, object] = {
        "weights": f"revision {revision}" if revision else _weights(model),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": str(kv_cache_dtype),
        **more,
    }
    if any(kind in json.dumps(model.hf_config.to_dict(), default=str) for kind in ("longrope", "dynamic")):
        # such a model chooses its rotary embeddings by this length
        described["max_model_len"] = model.max_model_len
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return f"{'+'.join(model.architectures)}:{digest}"


def _weights(model: ModelConfig) -> str:
    folder = Path(model.model)
    try:
        if not folder.exists():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
        return weights_digest(folder)
    except (WeightsError, OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"{model.model}: its weights cannot be identified ({error}); set connector.revision to a name "
            "that changes whenever they do"
        ) from error


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
) -> tuple[CacheMetadata, bool]:
    """Returns which part of each chunk the tensor-parallel rank `rank` of `ranks` has, and whether it stores
    this part.

    `replicas` adjacent ranks have the same KV; the first of them stores it. A chunk is cut into `shards`
    shards; 0 means one for each rank with KV of its own. If the layers keep `latent` KV (MLA), all ranks have
    the same KV: it is not cut, and `shards` is ignored. Raises UnsupportedModelError if chunks cannot be cut
    into `shards` shards.
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
            model,
            layout,
            world_size=distinct,
            rank=rank // replicas,
            shards_per_rank=shards // distinct,
            group=group,
        )
    except LayoutError as error:
        why = f"{error}. Give all nodes the same tensor-parallel size, or choose an attention backend with the KV cache layout LBHNC (HND)"
        if layout.kind is PageKind.OPAQUE and group is not None:
            why = f"what its layers {group.layers} keep cannot be cut into parts of heads. Such a model's nodes share chunks if all have one "
            why += "tensor-parallel size. Leave cache.shards out, and give nodes of another size a file of their own"
        raise UnsupportedModelError(
            f"{name}: nodes of different tensor-parallel size cannot share chunks of {shards} parts: {why}"
        ) from error
    return metadata, rank % replicas == 0


def fitted(
    settings: Settings, vllm_config: VllmConfig, layers: Sequence[KeptLayers], hash_block_size: int
) -> Settings:
    """Returns settings with a chunk size that fits the model's blocks, and a hash seed that describes vLLM's
    block hashes. With `--enable-return-routed-experts`, loads end with a block.

    `hash_block_size` is the number of tokens of each hash. Raises ConfigError if `cache.chunk_size` does not
    fit, or if hashes depend on a seed that is random in each process.
    """
    cache = settings.node.cache
    cache = msgspec.structs.replace(cache, chunk_size=fitting_chunk(cache.chunk_size, layers))
    if cache.hash_mode == "blocks":
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
            raise ConfigError(
                f"prefix_caching_hash_algo is {algorithm}, for which vLLM draws a random seed in every process: no other node "
                "could ever find a chunk. Set PYTHONHASHSEED to the same value everywhere, use sha256, or set cache.hash_mode to tokens"
            )
        seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
        step = None if hash_block_size == layers[0].block_size else hash_block_size
        described = describe_hashes(algorithm, seed, cache.hash_seed, step)
        cache = msgspec.structs.replace(cache, hash_seed=described)
    connector = settings.connector
    if vllm_config.aux_output_config.enabled:
        # vLLM 0.33 does not load a hit that does not end with a block (`cap_external_hit`), because it keeps
        # routed experts for whole blocks
        connector = msgspec.structs.replace(connector, recompute="block")
    node = msgspec.structs.replace(settings.node, cache=cache)
    return msgspec.structs.replace(settings, node=node, connector=connector)
