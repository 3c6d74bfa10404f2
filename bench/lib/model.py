"""Small models with seeded random weights and a tokenizer of numbers, in a folder as Hugging Face lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import PreTrainedModel

VOCABULARY = 4096

ModelKind = Literal["llama", "mla", "gemma3", "gptoss", "qwen3next", "mamba2", "ernie"]
"""`llama`: grouped-query attention. `mla`: the latents of a DeepSeek-V3, whose layers are all dense. `gemma3` and `gptoss`: most, or half,
of the layers have a sliding window, of 256 or 128 tokens. `qwen3next` and `mamba2`: three of four layers keep a state instead of keys and
values, of a gated delta net or of Mamba-2 (a NemotronH). `ernie`: an Ernie 4.5 with dense layers."""


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


def write_eagle(folder: Path, target: Path) -> Path:
    """Returns the folder, in which there is now an EAGLE head for the Llama in the folder `target`: one whose drafts are often accepted.

    It is a copy of the Llama's layers, and ignores hidden states. So it drafts what the Llama would say if the first token were not there.
    """
    weights, config = _read(target)
    first = "layers.0.self_attn."
    scale = weights["model.embed_tokens.weight"].float().square().mean().sqrt()
    head = {}
    for name, tensor in weights.items():
        if name.startswith("model.layers.") and not name.endswith("layers.0.input_layernorm.weight"):
            name = name.removeprefix("model.")
            # vLLM gives the first layer of a head no norm
            normed = name.startswith(first) and not name.startswith(f"{first}o_proj")
            head[name] = (tensor.float() / scale).to(tensor.dtype) if normed else tensor
    head["fc.weight"] = _only_embeddings(config["hidden_size"])
    return _write(folder, head, config)


def add_mtp(folder: Path) -> Path:
    """Returns the folder, in which the `ernie` of one layer now has an MTP layer: a copy of that layer, as `write_eagle` makes one."""
    import torch

    weights, config = _read(folder)
    hidden, size = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    for name, tensor in list(weights.items()):
        if name.startswith("model.layers.0."):
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                # in vLLM the rotary embedding of an Ernie turns neighbouring numbers, and that of its MTP layer those half a head apart
                tensor = tensor.view(-1, size // 2, 2, hidden).transpose(1, 2).reshape(-1, hidden)
            weights[name.replace("layers.0", "mtp_block.0")] = tensor.clone()
    scale = weights["model.embed_tokens.weight"].float().square().mean().sqrt()
    weights["model.mtp_emb_norm.0.weight"] = torch.full((hidden,), float(scale), dtype=torch.bfloat16)
    weights["model.mtp_hidden_norm.0.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["model.mtp_linear_proj.0.weight"] = _only_embeddings(hidden)
    return _write(folder, weights, {**config, "num_nextn_predict_layers": 1})


def _only_embeddings(hidden: int) -> torch.Tensor:
    """Returns the weights of a layer that keeps the first half of its input, embeddings, and ignores the second, hidden states."""
    import torch

    return torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1).to(torch.bfloat16)


def _read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def _write(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
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


def _ernie(common: dict[str, Any], kv_heads: int) -> PreTrainedModel:
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    return Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(
            **common,
            num_key_value_heads=kv_heads,
            moe_layer_start_index=common["num_hidden_layers"],
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=common["hidden_size"],
            use_bias=False,
        )
    )


_MAKERS: dict[ModelKind, Callable[[dict[str, Any], int], PreTrainedModel]] = {
    "llama": _llama,
    "mla": _mla,
    "gemma3": _gemma3,
    "gptoss": _gptoss,
    "qwen3next": _qwen3next,
    "mamba2": _mamba2,
    "ernie": _ernie,
}
