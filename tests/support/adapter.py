"""Small LoRA adapters with seeded random weights, as PEFT writes them."""

import json


def write_adapter(folder, model, seed):
    """Returns the folder of an adapter of a Llama's attention; the same seed gives the same weights. They are
    large enough to change tokens."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    keys = hidden // heads * config["num_key_value_heads"]
    random = torch.Generator().manual_seed(seed)
    tensors, rank = {}, 8
    for layer in range(config["num_hidden_layers"]):
        for name, out in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            tensors[f"{place}.lora_A.weight"] = torch.randn((rank, hidden), generator=random) * 0.1
            tensors[f"{place}.lora_B.weight"] = torch.randn((out, rank), generator=random) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
