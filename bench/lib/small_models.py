"""Small models with seeded random weights and a tokenizer of numbers, in a folder as Hugging Face lays them
out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

VOCABULARY = 4096

ModelKind = Literal["llama", "gemma3", "gptoss", "qwen3next", "mamba2", "ernie"]
"""`llama`: grouped-query attention. `gemma3` and `gptoss`: most, or half, of the layers have a sliding
window, of 256 or 128 tokens. `qwen3next` and `mamba2`: three of four layers keep a state instead of keys and
values, of a gated delta net or of Mamba-2 (a NemotronH). `ernie`: an Ernie 4.5 with dense layers."""

_CLASSES: dict[ModelKind, tuple[str, str]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gptoss": ("GptOssConfig", "GptOssForCausalLM"),
    "qwen3next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "mamba2": ("NemotronHConfig", "NemotronHForCausalLM"),
    "ernie": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
}
"""Architecture names of the package transformers."""


def write_model(
    folder: Path,
    *,
    kind: ModelKind = "llama",
    seed: int = 0,
    hidden: int = 256,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 4,
    positions: int = 16384,
) -> Path:
    """Returns the folder; the same seed gives the same weights."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,  # so large that rounding never decides which token is next
        **_own_settings(kind, hidden, layers, heads, kv_heads),
    }
    config, model = (getattr(transformers, name) for name in _CLASSES[kind])
    made = model(config(**settings))
    for name, parameter in made.named_parameters():
        # states take in every token and keep it for about a hundred tokens, so that a wrong state gives wrong
        # tokens
        if name.endswith(".A_log"):
            parameter.data.fill_(-5)
        elif name.endswith(".dt_bias"):
            parameter.data.fill_(1)
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="t0",
        eos_token="t1",
        unk_token="t2",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    ).save_pretrained(folder)
    return folder


def random_prompts(rng: random.Random, tokens: int, count: int) -> list[list[int]]:
    """Returns `count` prompts without special tokens."""
    return [[rng.randrange(10, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def _own_settings(kind: ModelKind, hidden: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Returns the settings of a kind of model that extend or replace the common settings."""

    def every(nth: int, this: str, others: str) -> list[str]:
        return [this if (index + 1) % nth == 0 else others for index in range(layers)]

    head_dim = hidden // heads
    if kind == "gemma3":
        types = every(3, "full_attention", "sliding_attention")
        return {"head_dim": head_dim, "sliding_window": 256, "layer_types": types}
    if kind == "gptoss":
        types = every(2, "full_attention", "sliding_attention")
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return {"head_dim": head_dim, "sliding_window": 128, "layer_types": types, **experts}
    if kind == "qwen3next":
        return {
            "head_dim": head_dim,
            "linear_num_key_heads": kv_heads // 2,
            "linear_num_value_heads": kv_heads // 2,
            "linear_key_head_dim": 64,  # vLLM's kernel for CPUs refuses 32
            "linear_value_head_dim": 64,
            "layer_types": every(4, "full_attention", "linear_attention"),
            "mlp_only_layers": list(range(layers - 1)),  # vLLM refuses a model that has no layer with experts
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
            "shared_expert_intermediate_size": hidden,
        }
    if kind == "mamba2":
        return {
            "initializer_range": 0.1,  # with less, attention hardly changes the output
            "head_dim": head_dim,
            "layers_block_type": every(4, "attention", "mamba"),
            "mamba_num_heads": heads // 2,
            "mamba_head_dim": head_dim,
            "ssm_state_size": head_dim,
            "n_groups": kv_heads // 2,
            "rescale_prenorm_residual": False,
        }
    if kind == "ernie":
        experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": hidden}
        return {"moe_layer_start_index": layers, **experts, "use_bias": False}
    return {}
