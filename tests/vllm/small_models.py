"""Small models of vLLM's architectures: their configurations, and random weights that are nowhere but in memory."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.transformers_utils.config import _CONFIG_REGISTRY

VOCABULARY = 512
_SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 4096,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    # attention
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 32, "rotary_dim": 32, "sliding_window": 128,
    # dense layers and experts
    "intermediate_size": 256, "ffn_hidden_size": 256, "ffn_dim": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64, "shared_intermediate_size": 64, "q_lora_rank": 64, "vocab_size_per_layer_input": 512,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    # states
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "mamba_num_heads": 4, "mamba_n_heads": 4, "mamba_head_dim": 64, "mamba_d_head": 64, "mamba_d_ssm": 256, "mamba_d_state": 16, "ssm_state_size": 16,
    "state_size": 16, "mamba_n_groups": 1, "n_groups": 1,
}  # fmt: skip
"""What is set of a configuration, as far as its class has a key of that name."""
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "num_shared_experts": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True,
}  # fmt: skip
_OWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "AfmoeForCausalLM": ("", {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}),
    "BailingMoeForCausalLM": ("llama", {**_EXPERTS, "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0}),
    "BailingMoeV2ForCausalLM": ("llama", {**_EXPERTS, "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0, "use_qk_norm": True}),
    "ChatGLMModel": ("chatglm", {
        "num_layers": 4, "padded_vocab_size": VOCABULARY, "kv_channels": 32, "seq_length": 4096, "multi_query_attention": True, "multi_query_group_num": 2, "original_rope": True
    }),
    "DeepseekForCausalLM": ("llama", _EXPERTS),
    "ExaoneForCausalLM": ("llama", {"layer_norm_epsilon": 1e-5, "activation_function": "silu"}),
    "InternLM2ForCausalLM": ("llama", {"bias": False}),
    "IQuestLoopCoderForCausalLM": ("qwen2", {"loop_num": 2, "loop_window_size": 64}),
    "JambaForCausalLM": ("", {"attn_layer_period": 4, "attn_layer_offset": 3}),
    "Lfm2ForCausalLM": ("", {"block_dim": 128, "conv_dim": 128}),
    "Llama4ForCausalLM": ("llama4_text", {"attention_chunk_size": 128, "intermediate_size_mlp": 256, "use_qk_norm": True}),
    "Mamba2ForCausalLM": ("", {"num_heads": 4, "head_dim": 64}),
    "MiMoForCausalLM": ("qwen2", {"num_nextn_predict_layers": 1}),
    "MiMoV2FlashForCausalLM": ("", {
        "hybrid_layer_pattern": [0, 1, 1, 0], "layernorm_epsilon": 1e-5, "moe_layer_freq": [0, 1, 1, 1], "sliding_window_size": 128, "swa_head_dim": 32,
        "swa_v_head_dim": 32, "v_head_dim": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "add_swa_attention_sink_bias": True,
    }),
    "MiniMaxM2ForCausalLM": ("", {"rotary_dim": 32, "scoring_func": "sigmoid"}),
    "MiniCPMForCausalLM": ("llama", {"scale_emb": 1, "scale_depth": 1.4, "dim_model_base": 64, "num_experts": 0}),
    "OrionForCausalLM": ("llama", {}),
    "PanguEmbeddedForCausalLM": ("llama", {"bias": True}),
    "PhiMoEForCausalLM": ("phimoe", {}),
    "Plamo3ForCausalLM": ("llama", {"layer_types": ["sliding_attention", "full_attention"] * 2, "interleaved_sliding_window": [128, None] * 2, "rope_local_theta": 10000}),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", {}),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", {}),
    "Rnj1ForCausalLM": ("gemma3_text", {}),
    "SarvamMoEForCausalLM": ("llama", {**_EXPERTS, "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0}),
    "SolarForCausalLM": ("llama", {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]}),
    "Step1ForCausalLM": ("llama", {}),
    "Step3TextForCausalLM": ("step3_text", {"tie_word_embeddings": False}),
    "Step3p5ForCausalLM": ("step3p5", {"tie_word_embeddings": False}),
    "TeleChat2ForCausalLM": ("llama", {"n_layer": 4, "n_head": 4, "ffn_hidden_size": 256, "layer_norm_epsilon": 1e-5}),
    "TeleFLMForCausalLM": ("llama", {"use_mup": False, "output_mult": 1, "mup_scale_factor": 1}),
    "Zamba2ForCausalLM": ("", {"layer_types": ["mamba", "mamba", "hybrid", "mamba"], "hybrid_layer_ids": [2]}),
}  # fmt: skip
"""By architecture: the type of its configuration, if transformers has none for it, and what is set besides."""
_PARTIAL = ("sliding_attention", "linear_attention", "mamba", "conv")
"""Kinds of layers beside which vLLM needs one with full attention."""


_KINDS = {name: kind for kind, name in reversed(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())}


def has_configuration(architecture: str) -> bool:
    return architecture in _OWN or architecture in _KINDS


def configuration(architecture: str) -> dict[str, Any]:
    """Returns the config.json of a small model. KeyError if no type of configuration is known for the architecture."""
    kind, own = _OWN.get(architecture, ("", {}))
    kind = kind or _KINDS[architecture]
    made = _CONFIG_REGISTRY[kind] if kind in _CONFIG_REGISTRY else transformers.CONFIG_MAPPING[kind]
    known = made().to_dict().keys() | made.attribute_map.keys()
    config = made(**{**{key: value for key, value in _SMALL.items() if key in known}, **own})
    described = {**config.to_dict(), "architectures": [architecture], "model_type": kind}
    types = described.get("layer_types")
    if types and set(types) <= set(_PARTIAL):
        types[-1] = "full_attention"
    return described


def fill(module: torch.nn.Module) -> None:
    """Gives each parameter random values, of which its name is the seed: all engines of a model have the same weights.

    They are large enough for each token to change what follows, which vLLM's own dummy weights are not.
    """
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            continue
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        last = name.rpartition(".")[2]
        if last in ("A", "A_log"):  # states that keep a token for about a hundred others
            values = torch.full_like(values, -0.01 if last == "A" else -5)
        elif last == "dt_bias":
            values = torch.ones_like(values)
        elif tensor.dim() < 2:
            values = values * 0.1 + ("norm" in name and last == "weight")
        else:
            values *= 1.5 / tensor.shape[-1] ** 0.5
        tensor.copy_(values)
