"""Small models with seeded random weights and a tokenizer of numbers, in a folder as Hugging Face lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

VOCABULARY = 4096

ModelKind = Literal["llama", "mla", "gemma3", "gptoss", "qwen3next", "mamba2"]
"""`llama`: grouped-query attention. `mla`: the latents of a DeepSeek-V3, whose layers are all dense. `gemma3` and `gptoss`: most, or half,
of the layers have a sliding window, of 256 or 128 tokens. `qwen3next` and `mamba2`: three of four layers keep a state instead of keys and
values, of a gated delta net or of Mamba-2 (a NemotronH)."""


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
    """Returns the folder; the same seed gives the same weights. Latents have the sizes of a real DeepSeek-V3, whatever `kv_heads` is."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,  # far from each other, so that rounding never decides which token is next
    }
    made = _MAKERS[kind](common, kv_heads)
    for name, parameter in made.named_parameters():
        # states that take in every token and keep it for a hundred, so that a wrong state gives wrong tokens
        if name.endswith(".A_log"):
            parameter.data.fill_(-5)
        elif name.endswith(".dt_bias"):
            parameter.data.fill_(1)
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="t0",
        eos_token="t1",
        unk_token="t2",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    ).save_pretrained(folder)
    return folder


def _llama(common: dict[str, Any], kv_heads: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=kv_heads))


def _gemma3(common: dict[str, Any], kv_heads: int) -> PreTrainedModel:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = common["num_hidden_layers"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **common,
            num_key_value_heads=kv_heads,
            head_dim=common["hidden_size"] // common["num_attention_heads"],
            sliding_window=256,
            layer_types=[_attention(sliding=(index + 1) % 3 != 0) for index in range(layers)],
        )
    )


def _gptoss(common: dict[str, Any], kv_heads: int) -> PreTrainedModel:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            **common,
            num_key_value_heads=kv_heads,
            head_dim=common["hidden_size"] // common["num_attention_heads"],
            sliding_window=128,
            layer_types=[_attention(sliding=index % 2 == 0) for index in range(common["num_hidden_layers"])],
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


def _attention(*, sliding: bool) -> str:
    return "sliding_attention" if sliding else "full_attention"


def _mla(common: dict[str, Any], _kv_heads: int) -> PreTrainedModel:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **common,
            num_key_value_heads=common["num_attention_heads"],
            kv_lora_rank=512,  # vLLM's kernels take no other sizes of a latent
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            q_lora_rank=None,
            first_k_dense_replace=common["num_hidden_layers"],
        )
    )


def _qwen3next(common: dict[str, Any], kv_heads: int) -> PreTrainedModel:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    layers, head_dim = common["num_hidden_layers"], common["hidden_size"] // common["num_attention_heads"]
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **common,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            linear_num_key_heads=kv_heads // 2,
            linear_num_value_heads=kv_heads // 2,
            linear_key_head_dim=64,  # vLLM's kernel for CPUs refuses 32
            linear_value_head_dim=64,
            layer_types=["full_attention" if index % 4 == 3 else "linear_attention" for index in range(layers)],
            mlp_only_layers=list(range(layers - 1)),  # vLLM refuses a model that has no layer with experts
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=common["hidden_size"],
            shared_expert_intermediate_size=common["hidden_size"],
        )
    )


def _mamba2(common: dict[str, Any], kv_heads: int) -> PreTrainedModel:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    layers, head_dim = common["num_hidden_layers"], common["hidden_size"] // common["num_attention_heads"]
    return NemotronHForCausalLM(
        NemotronHConfig(
            **{**common, "initializer_range": 0.1},  # with less, attention hardly changes what comes out
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            layers_block_type=["attention" if index % 4 == 3 else "mamba" for index in range(layers)],
            mamba_num_heads=common["num_attention_heads"] // 2,
            mamba_head_dim=head_dim,
            ssm_state_size=head_dim,
            n_groups=kv_heads // 2,
            rescale_prenorm_residual=False,
        )
    )


_MAKERS: dict[ModelKind, Callable[[dict[str, Any], int], PreTrainedModel]] = {
    "llama": _llama,
    "mla": _mla,
    "gemma3": _gemma3,
    "gptoss": _gptoss,
    "qwen3next": _qwen3next,
    "mamba2": _mamba2,
}
