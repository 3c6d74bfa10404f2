"""Draft models for those of `bench.lib.small_models`, made of their own layers, so that their drafts are
often accepted."""

import json

import torch
from safetensors.torch import load_file, save_file


def write_eagle(folder, target):
    """Returns the folder, in which there is now an EAGLE head for the Llama in the folder `target`: one whose
    drafts are often accepted.

    It is a copy of the Llama's layers, and ignores hidden states. So it drafts what the Llama would say if
    the first token were not there.
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


def add_mtp(folder):
    """Returns the folder, in which the `ernie` of one layer now has an MTP layer: a copy of that layer, as
    `write_eagle` makes one."""
    weights, config = _read(folder)
    hidden, size = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    for name, tensor in list(weights.items()):
        if name.startswith("model.layers.0."):
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                # in vLLM the rotary embedding of an Ernie turns neighbouring numbers, and that of its MTP
                # layer those half a head apart
                tensor = tensor.view(-1, size // 2, 2, hidden).transpose(1, 2).reshape(-1, hidden)
            weights[name.replace("layers.0", "mtp_block.0")] = tensor.clone()
    scale = weights["model.embed_tokens.weight"].float().square().mean().sqrt()
    weights["model.mtp_emb_norm.0.weight"] = torch.full((hidden,), float(scale), dtype=torch.bfloat16)
    weights["model.mtp_hidden_norm.0.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["model.mtp_linear_proj.0.weight"] = _only_embeddings(hidden)
    return _write(folder, weights, {**config, "num_nextn_predict_layers": 1})


def _only_embeddings(hidden):
    """Returns the weights of a layer that keeps the first half of its input, embeddings, and ignores the
    second, hidden states."""
    return torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1).to(torch.bfloat16)


def _read(folder):
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def _write(folder, weights, config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
